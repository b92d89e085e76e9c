//! The score: which faults there were, which were found, how fast, and at what cost. Only this module and `compare`
//! read the truth.

use std::collections::BTreeMap;

use doctor_core::{
    ids::TestId,
    snapshot::TestRecord,
    time::{Span, Timestamp},
};
use serde::Serialize;

use super::session::{Session, SessionError};
use crate::truth::{FaultRecord, Truth};

/// The figures of one simulated period.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Score {
    pub nodes: usize,
    pub virtual_days: f64,
    pub seed: u64,
    /// Faults on nodes that were in service.
    pub faults_injected: usize,
    /// Of these, faults on nodes that we marked before a user complained.
    pub faults_found: usize,
    pub found_by_agents: usize,
    pub found_by_tests: usize,
    /// Faults of which users complained first.
    pub found_by_users: usize,
    /// Healthy machines that were marked as unhealthy.
    pub false_alarms: u32,
    /// From onset until the first mark or complaint, over the faults that have one.
    pub median_hours_to_detect: Option<f64>,
    pub mean_hours_to_detect: Option<f64>,
    /// The same for faults that only a test can detect.
    pub median_hours_to_detect_by_tests: Option<f64>,
    pub validation_node_hours: f64,
    pub user_node_hours: f64,
    pub user_node_hours_lost: f64,
    pub user_jobs: u64,
    /// Jobs that waited for a validation job longer than assumed acceptable.
    pub user_jobs_disturbed: u64,
    pub utilisation: f64,
    /// Share of nodes with a settled result within its cut-off, per test.
    pub coverage: BTreeMap<TestId, f64>,
    /// Per kind of fault.
    pub kinds: BTreeMap<&'static str, KindScore>,
    /// A hash of all effects, equal for equal seeds.
    pub effects_digest: String,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct KindScore {
    pub injected: usize,
    pub found: usize,
    pub median_hours_to_detect: Option<f64>,
}

impl Score {
    /// Returns the current figures of a session.
    ///
    /// # Errors If the store cannot be read.
    #[expect(clippy::cast_precision_loss, reason = "counts of nodes and hours are shown, not compared")]
    pub fn of(session: &Session) -> Result<Self, SessionError> {
        let now = session.now();
        let (truth, nodes, start, seed, digest) = {
            let world = session.backend().world();
            (world.truth(), world.size(), world.config().start, world.config().seed, world.effects().digest())
        };
        // A further fault of a node that is out of service harms no user and need not be found.
        let faults: Vec<&FaultRecord> = truth.faults.iter().filter(|fault| !fault.out_at_onset).collect();
        let found = |passive: bool| faults.iter().filter(|f| f.is_found() && f.kind.is_passive() == passive).count();
        let all = hours_to_detect(faults.iter().copied());
        let by_tests = hours_to_detect(faults.iter().copied().filter(|fault| !fault.kind.is_passive()));
        Ok(Self {
            nodes,
            virtual_days: round(now.since(start).as_hours() / 24.0),
            seed,
            faults_injected: faults.len(),
            faults_found: faults.iter().filter(|fault| fault.is_found()).count(),
            found_by_agents: found(true),
            found_by_tests: found(false),
            found_by_users: faults.iter().filter(|fault| !fault.is_found() && fault.ticket.is_some()).count(),
            false_alarms: truth.false_marks,
            median_hours_to_detect: median(&all).map(round),
            mean_hours_to_detect: (!all.is_empty()).then(|| round(all.iter().sum::<f64>() / all.len() as f64)),
            median_hours_to_detect_by_tests: median(&by_tests).map(round),
            validation_node_hours: round(truth.validation_node_hours),
            user_node_hours: round(truth.users.node_hours),
            user_node_hours_lost: round(truth.users.node_hours_lost),
            user_jobs: truth.users.jobs_started,
            user_jobs_disturbed: truth.users.jobs_disturbed,
            utilisation: round(truth.users.utilisation),
            coverage: coverage(session, nodes, now)?,
            kinds: kinds(&truth),
            effects_digest: format!("{digest:016x}"),
        })
    }
}

fn kinds(truth: &Truth) -> BTreeMap<&'static str, KindScore> {
    let mut kinds: BTreeMap<&'static str, Vec<&FaultRecord>> = BTreeMap::new();
    for fault in truth.faults.iter().filter(|fault| !fault.out_at_onset) {
        kinds.entry(fault.kind.code()).or_default().push(fault);
    }
    let score = |faults: Vec<&FaultRecord>| KindScore {
        injected: faults.len(),
        found: faults.iter().filter(|fault| fault.is_found()).count(),
        median_hours_to_detect: median(&hours_to_detect(faults.into_iter())).map(round),
    };
    kinds.into_iter().map(|(kind, faults)| (kind, score(faults))).collect()
}

fn hours_to_detect<'a>(faults: impl Iterator<Item = &'a FaultRecord>) -> Vec<f64> {
    let mut hours: Vec<f64> = faults.filter_map(FaultRecord::time_to_detect).map(Span::as_hours).collect();
    hours.sort_by(f64::total_cmp);
    hours
}

#[expect(clippy::cast_precision_loss, reason = "a share of a count of nodes")]
fn coverage(session: &Session, nodes: usize, now: Timestamp) -> Result<BTreeMap<TestId, f64>, SessionError> {
    let stored = session.store().load_nodes()?;
    let coverage = session.settings().tests.iter().map(|test| {
        let fresh = stored.values().filter(|node| {
            let settled = node.records.get(&test.id).and_then(TestRecord::settled);
            settled.is_some_and(|at| now.since(at) <= test.cutoff)
        });
        (test.id.clone(), round(fresh.count() as f64 / nodes.max(1) as f64))
    });
    Ok(coverage.collect())
}

pub(super) fn median(sorted: &[f64]) -> Option<f64> {
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// Rounds to three decimals, so that repeated outputs are equal.
pub(super) fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}
