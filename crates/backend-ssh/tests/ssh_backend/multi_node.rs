//! Tests a run over several hosts: started on all or none, found again, ended together.

use std::fs;

use doctor_backend::{Backend, Effect};
use doctor_core::run::{JobEnd, ObservedJobState};

use crate::fixture::{Hosts, polled, run_id, wait, wait_ended};

const BOTH: [&str; 2] = ["host1", "host2"];

#[test]
fn a_run_over_several_hosts_is_found_again_and_ended_together() {
    let Some(hosts) = Hosts::new("a_run_over_several_hosts_is_found_again_and_ended_together", 2) else { return };
    let (first, run) = (hosts.open(), run_id(20));
    let job = first.submit(&hosts.request_on(&BOTH, run, &["memory", "endless"])).unwrap();
    assert_eq!(first.submit(&hosts.request_on(&BOTH, run, &["memory", "endless"])).unwrap(), job);
    let error = first.submit(&hosts.request("host1", run, &["memory"])).unwrap_err();
    assert_eq!(error.effect, Effect::NotAppliedPermanent, "{error}");
    for host in BOTH {
        wait("the second test", || hosts.log(host, run).contains("endless: /bin/sleep").then_some(()));
        assert_eq!(hosts.log(host, run).lines().filter(|line| line.contains(" job: run ")).count(), 1);
    }
    // The next controller has no journal, and learns from either host where the other part is.
    drop(first);
    fs::remove_dir_all(&hosts.config.state).unwrap();
    let backend = hosts.open();
    assert!(matches!(polled(&backend, run).state, ObservedJobState::Running { .. }));
    assert!(backend.snapshot().unwrap().iter().all(|seen| seen.jobs == [run]));
    // While one host does not respond, the state of the run is unknown.
    hosts.fleet.borrow().hosts()[1].cut_connections().unwrap();
    hosts.fleet.borrow().hosts()[1].hang();
    assert!(matches!(polled(&backend, run).state, ObservedJobState::Unknown { .. }));
    assert_ne!(backend.cancel(run).unwrap_err().effect, Effect::NotAppliedPermanent);
    hosts.fleet.borrow().hosts()[1].unhang();
    wait("both to be told", || backend.cancel(run).ok());
    let (how, documents) = wait_ended(&backend, run);
    assert_eq!((how, documents.len()), (JobEnd::Killed, 2));
    assert_eq!(backend.logs(run).len(), 2);
}

#[test]
fn a_part_that_cannot_start_cancels_the_others_and_an_unreachable_host_prevents_all() {
    let Some(hosts) = Hosts::new("a_part_that_cannot_begin_ends_the_others", 2) else { return };
    let (backend, run) = (hosts.open(), run_id(21));
    backend.snapshot().unwrap();
    // A directory in the place of its policy file makes the start fail.
    fs::create_dir_all(hosts.at("host2", &format!("runs/{run}/policy.toml"))).unwrap();
    let error = backend.submit(&hosts.request_on(&BOTH, run, &["endless"])).unwrap_err();
    assert_eq!(error.effect, Effect::NotAppliedPermanent, "{error}");
    assert!(error.text.contains("host2") && error.text.contains("were cancelled"), "{error}");
    assert!(backend.snapshot().unwrap().iter().all(|seen| seen.jobs.is_empty()));

    hosts.fleet.borrow().hosts()[1].cut_connections().unwrap();
    hosts.fleet.borrow().hosts()[1].hang();
    let second = run_id(22);
    let error = backend.submit(&hosts.request_on(&BOTH, second, &["endless"])).unwrap_err();
    assert_eq!(error.effect, Effect::NotAppliedRetry, "{error}");
    assert!(!hosts.at("host1", &format!("runs/{second}")).exists(), "nothing was begun");
}
