//! Messages of nodes and results of runs in whole cycles: one that the store does not take, one that has become
//! superfluous, and one whose baseline cannot be read.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use doctor_backend::{
    clock::{Clock, SystemClock},
    local::{LocalBackend, LocalConfig},
    progress::Progress,
};
use doctor_checks::{
    Catalogue,
    document::{AgentReport, Document, RunKey, TestEvidence, Versions},
};
use doctor_core::{
    finding::Verdict,
    ids::{IdSource, JobId, NodeName, RunId, TestId},
    node::Hardware,
    plan::Action,
    policy::Policy,
    profile::Profiles,
    reason::{ReasonCode, WithReason},
    run::{NonEmpty, Outcome, Purpose, Run, RunState},
    time::Span,
};
use doctor_engine::{cycle::Engine, deps::EngineDeps, settings::Settings, share::Share};
use doctor_store::{
    GroupCommit, Lease, LeaseClock, Store, StoreUrl,
    messages::{Enqueued, MessageContent, VerifiedMessage},
    records::{Accepted, ClassifiedResult, CycleIntent},
};

const KEY: RunKey = RunKey::new([9; 32]);

fn here() -> NodeName {
    NodeName::new("here").unwrap()
}

fn memory() -> TestId {
    TestId::new("memory").unwrap()
}

/// A store and the controller of this machine, which is busy: nothing is planned on it.
struct Bed {
    folder: tempfile::TempDir,
    store: Store,
}

impl Bed {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["data", "state"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        fs::write(folder.path().join("busy"), "").unwrap();
        let store = Store::open(&StoreUrl::Sqlite(folder.path().join("doctor.db"))).unwrap();
        Self { folder, store }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    fn engine(&self) -> Engine {
        let mut config = LocalConfig::new(self.path("state"), self.path("data"));
        config.node = Some(here());
        config.busy_file = Some(self.path("busy"));
        let settings = Settings::new(Policy::built_in(), Catalogue::built_in(), Profiles::default()).unwrap();
        Engine::new(EngineDeps {
            backend: Arc::new(LocalBackend::open(config).unwrap()),
            store: self.store.clone(),
            clock: Arc::new(SystemClock),
            share: Some(Share::open(&self.path("data")).unwrap()),
            copy_folder: None,
            settings,
            inboxes: Vec::new(),
            keys: Box::new(|| [7; 32]),
            salt: 7,
            holder: doctor_store::this_process(),
            lease: Span::hours(1),
            progress: Progress::default(),
            workers: 2,
            publish_every: Span::hours(1),
        })
    }

    fn queue(&self, content: MessageContent, bytes: Vec<u8>) {
        let message = VerifiedMessage { node: here(), received: SystemClock.now(), content, bytes };
        let group = GroupCommit::start(&self.store).unwrap();
        assert_eq!(group.submit_and_wait(message).unwrap(), Enqueued::Queued);
    }

    fn queue_report(&self, number: u64, boot: &str) {
        let at = SystemClock.now();
        let evidence = TestEvidence { test: memory(), started: at, ended: at, probes: Vec::new() };
        let mut report = AgentReport::heartbeat(here(), number, at, Versions::default());
        report.checks.push(evidence);
        report.hardware = hardware(boot);
        let bytes = report.sign(&KEY).unwrap();
        self.queue(MessageContent::Report(Box::new(report)), bytes);
    }

    /// Waits for a file in `rejected/`, which a thread beside the loop writes.
    fn rejected_file(&self, suffix: &str) -> bool {
        let is_it = |path: &Path| path.to_string_lossy().ends_with(suffix);
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let entries = fs::read_dir(self.path("data/rejected")).into_iter().flatten();
            if entries.flatten().any(|entry| is_it(&entry.path())) {
                return true;
            }
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn hardware(boot: &str) -> Hardware {
    let (board_serial, boot_id) = (Some("SN-1".to_owned()), Some(boot.to_owned()));
    Hardware { board_serial, boot_id, ..Hardware::default() }
}

#[test]
fn a_message_that_the_store_refuses_is_rejected_alone_and_the_loop_goes_on() {
    let bed = Bed::new();
    let mut engine = bed.engine();
    engine.cycle().unwrap();
    let database = rusqlite::Connection::open(bed.path("doctor.db")).unwrap();
    let refuse = "CREATE TRIGGER refuse BEFORE UPDATE ON node WHEN NEW.boot_id = 'refused' \
                  BEGIN SELECT RAISE(ABORT, 'refused by the test'); END";
    database.execute_batch(refuse).unwrap();
    drop(database);
    for (number, boot) in [(1, "first"), (2, "refused"), (3, "last")] {
        bed.queue_report(number, boot);
    }
    let report = engine.cycle().unwrap();
    assert_eq!((report.rejected, report.problems), (1, Vec::new()));
    assert_eq!(bed.store.queued_count().unwrap(), 0);
    let machines = bed.store.hardware_history(&here()).unwrap();
    assert_eq!(machines[0].3.boot_id.as_deref(), Some("last"));
    assert!(bed.rejected_file("here.json") && bed.rejected_file("here.json.reason"));
    assert_eq!(engine.cycle().unwrap().rejected, 0);
}

/// Plans a run of one test on one node.
fn plan_run(bed: &Bed, lease: &Lease, ids: &mut IdSource, node: &NodeName, test: &TestId) -> Run {
    let now = SystemClock.now();
    ids.set_time(now);
    let run = Run {
        id: ids.run(),
        nodes: NonEmpty::one(node.clone()),
        tests: NonEmpty::one(test.clone()),
        state: RunState::Planned,
        purpose: WithReason::new(Purpose::Validation, "due", "x"),
        case: None,
        planned: now,
        limit: Span::minutes(5),
    };
    let policy = Policy::built_in();
    let intent = CycleIntent {
        at: now,
        actions: &[WithReason::new(Action::Submit(run.clone()), "due", "x")],
        keys: &BTreeMap::from([(run.id, KEY)]),
        attributed_findings: &[],
        changed_reasons: &[],
        policy_version: 1,
        retry: &policy.retry,
        notifications: &[],
    };
    bed.store.commit(lease, &intent).unwrap();
    run
}

fn document(run: &Run, hardware: Hardware, tests: Vec<TestEvidence>) -> Document {
    let (node, at) = (run.nodes.first().clone(), run.planned);
    Document { run: run.id, node, hardware, started: at, ended: at, tests, uptime: None, machine: None }
}

/// A result without findings.
fn result(run: &Run, hardware: Hardware, evidence: Vec<u8>) -> ClassifiedResult {
    let outcome = Outcome {
        node: run.nodes.first().clone(),
        test: run.tests.first().clone(),
        verdict: Verdict::Pass,
        reason: ReasonCode::fixed("within-limits"),
        at: run.planned,
        duration: Span::ZERO,
        findings: Vec::new(),
    };
    ClassifiedResult {
        run: run.id,
        node: run.nodes.first().clone(),
        outcomes: vec![outcome],
        hardware,
        evidence,
        complete: true,
        received: run.planned,
        policy_version: 1,
        profile_version: None,
    }
}

/// Plans a run on this machine, queues its document, and ends it with a copy that came on another way.
fn end_run_beside_the_queue(bed: &Bed, ids: &mut IdSource, copy: impl FnOnce(Vec<u8>) -> Vec<u8>) -> RunId {
    let lease = bed.store.acquire("test", LeaseClock::Database, Span::hours(1)).unwrap();
    let run = plan_run(bed, &lease, ids, &here(), &memory());
    let document = document(&run, hardware("boot"), Vec::new());
    let bytes = document.sign(&KEY).unwrap();
    bed.queue(MessageContent::Document(Box::new(document)), bytes.clone());
    let result = result(&run, hardware("boot"), copy(bytes));
    assert_eq!(bed.store.accept(&lease, &[result]).unwrap(), [Accepted::Stored]);
    bed.store.release(&lease).unwrap();
    run.id
}

#[test]
fn a_posted_result_whose_run_its_copy_has_ended_is_not_rejected() {
    let bed = Bed::new();
    let mut ids = IdSource::new(7);
    end_run_beside_the_queue(&bed, &mut ids, |document| document);
    let mut engine = bed.engine();
    let report = engine.cycle().unwrap();
    assert_eq!((report.rejected, bed.store.queued_count().unwrap()), (0, 0));
    engine.stop().unwrap();
    let run = end_run_beside_the_queue(&bed, &mut ids, |_| b"another document".to_vec());
    let report = engine.cycle().unwrap();
    assert_eq!((report.rejected, bed.store.queued_count().unwrap()), (1, 0));
    assert!(bed.rejected_file(&format!("{run}.json")));
}

/// Before, one unreadable document of a node's past kept the results of all nodes out, in each cycle.
#[test]
fn a_result_whose_baseline_cannot_be_read_waits_and_keeps_no_other_result_out() {
    let bed = Bed::new();
    let (mut ids, other, dl) = (IdSource::new(7), NodeName::new("n2").unwrap(), TestId::new("dl").unwrap());
    let lease = bed.store.acquire("test", LeaseClock::Database, Span::hours(1)).unwrap();
    let evidence = |run: &Run| {
        let (test, at) = (run.tests.first().clone(), run.planned);
        let evidence = TestEvidence { test, started: at, ended: at, probes: Vec::new() };
        document(run, Hardware::default(), vec![evidence]).sign(&KEY).unwrap()
    };
    let earlier = plan_run(&bed, &lease, &mut ids, &other, &dl);
    let stored = bed.store.accept(&lease, &[result(&earlier, Hardware::default(), evidence(&earlier))]);
    assert_eq!(stored.unwrap(), [Accepted::Stored]);
    let database = rusqlite::Connection::open(bed.path("doctor.db")).unwrap();
    let pack: Vec<u8> = database.query_row("SELECT body FROM evidence_pack", [], |row| row.get(0)).unwrap();
    let damaged = b"no document".to_vec();
    assert_eq!(database.execute("UPDATE evidence_pack SET body = ?1", [&damaged]).unwrap(), 1);

    // Only earlier results are a baseline.
    while SystemClock.now() <= earlier.planned {
        std::thread::sleep(Duration::from_millis(1));
    }
    let runs = [(&other, &dl), (&here(), &memory())].map(|(node, test)| {
        let run = plan_run(&bed, &lease, &mut ids, node, test);
        bed.store.record_submitted(&lease, run.id, &JobId("job".to_owned()), run.planned).unwrap();
        let path = bed.path("data").join(Share::document_path(&run, node));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, evidence(&run)).unwrap();
        run.id
    });
    bed.store.release(&lease).unwrap();
    let mut engine = bed.engine();
    let active = || bed.store.active_runs().unwrap().into_iter().map(|stored| stored.run.id).collect::<Vec<_>>();
    for entered in [1, 0] {
        let report = engine.cycle().unwrap();
        assert_eq!((report.results, report.rejected), (entered, 0), "{:?}", report.problems);
        let named = format!("a result of {} cannot be entered", runs[0]);
        assert!(report.problems.iter().any(|problem| problem.contains(&named)), "{:?}", report.problems);
        assert_eq!(active(), [runs[0]], "its run does not end without it");
    }
    database.execute("UPDATE evidence_pack SET body = ?1 WHERE body = ?2", [&pack, &damaged]).unwrap();
    let report = engine.cycle().unwrap();
    assert_eq!((report.results, active()), (1, Vec::new()), "{:?}", report.problems);
}
