//! `doctor-node test storage`: runs fio on each mount, and reports faults as findings.
//!
//! This process touches no mount itself, because it could not be ended while it hangs there. The keeper ([`keeper`])
//! owns the directory, and fio ([`passes`]) reads and writes. Both have time limits and are left behind if they cannot
//! be killed. An abandoned process is recorded by mount, and the mount is not tested again while it hangs. The first
//! error ends the test of a mount and is reported; earlier measurements remain valid.

mod directory;
mod keeper;
mod passes;
mod told;

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use doctor_checks::{
    document::Measurements,
    fio::{FioRun, Side},
    storage_order::{Direction, Pattern, Place, Sizes, StorageOrder},
};
use doctor_core::observation::{Entity, EntityKind, Event, FailureKind, Metric, ProbeFailure, Unit};

use super::OURSELVES;
use crate::{
    runner::{STATE_VARIABLE, abandoned::AbandonedProbes, mounts},
    stop::{Stop, StopWhy},
};
use keeper::{Keeper, Left, NotKept, Ready};
use passes::{Fio, Outcome, Pass, Track};
use told::{Told, Wrong, bytes, of_errno, of_pass};

pub(super) use keeper::{KEEP, keep};
pub(super) use passes::{ENTER, enter};

/// How long to wait for the keeper after a stop, when the runner allows the test not much more, and on a mount that
/// hangs, where it will hardly answer.
const HURRY: Duration = Duration::from_millis(600);

/// Entry point of the test's process.
pub(super) fn run(args: Vec<OsString>) -> Result<Measurements, ProbeFailure> {
    let order = args.into_iter().next().and_then(|text| serde_json::from_str::<StorageOrder>(text.to_str()?).ok());
    let Some(order) = order else {
        return Err(ProbeFailure::new(FailureKind::Unparseable, "cannot parse the parameters of the storage test"));
    };
    let stop = Stop::on_signals()
        .map_err(|error| ProbeFailure::new(FailureKind::Failed, format!("cannot install signal handlers: {error}")))?
        .after(order.timeout.to_std());
    let fio = Fio::find(&stop)?;
    eprintln!("{} with engine {}", fio.version, fio.engine);
    let probes = env::var_os(STATE_VARIABLE)
        .map_or_else(AbandonedProbes::of_this_process, |directory| AbandonedProbes::kept_in(Path::new(&directory)));
    let root = env::var_os("DOCTOR_ROOT").map_or_else(|| PathBuf::from("/"), PathBuf::from);
    let mut all = Measurements::default();
    for place in &order.places {
        let entity = Entity::new(EntityKind::Mount, place.path());
        let left = Left { probes: &probes, what: format!("storage {}", place.path()) };
        let mut test = PlaceTest { fio: &fio, order: &order, stop: &stop, left, entity, seen: &mut all };
        if let Err(told) = test.run(place, &root.join(place.path().trim_start_matches('/'))) {
            test.tell(told);
        }
        if stop.told() == Some(StopWhy::Signal) {
            return Err(ProbeFailure::new(FailureKind::Killed, "stopped by a signal"));
        }
    }
    Ok(all)
}

/// The test of one mount or directory.
struct PlaceTest<'a> {
    fio: &'a Fio,
    order: &'a StorageOrder,
    stop: &'a Stop,
    left: Left<'a>,
    entity: Entity,
    seen: &'a mut Measurements,
}

impl PlaceTest<'_> {
    fn tell(&mut self, told: Told) {
        match told {
            Told::Wrong(wrong, text) => {
                eprintln!("{}: {}: {text}", self.entity.id, wrong.code());
                self.seen.events.push(Event::seen(wrong.code(), self.entity.clone(), text));
            }
            Told::Unread(kind, text) => {
                let text = format!("{}: {text}", self.entity.id);
                eprintln!("{text}");
                self.seen.unread.push(ProbeFailure::new(kind, text));
            }
        }
    }

    fn measured(&mut self, name: &str, value: f64, unit: Unit) {
        self.seen.metrics.push(Metric::new(name, self.entity.clone(), value, unit));
    }

    /// Runs the test, from creating the directory to removing it.
    fn run(&mut self, place: &Place, path: &Path) -> Result<(), Told> {
        if let Some(pid) = self.left.hanging() {
            let text = format!("process {pid} of an earlier test still hangs on it; not tested again");
            return Err(Told::Wrong(Wrong::Stalled, text));
        }
        let mounted = || mounts::points(&fs::read_to_string("/proc/self/mounts").unwrap_or_default());
        if matches!(place, Place::Mount(_)) && !mounted().iter().any(|point| point == path) {
            return Err(Told::Wrong(Wrong::Missing, "nothing is mounted there".to_owned()));
        }
        let patience = self.order.stall.to_std();
        let (keeper, ready) = Keeper::start(path, patience, self.stop, &self.left)
            .map_err(|why| not_kept(why, "creating a directory"))?;
        let result = self.passes(&keeper, &ready);
        let in_a_hurry =
            self.stop.told() == Some(StopWhy::Signal) || matches!(result, Err(Told::Wrong(Wrong::Stalled, _)));
        let removed = keeper.finish(if in_a_hurry { HURRY } else { patience }, &self.left);
        // The first error matters more than files that could not be removed.
        result.and_then(|()| removed.map_err(|why| not_kept(why, "removing the files")))
    }

    fn passes(&mut self, keeper: &Keeper, ready: &Ready) -> Result<(), Told> {
        let Some(sizes) = Sizes::within(self.order.size, ready.free) else {
            let free = ready.free.map_or_else(String::new, bytes);
            let needed = bytes(Sizes::needs_free());
            let text = format!("{free} free, {needed} required: the test uses at most a tenth of the free space");
            return Err(Told::Wrong(Wrong::NoSpace, text));
        };
        let free = ready.free.map_or_else(|| "free space unknown".to_owned(), |free| format!("{} free", bytes(free)));
        let how = if ready.direct { "direct I/O" } else { "through the page cache: direct I/O is not supported" };
        eprintln!("{}: {free}; 2 x {} of files, {how}", self.entity.id, bytes(sizes.set));
        if ready.swept > 0 {
            eprintln!("{}: removed the files of {} earlier tests", self.entity.id, ready.swept);
        }
        let directory = keeper.directory(ready);
        let track = Track { fio: self.fio, order: self.order, directory: &directory, sizes, stop: self.stop };
        let mut direct = ready.direct;
        if self.order.verify {
            let run = self.pass(&track, Pass::Verify, &mut direct)?;
            if run.read.bytes < sizes.verified {
                let text = format!("verify: fio compared {} of {}", bytes(run.read.bytes), bytes(sizes.verified));
                return Err(Told::Unread(FailureKind::Empty, text));
            }
            self.measured("storage_verified", run.read.bytes as f64, Unit::Bytes);
        }
        for pattern in Pattern::ALL {
            let run = self.pass(&track, Pass::Measure(*pattern), &mut direct)?;
            self.keep(*pattern, &run);
        }
        self.measured("storage_direct", f64::from(u8::from(direct)), Unit::Count);
        Ok(())
    }

    /// Runs one pass. If the mount refuses direct I/O only on use, falls back to the page cache for this mount.
    fn pass(&mut self, track: &Track<'_>, pass: Pass, direct: &mut bool) -> Result<FioRun, Told> {
        let begun = Instant::now();
        let name = pass.name();
        loop {
            match track.run(pass, *direct) {
                Outcome::Ran(run) if run.error == libc::EINVAL && *direct => {
                    eprintln!("{}: direct I/O is rejected; using the page cache", self.entity.id);
                    *direct = false;
                }
                Outcome::Ran(run) if run.error == 0 => {
                    let took = begun.elapsed().as_secs_f64();
                    eprintln!("{}: {name:20} {:4.1} s  {}", self.entity.id, took, of_pass(pass, &run));
                    return Ok(run);
                }
                Outcome::Ran(run) => return Err(of_errno(run.error, &format!("{name}: fio"))),
                Outcome::Stalled(limit) => {
                    let text = format!("{name}: fio did not return within {limit:.0?} and was killed");
                    return Err(Told::Wrong(Wrong::Stalled, text));
                }
                Outcome::LeftBehind { pid, child } => {
                    self.left.note(pid, child);
                    let text = format!("{name}: fio hangs in the kernel and was left behind as process {pid}");
                    return Err(Told::Wrong(Wrong::Stalled, text));
                }
                Outcome::Failed(ProbeFailure { kind, text }) => return Err(Told::Unread(kind, text)),
                Outcome::Stopped(why) => return Err(stopped(why, self.order)),
            }
        }
    }

    /// Adds the metrics under the names that earlier tests of this kind used.
    fn keep(&mut self, pattern: Pattern, run: &FioRun) {
        let name = |what: &str| format!("{}_{what}", pattern.code());
        let both = run.read.and(run.write);
        self.measured(&name("bw"), both.bytes_per_second, Unit::BytesPerSecond);
        self.measured(&name("iops"), both.per_second, Unit::OperationsPerSecond);
        let mut latencies = |prefix: &str, side: &Side| {
            let Some(latency) = side.latency else { return };
            for (what, value) in [("p50", latency.p50), ("p99", latency.p99), ("p999", latency.p999)] {
                self.measured(&name(&format!("{prefix}{what}")), value, Unit::Seconds);
            }
        };
        match pattern.facts().direction {
            Direction::Read => latencies("", &run.read),
            Direction::Write => latencies("", &run.write),
            Direction::Both => {
                latencies("read_", &run.read);
                latencies("write_", &run.write);
            }
        }
    }
}

fn stopped(why: StopWhy, order: &StorageOrder) -> Told {
    match why {
        StopWhy::Signal => Told::Unread(FailureKind::Killed, "stopped by a signal".to_owned()),
        StopWhy::TimeLimit => {
            let text = format!("the test did not finish within {}; increase `timeout`", order.timeout);
            Told::Unread(FailureKind::TimedOut, text)
        }
    }
}

fn not_kept(why: NotKept, doing: &str) -> Told {
    match why {
        NotKept::Trouble(trouble) => of_errno(trouble.errno, &trouble.what),
        NotKept::Stalled(patience) => {
            Told::Wrong(Wrong::Stalled, format!("{doing} did not return within {patience:.0?}"))
        }
        NotKept::LeftBehind(pid) => {
            let text = format!("{doing} hangs and was left behind as process {pid}");
            Told::Wrong(Wrong::Stalled, text)
        }
        NotKept::Gone(text) => Told::Unread(FailureKind::Failed, format!("{doing}: {text}")),
        NotKept::Stopped(StopWhy::Signal) => Told::Unread(FailureKind::Killed, "stopped by a signal".to_owned()),
        NotKept::Stopped(StopWhy::TimeLimit) => Told::Unread(FailureKind::TimedOut, format!("{doing}: timed out")),
    }
}
