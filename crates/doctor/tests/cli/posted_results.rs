//! Messages of nodes through the real listener: they are durable when they are answered, however busy the control loop
//! is and whatever ends it.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::TcpStream,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use doctor_checks::document::{AgentReport, Document, RunKey, Schema, TestEvidence, Versions};
use doctor_core::{
    ids::{NodeName, RunId, TestId},
    node::Hardware,
    time::Timestamp,
};
use doctor_store::{
    Store, StoreUrl,
    records::{HistoryFilter, StoredRun},
};
use rustix::process::{Pid, Signal, kill_process};

use crate::{
    this_machine::Service,
    workdir::{Workdir, wait_until},
};

const NODES: usize = 3;
/// The answer must not wait for the loop, which is stopped: this tells dead from slow.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// A report that waits in the queue for so long waits for a loop that waits for its cluster: ten times as long, and then
/// it gives up.
const STAYS: Duration = Duration::from_secs(2);

/// A simulated cluster of three nodes on which jobs leave no result, and its controller.
struct Bed {
    workdir: Workdir,
    address: String,
    cluster: Service,
}

impl Bed {
    fn new() -> Self {
        let workdir = Workdir::new();
        std::fs::create_dir(workdir.path("data")).unwrap();
        // Of the simulated tests, jobs run one that needs one node.
        workdir.write(
            "policy.toml",
            "version = 1\n[limits]\njobs = 10\nper_share = 10\n[tests.nccl]\nenabled = false\n\
             [tests.storage]\nenabled = false\n[tests.gpu-health]\nenabled = false\n",
        );
        let port = doctor_testbed::ports::reserve_one().unwrap();
        let address = format!("127.0.0.1:{port}");
        workdir.write(
            "doctor.toml",
            &format!(
                "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"1s\"\nlease = \"1h\"\n\
                 [agents]\nlisten = \"{address}\"\n[backend.sim]\nsocket = \"sim.sock\"\n"
            ),
        );
        workdir.write(
            "world.toml",
            &format!(
                "agents = false\nrepairs = false\ntickets = false\ncarry_documents = false\n\
                 [[pools]]\nname = \"gpu\"\nnodes = {NODES}\nprefix = \"node\"\nsku = \"hgx-h100\"\n\
                 [assumptions]\nhard_per_node_day = 0.0\ngray_per_node_day = 0.0\nsdc_per_node_day = 0.0\n\
                 utilisation = 0.0\n"
            ),
        );
        let serve = ["sim", "serve", "--socket", "sim.sock", "--world", "world.toml", "--speed", "1"];
        let mut command = workdir.command(&serve);
        command.stdin(Stdio::null());
        let cluster = Service::spawn(command);
        wait_until("the cluster", || workdir.path("sim.sock").exists());
        Self { workdir, address, cluster }
    }

    fn controller(&self) -> Service {
        let mut controller = Service::start(&self.workdir);
        controller.wait_for_log("agent endpoint listening");
        controller
    }

    fn signal_cluster(&self, signal: Signal) {
        let pid = Pid::from_child(&self.cluster.child);
        kill_process(pid, signal).unwrap();
    }

    /// The store, as another process sees it.
    fn store(&self) -> Store {
        Store::open_to_read(&StoreUrl::Sqlite(self.workdir.path("doctor.db"))).unwrap()
    }

    fn planned_runs(&self) -> Vec<StoredRun> {
        if self.workdir.path("doctor.db").exists() {
            self.store().active_runs().unwrap_or_default()
        } else {
            Vec::new()
        }
    }

    /// Posts a message and returns the status and the text of the answer.
    fn post(&self, path: &str, headers: &str, body: &[u8]) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(ANSWER_LIMIT)).unwrap();
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {length}\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        let status = response.split(' ').nth(1).unwrap().parse().unwrap();
        (status, response.rsplit("\r\n").next().unwrap_or_default().to_owned())
    }

    fn post_result(&self, run: &StoredRun) -> (u16, String) {
        let (id, node) = (run.run.id, run.run.nodes.first());
        let document = Document {
            run: id,
            node: node.clone(),
            hardware: Hardware::default(),
            started: run.run.planned,
            ended: run.run.planned,
            tests: run.run.tests.iter().map(|test| evidence(test, run.run.planned)).collect(),
            uptime: None,
            machine: None,
        };
        let headers = format!("x-doctor-run: {id}\r\nx-doctor-node: {node}\r\n");
        self.post("/api/v1/results", &headers, &document.sign(&run.key).unwrap())
    }

    fn post_report(&self, node: &NodeName, key: &RunKey, number: u64) -> (u16, String) {
        let at = Timestamp::from_secs(1_793_491_300);
        let checks = vec![evidence(&TestId::new("gpu-health").unwrap(), at)];
        let versions = Versions { schema: Schema::CURRENT, ..Versions::default() };
        let report = AgentReport { checks, ..AgentReport::heartbeat(node.clone(), number, at, versions) };
        self.post("/api/v1/ingest", &format!("x-doctor-node: {node}\r\n"), &report.sign(key).unwrap())
    }
}

/// Posts reports until one stays in the queue: between two cycles, the loop enters each at once. Returns the number of
/// the last one.
fn wait_for_busy_loop(bed: &Bed, node: &NodeName, key: &RunKey, mut number: u64) -> u64 {
    wait_until("the loop waits for its cluster", || {
        number += 1;
        assert_eq!(bed.post_report(node, key, number), (200, "kept\n".to_owned()));
        let posted = Instant::now();
        while posted.elapsed() < STAYS {
            if bed.store().queued_count().unwrap() == 0 {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    });
    number
}

fn evidence(test: &TestId, at: Timestamp) -> TestEvidence {
    TestEvidence { test: test.clone(), started: at, ended: at, probes: Vec::new() }
}

#[test]
fn messages_are_answered_while_the_loop_waits_for_its_cluster_and_survive_a_kill() {
    let bed = Bed::new();
    let mut controller = bed.controller();
    wait_until("a run on each node", || bed.planned_runs().len() == NODES);
    let runs = bed.planned_runs();
    let agent = runs[2].run.nodes.first().clone();
    let key = RunKey::new([4; 32]);
    let store = Store::open(&StoreUrl::Sqlite(bed.workdir.path("doctor.db"))).unwrap();
    store.enroll_agent(&agent, &key, "ann", "testing", Timestamp::from_secs(1_793_491_200)).unwrap();
    drop(store);
    // The endpoint accepts reports once the first cycle has ended.
    wait_until("a report is accepted", || bed.post_report(&agent, &key, 1).0 == 200);
    wait_until("it is in history", || bed.store().queued_count().unwrap() == 0);

    bed.signal_cluster(Signal::STOP);
    let number = wait_for_busy_loop(&bed, &agent, &key, 1);
    for run in &runs[..2] {
        assert_eq!(bed.post_result(run), (202, "accepted\n".to_owned()));
    }
    assert_eq!(bed.post_result(&runs[0]), (200, "accepted before\n".to_owned()), "a repetition");
    assert_eq!(bed.post_report(&agent, &key, number + 1), (200, "kept\n".to_owned()));
    let mut forged = runs[2].clone();
    forged.key = RunKey::new([1; 32]);
    assert_eq!(bed.post_result(&forged).0, 403);
    controller.child.kill().unwrap();
    controller.child.wait().unwrap();
    assert!(bed.store().queued_count().unwrap() > 0, "the loop entered everything: the test proves nothing");

    bed.signal_cluster(Signal::CONT);
    let controller = bed.controller();
    wait_until("all messages are in history", || bed.store().queued_count().unwrap() == 0);
    let rows = bed.store().history(&HistoryFilter::default()).unwrap();
    let mut by_run: BTreeMap<(RunId, TestId), usize> = BTreeMap::new();
    for row in rows {
        let Some(run) = row.run else { continue };
        *by_run.entry((run, row.test)).or_default() += 1;
    }
    for run in &runs[..2] {
        for test in run.run.tests.iter() {
            assert_eq!(by_run.get(&(run.run.id, test.clone())), Some(&1), "{} {test}", run.run.id);
        }
    }
    assert!(!by_run.keys().any(|(run, _)| *run == runs[2].run.id), "a forged result was entered");
    // A job that did not get the answer repeats its post later still.
    assert_eq!(bed.post_result(&runs[0]).0, 410);
    assert!(bed.store().verify().unwrap().is_consistent());
    assert_eq!(controller.stop().0, Some(0));
}

#[test]
fn a_job_posts_its_result_to_the_controller() {
    let workdir = Workdir::local();
    let port = doctor_testbed::ports::reserve_one().unwrap();
    let agents = format!("[agents]\nlisten = \"127.0.0.1:{port}\"\nurl = \"http://127.0.0.1:{port}\"\n[backend");
    workdir.write("doctor.toml", &workdir.read("doctor.toml").replace("[backend", &agents));
    let service = Service::start(&workdir);
    let history = || match workdir.path("doctor.db").exists() {
        true => workdir.json(&["history"]),
        false => serde_json::Value::default(),
    };
    wait_until("a result", || history().as_array().is_some_and(|rows| !rows.is_empty()));
    let run = history()[0]["run"].as_str().unwrap().to_owned();
    let log = workdir.expect(0, &["log", &run]);
    log.stdout_contains(&format!("http://127.0.0.1:{port} has the result"));
    assert!(!workdir.path("data/rejected").exists(), "the document on the share is the same one");
    assert_eq!(service.stop().0, Some(0));
}

#[test]
fn a_job_whose_controller_and_share_are_away_reports_that_its_result_is_lost() {
    let workdir = Workdir::new();
    workdir.policy("");
    let mut command = Command::new(crate::workdir::doctor_node());
    command.args(["job", "--run", "r0000000000007", "--node", "n1", "--tests", "memory", "--policy", "policy.toml"]);
    // A file is where the directory should be, and the job is over its limit when it delivers.
    workdir.write("file", "");
    command.args(["--log", "log", "--document", "file/document.json", "--limit", "1ms"]);
    command.args(["--results", "http://127.0.0.1:1"]).env("DOCTOR_RUN_KEY", RunKey::new([1; 32]).to_hex());
    let output = command.current_dir(workdir.path("")).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let log = workdir.read("log");
    assert!(log.contains("http://127.0.0.1:1 does not answer") && log.contains("could not be written"), "{log}");
}
