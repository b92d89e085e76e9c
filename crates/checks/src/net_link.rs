//! net-link: are the node's network interfaces stable and at full speed?
//!
//! What it does: for each physical interface, reads how often its carrier changed within the last hour and its error rate
//! over the last ten minutes, and compares its speed with that of identical adapters on this node.
//!
//! Why it matters: the ordinary network carries storage, the scheduler and the start of every job. A bad cable or a
//! port that negotiated a tenth of its speed shows as slow storage, lost heartbeats and jobs that time out.
//!
//! What to do: `ethtool INTERFACE` and `ethtool -S INTERFACE` show the link and the kind of errors. Every finding is
//! `monitor`: the node works; act before it gets worse.
//! - `carrier-flaps`: the link went down and came back more than twice within the hour (the first time after a boot
//!   does not count). Check cable, transceiver and switch.
//! - `network-errors`: more than 10 errors per second. A bad cable (`rx_crc_errors`), or a ring buffer that is too
//!   small.
//! - `network-slow`, confirmed by a second failure: the link is slower than that of an identical adapter here:
//!   `ethtool INTERFACE` shows what the other side offers.
//!
//! Virtual interfaces (bridges, pods, lo) are ignored. Not applicable where there is no physical one.

use std::collections::BTreeMap;

use doctor_core::{
    observation::{Entity, EntityKind, Event, ObservationBuilder, Metric, Observation, Unit},
    time::Span,
};

use crate::{
    files::{Series, glob_files, match_pattern_exact, sampled_series, unexpected_content},
    gpu::not_applicable,
    probe::{FileText, Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("net-link", "carrier, errors and speed of network interfaces");

const RULES: &str = r#"
rules = [
  { id = "net-link-flaps", check = "net-link", metric = "carrier_changes", above = 4.0, reason = "carrier-flaps",
    severity = "monitor", text = "{entity}: carrier changed {value} times within the hour, limit {limit}" },
  { id = "net-link-errors", check = "net-link", metric = "errors_per_second", above = 10.0, reason = "network-errors",
    severity = "monitor", text = "{entity}: {value} errors per second, limit {limit}" },
  { id = "net-link-slow", check = "net-link", event = "network-slow", reason = "network-slow", severity = "monitor",
    confirm = 2, text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("net_link.rs")), rules: RULES, probes, interpret };

/// Only a physical interface has a device.
const DEVICE: &str = "/sys/class/net/*/device/uevent";
const SPEED: &str = "/sys/class/net/*/speed";
const CHANGES: &str = "/sys/class/net/*/carrier_changes";
const ERRORS: [&str; 2] = ["/sys/class/net/*/statistics/rx_errors", "/sys/class/net/*/statistics/tx_errors"];

fn probes(_: &Params) -> Vec<Probe> {
    let sampled = |pattern: &str| Probe::Sampled { pattern: pattern.to_owned(), keep: Span::hours(1) };
    vec![Probe::glob(DEVICE), Probe::glob(SPEED), sampled(CHANGES), sampled(ERRORS[0]), sampled(ERRORS[1])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let (devices, speeds, changes) = (glob_files(outputs.first())?, glob_files(outputs.get(1))?, sampled_series(outputs.get(2))?);
    let errors = [sampled_series(outputs.get(3))?, sampled_series(outputs.get(4))?];
    let mut builder = ObservationBuilder::default();
    let mut kinds: BTreeMap<String, Vec<(Entity, f64)>> = BTreeMap::new();
    for device in devices {
        let Some([name]) = match_pattern_exact(DEVICE, &device.path) else { continue };
        let entity = Entity::new(EntityKind::Nic, name);
        match series_of_interface(&changes, CHANGES, name).and_then(|series| series.growth_since_boot(Span::hours(1))) {
            Some(growth) => builder.metric(Metric::count("carrier_changes", entity.clone(), growth.in_last_hour())),
            None => builder.unreadable(unexpected_content(&CHANGES.replace('*', name), "no number")),
        }
        let rates: Option<Vec<f64>> = errors
            .iter()
            .zip(ERRORS)
            .map(|(all, pattern)| Some(series_of_interface(all, pattern, name)?.growth(Span::minutes(11))?.per_second()))
            .collect();
        match rates {
            Some(rates) => {
                builder.metric(Metric::new("errors_per_second", entity.clone(), rates.iter().sum(), Unit::PerSecond));
            }
            None => builder.unreadable(unexpected_content(&ERRORS[0].replace('*', name), "no number")),
        }
        if let Some(speed) = speed(speeds, name) {
            builder.metric(Metric::new("speed_bits", entity.clone(), speed, Unit::BitsPerSecond));
            kinds.entry(adapter_type(device)).or_default().push((entity, speed));
        }
    }
    for interfaces in kinds.values() {
        let best = interfaces.iter().map(|(_, speed)| *speed).fold(0.0, f64::max);
        for (entity, speed) in interfaces.iter().filter(|(_, speed)| *speed < best) {
            let text = format!("{:.0} Mbit/s, another adapter of the same type has {:.0} Mbit/s", speed / 1e6, best / 1e6);
            builder.event(Event::seen("network-slow", entity.clone(), text));
        }
    }
    Ok(builder.build_or(not_applicable("no-interface", "no physical network interface on this node")))
}

fn series_of_interface<'a, 'b>(all: &'b [Series<'a>], pattern: &str, name: &str) -> Option<&'b Series<'a>> {
    all.iter().find(|series| match_pattern_exact(pattern, series.path) == Some([name]))
}

/// Returns the speed in bits per second. The kernel returns an error for a link that is down, and -1 where there is no
/// speed (InfiniBand, most virtual adapters): neither counts as slow.
fn speed(all: &[FileText], name: &str) -> Option<f64> {
    let file = all.iter().find(|file| match_pattern_exact(SPEED, &file.path) == Some([name]))?;
    let speed: f64 = file.text.as_deref().ok()?.trim().parse().ok()?;
    (speed.is_finite() && speed > 0.0).then_some(speed * 1e6)
}

/// Returns driver and identity: adapters with the same text are of the same kind.
fn adapter_type(device: &FileText) -> String {
    let text = device.text.as_deref().unwrap_or("");
    let lines =
        text.lines().filter(|line| ["DRIVER=", "PCI_ID=", "PCI_SUBSYS_ID="].iter().any(|key| line.starts_with(key)));
    lines.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        files::tests::{found, sampled_files},
        classify_fixture::classify_outputs,
    };
    use proptest::prelude::*;

    /// Two adapters of one kind; the second with this speed, and these readings of carrier changes and errors.
    fn check(speed: &str, changes: [&str; 2], errors: [&str; 2]) -> Vec<String> {
        let uevent = "DRIVER=mlx5_core\nPCI_ID=15B3:101D\nPCI_SLOT_NAME=0000:3b:00.0\n";
        let of = |name: &str, values: [&str; 2]| {
            let path = |interface: &str| format!("/sys/class/net/{interface}/{name}");
            let (a, b, pod) = (path("eth0"), path("eth1"), path("veth9"));
            let at = |value| vec![(a.as_str(), "2\n"), (b.as_str(), value), (pod.as_str(), value)];
            sampled_files(&[&at(values[0]), &at(values[1])])
        };
        classify_outputs(
            &CHECK,
            &[
                found(&[("/sys/class/net/eth0/device/uevent", uevent), ("/sys/class/net/eth1/device/uevent", uevent)]),
                found(&[("/sys/class/net/eth0/speed", "100000\n"), ("/sys/class/net/eth1/speed", speed)]),
                of("carrier_changes", changes),
                of("statistics/rx_errors", errors),
                of("statistics/tx_errors", ["0", "0"]),
            ],
        )
    }

    // Made by hand.
    #[test]
    fn each_problem_is_reported_for_its_interface() {
        let still = ["3\n", "3\n"];
        assert_eq!(check("100000\n", still, still), ["pass within-limits"]);
        assert_eq!(check("10000\n", still, still), ["fail network-slow monitor nic:eth1"]);
        assert_eq!(check("100000\n", ["3", "8"], still), ["fail carrier-flaps monitor nic:eth1"]);
        assert_eq!(check("100000\n", still, ["0", "3300"]), ["fail network-errors monitor nic:eth1"]);
        assert_eq!(check("-1\n", still, ["900000", "900000"]), ["pass within-limits"]);
    }

    #[test]
    fn a_non_numeric_counter_is_not_zero() {
        assert_eq!(check("100000\n", ["3", "?"], ["0", "0"]), ["inconclusive unparseable"]);
        let nothing = [found(&[]), found(&[]), sampled_files(&[&[]]), sampled_files(&[&[]]), sampled_files(&[&[]])];
        assert_eq!(classify_outputs(&CHECK, &nothing), ["not-applicable no-interface"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(a in ".{0,12}", b in "[0-9.eE+-]{0,12}") {
            check(&a, [&a, &b], [&b, &a]);
            check(&b, [&b, &a], [&a, &b]);
        }
    }
}
