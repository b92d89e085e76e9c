//! A simulated cluster as a separate process, with a controller.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Stdio},
};

use crate::{
    this_machine::Service,
    workdir::{Workdir, wait_until},
};

/// The served cluster, which is killed when the test ends.
struct Cluster(Child);

impl Drop for Cluster {
    fn drop(&mut self) {
        // It may have exited already.
        let _gone = self.0.kill();
        let _gone = self.0.wait();
    }
}

fn serve(bed: &Workdir) -> Cluster {
    let args = ["sim", "serve", "--socket", "sim.sock", "--nodes", "12", "--speed", "3600", "--data", "data"];
    let mut child = bed.command(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.contains("Serving a simulated cluster"), "{first}");
    Cluster(child)
}

#[test]
fn a_controller_on_a_served_cluster_tests_its_nodes_in_its_time() {
    let bed = Workdir::new();
    std::fs::create_dir(bed.path("data")).unwrap();
    bed.write(
        "doctor.toml",
        "store = \"doctor.db\"\ndata = \"data\"\ncycle = \"5m\"\nlease = \"2d\"\n[backend.sim]\nsocket = \"sim.sock\"\n",
    );
    let _cluster = serve(&bed);
    let mut service = Service::start(&bed);
    service.wait_for_log("started");
    wait_until("results of several nodes", || {
        bed.path("doctor.db").exists()
            && bed.json(&["history", "--limit", "100"]).as_array().is_some_and(|rows| rows.len() >= 6)
    });
    assert_eq!(service.stop().0, Some(0));
    let nodes = bed.json(&["nodes"]);
    assert_eq!(nodes.as_array().unwrap().len(), 12);
    let status = bed.json(&["status"]);
    assert_eq!(status["silent"]["agents"], 12);
    assert!(status["at"].as_str().unwrap().starts_with("2026-11-"), "time is the cluster's own: {}", status["at"]);
    bed.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn a_cluster_that_nobody_serves_is_said_to_be_out_of_reach() {
    let bed = Workdir::new();
    std::fs::create_dir(bed.path("data")).unwrap();
    bed.write("doctor.toml", "store = \"doctor.db\"\ndata = \"data\"\n[backend.sim]\nsocket = \"sim.sock\"\n");
    bed.expect(3, &["plan"]).stderr_contains("sim.sock");
}

#[test]
fn scenarios_are_played_from_a_file_and_a_slip_names_its_line() {
    let bed = Workdir::new();
    bed.write("story.txt", "# a small one\nworld nodes 2\nrun 30m every 5m\nshow nodes\n");
    bed.expect(0, &["sim", "run", "story.txt"]).stdout_contains("# a small one").stdout_contains("node001");
    bed.write("slip.txt", "world nodes 2\nfrobnicate\n");
    bed.expect(2, &["sim", "run", "slip.txt"]).stderr_contains("slip.txt: line 2");
}

#[test]
fn policies_are_compared_on_the_same_faults() {
    let bed = Workdir::new();
    let rows = bed.json(&["sim", "compare", "--nodes", "10", "--days", "2", "--seeds", "1"]);
    let faults: Vec<&serde_json::Value> = rows.as_array().unwrap().iter().map(|row| &row["faults"]).collect();
    assert_eq!(rows.as_array().unwrap().len(), 4, "{rows}");
    assert_eq!(rows[0]["validation_node_hours"], 0.0, "{rows}");
    assert!(rows[2]["validation_node_hours"].as_f64().unwrap() > 0.0, "{rows}");
    assert!(!faults.is_empty());
}
