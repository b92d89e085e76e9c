//! The complete input of the planner at one moment. What could not be determined is `Unknown`, never absent.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{
    access::Place,
    case::{Case, Repair},
    classify::ClassificationReason,
    finding::{OpenFinding, Verdict},
    ids::{CaseId, HardwareId, NodeName, PoolName, RunId, TestId},
    job_failures::{NodeJobFailures, Weight},
    lifecycle::NodeState,
    node::{Hold, Node},
    policy::{Policy, TestPolicy},
    run::{CancelReason, NonEmpty, ObservedJobState, Outcome, Run, RunEnd, RunState},
    time::{Span, Timestamp},
};

#[derive(Debug, Clone)]
pub struct Snapshot {
    pub at: Timestamp,
    /// When this controller last planned; `None`: not yet since it leads. What an earlier leader requested last, and whether the
    /// cluster answered, is not known then.
    pub planned_at: Option<Timestamp>,
    /// Sorted by name, each once.
    pub nodes: Vec<NodeRecord>,
    /// Runs that have not ended.
    pub runs: Vec<ActiveRun>,
    /// Open cases, and closed ones that the escalation still takes into account.
    pub cases: Vec<Case>,
    pub recent: RecentActions,
    /// Validation node-hours spent since midnight UTC, excluding runs in progress.
    pub spent: Span,
    pub breaker: Breaker,
    pub pauses: Vec<Pause>,
    pub commands: Vec<PendingCommand>,
    /// Results of the runs that [`CommandKind::Test`] and [`CommandKind::MultiNodeTest`] requests name.
    pub trials: Vec<Trial>,
    /// Whether the present silence of agents was already reported.
    pub silence_reported: bool,
    pub capabilities: Capabilities,
    pub policy: Arc<Policy>,
    /// The tests in a fixed order; `NodeRecord::records` has the same order.
    pub tests: Arc<[TestPolicy]>,
}

/// A node with everything that the store knows about it.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeRecord {
    /// Shared with the backend and with other snapshots while it does not change.
    pub node: Arc<Node>,
    pub state: NodeState,
    /// When `state` last changed.
    pub since: Timestamp,
    /// One for each of `Snapshot::tests`.
    pub test_records: TestRecords,
    pub findings: Vec<OpenFinding>,
    pub backoff: Option<Backoff>,
    pub hold: Option<Hold>,
    /// The machine that last had this name.
    pub hardware: Option<HardwareId>,
    pub case: Option<CaseId>,
    /// When its agent last reported. `None`: no agent is expected here.
    pub last_report: Option<Timestamp>,
    /// User work that failed here within `Policy::user_work.window`.
    pub job_failures: Option<Arc<NodeJobFailures>>,
    /// GPUs that the node had when it was last accepted; zero if it never had one. Kept while none is found.
    pub remembered_gpus: u32,
}

impl NodeRecord {
    pub fn name(&self) -> NodeName {
        self.node.name.clone()
    }

    /// Returns the operator's hold that is in force at this moment. An expired hold stays recorded and has no effect.
    pub fn hold_at(&self, at: Timestamp) -> Option<&Hold> {
        self.hold.as_ref().filter(|hold| hold.until.is_none_or(|until| until > at))
    }

    /// Returns whether the node's agent runs this test instead of a job.
    pub fn is_taken_from_agent(&self, test: &TestPolicy) -> bool {
        test.place == Place::Agent && self.last_report.is_some()
    }

    /// Returns whether an agent is deployed on the node and reports.
    pub fn has_live_agent(&self, at: Timestamp, silent_after: Span) -> bool {
        self.last_report.is_some_and(|last_report| at.since(last_report) <= silent_after)
    }

    /// Returns the node for a change. Other holders of it keep the old one.
    pub fn node_mut(&mut self) -> &mut Node {
        Arc::make_mut(&mut self.node)
    }

    /// Returns whether the node name belongs to another machine than before, or to the first one known.
    pub fn is_new_machine(&self) -> bool {
        let Some(hardware) = &self.node.hardware else { return false };
        match &self.hardware {
            Some(before) => !hardware.matches(before) && hardware.is_known(),
            None => hardware.is_known(),
        }
    }

    /// Returns the weight of failed user work, which makes the node be tested sooner.
    pub fn risk(&self) -> Weight {
        self.job_failures.as_ref().map_or(Weight::NONE, |failed| failed.weight)
    }
}

/// The results of every test on one node, in the order of `Snapshot::tests`. Nodes with equal results may share them:
/// in a new cluster no node has any, and eighty tests on each of thousands of nodes would outweigh all other data about
/// them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TestRecords(Arc<[TestRecord]>);

impl TestRecords {
    /// Returns records for this many tests, none of which was ever run.
    pub fn untested(tests: usize) -> Self {
        std::iter::repeat_n(TestRecord::NEVER, tests).collect()
    }
}

impl std::ops::Deref for TestRecords {
    type Target = [TestRecord];

    fn deref(&self) -> &[TestRecord] {
        &self.0
    }
}

/// Copies shared records on write.
impl std::ops::DerefMut for TestRecords {
    fn deref_mut(&mut self) -> &mut [TestRecord] {
        Arc::make_mut(&mut self.0)
    }
}

impl<'a> IntoIterator for &'a TestRecords {
    type Item = &'a TestRecord;
    type IntoIter = std::slice::Iter<'a, TestRecord>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl FromIterator<TestRecord> for TestRecords {
    fn from_iter<I: IntoIterator<Item = TestRecord>>(records: I) -> Self {
        Self(records.into_iter().collect())
    }
}

/// The results of one test on one node. Kept small, because there are a million of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TestRecord {
    /// Time of the newest settling result (pass, fail, not applicable); `Timestamp::MIN` if there is none.
    settled: Timestamp,
    /// Time of the newest result of any kind; `Timestamp::MIN` if there is none.
    attempt: Timestamp,
    verdict: Option<Verdict>,
    /// Whether the newest settling result is a pass or fail, rather than not applicable.
    conclusive: bool,
    /// Inconclusive results since the newest settling one.
    misses: u32,
    /// Whether the newest result has measurements without an expected value.
    not_judged: bool,
}

impl TestRecord {
    pub const NEVER: Self = Self {
        settled: Timestamp::MIN,
        attempt: Timestamp::MIN,
        verdict: None,
        conclusive: false,
        misses: 0,
        not_judged: false,
    };

    /// Adds a result in which everything was judged. Results that arrive out of order count by their time.
    pub fn add(&mut self, verdict: Verdict, at: Timestamp) {
        self.add_with_reason(verdict, false, at);
    }

    /// Adds a result. `not_judged`: some of its measurements have no expected value.
    pub fn add_with_reason(&mut self, verdict: Verdict, not_judged: bool, at: Timestamp) {
        if verdict == Verdict::Inconclusive {
            if at >= self.settled {
                self.misses = self.misses.saturating_add(1);
            }
        } else if at >= self.settled {
            // Of two results of the same moment the pass or fail counts, in whatever order they arrive.
            self.conclusive = verdict.is_conclusive() || (self.conclusive && at == self.settled);
            self.settled = at;
            self.misses = 0;
        }
        if at >= self.attempt {
            self.attempt = at;
            self.verdict = Some(verdict);
            self.not_judged = not_judged;
        }
    }

    /// Restores a record from stored columns. `judged`: the newest pass or fail.
    pub fn restore(
        settled: Option<Timestamp>,
        judged: Option<Timestamp>,
        last: Option<(Verdict, Timestamp)>,
        misses: u32,
    ) -> Self {
        Self {
            settled: settled.unwrap_or(Timestamp::MIN),
            conclusive: judged.is_some() && judged == settled,
            attempt: last.map_or(Timestamp::MIN, |(_, at)| at),
            verdict: last.map(|(verdict, _)| verdict),
            misses,
            not_judged: false,
        }
    }

    /// Returns the record with the newest result marked as having measurements without an expected value, or not.
    #[must_use]
    pub const fn with_not_judged(mut self, not_judged: bool) -> Self {
        self.not_judged = not_judged;
        self
    }

    /// Returns whether the newest result has measurements without an expected value.
    pub const fn has_not_judged(&self) -> bool {
        self.not_judged
    }

    /// Renews the newest result: the test ran again at this time, with the same result.
    pub fn renew(&mut self, at: Timestamp) {
        let Some(verdict) = self.verdict.filter(|_| at > self.attempt) else { return };
        if verdict != Verdict::Inconclusive {
            self.settled = at;
        }
        self.attempt = at;
    }

    /// Combines the results of a test from two sources: runs, and the node's agent. The newest result counts.
    #[must_use]
    pub fn combine(self, other: Self) -> Self {
        let (older, newer) = if self.attempt <= other.attempt { (self, other) } else { (other, self) };
        let settled = older.settled.max(newer.settled);
        let conclusive = [older, newer].iter().any(|record| record.settled == settled && record.conclusive);
        let since = |record: &Self| if record.attempt >= settled { record.misses } else { 0 };
        Self { settled, conclusive, misses: since(&older).saturating_add(since(&newer)), ..newer }
    }

    pub fn settled(&self) -> Option<Timestamp> {
        (self.settled != Timestamp::MIN).then_some(self.settled)
    }

    /// Returns the time of the newest pass or fail, unless the test was found not applicable since.
    pub fn judged(&self) -> Option<Timestamp> {
        self.settled().filter(|_| self.conclusive)
    }

    pub fn attempt(&self) -> Option<Timestamp> {
        (self.attempt != Timestamp::MIN).then_some(self.attempt)
    }

    /// Returns the verdict of the newest result of any kind.
    pub const fn verdict(&self) -> Option<Verdict> {
        self.verdict
    }

    pub const fn misses(&self) -> u32 {
        self.misses
    }

    /// Returns when the test is next due. `Timestamp::MIN`: never tested.
    pub fn due(&self, cutoff: Span, retry: Span, retry_cap: Span) -> Timestamp {
        let stale = if self.settled == Timestamp::MIN { self.settled } else { self.settled.plus(cutoff) };
        if self.misses == 0 { stale } else { stale.max(self.attempt.plus(self.backoff(retry, retry_cap))) }
    }

    /// Returns the delay before the next try: it doubles with each consecutive inconclusive result.
    pub fn backoff(&self, retry: Span, retry_cap: Span) -> Span {
        self.misses.checked_sub(1).map_or(Span::ZERO, |before| retry.doubled(before, retry_cap))
    }

    /// Returns the sort key for scheduling, oldest first. A test that stays inconclusive is sorted by its last try, so
    /// that it cannot starve the tests behind it.
    pub const fn age_key(&self) -> Timestamp {
        if self.misses == 0 { self.settled } else { self.attempt }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct ActiveRun {
    pub run: Run,
    /// The job's state as the backend reported it for this snapshot.
    pub job: ObservedJobState,
    /// When the node was first seen executing it. Never reset to `None`.
    pub started: Option<Timestamp>,
    pub cancelling: Option<Cancelling>,
    /// Since when the backend has not known the job.
    pub absent_since: Option<Timestamp>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cancelling {
    pub why: CancelReason,
    pub since: Timestamp,
}

/// A node on which nothing is started until then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backoff {
    pub until: Timestamp,
    /// Consecutive jobs that did not start.
    pub sightings: u32,
}

/// Recent actions, for the breaker.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecentActions {
    /// When each node was taken out automatically, within the last hour.
    pub taken_out: Vec<(NodeName, Timestamp)>,
}

/// The circuit breaker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Breaker {
    /// Nodes may be taken out. Only actions after `since` count against the hourly limit.
    Closed { since: Option<Timestamp> },
    /// No further node is marked until an operator closes the breaker.
    Open { since: Timestamp, why: String },
}

/// An operator's instruction that no validation starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    /// Absent: all pools.
    pub pool: Option<PoolName>,
    pub by: String,
    pub why: String,
    pub since: Timestamp,
    pub until: Option<Timestamp>,
}

/// An operator's request that is not completed yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingCommand {
    pub id: u64,
    pub by: String,
    pub why: String,
    pub at: Timestamp,
    pub kind: CommandKind,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum CommandKind {
    /// Run these tests as soon as the node is free. No tests: all routine tests that apply.
    Test {
        node: NodeName,
        tests: Vec<TestId>,
        /// The run created for it last. The command stays until such a run has ended otherwise than because it did not
        /// start or users took the node.
        #[serde(default)]
        run: Option<RunId>,
    },
    /// Test the node and return it to service.
    Release {
        node: NodeName,
    },
    /// Take the node out of service and examine it; an operator then decides.
    Quarantine {
        node: NodeName,
        /// Whether user work on it is evicted, or may finish.
        #[serde(default)]
        evict: bool,
    },
    /// Take the node out of service, perform this step once, and requalify the node.
    Repair {
        node: NodeName,
        step: Repair,
        /// Whether user work on it is evicted, or may finish.
        #[serde(default)]
        evict: bool,
    },
    CancelRun {
        run: RunId,
    },
    /// Run this test over all these nodes together; if they fail, find out which of them is at fault.
    MultiNodeTest {
        nodes: NonEmpty<NodeName>,
        test: TestId,
        /// Runs created for it so far.
        #[serde(default)]
        trials: Vec<RunId>,
    },
}

/// A run over several nodes that was created for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trial {
    pub run: RunId,
    pub nodes: NonEmpty<NodeName>,
    pub result: TrialResult,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrialResult {
    /// The run has not ended.
    Pending,
    Passed,
    /// The nodes failed together, and no result attributes the failure to one of them.
    Failed,
    /// These nodes failed by their own measurements.
    AtFault(Vec<NodeName>),
    /// The run has no usable result; the text has the reason.
    Inconclusive(String),
}

impl Trial {
    /// Derives the trial's result from a run. Outcomes with the reason [`ClassificationReason::FailedTogether`] are failures of
    /// the nodes together.
    pub fn of(run: &Run) -> Self {
        let result = match &run.state {
            RunState::Planned | RunState::Submitted { .. } | RunState::Running { .. } => TrialResult::Pending,
            RunState::Ended(RunEnd::Completed(report)) => trial_result(&report.outcomes, None),
            RunState::Ended(RunEnd::Incomplete { why, partial }) => {
                trial_result(partial.as_ref().map_or(&[], |report| &report.outcomes), Some(why.code()))
            }
            RunState::Ended(RunEnd::NotStarted(why)) => TrialResult::Inconclusive(why.code().to_owned()),
        };
        Self { run: run.id, nodes: run.nodes.clone(), result }
    }
}

fn trial_result(outcomes: &[Outcome], incomplete: Option<&str>) -> TrialResult {
    let failed = outcomes.iter().filter(|outcome| outcome.verdict == Verdict::Fail);
    let mut named: Vec<NodeName> = failed.map(|outcome| outcome.node.clone()).collect();
    named.dedup();
    if !named.is_empty() {
        return TrialResult::AtFault(named);
    }
    if outcomes.iter().any(|outcome| outcome.reason.as_str() == ClassificationReason::FailedTogether.code()) {
        return TrialResult::Failed;
    }
    let silent = outcomes.iter().find(|outcome| outcome.verdict != Verdict::Pass);
    match (incomplete, silent) {
        (Some(why), _) => TrialResult::Inconclusive(why.to_owned()),
        (None, Some(outcome)) => TrialResult::Inconclusive(format!("{}: {}", outcome.node, outcome.reason)),
        (None, None) if outcomes.is_empty() => TrialResult::Inconclusive("no result".to_owned()),
        (None, None) => TrialResult::Passed,
    }
}

/// The capabilities of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    pub mark: bool,
    pub drain: bool,
    /// User work can be evicted.
    pub evict: bool,
    pub reset: bool,
    pub reboot: bool,
    pub replace: bool,
}

impl Capabilities {
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
    fn a_conclusive_result_is_valid_until_the_cutoff_and_inconclusive_ones_back_off() {
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
    fn a_late_result_counts_by_its_timestamp() {
        let record = after(&[(Verdict::Pass, 5), (Verdict::Inconclusive, 3)]);
        assert_eq!((record.verdict(), record.misses()), (Some(Verdict::Pass), 0));
        assert_eq!((record.settled(), record.attempt()), (Some(at(5)), Some(at(5))));
    }

    #[test]
    fn a_renewed_result_is_as_new_as_its_last_confirmation_and_an_inconclusive_one_settles_nothing() {
        let renewed = |verdict, hours| {
            let mut record = after(&[(Verdict::Pass, 0), (verdict, 1)]);
            record.renew(at(hours));
            (record.verdict(), record.settled(), record.attempt())
        };
        assert_eq!(renewed(Verdict::Fail, 3), (Some(Verdict::Fail), Some(at(3)), Some(at(3))));
        assert_eq!(renewed(Verdict::NotApplicable, 3), (Some(Verdict::NotApplicable), Some(at(3)), Some(at(3))));
        assert_eq!(renewed(Verdict::Inconclusive, 3), (Some(Verdict::Inconclusive), Some(at(0)), Some(at(3))));
        assert_eq!(renewed(Verdict::Pass, 0), (Some(Verdict::Pass), Some(at(1)), Some(at(1))), "an older confirmation");
        let mut never = TestRecord::NEVER;
        never.renew(at(3));
        assert_eq!(never, TestRecord::NEVER, "there is no result to renew");
    }

    #[test]
    fn two_sources_combine_to_the_record_of_all_their_results() {
        use Verdict::{Fail, Inconclusive, NotApplicable, Pass};
        for (runs, agent) in [
            (vec![], vec![]),
            (vec![(Pass, 1)], vec![]),
            (vec![(Pass, 1)], vec![(Fail, 2)]),
            (vec![(Fail, 3)], vec![(Pass, 2)]),
            (vec![(Pass, 1), (Inconclusive, 4)], vec![(NotApplicable, 2)]),
            (vec![(Inconclusive, 1)], vec![(Inconclusive, 2)]),
            (vec![(Inconclusive, 1)], vec![(Pass, 2), (Inconclusive, 3)]),
            (vec![(NotApplicable, 2)], vec![(Pass, 2)]),
        ] {
            let mut all: Vec<_> = runs.iter().chain(&agent).copied().collect();
            all.sort_by_key(|(_, hours)| *hours);
            let (one, other) = (after(&runs), after(&agent));
            assert_eq!(one.combine(other), after(&all), "{runs:?} {agent:?}");
            assert_eq!(other.combine(one).settled(), one.combine(other).settled(), "{runs:?} {agent:?}");
        }
    }

    #[test]
    fn a_test_that_stays_inconclusive_is_queued_by_its_last_attempt() {
        assert_eq!(after(&[]).age_key(), Timestamp::MIN);
        assert_eq!(after(&[(Verdict::Pass, 1)]).age_key(), at(1));
        assert_eq!(after(&[(Verdict::Pass, 1), (Verdict::Inconclusive, 9)]).age_key(), at(9));
    }
}
