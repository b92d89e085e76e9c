//! Tests of the dstack test bed: a real server, hosts as its instances, jobs on them, and nothing left behind.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use doctor_testbed::dstack::{Dstack, Health};
use serde_json::json;

#[test]
fn hosts_become_instances_that_run_work_fall_ill_and_go_with_the_bed() {
    let what = "hosts_become_instances_that_run_work_fall_ill_and_go_with_the_bed";
    let Ok(dstack) = Dstack::start(1).inspect_err(|why| why.skip_tests(what)) else { return };
    dstack.submit_as_user("greet", Some(1), "hostname; echo $((6 * 7))", &json!({})).unwrap();
    dstack.wait_for_run("greet", "done").unwrap();
    assert_eq!(dstack.jobs_started("greet"), 1);
    dstack.set_health(1, &Health::Failure("GPU 5 has a volatile DBE")).unwrap();
    dstack.wait_for_instance(1, "failing", |instance| instance["health_status"] == "failure").unwrap();
    dstack.disconnect(1).unwrap();
    dstack.wait_for_instance(1, "unreachable", |instance| instance["unreachable"] == true).unwrap();
    let folder = dstack.folder().to_owned();
    drop(dstack);
    let began = Instant::now();
    while folder.exists() || is_used(&folder) {
        assert!(began.elapsed() < Duration::from_secs(240), "files or processes of {} are left", folder.display());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Returns whether a process's command line contains this folder.
fn is_used(folder: &Path) -> bool {
    let folder = folder.display().to_string();
    let all = fs::read_dir("/proc").unwrap().flatten();
    all.into_iter().any(|entry| {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&folder)
    })
}
