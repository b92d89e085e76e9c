//! kernel-log: what has the kernel complained about?
//!
//! What it does: reads the kernel's log of this boot and looks for records that tell of broken hardware or of a
//! kernel in trouble. Only records that the kernel itself wrote count; programs can write there too. Records older
//! than `within` are left out.
//!
//! Why it matters: most hardware faults are in this log hours or days before a job is slow or wrong because of them.
//!
//! What to do: `doctor why NODE` shows the newest line of each kind and how often it came.
//! - `machine-check`, `memory-uncorrected`: the processor or the memory controller met an error that it could not
//!   correct. A boot lets the firmware map out or repair the memory; if it comes back, the part is bad.
//! - `xid-79`: the GPU has fallen off the bus. A restart hides this more often than it cures it: keep the node out,
//!   collect `nvidia-bug-report.sh` and hand it to the vendor.
//! - `xid-48`: a double-bit error in GPU memory; a reboot resets the GPU and remaps the row.
//! - `xid-64`, `xid-74`, `xid-95`, `xid-119`, `xid-120`: worth a look each; watched until their table says more.
//!   Any number without a rule of its own is `xid-other`. Xid 13, 31, 43 and 45 come from user programs nearly always:
//!   they are counted as `application_xids` and judged by nobody.
//! - `file-system-error`: ext4 or XFS found damage or went read-only. A reboot brings the check that repairs it.
//! - `disk-error`: a disk or its link failed to read or write. See `smartctl -x /dev/NAME`, `nvme smart-log /dev/NAME`.
//! - `kernel-oops`, `hard-lockup`: the kernel is damaged; only a reboot makes it whole.
//! - `hung-task`, `soft-lockup`, `pcie-error`: signs of trouble elsewhere, usually storage or a device.
//! - `oom-kill`: memory ran out for the whole node. Jobs that met only their own limit are not counted.
//!
//! Parameters: `within`, by default `"7d"`.

use std::collections::BTreeMap;

use doctor_core::{
    observation::{Entity, EntityKind, Event, FailureKind, Metric, Observation, ProbeFailure},
    reason::ReasonCode,
    time::Span,
};

use crate::{
    probe::{Probe, ProbeOutput},
    spec::{Check, Depth, Params, Spec, page_of},
};

const SPEC: Spec = Spec {
    id: "kernel-log",
    title: "errors in the kernel's log",
    depth: Depth::Quick,
    exclusive: false,
    every: Span::minutes(5),
    cutoff: Span::days(1),
    limit: Span::minutes(1),
    usual: Span::from_secs(1),
    shares: &[],
};

/// `reboot` where a boot is what repairs or resets the part, `isolate` where no restart is to be trusted, `monitor`
/// where the record alone does not prove the node bad.
const RULES: &str = r#"
rules = [
  { id = "kernel-log-machine-check", check = "kernel-log", event = "machine-check", reason = "machine-check",
    severity = "reboot", text = "{value}" },
  { id = "kernel-log-memory-uncorrected", check = "kernel-log", event = "memory-uncorrected", reason = "memory-uncorrected",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "kernel-log-xid-79", check = "kernel-log", event = "xid-79", reason = "xid-79",
    severity = "isolate", text = "{entity}: {value}" },
  { id = "kernel-log-xid-48", check = "kernel-log", event = "xid-48", reason = "xid-48",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "kernel-log-xid-64", check = "kernel-log", event = "xid-64", reason = "xid-64",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "kernel-log-xid-74", check = "kernel-log", event = "xid-74", reason = "xid-74",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "kernel-log-xid-95", check = "kernel-log", event = "xid-95", reason = "xid-95",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "kernel-log-xid-119", check = "kernel-log", event = "xid-119", reason = "xid-119",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "kernel-log-xid-120", check = "kernel-log", event = "xid-120", reason = "xid-120",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "kernel-log-xid-other", check = "kernel-log", event = "xid-other", reason = "xid-other",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "kernel-log-file-system-error", check = "kernel-log", event = "file-system-error", reason = "file-system-error",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "kernel-log-kernel-oops", check = "kernel-log", event = "kernel-oops", reason = "kernel-oops",
    severity = "reboot", text = "{value}" },
  { id = "kernel-log-hard-lockup", check = "kernel-log", event = "hard-lockup", reason = "hard-lockup",
    severity = "reboot", text = "{value}" },
  { id = "kernel-log-disk-error", check = "kernel-log", event = "disk-error", reason = "disk-error",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "kernel-log-hung-task", check = "kernel-log", event = "hung-task", reason = "hung-task",
    severity = "monitor", text = "{value}" },
  { id = "kernel-log-soft-lockup", check = "kernel-log", event = "soft-lockup", reason = "soft-lockup",
    severity = "monitor", text = "{value}" },
  { id = "kernel-log-pcie-error", check = "kernel-log", event = "pcie-error", reason = "pcie-error",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "kernel-log-oom-kill", check = "kernel-log", event = "oom-kill", reason = "oom-kill",
    severity = "monitor", text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("kernel_log.rs")), rules: RULES, probes, interpret };

/// Runs come a day apart or later; what happened between two of them must still be seen.
const WITHIN: Span = Span::days(7);

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::Kmsg, Probe::Read { path: "/proc/uptime".to_owned() }]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let could_not = |kind, text: &str| Observation::CouldNot(ProbeFailure::new(kind, text));
    let (log, uptime) = match outputs {
        [ProbeOutput::Text(log), ProbeOutput::Text(uptime)] => (log, uptime),
        [ProbeOutput::Failed(failure), _] | [_, ProbeOutput::Failed(failure)] => {
            return Observation::CouldNot(failure.clone());
        }
        _ => return could_not(FailureKind::Unparseable, "the kernel log or the uptime is not text"),
    };
    let Some(within) = within(params) else {
        return could_not(FailureKind::Unparseable, "parameter `within` is not a duration such as \"7d\"");
    };
    let Some(now) = micros_up(uptime) else {
        return could_not(FailureKind::Unparseable, "/proc/uptime does not begin with a number of seconds");
    };
    if log.trim().is_empty() {
        return could_not(FailureKind::Empty, "the kernel log is empty");
    }
    let records: Vec<_> = log.lines().filter_map(Record::parse).collect();
    if records.is_empty() {
        return could_not(FailureKind::Unparseable, "no line of the kernel log has the form `6,1,0,-;text`");
    }
    summarise(&records, now, within)
}

fn within(params: &Params) -> Option<Span> {
    match params.get("within") {
        None => Some(WITHIN),
        Some(value) => value.as_str()?.parse().ok(),
    }
}

fn micros_up(text: &str) -> Option<u64> {
    let seconds: f64 = text.split_ascii_whitespace().next()?.parse().ok()?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to be a sane uptime")]
    let micros = (0.0..1e12).contains(&seconds).then_some((seconds * 1e6) as u64);
    micros
}

/// One record of /dev/kmsg: `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT`.
struct Record<'a> {
    from_kernel: bool,
    /// Since boot.
    micros: u64,
    text: &'a str,
}

impl<'a> Record<'a> {
    /// Lines that begin with a space belong to the record before and say nothing to us.
    fn parse(line: &'a str) -> Option<Self> {
        let (head, text) = line.split_once(';')?;
        let mut fields = head.split(',');
        let priority: u32 = fields.next()?.parse().ok()?;
        let _sequence: u64 = fields.next()?.parse().ok()?;
        let micros = fields.next()?.parse().ok()?;
        // The low three bits are the level, the rest is the facility: 0 is the kernel, and the kernel lets nobody
        // else write as 0.
        Some(Self { from_kernel: priority >> 3 == 0, micros, text })
    }
}

/// Records of one kind about one part.
struct Sighting<'a> {
    times: u64,
    newest: &'a Record<'a>,
}

fn summarise(records: &[Record<'_>], now: u64, within: Span) -> Observation {
    let window = u64::try_from(within.millis()).unwrap_or(0).saturating_mul(1000);
    let oldest = now.saturating_sub(window);
    let mut seen: BTreeMap<(ReasonCode, Entity), Sighting<'_>> = BTreeMap::new();
    let mut application_xids = 0_u32;
    for record in records.iter().filter(|record| record.from_kernel && record.micros >= oldest) {
        match recognise(record.text) {
            Some(Sign::ApplicationXid) => application_xids = application_xids.saturating_add(1),
            Some(Sign::Trouble(code, entity)) => {
                let sighting = seen.entry((code, entity)).or_insert(Sighting { times: 0, newest: record });
                sighting.times += 1;
                if record.micros >= sighting.newest.micros {
                    sighting.newest = record;
                }
            }
            None => {}
        }
    }
    let events = seen.into_iter().map(|((code, entity), sighting)| Event {
        code,
        entity,
        at: None,
        text: describe(&sighting, now),
        key: None,
    });
    let count = |name: &str, value: u32| Metric::count(name, Entity::node(), f64::from(value));
    let read = u32::try_from(records.len()).unwrap_or(u32::MAX);
    let metrics = vec![count("records", read), count("application_xids", application_xids)];
    Observation::measured(metrics, events.collect())
}

fn describe(sighting: &Sighting<'_>, now: u64) -> String {
    let seconds = now.saturating_sub(sighting.newest.micros) / 1_000_000;
    let ago = Span::from_secs(i64::try_from(seconds).unwrap_or(i64::MAX));
    let text: String = sighting.newest.text.chars().take(300).collect();
    match sighting.times {
        1 => format!("{text} ({ago} before the check)"),
        times => format!("{text} ({times} times, the newest {ago} before the check)"),
    }
}

/// What a record is a sign of.
enum Sign {
    Trouble(ReasonCode, Entity),
    ApplicationXid,
}

fn trouble(code: &'static str, kind: EntityKind, id: &str) -> Sign {
    Sign::Trouble(ReasonCode::fixed(code), Entity::new(kind, id))
}

fn of_node(code: &'static str) -> Sign {
    Sign::Trouble(ReasonCode::fixed(code), Entity::node())
}

fn recognise(text: &str) -> Option<Sign> {
    xid(text).or_else(|| memory_hardware(text)).or_else(|| disk(text)).or_else(|| file_system(text)).or_else(|| {
        if let Some((device, _)) = text.split_once(": AER: ").filter(|(_, what)| what.contains("Uncorrected (")) {
            return Some(trouble("pcie-error", EntityKind::Link, device.rsplit(' ').next().unwrap_or(device)));
        }
        PHRASES.iter().find(|(phrase, _)| text.contains(phrase)).map(|(_, code)| of_node(code))
    })
}

/// Phrases of the kernel's source that stand for themselves.
const PHRASES: &[(&str, &str)] = &[
    ("hard LOCKUP", "hard-lockup"),
    ("soft lockup", "soft-lockup"),
    ("kernel BUG at", "kernel-oops"),
    ("BUG: unable to handle", "kernel-oops"),
    ("Oops: ", "kernel-oops"),
    (" blocked for more than ", "hung-task"),
    // The cgroup's own form begins with `Memory cgroup`: a job that met its own limit is no fault of the node.
    ("Out of memory: Kill", "oom-kill"),
];

/// `NVRM: Xid (PCI:0000:18:00): 79, pid=…, GPU has fallen off the bus.`
fn xid(text: &str) -> Option<Sign> {
    let (device, rest) = text.strip_prefix("NVRM: Xid (PCI:")?.split_once("): ")?;
    let digits = rest.find(|c: char| !c.is_ascii_digit()).map_or(rest, |end| &rest[..end]);
    let code = match digits.parse::<u16>().ok()? {
        13 | 31 | 43 | 45 => return Some(Sign::ApplicationXid),
        48 => "xid-48",
        64 => "xid-64",
        74 => "xid-74",
        79 => "xid-79",
        95 => "xid-95",
        119 => "xid-119",
        120 => "xid-120",
        _ => "xid-other",
    };
    Some(trouble(code, EntityKind::Gpu, device))
}

fn memory_hardware(text: &str) -> Option<Sign> {
    // `mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: be00000000800400`. Bit 61 of the status: not corrected.
    if let Some((_, rest)) = text.split_once("]: CPU ").filter(|(before, _)| before.ends_with("[Hardware Error")) {
        let status = rest.split_once(" Bank ")?.1.split_once(": ")?.1;
        let status = u64::from_str_radix(status.split(' ').next()?, 16).ok()?;
        return (status >> 61 & 1 == 1).then(|| of_node("machine-check"));
    }
    // `EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 …)`
    let (_, rest) = text.strip_prefix("EDAC MC")?.split_once(": ")?;
    let (_, what) = rest.split_once(" UE ")?;
    let dimm = what.split_once(" on ").map_or("", |(_, dimm)| dimm.split(' ').next().unwrap_or(dimm));
    Some(trouble("memory-uncorrected", EntityKind::Dimm, dimm))
}

fn disk(text: &str) -> Option<Sign> {
    let markers = ["I/O error, dev ", "Buffer I/O error on dev ", "medium error, dev "];
    let rest = markers.iter().find_map(|marker| text.split_once(marker))?.1;
    let name = rest.split([',', ' ']).next()?;
    // A drive without a medium in it complains at each look.
    let removable = name.starts_with("fd") || name.starts_with("sr");
    (!removable && !is_image(name)).then(|| trouble("disk-error", EntityKind::Disk, name))
}

/// A loop device is a file that somebody mounted; what is wrong with it says nothing about the node.
fn is_image(device: &str) -> bool {
    device.is_empty() || device.starts_with("loop")
}

/// `EXT4-fs error (device sda1): …`, `EXT4-fs (sda1): Remounting filesystem read-only`, `XFS (dm-0): Corruption …`
fn file_system(text: &str) -> Option<Sign> {
    let device = if let Some(rest) = text.strip_prefix("EXT4-fs error (device ") {
        rest.split_once(')')?.0
    } else {
        let rest = text.strip_prefix("EXT4-fs (").or_else(|| text.strip_prefix("XFS ("))?;
        let (device, what) = rest.split_once("): ")?;
        let damage = ["read-only", "orruption", "I/O error", "I/O Error", "shut down", "Shutting down"];
        damage.iter().any(|word| what.contains(word)).then_some(device)?
    };
    (!is_image(device)).then(|| trouble("file-system-error", EntityKind::Disk, device))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn observe(log: &str) -> Observation {
        let outputs = [ProbeOutput::Text(log.to_owned()), ProbeOutput::Text("1000000.00 5.0\n".to_owned())];
        interpret(&Params::new(), &outputs)
    }

    fn events(log: &str) -> Vec<(String, String)> {
        match observe(log) {
            Observation::Measured { events, .. } => {
                events.into_iter().map(|event| (event.code.to_string(), event.entity.to_string())).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_kind_of_record_is_recognised_with_its_part() {
        for (text, code, entity) in [
            ("NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.", "xid-79", "gpu:0000:18:00"),
            ("NVRM: Xid (PCI:0000:18:00): 999, something new", "xid-other", "gpu:0000:18:00"),
            ("mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: be00000000800400", "machine-check", "node"),
            ("EDAC MC0: 1 UE memory read error on CPU0_DIMM_A1 (channel:1)", "memory-uncorrected", "dimm:CPU0_DIMM_A1"),
            ("blk_update_request: I/O error, dev sdb, sector 12345 op 0x0:(READ)", "disk-error", "disk:sdb"),
            ("Buffer I/O error on dev nvme0n1p1, logical block 0, async page read", "disk-error", "disk:nvme0n1p1"),
            ("critical medium error, dev sda, sector 1", "disk-error", "disk:sda"),
            ("EXT4-fs error (device sda1): ext4_lookup:1855: inode #2", "file-system-error", "disk:sda1"),
            ("EXT4-fs (sda1): Remounting filesystem read-only", "file-system-error", "disk:sda1"),
            ("XFS (dm-0): Corruption of in-memory data detected.", "file-system-error", "disk:dm-0"),
            ("INFO: task dd:4242 blocked for more than 120 seconds.", "hung-task", "node"),
            ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:4242]", "soft-lockup", "node"),
            ("Out of memory: Killed process 4242 (python) total-vm:1kB", "oom-kill", "node"),
            (
                "pcieport 0000:80:01.1: AER: Uncorrected (Fatal) error received: 0000:81:00.0",
                "pcie-error",
                "link:0000:80:01.1",
            ),
        ] {
            let log = format!("3,1,999000000000,-;{text}\n");
            assert_eq!(events(&log), [(code.to_owned(), entity.to_owned())], "{text}");
        }
    }

    #[test]
    fn ordinary_records_and_faults_of_jobs_are_no_trouble() {
        for text in [
            "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: 9c00000000010090",
            "EDAC MC0: 7 CE memory read error on CPU0_DIMM_A1",
            "Memory cgroup out of memory: Killed process 4242 (python)",
            "I/O error, dev fd0, sector 0",
            "I/O error, dev loop3, sector 0",
            "EXT4-fs error (device loop0): ext4_lookup:1855: inode #2",
            "EXT4-fs (vda1): mounted filesystem with ordered data mode",
            "NVRM: Xid (PCI:0000:18:00): 31, pid=4242, name=python, Ch 00000008",
            "NVRM: Xid (PCI:0000:18:00): , ",
        ] {
            assert_eq!(events(&format!("3,1,999000000000,-;{text}\n")), [], "{text}");
        }
    }

    #[test]
    fn a_program_that_writes_to_the_log_is_not_believed() {
        assert_eq!(events("12,1,999000000000,-;NVRM: Xid (PCI:0000:18:00): 79, lies\n"), []);
    }

    #[test]
    fn what_is_older_than_the_window_is_left_out_and_bursts_are_one() {
        let line = |micros: u64| format!("3,1,{micros},-;I/O error, dev sda, sector 1\n");
        assert_eq!(events(&line(1)), []);
        let burst: String = (0..500).map(|n| line(999_000_000_000 + n)).collect();
        let Observation::Measured { events, .. } = observe(&burst) else { panic!("measured") };
        assert_eq!(events.len(), 1);
        assert!(events[0].text.contains("500 times, the newest 16m 39s before"), "{}", events[0].text);
    }

    #[test]
    fn a_log_that_cannot_be_read_is_not_a_quiet_one() {
        let kind = |observation| match observation {
            Observation::CouldNot(failure) => failure.kind,
            other => panic!("{other:?}"),
        };
        assert_eq!(kind(observe("")), FailureKind::Empty);
        assert_eq!(kind(observe("[ 12.3] dmesg's own form\n")), FailureKind::Unparseable);
        let denied = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "/dev/kmsg"));
        assert_eq!(kind(interpret(&Params::new(), &[denied, ProbeOutput::Text("1 1".into())])), FailureKind::Denied);
        assert_eq!(kind(interpret(&Params::new(), &[])), FailureKind::Unparseable);
        let params = [("within".to_owned(), toml::Value::Integer(7))].into();
        let outputs = [ProbeOutput::Text("6,1,0,-;x".into()), ProbeOutput::Text("1 1".into())];
        assert_eq!(kind(interpret(&params, &outputs)), FailureKind::Unparseable);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,300}", uptime in ".{0,20}") {
            interpret(&Params::new(), &[ProbeOutput::Text(text.clone()), ProbeOutput::Text(uptime)]);
            recognise(&text);
        }

        #[test]
        fn no_near_miss_makes_it_panic(
            start in "(NVRM: Xid \\(PCI:|mce: \\[Hardware Error\\]: CPU |EDAC MC|I/O error, dev |EXT4-fs|XFS \\()",
            middle in "[ :,)(]{0,4}", rest in ".{0,40}",
        ) {
            recognise(&format!("{start}{middle}{rest}"));
        }
    }
}
