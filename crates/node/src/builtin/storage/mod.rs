//! `doctor-node test storage`: runs fio on each mount, and reports faults as findings.
//!
//! This process touches no mount itself, because it could not be ended while it hangs there. The keeper ([`keeper`])
//! owns the directory, and fio ([`passes`]) reads and writes. Both have time limits and are left behind if they cannot
//! be killed. An abandoned process is recorded by mount, and the mount is not tested again while it hangs. The first
//! error ends the test of a mount and is reported; earlier measurements remain valid.

mod directory;
mod found_mounts;
mod keeper;
mod mount_failure;
mod passes;

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use doctor_checks::{
    disturbance::{Disturbance, RatesOf},
    document::Measurements,
    fio::{FioDirection, FioRun},
    storage_params::{Direction, Pattern, Sizes, StorageParams},
};
use doctor_core::observation::{Entity, EntityKind, Event, FailureKind, Metric, ProbeFailure, Unit};

use super::{
    SELF_EXE,
    disturbance::{MountWatch, Watch},
};
use crate::{
    runner::{STATE_VARIABLE, hung_probes::HungProbes},
    stop::{Stop, StopReason},
};
use found_mounts::VisibleMounts;
use keeper::{HungOnMount, Keeper, KeeperError, Ready};
use mount_failure::{MountFailure, MountFault, format_bytes, from_errno, pass_line};
use passes::{Fio, Outcome, Pass, PassParams};

pub(super) use keeper::{SUBTASK, run_keeper};
pub(super) use passes::{ENTER, enter};

/// How long to wait for the keeper after a stop, when the runner allows the test not much more, and on a mount that
/// hangs, where it will hardly answer.
const SHORT_KEEPER_TIMEOUT: Duration = Duration::from_millis(600);

/// Entry point of the test's process.
pub(super) fn run(args: Vec<OsString>) -> Result<Measurements, ProbeFailure> {
    let params = args.into_iter().next().and_then(|text| serde_json::from_str::<StorageParams>(text.to_str()?).ok());
    let Some(params) = params else {
        return Err(ProbeFailure::new(FailureKind::Unparseable, "cannot parse the parameters of the storage test"));
    };
    let stop = Stop::on_signals()
        .map_err(|error| ProbeFailure::new(FailureKind::Failed, format!("cannot install signal handlers: {error}")))?
        .after(params.timeout.to_std());
    let fio = Fio::find(&stop)?;
    eprintln!("{} with engine {}", fio.version, fio.engine);
    let probes = env::var_os(STATE_VARIABLE)
        .map_or_else(HungProbes::in_memory, |directory| HungProbes::in_directory(Path::new(&directory)));
    let root = env::var_os("DOCTOR_ROOT").map_or_else(|| PathBuf::from("/"), PathBuf::from);
    let watch = Watch::processors(&stop);
    let mut all = Measurements::default();
    let mounts = VisibleMounts::now(&root);
    for target in mounts.test_paths(&params.targets) {
        let entity = Entity::new(EntityKind::Mount, &*target.name);
        let hung_probes = HungOnMount { probes: &probes, what: format!("storage {}", target.name) };
        let mut test =
            MountTest { fio: &fio, params: &params, stop: &stop, hung_probes, entity, measurements: &mut all };
        let is_missing = target.is_mount && !mounts.is_mounted(&target.path);
        let mount = MountWatch::start(&test.entity, &target.path, watch.view(), &stop);
        if let Err(failure) = test.run(is_missing, &target.path) {
            test.record_failure(failure);
        }
        test.record_disturbance(mount.finish(watch.view()));
        if stop.requested() == Some(StopReason::Signal) {
            return Err(ProbeFailure::new(FailureKind::Killed, "stopped by a signal"));
        }
    }
    watch.report(Ok(all), RatesOf::EachGpu)
}

/// The test of one mount or directory.
struct MountTest<'a> {
    fio: &'a Fio,
    params: &'a StorageParams,
    stop: &'a Stop,
    hung_probes: HungOnMount<'a>,
    entity: Entity,
    measurements: &'a mut Measurements,
}

impl MountTest<'_> {
    fn record_failure(&mut self, failure: MountFailure) {
        match failure {
            MountFailure::Fault(fault, text) => {
                eprintln!("{}: {}: {text}", self.entity.id, fault.code());
                self.measurements.events.push(Event::seen(fault.code(), self.entity.clone(), text));
            }
            MountFailure::NoResult(kind, text) => {
                let text = format!("{}: {text}", self.entity.id);
                eprintln!("{text}");
                self.measurements.failures.push(ProbeFailure::new(kind, text));
            }
        }
    }

    fn record_disturbance(&mut self, disturbance: Option<Disturbance>) {
        if let Some(disturbance) = disturbance {
            eprintln!("{}: {}", self.entity.id, disturbance.text);
            self.measurements.events.push(disturbance.event());
        }
    }

    fn add_metric(&mut self, name: &str, value: f64, unit: Unit) {
        self.measurements.metrics.push(Metric::new(name, self.entity.clone(), value, unit));
    }

    /// Runs the test, from creating the directory to removing it. `is_missing`: nothing is mounted there, and something
    /// should be.
    fn run(&mut self, is_missing: bool, path: &Path) -> Result<(), MountFailure> {
        if let Some(pid) = self.hung_probes.hanging() {
            let text = format!("process {pid} of an earlier test still hangs on it; not tested again");
            return Err(MountFailure::Fault(MountFault::Stalled, text));
        }
        if is_missing {
            return Err(MountFailure::Fault(MountFault::Missing, "nothing is mounted there".to_owned()));
        }
        let timeout = self.params.stall.to_std();
        let (keeper, ready) = Keeper::start(path, timeout, self.stop, &self.hung_probes)
            .map_err(|error| keeper_failure(error, "creating a directory"))?;
        let result = self.passes(&keeper, &ready);
        let is_short_of_time = self.stop.requested() == Some(StopReason::Signal)
            || matches!(result, Err(MountFailure::Fault(MountFault::Stalled, _)));
        let removed = keeper.finish(if is_short_of_time { SHORT_KEEPER_TIMEOUT } else { timeout }, &self.hung_probes);
        // The first error matters more than files that could not be removed.
        result.and_then(|()| removed.map_err(|error| keeper_failure(error, "removing the files")))
    }

    fn passes(&mut self, keeper: &Keeper, ready: &Ready) -> Result<(), MountFailure> {
        let Some(sizes) = Sizes::fitting(self.params.size, ready.free) else {
            let free = ready.free.map_or_else(String::new, format_bytes);
            let needed = format_bytes(Sizes::min_free());
            let text = format!("{free} free, {needed} required: the test uses at most a tenth of the free space");
            return Err(MountFailure::Fault(MountFault::NoSpace, text));
        };
        let free =
            ready.free.map_or_else(|| "free space unknown".to_owned(), |free| format!("{} free", format_bytes(free)));
        let how = if ready.direct { "direct I/O" } else { "through the page cache: direct I/O is not supported" };
        eprintln!("{}: {free}; 2 x {} of files, {how}", self.entity.id, format_bytes(sizes.set));
        if ready.removed_stale > 0 {
            eprintln!("{}: removed the files of {} earlier tests", self.entity.id, ready.removed_stale);
        }
        let directory = keeper.directory(ready);
        let track = PassParams { fio: self.fio, params: self.params, directory: &directory, sizes, stop: self.stop };
        let mut direct = ready.direct;
        if self.params.verify {
            let run = self.pass(&track, Pass::Verify, &mut direct)?;
            if run.read.bytes < sizes.verified {
                let text = format!(
                    "verify: fio compared {} of {}",
                    format_bytes(run.read.bytes),
                    format_bytes(sizes.verified)
                );
                return Err(MountFailure::NoResult(FailureKind::Empty, text));
            }
            self.add_metric("storage_verified", run.read.bytes as f64, Unit::Bytes);
        }
        for pattern in Pattern::ALL {
            let run = self.pass(&track, Pass::Measure(*pattern), &mut direct)?;
            self.add_pass_metrics(*pattern, &run);
        }
        self.add_metric("storage_direct", f64::from(u8::from(direct)), Unit::Count);
        Ok(())
    }

    /// Runs one pass. If the mount refuses direct I/O only on use, falls back to the page cache for this mount.
    fn pass(&mut self, track: &PassParams<'_>, pass: Pass, direct: &mut bool) -> Result<FioRun, MountFailure> {
        let started = Instant::now();
        let name = pass.name();
        loop {
            match track.run(pass, *direct) {
                Outcome::Finished(run) if run.error == libc::EINVAL && *direct => {
                    eprintln!("{}: direct I/O is not supported; using the page cache", self.entity.id);
                    *direct = false;
                }
                Outcome::Finished(run) if run.error == 0 => {
                    let elapsed = started.elapsed().as_secs_f64();
                    eprintln!("{}: {name:20} {:4.1} s  {}", self.entity.id, elapsed, pass_line(pass, &run));
                    return Ok(run);
                }
                Outcome::Finished(run) => return Err(from_errno(run.error, &format!("{name}: fio"))),
                Outcome::Stalled(limit) => {
                    let text = format!("{name}: fio did not return within {limit:.0?} and was killed");
                    return Err(MountFailure::Fault(MountFault::Stalled, text));
                }
                Outcome::Unkillable { pid, child } => {
                    self.hung_probes.record(pid, child);
                    let text = format!("{name}: fio hangs in the kernel and was left behind as process {pid}");
                    return Err(MountFailure::Fault(MountFault::Stalled, text));
                }
                Outcome::Failed(ProbeFailure { kind, text }) => return Err(MountFailure::NoResult(kind, text)),
                Outcome::Stopped(reason) => return Err(stopped(reason, self.params)),
            }
        }
    }

    /// Adds the metrics under the names that earlier tests of this kind used.
    fn add_pass_metrics(&mut self, pattern: Pattern, run: &FioRun) {
        let name = |what: &str| format!("{}_{what}", pattern.code());
        let both = run.read.combine(run.write);
        self.add_metric(&name("bw"), both.bytes_per_second, Unit::BytesPerSecond);
        self.add_metric(&name("iops"), both.iops, Unit::OperationsPerSecond);
        let mut latencies = |prefix: &str, side: &FioDirection| {
            let Some(latency) = side.latency else { return };
            for (what, value) in [("p50", latency.p50), ("p99", latency.p99), ("p999", latency.p999)] {
                self.add_metric(&name(&format!("{prefix}{what}")), value, Unit::Seconds);
            }
        };
        match pattern.spec().direction {
            Direction::Read => latencies("", &run.read),
            Direction::Write => latencies("", &run.write),
            Direction::Both => {
                latencies("read_", &run.read);
                latencies("write_", &run.write);
            }
        }
    }
}

fn stopped(reason: StopReason, params: &StorageParams) -> MountFailure {
    match reason {
        StopReason::Signal => MountFailure::NoResult(FailureKind::Killed, "stopped by a signal".to_owned()),
        StopReason::TimeLimit => {
            let text = format!("the test did not finish within {}; increase `timeout`", params.timeout);
            MountFailure::NoResult(FailureKind::TimedOut, text)
        }
    }
}

fn keeper_failure(error: KeeperError, operation: &str) -> MountFailure {
    match error {
        KeeperError::Io(failure) => from_errno(failure.errno, &failure.operation),
        KeeperError::Stalled(timeout) => {
            MountFailure::Fault(MountFault::Stalled, format!("{operation} did not return within {timeout:.0?}"))
        }
        KeeperError::Unkillable(pid) => {
            let text = format!("{operation} hangs and was left behind as process {pid}");
            MountFailure::Fault(MountFault::Stalled, text)
        }
        KeeperError::Gone(text) => MountFailure::NoResult(FailureKind::Failed, format!("{operation}: {text}")),
        KeeperError::Stopped(StopReason::Signal) => {
            MountFailure::NoResult(FailureKind::Killed, "stopped by a signal".to_owned())
        }
        KeeperError::Stopped(StopReason::TimeLimit) => {
            MountFailure::NoResult(FailureKind::TimedOut, format!("{operation}: timed out"))
        }
    }
}
