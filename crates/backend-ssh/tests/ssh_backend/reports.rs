//! Tests the reports of a host and its vendor's tool over SSH: created once per operation, complete, or not at all.

use std::fs;

use doctor_backend::{Backend, ReportProgress};
use doctor_core::ids::{OpId, RunId};

use crate::fixture::{Hosts, node, put, wait};

#[test]
fn a_host_creates_its_report_once_and_the_vendor_file_arrives_complete() {
    let Some(mut hosts) = Hosts::new("a_host_makes_its_report_once", 1) else { return };
    let home = hosts.fleet.borrow().hosts()[0].home();
    fs::create_dir(home.join("bin")).unwrap();
    let tool = "#!/bin/sh\necho once >>/root/reports\nhead -c 3000000 /dev/urandom >nvidia-bug-report.log.gz\n";
    put(&home.join("bin/nvidia-bug-report.sh"), tool);
    put(&home.join("as-root"), "#!/bin/sh\nPATH=/root/bin:$PATH exec \"$@\"\n");
    hosts.config.as_root = vec!["/root/as-root".to_owned()];
    let backend = hosts.open();
    let op = OpId::from_number(21);
    assert_eq!(backend.collect_report(&node("host1"), op), ReportProgress::InProgress);
    let collected = || match backend.collect_report(&node("host1"), op) {
        ReportProgress::Done(report) => Some(*report),
        ReportProgress::InProgress => None,
        ReportProgress::Failed { text } => panic!("{text}"),
    };
    let report = wait("the report", collected);
    let file = report.file.as_ref().unwrap();
    let folder = hosts.at("host1", &format!("reports/runs/{}/report", RunId::from_number(21)));
    assert_eq!(file.bytes, fs::read(folder.join(&file.name)).unwrap());
    assert_eq!((file.bytes.len(), file.name.as_str()), (3_000_000, "nvidia-bug-report.log.gz"));
    assert!(report.machine["hardware"]["boot_id"].is_string(), "{}", report.machine);
    // Another controller receives the same report.
    assert_eq!(hosts.open().collect_report(&node("host1"), op), ReportProgress::Done(Box::new(report)));
    assert_eq!(hosts.lines("host1", "reports"), 1);
    let failed = |name: &str, expected: &str| match backend.collect_report(&node(name), OpId::from_number(22)) {
        ReportProgress::Failed { text } => assert!(text.contains(expected), "{text}"),
        other => panic!("{other:?}"),
    };
    failed("host7", "there is no host host7");
    hosts.fleet.borrow_mut().host("host1").unwrap().stop();
    // It may answer again; the caller waits for some minutes.
    assert_eq!(backend.collect_report(&node("host1"), OpId::from_number(22)), ReportProgress::InProgress);
}
