//! The kill test: at whatever instant the controller dies, nothing is lost and nothing is doubled.
//!
//! A simulated cluster runs as a separate process: nodes break, users come and go, calls fail or only seem to fail,
//! operators change nodes. Controllers are started on it one after the other, and each is killed with SIGKILL at a
//! random instant. The program has no hooks for this test; the number of random kills covers all phases of a cycle. In
//! the end one controller finishes all work and is stopped, and the cluster's record of effects is compared with the
//! store.
//!
//! A second mode runs two controllers on one store and stops, continues and kills them ([`pair`]).
//!
//! `DOCTOR_PAIR_MINUTES` sets how long two controllers are disturbed (0.5). `DOCTOR_KILLS` sets the least number of kills (200). `DOCTOR_KILL_SEED` repeats the random choices of an earlier
//! run, but not its timing.

mod comparison;
mod fault_injection;
mod fixture;
mod inspection;
mod pair;
mod startup_time;

use std::{
    fs,
    sync::{PoisonError, RwLock},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use doctor_backend::{Backend, clock::Clock};
use doctor_core::node::Node;
use doctor_sim::{EffectKind, RemoteSim, read_effects};
use doctor_store::{StoreUrl, records::Counters};
use doctor_testbed::postgres::{Server, Setup};

use crate::{
    comparison::{Counts, pending_work},
    fault_injection::{FaultInjector, Rng},
    fixture::{Fixture, Process, SPEED, WAIT_LIMIT},
    inspection::Inspections,
    startup_time::StartupTimes,
};

/// The number of kills unless `DOCTOR_KILLS` sets it.
const DEFAULT_KILLS: u64 = 200;

/// A kill test needs the whole machine. The tests with two controllers mostly wait, and run at the same time.
static MACHINE: RwLock<()> = RwLock::new(());

#[test]
fn nothing_is_lost_or_doubled_on_sqlite_however_often_the_controller_is_killed() {
    let _alone = MACHINE.write().unwrap_or_else(PoisonError::into_inner);
    let seed = seed();
    run_kill_test("sqlite", seed, &Fixture::new(seed, |folder| StoreUrl::Sqlite(folder.join("doctor.db"))));
}

#[test]
fn nothing_is_lost_or_doubled_on_postgresql_however_often_the_controller_is_killed() {
    let _alone = MACHINE.write().unwrap_or_else(PoisonError::into_inner);
    let server = match Server::start(Setup::default()) {
        Ok(server) => server,
        Err(why) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "CI must have PostgreSQL: {why}");
            println!("NOT RUN: postgresql: {why}");
            return;
        }
    };
    let url = server.create_database("kill").unwrap().parse().unwrap();
    let seed = seed();
    run_kill_test("postgresql", seed, &Fixture::new(seed, |_| url));
}

#[test]
fn one_of_two_controllers_leads_on_sqlite_whichever_is_stopped_or_killed() {
    let _beside_each_other = MACHINE.read().unwrap_or_else(PoisonError::into_inner);
    let seed = seed();
    let fixture = Fixture::new(seed, |folder| StoreUrl::Sqlite(folder.join("doctor.db")));
    pair::run_pair_test("sqlite", seed, pair_length(), &fixture);
}

#[test]
fn one_of_two_controllers_leads_on_postgresql_whichever_is_stopped_or_killed() {
    let _beside_each_other = MACHINE.read().unwrap_or_else(PoisonError::into_inner);
    let server = match Server::start(Setup::default()) {
        Ok(server) => server,
        Err(why) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "CI must have PostgreSQL: {why}");
            println!("NOT RUN: postgresql: {why}");
            return;
        }
    };
    // The lease is a few seconds here, so a frozen session has to end sooner than by default.
    let url = server.create_database("pair").unwrap() + "?options=-c%20idle_in_transaction_session_timeout%3D2s";
    let seed = seed();
    pair::run_pair_test("postgresql", seed, pair_length(), &Fixture::new(seed, |_| url.parse().unwrap()));
}

/// How long two controllers are disturbed.
fn pair_length() -> Duration {
    let minutes = std::env::var("DOCTOR_PAIR_MINUTES").map_or(0.5, |text| {
        text.parse().unwrap_or_else(|_| panic!("DOCTOR_PAIR_MINUTES is `{text}`: a number of minutes is accepted"))
    });
    Duration::from_secs_f64(minutes * 60.0)
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is `{text}`: a number is accepted")))
}

fn seed() -> u64 {
    setting("DOCTOR_KILL_SEED").unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        // TOML integers are signed.
        u64::from(now.subsec_nanos()) << 20 ^ now.as_secs() & 0xf_ffff
    })
}

/// Whether a controller has marked a node yet.
fn has_marked(fixture: &Fixture) -> bool {
    let effects = read_effects(&fixture.effects()).unwrap();
    effects.iter().any(|effect| matches!(effect.what, EffectKind::Marked { .. }))
}

fn run_kill_test(name: &str, seed: u64, fixture: &Fixture) {
    let kills = setting("DOCTOR_KILLS").unwrap_or(DEFAULT_KILLS);
    println!("{name}: {kills} kills, DOCTOR_KILL_SEED={seed}");
    let began = Instant::now();
    let mut chance = Rng::new(seed);
    let (process, cluster) = fixture.start_cluster();
    let mut injector = FaultInjector::new(nodes(&cluster).into_iter().map(|node| node.name).collect());
    let (mut inspections, mut pace) = (Inspections::default(), StartupTimes::default());
    let mut done = 0;
    // On a busy machine a controller does little before it is killed. Without a mark there was nothing to lose, so
    // continue.
    while done < kills || (done < DEFAULT_KILLS && !has_marked(fixture)) {
        done += 1;
        let controller = fixture.start_controller();
        if chance.once_in(3) {
            injector.inject_random(&mut chance, &cluster);
        }
        run_until_random_instant(&mut chance, &mut pace, fixture, &controller);
        controller.kill();
        // Otherwise the next controller opens the store as the killed one left it.
        if chance.once_in(2) {
            let store = fixture.open_store();
            inspections.inspect(&store, &read_effects(&fixture.effects()).unwrap());
            injector.release_unmarked(&store, cluster.now());
        }
    }
    let killed = began.elapsed().as_secs_f64();
    injector.restore_vanished(&cluster);
    finish(&mut pace, fixture, &cluster);
    let world = nodes(&cluster);
    drop(cluster);
    process.stop();
    fixture.run(&["db", "verify"]);
    let effects = read_effects(&fixture.effects()).unwrap();
    let (figures, wrong) = comparison::compare(fixture, &effects, pace.patience(), &world, &injector.were_absent);
    println!(
        "{name}: killed for {killed:.0} s ({:.0} simulated hours), with {} incidents; {:.0} s in all; {pace}",
        killed * SPEED / 3600.0,
        injector.injected,
        began.elapsed().as_secs_f64()
    );
    print_summary(name, &figures, &inspections, &fixture.open_store().counters().unwrap());
    assert!(wrong.is_empty(), "{} inconsistencies:\n{}", wrong.len(), wrong.join("\n"));
    assert!(figures.documents > 0 && figures.marked > 0, "nothing happened: {figures:?}");
}

/// Lets a controller live for a random time: most for a few cycles, some not until their first, and some until just
/// after an effect in the cluster, which they may have caused and not recorded yet.
fn run_until_random_instant(chance: &mut Rng, pace: &mut StartupTimes, fixture: &Fixture, controller: &Process) {
    let moment = Duration::from_micros(chance.below(1000));
    let wait_time = match chance.below(10) {
        0 => Duration::from_millis(chance.below(80)),
        1..=3 => {
            pace.record(controller.wait_until_started());
            wait_for_effect(fixture, pace.controller_lifetime());
            Duration::from_millis(chance.below(4))
        }
        _ => {
            pace.record(controller.wait_until_started());
            pace.controller_lifetime().mul_f64(chance.below(1000) as f64 / 1000.0)
        }
    };
    // The sleep is the random instant itself, not a wait for a condition.
    std::thread::sleep(wait_time + moment);
}

/// Waits until the cluster's record grows, but at most for `life`.
fn wait_for_effect(fixture: &Fixture, lifetime: Duration) {
    let length = || fs::metadata(fixture.effects()).unwrap().len();
    let (began, before) = (Instant::now(), length());
    while length() == before && began.elapsed() < lifetime {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Pauses validation, then runs controllers until all work is done, and stops them. A step that was started at the last
/// moment is completed by the next one.
fn finish(pace: &mut StartupTimes, fixture: &Fixture, cluster: &RemoteSim) {
    fixture.run(&["pause", "--why", "the test ends", "--yes"]);
    let began = Instant::now();
    let store = fixture.open_store();
    loop {
        let controller = fixture.start_controller();
        pace.record(controller.wait_until_started());
        loop {
            let work = pending_work(&store, &nodes(cluster));
            if work.is_empty() {
                break;
            }
            assert!(began.elapsed() < WAIT_LIMIT, "there is still work:\n{}", work.join("\n"));
            std::thread::sleep(Duration::from_millis(20));
        }
        controller.stop();
        if pending_work(&store, &nodes(cluster)).is_empty() {
            return;
        }
    }
}

/// Returns the cluster's nodes as soon as it answers.
fn nodes(cluster: &RemoteSim) -> Vec<Node> {
    let began = Instant::now();
    loop {
        match cluster.snapshot() {
            Ok(nodes) => return nodes.into_iter().map(|seen| std::sync::Arc::unwrap_or_clone(seen.node)).collect(),
            Err(error) if began.elapsed() > WAIT_LIMIT => panic!("{error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn print_summary(name: &str, figures: &Counts, inspections: &Inspections, counters: &Counters) {
    println!(
        "{name}: {} cycles written; {} runs, {} of them started; {} good documents and {} rejected; {} history rows, \
         {} of them from removed machines",
        counters.cycles,
        figures.runs,
        figures.started,
        figures.documents,
        counters.documents_rejected,
        figures.rows,
        figures.unclassified
    );
    println!(
        "{name}: {} cases, {} of them open; {} marks; {} resets, reboots and replacements; {} repeated effects",
        figures.cases, figures.open_cases, figures.marked, figures.disturbed, figures.repeated
    );
    println!(
        "{name}: {} checks after a kill, {} of them with an effect in flight: {} had happened and were not recorded, \
         {} had not",
        inspections.count, inspections.in_flight, inspections.happened, inspections.not_happened
    );
}
