//! host-pressure: do programs on this node wait for memory or disks?
//!
//! What it does: reads from /proc/pressure for which share of the last five minutes all runnable programs were stalled,
//! waiting for memory or for disks.
//!
//! Why it matters: a node that thrashes answers everything and finishes nothing. Load and free memory look normal; the
//! pressure does not.
//!
//! What to do: run `cat /proc/pressure/*`, `vmstat 1` and `iotop` on the node. Both findings are `monitor`, confirmed
//! by three failures.
//! - `memory-pressure`: more than 10 % of the time lost to reclaiming memory. Look for leaks as in `memory`.
//! - `disk-pressure`: more than 50 % of the time lost to waiting for disks. Check `disk-errors`, `nvme-state`,
//!   `mounts`.
//!
//! Not applicable where the kernel does not measure it (`psi=1` on its command line enables it).

use doctor_core::observation::{Entity, FailureKind, ObservationBuilder, Metric, Observation, Unit};

use crate::{
    files::{file_text, unexpected_content},
    gpu::not_applicable,
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("host-pressure", "time lost waiting for memory and disks");

const RULES: &str = r#"
rules = [
  { id = "host-pressure-memory", check = "host-pressure", metric = "memory_stall_percent", above = 10.0,
    reason = "memory-pressure", severity = "monitor", confirm = 3,
    text = "all programs waited for memory {value} % of the time, limit {limit} %" },
  { id = "host-pressure-disk", check = "host-pressure", metric = "disk_stall_percent", above = 50.0,
    reason = "disk-pressure", severity = "monitor", confirm = 3,
    text = "all programs waited for disks {value} % of the time, limit {limit} %" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("host_pressure.rs")), rules: RULES, probes, interpret };

const FILES: [(&str, &str); 2] =
    [("/proc/pressure/memory", "memory_stall_percent"), ("/proc/pressure/io", "disk_stall_percent")];

fn probes(_: &Params) -> Vec<Probe> {
    FILES.iter().map(|(path, _)| Probe::read(path)).collect()
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let mut builder = ObservationBuilder::default();
    for (index, (path, name)) in FILES.iter().enumerate() {
        match file_text(outputs.get(index)) {
            Ok(text) => match full_stall_percent(text) {
                Some(percent) => builder.metric(Metric::new(name, Entity::node(), percent, Unit::Percent)),
                None => builder.unreadable(unexpected_content(path, text)),
            },
            Err(failure) if failure.kind == FailureKind::Missing => {}
            Err(failure) => builder.unreadable(failure),
        }
    }
    builder.build_or(not_applicable("not-measured", "this kernel does not measure pressure (PSI)"))
}

/// Parses `full avg10=0.00 avg60=0.00 avg300=1.25 total=0`.
fn full_stall_percent(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("full "))?;
    let value: f64 = line.split_ascii_whitespace().find_map(|word| word.strip_prefix("avg300="))?.parse().ok()?;
    (0.0..=100.0).contains(&value).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classify_fixture::classify_outputs;
    use doctor_core::observation::ProbeFailure;
    use proptest::prelude::*;

    fn check(memory: &str, disks: &str) -> Vec<String> {
        let file = |value: &str| {
            let text = format!(
                "some avg10=0.00 avg60=0.00 avg300=90.00 total=0\nfull avg10=0.00 avg60=0.00 avg300={value} total=0\n"
            );
            ProbeOutput::Text(text)
        };
        classify_outputs(&CHECK, &[file(memory), file(disks)])
    }

    // Made by hand after the kernel's documentation.
    #[test]
    fn stall_time_is_reported() {
        assert_eq!(check("0.00", "3.10"), ["pass within-limits"]);
        assert_eq!(check("10.50", "0.00"), ["fail memory-pressure monitor node"]);
        assert_eq!(check("0.00", "50.10"), ["fail disk-pressure monitor node"]);
        assert_eq!(check("much", "0.00"), ["inconclusive unparseable"]);
        let missing = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Missing, "no such file"));
        assert_eq!(classify_outputs(&CHECK, &[missing.clone(), missing]), ["not-applicable not-measured"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,40}") {
            full_stall_percent(&text);
            check(&text, "0.00");
        }
    }
}
