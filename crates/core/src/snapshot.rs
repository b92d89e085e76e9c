//! Everything the planner may look at, gathered at one moment. What could not be learnt is `Unknown`, never absent.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{
    case::Case,
    finding::{OpenFinding, Verdict},
    ids::{CaseId, HardwareId, NodeName, PoolName, RunId, TestId},
    lifecycle::Life,
    node::{Hold, Node},
    policy::{Policy, TestPolicy},
    run::{CancelWhy, JobSeen, Run},
    time::{Span, Timestamp},
};

#[derive(Debug, Clone)]
pub struct Snapshot {
    pub at: Timestamp,
    /// By name, each once.
    pub nodes: Vec<NodeRecord>,
    /// Runs that have not ended.
    pub runs: Vec<ActiveRun>,
    /// Open cases, and closed ones that the ladder still remembers.
    pub cases: Vec<Case>,
    pub recent: RecentActions,
    /// Validation node-hours spent since midnight UTC, without running work.
    pub spent: Span,
    pub breaker: Breaker,
    pub pauses: Vec<Pause>,
    pub requests: Vec<Request>,
    /// Whether the present silence of agents has been reported already.
    pub silence_reported: bool,
    pub caps: Caps,
    pub policy: Arc<Policy>,
    /// What can be tested, in a fixed order; `NodeRecord::records` follows it.
    pub tests: Arc<[TestPolicy]>,
}

/// A node, with all that the store knows about it.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeRecord {
    pub node: Node,
    pub life: Life,
    /// When `life` last changed.
    pub since: Timestamp,
    /// One for each of `Snapshot::tests`.
    pub records: Box<[TestRecord]>,
    pub findings: Vec<OpenFinding>,
    pub backoff: Option<Backoff>,
    pub hold: Option<Hold>,
    /// The machine this name last stood for.
    pub hardware: Option<HardwareId>,
    pub case: Option<CaseId>,
    /// When its agent last spoke. `None`: no agent is expected here.
    pub heard: Option<Timestamp>,
}

impl NodeRecord {
    /// The operator's hold that is in force at this moment. One whose time is over stays written down and binds nobody.
    pub fn hold_at(&self, at: Timestamp) -> Option<&Hold> {
        self.hold.as_ref().filter(|hold| hold.until.is_none_or(|until| until > at))
    }
}

/// What is known of one test on one node, small because there are a million of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TestRecord {
    /// The newest result that says something (pass, fail, not applicable); `Timestamp::MIN` if there is none.
    settled: Timestamp,
    /// The newest result of any kind; `Timestamp::MIN` if there is none.
    attempt: Timestamp,
    verdict: Option<Verdict>,
    /// Inconclusive results since the newest that says something.
    misses: u32,
}

impl TestRecord {
    pub const NEVER: Self = Self { settled: Timestamp::MIN, attempt: Timestamp::MIN, verdict: None, misses: 0 };

    /// Adds a result. Results that arrive out of order count by their time.
    pub fn add(&mut self, verdict: Verdict, at: Timestamp) {
        if verdict == Verdict::Inconclusive {
            if at >= self.settled {
                self.misses = self.misses.saturating_add(1);
            }
        } else if at >= self.settled {
            self.settled = at;
            self.misses = 0;
        }
        if at >= self.attempt {
            self.attempt = at;
            self.verdict = Some(verdict);
        }
    }

    /// From stored columns.
    pub fn restore(settled: Option<Timestamp>, last: Option<(Verdict, Timestamp)>, misses: u32) -> Self {
        Self {
            settled: settled.unwrap_or(Timestamp::MIN),
            attempt: last.map_or(Timestamp::MIN, |(_, at)| at),
            verdict: last.map(|(verdict, _)| verdict),
            misses,
        }
    }

    pub fn settled(&self) -> Option<Timestamp> {
        (self.settled != Timestamp::MIN).then_some(self.settled)
    }

    pub fn attempt(&self) -> Option<Timestamp> {
        (self.attempt != Timestamp::MIN).then_some(self.attempt)
    }

    /// The newest result of any kind.
    pub const fn verdict(&self) -> Option<Verdict> {
        self.verdict
    }

    pub const fn misses(&self) -> u32 {
        self.misses
    }

    /// When it is due (again). `Timestamp::MIN`: never tested.
    pub fn due(&self, cutoff: Span, retry: Span, retry_cap: Span) -> Timestamp {
        let stale = if self.settled == Timestamp::MIN { self.settled } else { self.settled.plus(cutoff) };
        if self.misses == 0 { stale } else { stale.max(self.attempt.plus(self.backoff(retry, retry_cap))) }
    }

    /// How long after the last try the next one may be: longer after each that said nothing.
    pub fn backoff(&self, retry: Span, retry_cap: Span) -> Span {
        self.misses.checked_sub(1).map_or(Span::ZERO, |before| retry.doubled(before, retry_cap))
    }

    /// What it is ordered by: the older, the sooner. A test that keeps saying nothing queues by its last try, so
    /// that it cannot keep those behind it waiting.
    pub const fn age_key(&self) -> Timestamp {
        if self.misses == 0 { self.settled } else { self.attempt }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct ActiveRun {
    pub run: Run,
    /// What the backend said of it just now.
    pub seen: JobSeen,
    /// Whether the node was ever seen executing it. Once true, it stays true.
    pub started: Option<Timestamp>,
    pub cancelling: Option<Cancelling>,
    /// Since when the backend has known no such job.
    pub absent_since: Option<Timestamp>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cancelling {
    pub why: CancelWhy,
    pub since: Timestamp,
}

/// A node is left alone until then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backoff {
    pub until: Timestamp,
    /// Jobs in a row that did not start.
    pub times: u32,
}

/// What was done lately, for the breaker.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecentActions {
    /// Moments at which a node was taken out automatically, within the last hour.
    pub taken_out: Vec<(NodeName, Timestamp)>,
}

/// The circuit breaker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Breaker {
    /// Nodes may be taken out. Only what happened after `since` counts against the hourly limit.
    Closed { since: Option<Timestamp> },
    /// Nothing more is marked until an operator closes it.
    Open { since: Timestamp, why: String },
}

/// An operator's word that no validation starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    /// Absent: everywhere.
    pub pool: Option<PoolName>,
    pub by: String,
    pub why: String,
    pub since: Timestamp,
    pub until: Option<Timestamp>,
}

/// Something an operator asked for, not yet seen to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    pub id: u64,
    pub by: String,
    pub why: String,
    pub at: Timestamp,
    pub what: Asked,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum Asked {
    /// Run these tests as soon as the node is free. No tests: all that apply.
    Test {
        node: NodeName,
        tests: Vec<TestId>,
    },
    /// Prove the node and give it back.
    Release {
        node: NodeName,
    },
    /// Take the node out of service.
    Quarantine {
        node: NodeName,
    },
    Withdraw {
        run: RunId,
    },
}

/// What a backend can do, as data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caps {
    pub mark: bool,
    pub drain: bool,
    pub reset: bool,
    pub reboot: bool,
    pub replace: bool,
}

impl Caps {
    pub const ALL: Self = Self { mark: true, drain: true, reset: true, reboot: true, replace: true };
    pub const NONE: Self = Self { mark: false, drain: false, reset: false, reboot: false, replace: false };
}

#[cfg(test)]
mod tests {
    use super::*;

    const CUTOFF: Span = Span::days(7);
    const RETRY: Span = Span::minutes(30);
    const CAP: Span = Span::days(1);

    fn at(hours: i64) -> Timestamp {
        Timestamp::from_secs(1_794_700_800).plus(Span::hours(hours))
    }

    fn after(results: &[(Verdict, i64)]) -> TestRecord {
        let mut record = TestRecord::NEVER;
        for (verdict, hours) in results {
            record.add(*verdict, at(*hours));
        }
        record
    }

    #[test]
    fn what_says_something_settles_a_test_for_one_cut_off_and_what_does_not_waits_longer_each_time() {
        use Verdict::{Fail, Inconclusive, NotApplicable, Pass};
        let minutes = |hours: i64, minutes| at(hours).plus(Span::minutes(minutes));
        for (results, due) in [
            (vec![], Timestamp::MIN),
            (vec![(Pass, 0)], at(0).plus(CUTOFF)),
            (vec![(Fail, 0)], at(0).plus(CUTOFF)),
            (vec![(NotApplicable, 0)], at(0).plus(CUTOFF)),
            (vec![(Inconclusive, 0)], minutes(0, 30)),
            (vec![(Inconclusive, 0), (Inconclusive, 1)], minutes(1, 60)),
            (vec![(Inconclusive, 0), (Inconclusive, 1), (Inconclusive, 2)], minutes(2, 120)),
            (vec![(Pass, 0), (Inconclusive, 200)], minutes(200, 30)),
            (vec![(Pass, 0), (Inconclusive, 1)], at(0).plus(CUTOFF)),
            (vec![(Inconclusive, 0), (Pass, 1)], at(1).plus(CUTOFF)),
        ] {
            assert_eq!(after(&results).due(CUTOFF, RETRY, CAP), due, "{results:?}");
        }
    }

    #[test]
    fn a_late_result_counts_by_its_time() {
        let record = after(&[(Verdict::Pass, 5), (Verdict::Inconclusive, 3)]);
        assert_eq!((record.verdict(), record.misses()), (Some(Verdict::Pass), 0));
        assert_eq!((record.settled(), record.attempt()), (Some(at(5)), Some(at(5))));
    }

    #[test]
    fn a_test_that_keeps_saying_nothing_queues_by_its_last_try() {
        assert_eq!(after(&[]).age_key(), Timestamp::MIN);
        assert_eq!(after(&[(Verdict::Pass, 1)]).age_key(), at(1));
        assert_eq!(after(&[(Verdict::Pass, 1), (Verdict::Inconclusive, 9)]).age_key(), at(9));
    }
}
