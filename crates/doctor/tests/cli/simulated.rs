//! A simulated cluster as a separate process, with a controller.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Stdio},
};

use serde_json::json;

use crate::{
    this_machine::Service,
    workdir::{Workdir, wait_until},
};

/// The served cluster, which is killed when the test ends.
pub(crate) struct Cluster(Child);

impl Drop for Cluster {
    fn drop(&mut self) {
        // It may have exited already.
        let _already_exited = self.0.kill();
        let _already_exited = self.0.wait();
    }
}

fn serve(workdir: &Workdir) -> Cluster {
    serve_at(workdir, "3600")
}

/// Serves a cluster at this multiple of real time.
pub(crate) fn serve_at(workdir: &Workdir, speed: &str) -> Cluster {
    let args = ["sim", "serve", "--socket", "sim.sock", "--nodes", "12", "--speed", speed, "--data", "data"];
    let mut child = workdir.command(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.contains("Serving a simulated cluster"), "{first}");
    Cluster(child)
}

#[test]
fn a_controller_on_a_served_cluster_uses_its_clock() {
    let workdir = Workdir::new();
    std::fs::create_dir(workdir.path("data")).unwrap();
    workdir.write(
        "doctor.toml",
        "store = \"doctor.db\"\ndata = \"data\"\ncycle = \"5m\"\nlease = \"2d\"\n[backend.sim]\nsocket = \"sim.sock\"\n",
    );
    let _cluster = serve(&workdir);
    let mut service = Service::start(&workdir);
    service.wait_for_log("started");
    wait_until("results of several nodes", || {
        workdir.path("doctor.db").exists()
            && workdir.json(&["history", "--limit", "100"]).as_array().is_some_and(|rows| rows.len() >= 6)
    });
    assert_eq!(service.stop().0, Some(0));
    let nodes = workdir.json(&["nodes"]);
    assert_eq!(nodes.as_array().unwrap().len(), 12);
    let status = workdir.json(&["status"]);
    assert_eq!(status["silent"]["agents"], 12);
    assert!(status["at"].as_str().unwrap().starts_with("2026-11-"), "time is the cluster's own: {}", status["at"]);
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn a_simulated_cluster_without_a_server_is_unreachable() {
    let workdir = Workdir::new();
    std::fs::create_dir(workdir.path("data")).unwrap();
    workdir.write("doctor.toml", "store = \"doctor.db\"\ndata = \"data\"\n[backend.sim]\nsocket = \"sim.sock\"\n");
    workdir.expect(3, &["plan"]).stderr_contains("sim.sock");
}

#[test]
fn scenarios_run_from_a_file_and_errors_name_the_line() {
    let workdir = Workdir::new();
    workdir.write("story.txt", "# a small one\nworld nodes 2\nrun 30m every 5m\nshow nodes\n");
    workdir.expect(0, &["sim", "run", "story.txt"]).stdout_contains("# a small one").stdout_contains("node001");
    workdir.write("slip.txt", "world nodes 2\nfrobnicate\n");
    workdir.expect(2, &["sim", "run", "slip.txt"]).stderr_contains("slip.txt: line 2");
}

#[test]
fn policies_are_compared_on_the_same_faults() {
    let workdir = Workdir::new();
    let rows = workdir.json(&["sim", "compare", "--nodes", "10", "--days", "2", "--seeds", "1"]);
    let faults: Vec<&serde_json::Value> = rows.as_array().unwrap().iter().map(|row| &row["faults"]).collect();
    assert_eq!(rows.as_array().unwrap().len(), 4, "{rows}");
    assert_eq!(rows[0]["validation_node_hours"], 0.0, "{rows}");
    assert!(rows[2]["validation_node_hours"].as_f64().unwrap() > 0.0, "{rows}");
    assert!(!faults.is_empty());
}

/// A controller's directory for the served cluster, with this policy.
fn configured(policy: &str) -> Workdir {
    let workdir = Workdir::new();
    std::fs::create_dir(workdir.path("data")).unwrap();
    workdir.write("policy.toml", policy);
    workdir.write(
        "doctor.toml",
        "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"5m\"\nlease = \"2d\"\n\
         [backend.sim]\nsocket = \"sim.sock\"\n",
    );
    workdir
}

#[test]
fn a_repair_is_planned_confirmed_and_refused_in_observe_mode_and_during_a_pause() {
    let workdir = configured("mode = \"observe\"\n");
    let _cluster = serve(&workdir);
    let repair = ["repair", "node003", "--step", "reset", "--why", "hangs in NCCL"];
    let confirmed = [&repair[..], &["--yes"]].concat();
    workdir.doctor(&["run"]);
    workdir
        .expect(1, &confirmed)
        .stderr_contains("refused: mode `observe` changes nothing")
        .stderr_contains("hint: accepted: set `mode = \"recommend\"`");

    workdir.write("policy.toml", "mode = \"recommend\"\nallow = { mark = false }\n");
    workdir.doctor(&["run"]);
    workdir.expect(0, &["pause", "--why", "upgrade", "--yes"]);
    workdir
        .expect(1, &confirmed)
        .stderr_contains("refused: everything is paused by ann (upgrade)")
        .stderr_contains("accepted: `doctor resume --why …`");
    workdir.expect(0, &["hold", "node011", "--why", "not refused", "--yes"]);
    workdir.expect(0, &["resume", "--why", "done", "--yes"]);
    workdir.expect(2, &["repair", "node003", "--step", "kick", "--why", "x"]).stderr_contains("reset, reboot, replace");

    let planned = workdir.expect(6, &repair);
    planned
        .stderr_contains("Would reset 1 node (node003).")
        .stderr_contains("after its user work has ended, then requalified");
    workdir
        .expect(0, &confirmed)
        .stdout_contains("Requested reset of 1 node.")
        .stdout_contains("Why: hangs in NCCL (ann)")
        .stdout_contains("Next: `doctor why node003`");
    let asked = workdir.json(&["audit", "--limit", "1"]);
    assert_eq!((&asked[0]["what"], &asked[0]["by"]), (&json!("ask-repair"), &json!("ann")), "{asked}");

    let service = Service::start(&workdir);
    let steps = |what: &str| {
        let cases = workdir.json(&["cases", "--all", "node003"]);
        let steps = cases.as_array().into_iter().flatten().filter_map(|case| case["steps"].as_array()).flatten();
        steps.filter(|step| step["what"] == what && step["state"] == "done").count()
    };
    wait_until("the node to be requalified", || steps("requalify") >= 1);
    assert_eq!(steps("reset"), 1);
    assert_eq!(service.stop().0, Some(0));
}

#[test]
fn a_command_beyond_the_breakers_limit_needs_the_number_of_its_nodes() {
    let workdir = configured("mode = \"recommend\"\n");
    let _cluster = serve(&workdir);
    workdir.doctor(&["run"]);
    for command in [&["quarantine"][..], &["repair", "--step", "reboot"]] {
        let named = [command, &["node0*", "--why", "all of them"]].concat();
        let with = |more: &[&'static str]| [&named[..], more].concat();
        let planned = workdir.expect(6, &named);
        planned.stderr_contains("Note: this takes 12 nodes out of service; the circuit breaker would allow 1 now");
        for wrong in [&["--yes"][..], &["--yes", "--confirm-nodes", "11"], &["--confirm-nodes", "13"]] {
            workdir
                .expect(6, &with(wrong))
                .stderr_contains("nothing was changed")
                .stderr_contains("--confirm-nodes 12");
        }
        assert_eq!(workdir.json(&["status"])["commands"], 0, "{command:?}");
    }
    // One node is named, whatever the breaker would allow.
    workdir.expect(0, &["quarantine", "node001", "--why", "smells", "--yes"]);
    workdir.expect(0, &["repair", "node0*", "--step", "reboot", "--why", "all", "--yes", "--confirm-nodes", "12"]);
    assert_eq!(workdir.json(&["status"])["commands"], 13);
}
