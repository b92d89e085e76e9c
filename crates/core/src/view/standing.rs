//! Where one test stands on one node: six different words, of which only one is good news.

use serde::Serialize;

use crate::{
    finding::Verdict,
    ids::RunId,
    plan,
    policy::TestPolicy,
    reason::{ReasonCode, coded},
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

coded! {
    /// What may be said of a test on a node now.
    pub enum Standing {
        /// A passing result that is not too old.
        Pass => "pass",
        /// It failed, and nothing said the contrary since. A failure does not heal by growing old.
        Fail => "fail",
        /// The newest result says nothing about the node.
        Inconclusive => "inconclusive",
        /// There is nothing of this kind on the node, and that was found out not too long ago.
        NotApplicable => "not-applicable",
        /// It passed or did not apply once, longer ago than the cut-off.
        Stale => "stale",
        NeverTested => "never-tested",
    }
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

impl Standing {
    pub fn of(known: &TestRecord, test: &TestPolicy, now: Timestamp) -> Self {
        let Some((verdict, newest)) = known.verdict().zip(known.attempt()) else { return Self::NeverTested };
        let old = now.since(newest) > test.cutoff;
        match verdict {
            Verdict::Fail => Self::Fail,
            Verdict::Inconclusive => Self::Inconclusive,
            Verdict::Pass | Verdict::NotApplicable if old => Self::Stale,
            Verdict::Pass => Self::Pass,
            Verdict::NotApplicable => Self::NotApplicable,
        }
    }

    /// For tables: words a person would say.
    pub const fn word(self) -> &'static str {
        match self {
            Self::NotApplicable => "not applicable",
            Self::NeverTested => "never tested",
            other => other.code(),
        }
    }
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
