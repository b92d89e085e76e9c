//! Load on a mount by others, before and during a test.
//!
//! The kernel counts what a disk moves, and what an NFS mount of this machine moves. Other file systems have no such
//! counters, and no file system shows the load of other machines.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use doctor_checks::{
    disturbance::{
        Disturbance, MAX_DISK_BUSY_PERCENT, MAX_MOUNT_BYTES_PER_S, MAX_MOUNT_SHARE_PERCENT, Phase, WINDOW_MILLIS,
    },
    load_counters::{IoCounters, MountInfo},
};
use doctor_core::observation::Entity;

use super::process_view::{Party, ProcessView, Processes, UNKNOWN_DISTURBER, growth, largest, total};
use crate::stop::Stop;

/// Where the counters of a mount are.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Counters {
    Disk((u32, u32)),
    /// By its mount point.
    Network(PathBuf),
}

impl Counters {
    /// Finds the counters of the mount that a path is on, without touching it.
    fn find(path: &Path) -> Option<Self> {
        let mount = MountInfo::containing(&fs::read_to_string("/proc/self/mountinfo").ok()?, path)?;
        if mount.file_system.starts_with("nfs") {
            return Some(Self::Network(mount.point));
        }
        Some(Self::Disk(whole_disk(mount.device)))
    }

    fn read(&self) -> Option<IoCounters> {
        match self {
            Self::Disk(device) => IoCounters::of_disk(&fs::read_to_string("/proc/diskstats").ok()?, *device),
            Self::Network(point) => {
                IoCounters::of_network_mount(&fs::read_to_string("/proc/self/mountstats").ok()?, point)
            }
        }
    }
}

/// Returns the disk of a partition: other partitions share its load.
fn whole_disk(device: (u32, u32)) -> (u32, u32) {
    let folder = format!("/sys/dev/block/{}:{}", device.0, device.1);
    let parent = || {
        fs::metadata(format!("{folder}/partition")).ok()?;
        let numbers = fs::read_to_string(format!("{folder}/../dev")).ok()?;
        let (major, minor) = numbers.trim().split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    parent().unwrap_or(device)
}

/// Traffic at one moment.
#[derive(Debug)]
struct MountSample {
    at: Instant,
    io: IoCounters,
    processes: Processes,
}

/// What others did on a mount in some time.
#[derive(Debug, Clone, Copy, PartialEq)]
struct OtherTraffic {
    bytes_per_s: f64,
    /// Their share of all bytes.
    share_percent: f64,
    busy_percent: Option<f64>,
}

impl OtherTraffic {
    fn disturbs(self, phase: Phase) -> bool {
        let is_much = self.bytes_per_s > MAX_MOUNT_BYTES_PER_S;
        match phase {
            Phase::Before => is_much || self.busy_percent.is_some_and(|busy| busy > MAX_DISK_BUSY_PERCENT),
            // The disk is busy with the test itself.
            Phase::During => is_much && self.share_percent > MAX_MOUNT_SHARE_PERCENT,
        }
    }

    fn between(before: IoCounters, after: IoCounters, own: u64, elapsed: Duration) -> Self {
        let all = after.bytes.saturating_sub(before.bytes);
        let others = all.saturating_sub(own);
        let seconds = elapsed.as_secs_f64().max(1e-3);
        let busy = after.busy_millis.zip(before.busy_millis).map(|(after, before)| after.saturating_sub(before));
        Self {
            bytes_per_s: others as f64 / seconds,
            share_percent: if all == 0 { 0.0 } else { others as f64 * 100.0 / all as f64 },
            busy_percent: busy.map(|millis| millis as f64 / (seconds * 10.0)),
        }
    }
}

/// Watches one mount.
#[derive(Debug)]
pub(in crate::builtin) struct MountWatch {
    entity: Entity,
    counters: Option<Counters>,
    start: Option<MountSample>,
    before: Option<Disturbance>,
}

impl MountWatch {
    /// Measures the load before the test of a mount.
    pub(in crate::builtin) fn start(entity: &Entity, path: &Path, view: &ProcessView, stop: &Stop) -> Self {
        let mut watch = Self { entity: entity.clone(), counters: Counters::find(path), start: None, before: None };
        let Some(first) = watch.sample(view) else { return watch };
        let _stopped = stop.requested_within(Duration::from_millis(WINDOW_MILLIS));
        watch.start = watch.sample(view);
        watch.before = watch.disturbance_since(&first, view, Phase::Before);
        watch
    }

    fn sample(&self, view: &ProcessView) -> Option<MountSample> {
        let io = self.counters.as_ref()?.read()?;
        Some(MountSample { at: Instant::now(), io, processes: view.processes(true) })
    }

    /// Returns the disturbance: that before the test, or else that during the test.
    pub(in crate::builtin) fn finish(self, view: &ProcessView) -> Option<Disturbance> {
        if self.before.is_some() {
            return self.before;
        }
        self.disturbance_since(self.start.as_ref()?, view, Phase::During)
    }

    fn disturbance_since(&self, before: &MountSample, view: &ProcessView, phase: Phase) -> Option<Disturbance> {
        let now = self.sample(view)?;
        let grown = |parties: &[Party]| growth(&before.processes, &now.processes, parties, |process| process.bytes);
        let traffic = OtherTraffic::between(
            before.io,
            now.io,
            total(&grown(&[Party::Test])),
            now.at.saturating_duration_since(before.at),
        );
        if !traffic.disturbs(phase) {
            return None;
        }
        let (by, disturber) = match largest(&grown(&[Party::Other])).filter(|_| view.is_machine) {
            Some(pid) => view.describe(pid),
            None => ("processes that are not visible from here".to_owned(), UNKNOWN_DISTURBER.to_owned()),
        };
        let busy = traffic.busy_percent.filter(|_| phase == Phase::Before);
        let busy = busy.map_or_else(String::new, |busy| format!(" and kept its disk busy for {busy:.0} % of the time"));
        let text = format!(
            "other processes moved {:.0} MB/s{busy} {} the test, most of all {by}",
            traffic.bytes_per_s / 1e6,
            phase.word()
        );
        Some(Disturbance { entity: self.entity.clone(), disturber, by, text })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    fn traffic(all: u64, own: u64, busy: Option<u64>) -> OtherTraffic {
        let at = |bytes, busy_millis| IoCounters { bytes, busy_millis };
        OtherTraffic::between(
            at(5 * MB, busy.map(|_| 100)),
            at(5 * MB + all, busy.map(|busy| busy + 100)),
            own,
            Duration::from_secs(1),
        )
    }

    #[test]
    fn traffic_of_others_disturbs_above_its_limits() {
        for (all, busy, disturbed) in [
            (0, Some(0), false),
            (9 * MB, Some(290), false),
            (11 * MB, Some(10), true),
            (MB, Some(310), true),
            (11 * MB, None, true),
            (9 * MB, None, false),
        ] {
            assert_eq!(traffic(all, 0, busy).disturbs(Phase::Before), disturbed, "before: {all} {busy:?}");
        }
        for (all, own, disturbed) in [
            (1000 * MB, 1000 * MB, false),
            (1000 * MB, 950 * MB, false),
            (1000 * MB, 800 * MB, true),
            (10 * MB, MB, false),
            (500 * MB, 900 * MB, false),
        ] {
            assert_eq!(traffic(all, own, Some(1000)).disturbs(Phase::During), disturbed, "during: {all} {own}");
        }
    }

    #[test]
    fn a_file_system_without_counters_is_not_watched() {
        let view = ProcessView::open(Path::new("/"));
        let entity = Entity::node();
        let watch = MountWatch::start(&entity, Path::new("/proc/self"), &view, &Stop::never());
        assert!(watch.start.is_none());
        assert_eq!(watch.finish(&view), None);
    }
}
