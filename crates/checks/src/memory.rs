//! memory: is all memory present and available?
//!
//! What it does: reads /proc/meminfo for the size of memory, the share that a new job could get, swap in use, and huge
//! pages that stay reserved.
//!
//! Why it matters: a machine that lost a DIMM at boot looks healthy and fails large jobs. Memory that is no longer used
//! but was never released (a driver's leak, files in /dev/shm, huge pages of a crashed job) starves the next job in the
//! same way. The check runs on free nodes, so little should be in use.
//!
//! What to do: all findings but the first are `monitor`.
//! - `memory-small` is `isolate`: less memory than the machine profile expects. Look for a disabled DIMM in the service
//!   processor's log and in `dmidecode -t memory`; a reboot rarely restores it.
//! - `memory-low`, confirmed by a second failure: less than a tenth is available on a free node. Check
//!   `ls -l /dev/shm`, `slabtop` and `ipcs -m`; a reboot always cures it.
//! - `hugepages-left`: more than half of memory is reserved as huge pages. Release the unused ones:
//!   `sysctl vm.nr_hugepages=0`.
//! - `swap-used`, confirmed by a second failure: more than half of swap is in use on a free node; swapped-out programs
//!   will be slow.
//!
//! Without a profile the size is compared with a fixed minimum only: set `mem_total_bytes` in the profile to detect the
//! loss of one DIMM.

use doctor_core::{
    observation::{Entity, FailureKind, Metric, Observation, ProbeFailure, Unit},
    time::Span,
};

use crate::{
    probe::{Probe, ProbeOutput},
    spec::{Check, Depth, Params, Spec, page_of},
};

const SPEC: Spec = Spec {
    id: "memory",
    title: "size of memory and available memory",
    depth: Depth::Quick,
    exclusive: false,
    every: Span::minutes(5),
    cutoff: Span::days(7),
    limit: Span::minutes(1),
    typical_duration: Span::from_secs(1),
    usual_by: None,
    shares: &[],
    shared_param: None,
    opt_in: false,
    access: &[],
};

// One DIMM of 32 is 3 % of a node's memory; firmware and kernel take about 1 % that differs from boot to boot.
const RULES: &str = r#"
[[rules]]
id = "memory-total"
check = "memory"
metric = "mem_total_bytes"
below_percent_of_profile = 98.0
severity = "isolate"
reason = "memory-small"
text = "{value}B of memory, expected at least {limit}B on this machine type"

[[rules]]
id = "memory-total-floor"
check = "memory"
metric = "mem_total_bytes"
below = 268435456.0
severity = "isolate"
reason = "memory-small"
text = "{value}B of memory, expected at least {limit}B on any machine"

[[rules]]
id = "memory-available"
check = "memory"
metric = "mem_available_percent"
below = 10.0
severity = "monitor"
confirm = 2
reason = "memory-low"
text = "{value} % of memory available, expected at least {limit} %"

[[rules]]
id = "memory-hugepages"
check = "memory"
metric = "hugepages_percent"
above = 50.0
severity = "monitor"
reason = "hugepages-left"
text = "{value} % of memory reserved as huge pages, limit {limit} %"

[[rules]]
id = "memory-swap"
check = "memory"
metric = "swap_used_percent"
above = 50.0
severity = "monitor"
confirm = 2
reason = "swap-used"
text = "{value} % of swap in use, limit {limit} %"
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("memory.rs")), rules: RULES, probes, interpret };

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::Read { path: "/proc/meminfo".to_owned() }]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    match outputs {
        [ProbeOutput::Text(text)] => match read(text) {
            Ok(metrics) => Observation::measured(metrics, Vec::new()),
            Err(why) => Observation::Failed(ProbeFailure::new(FailureKind::Unparseable, why)),
        },
        [ProbeOutput::Failed(failure)] => Observation::Failed(failure.clone()),
        _ => Observation::Failed(ProbeFailure::new(FailureKind::Unparseable, "/proc/meminfo is not text")),
    }
}

fn read(text: &str) -> Result<Vec<Metric>, String> {
    let find = |name: &str| text.lines().find_map(|line| field(line, name));
    let need = |name: &str| find(name).ok_or_else(|| format!("/proc/meminfo has no {name}"));
    // A kernel built without huge pages or swap omits these lines: there are none.
    let or_none = |name: &str| find(name).unwrap_or(0.0);
    let total = need("MemTotal")?;
    if total <= 0.0 {
        return Err("/proc/meminfo reports no memory".to_owned());
    }
    let available = need("MemAvailable")?;
    let huge = or_none("HugePages_Total") * or_none("Hugepagesize");
    let swap = or_none("SwapTotal");
    let swap_used = (swap - or_none("SwapFree")).max(0.0);
    let metric = |name: &str, value, unit| Metric { name: name.to_owned(), entity: Entity::node(), value, unit };
    Ok(vec![
        metric("mem_total_bytes", total, Unit::Bytes),
        metric("mem_available_percent", available / total * 100.0, Unit::Percent),
        metric("hugepages_percent", huge / total * 100.0, Unit::Percent),
        metric("swap_used_percent", if swap > 0.0 { swap_used / swap * 100.0 } else { 0.0 }, Unit::Percent),
    ])
}

/// Parses `MemTotal:  24682416 kB` to bytes; a line without a unit is a count.
#[expect(clippy::cast_precision_loss, reason = "no machine has 2^53 bytes of memory")]
fn field(line: &str, name: &str) -> Option<f64> {
    let rest = line.strip_prefix(name)?.strip_prefix(':')?;
    let mut fields = rest.split_ascii_whitespace();
    let number: u64 = fields.next()?.parse().ok()?;
    let scale = match fields.next() {
        None => 1,
        Some("kB") => 1024,
        Some(_) => return None,
    };
    Some(number.checked_mul(scale)? as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn observe(text: &str) -> Observation {
        interpret(&Params::new(), &[ProbeOutput::Text(text.to_owned())])
    }

    fn values(text: &str) -> Vec<f64> {
        match observe(text) {
            Observation::Measured { metrics, .. } => metrics.into_iter().map(|metric| metric.value).collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn percentages_are_of_total_memory() {
        let text = "MemTotal: 1000 kB\nMemAvailable: 250 kB\nSwapTotal: 100 kB\nSwapFree: 25 kB\n\
            HugePages_Total: 50\nHugepagesize: 2 kB\n";
        assert_eq!(values(text), [1_024_000.0, 25.0, 10.0, 75.0]);
    }

    #[test]
    fn a_machine_without_swap_or_huge_pages_uses_none() {
        assert_eq!(values("MemTotal: 1000 kB\nMemAvailable: 500 kB\n")[2..], [0.0, 0.0]);
    }

    #[test]
    fn a_truncated_file_is_not_a_measurement() {
        for text in
            ["", "MemTotal: 1000 kB\n", "MemTotal: 0 kB\nMemAvailable: 0 kB\n", "MemTotal: 5 MB\nMemAvailable: 1 MB"]
        {
            assert!(matches!(observe(text), Observation::Failed(f) if f.kind == FailureKind::Unparseable), "{text}");
        }
        let missing = ProbeFailure::new(FailureKind::Missing, "no /proc");
        let outputs = [ProbeOutput::Failed(missing.clone())];
        assert_eq!(interpret(&Params::new(), &outputs), Observation::Failed(missing));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(MemTotal|MemAvailable|SwapTotal|.{0,9}): {0,3}[0-9]{0,25}( kB)?\n".prop_map(|s| s.repeat(3))) {
            observe(&text);
        }

        #[test]
        fn every_measurement_is_finite(total: u64, available: u64, swap: u64) {
            let text = format!("MemTotal: {total} kB\nMemAvailable: {available} kB\nSwapTotal: {swap} kB\n");
            if let Observation::Measured { metrics, .. } = observe(&text) {
                prop_assert!(metrics.iter().all(|metric| metric.value.is_finite()));
            }
        }
    }
}
