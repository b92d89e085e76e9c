//! The tests that decide on a node that is out of service: where the result of each comes from, and what it says.
//!
//! A test that the agent runs is taken from the agent where one is deployed; everything else runs in the job. Of each
//! test the newest result counts, from either source, if it is not older than the decision's beginning.

use super::priority::applies_in;
use crate::{
    case::Case,
    finding::{Finding, Severity, Verdict},
    ids::TestId,
    policy::TestPolicy,
    snapshot::{NodeRecord, Snapshot, TestRecord},
    time::Timestamp,
};

/// The required tests, by the source of their results. Each list is in the order of `Snapshot::tests`.
#[derive(Debug, Default)]
pub(super) struct RequiredTests<'a> {
    pub in_job: Vec<&'a TestPolicy>,
    pub from_agent: Vec<&'a TestPolicy>,
}

impl<'a> RequiredTests<'a> {
    /// Splits the tests that apply to the node and are required.
    pub(super) fn new(snapshot: &'a Snapshot, record: &NodeRecord, is_required: impl Fn(&TestPolicy) -> bool) -> Self {
        let applies = |test: &&TestPolicy| applies_in(test, &record.node.pool) && is_required(test);
        let (from_agent, in_job) =
            snapshot.tests.iter().filter(applies).partition(|test| record.is_taken_from_agent(test));
        Self { in_job, from_agent }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.in_job.is_empty() && self.from_agent.is_empty()
    }

    pub(super) fn job_tests(&self) -> Vec<TestId> {
        self.in_job.iter().map(|test| test.id.clone()).collect()
    }
}

/// What the results since a moment say about the required tests.
#[derive(Debug, Default)]
pub(super) struct CombinedResults {
    pub passed: usize,
    /// Tests that fail, except those that only need watching.
    pub failed: Vec<TestId>,
    /// Tests without a conclusive result of a job.
    pub missing: Vec<TestId>,
    /// Tests without a conclusive result of the agent. It repeats them by itself.
    pub awaited: Vec<TestId>,
}

impl CombinedResults {
    pub(super) fn new(
        snapshot: &Snapshot,
        record: &NodeRecord,
        case: &Case,
        required: &RequiredTests<'_>,
        since: Timestamp,
    ) -> Self {
        let mut results = Self::default();
        let job_tests = required.in_job.iter().map(|test| (test, false));
        let agent_tests = required.from_agent.iter().map(|test| (test, true));
        for (test, from_agent) in job_tests.chain(agent_tests) {
            let Some(known) = record_of(snapshot, record, &test.id) else { continue };
            let had_failed = case.findings.iter().any(|finding| finding.check == test.id);
            let was_bad = |finding: &Finding| finding.check == test.id && finding.severity > Severity::Monitor;
            match verdict_since(known, since, from_agent) {
                Some(Verdict::Pass) => results.passed += 1,
                Some(Verdict::Fail) if !case.findings.iter().any(was_bad) && is_only_watched(record, &test.id) => {}
                // The agent confirms an unchanged result without reporting it again. The failure may be an event of the
                // past, which has been acknowledged: the next full report tells.
                Some(Verdict::Fail) if from_agent && !is_seen_since(record, &test.id, since) => {
                    results.awaited.push(test.id.clone());
                }
                Some(Verdict::Fail) => results.failed.push(test.id.clone()),
                Some(Verdict::NotApplicable) if !had_failed => {}
                Some(Verdict::NotApplicable | Verdict::Inconclusive) | None if from_agent => {
                    results.awaited.push(test.id.clone());
                }
                Some(Verdict::NotApplicable | Verdict::Inconclusive) | None => results.missing.push(test.id.clone()),
            }
        }
        results
    }
}

/// Returns the newest verdict of a test since then, from whatever source. What an agent reported in the same moment was
/// classified before the events of the past were acknowledged, and does not count.
pub(super) fn verdict_since(known: &TestRecord, since: Timestamp, from_agent: bool) -> Option<Verdict> {
    let counts = |at: Timestamp| at > since || (at == since && !from_agent);
    known.verdict().filter(|_| known.attempt().is_some_and(counts))
}

pub(super) fn record_of<'a>(snapshot: &Snapshot, record: &'a NodeRecord, test: &TestId) -> Option<&'a TestRecord> {
    let index = snapshot.tests.iter().position(|policy| policy.id == *test)?;
    record.test_records.get(index)
}

/// Returns whether an open finding of this test was seen after that.
fn is_seen_since(record: &NodeRecord, test: &TestId, since: Timestamp) -> bool {
    record.findings.iter().any(|open| open.finding.check == *test && open.last_seen > since)
}

/// Returns whether all open findings of this test, of which there are some, are only watched: they would not have taken
/// the node out of service.
fn is_only_watched(record: &NodeRecord, test: &TestId) -> bool {
    let mut open = record.findings.iter().filter(|open| open.finding.check == *test).peekable();
    open.peek().is_some() && open.all(|open| open.finding.severity == Severity::Monitor)
}
