//! The dstack backend on a real server whose hosts are stand-ins, with real `doctor-node` processes there: the contract, users who come
//! and wait, and what happens when links and GPUs fail. How far that goes is told in `doctor_bed::dstack`.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use doctor_bed::{
    dstack::{Dstack, Health, in_project},
    programs,
};
use doctor_checks::document::{Document, RunKey};
use doctor_control::{
    backend::{
        Backend, Change, Effect, JobOutput, JobRequest, NodeOp, PolledJob, SeenNode,
        contract::{self, Bed, Length, Wanted},
        dstack::{DstackBackend, DstackConfig, KeyBy, inspect},
        inspection::Standing,
    },
    clock::{Clock, SystemClock},
};
use doctor_core::{
    ids::{NodeName, OpId, RunId, TestId},
    node::Occupancy,
    run::{JobEnd, JobSeen, NonEmpty},
    time::{Span, Timestamp},
};
use serde_json::{Value, json};
use tempfile::TempDir;

const KEY: RunKey = RunKey::new([7; 32]);

/// A policy with a test that goes on for longer than any of these tests.
const POLICY: &str = "[tests.endless.params]\ncommand = [\"/bin/sleep\", \"600\"]\ntimeout = \"20m\"\n";

const HOSTS: u8 = 3;

/// One server for all tests of this file, each of which has a host of its own. It ends with the process.
struct Shared {
    dstack: Dstack,
    folder: TempDir,
}

fn shared(what: &str) -> Option<&'static Shared> {
    static STARTED: OnceLock<Result<Shared, String>> = OnceLock::new();
    let begin = || {
        let dstack = Dstack::start(HOSTS).inspect_err(|why| why.not_run(what)).map_err(|error| error.to_string())?;
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
        DstackConfig { url: self.dstack.url(), token_file: Some(self.at("token")), ..DstackConfig::default() }
    }

    fn open(&self) -> DstackBackend {
        DstackBackend::open(self.config(), Some(&self.at("policy.toml"))).unwrap()
    }
}

/// A host of the shared server, and the instance that it is.
struct Host {
    shared: &'static Shared,
    number: u8,
    /// Users' runs that this host had.
    users: AtomicU64,
}

impl Host {
    fn new(what: &str, number: u8) -> Option<Self> {
        shared(what).map(|shared| Self { shared, number, users: AtomicU64::new(0) })
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
            limit: Span::minutes(10),
            key: KEY,
            outputs: vec![JobOutput { node, logs: Vec::new(), document: format!("{run}.json").into() }],
        }
    }

    fn name(&self) -> NodeName {
        NodeName::new(&Dstack::instance_name(self.number)).unwrap()
    }

    fn users_run(&self) -> String {
        format!("user{}-{}", self.number, self.users.load(Ordering::SeqCst))
    }

    /// A user's run has the instance.
    fn take(&self) {
        self.users.fetch_add(1, Ordering::SeqCst);
        self.dstack().submit_as_user(&self.users_run(), Some(self.number), "exec sleep 3600", &json!({})).unwrap();
        self.dstack().wait_for_run(&self.users_run(), "running").unwrap();
    }

    fn leave(&self) {
        let ended = |run: &Value| ["done", "failed", "terminated"].iter().any(|status| run["status"] == *status);
        self.dstack().stop_run(&self.users_run()).unwrap();
        self.dstack().wait_for("the user's run to end", || self.dstack().run(&self.users_run()), ended).unwrap();
    }

    fn is_taken(&self) -> bool {
        self.dstack().run(&self.users_run()).is_ok_and(|run| run["status"] == "running")
    }

    fn wait_health(&self, health: &Health<'_>, word: &str) {
        self.dstack().set_health(self.number, health).unwrap();
        self.dstack().wait_for_instance(self.number, word, |instance| instance["health_status"] == *word).unwrap();
    }

    fn seen(&self, backend: &DstackBackend) -> SeenNode {
        backend.snapshot().unwrap().into_iter().find(|seen| seen.node.name == self.name()).unwrap()
    }
}

fn run_id(number: u64) -> RunId {
    // Born now, so that nothing takes it for an old one.
    RunId::from_number((u64::try_from(SystemClock.now().millis()).unwrap() << 21) | number)
}

fn wait<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < Duration::from_secs(300), "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn polled(backend: &DstackBackend, run: RunId) -> JobSeen {
    backend.poll(&[run]).unwrap().remove(0).seen
}

fn wait_running(backend: &DstackBackend, run: RunId) {
    wait("the job to run", || matches!(polled(backend, run), JobSeen::Running { .. }).then_some(()));
}

/// How the job ended, whether it had begun, and the document that came.
fn wait_ended(backend: &DstackBackend, run: RunId) -> (JobEnd, bool, Vec<Vec<u8>>) {
    wait("the end of the job", || match backend.poll(&[run]).unwrap().remove(0) {
        PolledJob { seen: JobSeen::Ended { how, started, .. }, documents } => Some((how, started.is_some(), documents)),
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

impl Bed for Host {
    fn now(&self) -> Timestamp {
        SystemClock.now()
    }

    fn node(&self) -> NodeName {
        self.name()
    }

    fn occupy(&self, _: &NodeName, wanted: Wanted) {
        if wanted == Wanted::Unknown {
            if self.is_taken() {
                self.leave();
            }
            return self.wait_health(&Health::Failure("GPU 5 has a volatile DBE"), "failure");
        }
        self.wait_health(&Health::Healthy, "healthy");
        match (wanted, self.is_taken()) {
            (Wanted::Busy, false) => self.take(),
            (Wanted::Free, true) => self.leave(),
            _ => {}
        }
        if wanted == Wanted::Free {
            let free = |instance: &Value| instance["status"] == "idle" && instance["unreachable"] == false;
            self.dstack().wait_for_instance(self.number, "idle", free).unwrap();
        }
    }

    /// DCGM's own word of warning: dstack still starts jobs there.
    fn mark_by_somebody_else(&self, _: &NodeName, there: bool) {
        if there {
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

    fn lose(&self, _: RunId) {
        self.dstack().lose(self.number).unwrap();
    }

    /// The server looks at its runs every few seconds, and on a small machine that is busy with the other tests not even that.
    fn let_time_pass(&self) {
        std::thread::sleep(Duration::from_millis(300));
    }

    fn restarted(&self) -> Option<Box<dyn Backend>> {
        Some(Box::new(self.shared.open()))
    }
}

#[test]
fn the_dstack_backend_keeps_the_contract() {
    let Some(host) = Host::new("the_dstack_backend_keeps_the_contract", 1) else { return };
    assert_eq!(contract::breaches(&host.shared.open(), &host), []);
}

#[test]
fn a_result_comes_with_the_log_and_no_key_is_left_behind() {
    let Some(host) = Host::new("a_result_comes_with_the_log_and_no_key_is_left_behind", 2) else { return };
    let (backend, run) = (host.shared.open(), run_id(1));
    backend.submit(&host.request(run, &["memory", "endless"])).unwrap();
    assert_eq!(host.seen(&backend).jobs, [run]);
    wait_running(&backend, run);
    assert_eq!(why(&host.seen(&backend).node.occupancy), "free", "our own run is in nobody's way");
    let secrets = || host.dstack().ask(&in_project("secrets/list"), &json!({})).unwrap().to_string();
    assert!(!secrets().contains(&run.to_string()), "the job has its key");
    let told = host.dstack().run(&format!("doctor-{run}")).unwrap().to_string();
    assert!(!told.contains(&KEY.to_hex()), "whoever may see the run does not see its key");
    // Told to stop, it leaves what it had finished.
    let has_begun = || {
        let submission = &host.dstack().run(&format!("doctor-{run}")).unwrap()["jobs"][0]["job_submissions"][0]["id"];
        let ask = json!({ "run_name": format!("doctor-{run}"), "job_submission_id": submission, "limit": 1000 });
        let page = host.dstack().ask(&in_project("logs/poll"), &ask).unwrap();
        let events = page["logs"].as_array().into_iter().flatten().filter_map(|event| event["message"].as_str());
        let bytes: Vec<u8> = events.flat_map(|message| STANDARD.decode(message).unwrap()).collect();
        String::from_utf8_lossy(&bytes).contains("endless: /bin/sleep").then_some(())
    };
    wait("the second test", has_begun);
    backend.cancel(run).unwrap();
    let (how, started, documents) = wait_ended(&backend, run);
    assert_eq!((how, started, documents.len()), (JobEnd::Killed, true, 1));
    let document = Document::open(&documents[0], &KEY).unwrap();
    assert_eq!(document.tests.iter().map(|test| test.test.as_str()).collect::<Vec<_>>(), ["memory"]);
    assert_eq!((document.run, &document.node), (run, &host.name()));
    let [(node, log)] = &backend.logs(run)[..] else { panic!("one log") };
    assert!(node == &host.name() && log.contains("told to stop") && !log.contains("DOCTOR RESULT"), "{log}");
}

#[test]
fn whoever_comes_or_waits_goes_first() {
    let Some(host) = Host::new("whoever_comes_or_waits_goes_first", 3) else { return };
    let backend = host.shared.open();
    host.take();
    assert_eq!(why(&host.seen(&backend).node.occupancy), format!("run {} of alice", host.users_run()));
    // The instance was taken between the look and the submission.
    let late = run_id(2);
    backend.submit(&host.request(late, &["memory"])).unwrap();
    let (how, started, _) = wait_ended(&backend, late);
    assert_eq!((how, started), (JobEnd::Displaced, false), "it never had a place");
    assert_eq!(host.dstack().jobs_started(&format!("doctor-{late}")), 0);
    host.leave();
    // A user's run that is retried waits while ours has the instance.
    let run = run_id(3);
    wait("the instance to be free", || host.seen(&backend).node.occupancy.is_free().then_some(()));
    backend.submit(&host.request(run, &["endless"])).unwrap();
    wait_running(&backend, run);
    let retried = json!({ "retry": { "on_events": ["no-capacity"], "duration": "1h" } });
    host.dstack().submit_as_user("patient", Some(3), "exec sleep 3600", &retried).unwrap();
    let wanted = "run patient of alice, which waits for an instance";
    wait("the run to be seen waiting", || (why(&host.seen(&backend).node.occupancy) == wanted).then_some(()));
    backend.cancel(run).unwrap();
    assert_eq!(wait_ended(&backend, run).0, JobEnd::Killed);
    host.dstack().wait_for_run("patient", "running").unwrap();
    assert_eq!(why(&host.seen(&backend).node.occupancy), "run patient of alice");
    host.dstack().stop_run("patient").unwrap();
    host.dstack().wait_for_instance(3, "idle", |instance| instance["status"] == "idle").unwrap();
    // A link that is cut: dstack goes on saying idle and healthy.
    host.dstack().cut(3).unwrap();
    let cut = |instance: &Value| instance["unreachable"] == true && instance["status"] == "idle";
    host.dstack().wait_for_instance(3, "unreachable", cut).unwrap();
    assert_eq!(why(&host.seen(&backend).node.occupancy), "dstack cannot reach it");
    host.dstack().join(3).unwrap();
    wait("the instance to be free", || host.seen(&backend).node.occupancy.is_free().then_some(()));
    // GPUs that fail: dstack's own words are a mark of somebody else.
    host.wait_health(&Health::Failure("GPU 5 has a volatile DBE"), "failure");
    let failing = host.seen(&backend).node;
    assert!(matches!(failing.occupancy, Occupancy::Unknown { .. }), "{failing:?}");
    let mark = failing.marks.foreign_block().unwrap();
    assert_eq!((mark.by.as_str(), mark.text.as_str()), ("dstack", "health failure: GPU 5 has a volatile DBE"));
    host.wait_health(&Health::Healthy, "healthy");
}

#[test]
fn rights_and_limits_are_said_in_words() {
    let Some(shared) = shared("rights_and_limits_are_said_in_words") else { return };
    let standing = |config: &DstackConfig| {
        let all = inspect(config);
        all.iter().map(|one| (one.what.clone(), one.standing, one.text.clone())).collect::<Vec<_>>()
    };
    let good = standing(&shared.config());
    assert!(good.iter().all(|(_, standing, _)| *standing == Standing::Good), "{good:?}");
    assert!(good[0].2.ends_with("dstack 0.22.5") && good[3].2 == "3 instances in bed", "{good:?}");
    // A member may look and run, and keeps no secrets.
    let member = shared.at("member");
    std::fs::write(&member, &shared.dstack.user().token).unwrap();
    let as_member = DstackConfig { token_file: Some(member), ..shared.config() };
    let found = standing(&as_member);
    assert!(found[2].1 == Standing::Bad && found[2].2.contains("may not keep secrets"), "{found:?}");
    let open = DstackConfig { key: KeyBy::Environment, ..as_member.clone() };
    assert!(standing(&open).iter().all(|(_, standing, _)| *standing == Standing::Good));
    let host = Host { shared, number: 1, users: AtomicU64::new(0) };
    let error =
        DstackBackend::open(as_member, None).unwrap().submit(&host.request(run_id(4), &["memory"])).unwrap_err();
    assert!(error.effect == Effect::NoneGiveUp && error.text.contains("key = \"environment\""), "{error}");
    let nobody = DstackConfig { token_file: Some(Path::new("/dev/null").to_owned()), ..shared.config() };
    assert_eq!(DstackBackend::open(nobody, None).unwrap().snapshot().unwrap_err().effect, Effect::NoneTryAgain);
    let wrong = shared.at("wrong");
    std::fs::write(&wrong, "no-such-token").unwrap();
    let wrong = DstackConfig { token_file: Some(wrong), ..shared.config() };
    let error = DstackBackend::open(wrong.clone(), None).unwrap().snapshot().unwrap_err();
    assert!(error.effect == Effect::NoneGiveUp && error.text.contains("Invalid token"), "{error}");
    assert!(standing(&wrong).iter().any(|(what, standing, _)| what == "token" && *standing == Standing::Bad));
    // A host of an SSH fleet is a person's to replace.
    let willing = DstackBackend::open(DstackConfig { replace: true, ..shared.config() }, None).unwrap();
    assert!(willing.caps().replace && !willing.caps().mark && !willing.caps().drain);
    let replace = |op| NodeOp { op, what: Change::Replace };
    let error = willing.apply(&host.name(), &replace(op_now())).unwrap_err();
    assert!(error.effect == Effect::NoneGiveUp && error.text.contains("take 10.98.1.2 out of its `hosts`"), "{error}");
    willing.apply(&host.name(), &replace(OpId::from_number(1))).expect("it was made after that was asked for");
}

fn op_now() -> OpId {
    OpId::from_number(u64::try_from(SystemClock.now().millis()).unwrap() << 21)
}
