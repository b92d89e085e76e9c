//! What other processes did on GPUs, collected from samples.
//!
//! The driver lists processes by the numbers of the machine, also in a container. Where this process sees the machine's
//! processes, it tells those of the test from others by their parents. Elsewhere the test itself may appear under a
//! number that it does not know: as many new numbers as the test has processes are taken for its own.

use std::collections::{BTreeMap, BTreeSet};

use doctor_checks::{
    disturbance::{Disturbance, MIN_GPU_BYTES, MIN_GPU_PERCENT, MIN_UNLISTED_GPU_BYTES, Phase},
    gpu::{FieldValue, Gpu},
};
use doctor_core::observation::Entity;

use super::process_view::{ProcessView, UNKNOWN_DISTURBER};

/// The fields of a sample.
pub(in crate::builtin) const FIELDS: [&str; 4] = [LIST, "activity.*.memory", "activity.*.utilization", MEMORY_USED];
pub(in crate::builtin) const LIST: &str = "activity.*.pid";
const MEMORY_USED: &str = "memory.used";

/// The server of MPS computes nothing: its clients are in the list themselves. The kernel keeps 15 bytes of a name.
const NOT_A_USER: [&str; 1] = ["nvidia-cuda-mps"];

/// Everything that was seen so far.
#[derive(Debug, Default)]
pub(super) struct GpuLog {
    /// GPUs whose processes the driver lists.
    listed: BTreeSet<Entity>,
    /// Memory in use before the test.
    used_before: BTreeMap<Entity, u64>,
    uses: BTreeMap<(Entity, u32), Use>,
    /// Processes that belong to the test, by their parents.
    own: BTreeSet<u32>,
    /// How others are called: they may be gone when the report is written.
    named: BTreeMap<u32, Name>,
    /// Whether the machine's processes are visible.
    sees_machine: bool,
    /// Whether there was a sample during the test.
    has_sample_during: bool,
}

/// One process on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Use {
    first: Phase,
    last: Phase,
    /// The most that was seen; none if the driver does not know.
    memory: Option<u64>,
    percent: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Name {
    by: String,
    disturber: String,
    /// Whether this process sees it.
    is_seen: bool,
}

impl Use {
    fn disturbs(self) -> bool {
        self.memory.is_none_or(|bytes| bytes >= MIN_GPU_BYTES)
            || self.percent.is_some_and(|percent| percent >= MIN_GPU_PERCENT)
    }

    fn text(self) -> String {
        let memory = match self.memory {
            Some(bytes) => format!("{:.1} GiB of its memory", bytes as f64 / f64::from(1 << 30)),
            None => "memory unknown".to_owned(),
        };
        let percent = self.percent.map_or_else(String::new, |percent| format!(", {percent} % of its time"));
        let since = match self.first {
            Phase::Before => "since before the test",
            Phase::During => "during the test",
        };
        format!("{memory}{percent}, {since}")
    }
}

impl GpuLog {
    /// Adds the driver's answer about all GPUs.
    pub(super) fn add(&mut self, gpus: &[Gpu], phase: Phase, view: &ProcessView) {
        self.sees_machine = view.is_machine;
        self.has_sample_during |= phase == Phase::During;
        for gpu in gpus {
            let entity = gpu.entity();
            let number = |name: &str| gpu.number(name).map(|value| value as u64);
            if let (Phase::Before, Some(bytes)) = (phase, number(MEMORY_USED)) {
                self.used_before.insert(entity.clone(), bytes);
            }
            // The driver uses this name only if it has no list.
            if gpu.get(LIST).is_some() {
                continue;
            }
            self.listed.insert(entity.clone());
            for (index, pid) in gpu.indexed("activity", "pid") {
                let FieldValue::Number(pid) = pid else { continue };
                let memory = number(&format!("activity.{index}.memory"));
                let percent = number(&format!("activity.{index}.utilization")).map(|percent| percent as u32);
                self.add_use(&entity, *pid as u32, Use { first: phase, last: phase, memory, percent }, view);
            }
        }
    }

    fn add_use(&mut self, gpu: &Entity, pid: u32, seen: Use, view: &ProcessView) {
        if self.own.contains(&pid) {
            return;
        }
        if !self.named.contains_key(&pid) {
            if view.is_own(pid) {
                self.own.insert(pid);
                return;
            }
            let owner = view.owner(pid).filter(|_| view.is_machine);
            let (by, disturber) = view.describe(pid);
            let is_user = owner.as_ref().is_none_or(|owner| !NOT_A_USER.contains(&owner.program.as_str()));
            if !is_user {
                self.own.insert(pid);
                return;
            }
            self.named.insert(pid, Name { by, disturber, is_seen: owner.is_some() });
        }
        let known = self.uses.entry((gpu.clone(), pid)).or_insert(seen);
        known.last = seen.last;
        known.memory = known.memory.max(seen.memory);
        known.percent = known.percent.max(seen.percent);
    }

    /// Whether the driver lists the processes of GPUs.
    pub(super) fn is_watched(&self) -> bool {
        !self.listed.is_empty()
    }

    /// Returns what disturbed the test so far. `own_processes` is how many processes of the test use GPUs.
    pub(super) fn disturbances(&self, own_processes: usize) -> Vec<Disturbance> {
        let test = self.unseen_of_test(own_processes);
        // A process that was gone by the first sample of the test has not disturbed it.
        let overlaps = |seen: &Use| seen.last == Phase::During || !self.has_sample_during;
        let others =
            self.uses.iter().filter(|((_, pid), seen)| seen.disturbs() && overlaps(seen) && !test.contains(pid));
        let mut found: Vec<Disturbance> = others
            .filter_map(|((gpu, pid), seen)| {
                let Name { by, disturber, .. } = self.named.get(pid)?.clone();
                let text = format!("used by {by}: {}", seen.text());
                Some(Disturbance { entity: gpu.clone(), disturber, by, text })
            })
            .collect();
        let unlisted = self.unlisted(&found);
        found.extend(unlisted);
        found
    }

    /// Returns the numbers under which the test itself may appear. They are new, and not more than it has processes.
    fn unseen_of_test(&self, own_processes: usize) -> BTreeSet<u32> {
        let is_new = |pid: &u32| {
            self.uses.iter().filter(|((_, user), _)| user == pid).all(|(_, seen)| seen.first == Phase::During)
        };
        let unseen = self.named.iter().filter(|(_, name)| !name.is_seen).map(|(pid, _)| *pid);
        let new: BTreeSet<u32> = unseen.filter(is_new).collect();
        // If the driver knows the test by its own number, every other one is another process.
        let may_be_test = !self.sees_machine && self.own.is_empty() && new.len() <= own_processes;
        if may_be_test { new } else { BTreeSet::new() }
    }

    /// Returns the GPUs whose memory was in use before the test by a process that the driver does not list.
    fn unlisted(&self, found: &[Disturbance]) -> Vec<Disturbance> {
        let is_explained = |gpu: &Entity| {
            let is_listed = self.sees_machine && self.listed.contains(gpu);
            is_listed || found.iter().any(|disturbance| disturbance.entity == *gpu)
        };
        let held =
            self.used_before.iter().filter(|(gpu, bytes)| **bytes >= MIN_UNLISTED_GPU_BYTES && !is_explained(gpu));
        held.map(|(gpu, bytes)| Disturbance {
            entity: gpu.clone(),
            disturber: UNKNOWN_DISTURBER.to_owned(),
            by: UNKNOWN_DISTURBER.to_owned(),
            text: format!(
                "{:.1} GiB of its memory were in use before the test, by a process that the driver does not list",
                *bytes as f64 / f64::from(1 << 30)
            ),
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::builtin::disturbance::process_view::tests::process;

    const BUS: &str = "0000:18:00.0";

    /// A process in the driver's list: pid, MiB, percent.
    type Listed = (u32, Option<u64>, Option<u32>);

    fn gpu(processes: &[Listed]) -> Gpu {
        let number = |value: f64| FieldValue::Number(value);
        let mut fields = vec![(MEMORY_USED.to_owned(), number(0.0))];
        for (index, (pid, mib, percent)) in processes.iter().enumerate() {
            fields.push((format!("activity.{index}.pid"), number(f64::from(*pid))));
            let memory = mib.map_or(FieldValue::NotSupported, |mib| number((mib << 20) as f64));
            fields.push((format!("activity.{index}.memory"), memory));
            let percent = percent.map_or(FieldValue::NotSupported, |percent| number(f64::from(percent)));
            fields.push((format!("activity.{index}.utilization"), percent));
        }
        Gpu { index: 0, bus: BUS.to_owned(), fields }
    }

    fn machine(root: &Path) -> ProcessView {
        process(root, 2, "kthreadd", 0, 0, &[]);
        for (pid, name) in [(700, "python3"), (511, "nv-hostengine"), (900, "nvidia-cuda-mps")] {
            process(root, pid, name, 1, 0, &[("status", "Uid:\t1000\t1000\t1000\t1000\n")]);
        }
        ProcessView::open(root)
    }

    fn found(view: &ProcessView, before: &[Listed], during: &[Listed]) -> Vec<String> {
        let mut log = GpuLog::default();
        log.add(&[gpu(before)], Phase::Before, view);
        log.add(&[gpu(during)], Phase::During, view);
        log.disturbances(1).into_iter().map(|found| format!("{}: {}", found.disturber, found.text)).collect()
    }

    #[test]
    fn a_process_disturbs_by_its_memory_or_its_use_and_monitoring_does_not() {
        let root = tempfile::tempdir().unwrap();
        let view = machine(root.path());
        let python = "python3 of uid 1000: used by python3 (pid 700, uid 1000)";
        for (process, expected) in [
            (
                (700, Some(2048), Some(98)),
                Some(format!("{python}: 2.0 GiB of its memory, 98 % of its time, during the test")),
            ),
            ((700, Some(16), None), Some(format!("{python}: 0.0 GiB of its memory, during the test"))),
            ((700, None, None), Some(format!("{python}: memory unknown, during the test"))),
            ((511, Some(0), Some(1)), None),
            ((511, Some(15), None), None),
            ((511, Some(0), Some(2)), Some("nv-hostengine of uid 1000".to_owned())),
            ((900, Some(400), Some(0)), None),
        ] {
            let found = found(&view, &[], &[process]);
            assert_eq!(found.len(), usize::from(expected.is_some()), "{process:?}: {found:?}");
            let starts = expected.is_none_or(|expected| found[0].starts_with(&expected));
            assert!(starts, "{process:?}: {found:?}");
        }
        let both = found(&view, &[(700, Some(100), None)], &[(700, Some(300), Some(40))]);
        assert_eq!(both, [format!("{python}: 0.3 GiB of its memory, 40 % of its time, since before the test")]);
        let gone = found(&view, &[(700, Some(100), None)], &[]);
        assert_eq!(gone, Vec::<String>::new(), "it ended before the test");
    }

    #[test]
    fn the_test_itself_is_no_disturbance_under_its_own_number() {
        let view = ProcessView::open(Path::new("/"));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let alone = found(&view, &[], &[(std::process::id(), Some(9000), Some(100)), (child.id(), Some(9000), None)]);
        let beside = found(&view, &[], &[(std::process::id(), Some(9000), None), (1, Some(100), None)]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(alone, Vec::<String>::new());
        assert_eq!(beside.len(), 1, "{beside:?}");
    }

    #[test]
    fn in_a_container_as_many_new_numbers_as_the_test_has_processes_are_its_own() {
        let root = tempfile::tempdir().unwrap();
        let view = ProcessView::open(root.path());
        let (mine, other) = ((70_001, Some(9000), Some(99)), (70_002, Some(500), None));
        assert_eq!(found(&view, &[], &[mine]), Vec::<String>::new());
        let unknown = found(&view, &[other], &[mine, other]);
        assert_eq!(unknown.len(), 1, "{unknown:?}");
        assert!(unknown[0].contains("process 70002, which is not visible from here"), "{unknown:?}");
        assert_eq!(found(&view, &[], &[mine, other]).len(), 2, "one of them is the test, and which one is unknown");
    }

    #[test]
    fn without_a_list_memory_in_use_before_the_test_disturbs() {
        let root = tempfile::tempdir().unwrap();
        for (bytes, has_list, machine_seen, disturbed) in [
            (MIN_UNLISTED_GPU_BYTES, false, true, true),
            (MIN_UNLISTED_GPU_BYTES - 1, false, true, false),
            (MIN_UNLISTED_GPU_BYTES, true, true, false),
            (MIN_UNLISTED_GPU_BYTES, true, false, true),
        ] {
            let view = if machine_seen { machine(root.path()) } else { ProcessView::open(Path::new("/none")) };
            let mut fields = vec![(MEMORY_USED.to_owned(), FieldValue::Number(bytes as f64))];
            if !has_list {
                fields.push((LIST.to_owned(), FieldValue::NotSupported));
            }
            let mut log = GpuLog::default();
            log.add(&[Gpu { index: 0, bus: BUS.to_owned(), fields }], Phase::Before, &view);
            assert_eq!(log.disturbances(1).len(), usize::from(disturbed), "{bytes} {has_list} {machine_seen}");
            assert_eq!(log.is_watched(), has_list);
        }
    }
}
