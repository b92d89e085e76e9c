//! ib-rate: does every high-speed network port run at its full rate?
//!
//! What it does: reads the rate of each active port and compares it with the best port of the same kind of adapter on
//! this node, and the best of all with the machine profile.
//!
//! Why it matters: a cable with one bad lane trains at half or a quarter of its rate and stays up. No error is
//! reported; every job that uses it is slow.
//!
//! What to do: `doctor why NODE` names the port; `ibstat DEVICE` shows its rate and `mlxlink -d DEVICE -m -c` the lanes
//! and the module. Both findings are `isolate`, confirmed by a second failure.
//! - `port-slow`: this port is slower than others of its kind. Reseat or replace cable and transceiver, then try
//!   another port of the switch; if it stays slow, the adapter is bad.
//! - `fabric-slow`: even the best port is slower than the profile's `fabric_rate_bits`. Check whether the switch's
//!   speed was set by hand, and whether the node matches its profile.
//!
//! Ports that are down are covered by `ib-ports`. Not applicable where there is no RDMA device.

use std::collections::BTreeMap;

use doctor_core::observation::{Entity, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure, Unit};

use crate::{
    files::{glob_files, unexpected_content},
    probe::{FileText, Probe, ProbeOutput},
    rdma::{HCA_TYPE, LINK_LAYER, Port, RATE, STATE, port_file, ports, parse_rate},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("ib-rate", "rate of each RDMA port");

// No such link was ever slower than one lane of SDR: without a profile, that is the lower limit of the node.
const RULES: &str = r#"
rules = [
  { id = "ib-rate-port", check = "ib-rate", metric = "percent_of_best_port", below = 100.0, reason = "port-slow",
    severity = "isolate", confirm = 2, text = "{entity}: {value} % of the rate of the fastest port of its type" },
  { id = "ib-rate-node", check = "ib-rate", metric = "fabric_rate_bits", below_percent_of_profile = 100.0,
    reason = "fabric-slow", severity = "isolate", confirm = 2,
    text = "the fastest port runs at {value}bit/s, expected {limit}bit/s on this machine type" },
  { id = "ib-rate-floor", check = "ib-rate", metric = "fabric_rate_bits", below = 2500000000.0, reason = "fabric-slow",
    severity = "isolate", confirm = 2, text = "the fastest port runs at {value}bit/s, expected at least {limit}bit/s on any machine" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("ib_rate.rs")), rules: RULES, probes, interpret };

fn probes(_: &Params) -> Vec<Probe> {
    [STATE, RATE, HCA_TYPE, LINK_LAYER].map(Probe::glob).to_vec()
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let ports = ports(outputs.first())?;
    let (rates, types, layers) = (glob_files(outputs.get(1))?, glob_files(outputs.get(2))?, glob_files(outputs.get(3))?);
    let mut builder = ObservationBuilder::default();
    let mut kinds: BTreeMap<(&str, &str), Vec<(Entity, f64)>> = BTreeMap::new();
    for port in &ports {
        match &port.state {
            Err(failure) => builder.unreadable(failure.clone()),
            Ok("ACTIVE") => match rate(port, rates) {
                Ok(rate) => {
                    let name = |all, pattern| port_file(all, pattern, &[port.device, port.port]).ok().flatten();
                    let kind = (name(types, HCA_TYPE).unwrap_or(""), name(layers, LINK_LAYER).unwrap_or(""));
                    kinds.entry(kind).or_default().push((port.entity(), rate));
                }
                Err(failure) => builder.unreadable(failure),
            },
            Ok(_) => {}
        }
    }
    let best_of_all = kinds.values().flatten().map(|(_, rate)| *rate).fold(0.0, f64::max);
    for ports in kinds.into_values() {
        let best = ports.iter().map(|(_, rate)| *rate).fold(1.0, f64::max);
        for (entity, rate) in ports {
            builder.metric(Metric::new("port_rate_bits", entity.clone(), rate, Unit::BitsPerSecond));
            builder.metric(Metric::new("percent_of_best_port", entity, rate * 100.0 / best, Unit::Percent));
        }
    }
    if best_of_all > 0.0 {
        builder.metric(Metric::new("fabric_rate_bits", Entity::node(), best_of_all, Unit::BitsPerSecond));
    }
    let none = ProbeFailure::new(FailureKind::Empty, "no port is active, so none has a rate; see ib-ports");
    Ok(builder.build_or(Observation::Failed(none)))
}

fn rate(port: &Port<'_>, rates: &[FileText]) -> Result<f64, ProbeFailure> {
    let missing = || ProbeFailure::new(FailureKind::Missing, format!("{} has no rate", port.entity()));
    let text = port_file(rates, RATE, &[port.device, port.port])?.ok_or_else(missing)?;
    parse_rate(text).ok_or_else(|| unexpected_content(&format!("the rate of {}", port.entity()), text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        files::tests::found,
        classify_fixture::{classify_outputs, classify_outputs_with},
    };
    use doctor_core::{ids::Sku, profile::Profile};
    use proptest::prelude::*;

    /// Ports by device name: type, state, rate. Made by hand after other projects' captures.
    fn outputs(ports: &[(&str, &str, &str, &str)]) -> [ProbeOutput; 4] {
        let path = |pattern: &str, device: &str| pattern.replacen('*', device, 1).replacen('*', "1", 1);
        let all = |pattern: &str, text: fn(&(&str, &str, &str, &str)) -> String| {
            let each: Vec<(String, String)> = ports.iter().map(|port| (path(pattern, port.0), text(port))).collect();
            found(&each.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect::<Vec<_>>())
        };
        [
            all(STATE, |port| port.2.to_owned()),
            all(RATE, |port| port.3.to_owned()),
            all(HCA_TYPE, |port| port.1.to_owned()),
            all(LINK_LAYER, |_| "InfiniBand\n".to_owned()),
        ]
    }

    const UP: &str = "4: ACTIVE\n";
    const NDR: &str = "400 Gb/sec (4X NDR)\n";

    #[test]
    fn a_port_is_compared_only_with_ports_of_its_kind() {
        let storage = ("mlx5_2", "MT4123", UP, "200 Gb/sec (4X HDR)\n");
        let healthy = [("mlx5_0", "MT4129", UP, NDR), ("mlx5_1", "MT4129", UP, NDR), storage];
        assert_eq!(classify_outputs(&CHECK, &outputs(&healthy)), ["pass within-limits"]);
        let slow = [("mlx5_0", "MT4129", UP, NDR), ("mlx5_1", "MT4129", UP, "100 Gb/sec (1X NDR)\n"), storage];
        assert_eq!(classify_outputs(&CHECK, &outputs(&slow)), ["fail port-slow isolate link:mlx5_1/1"]);
    }

    #[test]
    fn all_ports_may_be_slow_together() {
        let expect = [("fabric_rate_bits".to_owned(), 400e9.into())].into();
        let profile = Profile { sku: Sku::new("hgx-h100").unwrap(), version: 1, expect };
        let slow = outputs(&[("mlx5_0", "MT4129", UP, "200 Gb/sec (4X HDR)\n")]);
        let lines = classify_outputs_with(&CHECK, &Params::new(), Some(&profile), &slow);
        assert_eq!(lines, ["fail fabric-slow isolate node"]);
        let full = outputs(&[("mlx5_0", "MT4129", UP, NDR)]);
        assert_eq!(classify_outputs_with(&CHECK, &Params::new(), Some(&profile), &full), ["pass within-limits"]);
    }

    #[test]
    fn an_unknown_rate_does_not_pass() {
        assert_eq!(classify_outputs(&CHECK, &outputs(&[])), ["not-applicable no-rdma"]);
        let odd = [("mlx5_0", "MT4129", UP, NDR), ("mlx5_1", "MT4129", UP, "fast\n")];
        assert_eq!(classify_outputs(&CHECK, &outputs(&odd)), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &outputs(&[("mlx5_0", "MT4129", "1: DOWN\n", NDR)])), ["inconclusive empty"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(rate in ".{0,30}", kind in ".{0,9}") {
            classify_outputs(&CHECK, &outputs(&[("a", &kind, UP, &rate), ("b", &kind, UP, NDR)]));
        }
    }
}
