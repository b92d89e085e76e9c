//! Runs and the documents that nodes would send for them: the memory check, with captured output.

use std::collections::BTreeMap;

use anyhow::Result;
use doctor_checks::{
    Catalogue,
    document::{Document, RunKey, TestEvidence},
    probe::{Probe, ProbeOutput},
};
use doctor_core::{
    finding::Verdict,
    ids::{IdSource, NodeName, TestId},
    node::Hardware,
    plan::Action,
    policy::Policy,
    profile::Profiles,
    reason::WithReason,
    run::{NonEmpty, Purpose, Run, RunState},
    time::{Span, Timestamp},
};
use doctor_engine::settings::Settings;
use doctor_store::{
    Lease, Store,
    records::{CycleIntent, StoredRun},
};

use crate::random::spread;

/// The percentage of documents that report a fault.
pub(super) const FAILING_PERCENT: u64 = 1;

const HEALTHY: &str = include_str!("../../../checks/fixtures/memory/healthy.txt");
const FAILING: &str = include_str!("../../../checks/fixtures/memory/nothing-available.txt");
const TEST: &str = "memory";
const SOURCE: &str = "/proc/meminfo";
/// The number of consecutive runs whose results may arrive in any order.
const NEIGHBOURS: usize = 256;
/// Runs per transaction.
const CYCLE: usize = 1_000;

/// A run, and its document.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) run: StoredRun,
    pub(super) node: NodeName,
    pub(super) document: Vec<u8>,
    pub(super) received: Timestamp,
    /// The expected verdict.
    pub(super) verdict: Verdict,
}

pub(super) fn settings() -> Result<Settings> {
    Ok(Settings::new(Policy::built_in(), Catalogue::built_in(), Profiles::default())?)
}

/// Returns the size of a usual document before compression.
pub(super) fn size() -> usize {
    Plans::new(1).jobs().map_or(0, |jobs| jobs.iter().map(|job| job.document.len()).sum())
}

/// Generates one run per node, repeatedly. At this rate each node reports every few minutes at least.
#[derive(Debug)]
pub(super) struct Plans {
    nodes: Vec<NodeName>,
    ids: IdSource,
    now: Timestamp,
}

impl Plans {
    pub(super) fn new(nodes: usize) -> Self {
        let nodes = (0..nodes).map(|index| NodeName::new(&format!("node{index:05}")).expect("a plain name")).collect();
        Self { nodes, ids: IdSource::new(5), now: Timestamp::from_secs(1_794_700_800) }
    }

    pub(super) const fn now(&self) -> Timestamp {
        self.now
    }

    pub(super) const fn wait(&mut self) {
        self.now = self.now.plus(Span::minutes(5));
    }

    /// Returns the jobs of a round. Runs are planned in an order unrelated to node names. Results arrive roughly in
    /// that order, with neighbouring runs overtaking each other.
    pub(super) fn jobs(&mut self) -> Result<Vec<Job>> {
        self.ids.set_time(self.now);
        let mut nodes = self.nodes.clone();
        let round = self.now.millis().cast_unsigned();
        nodes.sort_by_cached_key(|node| node.as_str().bytes().fold(round, |seen, byte| spread(seen ^ u64::from(byte))));
        let mut jobs = nodes.into_iter().map(|node| self.job(node)).collect::<Result<Vec<Job>>>()?;
        for neighbours in jobs.chunks_mut(NEIGHBOURS) {
            neighbours.sort_by_cached_key(|job| spread(job.run.run.id.number()));
        }
        Ok(jobs)
    }

    fn job(&mut self, node: NodeName) -> Result<Job> {
        let test = TestId::new(TEST)?;
        let run = Run {
            id: self.ids.run(),
            nodes: NonEmpty::one(node.clone()),
            tests: NonEmpty::one(test.clone()),
            state: RunState::Planned,
            purpose: WithReason::new(Purpose::Validation, "stale", "last result 8d ago"),
            case: None,
            planned: self.now,
            limit: Span::minutes(30),
        };
        let luck = spread(run.id.number());
        let failing = luck % 100 < FAILING_PERCENT;
        let (started, ended) = (self.now.plus(Span::from_secs(20)), self.now.plus(Span::from_secs(21)));
        let text = if failing { FAILING } else { HEALTHY };
        let probe = (Probe::Read { path: SOURCE.to_owned() }, ProbeOutput::Text(text.to_owned()));
        let document = Document {
            run: run.id,
            node: node.clone(),
            hardware: hardware(&node),
            started,
            ended,
            tests: vec![TestEvidence { test, started, ended, probes: vec![probe] }],
            uptime: None,
            machine: None,
        };
        let mut secret = [0; 32];
        for (index, bytes) in secret.chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&spread(luck ^ index as u64).to_le_bytes());
        }
        let key = RunKey::new(secret);
        let document = document.sign(&key)?;
        let run = StoredRun { run, key, started: None, cancelling: None };
        let verdict = if failing { Verdict::Fail } else { Verdict::Pass };
        Ok(Job { run, node, document, received: ended.plus(Span::from_secs(2)), verdict })
    }

    /// Commits the runs, as the cycle does before it submits them.
    pub(super) fn commit(&self, store: &Store, lease: &Lease, jobs: &[Job]) -> Result<()> {
        let policy = Policy::built_in();
        for jobs in jobs.chunks(CYCLE) {
            let keys: BTreeMap<_, _> = jobs.iter().map(|job| (job.run.run.id, job.run.key.clone())).collect();
            let submit =
                |job: &Job| WithReason::new(Action::Submit(job.run.run.clone()), "stale", "last result 8d ago");
            let actions: Vec<_> = jobs.iter().map(submit).collect();
            let intent = CycleIntent {
                at: self.now,
                actions: &actions,
                keys: &keys,
                attributed_findings: &[],
                changed_reasons: &[],
                policy_version: policy.version,
                retry: &policy.retry,
                notifications: &[],
            };
            store.commit(lease, &intent)?;
        }
        Ok(())
    }
}

fn hardware(node: &NodeName) -> Hardware {
    Hardware { board_serial: Some(format!("SN-{node}")), boot_id: Some("5b1f0a7e".to_owned()), ..Hardware::default() }
}
