//! Two controllers on one store, of which one at a time is stopped (SIGSTOP), continued or killed at random instants.
//!
//! A stopped process is what a controller on a suspended machine, behind a cut network or under a debugger is to the other
//! one: it holds what it held, and goes on later as if nothing had happened. Each time the leader is stopped or killed the
//! other one must lead within two leases, or within five times the slowest start if that is longer: on a machine that also
//! builds software a start alone takes seconds. The output says how many takeovers took longer than two leases. A leader that
//! goes on must do nothing. In the end the cluster's record of effects is compared with the store, as after the kills of one
//! controller.
//!
//! On SQLite a process that is stopped inside a write keeps the file's lock until it is continued or killed, and there is
//! no server that could end it. The test finds the owner of the lock in `/proc/locks`, counts these stops and kills the
//! process, as an operator would. In a long run they must stay below three quarters of the stops after which a takeover
//! was waited for, and any other reason for a late takeover is a defect.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    time::{Duration, Instant},
};

use doctor_backend::clock::Clock;
use doctor_core::time::Span;
use doctor_sim::{RemoteSim, Tolerances, read_effects};
use doctor_store::{Store, StoreUrl};
use rustix::process::Signal;

use crate::{
    comparison,
    fault_injection::{FaultInjector, Rng},
    finish,
    fixture::{Fixture, LEASE, OUTAGE, Process, SPEED, WAIT_LIMIT},
    inspection::Inspections,
    nodes, print_summary,
    startup_time::StartupTimes,
};

/// What the test did and measured.
#[derive(Debug, Default)]
struct PairCounts {
    stops: u32,
    kills: u32,
    /// Stops of the leader after which a takeover was waited for.
    awaited_stops: u32,
    /// Those of them inside a write on SQLite, which ended with a kill.
    locked: u32,
    takeovers: Vec<Duration>,
}

/// SQLite's exclusive locks without which no other process writes, by their byte in the index of the log: that of a writer,
/// and that of a process which repairs the log.
const WRITE_LOCKS: [u64; 2] = [120, 122];

/// With fewer stops than this, most of them may be inside a write by chance.
const MIN_JUDGED_STOPS: u32 = 20;

struct Controller {
    process: Process,
    is_started: bool,
    is_stopped: bool,
}

impl Controller {
    fn start(fixture: &Fixture) -> Self {
        Self { process: fixture.start_controller(), is_started: false, is_stopped: false }
    }

    /// Waits until it has opened the store, which is a write: one that is stopped there blocks SQLite before it is a
    /// controller at all.
    fn wait_until_started(&mut self, pace: &mut StartupTimes) {
        if !std::mem::replace(&mut self.is_started, true) {
            pace.record(self.process.wait_until_started());
        }
    }

    fn stop(&mut self, pace: &mut StartupTimes) {
        self.wait_until_started(pace);
        self.process.signal(Signal::STOP);
        self.is_stopped = true;
    }

    fn go_on(&mut self) {
        self.process.signal(Signal::CONT);
        self.is_stopped = false;
    }
}

struct Pair<'a> {
    fixture: &'a Fixture,
    store: Store,
    both: [Controller; 2],
    pace: StartupTimes,
    counts: PairCounts,
}

impl Pair<'_> {
    /// Returns which of the two leads.
    fn leader(&self) -> Option<usize> {
        // The time is not that of the lease, which counts by the database's clock.
        let status =
            self.store.lease_status(doctor_core::time::Timestamp::MIN).unwrap().filter(|status| status.alive)?;
        let pid = status.holder.rsplit(':').nth(1)?.parse::<u32>().ok()?;
        self.both.iter().position(|controller| controller.process.id() == pid)
    }

    fn wait_for_leader(&self) -> usize {
        let began = Instant::now();
        loop {
            if let Some(leader) = self.leader().filter(|leader| !self.both[*leader].is_stopped) {
                return leader;
            }
            assert!(began.elapsed() < WAIT_LIMIT, "neither controller leads:\n{}", self.both[0].process.log_tail());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the limit of a takeover: two leases, or more on a machine on which already a start takes long.
    fn limit(&self) -> Duration {
        (LEASE * 2).max(self.pace.slowest() * 5)
    }

    /// Replaces one of the two by SIGKILL and a new process.
    fn kill(&mut self, which: usize) {
        let new = Controller::start(self.fixture);
        std::mem::replace(&mut self.both[which], new).process.kill();
        self.counts.kills += 1;
    }

    /// Waits until the other one leads after the leader was stopped or killed.
    fn measure_takeover(&mut self, victim: usize) {
        let mut began = Instant::now();
        self.counts.awaited_stops += u32::from(self.both[victim].is_stopped);
        while self.leader() != Some(1 - victim) {
            if began.elapsed() > self.limit() && self.both[victim].is_stopped && self.holds_write_lock(victim) {
                self.counts.locked += 1;
                self.kill(victim);
                began = Instant::now();
            }
            assert!(
                began.elapsed() < self.limit(),
                "no takeover within {:?} after {:?}; {:?}\n{}",
                self.limit(),
                self.counts,
                self.store.lease_status(doctor_core::time::Timestamp::MIN),
                self.both[1 - victim].process.log_tail()
            );
            // A killed process was replaced, and the new one may be the first to lead.
            if !self.both[victim].is_stopped && self.leader().is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.counts.takeovers.push(began.elapsed());
    }

    /// Whether this controller holds the lock that a writer of SQLite needs.
    fn holds_write_lock(&self, which: usize) -> bool {
        let StoreUrl::Sqlite(path) = &self.fixture.store else { return false };
        let index = fs::metadata(format!("{}-shm", path.display())).unwrap().ino().to_string();
        let pid = self.both[which].process.id().to_string();
        // A line: `1: POSIX ADVISORY WRITE PID MAJOR:MINOR:INODE FIRST LAST`.
        fs::read_to_string("/proc/locks").unwrap().lines().any(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [_, "POSIX", _, "WRITE", owner, file, first, last] = fields[..] else { return false };
            let bytes = first.parse().unwrap_or(u64::MAX)..=last.parse().unwrap_or(u64::MAX);
            owner == pid
                && file.rsplit(':').next() == Some(index.as_str())
                && WRITE_LOCKS.iter().any(|lock| bytes.contains(lock))
        })
    }
}

/// Runs two controllers for this long, and compares.
pub(crate) fn run_pair_test(name: &str, seed: u64, length: Duration, fixture: &Fixture) {
    println!("{name}: two controllers for {:.1} minutes, DOCTOR_KILL_SEED={seed}", length.as_secs_f64() / 60.0);
    let mut chance = Rng::new(seed);
    let (process, cluster) = fixture.start_cluster();
    let mut injector = FaultInjector::new(nodes(&cluster).into_iter().map(|node| node.name).collect());
    let mut pace = StartupTimes::default();
    let mut both = [Controller::start(fixture), Controller::start(fixture)];
    both.iter_mut().for_each(|controller| controller.wait_until_started(&mut pace));
    let mut pair = Pair { fixture, store: fixture.open_store(), both, pace, counts: PairCounts::default() };
    let began = Instant::now();
    while began.elapsed() < length || pair.counts.takeovers.len() < 3 {
        let leader = pair.wait_for_leader();
        // The random instant itself, not a wait for a condition.
        std::thread::sleep(Duration::from_micros(chance.below(1_500_000)));
        if chance.once_in(3) {
            injector.inject_random(&mut chance, &cluster);
        }
        injector.release_unmarked(&pair.store, cluster.now());
        disturb(&mut pair, &mut chance, leader);
    }
    for controller in pair.both.iter_mut().filter(|controller| controller.is_stopped) {
        controller.go_on();
    }
    let Pair { both, mut pace, counts, .. } = pair;
    for mut controller in both {
        // A signal before that ends the process at once.
        controller.wait_until_started(&mut pace);
        controller.process.stop();
    }
    injector.restore_vanished(&cluster);
    finish(&mut pace, fixture, &cluster);
    compare(name, fixture, &pace, &cluster, &injector);
    drop(cluster);
    process.stop();
    fixture.run(&["db", "verify"]);
    let longest = counts.takeovers.iter().max().copied().unwrap_or_default().as_secs_f64();
    let late = counts.takeovers.iter().filter(|took| **took > LEASE * 2).count();
    println!(
        "{name}: {} stops, {} kills, {} takeovers, the longest {longest:.1} s with a lease of {:.0} s, {late} of them longer \
         than two leases; {} of {} awaited stops inside a write",
        counts.stops,
        counts.kills,
        counts.takeovers.len(),
        LEASE.as_secs_f64(),
        counts.locked,
        counts.awaited_stops
    );
    // A controller of this test is in a write for a good part of its time.
    let is_plausible = counts.awaited_stops < MIN_JUDGED_STOPS || counts.locked * 4 < counts.awaited_stops * 3;
    assert!(is_plausible, "too many stops inside a write: {counts:?}");
}

/// Stops, continues or kills one of the two. The other one always runs.
fn disturb(pair: &mut Pair<'_>, chance: &mut Rng, leader: usize) {
    let stopped = pair.both.iter().position(|controller| controller.is_stopped);
    match (chance.below(4), stopped) {
        (0, _) => {
            let victim = stopped.unwrap_or(leader);
            pair.kill(victim);
            if victim == leader {
                pair.measure_takeover(victim);
            }
        }
        // It may have been stopped for longer than its lease, or not.
        (_, Some(stopped)) => pair.both[stopped].go_on(),
        (1, None) => {
            pair.both[1 - leader].stop(&mut pair.pace);
            pair.counts.stops += 1;
        }
        (_, None) => {
            pair.both[1 - leader].wait_until_started(&mut pair.pace);
            pair.both[leader].stop(&mut pair.pace);
            pair.counts.stops += 1;
            match chance.below(3) {
                // It goes on before its lease ends, or about when it ends.
                0 => {
                    std::thread::sleep(Duration::from_millis(chance.below(4_000)));
                    pair.both[leader].go_on();
                }
                _ => pair.measure_takeover(leader),
            }
        }
    }
}

fn compare(name: &str, fixture: &Fixture, pace: &StartupTimes, cluster: &RemoteSim, injector: &FaultInjector) {
    let effects = read_effects(&fixture.effects()).unwrap();
    // A plan is at most as old as the lease, and a job may be in a user's way until another controller leads.
    let simulated = |real: Duration| Span::from_millis((real.as_secs_f64() * 1000.0 * SPEED) as i64);
    let plain = pace.patience();
    let patience =
        Tolerances { view: plain.view + simulated(LEASE), leave: plain.leave + simulated(LEASE * 4) + OUTAGE.times(2) };
    let world = nodes(cluster);
    let (figures, wrong) = comparison::compare(fixture, &effects, patience, &world, &injector.were_absent);
    print_summary(name, &figures, &Inspections::default(), &fixture.open_store().counters().unwrap());
    assert!(wrong.is_empty(), "{} inconsistencies:\n{}", wrong.len(), wrong.join("\n"));
    assert!(figures.documents > 0, "nothing happened: {figures:?}");
}
