//! ib-counters: are the error counters of high-speed network ports growing?
//!
//! What it does: reads the error counters of every InfiniBand and RoCE port and how much each grew: within the last ten
//! minutes for limits per second, within the last hour for the others. Earlier values do not count; a counter that
//! decreased was reset by a reboot or a device reset.
//!
//! Why it matters: a bad cable or transceiver shows here days before the link drops. The hardware retransmits after
//! link errors, so jobs become slow long before anything fails.
//!
//! What to do: `doctor why NODE` names port, counter and rate; `mlxlink -d DEVICE -m -c` shows the module and its
//! signal. Clean, reseat or replace the cable first, then the switch's port, then the adapter.
//!
//! | finding | counter | limit | severity |
//! |---|---|---|---|
//! | `symbol-errors` | symbol_error | 120 per hour | isolate |
//! | `buffer-overruns` | excessive_buffer_overrun_errors | any | isolate |
//! | `link-integrity-errors` | local_link_integrity_errors | any | isolate |
//! | `link-downed` | link_downed | any | monitor |
//! | `rnr-retries` | rnr_nak_retry_err | any | monitor |
//! | `link-recoveries` | link_error_recovery | 300 per hour | monitor |
//! | `receive-errors` | port_rcv_errors | 10 per second | monitor |
//! | `ack-timeouts` | local_ack_timeout_err | 1 per second | monitor |
//! | `send-discards` | port_xmit_discards | 100 per second | monitor |
//! | `slow-restarts` | roce_slow_restart | 10 per second | monitor |
//!
//! The limits are those of NVIDIA's NVSentinel (its 5 recoveries per minute as 300 per hour), with two milder
//! severities: a single link drop may be the switch's fault (`port-flaps` of `ib-flaps` reports repeated ones), and a
//! receiver that is not ready is most often a crashed job.
//!
//! Parameters: `limits`, other limits by counter name in the unit of the table:
//! `limits = { symbol_error = 1000, port_xmit_discards = 5000 }`.
//!
//! Not applicable where there is no RDMA device or none has these counters (EFA).

use doctor_core::{
    observation::{Event, ObservationBuilder, Metric, Observation, Unit},
    time::Span,
};

use crate::{
    files::{Growth, Series, match_pattern_exact, sampled_series, unexpected_content},
    gpu::not_applicable,
    probe::{Probe, ProbeOutput},
    rdma::port_entity,
    check_params::invalid_param,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("ib-counters", "error counters of RDMA ports");

const RULES: &str = r#"
rules = [
  { id = "ib-counters-symbol", check = "ib-counters", event = "symbol-errors", reason = "symbol-errors",
    severity = "isolate", text = "{entity}: {value}" },
  { id = "ib-counters-overrun", check = "ib-counters", event = "buffer-overruns", reason = "buffer-overruns",
    severity = "isolate", text = "{entity}: {value}" },
  { id = "ib-counters-integrity", check = "ib-counters", event = "link-integrity-errors",
    reason = "link-integrity-errors", severity = "isolate", text = "{entity}: {value}" },
  { id = "ib-counters-downed", check = "ib-counters", event = "link-downed", reason = "link-downed",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "ib-counters-rnr", check = "ib-counters", event = "rnr-retries", reason = "rnr-retries",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "ib-counters-recovery", check = "ib-counters", event = "link-recoveries", reason = "link-recoveries",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "ib-counters-receive", check = "ib-counters", event = "receive-errors", reason = "receive-errors",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "ib-counters-ack", check = "ib-counters", event = "ack-timeouts", reason = "ack-timeouts",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "ib-counters-discard", check = "ib-counters", event = "send-discards", reason = "send-discards",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "ib-counters-restart", check = "ib-counters", event = "slow-restarts", reason = "slow-restarts",
    severity = "monitor", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("ib_counters.rs")), rules: RULES, probes, interpret };

/// The unit of time of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RateUnit {
    Second,
    Hour,
}

impl RateUnit {
    const fn unit(self) -> Unit {
        match self {
            Self::Hour => Unit::PerHour,
            Self::Second => Unit::PerSecond,
        }
    }

    const fn label(self) -> &'static str {
        match self {
            Self::Hour => "per hour",
            Self::Second => "per second",
        }
    }
}

/// A counter of a port and its limit.
pub(crate) struct Counter {
    pub(crate) name: &'static str,
    pub(crate) code: &'static str,
    pub(crate) limit: f64,
    pub(crate) per: RateUnit,
    is_link_counter: bool,
}

const fn counter(name: &'static str, code: &'static str, most: f64, per: RateUnit, is_of_link: bool) -> Counter {
    Counter { name, code, limit: most, per, is_link_counter: is_of_link }
}

/// Link counters are in `counters`, transport counters in `hw_counters`. "Any" is more than 0.5 per hour, so that one
/// old event averaged over the time since the boot does not count.
pub(crate) const COUNTERS: [Counter; 10] = [
    counter("symbol_error", "symbol-errors", 120.0, RateUnit::Hour, true),
    counter("excessive_buffer_overrun_errors", "buffer-overruns", 0.5, RateUnit::Hour, true),
    counter("local_link_integrity_errors", "link-integrity-errors", 0.5, RateUnit::Hour, true),
    counter("link_downed", "link-downed", 0.5, RateUnit::Hour, true),
    counter("rnr_nak_retry_err", "rnr-retries", 0.5, RateUnit::Hour, false),
    counter("link_error_recovery", "link-recoveries", 300.0, RateUnit::Hour, true),
    counter("port_rcv_errors", "receive-errors", 10.0, RateUnit::Second, true),
    counter("local_ack_timeout_err", "ack-timeouts", 1.0, RateUnit::Second, false),
    counter("port_xmit_discards", "send-discards", 100.0, RateUnit::Second, true),
    counter("roce_slow_restart", "slow-restarts", 10.0, RateUnit::Second, false),
];

impl Counter {
    pub(crate) fn pattern(&self) -> String {
        let folder = if self.is_link_counter { "counters" } else { "hw_counters" };
        format!("/sys/class/infiniband/*/ports/*/{folder}/{}", self.name)
    }

    fn rate(&self, series: &Series<'_>) -> Option<f64> {
        let within = if self.per == RateUnit::Hour { Span::hours(1) } else { Span::minutes(11) };
        // A link that comes up at boot may count as one that went down.
        let growth: Growth =
            if self.name == "link_downed" { series.growth_since_boot(within)? } else { series.growth(within)? };
        Some(match self.per {
            RateUnit::Second => growth.per_second(),
            RateUnit::Hour => growth.in_last_hour(),
        })
    }
}

fn probes(_: &Params) -> Vec<Probe> {
    COUNTERS.iter().map(|counter| Probe::Sampled { pattern: counter.pattern(), keep: Span::hours(1) }).collect()
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(params, outputs).unwrap_or_else(|instead| instead)
}

fn observe(params: &Params, outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let mut builder = ObservationBuilder::default();
    for (index, counter) in COUNTERS.iter().enumerate() {
        let most = limit(params, counter)?;
        let pattern = counter.pattern();
        for series in sampled_series(outputs.get(index))? {
            let Some([device, port]) = match_pattern_exact(&pattern, series.path) else {
                continue;
            };
            let entity = port_entity(device, port);
            match (counter.rate(&series), series.current()) {
                (Some(rate), _) => {
                    builder.metric(Metric::new(counter.name, entity.clone(), rate, counter.per.unit()));
                    if rate > most {
                        let (name, unit) = (counter.name, counter.per.label());
                        let text = format!("{name} grows by {rate:.1} {unit}, limit {most}");
                        builder.event(Event::seen(counter.code, entity, text));
                    }
                }
                // A virtual function may not count: `N/A (no PMA)`.
                (None, Ok(Some(text))) if text.starts_with("N/A") => {}
                (None, Ok(Some(text))) => builder.unreadable(unexpected_content(series.path, text)),
                (None, Err(failure)) => builder.unreadable(failure),
                // `ib-ports` reports a port that is gone.
                (None, Ok(None)) => {}
            }
        }
    }
    Ok(builder.build_or(not_applicable("no-counters", "no RDMA device of this node counts link errors")))
}

fn limit(params: &Params, counter: &Counter) -> Result<f64, Observation> {
    const EXAMPLE: &str = "limits = { symbol_error = 1000 }";
    let Some(limits) = params.get("limits") else { return Ok(counter.limit) };
    let limits = limits.as_table().ok_or_else(|| invalid_param("limits", EXAMPLE))?;
    if let Some(unknown) = limits.keys().find(|name| COUNTERS.iter().all(|counter| counter.name != **name)) {
        return Err(invalid_param(&format!("limits.{unknown}"), EXAMPLE));
    }
    let own: Params = limits.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
    Ok(crate::check_params::number(&own, counter.name, EXAMPLE)?.unwrap_or(counter.limit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        files::tests::sampled_files,
        classify_fixture::{classify_outputs, classify_outputs_with},
    };
    use proptest::prelude::*;

    /// One counter of one port over readings five minutes apart; the other counters do not change.
    fn check(name: &str, values: &[&str]) -> Vec<String> {
        classify_outputs(&CHECK, &outputs(name, values))
    }

    fn outputs(name: &str, values: &[&str]) -> Vec<ProbeOutput> {
        let of = |counter: &Counter| {
            let path = counter.pattern().replacen('*', "mlx5_3", 1).replacen('*', "1", 1);
            let own = |value| vec![(path.as_str(), if counter.name == name { value } else { "7\n" })];
            let each: Vec<_> = values.iter().map(|value| own(*value)).collect();
            sampled_files(&each.iter().map(Vec::as_slice).collect::<Vec<_>>())
        };
        COUNTERS.iter().map(of).collect()
    }

    // Made by hand.
    #[test]
    fn each_counter_has_its_own_limit() {
        assert_eq!(check("", &["0", "0"]), ["pass within-limits"]);
        for (name, from, to, line) in [
            ("symbol_error", "0", "121", "fail symbol-errors isolate link:mlx5_3/1"),
            ("excessive_buffer_overrun_errors", "4", "5", "fail buffer-overruns isolate link:mlx5_3/1"),
            ("local_link_integrity_errors", "0", "1", "fail link-integrity-errors isolate link:mlx5_3/1"),
            ("link_downed", "3", "4", "fail link-downed monitor link:mlx5_3/1"),
            ("rnr_nak_retry_err", "0", "1", "fail rnr-retries monitor link:mlx5_3/1"),
            ("link_error_recovery", "0", "301", "fail link-recoveries monitor link:mlx5_3/1"),
            ("port_rcv_errors", "0", "3001", "fail receive-errors monitor link:mlx5_3/1"),
            ("local_ack_timeout_err", "0", "301", "fail ack-timeouts monitor link:mlx5_3/1"),
            ("port_xmit_discards", "0", "30001", "fail send-discards monitor link:mlx5_3/1"),
            ("roce_slow_restart", "0", "3001", "fail slow-restarts monitor link:mlx5_3/1"),
        ] {
            assert_eq!(check(name, &[from, to]), [line], "{name}");
        }
        for (name, to) in [("symbol_error", "119"), ("link_error_recovery", "299"), ("port_rcv_errors", "2900")] {
            assert_eq!(check(name, &["0", to]), ["pass within-limits"], "{name}");
        }
    }

    #[test]
    fn old_counts_do_not_fail() {
        assert_eq!(check("link_downed", &["12", "12"]), ["pass within-limits"]);
        assert_eq!(check("link_downed", &["12"]), ["pass within-limits"]);
        assert_eq!(check("symbol_error", &["9000", "0", "0"]), ["pass within-limits"]);
    }

    #[test]
    fn a_port_without_counters_does_not_fail_and_an_unreadable_one_does_not_pass() {
        assert_eq!(check("symbol_error", &["N/A (no PMA)\n"]), ["pass within-limits"]);
        assert_eq!(check("symbol_error", &["many\n"]), ["inconclusive unparseable"]);
        let none: Vec<_> = COUNTERS.iter().map(|_| sampled_files(&[&[]])).collect();
        assert_eq!(classify_outputs(&CHECK, &none), ["not-applicable no-counters"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    #[test]
    fn limits_are_configurable() {
        let with = |text: &str| {
            let params: Params = toml::from_str(text).unwrap();
            classify_outputs_with(&CHECK, &params, None, &outputs("symbol_error", &["0", "500"]))
        };
        assert_eq!(with("limits = { symbol_error = 1000 }"), ["pass within-limits"]);
        assert_eq!(with("limits = { symbol_errors = 1000 }"), ["inconclusive unparseable"]);
        assert_eq!(with("limits = 5"), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(a in ".{0,20}", b in "[0-9]{0,30}") {
            check("symbol_error", &[&a, &b]);
            check("link_downed", &[&b, &a]);
        }
    }
}
