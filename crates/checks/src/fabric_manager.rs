//! fabric-manager: does NVIDIA's fabric manager run on a machine with NVSwitches?
//!
//! What it does: where `/dev` has NVSwitches (`nvidia-nvswitch0`, …), looks for the process `nv-fabricmanager`.
//!
//! Why it matters: on HGX machines the fabric manager sets up the routes between GPUs. Without it CUDA does not start
//! on any GPU of the node (`cudaErrorSystemNotReady`, error 802); if it died later, the node runs until the next GPU
//! reset and then fails. One site did not notice for 20 days, because nothing monitored it.
//!
//! What to do: `fabric-manager-down` is `reboot`, confirmed by a second failure. Before that, try
//! `systemctl restart nvidia-fabricmanager` on a drained node and read `/var/log/fabricmanager.log`. The usual cause is
//! a version mismatch with the driver: both must have exactly the same version (`nv-fabricmanager --version`,
//! `nvidia-smi`). AWS's suite recommends a reset; a reset does not start a service.
//!
//! Not applicable where there is no NVSwitch in `/dev`: PCIe boards, NVLink bridges, GB200 trays (their switches are in
//! other trays), B200 machines and virtual machines whose host keeps the switches. `gpu-fabric` reports the fabric
//! state of each GPU.

use doctor_core::observation::{Entity, EntityKind, Event, FailureKind, Metric, Observation, ProbeFailure};

use crate::{
    gpu::not_applicable,
    host_processes::{host_processes, is_running},
    nvswitch::switches,
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("fabric-manager", "whether the NVIDIA fabric manager is running");

const RULES: &str = r#"
rules = [
  { id = "fabric-manager-down", check = "fabric-manager", event = "fabric-manager-down",
    reason = "fabric-manager-down", severity = "reboot", confirm = 2, text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("fabric_manager.rs")), rules: RULES, probes, interpret };

const PROCESS_NAME: &str = "nv-fabricmanager";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::List { path: "/dev".to_owned() }, Probe::Processes]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let count = match outputs.first() {
        Some(ProbeOutput::Names(names)) => switches(names).count(),
        Some(ProbeOutput::Failed(failure)) => return Observation::Failed(failure.clone()),
        _ => return Observation::Failed(ProbeFailure::new(FailureKind::Unparseable, "the answer for /dev is not a list")),
    };
    if count == 0 {
        return not_applicable("no-nvswitch", "no NVSwitch in /dev");
    }
    let processes = match host_processes(outputs.get(1)) {
        Ok(processes) => processes,
        Err(failure) => return Observation::Failed(failure),
    };
    let entity = Entity::new(EntityKind::Service, "nvidia-fabricmanager");
    let is_up = is_running(processes, PROCESS_NAME);
    let metric = Metric::count("fabric_manager_runs", entity.clone(), f64::from(u8::from(is_up)));
    let text = format!("{PROCESS_NAME} is not running; NVSwitches in /dev: {count}");
    let down = (!is_up).then(|| Event::seen("fabric-manager-down", entity, text));
    Observation::measured(vec![metric], down.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        host_processes::tests::{process, running},
        classify_fixture::classify_outputs,
    };

    fn dev(names: &[&str]) -> ProbeOutput {
        ProbeOutput::Names(names.iter().map(|&name| name.to_owned()).collect())
    }

    fn hgx() -> ProbeOutput {
        dev(&["null", "nvidia0", "nvidia-nvswitch0", "nvidia-nvswitch1", "nvidia-nvswitchctl"])
    }

    // NVSentinel #883: down for 20 days without being noticed.
    #[test]
    fn a_fabric_manager_that_does_not_run_is_found() {
        let up = running(&[process(900, "nv-fabricmanage", 'S')]);
        assert_eq!(classify_outputs(&CHECK, &[hgx(), up]), ["pass within-limits"]);
        let line = ["fail fabric-manager-down reboot service:nvidia-fabricmanager"];
        assert_eq!(classify_outputs(&CHECK, &[hgx(), running(&[])]), line);
        assert_eq!(classify_outputs(&CHECK, &[hgx(), running(&[process(900, "nv-fabricmanage", 'Z')])]), line);
    }

    #[test]
    fn a_machine_without_nvswitches_needs_no_fabric_manager() {
        for names in [&["null"][..], &["nvidia0", "nvidiactl"], &["nvidia-nvswitchctl"], &[]] {
            assert_eq!(classify_outputs(&CHECK, &[dev(names), running(&[])]), ["not-applicable no-nvswitch"], "{names:?}");
        }
    }

    #[test]
    fn an_unreadable_input_does_not_pass() {
        let denied = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "no"));
        assert_eq!(classify_outputs(&CHECK, &[denied.clone(), running(&[])]), ["inconclusive denied"]);
        assert_eq!(classify_outputs(&CHECK, &[hgx(), denied]), ["inconclusive denied"]);
        let container = ProbeOutput::Processes(vec![process(1, "doctor-node", 'S')]);
        assert_eq!(classify_outputs(&CHECK, &[hgx(), container]), ["inconclusive denied"]);
    }
}
