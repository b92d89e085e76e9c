//! Tests the dstack backend on a real server with emulated hosts and real `doctor-node` processes: the contract, users who come
//! and wait, and failures of links and GPUs. `doctor_testbed::dstack` documents the limits of the emulation.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use doctor_backend::{
    Backend, Change, Effect, JobOutput, JobRequest, NodeOp, ObservedNode, PolledJob, ReportProgress,
    clock::{Clock, SystemClock},
    contract_tests::{self, Length, TestOccupancy, Testbed},
    inspection::InspectionStatus,
};
use doctor_backend_dstack::{DstackBackend, DstackConfig, KeyDelivery, SshFallbackConfig, inspect};
use doctor_checks::document::{Document, RunKey};
use doctor_core::{
    ids::{NodeName, OpId, RunId, TestId},
    node::Occupancy,
    run::{JobEnd, NonEmpty, ObservedJobState},
    time::{Span, Timestamp},
};
use doctor_testbed::{
    dstack::{BLOCKS, Dstack, Health, in_project},
    programs,
};
use serde_json::{Value, json};
use tempfile::TempDir;

const KEY: RunKey = RunKey::new([7; 32]);

/// A policy with a test that outlasts all of these tests.
const POLICY: &str = "[tests.endless.params]\ncommand = [\"/bin/sleep\", \"600\"]\ntimeout = \"20m\"\n";

const HOSTS: u8 = 4;

const PATIENCE: Duration = Duration::from_secs(300);
const PAUSE: Duration = Duration::from_millis(100);

/// The server that all tests of this file share; each test has its own host. It ends with the process.
struct Shared {
    dstack: Dstack,
    folder: TempDir,
}

fn shared(what: &str) -> Option<&'static Shared> {
    static STARTED: OnceLock<Result<Shared, String>> = OnceLock::new();
    let begin = || {
        let dstack = Dstack::start(HOSTS).inspect_err(|why| why.skip_tests(what)).map_err(|error| error.to_string())?;
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("doctor-node");
        let stripped = Command::new("strip").arg("-o").arg(&program).arg(programs::doctor_node()).status().unwrap();
        assert!(stripped.success(), "strip doctor-node");
        dstack.install(&program).unwrap();
        std::fs::write(folder.path().join("policy.toml"), POLICY).unwrap();
        std::fs::write(folder.path().join("token"), &dstack.admin().token).unwrap();
        Ok(Shared { dstack, folder })
    };
    match STARTED.get_or_init(begin) {
        Ok(shared) => Some(shared),
        Err(why) => {
            println!("NOT RUN: {what}: {why}");
            None
        }
    }
}

impl Shared {
    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn config(&self) -> DstackConfig {
        DstackConfig {
            url: self.dstack.url(),
            token_file: Some(self.at("token")),
            // The server may have to wait for a CPU core.
            deadline: Span::minutes(2),
            ..DstackConfig::default()
        }
    }

    fn open(&self) -> DstackBackend {
        DstackBackend::open(self.config(), Some(&self.at("policy.toml"))).unwrap()
    }
}

/// A host of the shared server, and its instance.
struct Host {
    shared: &'static Shared,
    number: u8,
    /// The number of users' runs that this host had.
    users: AtomicU64,
    /// Whether its runner or link was lost since it was last seen healthy.
    shaken: AtomicBool,
}

impl Host {
    fn new(what: &str, number: u8) -> Option<Self> {
        shared(what).map(|shared| Self::of(shared, number))
    }

    const fn of(shared: &'static Shared, number: u8) -> Self {
        Self { shared, number, users: AtomicU64::new(0), shaken: AtomicBool::new(false) }
    }

    fn dstack(&self) -> &Dstack {
        &self.shared.dstack
    }

    fn request(&self, run: RunId, tests: &[&str]) -> JobRequest {
        let node = self.name();
        let tests = tests.iter().map(|test| TestId::new(test).unwrap()).collect();
        JobRequest {
            run,
            nodes: NonEmpty::one(node.clone()),
            tests: NonEmpty::new(tests).unwrap(),
            access: Vec::new(),
            limit: Span::minutes(10),
            key: KEY,
            results: None,
            outputs: vec![JobOutput { node, logs: Vec::new(), document: format!("{run}.json").into() }],
        }
    }

    fn name(&self) -> NodeName {
        NodeName::new(&Dstack::instance_name(self.number)).unwrap()
    }

    fn users_run(&self) -> String {
        format!("user{}-{}", self.number, self.users.load(Ordering::SeqCst))
    }

    /// Lets a user's run take the instance. A run that finds no instance is submitted again, as users do.
    fn take(&self, extra: &Value) {
        let submitted = || {
            self.users.fetch_add(1, Ordering::SeqCst);
            self.dstack().submit_as_user(&self.users_run(), Some(self.number), "exec sleep 3600", extra).unwrap();
            let over = |run: &Value| run["status"] == "running" || has_ended(run);
            let run = self.dstack().wait_for("a user's run", || self.dstack().run(&self.users_run()), over).unwrap();
            (run["status"] == "running").then_some(())
        };
        wait("a user's run to have an instance", submitted);
    }

    fn leave(&self) {
        self.dstack().stop_run(&self.users_run()).unwrap();
    }

    fn is_taken(&self) -> bool {
        self.dstack().run(&self.users_run()).is_ok_and(|run| run["status"] == "running")
    }

    fn wait_health(&self, health: &Health<'_>, word: &str) {
        self.dstack().set_health(self.number, health).unwrap();
        self.dstack().wait_for_instance(self.number, word, |instance| instance["health_status"] == *word).unwrap();
    }

    fn seen(&self, backend: &DstackBackend) -> ObservedNode {
        backend.snapshot().unwrap().into_iter().find(|seen| seen.node.name == self.name()).unwrap()
    }

    /// A single late check of the server makes an instance `unreachable` until the next one, and then it is not free.
    fn wait_free(&self, backend: &DstackBackend, because: &str) {
        let mut last = String::new();
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            let seen = self.seen(backend);
            if seen.node.occupancy.is_free() {
                return;
            }
            why(&seen.node.occupancy).clone_into(&mut last);
            std::thread::sleep(PAUSE);
        }
        panic!("{because}, and it is not free: {last}");
    }
}

fn has_ended(run: &Value) -> bool {
    ["done", "failed", "terminated"].iter().any(|status| run["status"] == *status)
}

fn run_id(number: u64) -> RunId {
    // A recent id, so that it is not pruned as an old one.
    RunId::from_number((u64::try_from(SystemClock.now().millis()).unwrap() << 21) | number)
}

fn wait<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "timed out waiting for {what}");
        std::thread::sleep(PAUSE);
    }
}

fn polled(backend: &DstackBackend, run: RunId) -> ObservedJobState {
    backend.poll(&[run]).unwrap().remove(0).state
}

fn wait_running(backend: &DstackBackend, run: RunId) {
    wait("the job to run", || matches!(polled(backend, run), ObservedJobState::Running { .. }).then_some(()));
}

/// Returns how the job ended, whether it had started, and its documents.
fn wait_ended(backend: &DstackBackend, run: RunId) -> (JobEnd, bool, Vec<Vec<u8>>) {
    wait("the end of the job", || match backend.poll(&[run]).unwrap().remove(0) {
        PolledJob { state: ObservedJobState::Ended { how, started, .. }, documents } => {
            Some((how, started.is_some(), documents))
        }
        PolledJob { .. } => None,
    })
}

fn why(occupancy: &Occupancy) -> &str {
    match occupancy {
        Occupancy::Free => "free",
        Occupancy::Busy { by } => by,
        Occupancy::Unknown { why } => why,
    }
}

impl Testbed for Host {
    fn now(&self) -> Timestamp {
        SystemClock.now()
    }

    fn node(&self) -> NodeName {
        self.name()
    }

    fn set_occupancy(&self, _: &NodeName, desired: TestOccupancy) {
        if desired == TestOccupancy::Unknown {
            if self.is_taken() {
                self.leave();
            }
            return self.wait_health(&Health::Failure("GPU 5 has a volatile DBE"), "failure");
        }
        self.wait_health(&Health::Healthy, "healthy");
        match (desired, self.is_taken()) {
            (TestOccupancy::Busy, false) => self.take(&json!({})),
            (TestOccupancy::Free, true) => self.leave(),
            _ => {}
        }
        if desired == TestOccupancy::Free {
            let free = |instance: &Value| instance["status"] == "idle" && instance["unreachable"] == false;
            self.dstack().wait_for_instance(self.number, "idle", free).unwrap();
            if self.shaken.swap(false, Ordering::SeqCst) {
                self.dstack().wait_until_idle(self.number).unwrap();
            }
        }
    }

    /// DCGM's warning: dstack still starts jobs there.
    fn set_foreign_mark(&self, _: &NodeName, present: bool) {
        if present {
            self.wait_health(&Health::Warning("PCIe replay rate above threshold"), "warning");
        } else {
            self.wait_health(&Health::Healthy, "healthy");
        }
    }

    fn job(&self, run: RunId, length: Length) -> JobRequest {
        self.request(run, if length == Length::Short { &["memory"] } else { &["endless"] })
    }

    fn jobs_started(&self, run: RunId) -> usize {
        self.dstack().jobs_started(&format!("doctor-{run}"))
    }

    fn lose_job(&self, _: RunId) {
        self.shaken.store(true, Ordering::SeqCst);
        self.dstack().kill_runner(self.number).unwrap();
    }

    /// The server processes its runs every few seconds, and less often on a small machine that is busy with the other tests.
    fn let_time_pass(&self) {
        std::thread::sleep(Duration::from_millis(300));
    }

    fn restarted(&self) -> Option<Box<dyn Backend>> {
        Some(Box::new(self.shared.open()))
    }
}

#[test]
fn the_dstack_backend_fulfils_the_contract() {
    let Some(host) = Host::new("the_dstack_backend_keeps_the_contract", 1) else { return };
    assert_eq!(contract_tests::violations(&host.shared.open(), &host), []);
}

#[test]
fn a_result_comes_with_the_log_and_no_key_is_left_behind() {
    let Some(host) = Host::new("a_result_comes_with_the_log_and_no_key_is_left_behind", 2) else { return };
    let (backend, run) = (host.shared.open(), run_id(1));
    backend.submit(&host.request(run, &["memory", "endless"])).unwrap();
    assert_eq!(host.seen(&backend).jobs, [run]);
    wait_running(&backend, run);
    host.wait_free(&backend, "our own run leaves the node free");
    let secrets = || host.dstack().post(&in_project("secrets/list"), &json!({})).unwrap().to_string();
    assert!(!secrets().contains(&run.to_string()), "the job has its key");
    let record = host.dstack().run(&format!("doctor-{run}")).unwrap().to_string();
    assert!(!record.contains(&KEY.to_hex()), "the run does not show its key");
    // A stopped job returns what it had finished.
    let has_begun = || {
        let submission = &host.dstack().run(&format!("doctor-{run}")).unwrap()["jobs"][0]["job_submissions"][0]["id"];
        let query = json!({ "run_name": format!("doctor-{run}"), "job_submission_id": submission, "limit": 1000 });
        let page = host.dstack().post(&in_project("logs/poll"), &query).unwrap();
        let events = page["logs"].as_array().into_iter().flatten().filter_map(|event| event["message"].as_str());
        let bytes: Vec<u8> = events.flat_map(|message| STANDARD.decode(message).unwrap()).collect();
        String::from_utf8_lossy(&bytes).contains("endless: /bin/sleep").then_some(())
    };
    wait("the second test", has_begun);
    backend.cancel(run).unwrap();
    let (how, started, documents) = wait_ended(&backend, run);
    assert_eq!((how, started, documents.len()), (JobEnd::Killed, true, 1), "{:?}", backend.logs(run));
    let document = Document::open(&documents[0], &KEY).unwrap();
    assert_eq!(document.tests.iter().map(|test| test.test.as_str()).collect::<Vec<_>>(), ["memory"]);
    assert_eq!((document.run, &document.node), (run, &host.name()));
    let [(node, log)] = &backend.logs(run)[..] else { panic!("one log") };
    assert!(node == &host.name() && log.contains("stopped by a signal") && !log.contains("DOCTOR RESULT"), "{log}");
    parts_of_an_instance(&host, &backend);
    program_is_missing(&host);
    report_of_an_instance(&host, &backend);
}

/// A job that dies at once says why, although it delivers nothing.
fn program_is_missing(host: &Host) {
    let mut config = host.shared.config();
    config.task.doctor_node = vec!["/usr/bin/no-doctor-node".to_owned()];
    let backend = DstackBackend::open(config, None).unwrap();
    host.wait_free(&backend, "no run uses it");
    let request = host.request(run_id(9), &["memory"]);
    backend.submit(&request).unwrap();
    assert_eq!(wait_ended(&backend, request.run), (JobEnd::Failed, true, Vec::new()));
    let run = contract_tests::run_of(request, SystemClock.now());
    let quote = wait("the end of its log", || {
        let outputs = backend.remaining_output(&run).unwrap();
        let [output] = &outputs[..] else { panic!("{outputs:?}") };
        output.quote().filter(|_| !output.text.is_empty())
    });
    assert!(quote.contains("no-doctor-node") && quote.contains("not found") && quote.contains("exit"), "{quote}");
}

/// The node's own report comes through a task.
fn report_of_an_instance(host: &Host, backend: &DstackBackend) {
    host.wait_free(backend, "no run uses it");
    let op = op_now();
    let report = wait("the report", || match backend.collect_report(&host.name(), op) {
        ReportProgress::Done(report) => Some(report),
        ReportProgress::InProgress => None,
        ReportProgress::Failed { text } => panic!("{text}"),
    });
    assert!(report.machine["hardware"]["boot_id"].is_string(), "{:#}", report.machine);
    host.wait_free(backend, "the report has ended");
}

/// A run of ours takes every block, and one block of a user's is enough to keep ours away.
fn parts_of_an_instance(host: &Host, backend: &DstackBackend) {
    let blocks = |name: &str| host.dstack().instance(host.number).unwrap()[name].clone();
    assert_eq!(blocks("total_blocks"), BLOCKS);
    let run = run_id(7);
    host.wait_free(backend, "no run uses it");
    backend.submit(&host.request(run, &["endless"])).unwrap();
    wait_running(backend, run);
    assert_eq!(blocks("busy_blocks"), BLOCKS);
    host.wait_free(backend, "all of it is ours");
    backend.cancel(run).unwrap();
    wait_ended(backend, run);
    host.dstack().wait_for_instance(host.number, "idle", |instance| instance["status"] == "idle").unwrap();
    let one = json!({ "resources": { "gpu": "H100:1", "cpu": "x86:1..", "memory": "1GB..", "disk": "1GB.." } });
    host.take(&one);
    assert_eq!(blocks("busy_blocks"), 1);
    assert_eq!(why(&host.seen(backend).node.occupancy), format!("run {} of alice", host.users_run()));
    let late = run_id(8);
    backend.submit(&host.request(late, &["memory"])).unwrap();
    assert_eq!(wait_ended(backend, late).0, JobEnd::Preempted, "seven blocks are not all of them");
    host.leave();
    host.wait_free(backend, "no run uses it");
    // A cloud fleet as this server reports it; without a cloud it has no instances.
    let cloud = json!({ "type": "fleet", "name": "cloud", "nodes": { "min": 0, "target": 0, "max": 2 }, "idle_duration": "1h" });
    let spec = json!({ "configuration": cloud, "profile": { "name": "default" } });
    let plan = json!({ "plan": { "spec": spec, "current_resource": null }, "force": true });
    host.dstack().post(&in_project("fleets/apply"), &plan).unwrap();
    assert_eq!(backend.snapshot().unwrap().len(), usize::from(HOSTS));
}

#[test]
fn users_runs_have_priority() {
    let Some(host) = Host::new("whoever_comes_or_waits_goes_first", 3) else { return };
    let backend = host.shared.open();
    host.take(&json!({}));
    assert_eq!(why(&host.seen(&backend).node.occupancy), format!("run {} of alice", host.users_run()));
    // The instance was taken between the snapshot and the submission.
    let late = run_id(2);
    backend.submit(&host.request(late, &["memory"])).unwrap();
    let (how, started, _) = wait_ended(&backend, late);
    assert_eq!((how, started), (JobEnd::Preempted, false), "it never had an instance");
    assert_eq!(host.dstack().jobs_started(&format!("doctor-{late}")), 0);
    host.leave();
    // A user's run with retries waits while ours has the instance.
    let run = run_id(3);
    host.wait_free(&backend, "no run uses it");
    backend.submit(&host.request(run, &["endless"])).unwrap();
    wait_running(&backend, run);
    let retried = json!({ "retry": { "on_events": ["no-capacity"], "duration": "1h" } });
    host.dstack().submit_as_user("patient", Some(3), "exec sleep 3600", &retried).unwrap();
    let expected = "run patient of alice, which waits for an instance";
    wait("the run to be seen waiting", || (why(&host.seen(&backend).node.occupancy) == expected).then_some(()));
    backend.cancel(run).unwrap();
    assert_eq!(wait_ended(&backend, run).0, JobEnd::Killed);
    host.dstack().wait_for_run("patient", "running").unwrap();
    assert_eq!(why(&host.seen(&backend).node.occupancy), "run patient of alice");
    host.dstack().stop_run("patient").unwrap();
    host.dstack().wait_for_instance(3, "idle", |instance| instance["status"] == "idle").unwrap();
    // The link is cut: dstack still reports idle and healthy.
    host.dstack().disconnect(3).unwrap();
    let cut = |instance: &Value| instance["unreachable"] == true && instance["status"] == "idle";
    host.dstack().wait_for_instance(3, "unreachable", cut).unwrap();
    assert_eq!(why(&host.seen(&backend).node.occupancy), "dstack cannot reach it");
    host.dstack().reconnect(3).unwrap();
    host.wait_free(&backend, "no run uses it");
    // Failing GPUs: dstack's verdict is a foreign mark.
    host.wait_health(&Health::Failure("GPU 5 has a volatile DBE"), "failure");
    let failing = host.seen(&backend).node;
    assert!(matches!(failing.occupancy, Occupancy::Unknown { .. }), "{failing:?}");
    let [mark] = &failing.marks.foreign[..] else { panic!("one mark: {failing:?}") };
    assert_eq!((mark.by.as_str(), mark.text.as_str()), ("dstack", "health failure: GPU 5 has a volatile DBE"));
    assert!(failing.is_vacant() && !failing.is_reachable_out_of_band(), "there is no SSH fallback");
    host.wait_health(&Health::Healthy, "healthy");
}

#[test]
fn inspect_reports_missing_rights_and_limits() {
    let Some(shared) = shared("rights_and_limits_are_said_in_words") else { return };
    let inspect_with = |config: &DstackConfig| {
        let all = inspect(config);
        all.iter().map(|one| (one.subject.clone(), one.status, one.text.clone())).collect::<Vec<_>>()
    };
    let good = inspect_with(&shared.config());
    assert!(good.iter().all(|(_, status, _)| *status == InspectionStatus::Good), "{good:?}");
    assert!(good[0].2.ends_with("dstack 0.22.5") && good[3].2.starts_with("4 instances in bed"), "{good:?}");
    // A member may query and run, and may not create secrets.
    let member = shared.at("member");
    std::fs::write(&member, &shared.dstack.user().token).unwrap();
    let as_member = DstackConfig { token_file: Some(member), ..shared.config() };
    let found = inspect_with(&as_member);
    assert!(found[2].1 == InspectionStatus::Bad && found[2].2.contains("may not create secrets"), "{found:?}");
    let open = DstackConfig { key: KeyDelivery::Environment, ..as_member.clone() };
    assert!(inspect_with(&open).iter().all(|(_, status, _)| *status == InspectionStatus::Good));
    let host = Host::of(shared, 1);
    let error =
        DstackBackend::open(as_member, None).unwrap().submit(&host.request(run_id(4), &["memory"])).unwrap_err();
    assert!(error.effect == Effect::NotAppliedPermanent && error.text.contains("key = \"environment\""), "{error}");
    let no_token = DstackConfig { token_file: Some(Path::new("/dev/null").to_owned()), ..shared.config() };
    assert_eq!(DstackBackend::open(no_token, None).unwrap().snapshot().unwrap_err().effect, Effect::NotAppliedRetry);
    let wrong = shared.at("wrong");
    std::fs::write(&wrong, "no-such-token").unwrap();
    let wrong = DstackConfig { token_file: Some(wrong), ..shared.config() };
    let error = DstackBackend::open(wrong.clone(), None).unwrap().snapshot().unwrap_err();
    assert!(error.effect == Effect::NotAppliedPermanent && error.text.contains("Invalid token"), "{error}");
    assert!(inspect_with(&wrong).iter().any(|(what, status, _)| what == "token" && *status == InspectionStatus::Bad));
    // An operator has to replace a host of an SSH fleet.
    let willing = DstackBackend::open(DstackConfig { replace: true, ..shared.config() }, None).unwrap();
    assert!(willing.caps().replace && !willing.caps().mark && !willing.caps().drain);
    let replace = |op| NodeOp { op, what: Change::Replace };
    let error = willing.apply(&host.name(), &replace(op_now())).unwrap_err();
    assert!(
        error.effect == Effect::NotAppliedPermanent && error.text.contains("remove 10.98.1.2 from its `hosts`"),
        "{error}"
    );
    willing.apply(&host.name(), &replace(OpId::from_number(1))).expect("created after the request");
}

/// Where dstack starts nothing, a run starts over SSH: once, found again by a later controller, and never while the host is in
/// use.
#[test]
fn a_failing_instance_is_tested_over_ssh() {
    let Some(host) = Host::new("a_failing_instance_is_proved_past_dstack", 4) else { return };
    let keep = tempfile::Builder::new().prefix("d").tempdir_in("/tmp").unwrap();
    let lock = host.dstack().folder().join("host4/home/in-use");
    let ssh = SshFallbackConfig {
        ssh_config: Some(host.dstack().ssh_config().unwrap()),
        doctor_node: Some(host.shared.at("doctor-node")),
        // The machine is shared and busy.
        max_load_per_core: 1e6,
        deadline: Span::minutes(2),
        connect: Span::from_secs(60),
        locks: vec!["/root/in-use".into()],
        state: keep.path().join("s"),
        ..SshFallbackConfig::default()
    };
    let config = DstackConfig { ssh: Some(ssh), ..host.shared.config() };
    let open = || DstackBackend::open(config.clone(), Some(&host.shared.at("policy.toml"))).unwrap();
    let backend = open();
    assert!(!host.seen(&backend).node.is_reachable_out_of_band(), "dstack itself can use it");
    host.wait_health(&Health::Failure("GPU 5 has a volatile DBE"), "failure");
    // Jobs of other hosts are visible too: the emulated hosts share their processes.
    let open_to_proofs = || host.seen(&backend).node.is_reachable_out_of_band().then_some(());
    wait("the SSH fallback", open_to_proofs);
    let node = host.seen(&backend).node;
    assert!(!node.occupancy.is_free(), "{node:?}");
    assert!(node.manual_replacement().is_some_and(|how| how.contains("remove 10.98.4.2 from its `hosts`")), "{node:?}");
    // The host is in use outside of dstack: nothing starts.
    std::fs::write(&lock, "").unwrap();
    assert_eq!(why(&host.seen(&backend).node.occupancy), "/root/in-use exists");
    let run = run_id(5);
    let error = backend.submit(&host.request(run, &["endless"])).unwrap_err();
    assert!(error.effect == Effect::NotAppliedRetry && error.text.contains("/root/in-use exists"), "{error}");
    std::fs::remove_file(&lock).unwrap();
    let begin = |backend: &DstackBackend, run, tests: &[&str]| {
        wait("the run to begin", || match backend.submit(&host.request(run, tests)) {
            Ok(job) => Some(job),
            Err(error) if error.effect == Effect::NotAppliedRetry => None,
            Err(error) => panic!("{error}"),
        })
    };
    let job = begin(&backend, run, &["endless"]);
    wait_running(&backend, run);
    assert_eq!(host.seen(&backend).jobs, [run]);
    assert!(!host.seen(&backend).node.occupancy.is_free());
    // The next controller finds the run and starts nothing; dstack does not know of it.
    let successor = open();
    wait_running(&successor, run);
    assert_eq!(begin(&successor, run, &["endless"]), job);
    assert_eq!(host.dstack().jobs_started(&format!("doctor-{run}")), 0);
    successor.cancel(run).unwrap();
    assert_eq!(wait_ended(&backend, run).0, JobEnd::Killed);
    let proof = run_id(6);
    begin(&successor, proof, &["memory"]);
    // It stays where it started, even when dstack could use the instance again.
    host.wait_health(&Health::Healthy, "healthy");
    let (how, started, documents) = wait_ended(&backend, proof);
    assert_eq!((how, started, documents.len()), (JobEnd::Exited, true, 1));
    let document = Document::open(&documents[0], &KEY).unwrap();
    assert_eq!((document.run, &document.node), (proof, &host.name()));
    assert!(backend.logs(proof)[0].1.contains("memory"));
}

fn op_now() -> OpId {
    OpId::from_number(u64::try_from(SystemClock.now().millis()).unwrap() << 21)
}
