//! zombies: do zombie processes accumulate?
//!
//! What it does: counts processes that have ended and have not been reaped (state `Z`).
//!
//! Why it matters: each keeps its pid. A container without an init, or a service that does not reap its children, fills
//! the process table until no program can start.
//!
//! What to do: `ps -eo ppid= -o stat= | awk '$2 ~ /Z/ {print $1}' | sort | uniq -c | sort -n` names the parents;
//! restart the one with the most. Both findings are confirmed by a second failure.
//! - `zombies-many` is `monitor`: more than 1000.
//! - `zombies-flood` is `reboot`: more than 2000.

use std::collections::BTreeMap;

use doctor_core::observation::{Entity, Metric, Observation};

use crate::{
    host_processes::host_processes,
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("zombies", "zombie processes");

// The limits are gpud's.
const RULES: &str = r#"
rules = [
  { id = "zombies-flood", check = "zombies", metric = "zombies", above = 2000.0, reason = "zombies-flood",
    severity = "reboot", confirm = 2, text = "{value} zombie processes, limit {limit}" },
  { id = "zombies-many", check = "zombies", metric = "zombies", above = 1000.0, reason = "zombies-many",
    severity = "monitor", confirm = 2, text = "{value} zombie processes, limit {limit}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("zombies.rs")), rules: RULES, probes, interpret };

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::Processes]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let all = match host_processes(outputs.first()) {
        Ok(all) => all,
        Err(failure) => return Observation::Failed(failure),
    };
    let mut parents: BTreeMap<u32, u32> = BTreeMap::new();
    for process in all.iter().filter(|process| process.state == 'Z') {
        *parents.entry(process.parent).or_default() += 1;
    }
    let metric = |name, value: u32| Metric::count(name, Entity::node(), f64::from(value));
    let most = parents.values().max().copied().unwrap_or(0);
    let metrics = vec![metric("zombies", parents.values().sum()), metric("zombies_of_one_parent", most)];
    Observation::measured(metrics, Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{host_processes::tests::process, classify_fixture::classify_outputs};

    fn check(zombies: u32) -> Vec<String> {
        let all = (3..3 + zombies).map(|pid| process(pid, "sh", 'Z')).chain([process(2, "kthreadd", 'S')]).collect();
        classify_outputs(&CHECK, &[ProbeOutput::Processes(all)])
    }

    #[test]
    fn a_few_zombies_pass_and_thousands_do_not() {
        assert_eq!(check(0), ["pass within-limits"]);
        assert_eq!(check(1000), ["pass within-limits"]);
        assert_eq!(check(1001), ["fail zombies-many monitor node"]);
        assert_eq!(check(2001), ["fail zombies-flood reboot node", "fail zombies-many monitor node"]);
        assert_eq!(classify_outputs(&CHECK, &[ProbeOutput::Processes(Vec::new())]), ["inconclusive denied"]);
    }
}
