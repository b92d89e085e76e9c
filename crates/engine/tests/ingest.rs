//! Messages of nodes in whole cycles: one that the store does not take, and one that has become superfluous.

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
    ids::{IdSource, NodeName, RunId, TestId},
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
    GroupCommit, LeaseClock, Store, StoreUrl,
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

/// Plans a run on this machine, queues its document, and ends it with a copy that came on another way.
fn end_run_beside_the_queue(bed: &Bed, ids: &mut IdSource, copy: impl FnOnce(Vec<u8>) -> Vec<u8>) -> RunId {
    let now = SystemClock.now();
    ids.set_time(now);
    let lease = bed.store.acquire("test", LeaseClock::Database, Span::hours(1)).unwrap();
    let run = Run {
        id: ids.run(),
        nodes: NonEmpty::one(here()),
        tests: NonEmpty::one(memory()),
        state: RunState::Planned,
        purpose: WithReason::new(Purpose::Validation, "due", "x"),
        case: None,
        planned: now,
        limit: Span::minutes(5),
    };
    let (id, policy) = (run.id, Policy::built_in());
    let intent = CycleIntent {
        at: now,
        actions: &[WithReason::new(Action::Submit(run), "due", "x")],
        keys: &BTreeMap::from([(id, KEY)]),
        attributed_findings: &[],
        changed_reasons: &[],
        policy_version: 1,
        retry: &policy.retry,
        notifications: &[],
    };
    bed.store.commit(&lease, &intent).unwrap();
    let document = Document {
        run: id,
        node: here(),
        hardware: hardware("boot"),
        started: now,
        ended: now,
        tests: Vec::new(),
        uptime: None,
        machine: None,
    };
    let bytes = document.sign(&KEY).unwrap();
    bed.queue(MessageContent::Document(Box::new(document)), bytes.clone());
    let outcome = Outcome {
        node: here(),
        test: memory(),
        verdict: Verdict::Pass,
        reason: ReasonCode::fixed("within-limits"),
        at: now,
        duration: Span::ZERO,
        findings: Vec::new(),
    };
    let result = ClassifiedResult {
        run: id,
        node: here(),
        outcomes: vec![outcome],
        hardware: hardware("boot"),
        evidence: copy(bytes),
        complete: true,
        received: now,
        policy_version: 1,
        profile_version: None,
    };
    assert_eq!(bed.store.accept(&lease, &[result]).unwrap(), [Accepted::Stored]);
    bed.store.release(&lease).unwrap();
    id
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
