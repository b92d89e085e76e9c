//! Load on the processors by others, before and during a test.

use std::time::{Duration, Instant};

use doctor_checks::{
    disturbance::{Disturbance, MAX_HOST_PERCENT, Phase, WINDOW_MILLIS},
    load_counters::CpuTimes,
};
use doctor_core::observation::Entity;

use super::process_view::{Party, ProcessView, Processes, UNKNOWN_DISTURBER, growth, largest, total};
use crate::stop::Stop;

/// A shorter time says nothing about the load: the kernel counts in hundredths of a second.
const WINDOW: Duration = Duration::from_millis(WINDOW_MILLIS);

/// Processor time at one moment.
#[derive(Debug)]
struct HostSample {
    at: Instant,
    cpu: CpuTimes,
    processes: Processes,
}

impl HostSample {
    /// None on a machine made of files.
    fn take(view: &ProcessView) -> Option<Self> {
        let cpu = CpuTimes::parse(&view.machine_file("stat")?)?;
        Some(Self { at: Instant::now(), cpu, processes: view.processes(false) })
    }

    /// Returns the disturbance since `before`, if others used more than they may.
    fn disturbance_since(&self, before: &Self, view: &ProcessView, phase: Phase) -> Option<Disturbance> {
        let grown = |parties: &[Party]| growth(&before.processes, &self.processes, parties, |process| process.ticks);
        let percent = self.cpu.percent_of_others(before.cpu, total(&grown(&[Party::Test, Party::Kernel])))?;
        if percent <= MAX_HOST_PERCENT {
            return None;
        }
        let (by, disturber) = match largest(&grown(&[Party::Other])).filter(|_| view.is_machine) {
            Some(pid) => view.describe(pid),
            None => ("processes that are not visible from here".to_owned(), UNKNOWN_DISTURBER.to_owned()),
        };
        let text = format!(
            "other processes used {percent:.0} % of the processors {} the test, most of all {by}; the limit is \
             {MAX_HOST_PERCENT:.0} %",
            phase.word()
        );
        Some(Disturbance { entity: Entity::node(), disturber, by, text })
    }
}

/// Watches the processors.
#[derive(Debug)]
pub(super) struct HostWatch {
    first: Option<HostSample>,
    start: Option<HostSample>,
    before: Option<Disturbance>,
}

impl HostWatch {
    /// Begins to measure. The test waits for [`Self::start_test`].
    pub(super) fn begin(view: &ProcessView) -> Self {
        Self { first: HostSample::take(view), start: None, before: None }
    }

    /// Ends the measurement before the test.
    pub(super) fn start_test(&mut self, view: &ProcessView, stop: &Stop) {
        let Some(first) = self.first.take() else { return };
        let _stopped = stop.requested_within(WINDOW.saturating_sub(first.at.elapsed()));
        self.start = HostSample::take(view);
        self.before = self.start.as_ref().and_then(|start| start.disturbance_since(&first, view, Phase::Before));
    }

    /// Returns the disturbance so far: that before the test, or else that during the test.
    pub(super) fn disturbance(&self, view: &ProcessView) -> Option<Disturbance> {
        self.before.clone().or_else(|| {
            let start = self.start.as_ref().filter(|start| start.at.elapsed() >= WINDOW)?;
            HostSample::take(view)?.disturbance_since(start, view, Phase::During)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;
    use crate::builtin::disturbance::process_view::tests::process;

    /// A machine at one moment: processor time of everything, of kthreadd's child and of a program of another party.
    fn machine(root: &Path, busy: u64, idle: u64, worker: u64, make: u64) -> (ProcessView, HostSample) {
        fs::create_dir_all(root.join("proc")).unwrap();
        fs::write(root.join("proc/stat"), format!("cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\n")).unwrap();
        process(root, 2, "kthreadd", 0, 0, &[]);
        process(root, 30, "kworker/0:1", 2, worker, &[]);
        process(root, 700, "make", 1, make, &[("status", "Uid:\t0\t0\t0\t0\n")]);
        let view = ProcessView::open(root);
        let sample = HostSample::take(&view).unwrap();
        (view, sample)
    }

    #[test]
    fn load_of_others_disturbs_above_the_limit_and_kernel_threads_do_not_count() {
        for (busy, worker, make, disturbed) in
            [(150, 0, 150, false), (250, 0, 250, true), (250, 100, 150, false), (0, 0, 0, false)]
        {
            let root = tempfile::tempdir().unwrap();
            let (_, before) = machine(root.path(), 0, 0, 0, 0);
            let (view, after) = machine(root.path(), busy, 1000 - busy, worker, make);
            let found = after.disturbance_since(&before, &view, Phase::Before);
            assert_eq!(found.is_some(), disturbed, "{busy} {worker} {make}");
            if let Some(found) = found {
                assert_eq!((found.entity, found.disturber.as_str()), (Entity::node(), "make of uid 0"));
                assert_eq!(
                    found.text,
                    "other processes used 25 % of the processors before the test, most of all make (pid 700, uid 0); \
                     the limit is 20 %"
                );
            }
        }
    }

    #[test]
    fn a_machine_without_counters_has_no_load() {
        let root = tempfile::tempdir().unwrap();
        let view = ProcessView::open(root.path());
        let mut watch = HostWatch::begin(&view);
        watch.start_test(&view, &Stop::never());
        assert_eq!(watch.disturbance(&view), None);
    }
}
