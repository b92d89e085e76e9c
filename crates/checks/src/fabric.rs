//! fabric: does every port of the high-speed network move data at its link rate and without errors?
//!
//! What it does: tests each active InfiniBand and RoCE port in turn with `ib_write_bw` of perftest, as server and
//! client on this node: messages of 8 MiB for 5 s, through the adapter and back. Tests each EFA adapter with
//! `fi_pingpong` of libfabric, with its shared-memory path disabled. Reads the error counters of the port before and
//! after. It takes about 8 s per port. The suites `sweep` and `quarantine` run it; to run it by hand, use
//! `doctor-node test fabric`.
//!
//! Each run first tests a device that does not exist. If the program reports a result for it, the program ignores its
//! device argument and no other result can be trusted: inconclusive.
//!
//! Why it matters: a port that is up and at its full rate may still be slow, because of its PCIe link or its firmware.
//! One of eight such ports slows every collective of every job on the node.
//!
//! What to do: `doctor log RUN` shows each port's result; `doctor why NODE` compares them.
//! - `loopback-failed` is `reboot`, confirmed by a second failure: messages did not arrive. If it recurs after a
//!   reboot, the adapter is bad.
//! - `loopback-slow` is `reboot`, confirmed by a second failure: less than three quarters of the link's rate, less than
//!   the profile's `ib_write_bits_per_s`, less than 85 % of this port's own median (at least five results); for EFA
//!   less than 20 Gbit/s. Check `pcie-link`, `pcie-acs` and the node's IOMMU settings, then the adapter.
//! - `loopback-odd` is `monitor`, confirmed by a second failure: below 90 % of the median of this node's other ports of
//!   the same kind (at least two others).
//! - `loopback-stalled` is `monitor`, confirmed by a second failure: no answer in time. On EFA, check the security
//!   group first: it must allow the instance to talk to itself.
//! - `symbol-errors`, `link-downed` and the other findings of `ib-counters` and `efa-counters`, with their severities:
//!   the counter grew under load by more than those checks allow for the time. Errors of the cable itself
//!   (`symbol-errors`, `link-recoveries`) are confirmed by a second failure.
//!
//! The load goes through the adapter and not over the cable: `ib-counters` and the collective test find faults of the
//! switch and the cable. A port that is down is not tested, `ib-ports` reports it; `ib-rate` checks its rate. On a node
//! with InfiniBand, Ethernet ports are not tested unless they are named. Without the programs (packages `perftest` and
//! `libfabric-bin`; on AWS, `/opt/amazon/efa/bin`) it is not applicable (`no-perftest`), which `doctor status` reports
//! once for the fleet. Not applicable where there is no RDMA device.
//! While other processes use more than 20 % of the processors, a bandwidth below its limit is not judged:
//! inconclusive (`disturbed`), with the name of the process and its owner.
//!
//! Parameters, below `[tests.fabric.params]` in the policy or by `doctor-node test fabric --set NAME=VALUE`:
//! - `devices`, a list such as `["mlx5_0"]`, by default all.
//! - `duration` of the load on each port, by default `"5s"`, in whole seconds, at least 3; `stall`, by default `"30s"`:
//!   how long a port may take beyond that; `timeout`, by default `"15m"`, after which no further port is started.
//! - `gid_index`, for RoCE.
//! - `ib_write_bw` and `fi_pingpong`, names or paths of the programs.

use doctor_core::{access::Access, observation::Observation, software::Software, time::Span};

use crate::{
    fabric_params::FabricParams,
    measurements::interpret_measurements,
    probe::{Probe, ProbeOutput},
    rdma::{STATE, ports},
    check_params,
    software::not_applicable_without,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec =
    Spec::deep("fabric", "loopback bandwidth of RDMA ports", Span::from_secs(70), Span::minutes(20))
        .opt_in()
        .access(&[Access::Rdma]);

macro_rules! rules {
    ($($counter:literal $severity:literal $confirm:literal,)*) => {
        concat!(r#"
rules = [
  { id = "fabric-failed", check = "fabric", event = "loopback-failed", reason = "loopback-failed", severity = "reboot",
    confirm = 2, text = "{entity}: {value}" },
  { id = "fabric-stalled", check = "fabric", event = "loopback-stalled", reason = "loopback-stalled", severity = "monitor",
    confirm = 2, text = "{entity}: {value}" },
  { id = "fabric-ib-rate", check = "fabric", metric = "ib_write_percent_of_rate", below = 75.0, where_measured = true,
    reason = "loopback-slow", severity = "reboot", confirm = 2, text = "{entity}: {value} % of the link rate, expected at least {limit} %" },
  { id = "fabric-ib-floor", check = "fabric", metric = "ib_write_bits_per_s", below = 1000000000.0, where_measured = true,
    reason = "loopback-slow", severity = "reboot", confirm = 2, text = "{entity}: {value}bit/s, expected at least {limit}bit/s on any port" },
  { id = "fabric-ib-profile", check = "fabric", metric = "ib_write_bits_per_s", below_percent_of_profile = 100.0,
    where_measured = true, reason = "loopback-slow", severity = "reboot", confirm = 2,
    text = "{entity}: {value}bit/s, expected at least {limit}bit/s on this machine type" },
  { id = "fabric-ib-own", check = "fabric", metric = "ib_write_bits_per_s", below_percent_of_own = 85.0,
    where_measured = true, reason = "loopback-slow", severity = "reboot", confirm = 2,
    text = "{entity}: {value}bit/s, expected at least {limit}bit/s (85 % of this port's median)" },
  { id = "fabric-efa-floor", check = "fabric", metric = "efa_pingpong_bits_per_s", below = 20000000000.0,
    where_measured = true, reason = "loopback-slow", severity = "reboot", confirm = 2,
    text = "{entity}: {value}bit/s, expected at least {limit}bit/s of an EFA adapter" },
  { id = "fabric-efa-own", check = "fabric", metric = "efa_pingpong_bits_per_s", below_percent_of_own = 85.0,
    where_measured = true, reason = "loopback-slow", severity = "reboot", confirm = 2,
    text = "{entity}: {value}bit/s, expected at least {limit}bit/s (85 % of this port's median)" },
  { id = "fabric-odd", check = "fabric", metric = "loopback_percent_of_others", below = 90.0, where_measured = true,
    reason = "loopback-odd", severity = "monitor", confirm = 2, text = "{entity}: {value} % of the other ports' bandwidth, expected at least {limit} %" },
"#, $(
            "  { id = \"fabric-", $counter, "\", check = \"fabric\", event = \"", $counter, "\", reason = \"", $counter,
            "\", severity = \"", $severity, "\",\n    confirm = ", $confirm, ", text = \"{entity}: {value}\" },\n",
        )* "]\n")
    };
}

// The severities are those of `ib-counters` and `efa-counters`; a test keeps them equal. A few cable errors within
// seconds may be chance where hours of them are not, so those need a second failure.
const RULES: &str = rules![
    "symbol-errors" "isolate" "2",
    "buffer-overruns" "isolate" "1",
    "link-integrity-errors" "isolate" "1",
    "link-downed" "monitor" "1",
    "rnr-retries" "monitor" "1",
    "link-recoveries" "monitor" "2",
    "receive-errors" "monitor" "1",
    "ack-timeouts" "monitor" "1",
    "send-discards" "monitor" "1",
    "slow-restarts" "monitor" "1",
    "efa-timeouts" "monitor" "1",
    "efa-drops" "monitor" "1",
];

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("fabric.rs")), rules: RULES, probes, interpret };

const DEFAULT_DURATION: Span = Span::from_secs(5);
/// perftest ignores the first and the last second; one is left.
const MIN_DURATION: Span = Span::from_secs(3);
const DEFAULT_STALL: Span = Span::from_secs(30);
const DEFAULT_TIMEOUT: Span = Span::minutes(15);
/// Time for the negative controls and for writing the report.
const TEST_OVERHEAD: Span = Span::minutes(2);

const KNOWN_PARAMS: [(&str, &str); 7] = [
    ("devices", "devices = [\"mlx5_0\", \"mlx5_1\"]"),
    ("duration", "duration = \"5s\""),
    ("stall", "stall = \"30s\""),
    ("timeout", "timeout = \"15m\""),
    ("gid_index", "gid_index = 3"),
    ("ib_write_bw", "ib_write_bw = \"/usr/bin/ib_write_bw\""),
    ("fi_pingpong", "fi_pingpong = \"/opt/amazon/efa/bin/fi_pingpong\""),
];

fn test_params(params: &Params) -> Result<FabricParams, Observation> {
    let example = check_params::reject_unknown(params, &KNOWN_PARAMS)?;
    let span = |name: &str, default| {
        Ok::<_, Observation>(check_params::duration(params, name, example(name))?.unwrap_or(default))
    };
    let word = |name: &str| {
        let word = check_params::string(params, name, example(name))?.unwrap_or_else(|| name.to_owned());
        if word.starts_with('-') { Err(check_params::invalid_param(name, example(name))) } else { Ok(word) }
    };
    let duration = span("duration", DEFAULT_DURATION)?;
    if duration < MIN_DURATION || duration.millis() % 1000 != 0 {
        return Err(check_params::invalid_param("duration", example("duration")));
    }
    let gid_index = match check_params::number(params, "gid_index", example("gid_index"))? {
        None => None,
        Some(index) if (0.0..256.0).contains(&index) && index.fract() == 0.0 => Some(index as u32),
        Some(_) => return Err(check_params::invalid_param("gid_index", example("gid_index"))),
    };
    let devices = check_params::string_list(params, "devices", example("devices"))?.unwrap_or_default();
    if devices.iter().any(|name| name.is_empty() || name.starts_with('-') || name.contains('/')) {
        return Err(check_params::invalid_param("devices", example("devices")));
    }
    Ok(FabricParams {
        devices,
        duration,
        stall: span("stall", DEFAULT_STALL)?,
        gid_index,
        ib_write_bw: word("ib_write_bw")?,
        fi_pingpong: word("fi_pingpong")?,
        timeout: span("timeout", DEFAULT_TIMEOUT)?,
    })
}

/// Also lists the ports: a node without ports does not need the programs.
fn probes(params: &Params) -> Vec<Probe> {
    let Ok(order) = test_params(params) else { return Vec::new() };
    let Ok(written) = serde_json::to_string(&order) else { return Vec::new() };
    let millis = order.timeout.millis() + order.duration.millis() + order.stall.millis() * 4;
    let timeout = Span::from_millis(millis) + TEST_OVERHEAD;
    vec![Probe::glob(STATE), Probe::Builtin { test: SPEC.id.to_owned(), args: vec![written], timeout }]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    if let Err(instead) = test_params(params) {
        return instead;
    }
    match ports(outputs.first()) {
        Err(instead @ Observation::NotApplicable(_)) => instead,
        _ => {
            let measured = interpret_measurements(params, outputs.get(1..).unwrap_or_default());
            not_applicable_without(Software::Perftest, measured)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CHECKS, default_rules, document::Measurements, fabric_counters, files::tests::found, classify_fixture::classify_outputs_with};
    use doctor_core::{
        ids::Sku,
        observation::{Event, FailureKind, Metric, ProbeFailure, Unit},
        profile::Profile,
    };

    fn params(text: &str) -> Params {
        toml::from_str(text).unwrap()
    }

    fn state() -> ProbeOutput {
        found(&[("/sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")])
    }

    fn measured(metrics: Vec<Metric>, events: Vec<Event>) -> ProbeOutput {
        let all = Measurements { metrics, events, failures: Vec::new() };
        ProbeOutput::Text(serde_json::to_string(&all).unwrap())
    }

    fn judge(settings: &str, profile: Option<&Profile>, output: ProbeOutput) -> Vec<String> {
        classify_outputs_with(&CHECK, &params(settings), profile, &[state(), output])
    }

    /// A port of 400 Gbit/s that moved this share of its rate.
    fn moved(share: f64) -> Vec<Metric> {
        let port = crate::rdma::port_entity("mlx5_0", "1");
        vec![
            Metric::new("ib_write_bits_per_s", port.clone(), share * 400e9, Unit::BitsPerSecond),
            Metric::new("ib_write_percent_of_rate", port, share * 100.0, Unit::Percent),
        ]
    }

    #[test]
    fn a_port_is_compared_with_its_link_rate_and_the_profile() {
        assert_eq!(judge("", None, measured(moved(0.97), Vec::new())), ["pass within-limits"]);
        let slow = ["fail loopback-slow reboot link:mlx5_0/1"];
        assert_eq!(judge("", None, measured(moved(0.5), Vec::new())), slow);
        let expect = [("ib_write_bits_per_s".to_owned(), 390e9.into())].into();
        let profile = Profile { sku: Sku::new("hb").unwrap(), version: 1, expect };
        assert_eq!(judge("", Some(&profile), measured(moved(0.99), Vec::new())), ["pass within-limits"]);
        assert_eq!(judge("", Some(&profile), measured(moved(0.9), Vec::new())), slow);
    }

    #[test]
    fn efa_adapters_and_outliers_have_their_limits() {
        let port = || crate::rdma::port_entity("rdmap79s0", "1");
        let efa = |bits| Metric::new("efa_pingpong_bits_per_s", port(), bits, Unit::BitsPerSecond);
        assert_eq!(judge("", None, measured(vec![efa(40e9)], Vec::new())), ["pass within-limits"]);
        let slow = judge("", None, measured(vec![efa(19e9)], Vec::new()));
        assert_eq!(slow, ["fail loopback-slow reboot link:rdmap79s0/1"]);
        let odd = Metric::new("loopback_percent_of_others", port(), 80.0, Unit::Percent);
        let odd = judge("", None, measured(vec![efa(40e9), odd], Vec::new()));
        assert_eq!(odd, ["fail loopback-odd monitor link:rdmap79s0/1"]);
    }

    #[test]
    fn every_counter_has_the_severity_of_its_own_check() {
        let rules_of = |id: &str| {
            let check = CHECKS.iter().find(|check| check.spec.id == id).unwrap();
            default_rules::all_rules(check).unwrap()
        };
        let ours = rules_of("fabric");
        for theirs in rules_of("ib-counters").into_iter().chain(rules_of("efa-counters")) {
            let same = ours.iter().find(|rule| rule.when == theirs.when).unwrap_or_else(|| panic!("{}", theirs.id));
            assert_eq!((&same.reason, same.severity), (&theirs.reason, theirs.severity));
        }
        assert_eq!(fabric_counters::counter_paths("mlx5_0", "1").len(), 12);
    }

    #[test]
    fn not_applicable_without_a_device_and_inconclusive_without_the_program() {
        let missing = || ProbeOutput::Failed(ProbeFailure::new(FailureKind::NotInstalled, "ib_write_bw is not installed"));
        let bare = classify_outputs_with(&CHECK, &Params::new(), None, &[found(&[]), missing()]);
        assert_eq!(bare, ["not-applicable no-rdma"]);
        assert_eq!(judge("", None, missing()), ["not-applicable no-perftest"]);
        assert_eq!(judge("", None, measured(Vec::new(), Vec::new())), ["inconclusive empty"]);
        assert_eq!(classify_outputs_with(&CHECK, &Params::new(), None, &[state()]), ["inconclusive empty"]);
    }

    #[test]
    fn parameters_reach_the_test_and_invalid_ones_are_reported() {
        let set = params("devices = ['mlx5_3']\nduration = '10s'\ngid_index = 3");
        let parsed = test_params(&set).unwrap();
        assert_eq!((parsed.devices, parsed.duration, parsed.gid_index), (vec!["mlx5_3".into()], Span::from_secs(10), Some(3)));
        assert!(CHECK.limit(&set) > DEFAULT_TIMEOUT);
        for text in [
            "duration = '1s'",
            "duration = '3500ms'",
            "duration = 5",
            "devices = 'mlx5_0'",
            "devices = ['-x']",
            "devices = ['../mlx5_0']",
            "gid_index = 1.5",
            "gid_index = -1",
            "ib_write_bw = '--help'",
            "port = 18515",
        ] {
            assert_eq!(judge(text, None, measured(moved(0.97), Vec::new())), ["inconclusive unparseable"], "{text}");
            assert!(probes(&params(text)).is_empty(), "{text}");
        }
    }
}
