//! A service for the instances of a real dstack server: idle instances are validated, users come first, and instances
//! that dstack cannot reach or reports as failing are left alone and reported.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use doctor_testbed::dstack::{Dstack, Health};
use serde_json::{Value, json};

use crate::{
    out_of_the_box,
    slurm_flows::rows,
    this_machine::Service,
    workdir::{Workdir, doctor_node},
};

/// dstack is slow between the steps of a run, and slower on a busy machine.
const WAIT_LIMIT: Duration = Duration::from_secs(300);

#[track_caller]
fn wait_until(what: &str, mut level: impl FnMut() -> bool) {
    let began = Instant::now();
    while !level() {
        assert!(began.elapsed() < WAIT_LIMIT, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Configures a service for this server, with its token in a file.
fn configure(workdir: &Workdir, dstack: &Dstack, extra: &str) {
    workdir.write("token", &dstack.admin().token);
    let settings =
        format!("[backend.dstack]\nurl = \"{}\"\ntoken_file = \"token\"\ndeadline = \"2m\"\n{extra}", dstack.url());
    workdir.write(
        "doctor.toml",
        &format!("store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"1s\"\nlease = \"5s\"\n{settings}"),
    );
}

fn passed(workdir: &Workdir) -> Vec<String> {
    let names = rows(workdir, "memory").into_iter().filter(|row| row["verdict"] == "pass");
    let mut names: Vec<String> = names.map(|row| row["node"].as_str().unwrap_or_default().to_owned()).collect();
    names.sort_unstable();
    names
}

#[test]
fn idle_instances_are_validated_and_released_to_users() {
    let what = "idle_instances_are_validated_and_given_up_to_users";
    let Ok(dstack) = Dstack::start(3).inspect_err(|why| why.skip_tests(what)) else { return };
    dstack.install(doctor_node()).unwrap();
    let workdir = Workdir::new();
    std::fs::create_dir(workdir.path("data")).unwrap();
    workdir.policy_for(&["memory"], "version = 1\n");
    configure(&workdir, &dstack, "");
    workdir
        .expect(0, &["config", "check", "--live"])
        .stdout_contains("dstack 0.22.5")
        .stdout_contains("one node: could not try: the store knows no node yet")
        .stdout_contains("No check failed; 1 unknown.");

    // One is behind a cut link and the GPUs of another fail: only the first is free.
    dstack.disconnect(2).unwrap();
    dstack.set_health(3, &Health::Failure("GPU 5 has a volatile DBE")).unwrap();
    dstack.wait_for_instance(2, "unreachable", |instance| instance["unreachable"] == true).unwrap();
    dstack.wait_for_instance(3, "failing", |instance| instance["health_status"] == "failure").unwrap();
    let service = Service::start(&workdir);
    wait_until("the free one to pass", || passed(&workdir) == ["bed-0"]);
    let run = rows(&workdir, "memory")[0]["run"].as_str().unwrap().to_owned();
    workdir.expect(0, &["log", &run]).stdout_contains("memory");
    workdir.expect(0, &["why", "bed-1"]).stdout_contains("dstack cannot reach it");
    workdir.expect(0, &["why", "bed-2"]).stdout_contains("GPU 5 has a volatile DBE");
    dstack.reconnect(2).unwrap();
    dstack.set_health(3, &Health::Healthy).unwrap();
    wait_until("the others to pass", || passed(&workdir) == ["bed-0", "bed-1", "bed-2"]);
    assert_eq!(dstack.jobs_started(&format!("doctor-{run}")), 1);
    assert_eq!(service.stop().0, Some(0));

    // With the shipped policy they are not healthy: dstack offers eight GPUs each, this machine has none.
    workdir.write("policy.toml", "version = 2\n");
    let service = Service::start(&workdir);
    out_of_the_box::wait_until_gpus_are_missed(&workdir, "bed-0");
    assert_eq!(service.stop().0, Some(0));

    // A test on every instance that runs until it is ended, and a user who waits for one of the instances.
    workdir.policy_for(
        &[],
        "version = 3\n[limits]\nresult_grace = \"1s\"\n[retry]\ninconclusive = \"1h\"\n\
         [tests.slow.params]\ntimeout = \"15m\"\ncommand = [\"/bin/sh\", \"-c\", \"exec sleep 600\"]\n",
    );
    let service = Service::start(&workdir);
    // A run of the service before may have the instance still.
    wait_until("the slow test on the first instance", || {
        let run = workdir.json(&["nodes", "bed-0"])[0]["run"].clone();
        run["state"] == "running" && run["tests"] == json!(["slow"])
    });
    let busy = |instance: &Value| instance["status"] == "busy";
    dstack.wait_for_instance(1, "busy", busy).unwrap();
    let retried = json!({ "retry": { "on_events": ["no-capacity"], "duration": "1h" } });
    dstack.submit_as_user("patient", Some(1), "exec sleep 3600", &retried).unwrap();
    dstack.wait_for_run("patient", "running").unwrap();
    wait_until("the history row of the active run", || rows(&workdir, "slow").iter().any(|row| row["node"] == "bed-0"));
    let row = rows(&workdir, "slow").into_iter().find(|row| row["node"] == "bed-0").unwrap();
    assert_eq!((&row["verdict"], &row["reason"]), (&json!("inconclusive"), &json!("node-taken")), "{row}");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    assert!(!log.contains(&dstack.admin().token), "the log must not contain the token");
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn a_failing_instance_is_examined_and_requalified_over_ssh() {
    let what = "a_failing_instance_is_examined_and_proved_over_ssh";
    let Ok(dstack) = Dstack::start(1).inspect_err(|why| why.skip_tests(what)) else { return };
    dstack.install(doctor_node()).unwrap();
    let workdir = Workdir::new();
    std::fs::create_dir(workdir.path("data")).unwrap();
    workdir.policy_for(&["memory"], "version = 1\n[repair]\nexamine = [\"memory\"]\n");
    let state = tempfile::Builder::new().prefix("d").tempdir_in("/tmp").unwrap();
    let ssh = format!(
        "[backend.dstack.ssh]\nssh_config = \"{}\"\nmax_load_per_core = 1e6\nconnect = \"1m\"\ndeadline = \"2m\"\nstate = \"{}\"\n",
        dstack.ssh_config().unwrap().display(),
        state.path().join("s").display()
    );
    configure(&workdir, &dstack, &ssh);
    dstack.set_health(1, &Health::Failure("GPU 5 has a volatile DBE")).unwrap();
    dstack.wait_for_instance(1, "failing", |instance| instance["health_status"] == "failure").unwrap();
    let service = Service::start(&workdir);
    wait_until("the first check", || workdir.doctor(&["why", "bed-0"]).out.contains("GPU 5 has a volatile DBE"));
    assert_eq!(passed(&workdir), [""; 0], "no routine runs there");
    workdir.expect(0, &["quarantine", "bed-0", "--why", "dstack says failure", "--yes"]);
    wait_until("the examination", || passed(&workdir) == ["bed-0"]);
    wait_until("the advice", || workdir.doctor(&["why", "bed-0"]).out.contains("the examination recommends return"));
    workdir.expect(0, &["release", "bed-0", "--why", "a GPU was changed", "--yes"]);
    wait_until("its return", || workdir.json(&["nodes"])[0]["state"] == "in-service");
    let all = rows(&workdir, "memory");
    let runs: BTreeSet<String> = all.iter().map(|row| row["run"].to_string()).collect();
    assert!(
        runs.len() == all.len() && runs.len() >= 2,
        "an examination and a requalification, each stored once: {all:?}"
    );
    let runs_of_dstack = dstack.post("/api/runs/list", &json!({ "only_active": false })).unwrap();
    assert_eq!(runs_of_dstack, json!([]), "dstack itself started nothing");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}
