//! Test bed for the store: a store of each kind, and verbs to drive it.

pub(crate) mod postgres;

use std::{collections::BTreeMap, path::PathBuf};

use doctor_checks::document::RunKey;
use doctor_core::{
    finding::{Evidence, Finding, Remedy, Severity, Verdict},
    ids::{IdSource, NodeName, RuleId, RunId, TestId},
    node::Hardware,
    observation::{Entity, EntityKind},
    plan::{Action, Conclusion, SkipReason},
    policy::{Policy, Retry},
    reason::{ReasonCode, WithReason},
    run::{NonEmpty, Outcome, Purpose, Run, RunState},
    time::{Span, Timestamp},
};
use doctor_store::{
    Lease, Store, StoreUrl,
    records::{Accepted, ClassifiedResult, CycleId, CycleIntent},
};

/// A store under test, with a lease and a clock that only the test advances.
pub(crate) struct StoreTestbed {
    pub(crate) store: Store,
    pub(crate) lease: Lease,
    pub(crate) now: Timestamp,
    pub(crate) ids: IdSource,
    pub(crate) folder: tempfile::TempDir,
    pub(crate) url: Option<StoreUrl>,
    keys: u8,
}

pub(crate) fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

pub(crate) fn test(name: &str) -> TestId {
    TestId::new(name).unwrap()
}

pub(crate) fn retry() -> Retry {
    Policy::built_in().retry
}

impl StoreTestbed {
    fn from_store(store: Store, url: Option<StoreUrl>) -> Self {
        let now = Timestamp::from_secs(1_794_700_800);
        let lease = store.acquire("tests", now, Span::days(36_500)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        Self { store, lease, now, ids: IdSource::new(7), folder, url, keys: 0 }
    }

    pub(crate) fn memory() -> Self {
        Self::from_store(Store::open_in_memory().unwrap(), None)
    }

    pub(crate) fn file() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = StoreUrl::Sqlite(folder.path().join("doctor.db"));
        let mut bed = Self::from_store(Store::open(&url).unwrap(), Some(url));
        bed.folder = folder;
        bed
    }

    /// Opens an existing store.
    pub(crate) fn at(url: &StoreUrl) -> Self {
        Self::from_store(Store::open(url).unwrap(), Some(url.clone()))
    }

    /// Returns where a store is that other processes can open.
    pub(crate) fn url(&self) -> &StoreUrl {
        self.url.as_ref().expect("a store in memory has no address")
    }

    /// Reopens the store, as after a restart of the controller.
    pub(crate) fn reopen(&mut self) {
        self.store = Store::open(self.url.as_ref().unwrap()).unwrap();
        self.lease = self.store.acquire("tests", self.now, Span::days(36_500)).unwrap();
    }

    /// Returns `None`, after printing so, where there is no PostgreSQL.
    pub(crate) fn postgres() -> Option<Self> {
        let url = postgres::new_database()?;
        Some(Self::from_store(Store::open(&url).unwrap(), Some(url)))
    }

    /// As [`Self::postgres`], on a server that requires TLS.
    pub(crate) fn postgres_over_tls() -> Option<Self> {
        let url = postgres::new_database_over_tls()?;
        Some(Self::from_store(Store::open(&url).unwrap(), Some(url)))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn wait(&mut self, span: Span) -> Timestamp {
        self.now = self.now.plus(span);
        self.now
    }

    pub(crate) fn commit(&mut self, actions: &[WithReason<Action>]) -> CycleId {
        self.commit_reasons(actions, &[])
    }

    pub(crate) fn commit_reasons(
        &mut self,
        actions: &[WithReason<Action>],
        reasons: &[(NodeName, SkipReason)],
    ) -> CycleId {
        self.try_commit(actions, reasons).unwrap()
    }

    pub(crate) fn try_commit(
        &mut self,
        actions: &[WithReason<Action>],
        changed_reasons: &[(NodeName, SkipReason)],
    ) -> Result<CycleId, doctor_store::StoreError> {
        let mut keys = BTreeMap::new();
        for action in actions {
            if let Action::Submit(run) = &action.value {
                self.keys = self.keys.wrapping_add(1);
                keys.insert(run.id, RunKey::new([self.keys; 32]));
            }
        }
        let intent = CycleIntent {
            at: self.now,
            actions,
            keys: &keys,
            attributed_findings: &[],
            changed_reasons,
            policy_version: 3,
            retry: &retry(),
            notifications: &[],
        };
        self.store.commit(&self.lease, &intent)
    }

    pub(crate) fn run_on(&mut self, nodes: &[&str], tests: &[&str]) -> Run {
        self.ids.set_time(self.now);
        Run {
            id: self.ids.run(),
            nodes: NonEmpty::new(nodes.iter().map(|name| node(name)).collect()).unwrap(),
            tests: NonEmpty::new(tests.iter().map(|name| test(name)).collect()).unwrap(),
            state: RunState::Planned,
            purpose: WithReason::new(Purpose::Validation, "due", "never tested"),
            case: None,
            planned: self.now,
            limit: Span::minutes(30),
        }
    }

    /// Plans a run of these tests on one node.
    pub(crate) fn plan(&mut self, name: &str, tests: &[&str]) -> RunId {
        let run = self.run_on(&[name], tests);
        let id = run.id;
        self.commit(&[WithReason::new(Action::Submit(run), "due", "never tested")]);
        id
    }

    pub(crate) fn conclude(&mut self, run: RunId, end: Conclusion) {
        self.commit(&[WithReason::new(Action::Conclude { run, end }, "over", "no result came")]);
    }

    pub(crate) fn result(&self, run: RunId, name: &str, outcomes: Vec<Outcome>) -> ClassifiedResult {
        ClassifiedResult {
            run,
            node: node(name),
            outcomes,
            hardware: hardware(name),
            evidence: format!("raw output of {run} on {name}").into_bytes(),
            complete: true,
            received: self.now,
            policy_version: 3,
            profile_version: Some(1),
        }
    }

    pub(crate) fn accept(&self, results: &[ClassifiedResult]) -> Vec<Accepted> {
        self.store.accept(&self.lease, results).unwrap()
    }

    /// Plans, runs and accepts one test with this verdict, at the current time.
    pub(crate) fn run_test(&mut self, name: &str, test: &str, verdict: Verdict) -> RunId {
        let run = self.plan(name, &[test]);
        let outcome = self.outcome(name, test, verdict);
        assert_eq!(self.accept(&[self.result(run, name, vec![outcome])]), [Accepted::Stored]);
        run
    }

    pub(crate) fn outcome(&self, name: &str, of: &str, verdict: Verdict) -> Outcome {
        let findings = if verdict == Verdict::Fail { vec![finding(of, "gpu-hot", 3)] } else { Vec::new() };
        let reason = match verdict {
            Verdict::Pass => "within-limits",
            Verdict::Fail => "too-hot",
            Verdict::Inconclusive => "timed-out",
            Verdict::NotApplicable => "no-gpu",
        };
        Outcome {
            node: node(name),
            test: test(of),
            verdict,
            reason: ReasonCode::fixed(reason),
            at: self.now,
            duration: Span::from_secs(90),
            findings,
        }
    }

    /// Asserts that the store is consistent.
    pub(crate) fn assert_sound(&self) {
        let verified = self.store.verify().unwrap();
        assert!(verified.is_consistent(), "{:#?}", verified.problems);
    }
}

pub(crate) fn hardware(of: &str) -> Hardware {
    Hardware { board_serial: Some(format!("SN-{of}")), boot_id: Some("boot-1".to_owned()), ..Hardware::default() }
}

pub(crate) fn finding(check: &str, rule: &str, gpu: u32) -> Finding {
    Finding {
        check: test(check),
        entity: Entity::new(EntityKind::Gpu, gpu.to_string()),
        verdict: Verdict::Fail,
        severity: Severity::Reset,
        remedy: Remedy::Reset,
        reason: ReasonCode::fixed("too-hot"),
        text: format!("gpu {gpu} is at 95 C"),
        rule: RuleId::new(rule).unwrap(),
        evidence: Evidence::Measured { metric: "temperature".to_owned(), value: 95.0, limit: 90.0 },
        confirm: 2,
    }
}
