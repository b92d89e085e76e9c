//! time-sync: is the node's clock synchronised?
//!
//! What it does: reads from the kernel whether its clock is synchronised (NTP, PTP) and its offset.
//!
//! Why it matters: credentials of Slurm and Kubernetes expire according to the clock, logs of many nodes are ordered by
//! it, and a job whose nodes disagree about the time fails in unexpected ways.
//!
//! What to do: run `chronyc tracking` or `timedatectl timesync-status` on the node. Both findings are `monitor`,
//! confirmed by a second failure.
//! - `clock-not-kept`: no NTP or PTP daemon synchronises the clock, or it has no reachable source. Run
//!   `systemctl restart chronyd`; check that the time servers are reachable (UDP port 123).
//! - `clock-off`: the clock is more than a tenth of a second off and is being corrected.
//!
//! The controller compares the node's clock with its own at each report.

use doctor_core::observation::{Entity, Event, Metric, Observation, Unit};

use crate::{
    files::{file_text, unexpected_content},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("time-sync", "clock synchronisation");

const RULES: &str = r#"
rules = [
  { id = "time-sync-not-kept", check = "time-sync", event = "clock-not-kept", reason = "clock-not-kept",
    severity = "monitor", confirm = 2, text = "{value}" },
  { id = "time-sync-off", check = "time-sync", metric = "clock_offset_seconds", above = 0.1, reason = "clock-off",
    severity = "monitor", confirm = 2, text = "clock offset {value} s, limit {limit} s" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("time_sync.rs")), rules: RULES, probes, interpret };

const NOT_SYNCHRONISED: &str = "clock not synchronised: no NTP or PTP daemon, or no reachable source";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::ClockDiscipline]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let lines = match file_text(outputs.first()) {
        Ok(lines) => lines,
        Err(failure) => return Observation::Failed(failure),
    };
    let value = |name: &str| -> Option<f64> {
        let line = lines.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
        line.trim().parse::<f64>().ok().filter(|value| value.is_finite())
    };
    let (Some(synchronized), Some(offset)) = (value("synchronized"), value("offset_us")) else {
        return Observation::Failed(unexpected_content("the kernel's clock", lines));
    };
    let event = (synchronized == 0.0).then(|| Event::seen("clock-not-kept", Entity::node(), NOT_SYNCHRONISED));
    let seconds = |name, micros: f64| Metric::new(name, Entity::node(), micros.abs() / 1e6, Unit::Seconds);
    let error = value("max_error_us").map(|micros| seconds("clock_error_seconds", micros));
    let metrics = std::iter::once(seconds("clock_offset_seconds", offset)).chain(error).collect();
    Observation::measured(metrics, event.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classify_fixture::classify_outputs;
    use proptest::prelude::*;

    fn check(text: &str) -> Vec<String> {
        classify_outputs(&CHECK, &[ProbeOutput::Text(text.to_owned())])
    }

    // Made by hand in the format of the probe.
    #[test]
    fn an_unsynchronised_clock_fails_even_with_a_small_offset() {
        let good = "synchronized 1\noffset_us -12\nmax_error_us 5000\nestimated_error_us 100\nfrequency_ppm 1.5\n";
        assert_eq!(check(good), ["pass within-limits"]);
        assert_eq!(check(&good.replace("synchronized 1", "synchronized 0")), ["fail clock-not-kept monitor node"]);
        assert_eq!(check(&good.replace("-12", "-120000")), ["fail clock-off monitor node"]);
        assert_eq!(check(""), ["inconclusive unparseable"]);
        assert_eq!(check("synchronized yes\noffset_us 0\n"), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "((synchronized|offset_us|max_error_us) .{0,9}\n){0,3}") {
            check(&text);
        }
    }
}
