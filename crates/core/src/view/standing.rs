//! The newest result of one test on one node, and when the test is next wanted.

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
pub struct Latest {
    pub at: Timestamp,
    pub verdict: Verdict,
    pub reason: ReasonCode,
    pub run: Option<RunId>,
    /// The newest pass or fail.
    pub conclusive: Option<(Verdict, Timestamp)>,
    /// Results since then that said nothing.
    pub misses: u32,
}

/// When a test is next wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Due {
    /// It never ran, or its time has come.
    Now,
    /// The last result still holds.
    At { at: Timestamp },
    /// The last result said nothing; it is tried again then.
    Retry { at: Timestamp, misses: u32 },
}

impl Due {
    /// As the planner has it.
    pub fn of(snapshot: &Snapshot, node: &NodeRecord, test: &TestPolicy, known: &TestRecord, now: Timestamp) -> Self {
        match plan::due_at(snapshot, node, test, known) {
            at if at <= now => Self::Now,
            at if known.misses() > 0 => Self::Retry { at, misses: known.misses() },
            at => Self::At { at },
        }
    }
}

/// Whether the newest pass or fail is young enough to count.
pub(super) fn is_covered(known: &TestRecord, test: &TestPolicy, now: Timestamp) -> bool {
    known.judged().is_some_and(|at| now.since(at) <= test.cutoff)
}
