//! imex: does NVIDIA's IMEX service run where this site uses it?
//!
//! What it does: where IMEX is configured (a node is listed in `/etc/nvidia-imex/nodes_config.cfg`, or `required` is
//! set), looks for the process `nvidia-imex`.
//!
//! Why it matters: on GB200 and GB300 racks, IMEX lets GPUs of different nodes map each other's memory over NVLink. If
//! it is down on one node, multi-node jobs fail at start (`cuMemImportFromShareableHandle`), with an error that names
//! neither the node nor the service.
//!
//! What to do: `imex-down` is `reboot`, confirmed by a second failure. `systemctl restart nvidia-imex` cures it without
//! a reboot; `nvidia-imex-ctl -N` shows the whole domain, `/var/log/nvidia-imex.log` the cause. All nodes of a domain
//! need the same list of nodes.
//!
//! Parameters: `required = true` expects the service also without that file, `required = false` never expects it. Not
//! applicable where IMEX is not configured: most machines have the package and do not use it, and an unused service is
//! not a fault (DCGM reported such nodes as unhealthy for 13 days). Domains that Kubernetes creates on demand are not
//! covered.

use doctor_core::observation::{Entity, EntityKind, Event, FailureKind, Metric, Observation};

use crate::{
    files::file_text,
    gpu::not_applicable,
    host_processes::{host_processes, is_running},
    probe::{Probe, ProbeOutput},
    check_params::invalid_param,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("imex", "whether IMEX is running where it is used");

const RULES: &str = r#"
rules = [
  { id = "imex-down", check = "imex", event = "imex-down", reason = "imex-down", severity = "reboot", confirm = 2,
    text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("imex.rs")), rules: RULES, probes, interpret };

const CONFIG: &str = "/etc/nvidia-imex/nodes_config.cfg";
const PROCESS_NAME: &str = "nvidia-imex";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::read(CONFIG), Probe::Processes]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let required = match params.get("required").map(toml::Value::as_bool) {
        None => None,
        Some(Some(required)) => Some(required),
        Some(None) => return invalid_param("required", "required = true"),
    };
    let listed = match (required, file_text(outputs.first())) {
        (Some(false), _) => return not_applicable("not-configured", "not required here (required = false)"),
        (_, Ok(config)) => listed_nodes(config),
        (_, Err(failure)) if failure.kind == FailureKind::Missing => 0,
        (Some(true), Err(_)) => 0,
        (None, Err(failure)) => return Observation::Failed(failure),
    };
    if required.is_none() && listed == 0 {
        return not_applicable("not-configured", format!("IMEX is not in use: {CONFIG} lists no node"));
    }
    let processes = match host_processes(outputs.get(1)) {
        Ok(processes) => processes,
        Err(failure) => return Observation::Failed(failure),
    };
    let entity = Entity::new(EntityKind::Service, PROCESS_NAME);
    let metric = Metric::count("imex_nodes", entity.clone(), listed as f64);
    let text = format!("{PROCESS_NAME} is not running and IMEX is in use; nodes in its configuration: {listed}");
    let down = (!is_running(processes, PROCESS_NAME)).then(|| Event::seen("imex-down", entity, text));
    Observation::measured(vec![metric], down.into_iter().collect())
}

/// Counts the lines that name a node: neither empty nor a comment.
fn listed_nodes(config: &str) -> usize {
    config.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        host_processes::tests::{process, running},
        classify_fixture::{classify_outputs, classify_outputs_with},
    };
    use doctor_core::observation::ProbeFailure;
    use proptest::prelude::*;

    fn config(text: &str) -> ProbeOutput {
        ProbeOutput::Text(text.to_owned())
    }

    fn failed(kind: FailureKind) -> ProbeOutput {
        ProbeOutput::Failed(ProbeFailure::new(kind, "no"))
    }

    fn required(value: impl Into<toml::Value>) -> Params {
        [("required".to_owned(), value.into())].into()
    }

    const LISTED: &str = "10.0.0.1\n10.0.0.2\n";
    const DOWN: [&str; 1] = ["fail imex-down reboot service:nvidia-imex"];

    #[test]
    fn imex_that_is_required_and_down_is_reported() {
        let up = running(&[process(77, "nvidia-imex", 'S')]);
        assert_eq!(classify_outputs(&CHECK, &[config(LISTED), up.clone()]), ["pass within-limits"]);
        assert_eq!(classify_outputs(&CHECK, &[config(LISTED), running(&[])]), DOWN);
        let missing = failed(FailureKind::Missing);
        assert_eq!(classify_outputs_with(&CHECK, &required(true), None, &[missing.clone(), running(&[])]), DOWN);
        assert_eq!(classify_outputs_with(&CHECK, &required(true), None, &[missing, up]), ["pass within-limits"]);
    }

    // aicr #2641, DCGM #308: an alarm of 13 days about an unused service.
    #[test]
    fn imex_where_it_is_unused_never_fails() {
        for unused in [config(""), config("# 10.0.0.1\n\n"), failed(FailureKind::Missing)] {
            assert_eq!(classify_outputs(&CHECK, &[unused, running(&[])]), ["not-applicable not-configured"]);
        }
        let params = required(false);
        assert_eq!(
            classify_outputs_with(&CHECK, &params, None, &[config(LISTED), running(&[])]),
            ["not-applicable not-configured"]
        );
    }

    #[test]
    fn an_unreadable_input_does_not_pass() {
        assert_eq!(classify_outputs(&CHECK, &[failed(FailureKind::Denied), running(&[])]), ["inconclusive denied"]);
        assert_eq!(classify_outputs(&CHECK, &[config(LISTED), failed(FailureKind::TimedOut)]), ["inconclusive timed-out"]);
        let params = required("yes");
        assert_eq!(classify_outputs_with(&CHECK, &params, None, &[config(LISTED), running(&[])]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(.{0,30}\n){0,6}") {
            classify_outputs(&CHECK, &[config(&text), running(&[])]);
        }
    }
}
