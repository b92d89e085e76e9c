//! nic-log: which errors of network adapters are in the kernel log?
//!
//! What it does: reads the records of the driver of NVIDIA's network adapters (`mlx5_core`) in the kernel log of this
//! boot, at most `within` old. All records of one kind about one adapter are one finding.
//!
//! Why it matters: an adapter whose firmware has stopped answering still looks up in `ibstat` for a while, and fails
//! every job that uses the fabric.
//!
//! What to do: `doctor why NODE` names the adapter; `mlxfwmanager`, `mlxlink -d BUS` and `dmesg | grep mlx5` show more.
//! - `nic-dead` is `isolate`: the adapter reports an unrecoverable hardware error.
//! - `nic-command-timeout`, `nic-health-lost` are `reboot`: the firmware does not answer commands, or its heartbeat has
//!   stopped. A reboot restarts it; if it recurs, the adapter or its slot is bad. NVSentinel replaces the machine for
//!   these three.
//! - `nic-send-timeout` is `monitor`: a queue did not send for seconds. Once is harmless; repeatedly is the link or the
//!   firmware.
//! - `nic-slot-power` is `monitor`: the slot provides less power than the adapter requires. Check the riser and the
//!   firmware's power settings.
//! - `nic-module-hot` is `monitor`: a cable or transceiver is too hot. Check the airflow.
//! - `nic-module-unplugged` is `monitor`: a cable was unplugged and has not been plugged in again.
//! - `nic-register-refused` is `monitor`: the firmware rejects a register that is requested repeatedly, usually by a
//!   monitoring tool of another version than the firmware. Harmless in itself.
//!
//! Not applicable where no device uses `mlx5_core` and the log has no record of it.
//!
//! Parameters: `within`, by default `"7d"`.

use std::collections::BTreeMap;

use doctor_core::{
    observation::{Entity, EntityKind, Observation},
    reason::ReasonCode,
};

use crate::{
    files::match_pattern,
    gpu::{normalize_bus_id, not_applicable},
    kmsg::{self, RecordGroups},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("nic-log", "network adapter errors in the kernel log");

const RULES: &str = r#"
rules = [
  { id = "nic-log-dead", check = "nic-log", event = "nic-dead", reason = "nic-dead",
    severity = "isolate", text = "{entity}: {value}" },
  { id = "nic-log-command-timeout", check = "nic-log", event = "nic-command-timeout", reason = "nic-command-timeout",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "nic-log-health-lost", check = "nic-log", event = "nic-health-lost", reason = "nic-health-lost",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "nic-log-send-timeout", check = "nic-log", event = "nic-send-timeout", reason = "nic-send-timeout",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "nic-log-slot-power", check = "nic-log", event = "nic-slot-power", reason = "nic-slot-power",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "nic-log-module-hot", check = "nic-log", event = "nic-module-hot", reason = "nic-module-hot",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "nic-log-module-unplugged", check = "nic-log", event = "nic-module-unplugged", reason = "nic-module-unplugged",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "nic-log-register-refused", check = "nic-log", event = "nic-register-refused", reason = "nic-register-refused",
    severity = "monitor", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("nic_log.rs")), rules: RULES, probes, interpret };

const DEVICES: &str = "/sys/bus/pci/drivers/mlx5_core/*";
const RDMA: &str = "/sys/class/infiniband/*/device";
const NET: &str = "/sys/class/net/*/device";

fn probes(_: &Params) -> Vec<Probe> {
    let mut all: Vec<Probe> = kmsg::probes().into();
    all.extend([DEVICES, RDMA, NET].map(|pattern| Probe::Links { pattern: pattern.to_owned() }));
    all
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let no_card = || not_applicable("no-mlx5", "no device uses the driver mlx5_core");
    let none_here = match outputs.get(3) {
        Some(ProbeOutput::Links(links)) => !links.iter().any(|(path, _)| is_device(path)),
        _ => false,
    };
    let log = match kmsg::parse_log(params, outputs) {
        Ok(log) => log,
        Err(_) if none_here => return no_card(),
        Err(instead) => return instead,
    };
    let names = DeviceNames::read(outputs);
    let (mut bursts, mut any) = (RecordGroups::default(), false);
    for record in log.recent() {
        let Some((device, sign)) = match_record(record.text) else { continue };
        any = true;
        let card = names.adapter_entity(device);
        match sign {
            RecordKind::Fault(code) => bursts.add(ReasonCode::fixed(code), card, record),
            RecordKind::PluggedIn => bursts.remove_before(&ReasonCode::fixed("nic-module-unplugged"), &card, record),
        }
    }
    if none_here && !any {
        return no_card();
    }
    Observation::measured(vec![log.record_count()], bursts.events(&log))
}

/// Besides its devices, a driver's directory has a link to its module.
fn is_device(path: &str) -> bool {
    path.rsplit('/').next().is_some_and(|name| normalize_bus_id(name).is_some())
}

/// The names of adapters by PCI address.
struct DeviceNames {
    rdma: BTreeMap<String, String>,
    /// PCI address by network interface.
    net: BTreeMap<String, String>,
}

impl DeviceNames {
    fn read(outputs: &[ProbeOutput]) -> Self {
        let links = |at: usize, pattern: &'static str| {
            let links = match outputs.get(at) {
                Some(ProbeOutput::Links(links)) => links.as_slice(),
                _ => &[],
            };
            links.iter().filter_map(move |(path, to)| {
                let name = (*match_pattern(pattern, path)?.first()?).to_owned();
                Some((name, normalize_bus_id(to.rsplit('/').next()?)?))
            })
        };
        Self { rdma: links(4, RDMA).map(|(name, bus)| (bus, name)).collect(), net: links(5, NET).collect() }
    }

    /// Returns the adapter by its RDMA name, as in other checks, or else by its PCI address or the name in the record.
    fn adapter_entity(&self, device: &str) -> Entity {
        let bus = normalize_bus_id(device).or_else(|| self.net.get(device).cloned());
        let name = bus.as_ref().and_then(|bus| self.rdma.get(bus)).or(bus.as_ref());
        Entity::new(EntityKind::Nic, name.map_or(device, String::as_str))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RecordKind {
    Fault(&'static str),
    /// A cable was plugged in again.
    PluggedIn,
}

/// Phrases of the driver's source, the more severe first.
const PHRASES: &[(&str, RecordKind)] = &[
    ("unrecoverable hardware error", RecordKind::Fault("nic-dead")),
    ("Will cause a leak of a command resource", RecordKind::Fault("nic-command-timeout")),
    ("device's health compromised", RecordKind::Fault("nic-health-lost")),
    ("TX timeout detected", RecordKind::Fault("nic-send-timeout")),
    ("insufficient power on the PCIe slot", RecordKind::Fault("nic-slot-power")),
    ("High Temperature", RecordKind::Fault("nic-module-hot")),
    ("Cable unplugged", RecordKind::Fault("nic-module-unplugged")),
    ("Cable plugged", RecordKind::PluggedIn),
];

/// Returns the adapter and the meaning of a record.
fn match_record(text: &str) -> Option<(&str, RecordKind)> {
    let timed_out = text.contains("NETDEV WATCHDOG: ") && text.contains("transmit queue") && text.contains("timed out");
    // `NETDEV WATCHDOG: ens1 (mlx5_core): transmit queue 3 timed out`
    if let Some((name, _)) = text.strip_prefix("NETDEV WATCHDOG: ").and_then(|rest| rest.split_once(" (mlx5_core)")) {
        return timed_out.then_some((name, RecordKind::Fault("nic-send-timeout")));
    }
    // `mlx5_core 0000:3b:00.0 ens1: …`, `mlx5_core 0000:3b:00.0: …`
    let (device, rest) = text.strip_prefix("mlx5_core ")?.split_once(' ')?;
    let device = device.trim_end_matches(':');
    if timed_out {
        return Some((device, RecordKind::Fault("nic-send-timeout")));
    }
    if let Some((_, sign)) = PHRASES.iter().find(|(phrase, _)| rest.contains(phrase)) {
        return Some((device, *sign));
    }
    // `mlx5_cmd_out_err:838:(pid 1): ACCESS_REG(0x805) op_mod(0x1) failed, status bad parameter(0x3)`
    let refused = rest.contains("ACCESS_REG(") && rest.contains(" failed");
    refused.then_some((device, RecordKind::Fault("nic-register-refused")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        classify_fixture::classify_outputs,
        kmsg::tests::{at_seconds, logged},
    };
    use doctor_core::observation::{FailureKind, ProbeFailure};
    use proptest::prelude::*;

    fn links(pairs: &[(&str, &str)]) -> ProbeOutput {
        ProbeOutput::Links(pairs.iter().map(|(path, to)| ((*path).to_owned(), (*to).to_owned())).collect())
    }

    fn cards() -> [ProbeOutput; 3] {
        let device = "/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0";
        [
            links(&[("/sys/bus/pci/drivers/mlx5_core/0000:3b:00.0", device)]),
            links(&[("/sys/class/infiniband/mlx5_4/device", device)]),
            links(&[("/sys/class/net/ens1/device", device), ("/sys/class/net/eth0/device", "/sys/devices/virtual/x")]),
        ]
    }

    fn with(mut log: Vec<ProbeOutput>, cards: [ProbeOutput; 3]) -> Vec<String> {
        log.extend(cards);
        classify_outputs(&CHECK, &log)
    }

    fn check(lines: &[&str]) -> Vec<String> {
        with(logged(lines), cards())
    }

    #[test]
    fn each_kind_of_record_is_reported_for_its_adapter() {
        assert_eq!(check(&[]), ["pass within-limits"]);
        for (text, finding) in [
            ("mlx5_core 0000:3b:00.0: print_health:312: unrecoverable hardware error", "nic-dead isolate"),
            (
                "mlx5_core 0000:3b:00.0: wait_func:1162:(pid 9): ACCESS_REG(0x805) timeout. Will cause a leak of a command \
                 resource",
                "nic-command-timeout reboot",
            ),
            (
                "mlx5_core 0000:3b:00.0: poll_health:840:(pid 0): device's health compromised - reached miss count",
                "nic-health-lost reboot",
            ),
            ("mlx5_core 0000:3b:00.0 ens1: TX timeout detected", "nic-send-timeout monitor"),
            ("NETDEV WATCHDOG: ens1 (mlx5_core): transmit queue 12 timed out", "nic-send-timeout monitor"),
            (
                "mlx5_core 0000:3b:00.0 ens1: NETDEV WATCHDOG: CPU: 3: transmit queue 12 timed out 5000 ms",
                "nic-send-timeout monitor",
            ),
            (
                "mlx5_core 0000:3b:00.0: mlx5_pcie_event:300:(pid 268): Detected insufficient power on the PCIe slot (27W).",
                "nic-slot-power monitor",
            ),
            (
                "mlx5_core 0000:3b:00.0: Port module event[error]: module 0, Cable error, High Temperature",
                "nic-module-hot monitor",
            ),
            ("mlx5_core 0000:3b:00.0: Port module event: module 0, Cable unplugged", "nic-module-unplugged monitor"),
            (
                "mlx5_core 0000:3b:00.0: mlx5_cmd_out_err:838:(pid 1): ACCESS_REG(0x805) op_mod(0x1) failed, status bad \
                 parameter(0x3), syndrome (0x15c356), err(-22)",
                "nic-register-refused monitor",
            ),
        ] {
            assert_eq!(check(&[text]), [format!("fail {finding} nic:mlx5_4")], "{text}");
        }
    }

    #[test]
    fn ordinary_records_and_other_drivers_are_no_finding() {
        for text in [
            "mlx5_core 0000:3b:00.0: firmware version: 28.39.1002",
            "mlx5_core 0000:3b:00.0: Port module event: module 0, Cable plugged",
            "mlx5_core 0000:3b:00.0 ens1: Link up",
            "mlx5_core 0000:3b:00.0: ACCESS_REG(0x805) op_mod(0x1) done",
            "NETDEV WATCHDOG: eth0 (e1000e): transmit queue 0 timed out",
            "mlx5_core",
        ] {
            assert_eq!(check(&[text]), ["pass within-limits"], "{text}");
        }
    }

    #[test]
    fn a_reconnected_cable_is_no_finding() {
        let (out, back) = (
            "mlx5_core 0000:3b:00.0: Port module event: module 0, Cable unplugged",
            "mlx5_core 0000:3b:00.0: Port module event: module 0, Cable plugged",
        );
        assert_eq!(check(&[out, back]), ["pass within-limits"]);
        assert_eq!(check(&[out, back, out]), ["fail nic-module-unplugged monitor nic:mlx5_4"]);
    }

    #[test]
    fn a_flood_of_refused_registers_is_one_finding_and_hides_no_other() {
        let refused = "mlx5_core 0000:3b:00.0: mlx5_cmd_out_err:838:(pid 1): ACCESS_REG(0x805) op_mod(0x1) failed";
        let mut lines = vec![refused; 2000];
        lines.insert(
            900,
            "mlx5_core 0000:5c:00.0: poll_health:840:(pid 0): device's health compromised - reached miss count",
        );
        assert_eq!(
            check(&lines),
            ["fail nic-health-lost reboot nic:0000:5c:00.0", "fail nic-register-refused monitor nic:mlx5_4"]
        );
    }

    #[test]
    fn not_applicable_without_an_adapter_unless_the_log_has_records() {
        let none =
            || [links(&[("/sys/bus/pci/drivers/mlx5_core/module", "/sys/module/mlx5_core")]), links(&[]), links(&[])];
        assert_eq!(with(logged(&[]), none()), ["not-applicable no-mlx5"]);
        let dead = "mlx5_core 0000:3b:00.0: print_health:312: unrecoverable hardware error";
        assert_eq!(with(logged(&[dead]), none()), ["fail nic-dead isolate nic:0000:3b:00.0"]);
        let unread = || ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "/sys"));
        assert_eq!(with(logged(&[]), [unread(), unread(), unread()]), ["pass within-limits"]);
        let mut denied = logged(&[]);
        denied[0] = unread();
        assert_eq!(with(denied, cards()), ["inconclusive denied"]);
    }

    #[test]
    fn an_old_record_does_not_fail() {
        let dead = "mlx5_core 0000:3b:00.0: print_health:312: unrecoverable hardware error";
        assert_eq!(with(at_seconds(&[(1, dead)]), cards()), ["pass within-limits"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(start in "(mlx5_core |NETDEV WATCHDOG: )?", rest in ".{0,120}") {
            match_record(&format!("{start}{rest}"));
        }
    }
}
