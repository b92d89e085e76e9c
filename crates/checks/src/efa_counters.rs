//! efa-counters: does EFA drop or retransmit traffic?
//!
//! What it does: reads how many packets each EFA adapter dropped and how often a peer did not answer in time, over the
//! last ten minutes.
//!
//! Why it matters: EFA retransmits lost packets, so nothing fails and everything waits. An adapter that drops more than
//! its neighbours delays the whole job.
//!
//! What to do: both findings are `monitor`; `rdma -p statistic show` on the node shows all counters.
//! - `efa-timeouts`: more than one timeout per second. If only this node has them, its adapter or its placement is bad:
//!   stop and start the instance. If all nodes of a job have them, look for one that hangs: they all wait for it.
//! - `efa-drops`: more than 100 dropped packets per second. The receiver is too slow; check the processor load and
//!   `memlock`.
//!
//! Not applicable where no RDMA device has these counters, which only EFA has.

use doctor_core::{
    observation::{Event, ObservationBuilder, Metric, Observation, Unit},
    time::Span,
};

use crate::{
    files::{match_pattern_exact, sampled_series, unexpected_content},
    gpu::not_applicable,
    probe::{Probe, ProbeOutput},
    rdma::port_entity,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("efa-counters", "drops and timeouts of EFA adapters");

const RULES: &str = r#"
rules = [
  { id = "efa-counters-timeouts", check = "efa-counters", event = "efa-timeouts", reason = "efa-timeouts",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "efa-counters-drops", check = "efa-counters", event = "efa-drops", reason = "efa-drops",
    severity = "monitor", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("efa_counters.rs")), rules: RULES, probes, interpret };

/// A counter of an adapter and its limit per second.
pub(crate) struct Counter {
    pub(crate) pattern: &'static str,
    metric: &'static str,
    pub(crate) code: &'static str,
    pub(crate) label: &'static str,
    pub(crate) limit: f64,
}

pub(crate) const COUNTERS: [Counter; 2] = [
    Counter {
        pattern: "/sys/class/infiniband/*/ports/*/hw_counters/retrans_timeout_events",
        metric: "timeouts_per_second",
        code: "efa-timeouts",
        label: "timeouts",
        limit: 1.0,
    },
    Counter {
        pattern: "/sys/class/infiniband/*/ports/*/hw_counters/rx_drops",
        metric: "drops_per_second",
        code: "efa-drops",
        label: "dropped packets",
        limit: 100.0,
    },
];

fn probes(_: &Params) -> Vec<Probe> {
    let sampled = |counter: &Counter| Probe::Sampled { pattern: counter.pattern.to_owned(), keep: Span::minutes(15) };
    COUNTERS.iter().map(sampled).collect()
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let mut builder = ObservationBuilder::default();
    for (index, counter) in COUNTERS.iter().enumerate() {
        for series in sampled_series(outputs.get(index))? {
            let Some([device, port]) = match_pattern_exact(counter.pattern, series.path) else { continue };
            match (series.growth(Span::minutes(11)), series.current()) {
                (Some(growth), _) => {
                    let (entity, rate) = (port_entity(device, port), growth.per_second());
                    builder.metric(Metric::new(counter.metric, entity.clone(), rate, Unit::PerSecond));
                    if rate > counter.limit {
                        let text = format!("{rate:.1} {} per second, limit {}", counter.label, counter.limit);
                        builder.event(Event::seen(counter.code, entity, text));
                    }
                }
                (None, Ok(Some(text))) => builder.unreadable(unexpected_content(series.path, text)),
                (None, Err(failure)) => builder.unreadable(failure),
                // The adapter is gone; `efa-count` reports it.
                (None, Ok(None)) => {}
            }
        }
    }
    Ok(builder.build_or(not_applicable("no-efa", "no RDMA device of this node has EFA counters")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::tests::sampled_files, classify_fixture::classify_outputs};
    use proptest::prelude::*;

    /// Timeouts and drops at readings five minutes apart. Made by hand with the driver's names.
    fn check(each: &[(&str, &str)]) -> Vec<String> {
        let of = |counter: &Counter, value: fn(&(&str, &str)) -> String| {
            let path = counter.pattern.replacen('*', "rdmap79s0", 1).replacen('*', "1", 1);
            let texts: Vec<_> = each.iter().map(value).collect();
            let files: Vec<_> = texts.iter().map(|text| [(path.as_str(), text.as_str())]).collect();
            sampled_files(&files.iter().map(|one| &one[..]).collect::<Vec<_>>())
        };
        classify_outputs(&CHECK, &[of(&COUNTERS[0], |pair| pair.0.to_owned()), of(&COUNTERS[1], |pair| pair.1.to_owned())])
    }

    #[test]
    fn rates_are_classified_and_totals_are_not() {
        assert_eq!(check(&[("0\n", "0\n"), ("290\n", "29000\n")]), ["pass within-limits"]);
        assert_eq!(check(&[("0\n", "0\n"), ("310\n", "0\n")]), ["fail efa-timeouts monitor link:rdmap79s0/1"]);
        assert_eq!(check(&[("0\n", "0\n"), ("0\n", "31000\n")]), ["fail efa-drops monitor link:rdmap79s0/1"]);
        assert_eq!(check(&[("800000\n", "800000\n")]), ["pass within-limits"]);
        assert_eq!(check(&[("?", "0\n")]), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[sampled_files(&[&[]]), sampled_files(&[&[]])]), ["not-applicable no-efa"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(a in ".{0,12}", b in "[0-9]{0,30}") {
            check(&[(&a, &b), (&b, &a)]);
        }
    }
}
