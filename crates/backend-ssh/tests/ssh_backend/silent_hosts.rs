//! Tests that hosts which hang, or were removed, delay and block nothing but their own runs.

use std::{fs, sync::Arc, time::Instant};

use doctor_backend::{
    Backend,
    bounded::{BoundedBackend, CallLimits},
    contract_tests::run_of,
};
use doctor_core::{
    node::Occupancy,
    run::{JobEnd, ObservedJobState},
    time::Span,
};
use doctor_testbed::ssh::HungHosts;

use crate::fixture::{Hosts, node, occupancy, polled, put, run_id, wait, wait_ended, why};

/// Names that come before those of the real hosts: with one list, the real hosts are the last.
fn hung(count: usize) -> HungHosts {
    HungHosts::start((1..=count).map(|number| format!("a-hung{number:02}"))).unwrap()
}

/// Adds lines to the host file.
fn add_hosts(hosts: &Hosts, lines: &str) {
    let path = hosts.config.hostfile.as_ref().unwrap();
    let text = fs::read_to_string(path).unwrap();
    fs::write(path, format!("{lines}{text}")).unwrap();
}

/// Counts the processes that work on hosts which hang.
fn processes_for_hung_hosts(hosts: &Hosts) -> usize {
    let config = hosts.fleet.borrow().ssh_config().display().to_string();
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.map(|entry| fs::read(entry.path().join("cmdline")).unwrap_or_default());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(&config) && line.contains("a-hung")).count()
}

#[test]
fn seventy_hosts_that_hang_neither_delay_a_good_one_for_long_nor_leave_processes_behind() {
    let Some(mut hosts) = Hosts::new("seventy_hosts_that_hang", 1) else { return };
    let silent = hung(70);
    add_hosts(&hosts, &silent.hostfile());
    // As shipped.
    let shipped = doctor_backend_ssh::SshConfig::default();
    (hosts.config.connect, hosts.config.deadline) = (shipped.connect, shipped.deadline);
    let limits = CallLimits::of_cycle(Span::from_secs(30));
    let backend = BoundedBackend::new(Arc::new(hosts.open()), limits);
    let mut snapshots = 0;
    loop {
        let began = Instant::now();
        let nodes = backend.snapshot().unwrap();
        snapshots += 1;
        println!("snapshot {snapshots} with 70 hosts that hang: {:?}", began.elapsed());
        assert_eq!(nodes.len(), 71, "none is absent");
        let bad = nodes.iter().filter(|seen| seen.node.name != node("host1"));
        bad.for_each(|seen| assert!(matches!(seen.node.occupancy, Occupancy::Unknown { .. }), "{:?}", seen.node));
        let unasked = nodes.iter().filter(|seen| !why(&seen.node.occupancy).contains("silent since")).count();
        let good = nodes.iter().find(|seen| seen.node.name == node("host1")).unwrap();
        // From now on, none of those that hang is waited for.
        if good.node.occupancy.is_free() && unasked == 1 {
            break;
        }
        assert!(snapshots < 6, "{unasked} hosts were not asked yet; the good one: {}", why(&good.node.occupancy));
    }
    // None of them is asked within a later call.
    for _ in 0..5 {
        let began = Instant::now();
        let nodes = backend.snapshot().unwrap();
        println!("a later snapshot: {:?}", began.elapsed());
        let bad = nodes.iter().filter(|seen| seen.node.name != node("host1"));
        bad.for_each(|seen| assert!(why(&seen.node.occupancy).contains("silent since"), "{:?}", seen.node));
    }
    // The run on the good host starts at once, and an effect on a silent one fails at once.
    let run = run_id(60);
    backend.submit(&hosts.request("host1", run, &["endless"])).unwrap();
    let began = Instant::now();
    let error = backend.submit(&hosts.request("a-hung07", run_id(61), &["endless"])).unwrap_err();
    println!("a submission to a host that hangs: {:?}", began.elapsed());
    assert!(error.text.contains("silent since"), "{error}");
    backend.cancel(run).unwrap();
    let count = processes_for_hung_hosts(&hosts);
    assert!(count <= 2 * shipped.parallel, "{count} processes");
    drop(backend);
    wait("the processes to end", || (processes_for_hung_hosts(&hosts) == 0).then_some(()));
}

#[test]
fn a_run_whose_submission_was_interrupted_waits_for_its_own_host_only() {
    let Some(hosts) = Hosts::new("an_interrupted_submission", 2) else { return };
    let silent = hung(1);
    add_hosts(&hosts, &silent.hostfile());
    let started = run_id(62);
    {
        let backend = hosts.open();
        backend.snapshot().unwrap();
        backend.submit(&hosts.request("host1", started, &["endless"])).unwrap();
    }
    // The controller was killed, and with it what this backend remembers of its runs.
    fs::remove_dir_all(&hosts.config.state).unwrap();
    let backend = hosts.open();
    let never_sent = run_id(63);
    let record = |run, host| run_of(hosts.request(host, run, &["endless"]), run.born());
    let recorded = [record(started, "host1"), record(never_sent, "host2")];
    backend.set_recorded_runs(&recorded.iter().collect::<Vec<_>>());
    assert!(matches!(polled(&backend, started).state, ObservedJobState::Running { .. }));
    assert_eq!(polled(&backend, never_sent).state, ObservedJobState::Absent);
    // Of a run that no store knows, nothing can be said while a host is silent.
    assert!(matches!(polled(&backend, run_id(64)).state, ObservedJobState::Unknown { .. }));
    backend.cancel(never_sent).unwrap();
    backend.cancel(started).unwrap();
    assert_eq!(wait_ended(&backend, started).0, JobEnd::Killed);
    // One on a host that is silent itself waits for that host.
    let on_silent = record(run_id(65), "a-hung01");
    backend.set_recorded_runs(&[&on_silent]);
    assert!(matches!(polled(&backend, on_silent.id).state, ObservedJobState::Unknown { .. }));
}

#[test]
fn a_host_removed_during_its_run_loses_the_run_and_the_other_parts_can_be_ended() {
    let Some(hosts) = Hosts::new("a_host_removed_during_its_run", 3) else { return };
    let backend = hosts.open();
    backend.snapshot().unwrap();
    let (alone, together) = (run_id(66), run_id(67));
    backend.submit(&hosts.request("host1", alone, &["endless"])).unwrap();
    backend.submit(&hosts.request_on(&["host2", "host3"], together, &["endless"])).unwrap();
    let is_running = |run| matches!(polled(&backend, run).state, ObservedJobState::Running { .. }).then_some(());
    wait("the first run", || is_running(alone));
    wait("the second run", || is_running(together));
    let path = hosts.config.hostfile.as_ref().unwrap();
    fs::write(path, "host3\n").unwrap();
    assert_eq!(backend.snapshot().unwrap().len(), 1);
    assert_eq!(polled(&backend, alone).state, ObservedJobState::Absent);
    backend.cancel(alone).unwrap();
    assert!(matches!(polled(&backend, together).state, ObservedJobState::Running { .. }), "one part still runs");
    backend.cancel(together).unwrap();
    assert_eq!(wait_ended(&backend, together).0, JobEnd::Lost);
    // A host that comes back brings its run back.
    fs::write(path, "host1\nhost2\nhost3\n").unwrap();
    backend.snapshot().unwrap();
    wait("the run to be found again", || is_running(alone));
    for run in [alone, together] {
        backend.cancel(run).unwrap();
        wait_ended(&backend, run);
    }
}

#[test]
fn a_host_whose_programs_hang_is_unknown_and_answers_again_when_they_do() {
    let Some(mut hosts) = Hosts::new("a_host_whose_programs_hang", 2) else { return };
    (hosts.config.connect, hosts.config.deadline) = (Span::from_secs(15), Span::from_secs(30));
    let backend = hosts.open();
    wait("both hosts", || {
        let nodes = backend.snapshot().unwrap();
        nodes.iter().all(|seen| seen.node.occupancy.is_free()).then_some(())
    });
    // As on a host whose disk hangs: the login works, and the program never ends.
    let program = hosts.ssh("host1", "ls .cluster-doctor/bin/doctor-node-*");
    let program = hosts.fleet.borrow_mut().host("host1").unwrap().home().join(program.trim());
    let aside = program.with_extension("aside");
    fs::rename(&program, &aside).unwrap();
    put(&program, "#!/bin/sh\nexec sleep 86400\n");
    let seen = occupancy(&backend, "host1");
    assert!(matches!(seen, Occupancy::Unknown { .. }) && why(&seen).contains("did not answer within 45 s"), "{seen:?}");
    let again = occupancy(&backend, "host1");
    assert!(why(&again).contains("silent since"), "{again:?}");
    wait("the other host", || occupancy(&backend, "host2").is_free().then_some(()));
    fs::rename(&aside, &program).unwrap();
    wait("the host to answer", || occupancy(&backend, "host1").is_free().then_some(()));
}
