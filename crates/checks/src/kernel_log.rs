//! kernel-log: which problems has the kernel logged?
//!
//! What it does: reads the kernel log of this boot and looks for records that indicate broken memory, processors,
//! disks, file systems or PCIe, or a kernel in trouble. Only records that the kernel itself wrote count; programs can
//! write there too. Records older than `within` are ignored. `gpu-xid`, `nvswitch-sxid` and `nic-log` read the records
//! of GPUs, NVSwitches and network adapters.
//!
//! Why it matters: most hardware faults are in this log hours or days before a job is slow or wrong because of them.
//!
//! What to do: `doctor why NODE` shows the newest line of each kind and its count; `dmesg -T` shows the context.
//! - `machine-check`, `memory-uncorrected` are `reboot`: the processor or the memory controller reported an
//!   uncorrectable error. A reboot lets the firmware map out or repair the memory; if it recurs, the part is bad.
//! - `file-system-error` is `reboot`: ext4, XFS or btrfs found damage or went read-only. A reboot runs the check that
//!   repairs it; check the disk first.
//! - `kernel-oops`, `hard-lockup` are `reboot`: the kernel's state is corrupt; only a reboot restores it.
//! - `disk-error`, `nvme-timeout` are `monitor`: a disk or its link failed to read or write, or did not answer in time.
//!   See `smartctl -x /dev/NAME`, `nvme smart-log /dev/NAME`, `nvme error-log /dev/NAME`.
//! - `raid-degraded` is `monitor`: an array lost a disk. See `cat /proc/mdstat`; one more fault loses the data.
//! - `nfs-not-responding` is `monitor`: a file server does not answer, and the kernel has not logged since that it is
//!   back. Programs on that mount hang. Check the server and the path to it, then other nodes.
//! - `pcie-error` is `monitor`: a device reported an uncorrected error on its link. See `lspci -vv -s BUS`.
//! - `hung-task`, `soft-lockup`, `rcu-stall` are `monitor`: a task waits or spins too long, usually because of storage
//!   or a device that does not answer.
//! - `netdevice-stuck` is `monitor`: a network device cannot be removed because it is still referenced; containers
//!   cannot start or stop. Only a reboot ends it.
//! - `oom-kill` is `monitor`: memory ran out for the whole node. Jobs that hit only their own limit are not counted.
//!
//! Parameters: `within`, by default `"7d"`.

use std::collections::BTreeMap;

use doctor_core::{
    observation::{Entity, EntityKind, Observation},
    reason::ReasonCode,
};

use crate::{
    kmsg::{self, RecordGroups, Record},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("kernel-log", "errors in the kernel log");

/// `reboot` where a reboot repairs or resets the part, `monitor` where the record alone does not prove the node bad.
const RULES: &str = r#"
rules = [
  { id = "kernel-log-machine-check", check = "kernel-log", event = "machine-check", reason = "machine-check",
    severity = "reboot", text = "{value}" },
  { id = "kernel-log-memory-uncorrected", check = "kernel-log", event = "memory-uncorrected", reason = "memory-uncorrected",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "kernel-log-file-system-error", check = "kernel-log", event = "file-system-error", reason = "file-system-error",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "kernel-log-kernel-oops", check = "kernel-log", event = "kernel-oops", reason = "kernel-oops",
    severity = "reboot", text = "{value}" },
  { id = "kernel-log-hard-lockup", check = "kernel-log", event = "hard-lockup", reason = "hard-lockup",
    severity = "reboot", text = "{value}" },
  { id = "kernel-log-disk-error", check = "kernel-log", event = "disk-error", reason = "disk-error",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "kernel-log-nvme-timeout", check = "kernel-log", event = "nvme-timeout", reason = "nvme-timeout",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "kernel-log-raid-degraded", check = "kernel-log", event = "raid-degraded", reason = "raid-degraded",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "kernel-log-nfs-not-responding", check = "kernel-log", event = "nfs-not-responding", reason = "nfs-not-responding",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "kernel-log-pcie-error", check = "kernel-log", event = "pcie-error", reason = "pcie-error",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "kernel-log-hung-task", check = "kernel-log", event = "hung-task", reason = "hung-task",
    severity = "monitor", text = "{value}" },
  { id = "kernel-log-soft-lockup", check = "kernel-log", event = "soft-lockup", reason = "soft-lockup",
    severity = "monitor", text = "{value}" },
  { id = "kernel-log-rcu-stall", check = "kernel-log", event = "rcu-stall", reason = "rcu-stall",
    severity = "monitor", text = "{value}" },
  { id = "kernel-log-netdevice-stuck", check = "kernel-log", event = "netdevice-stuck", reason = "netdevice-stuck",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "kernel-log-oom-kill", check = "kernel-log", event = "oom-kill", reason = "oom-kill",
    severity = "monitor", text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("kernel_log.rs")), rules: RULES, probes, interpret };

fn probes(_: &Params) -> Vec<Probe> {
    kmsg::probes().into()
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let log = match kmsg::parse_log(params, outputs) {
        Ok(log) => log,
        Err(instead) => return instead,
    };
    let mut bursts = RecordGroups::default();
    // Servers that do not answer, until the kernel logs that they do.
    let mut silent: BTreeMap<&str, Vec<&Record<'_>>> = BTreeMap::new();
    for record in log.recent() {
        match file_server(record.text) {
            Some((server, false)) => silent.entry(server).or_default().push(record),
            Some((server, true)) => {
                silent.remove(server);
            }
            None => {
                if let Some((code, entity)) = match_record(record.text) {
                    bursts.add(ReasonCode::fixed(code), entity, record);
                }
            }
        }
    }
    for (server, records) in silent {
        for record in records {
            bursts.add(ReasonCode::fixed("nfs-not-responding"), Entity::new(EntityKind::Service, server), record);
        }
    }
    Observation::measured(vec![log.record_count()], bursts.events(&log))
}

/// The event code and the entity of a record.
type RecordMatch = (&'static str, Entity);

fn match_record(text: &str) -> Option<RecordMatch> {
    memory_hardware(text)
        .or_else(|| pcie(text))
        .or_else(|| disk(text))
        .or_else(|| file_system(text))
        .or_else(|| net_device(text))
        .or_else(|| PHRASES.iter().find(|(phrase, _)| text.contains(phrase)).map(|(_, code)| (*code, Entity::node())))
}

/// Phrases of the kernel's source that are sufficient by themselves.
const PHRASES: &[(&str, &str)] = &[
    ("hard LOCKUP", "hard-lockup"),
    ("soft lockup", "soft-lockup"),
    ("self-detected stall on CPU", "rcu-stall"),
    ("detected stalls on CPUs/tasks", "rcu-stall"),
    ("kernel BUG at", "kernel-oops"),
    ("BUG: unable to handle", "kernel-oops"),
    ("Oops: ", "kernel-oops"),
    (" blocked for more than ", "hung-task"),
    // The cgroup's message starts with `Memory cgroup`: a job that hit its own limit is not a fault of the node.
    ("Out of memory: Kill", "oom-kill"),
];

fn memory_hardware(text: &str) -> Option<RecordMatch> {
    // `mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: be00000000800400`. Bit 61 of the status: not corrected.
    if let Some((_, rest)) = text.split_once("]: CPU ").filter(|(before, _)| before.ends_with("[Hardware Error")) {
        let status = rest.split_once(" Bank ")?.1.split_once(": ")?.1;
        let status = u64::from_str_radix(status.split(' ').next()?, 16).ok()?;
        return (status >> 61 & 1 == 1).then(|| ("machine-check", Entity::node()));
    }
    // `EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 …)`
    let (_, rest) = text.strip_prefix("EDAC MC")?.split_once(": ")?;
    let (_, what) = rest.split_once(" UE ")?;
    let dimm = what.split_once(" on ").map_or("", |(_, dimm)| dimm.split(' ').next().unwrap_or(dimm));
    Some(("memory-uncorrected", Entity::new(EntityKind::Dimm, dimm)))
}

/// Matches `pcieport 0000:80:01.1: AER: Uncorrected (Fatal) error received: 0000:81:00.0` and
/// `nvme 0000:01:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=…`, the latter with `AER: ` on newer kernels.
fn pcie(text: &str) -> Option<RecordMatch> {
    let received = text.contains(": AER: ") && text.contains("Uncorrected (") && text.contains(" error received");
    let logged = text.contains("PCIe Bus Error: severity=Uncorrected");
    if !received && !logged {
        return None;
    }
    let before = text.split_once(": AER: ").or_else(|| text.split_once(": PCIe Bus Error"))?.0;
    Some(("pcie-error", Entity::new(EntityKind::Link, before.rsplit(' ').next().unwrap_or(before))))
}

fn disk(text: &str) -> Option<RecordMatch> {
    // `nvme nvme0: I/O 12 QID 3 timeout, aborting`, `nvme nvme0: controller is down; will reset`
    if let Some((name, what)) = text.strip_prefix("nvme ").and_then(|rest| rest.split_once(": ")) {
        let signs = [" timeout, ", "controller is down", "Device not ready", "Removing after probe failure"];
        let late = name.starts_with("nvme") && signs.iter().any(|sign| what.contains(sign));
        return late.then(|| ("nvme-timeout", Entity::new(EntityKind::Disk, name)));
    }
    // `md/raid1:md0: Disk failure on sdb1, disabling device.`
    if let Some((array, _)) = text.split_once(": Disk failure on ").filter(|_| text.starts_with("md/raid")) {
        let array = array.rsplit(':').next().unwrap_or(array);
        return Some(("raid-degraded", Entity::new(EntityKind::Disk, array)));
    }
    let markers = ["I/O error, dev ", "Buffer I/O error on dev ", "medium error, dev "];
    let rest = markers.iter().find_map(|marker| text.split_once(marker))?.1;
    let name = rest.split([',', ' ']).next()?;
    // A drive without a medium logs an error at each access.
    let removable = name.starts_with("fd") || name.starts_with("sr");
    (!removable && !is_image(name)).then(|| ("disk-error", Entity::new(EntityKind::Disk, name)))
}

/// A loop device is a mounted file; its errors say nothing about the node.
fn is_image(device: &str) -> bool {
    device.is_empty() || device.starts_with("loop")
}

/// Matches `EXT4-fs error (device sda1): …`, `EXT4-fs (sda1): Remounting filesystem read-only`,
/// `XFS (dm-0): Corruption …`, `BTRFS info (device sdb1: state E): forced readonly`.
fn file_system(text: &str) -> Option<RecordMatch> {
    const DAMAGE: [&str; 8] = [
        "read-only",
        "readonly",
        "orruption",
        "I/O error",
        "I/O Error",
        "shut down",
        "Shutting down",
        "beyond end of device",
    ];
    let device = if let Some(rest) = text.strip_prefix("EXT4-fs error (device ") {
        rest.split_once(')')?.0
    } else {
        let starts = ["EXT4-fs (", "XFS (", "BTRFS error (device ", "BTRFS critical (device ", "BTRFS info (device "];
        let rest = starts.iter().find_map(|start| text.strip_prefix(start))?;
        let (device, what) = rest.split_once("): ")?;
        let device = device.split(':').next().unwrap_or(device);
        DAMAGE.iter().any(|word| what.contains(word)).then_some(device)?
    };
    (!is_image(device)).then(|| ("file-system-error", Entity::new(EntityKind::Disk, device)))
}

/// Matches `unregister_netdevice: waiting for eth0 to become free. Usage count = 1`.
fn net_device(text: &str) -> Option<RecordMatch> {
    let name = text.strip_prefix("unregister_netdevice: waiting for ")?.split(' ').next()?;
    Some(("netdevice-stuck", Entity::new(EntityKind::Nic, name)))
}

/// Returns the server of `nfs: server filer1 not responding, still trying` or, later, `nfs: server filer1 OK`, and
/// whether it is back.
fn file_server(text: &str) -> Option<(&str, bool)> {
    let (server, what) = text.strip_prefix("nfs: server ")?.split_once(' ')?;
    match what.trim_end() {
        "OK" => Some((server, true)),
        what if what.starts_with("not responding") => Some((server, false)),
        _ => None,
    }
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

    fn check(lines: &[&str]) -> Vec<String> {
        classify_outputs(&CHECK, &logged(lines))
    }

    #[test]
    fn each_kind_of_record_is_recognised_with_its_component() {
        for (text, finding) in [
            ("mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: be00000000800400", "machine-check reboot node"),
            (
                "EDAC MC0: 1 UE memory read error on CPU0_DIMM_A1 (channel:1)",
                "memory-uncorrected reboot dimm:CPU0_DIMM_A1",
            ),
            ("blk_update_request: I/O error, dev sdb, sector 12345 op 0x0:(READ)", "disk-error monitor disk:sdb"),
            (
                "Buffer I/O error on dev nvme0n1p1, logical block 0, async page read",
                "disk-error monitor disk:nvme0n1p1",
            ),
            ("critical medium error, dev sda, sector 1", "disk-error monitor disk:sda"),
            ("nvme nvme3: I/O 12 QID 3 timeout, aborting", "nvme-timeout monitor disk:nvme3"),
            ("nvme nvme3: controller is down; will reset: CSTS=0xffffffff", "nvme-timeout monitor disk:nvme3"),
            ("md/raid1:md0: Disk failure on sdb1, disabling device.", "raid-degraded monitor disk:md0"),
            ("EXT4-fs error (device sda1): ext4_lookup:1855: inode #2", "file-system-error reboot disk:sda1"),
            ("EXT4-fs (sda1): Remounting filesystem read-only", "file-system-error reboot disk:sda1"),
            ("XFS (dm-0): Corruption of in-memory data detected.", "file-system-error reboot disk:dm-0"),
            ("BTRFS info (device sdb1: state E): forced readonly", "file-system-error reboot disk:sdb1"),
            ("INFO: task dd:4242 blocked for more than 120 seconds.", "hung-task monitor node"),
            ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:4242]", "soft-lockup monitor node"),
            ("watchdog: Watchdog detected hard LOCKUP on cpu 3", "hard-lockup reboot node"),
            ("rcu: INFO: rcu_sched self-detected stall on CPU", "rcu-stall monitor node"),
            ("Out of memory: Killed process 4242 (python) total-vm:1kB", "oom-kill monitor node"),
            ("BUG: unable to handle page fault for address: 0000000000001000", "kernel-oops reboot node"),
            (
                "unregister_netdevice: waiting for eth0 to become free. Usage count = 1",
                "netdevice-stuck monitor nic:eth0",
            ),
            ("nfs: server filer1 not responding, still trying", "nfs-not-responding monitor service:filer1"),
            (
                "pcieport 0000:80:01.1: AER: Uncorrected (Fatal) error received: 0000:81:00.0",
                "pcie-error monitor link:0000:80:01.1",
            ),
            (
                "pcieport 0000:80:01.1: AER: Multiple Uncorrected (Non-Fatal) error received: 0000:81:00.0",
                "pcie-error monitor link:0000:80:01.1",
            ),
            (
                "nvme 0000:01:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)",
                "pcie-error monitor link:0000:01:00.0",
            ),
            (
                "mlx5_core 0000:3b:00.0: AER: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Data Link Layer",
                "pcie-error monitor link:0000:3b:00.0",
            ),
        ] {
            assert_eq!(check(&[text]), [format!("fail {finding}")], "{text}");
        }
    }

    #[test]
    fn ordinary_records_and_job_faults_are_no_finding() {
        for text in [
            "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: 9c00000000010090",
            "EDAC MC0: 7 CE memory read error on CPU0_DIMM_A1",
            "Memory cgroup out of memory: Killed process 4242 (python)",
            "I/O error, dev fd0, sector 0",
            "I/O error, dev loop3, sector 0",
            "EXT4-fs error (device loop0): ext4_lookup:1855: inode #2",
            "EXT4-fs (vda1): mounted filesystem with ordered data mode",
            "BTRFS info (device sdb1): using crc32c (crc32c-intel) checksum algorithm",
            "nvme nvme0: 8/0/0 default/read/poll queues",
            "pcieport 0000:80:01.1: AER: Corrected error received: 0000:81:00.0",
            "nvme 0000:01:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
            "NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.",
        ] {
            assert_eq!(check(&[text]), ["pass within-limits"], "{text}");
        }
    }

    #[test]
    fn a_file_server_that_responds_again_is_no_finding() {
        let not_responding = "nfs: server filer1 not responding, still trying";
        let back = "nfs: server filer1 OK";
        assert_eq!(check(&[not_responding, not_responding, back]), ["pass within-limits"]);
        assert_eq!(check(&[not_responding, back, not_responding]), ["fail nfs-not-responding monitor service:filer1"]);
        assert_eq!(check(&[not_responding, "nfs: server filer2 OK"]), ["fail nfs-not-responding monitor service:filer1"]);
    }

    #[test]
    fn one_fault_hides_no_other_and_a_flood_is_one_finding() {
        let mut lines = vec!["I/O error, dev sda, sector 1"; 500];
        lines.push("EXT4-fs (sdb1): Remounting filesystem read-only");
        assert_eq!(check(&lines), ["fail file-system-error reboot disk:sdb1", "fail disk-error monitor disk:sda"]);
    }

    #[test]
    fn an_old_record_does_not_fail() {
        let outputs = at_seconds(&[(1, "EXT4-fs (sda1): Remounting filesystem read-only")]);
        assert_eq!(classify_outputs(&CHECK, &outputs), ["pass within-limits"]);
    }

    #[test]
    fn an_unreadable_log_does_not_pass() {
        let denied = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "/dev/kmsg"));
        assert_eq!(classify_outputs(&CHECK, &[denied]), ["inconclusive denied"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,300}") {
            match_record(&text);
            file_server(&text);
        }

        #[test]
        fn no_near_match_makes_it_panic(
            start in "(nvme nvme|mce: \\[Hardware Error\\]: CPU |EDAC MC|I/O error, dev |EXT4-fs|XFS \\(|md/raid|nfs: server )",
            middle in "[ :,)(]{0,4}", rest in ".{0,40}",
        ) {
            match_record(&format!("{start}{middle}{rest}"));
            file_server(&format!("{start}{middle}{rest}"));
        }
    }
}
