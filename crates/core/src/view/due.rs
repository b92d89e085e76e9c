//! The newest result of one test on one node, and when the test is next due.

use serde::Serialize;

use crate::{
    finding::Verdict,
    ids::RunId,
    plan,
    policy::TestPolicy,
    reason::ReasonCode,
    snapshot::{NodeRecord, Snapshot, TestRecord},
    time::Timestamp,
};

/// The newest result of one test on one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LatestResult {
    pub at: Timestamp,
    pub verdict: Verdict,
    pub reason: ReasonCode,
    pub run: Option<RunId>,
    /// The newest pass or fail.
    pub conclusive: Option<(Verdict, Timestamp)>,
    /// Inconclusive results since then.
    pub misses: u32,
}

/// When a test is next due.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Due {
    /// It never ran, or it is due.
    Now,
    /// The last result is still valid.
    At { at: Timestamp },
    /// The last result was inconclusive; the test is retried then.
    Retry { at: Timestamp, misses: u32 },
    /// The node's agent runs it, every few minutes.
    ByAgent,
}

impl Due {
    /// Computes the due time in the same way as the planner.
    pub fn of(snapshot: &Snapshot, node: &NodeRecord, test: &TestPolicy, known: &TestRecord, now: Timestamp) -> Self {
        if plan::is_run_by_agent(snapshot, node, test) {
            return Self::ByAgent;
        }
        match plan::due_at(snapshot, node, test, known) {
            at if at <= now => Self::Now,
            at if known.misses() > 0 => Self::Retry { at, misses: known.misses() },
            at => Self::At { at },
        }
    }
}

/// Returns whether the newest pass or fail is within the cut-off.
pub(super) fn is_covered(known: &TestRecord, test: &TestPolicy, now: Timestamp) -> bool {
    known.judged().is_some_and(|at| now.since(at) <= test.cutoff)
}
