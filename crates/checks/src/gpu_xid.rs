//! gpu-xid: which errors has NVIDIA's driver written to the kernel log?
//!
//! What it does: reads the Xids of this boot from the kernel log, at most `within` old, and classifies them like
//! NVIDIA's catalogue. Many records of one number on one GPU are one finding. Related records are combined:
//! - Xid 154 is the driver's own verdict on a GPU. It overrides the table for an Xid within a minute of it. When the
//!   driver later reports that no action is needed, faults that a reset cures are over.
//! - Xid 48 with 63, 64, 94, 95, 171 or 172 is one memory fault, reported as the worst of them.
//! - Xid 74 within a minute of a fatal SXid is the switch's fault (`nvswitch-sxid`), not that of eight GPUs.
//! - Xid 144 to 150 are decoded by unit and registers.
//! - Xid 43 and 45 follow other errors, and Xid 13, 31 and many others are errors of programs: they are counted, and do
//!   not fail the node.
//! - Records of a GPU after its Xid 79 are consequences and are only counted.
//!
//! Why it matters: this is the first place where a GPU reports that it is broken, often while it still computes.
//!
//! What to do: `doctor why NODE` shows the newest line of each; `doctor explain xid N` shows what NVIDIA advises for a
//! number, what other systems do, and which of our rules applies.
//! - `xid-79` is `reboot`: the GPU no longer answers on PCIe. NVIDIA, AWS, gpud and NVSentinel reboot the node; Azure's
//!   runbook reports the node without a reboot. Run `nvidia-bug-report.sh` first; if it recurs, open a repair case.
//! - `xid-48`, `xid-62`, `xid-64`, `xid-74`, `xid-95`, `xid-109`, `xid-119`, `xid-120`, `xid-140`, `xid-143` and others
//!   are `reset`: drain the node, then `nvidia-smi --gpu-reset -i BUS`; on NVLink machines reset all GPUs together.
//! - `xid-64-reboot`, `xid-95-reboot` are `reboot`: the same on an A100 (95: without MIG), or where the model is
//!   unknown.
//! - `xid-154-reset`, `xid-154-drain` are `reset`, `xid-154-reboot` is `reboot`: the action that the driver requests.
//! - `xid-54` is `isolate`: the board has no auxiliary power. Check the cables.
//! - `xid-63`, `xid-92`, `xid-94`, `xid-74-minor`, `xid-144-minor` to `xid-150-minor` and others are `monitor`: NVIDIA
//!   advises no immediate action. `gpu-row-remap` reports a pending row remapping.
//! - `xid-13-repeated`, `xid-31-repeated` are `monitor`: the same location on one GPU fails repeatedly, at least three
//!   (13) or five (31) times, minutes apart. It may be the hardware: run the vendor's diagnostic.
//! - `xid-other` is `monitor`: a number that is not in the table.
//!
//! Not applicable where there is no NVIDIA GPU on the PCI bus and the log has no Xid.
//!
//! Parameters: `within`, by default `"7d"`.

use std::collections::{BTreeMap, BTreeSet};

use doctor_core::{
    finding::Severity,
    observation::{Entity, Metric, Observation},
    reason::ReasonCode,
    time::Span,
};

use crate::{
    files::file_text,
    gpu::{GpuQueryResult, no_gpu},
    kmsg::{self, RecordGroups, KmsgLog},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
    sxid_record::SxidRecord,
    tables::{self, Class},
    xid_record::{LinkFault, Nvlink5, Recovery, XidRecord},
};

const SPEC: Spec = Spec::quick("gpu-xid", "GPU errors in the kernel log (Xid)");

pub(crate) const CHECK: Check = Check {
    spec: SPEC,
    page: page_of(include_str!("gpu_xid.rs")),
    rules: include_str!("tables/xid_rules.toml"),
    probes,
    interpret,
};

/// Records at most this far apart have one cause.
const SAME_INCIDENT_WINDOW: Span = Span::minutes(1);
/// Program errors further apart than this are separate incidents.
const SEPARATE_INCIDENT_GAP: Span = Span::minutes(3);

fn probes(_: &Params) -> Vec<Probe> {
    let mut all: Vec<Probe> = kmsg::probes().into();
    all.push(Probe::gpu(&["name", "mig.mode.current"]));
    all.push(Probe::read("/proc/modules"));
    all
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let machine = HostInfo::read(outputs);
    let log = match kmsg::parse_log(params, outputs) {
        Ok(log) => log,
        Err(_) if machine.has_no_gpu() => return no_gpu(),
        Err(instead) => return instead,
    };
    let mut gpus: BTreeMap<Entity, Vec<ClassifiedXid<'_>>> = BTreeMap::new();
    for xid in log.recent().filter_map(XidRecord::parse) {
        let seen = ClassifiedXid::new(xid, &machine);
        gpus.entry(seen.xid.gpu.clone()).or_default().push(seen);
    }
    if gpus.is_empty() && machine.has_no_gpu() {
        return no_gpu();
    }
    let broken: Vec<_> = log.recent().filter_map(SxidRecord::parse).filter(SxidRecord::breaks_links).collect();
    for xids in gpus.values_mut() {
        drop_after_off_bus(xids);
        attribute_to_switches(xids, &broken);
        cancel_power_smoothing(xids);
        merge_memory_faults(xids);
        apply_recovery_action(xids);
    }
    to_observation(&log, &gpus, &machine)
}

/// What is known of the machine besides its log. For unknown values the worse case is assumed.
struct HostInfo<'a> {
    answer: Option<&'a GpuQueryResult>,
    has_uvm: bool,
}

impl<'a> HostInfo<'a> {
    fn read(outputs: &'a [ProbeOutput]) -> Self {
        let answer = match outputs.get(3) {
            Some(ProbeOutput::Gpus(answer)) => Some(answer),
            _ => None,
        };
        let uvm = file_text(outputs.get(4)).map_or(true, |all| all.lines().any(|line| line.starts_with("nvidia_uvm ")));
        Self { answer, has_uvm: uvm }
    }

    fn has_no_gpu(&self) -> bool {
        self.answer.is_some_and(|answer| answer.on_pci.is_empty() && answer.gpus.is_empty())
    }

    fn has_several_gpus(&self) -> bool {
        self.answer.is_some_and(|answer| answer.on_pci.len() > 1)
    }

    /// Returns whether the GPU is, or may be, an A100, and whether it is known to be in MIG mode.
    fn a100_and_mig(&self, gpu: &Entity) -> (bool, bool) {
        let gpu = self.answer.and_then(|answer| answer.gpus.iter().find(|one| one.entity() == *gpu));
        let name = gpu.and_then(|gpu| gpu.text("name"));
        let a100 = name.is_none_or(|name| name.contains("A100") || name.contains("A800"));
        (a100, gpu.and_then(|gpu| gpu.number("mig.mode.current")) == Some(1.0))
    }
}

/// One record and its classification.
struct ClassifiedXid<'a> {
    xid: XidRecord<'a>,
    disposition: Disposition,
    note: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Disposition {
    Fault(ReasonCode, Severity),
    /// An error of a program, or not actionable.
    Counted,
    /// A consequence of another fault that is reported.
    FollowUp,
    /// Caused by a switch.
    SwitchFault,
    /// The driver reports that the fault is over.
    Recovered,
}

impl<'a> ClassifiedXid<'a> {
    fn new(xid: XidRecord<'a>, machine: &HostInfo<'_>) -> Self {
        let n = xid.number;
        let (a100, mig) = machine.a100_and_mig(&xid.gpu);
        let mut note = None;
        let code = match n {
            64 if a100 => Some("xid-64-reboot".to_owned()),
            95 if a100 && !mig => Some("xid-95-reboot".to_owned()),
            74 => match xid.link_fault() {
                LinkFault::Minor => Some("xid-74-minor".to_owned()),
                LinkFault::Mechanical => {
                    note = Some("check the GPU's seating".to_owned());
                    Some("xid-74".to_owned())
                }
                LinkFault::Other => Some("xid-74".to_owned()),
            },
            144..=150 => match xid.nvlink5() {
                Nvlink5::Fatal => Some(format!("xid-{n}")),
                Nvlink5::Minor => Some(format!("xid-{n}-minor")),
                Nvlink5::Nothing => None,
            },
            159 if !machine.has_uvm => None,
            _ => match tables::xid(n) {
                Some(row) => row.severity.map(|_| format!("xid-{n}")),
                None => Some("xid-other".to_owned()),
            },
        };
        let follows = tables::xid(n).is_some_and(|row| row.class == Class::Consequence);
        let fate = match code.as_deref().and_then(fault_of_code) {
            Some(fate) => fate,
            None if follows => Disposition::FollowUp,
            None => Disposition::Counted,
        };
        Self { xid, disposition: fate, note }
    }

    fn severity(&self) -> Option<Severity> {
        match self.disposition {
            Disposition::Fault(_, severity) => Some(severity),
            _ => None,
        }
    }

    fn is_near(&self, other: &Self) -> bool {
        self.xid.record.time_between(&other.xid.record) <= SAME_INCIDENT_WINDOW
    }
}

/// Returns the fate for this event code, with its severity from the tables.
fn fault_of_code(code: &str) -> Option<Disposition> {
    let variant = tables::XIDS.variants.iter().find(|variant| variant.code.as_str() == code);
    let severity = match variant {
        Some(variant) => variant.severity,
        None => tables::xid(code.strip_prefix("xid-")?.parse().ok()?)?.severity?,
    };
    Some(Disposition::Fault(ReasonCode::new(code).ok()?, severity))
}

/// Formats numbers for messages: `63, 94`.
fn join_numbers(numbers: &BTreeSet<u16>) -> String {
    numbers.iter().map(u16::to_string).collect::<Vec<_>>().join(", ")
}

fn drop_after_off_bus(xids: &mut [ClassifiedXid<'_>]) {
    let Some(fall) = xids.iter().position(|seen| seen.xid.number == 79) else { return };
    for seen in xids[fall..].iter_mut().filter(|seen| seen.xid.number != 79) {
        seen.disposition = Disposition::FollowUp;
    }
}

fn attribute_to_switches(xids: &mut [ClassifiedXid<'_>], broken: &[SxidRecord<'_>]) {
    for seen in xids.iter_mut().filter(|seen| seen.xid.number == 74) {
        if broken.iter().any(|sxid| sxid.record.time_between(&seen.xid.record) <= SAME_INCIDENT_WINDOW) {
            seen.disposition = Disposition::SwitchFault;
        }
    }
}

/// Xid 162 reports that the state of Xid 163 is over.
fn cancel_power_smoothing(xids: &mut [ClassifiedXid<'_>]) {
    let Some(back) = xids.iter().rposition(|seen| seen.xid.number == 162) else { return };
    for seen in xids[..back].iter_mut().filter(|seen| seen.xid.number == 163) {
        seen.disposition = Disposition::Recovered;
    }
}

/// Combines memory records within a minute of each other into one fault: the worst is reported, and among equals Xid
/// 48.
fn merge_memory_faults(xids: &mut [ClassifiedXid<'_>]) {
    const MEMORY: [u16; 7] = [48, 63, 64, 94, 95, 171, 172];
    let of_memory: Vec<usize> = (0..xids.len()).filter(|&at| MEMORY.contains(&xids[at].xid.number)).collect();
    for group in of_memory.chunk_by(|&a, &b| xids[a].is_near(&xids[b])).map(<[usize]>::to_vec).collect::<Vec<_>>() {
        let rank = |at: &usize| (xids[*at].severity(), xids[*at].xid.number == 48);
        let Some(worst) = group.iter().copied().max_by_key(rank) else { continue };
        let (fate, number) = (xids[worst].disposition.clone(), xids[worst].xid.number);
        let others: BTreeSet<u16> = group.iter().map(|&at| xids[at].xid.number).filter(|n| *n != number).collect();
        for &at in &group {
            if xids[at].xid.number == number {
                if !others.is_empty() && xids[at].disposition == fate {
                    xids[at].note = Some(format!("with Xid {}", join_numbers(&others)));
                }
            } else {
                xids[at].disposition = Disposition::FollowUp;
            }
        }
    }
}

/// The Xid 154 of one GPU that are combined with their causes. Each is compared with all records of the GPU, and a node could
/// write any number of them.
const MAX_RECOVERY_ACTIONS: usize = 1000;

/// Combines Xid 154 with the records that caused it. Of very many, the latest decide.
fn apply_recovery_action(xids: &mut [ClassifiedXid<'_>]) {
    let is_action = |seen: &ClassifiedXid<'_>| seen.xid.number == 154 && seen.disposition == Disposition::Counted;
    let actions: Vec<usize> = (0..xids.len()).filter(|&at| is_action(&xids[at])).collect();
    let (early, latest) = actions.split_at(actions.len().saturating_sub(MAX_RECOVERY_ACTIONS));
    for &at in early {
        xids[at].disposition = Disposition::FollowUp;
    }
    for &at in latest {
        // An action before it may have recovered it.
        if !is_action(&xids[at]) {
            continue;
        }
        let (code, severity) = match xids[at].xid.recovery() {
            Some(Recovery::Reset) => ("xid-154-reset", Severity::Reset),
            Some(Recovery::DrainPeers) => ("xid-154-drain", Severity::Reset),
            Some(Recovery::Reboot) => ("xid-154-reboot", Severity::Reboot),
            Some(Recovery::None) => {
                for seen in xids[..at].iter_mut().filter(|seen| seen.severity().is_some_and(|s| s <= Severity::Reset)) {
                    seen.disposition = Disposition::Recovered;
                }
                continue;
            }
            None => ("xid-other", Severity::Monitor),
        };
        let causes: Vec<usize> = (0..xids.len()).filter(|&one| one != at && may_cause(&xids[one], &xids[at])).collect();
        if causes.iter().any(|&one| xids[one].severity() == Some(severity)) {
            xids[at].disposition = Disposition::FollowUp;
            continue;
        }
        let numbers: BTreeSet<u16> = causes.iter().map(|&one| xids[one].xid.number).collect();
        if code == "xid-other" && !numbers.is_empty() {
            xids[at].disposition = Disposition::FollowUp;
            continue;
        }
        for one in causes {
            xids[one].disposition = Disposition::FollowUp;
        }
        xids[at].disposition = Disposition::Fault(ReasonCode::fixed(code), severity);
        xids[at].note = (!numbers.is_empty()).then(|| format!("after Xid {}", join_numbers(&numbers)));
    }
}

fn may_cause(seen: &ClassifiedXid<'_>, verdict: &ClassifiedXid<'_>) -> bool {
    let linked = tables::xid(seen.xid.number).is_some_and(|row| !row.linked.is_empty());
    linked && matches!(seen.disposition, Disposition::Fault(..) | Disposition::Counted) && seen.is_near(verdict)
}

fn to_observation(log: &KmsgLog<'_>, gpus: &BTreeMap<Entity, Vec<ClassifiedXid<'_>>>, machine: &HostInfo<'_>) -> Observation {
    let mut bursts = RecordGroups::default();
    for (gpu, xids) in gpus {
        for seen in xids {
            if let Disposition::Fault(code, _) = &seen.disposition {
                bursts.add_with_note(code.clone(), gpu.clone(), &seen.xid.record, seen.note.clone());
            }
        }
        for seen in repeated_in_one_place(xids) {
            bursts.add(ReasonCode::fixed("xid-13-repeated"), gpu.clone(), &seen.xid.record);
        }
    }
    let faults: Vec<_> = gpus.iter().filter(|(_, xids)| xids.iter().any(|seen| seen.xid.number == 31)).collect();
    if let ([(gpu, xids)], true) = (&faults[..], machine.has_several_gpus()) {
        let faults: Vec<_> = xids.iter().filter(|seen| seen.xid.number == 31).collect();
        if count_incidents(&faults) >= 5 {
            for seen in faults {
                bursts.add(ReasonCode::fixed("xid-31-repeated"), (*gpu).clone(), &seen.xid.record);
            }
        }
    }
    let of = |fate: &Disposition| gpus.values().flatten().filter(|seen| seen.disposition == *fate).count();
    let count = |name: &str, fate: &Disposition| Metric::count(name, Entity::node(), of(fate) as f64);
    let metrics = vec![
        log.record_count(),
        count("application_xids", &Disposition::Counted),
        count("follow_up_xids", &Disposition::FollowUp),
        count("switch_xids", &Disposition::SwitchFault),
        count("recovered_xids", &Disposition::Recovered),
    ];
    Observation::measured(metrics, bursts.events(log))
}

/// Returns the Xid 13 records of locations that fail repeatedly.
fn repeated_in_one_place<'a, 'b>(xids: &'b [ClassifiedXid<'a>]) -> Vec<&'b ClassifiedXid<'a>> {
    let mut by_tpc: BTreeMap<(u16, u16), Vec<&ClassifiedXid<'_>>> = BTreeMap::new();
    for seen in xids.iter().filter(|seen| seen.xid.number == 13) {
        if let Some(tpc) = seen.xid.gpc_tpc() {
            by_tpc.entry(tpc).or_default().push(seen);
        }
    }
    by_tpc.into_values().filter(|seen| count_incidents(seen) >= 3).flatten().collect()
}

/// Counts bursts that are minutes apart.
fn count_incidents(seen: &[&ClassifiedXid<'_>]) -> usize {
    seen.chunk_by(|a, b| a.xid.record.time_between(&b.xid.record) <= SEPARATE_INCIDENT_GAP).count()
}

#[cfg(test)]
mod tests;
