//! The lease: its clock, wrong clocks, takeover from a leader that is frozen, and what an operator does by hand.

use std::{
    process::{Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use doctor_core::{
    node::Hold,
    time::{Span, Timestamp},
};
use doctor_store::{LeaseClock, LeaseError, Store, StoreError, WriteObstacle};
use rustix::process::{Pid, Signal, getpid, kill_process};

use crate::{
    bed::{StoreTestbed, node, postgres},
    suite,
};

suite!(
    a_holder_whose_clock_is_a_year_ahead_keeps_the_lease_for_one_ttl,
    a_holder_with_a_longer_ttl_keeps_it,
    a_lease_that_has_expired_is_renewed_only_at_the_start_of_a_cycle,
    a_lease_is_shown_in_the_readers_time,
    an_operator_takes_the_lease_and_the_former_holder_can_do_nothing,
    a_store_that_can_be_written_says_so,
);

/// Tells dead from slow.
const WAIT_LIMIT: Duration = Duration::from_secs(120);
const MINUTE: Span = Span::minutes(1);

fn until(held: &LeaseError) -> Timestamp {
    match held {
        LeaseError::Held { until, .. } => *until,
        LeaseError::Store(error) => panic!("{error}"),
    }
}

fn a_holder_whose_clock_is_a_year_ahead_keeps_the_lease_for_one_ttl(bed: &mut StoreTestbed) {
    let (store, now) = (&bed.store, bed.now);
    store.release(&bed.lease).unwrap();
    // A version that counted by its own clock, or a database whose machine had a wrong one.
    let wrong = store.acquire("host-b:17:99", now.plus(Span::days(365)), MINUTE).unwrap();
    let held = store.acquire("host-a:1:1", now, MINUTE).unwrap_err();
    assert_eq!(until(&held), now.plus(MINUTE), "{held}");
    let held = store.acquire("host-a:1:1", now.plus(Span::from_secs(59)), MINUTE).unwrap_err();
    assert_eq!(until(&held), now.plus(MINUTE), "the end is cut once: {held}");
    let next = store.acquire("host-a:1:1", now.plus(MINUTE), MINUTE).unwrap();
    assert!(store.holds_lease(&wrong, now.plus(MINUTE)).unwrap_err().is_lease_lost());
    assert!(next.fence > wrong.fence);
}

fn a_holder_with_a_longer_ttl_keeps_it(bed: &mut StoreTestbed) {
    let (store, now) = (&bed.store, bed.now);
    store.release(&bed.lease).unwrap();
    let patient = store.acquire("host-b:17:99", now, Span::minutes(10)).unwrap();
    let held = store.acquire("host-a:1:1", now.plus(Span::minutes(9)), MINUTE).unwrap_err();
    assert_eq!(until(&held), now.plus(Span::minutes(10)));
    assert_eq!(store.holds_lease(&patient, now.plus(Span::minutes(9))).unwrap(), MINUTE);
}

fn a_lease_that_has_expired_is_renewed_only_at_the_start_of_a_cycle(bed: &mut StoreTestbed) {
    let (store, now) = (&bed.store, bed.now);
    store.release(&bed.lease).unwrap();
    let lease = store.acquire("host-b:17:99", now, MINUTE).unwrap();
    store.keep(&lease, now.plus(Span::from_secs(50))).unwrap();
    let late = now.plus(Span::minutes(3));
    let error = store.keep(&lease, late).unwrap_err();
    assert!(matches!(error, StoreError::LeaseExpired { .. }), "a plan of a suspended process is old: {error}");
    store.renew(&lease, late).unwrap();
    store.keep(&lease, late.plus(Span::from_secs(59))).unwrap();
    store.release(&lease).unwrap();
    assert!(matches!(store.renew(&lease, late).unwrap_err(), StoreError::LeaseLost { .. }), "a released lease is gone");
}

fn a_lease_is_shown_in_the_readers_time(bed: &mut StoreTestbed) {
    let store = &bed.store;
    store.release(&bed.lease).unwrap();
    assert_eq!(store.leader_at(bed.now).unwrap(), None);
    let lease = store.acquire("host-b:17:99", LeaseClock::Database, MINUTE).unwrap();
    let status = store.lease_status(bed.now).unwrap().unwrap();
    assert!(status.alive && status.ttl == Some(MINUTE) && status.fence == lease.fence, "{status:?}");
    assert_eq!(status.since.unwrap().plus(MINUTE), status.until);
    // A reader whose clock is a year behind sees a leader that leads for less than a minute.
    let behind = status.now.minus(Span::days(365));
    let (_, until) = store.leader_at(behind).unwrap().unwrap();
    assert!(until > behind && until <= behind.plus(MINUTE), "{until}");
}

fn an_operator_takes_the_lease_and_the_former_holder_can_do_nothing(bed: &mut StoreTestbed) {
    let fence = bed.lease.fence;
    bed.store.take_lease(fence, "ann", "its machine is gone").unwrap();
    assert_eq!(bed.store.leader().unwrap(), None);
    assert!(bed.store.keep(&bed.lease, bed.now).unwrap_err().is_lease_lost());
    assert!(bed.store.renew(&bed.lease, bed.now).unwrap_err().is_lease_lost());
    assert!(bed.store.holds_lease(&bed.lease, bed.now).unwrap_err().is_lease_lost());
    assert!(bed.try_commit(&[], &[]).unwrap_err().is_lease_lost());
    let line = bed.store.audit(1, None).unwrap().remove(0);
    assert_eq!((line.by.as_str(), line.what.as_str()), ("ann", "take-lease"));
    assert!(line.text.contains("tests") && line.text.contains("its machine is gone"), "{}", line.text);
    // What the operator saw has changed since.
    let error = bed.store.take_lease(fence, "ann", "again").unwrap_err();
    assert!(matches!(error, StoreError::StateChanged { .. }), "{error}");
    bed.store.acquire("host-a:1:1", bed.now, MINUTE).unwrap();
}

fn a_store_that_can_be_written_says_so(bed: &mut StoreTestbed) {
    bed.store.probe_write().unwrap();
    bed.store.probe_write().unwrap();
    bed.assert_sound();
}

#[test]
fn a_renewal_does_not_wait_for_a_write_of_the_same_controller_on_postgresql() {
    let Some(bed) = StoreTestbed::postgres() else { return };
    let (sender, renewed) = mpsc::channel();
    bed.store
        .operator_transaction(|_| {
            let (store, lease, sender) = (bed.store.clone(), bed.lease.clone(), sender.clone());
            let now = bed.now;
            std::thread::spawn(move || sender.send(store.keep(&lease, now)));
            renewed.recv_timeout(WAIT_LIMIT).expect("a renewal while a write is open").unwrap();
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_database_that_its_server_made_read_only_is_reported_until_it_is_writable_again() {
    let Some(url) = postgres::new_database() else { return };
    let store = Store::open(&url).unwrap();
    let doctor_store::StoreUrl::Postgres(text) = &url else { panic!("{url}") };
    let mut admin = postgres_client(text);
    let set = |admin: &mut ::postgres::Client, value: &str| {
        let sql = format!(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = {value}', \
             current_database()); END $$; SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
             WHERE datname = current_database() AND pid <> pg_backend_pid()"
        );
        admin.batch_execute(&format!("SET default_transaction_read_only = off; {sql}")).unwrap();
    };
    let wait = |what: &str, level: &dyn Fn(Result<(), StoreError>) -> bool| {
        let began = Instant::now();
        // The first attempt may use a session that the server has just ended.
        while !level(store.probe_write()) {
            assert!(began.elapsed() < WAIT_LIMIT, "{what}: {:?}", store.probe_write());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    set(&mut admin, "on");
    wait("read-only", &|probe| probe.is_err_and(|error| error.write_obstacle() == WriteObstacle::ReadOnly));
    set(&mut admin, "off");
    wait("writable", &|probe| probe.is_ok());
}

/// The server's clock is a day behind that of the controllers, or a day ahead: another function of its name is found first.
#[test]
fn a_standby_with_a_wrong_clock_neither_takes_the_lease_early_nor_waits_for_long_on_postgresql() {
    for days in [-1, 1] {
        let Some(url) = postgres::new_database() else { return };
        let doctor_store::StoreUrl::Postgres(text) = &url else { panic!("{url}") };
        let shifted = format!(
            "CREATE SCHEMA shifted; CREATE FUNCTION shifted.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE \
             AS 'SELECT pg_catalog.clock_timestamp() + interval ''{days} day'''"
        );
        postgres_client(text).batch_execute(&shifted).unwrap();
        let url = format!("{text}?options=-c%20search_path%3Dshifted%2Cpublic%2Cpg_catalog");
        let store = Store::open(&url.parse().unwrap()).unwrap();
        let lease = store.acquire("host-b:17:99", LeaseClock::Database, MINUTE).unwrap();
        let ours = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
        let status = store.lease_status(Timestamp::MIN).unwrap().unwrap();
        let ahead = status.now.millis() - i64::try_from(ours).unwrap();
        assert!(
            (ahead - Span::days(days).millis()).abs() < Span::hours(1).millis(),
            "{ahead} ms ahead of this machine"
        );
        let left = status.until.since(status.now);
        assert!(left <= MINUTE && left > Span::ZERO, "{left}");
        // By the clock of this machine, the lease has ended, or lasts for a day.
        let held = store.acquire("host-a:1:1", LeaseClock::Database, MINUTE).unwrap_err();
        assert_eq!(until(&held), status.until, "{held}");
        store.release(&lease).unwrap();
        store.acquire("host-b:17:99", LeaseClock::Database, Span::from_secs(1)).unwrap();
        let began = Instant::now();
        while let Err(held) = store.acquire("host-a:1:1", LeaseClock::Database, Span::from_secs(1)) {
            assert!(began.elapsed() < WAIT_LIMIT && matches!(held, LeaseError::Held { .. }), "{held}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn a_renewal_that_waited_until_the_lease_had_ended_does_not_bring_it_back_on_postgresql() {
    let Some(url) = postgres::new_database() else { return };
    let doctor_store::StoreUrl::Postgres(text) = &url else { panic!("{url}") };
    let store = Store::open(&format!("{text}?options=-c%20lock_timeout%3D300s").parse().unwrap()).unwrap();
    let (mut other, mut admin) = (postgres_client(text), postgres_client(text));
    let lease = store.acquire("host-b:17:99", LeaseClock::Database, Span::from_secs(4)).unwrap();
    // It leaves the row as it was, so the server does not evaluate the waiting statement again.
    let mut holding = other.transaction().unwrap();
    holding.batch_execute("SELECT id FROM lease FOR UPDATE").unwrap();
    let renewal = std::thread::spawn({
        let store = store.clone();
        move || store.keep(&lease, LeaseClock::Database)
    });
    let began = Instant::now();
    let wait = |what: &str, level: &mut dyn FnMut() -> bool| {
        while !level() {
            assert!(began.elapsed() < WAIT_LIMIT, "{what} did not happen");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let waiting =
        "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    wait("the wait for the row", &mut || admin.query_one(waiting, &[]).unwrap().get::<_, i64>(0) > 0);
    wait("the end of the lease", &mut || !store.lease_status(Timestamp::MIN).unwrap().unwrap().alive);
    holding.rollback().unwrap();
    let error = renewal.join().unwrap().unwrap_err();
    assert!(matches!(error, StoreError::LeaseExpired { .. }), "{error}");
}

#[test]
fn a_write_that_the_server_cancels_is_its_error_and_no_deadline_of_a_caller_on_postgresql() {
    let Some(url) = postgres::new_database() else { return };
    let doctor_store::StoreUrl::Postgres(text) = &url else { panic!("{url}") };
    let store = Store::open(&format!("{text}?options=-c%20statement_timeout%3D2s").parse().unwrap()).unwrap();
    let mut other = postgres_client(text);
    let mut holding = other.transaction().unwrap();
    holding.batch_execute("SELECT id FROM lease FOR UPDATE").unwrap();
    let hold = Hold { by: "ann".into(), why: "z".into(), since: Timestamp::from_secs(2), until: None };
    let error = store.hold(&node("n1"), &hold).unwrap_err();
    let StoreError::Postgres { source, .. } = &error else { panic!("{error:?}") };
    assert_eq!(source.code(), Some(&::postgres::error::SqlState::QUERY_CANCELED), "{source}");
    assert!(error.is_of_some_data(), "the ingest goes on with other messages");
    // A reader with a deadline is another matter.
    holding.batch_execute("LOCK TABLE token").unwrap();
    let late = store.with_deadline(Instant::now() + Duration::from_secs(1)).tokens().unwrap_err();
    assert!(matches!(late, StoreError::DeadlineExceeded { .. }), "{late:?}");
}

fn postgres_client(url: &str) -> ::postgres::Client {
    ::postgres::Client::connect(url, ::postgres::NoTls).unwrap()
}

/// Names the database for the process that this test starts: itself, as the leader that freezes.
const FROZEN_URL: &str = "DOCTOR_TEST_FROZEN_LEADER";

/// The leader. It stops itself inside a transaction, as a suspended machine stops it, and checks what it finds when it
/// continues.
fn lead_and_freeze(url: &str) {
    let store = Store::open(&url.parse().unwrap()).unwrap();
    let lease = store.acquire("host-b:17:99", LeaseClock::Database, Span::from_secs(3)).unwrap();
    let hold = Hold { by: "x".into(), why: "y".into(), since: Timestamp::from_secs(1), until: None };
    let ended = store.operator_transaction(|commands| {
        commands.hold(&node("frozen"), &hold)?;
        let began = Instant::now();
        kill_process(getpid(), Signal::STOP).unwrap();
        // On a busy machine this thread goes on until another one has received the signal.
        while began.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    });
    assert!(ended.is_err(), "the server ended the session");
    assert!(store.holds_lease(&lease, LeaseClock::Database).unwrap_err().is_lease_lost());
    assert!(store.keep(&lease, LeaseClock::Database).unwrap_err().is_lease_lost());
}

#[test]
fn a_leader_frozen_inside_a_transaction_blocks_neither_takeover_nor_operators_on_postgresql() {
    if let Ok(url) = std::env::var(FROZEN_URL) {
        return lead_and_freeze(&url);
    }
    let Some(url) = postgres::new_database() else { return };
    let doctor_store::StoreUrl::Postgres(text) = &url else { panic!("{url}") };
    let store = Store::open(&url).unwrap();
    let mut frozen = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "lease::a_leader_frozen_inside_a_transaction_blocks_neither_takeover_nor_operators_on_postgresql",
        ])
        .env(FROZEN_URL, text)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let pid = Pid::from_child(&frozen);
    let state = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
        stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
    };
    let began = Instant::now();
    while state() != Some('T') {
        assert!(began.elapsed() < WAIT_LIMIT, "the leader does not stop: {:?}", frozen.try_wait());
        std::thread::sleep(Duration::from_millis(20));
    }
    let stopped = Instant::now();
    let (sender, outcomes) = mpsc::channel();
    std::thread::spawn({
        let (store, sender) = (store.clone(), sender.clone());
        move || {
            let hold = Hold { by: "ann".into(), why: "z".into(), since: Timestamp::from_secs(2), until: None };
            sender.send(("an operator's command", store.hold(&node("other"), &hold).map(drop)))
        }
    });
    std::thread::spawn({
        move || {
            let taken = loop {
                match store.acquire("host-a:1:1", LeaseClock::Database, Span::minutes(10)) {
                    Err(LeaseError::Held { .. }) => std::thread::sleep(Duration::from_millis(100)),
                    Err(LeaseError::Store(error)) => break Err(error),
                    Ok(_) => break Ok(()),
                }
            };
            sender.send(("takeover", taken))
        }
    });
    for _ in 0..2 {
        let (what, outcome) = outcomes.recv_timeout(WAIT_LIMIT).expect("neither waits for the frozen leader for ever");
        outcome.unwrap();
        println!("{what} after {:.1} s", stopped.elapsed().as_secs_f64());
    }
    assert_eq!(state(), Some('T'));
    kill_process(pid, Signal::CONT).unwrap();
    assert!(frozen.wait().unwrap().success(), "the former leader's own checks");
}
