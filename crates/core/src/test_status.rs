//! Where one test stands on one node: six different words, of which only one is good news.

use crate::{finding::Verdict, policy::TestPolicy, reason::coded, snapshot::TestRecord, time::Timestamp};

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
