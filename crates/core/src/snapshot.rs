//! Everything the planner may look at, gathered at one moment. What could not be learnt is `Unknown`, never absent.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{
    case::Case,
    classify::JudgedWhy,
    failed_work::{FailedHere, Weight},
    finding::{OpenFinding, Verdict},
    ids::{CaseId, HardwareId, NodeName, PoolName, RunId, TestId},
    lifecycle::Life,
    node::{Hold, Node},
    policy::{Policy, TestPolicy},
    run::{CancelWhy, JobSeen, NonEmpty, Outcome, Run, RunEnd, RunState},
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
    /// What the trials said that requests of [`Asked::Together`] name.
    pub trials: Vec<Trial>,
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
    pub records: Records,
    pub findings: Vec<OpenFinding>,
    pub backoff: Option<Backoff>,
    pub hold: Option<Hold>,
    /// The machine this name last stood for.
    pub hardware: Option<HardwareId>,
    pub case: Option<CaseId>,
    /// When its agent last spoke. `None`: no agent is expected here.
    pub heard: Option<Timestamp>,
    /// User work that failed here within `Policy::user_work.window`.
    pub failed: Option<Arc<FailedHere>>,
}

impl NodeRecord {
    /// The operator's hold that is in force at this moment. One whose time is over stays written down and binds nobody.
    pub fn hold_at(&self, at: Timestamp) -> Option<&Hold> {
        self.hold.as_ref().filter(|hold| hold.until.is_none_or(|until| until > at))
    }

    /// How much failed user work speaks for looking at it soon.
    pub fn risk(&self) -> Weight {
        self.failed.as_ref().map_or(Weight::NONE, |failed| failed.weight)
    }
}

/// What is known of every test on one node, in the order of `Snapshot::tests`. Nodes of which the same is known may share it: of
/// a new cluster nothing is known of any, and eighty tests on each of thousands of nodes are more than all else about them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Records(Arc<[TestRecord]>);

impl Records {
    /// None of so many tests was ever run.
    pub fn never(tests: usize) -> Self {
        std::iter::repeat_n(TestRecord::NEVER, tests).collect()
    }
}

impl std::ops::Deref for Records {
    type Target = [TestRecord];

    fn deref(&self) -> &[TestRecord] {
        &self.0
    }
}

/// What is changed is one's own from then on.
impl std::ops::DerefMut for Records {
    fn deref_mut(&mut self) -> &mut [TestRecord] {
        Arc::make_mut(&mut self.0)
    }
}

impl<'a> IntoIterator for &'a Records {
    type Item = &'a TestRecord;
    type IntoIter = std::slice::Iter<'a, TestRecord>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl FromIterator<TestRecord> for Records {
    fn from_iter<I: IntoIterator<Item = TestRecord>>(records: I) -> Self {
        Self(records.into_iter().collect())
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
    /// Whether the newest result that says something is a pass or fail, and not that there is nothing to test.
    judged: bool,
    /// Inconclusive results since the newest that says something.
    misses: u32,
}

impl TestRecord {
    pub const NEVER: Self =
        Self { settled: Timestamp::MIN, attempt: Timestamp::MIN, verdict: None, judged: false, misses: 0 };

    /// Adds a result. Results that arrive out of order count by their time.
    pub fn add(&mut self, verdict: Verdict, at: Timestamp) {
        if verdict == Verdict::Inconclusive {
            if at >= self.settled {
                self.misses = self.misses.saturating_add(1);
            }
        } else if at >= self.settled {
            // Of two of the same moment the pass or fail counts, in whatever order they come.
            self.judged = verdict.is_conclusive() || (self.judged && at == self.settled);
            self.settled = at;
            self.misses = 0;
        }
        if at >= self.attempt {
            self.attempt = at;
            self.verdict = Some(verdict);
        }
    }

    /// From stored columns. `judged`: the newest pass or fail.
    pub fn restore(
        settled: Option<Timestamp>,
        judged: Option<Timestamp>,
        last: Option<(Verdict, Timestamp)>,
        misses: u32,
    ) -> Self {
        Self {
            settled: settled.unwrap_or(Timestamp::MIN),
            judged: judged.is_some() && judged == settled,
            attempt: last.map_or(Timestamp::MIN, |(_, at)| at),
            verdict: last.map(|(verdict, _)| verdict),
            misses,
        }
    }

    pub fn settled(&self) -> Option<Timestamp> {
        (self.settled != Timestamp::MIN).then_some(self.settled)
    }

    /// The newest pass or fail, unless it was found since that there is nothing to test.
    pub fn judged(&self) -> Option<Timestamp> {
        self.settled().filter(|_| self.judged)
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
    /// Take the node out of service and examine it; a person decides then.
    Quarantine {
        node: NodeName,
        /// Whether user work on it is asked to leave, or may finish.
        #[serde(default)]
        evict: bool,
    },
    Withdraw {
        run: RunId,
    },
    /// Run this test over all these nodes together; if they fail, find out which of them is at fault.
    Together {
        nodes: NonEmpty<NodeName>,
        test: TestId,
        /// Runs that were made for it so far.
        #[serde(default)]
        trials: Vec<RunId>,
    },
}

/// A run over several nodes that was made for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trial {
    pub run: RunId,
    pub nodes: NonEmpty<NodeName>,
    pub said: TrialSaid,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrialSaid {
    /// It has not ended.
    NotYet,
    Passed,
    /// The nodes failed together, and nothing says which of them it was.
    Failed,
    /// These failed by what each measured of itself.
    Named(Vec<NodeName>),
    /// It brought no answer.
    Nothing(String),
}

impl Trial {
    /// What a run says about its nodes; `reason` of an outcome is [`JudgedWhy::FailedTogether`] where they failed as one.
    pub fn of(run: &Run) -> Self {
        let said = match &run.state {
            RunState::Planned | RunState::Submitted { .. } | RunState::Running { .. } => TrialSaid::NotYet,
            RunState::Ended(RunEnd::Completed(report)) => weigh(&report.outcomes, None),
            RunState::Ended(RunEnd::Incomplete { why, partial }) => {
                weigh(partial.as_ref().map_or(&[], |report| &report.outcomes), Some(why.code()))
            }
            RunState::Ended(RunEnd::NotStarted(why)) => TrialSaid::Nothing(why.code().to_owned()),
        };
        Self { run: run.id, nodes: run.nodes.clone(), said }
    }
}

fn weigh(outcomes: &[Outcome], incomplete: Option<&str>) -> TrialSaid {
    let failed = outcomes.iter().filter(|outcome| outcome.verdict == Verdict::Fail);
    let mut named: Vec<NodeName> = failed.map(|outcome| outcome.node.clone()).collect();
    named.dedup();
    if !named.is_empty() {
        return TrialSaid::Named(named);
    }
    if outcomes.iter().any(|outcome| outcome.reason.as_str() == JudgedWhy::FailedTogether.code()) {
        return TrialSaid::Failed;
    }
    let silent = outcomes.iter().find(|outcome| outcome.verdict != Verdict::Pass);
    match (incomplete, silent) {
        (Some(why), _) => TrialSaid::Nothing(why.to_owned()),
        (None, Some(outcome)) => TrialSaid::Nothing(format!("{}: {}", outcome.node, outcome.reason)),
        (None, None) if outcomes.is_empty() => TrialSaid::Nothing("no result".to_owned()),
        (None, None) => TrialSaid::Passed,
    }
}

/// What a backend can do, as data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caps {
    pub mark: bool,
    pub drain: bool,
    /// User work can be asked to leave.
    pub evict: bool,
    pub reset: bool,
    pub reboot: bool,
    pub replace: bool,
}

impl Caps {
    pub const ALL: Self = Self { mark: true, drain: true, evict: true, reset: true, reboot: true, replace: true };
    pub const NONE: Self =
        Self { mark: false, drain: false, evict: false, reset: false, reboot: false, replace: false };
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
