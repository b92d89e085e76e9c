//! Tests resets and reboots: only without user work, once, and done only when they are observed.

use std::fs;

use doctor_backend::{Backend, Change, Effect, NodeOp};
use doctor_core::{ids::OpId, node::Hardware};

use crate::fixture::{Hosts, node, put, run_id, wait};

fn boot_of(backend: &dyn Backend) -> Option<String> {
    let seen = backend.snapshot().unwrap().remove(0);
    seen.node.hardware.as_deref().and_then(|Hardware { boot_id, .. }| boot_id.clone())
}

#[test]
fn a_reboot_waits_for_users_and_runs_and_is_done_in_another_boot() {
    let Some(hosts) = Hosts::new("a_reboot_waits_for_users_and_runs_and_is_done_in_another_boot", 1) else { return };
    let backend = hosts.open();
    let before = boot_of(&backend).unwrap();
    let reboot = NodeOp { op: OpId::from_number(11), what: Change::Reboot };
    let refused = |why: &str| {
        let error = backend.apply(&node("host1"), &reboot).unwrap_err();
        assert_eq!(error.effect, Effect::NotAppliedRetry, "{error}");
        assert!(error.text.contains(why), "{error}");
    };
    // The host itself sees a user who came after the controller's last snapshot.
    hosts.ssh("host1", "touch /run/site-lock");
    refused("/run/site-lock exists");
    hosts.ssh("host1", "rm /run/site-lock");
    let run = run_id(8);
    backend.submit(&hosts.request("host1", run, &["endless"])).unwrap();
    refused("run");
    backend.cancel(run).unwrap();
    assert_eq!(hosts.lines("host1", "told"), 0);

    wait("the host to be told", || {
        let error = backend.apply(&node("host1"), &reboot).unwrap_err();
        assert_eq!(error.effect, Effect::Unknown, "{error}");
        (hosts.lines("host1", "told") == 1).then_some(())
    });
    // A requested reboot is not done, however often it is polled, and a host that is down reports nothing.
    let error = backend.apply(&node("host1"), &reboot).unwrap_err();
    assert_eq!((error.effect, hosts.lines("host1", "told")), (Effect::Unknown, 1), "{error}");
    hosts.fleet.borrow_mut().host("host1").unwrap().stop();
    let error = backend.apply(&node("host1"), &reboot).unwrap_err();
    assert_eq!(error.effect, Effect::NotAppliedRetry, "{error}");
    hosts.reboot_if_requested("host1");
    wait("the reboot", || backend.apply(&node("host1"), &reboot).ok());
    assert_eq!(hosts.lines("host1", "told"), 1);
    assert_ne!(boot_of(&backend).unwrap(), before);
}

#[test]
fn a_failed_repair_command_is_reported_and_not_retried_under_the_same_id() {
    let Some(hosts) = Hosts::new("a_repair_whose_command_fails_says_so", 1) else { return };
    let home = hosts.fleet.borrow().hosts()[0].home();
    put(&home.join("reboot"), "#!/bin/sh\necho once >>/root/told\necho inhibited >&2\nexit 4\n");
    let backend = hosts.open();
    let reboot = NodeOp { op: OpId::from_number(12), what: Change::Reboot };
    let failed = wait("the failure", || {
        let error = backend.apply(&node("host1"), &reboot).unwrap_err();
        (error.effect == Effect::NotAppliedPermanent).then_some(error)
    });
    assert!(failed.text.contains("ended with exit status: 4"), "{failed}");
    assert_eq!(hosts.lines("host1", "told"), 1);
    // A new operation is a new attempt.
    fs::remove_file(home.join("told")).unwrap();
    let again = NodeOp { op: OpId::from_number(13), what: Change::Reboot };
    wait("the second try", || {
        let _under_way = backend.apply(&node("host1"), &again);
        (hosts.lines("host1", "told") == 1).then_some(())
    });
}
