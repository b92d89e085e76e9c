//! nvlink-errors: do NVLinks retransmit data or retrain while in use?
//!
//! What it does: reads how often each NVLink retransmitted data (replay) or was retrained while in use (recovery), as a
//! rate over the time since the boot. `nvlink-crc` covers CRC errors.
//!
//! Why it matters: link errors are repaired by retransmission, so a bad connector first shows as a slightly slow job,
//! then as a link that goes down during one.
//!
//! What to do: `nvlink-errors` is `monitor`: more than one replay or recovery per hour. `nvidia-smi nvlink -e -i BUS`
//! shows the counters. If `nvlink-state` reports the same GPU, or NCCL tests slow down, reset the GPUs; if it recurs,
//! open a repair case.
//!
//! AWS's suite warns of the first error forever; here the average over the uptime counts, so that one bad moment last
//! month does not fail the node. A reset of the GPU clears the counters. Not applicable where no GPU has NVLink or
//! these counters.

use doctor_core::observation::{Entity, EntityKind, ObservationBuilder, Metric, Observation, Unit};

use crate::{
    gpu::{Gpu, for_each_gpu, read_indexed},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
    uptime::{self, uptime_hours},
};

const SPEC: Spec = Spec::quick("nvlink-errors", "replays and recoveries of NVLinks");

const RULES: &str = r#"
rules = [
  { id = "nvlink-errors-retries", check = "nvlink-errors", metric = "nvlink_retries_per_hour", above = 1.0,
    reason = "nvlink-errors", severity = "monitor",
    text = "{entity}: {value} replays and recoveries per hour since boot, limit {limit}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("nvlink_errors.rs")), rules: RULES, probes, interpret };

const RETRIES: [&str; 2] = ["replay_errors", "recovery_errors"];

fn probes(_: &Params) -> Vec<Probe> {
    counter_probes(&RETRIES)
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    error_rates(outputs, "nvlink_retries_per_hour", &RETRIES)
}

/// Returns the probes for the rate of these counters.
pub(crate) fn counter_probes(counters: &[&str]) -> Vec<Probe> {
    let fields = counters.iter().map(|what| format!("nvlink.*.{what}")).collect();
    vec![Probe::Gpu { fields }, Probe::read(uptime::PATH)]
}

/// Returns the sum of these counters of each link, as errors per hour since the boot.
pub(crate) fn error_rates(outputs: &[ProbeOutput], name: &str, counters: &[&str]) -> Observation {
    let hours = uptime_hours(outputs.get(1));
    for_each_gpu(outputs.first(), "no GPU of this node counts NVLink errors", |gpu, builder| match &hours {
        Ok(hours) => rates(gpu, name, counters, *hours, builder),
        Err(failure) => builder.unreadable(failure.clone()),
    })
}

/// Adds one metric for each link with errors, or one for the GPU if there are none: eight GPUs have 144 links, which
/// need no 144 zeros.
fn rates(gpu: &Gpu, name: &str, counters: &[&str], hours: f64, builder: &mut ObservationBuilder) {
    let mut sums: std::collections::BTreeMap<u32, f64> = std::collections::BTreeMap::new();
    for what in counters {
        for (link, errors) in read_indexed(gpu, "nvlink", what, builder) {
            *sums.entry(link).or_default() += errors;
        }
    }
    if sums.is_empty() {
        return;
    }
    let bad: Vec<_> = sums.iter().filter(|(_, errors)| **errors > 0.0).collect();
    for (link, errors) in &bad {
        let entity = Entity::new(EntityKind::Link, format!("{}/{link}", gpu.entity().id));
        builder.metric(Metric::new(name, entity, **errors / hours, Unit::PerHour));
    }
    if bad.is_empty() {
        builder.metric(Metric::new(name, gpu.entity(), 0.0, Unit::PerHour));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::{
            FieldValue,
            tests::{answer, lost, n, none},
        },
        classify_fixture::classify_outputs,
    };

    const NAMES: [&str; 4] =
        ["nvlink.0.replay_errors", "nvlink.1.replay_errors", "nvlink.0.recovery_errors", "nvlink.1.recovery_errors"];

    fn check(up: &str, counters: [FieldValue; 4]) -> Vec<String> {
        let well: Vec<_> = NAMES.into_iter().map(|name| (name, n(0.0))).collect();
        let other: Vec<_> = NAMES.into_iter().zip(counters).collect();
        classify_outputs(&CHECK, &[answer(&[&well, &other]), ProbeOutput::Text(up.to_owned())])
    }

    fn with(index: usize, value: f64) -> [FieldValue; 4] {
        let mut counters = [const { FieldValue::Number(0.0) }; 4];
        counters[index] = n(value);
        counters
    }

    #[test]
    fn a_high_error_rate_is_reported_for_its_link() {
        assert_eq!(check("36000 1", with(0, 0.0)), ["pass within-limits"]);
        assert_eq!(check("36000 1", with(0, 11.0)), ["fail nvlink-errors monitor link:0000:19:00.0/0"]);
        assert_eq!(check("36000 1", with(3, 11.0)), ["fail nvlink-errors monitor link:0000:19:00.0/1"]);
    }

    #[test]
    fn the_rate_is_averaged_over_the_uptime() {
        assert_eq!(check("2592000 1", with(0, 500.0)), ["pass within-limits"]);
        // One replay in the first minute after a boot is not a rate.
        assert_eq!(check("30 1", with(0, 1.0)), ["pass within-limits"]);
    }

    #[test]
    fn an_unreadable_counter_does_not_pass() {
        let mut counters = with(0, 0.0);
        counters[3] = lost();
        assert_eq!(check("36000 1", counters), ["inconclusive failed"]);
        assert_eq!(check("", with(0, 0.0)), ["inconclusive unparseable"]);
        assert_eq!(check("36000 1", [const { FieldValue::NotSupported }; 4]), ["pass within-limits"]);
        let old: Vec<_> = NAMES.into_iter().map(|name| (name, FieldValue::NotSupported)).collect();
        let up = ProbeOutput::Text("36000 1".to_owned());
        assert_eq!(classify_outputs(&CHECK, &[answer(&[&old]), up.clone()]), ["not-applicable not-supported"]);
        assert_eq!(classify_outputs(&CHECK, &[none(), up]), ["not-applicable no-gpu"]);
    }
}
