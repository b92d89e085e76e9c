//! Entry points for the fuzzer: the cluster file, the output of `az`, the output of a script on a machine.

use std::path::Path;

use serde_json::Value;

use super::{Cluster, EXAMPLE, Files, Mode, destroy::removal, nodes::Said, plan::plan, seen};

/// Returns the number of words in the plan; `None` if the file is rejected.
pub fn cluster(text: &str, name: &str) -> Option<usize> {
    let cluster = Cluster::read(text, Path::new(name), None).ok()?;
    words(&cluster, &seen::Seen::default())
}

fn words(cluster: &Cluster, seen: &seen::Seen) -> Option<usize> {
    let plan = plan(cluster, seen, &Files { folder: "files".into() }).ok()?;
    Some(plan.steps.iter().flat_map(|step| &step.calls).map(|call| call.words().len()).sum())
}

/// Parses all outputs of `az`. Returns the number of words in the resulting plan, and of resources to delete.
pub fn answers(text: &str, uniform: bool) -> Option<(usize, usize)> {
    let mut cluster = Cluster::read(EXAMPLE, Path::new("cluster.toml"), None).ok()?;
    if uniform {
        (cluster.mode, cluster.head_address) = (Mode::Uniform, false);
    }
    let parts: Vec<Value> = serde_json::from_str(text).ok()?;
    let part = |place: usize| parts.get(place).cloned().unwrap_or(Value::Null);
    let seen = seen::Seen {
        group: seen::group(part(0), &cluster).ok()?,
        resources: seen::resources(part(1), &cluster).ok()?,
        ssh_from: seen::ssh_from(&part(2), "ssh").ok()?,
        balancer: seen::balancer(&part(3), "ssh", "out").ok()?,
        scale_set: Some(seen::scale_set(&part(4), "cluster-doctor-hosts").ok()?),
        nodes: seen::nodes(part(5), part(6), &cluster).ok()?,
    };
    Some((words(&cluster, &seen)?, removal(&cluster, &seen).steps.len()))
}

/// Returns the host key in a script's output.
pub fn key_said(text: &str) -> Option<String> {
    let answer: Value = serde_json::from_str(text).ok()?;
    let said = Said::of(&answer);
    if said.whole { said.key("host") } else { None }
}
