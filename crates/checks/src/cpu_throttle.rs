//! cpu-throttle: do the processors throttle because they are too hot?
//!
//! What it does: reads how often each processor package throttled within the last hour.
//!
//! Why it matters: a failed fan, a loose heat sink or warm air slows one node, and with it every job that includes the
//! node. Memory and GPUs near the processor suffer next.
//!
//! What to do: `cpu-throttled` is `monitor`: `ipmitool sdr type fan` and `ipmitool sdr type temperature` show fans and
//! sensors; compare with a neighbour in the rack. Single events under full load are usual; more than sixty per hour are
//! not.
//!
//! Not applicable where processors do not count throttling (AMD, Arm, virtual machines).

use doctor_core::{
    observation::{Entity, ObservationBuilder, Metric, Observation, Unit},
    time::Span,
};

use crate::{
    files::{sampled_series, unexpected_content},
    gpu::not_applicable,
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("cpu-throttle", "thermal throttling of CPUs");

const RULES: &str = r#"
rules = [
  { id = "cpu-throttle-many", check = "cpu-throttle", metric = "package_throttles", above = 60.0,
    reason = "cpu-throttled", severity = "monitor",
    text = "a CPU throttled {value} times within the hour, limit {limit}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("cpu_throttle.rs")), rules: RULES, probes, interpret };

/// Every processor exposes the counter of its package.
const COUNTER: &str = "/sys/devices/system/cpu/cpu*/thermal_throttle/package_throttle_count";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::Sampled { pattern: COUNTER.to_owned(), keep: Span::hours(1) }]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let all = match sampled_series(outputs.first()) {
        Ok(all) => all,
        Err(instead) => return instead,
    };
    let mut builder = ObservationBuilder::default();
    let mut worst: Option<f64> = None;
    for series in &all {
        match (series.growth(Span::hours(1)), series.current()) {
            (Some(growth), _) => worst = Some(worst.unwrap_or(0.0).max(growth.in_last_hour())),
            (None, Ok(Some(text))) => builder.unreadable(unexpected_content(series.path, text)),
            (None, Err(failure)) => builder.unreadable(failure),
            // A processor that went offline since has no value; `cpu-online` reports it.
            (None, Ok(None)) => {}
        }
    }
    if let Some(worst) = worst {
        builder.metric(Metric::new("package_throttles", Entity::node(), worst, Unit::PerHour));
    }
    builder.build_or(not_applicable("no-counter", "the CPUs of this node do not count throttling"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::tests::sampled_files, classify_fixture::classify_outputs};
    use proptest::prelude::*;

    fn check(counts: &[&str]) -> Vec<String> {
        let (a, b) = (COUNTER.replace('*', "0"), COUNTER.replace('*', "1"));
        let each: Vec<_> = counts.iter().map(|count| [(a.as_str(), "4\n"), (b.as_str(), *count)]).collect();
        classify_outputs(&CHECK, &[sampled_files(&each.iter().map(|one| &one[..]).collect::<Vec<_>>())])
    }

    // Made by hand.
    #[test]
    fn throttling_within_the_last_hour_counts() {
        assert_eq!(check(&["0\n", "60\n"]), ["pass within-limits"]);
        assert_eq!(check(&["0\n", "61\n"]), ["fail cpu-throttled monitor node"]);
        assert_eq!(check(&["9000\n", "9000\n"]), ["pass within-limits"]);
        assert_eq!(check(&["hot\n"]), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[sampled_files(&[&[]])]), ["not-applicable no-counter"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(a in ".{0,12}", b in "[0-9]{0,30}") {
            check(&[&a, &b]);
        }
    }
}
