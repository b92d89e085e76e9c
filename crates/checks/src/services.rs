//! services: are the services that this node needs running?
//!
//! What it does: checks for each configured service whether it has a process, in systemd's control groups. It starts no
//! program.
//!
//! Why it matters: a node without munge, its container runtime or its monitoring accepts jobs and fails them, or fails
//! unnoticed.
//!
//! What to do: `service-not-running` is `reboot`, confirmed by a second failure: `systemctl status SERVICE` and
//! `journalctl -u SERVICE` show why it ended; `systemctl restart SERVICE` often cures it. A reboot starts it too, if it
//! is enabled (`systemctl is-enabled`).
//!
//! Parameters: `units`, such as `units = ["slurmd.service", "munge.service"]`; `.service` is the default suffix. A unit
//! that does its work and ends (type `oneshot`) has no process and does not belong here. Not applicable where none is
//! configured; inconclusive where systemd has no control groups of services.

use std::collections::BTreeMap;

use doctor_core::observation::{Entity, EntityKind, Event, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure};

use crate::{
    files::{glob_files, match_pattern},
    gpu::not_applicable,
    probe::{Probe, ProbeOutput},
    check_params::string_list,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("services", "systemd services that should be running");

const RULES: &str = r#"
rules = [
  { id = "services-not-running", check = "services", event = "service-not-running", reason = "service-not-running",
    severity = "reboot", confirm = 2, text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("services.rs")), rules: RULES, probes, interpret };

/// Control groups version 2, also alongside version 1; services of a template (`a@b.service`) are one level deeper.
/// With version 1 only, the list of processes is used.
const PATTERNS: [&str; 4] = [
    "/sys/fs/cgroup/*.slice/*.service/cgroup.events",
    "/sys/fs/cgroup/*.slice/*.slice/*.service/cgroup.events",
    "/sys/fs/cgroup/unified/*.slice/*.service/cgroup.events",
    "/sys/fs/cgroup/systemd/*.slice/*.service/cgroup.procs",
];

fn probes(params: &Params) -> Vec<Probe> {
    let patterns = if params.contains_key("units") { &PATTERNS[..] } else { &PATTERNS[..1] };
    patterns.iter().map(|pattern| Probe::glob(pattern)).collect()
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(params, outputs).unwrap_or_else(|instead| instead)
}

fn observe(params: &Params, outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let Some(required) = string_list(params, "units", "units = [\"slurmd.service\"]")? else {
        return Ok(not_applicable("not-configured", "`units` is not set"));
    };
    let mut builder = ObservationBuilder::default();
    let mut running: BTreeMap<&str, bool> = BTreeMap::new();
    for (index, pattern) in PATTERNS.iter().enumerate() {
        for file in glob_files(outputs.get(index))? {
            let Some(name) = match_pattern(pattern, &file.path).and_then(|names| names.last().copied()) else { continue };
            let is_required = required.iter().any(|unit| unit_name(unit) == name);
            match &file.text {
                Ok(text) => *running.entry(name).or_default() |= has_processes(text),
                Err(failure) if is_required => builder.unreadable(failure.clone()),
                Err(_) => {}
            }
        }
    }
    if running.is_empty() {
        let text = "no control group of a systemd service found";
        return Err(Observation::Failed(ProbeFailure::new(FailureKind::Empty, text)));
    }
    let mut well = 0.0;
    for unit in &required {
        let text = match running.get(unit_name(unit)) {
            Some(true) => {
                well += 1.0;
                continue;
            }
            Some(false) => "service has no process",
            None => "service is not started or does not exist",
        };
        builder.event(Event::seen("service-not-running", Entity::new(EntityKind::Service, unit_name(unit)), text));
    }
    builder.metric(Metric::count("services_running", Entity::node(), well));
    Ok(builder.build_or(Observation::measured(Vec::new(), Vec::new())))
}

fn unit_name(unit: &str) -> &str {
    unit.strip_suffix(".service").unwrap_or(unit)
}

/// Matches `populated 1` of version 2, or any process of version 1.
fn has_processes(text: &str) -> bool {
    text.lines().any(|line| line.trim() == "populated 1" || line.trim().parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        files::tests::found,
        classify_fixture::{classify_outputs, classify_outputs_with},
    };
    use proptest::prelude::*;

    fn check(units: &str, munge: &str) -> Vec<String> {
        let params: Params = toml::from_str(&format!("units = {units}")).unwrap();
        let second = found(&[
            ("/sys/fs/cgroup/system.slice/munge.service/cgroup.events", munge),
            ("/sys/fs/cgroup/system.slice/slurmd.service/cgroup.events", "populated 1\nfrozen 0\n"),
        ]);
        let deeper = "/sys/fs/cgroup/system.slice/system-getty.slice/getty@tty1.service/cgroup.events";
        let outputs = [second, found(&[(deeper, "populated 1\nfrozen 0\n")]), found(&[]), found(&[])];
        classify_outputs_with(&CHECK, &params, None, &outputs)
    }

    // Made by hand.
    #[test]
    fn a_service_without_a_process_is_not_running() {
        let good = "populated 1\nfrozen 0\n";
        assert_eq!(check("['slurmd.service', 'munge', 'getty@tty1']", good), ["pass within-limits"]);
        let bad = "fail service-not-running reboot service:munge";
        assert_eq!(check("['slurmd', 'munge.service']", "populated 0\nfrozen 0\n"), [bad]);
        assert_eq!(check("['dcgm']", good), ["fail service-not-running reboot service:dcgm"]);
    }

    #[test]
    fn cgroup_v1_lists_processes() {
        let params: Params = toml::from_str("units = ['sshd']").unwrap();
        let with = |text: &str| {
            let first = found(&[("/sys/fs/cgroup/systemd/system.slice/sshd.service/cgroup.procs", text)]);
            classify_outputs_with(&CHECK, &params, None, &[found(&[]), found(&[]), found(&[]), first])
        };
        assert_eq!(with("812\n"), ["pass within-limits"]);
        assert_eq!(with(""), ["fail service-not-running reboot service:sshd"]);
    }

    #[test]
    fn missing_settings_and_unreadable_cgroups_do_not_pass() {
        assert_eq!(classify_outputs(&CHECK, &[found(&[])]), ["not-applicable not-configured"]);
        let params: Params = toml::from_str("units = ['sshd']").unwrap();
        let nothing: Vec<_> = (0..4).map(|_| found(&[])).collect();
        assert_eq!(classify_outputs_with(&CHECK, &params, None, &nothing), ["inconclusive empty"]);
        assert_eq!(check("'munge'", ""), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,40}") {
            check("['munge']", &text);
        }
    }
}
