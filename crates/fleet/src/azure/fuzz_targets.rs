//! Entry points for the fuzzer: the cluster file, the output of `az`, the output of a script on a machine.

use std::path::Path;

use serde_json::Value;

use super::{Cluster, EXAMPLE, Files, Mode, destroy::plan_removal, inventory, nodes::ScriptOutput, plan::plan};

/// Returns the number of words in the plan; `None` if the file is rejected.
pub fn cluster(text: &str, name: &str) -> Option<usize> {
    let cluster = Cluster::parse(text, Path::new(name), None).ok()?;
    argument_count(&cluster, &inventory::Inventory::default())
}

fn argument_count(cluster: &Cluster, seen: &inventory::Inventory) -> Option<usize> {
    let plan = plan(cluster, seen, &Files { folder: "files".into() }).ok()?;
    Some(plan.steps.iter().flat_map(|step| &step.calls).map(|call| call.args().len()).sum())
}

/// Parses all outputs of `az`. Returns the number of words in the resulting plan, and of resources to delete.
pub fn az_output(text: &str, uniform: bool) -> Option<(usize, usize)> {
    let mut cluster = Cluster::parse(EXAMPLE, Path::new("cluster.toml"), None).ok()?;
    if uniform {
        (cluster.mode, cluster.head_address) = (Mode::Uniform, false);
    }
    let parts: Vec<Value> = serde_json::from_str(text).ok()?;
    let part = |index: usize| parts.get(index).cloned().unwrap_or(Value::Null);
    let seen = inventory::Inventory {
        group: inventory::group(part(0), &cluster).ok()?,
        resources: inventory::resources(part(1), &cluster).ok()?,
        ssh_from: inventory::ssh_from(&part(2), "ssh").ok()?,
        balancer: inventory::balancer(&part(3), "ssh", "out").ok()?,
        scale_set: Some(inventory::scale_set(&part(4), "cluster-doctor-hosts").ok()?),
        nodes: inventory::nodes(part(5), part(6), &cluster).ok()?,
    };
    Some((argument_count(&cluster, &seen)?, plan_removal(&cluster, &seen).steps.len()))
}

/// Returns the host key in a script's output.
pub fn host_key(text: &str) -> Option<String> {
    let response: Value = serde_json::from_str(text).ok()?;
    let output = ScriptOutput::parse(&response);
    if output.complete { output.key("host") } else { None }
}
