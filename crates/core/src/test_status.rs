//! The status of one test on one node: one of seven values, of which only one is a pass.

use crate::{finding::Verdict, policy::TestPolicy, reason::coded, snapshot::TestRecord, time::Timestamp};

coded! {
    /// The current status of a test on a node.
    pub enum TestStatus {
        /// A passing result that is not too old.
        Pass => "pass",
        /// The newest result is a failure. A failure does not expire.
        Fail => "fail",
        /// The newest result is inconclusive.
        Inconclusive => "inconclusive",
        /// A recent result shows that the node has nothing of this kind.
        NotApplicable => "not-applicable",
        /// A recent result measured values that nothing gives an expected value for.
        NotJudged => "not-judged",
        /// It passed or did not apply, longer ago than the cut-off.
        Stale => "stale",
        NeverTested => "never-tested",
    }
}

impl TestStatus {
    pub fn of(known: &TestRecord, test: &TestPolicy, now: Timestamp) -> Self {
        let Some((verdict, newest)) = known.verdict().zip(known.attempt()) else { return Self::NeverTested };
        let old = now.since(newest) > test.cutoff;
        match verdict {
            Verdict::Fail => Self::Fail,
            Verdict::Inconclusive => Self::Inconclusive,
            Verdict::Pass | Verdict::NotApplicable if old => Self::Stale,
            Verdict::Pass => Self::Pass,
            Verdict::NotApplicable if known.has_not_judged() => Self::NotJudged,
            Verdict::NotApplicable => Self::NotApplicable,
        }
    }

    /// Returns the status in words, for tables.
    pub const fn label(self) -> &'static str {
        match self {
            Self::NotApplicable => "not applicable",
            Self::NotJudged => "not judged",
            Self::NeverTested => "never tested",
            other => other.code(),
        }
    }
}
