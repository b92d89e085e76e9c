//! Collects the explanation of one node from the snapshot and the store, with its headline and the next steps.

use std::collections::BTreeMap;

use super::{
    Facts, LatestResult, RunWithoutResult, TestStatus, advice,
    node_explanation::{AuditLine, CaseView, FindingView, TestLine, WhyView},
    node_row,
};
use crate::{
    case::Case,
    ids::{NodeName, TestId},
    plan,
    snapshot::NodeRecord,
};

/// Data from the store about one node, in addition to the facts.
#[derive(Debug, Clone, Default)]
pub struct StoredNodeData {
    /// The newest results of its tests.
    pub latest: BTreeMap<TestId, LatestResult>,
    /// The case that it belongs to.
    pub case: Option<Case>,
    /// Newest first.
    pub audit: Vec<AuditLine>,
    /// The newest of its runs that ended without a complete result.
    pub without_result: Option<RunWithoutResult>,
}

/// Returns everything about one node; `None` if it is unknown.
pub fn why(facts: &Facts, name: &NodeName, stored: StoredNodeData) -> Option<WhyView> {
    let (record, listed) = facts.node(name)?;
    let tests = facts.due_of(record).map(|(test, known, due)| TestLine {
        test: test.id.clone(),
        suite: test.suite.clone(),
        status: TestStatus::of(known, test, facts.now),
        cutoff: test.cutoff,
        last: stored.latest.get(&test.id).cloned(),
        due,
    });
    let stored_case = stored.case;
    let mut findings: Vec<FindingView> = record.findings.iter().map(FindingView::of).collect();
    findings.sort_by(|a, b| b.severity.cmp(&a.severity).then_with(|| a.first_seen.cmp(&b.first_seen)));
    let mut view = WhyView {
        row: node_row(facts, record, listed),
        at: facts.now,
        headline: String::new(),
        state: record.state.clone(),
        hardware: record.hardware.clone(),
        hold: record.hold_at(facts.now).cloned(),
        backoff: record.backoff.filter(|backoff| backoff.until > facts.now),
        case: stored_case.as_ref().map(CaseView::of),
        findings,
        job_failures: record.job_failures.as_ref().map_or_else(Vec::new, |failed| failed.failures.clone()),
        tests: tests.collect(),
        audit: stored.audit,
        without_result: stored.without_result.filter(|run| is_unanswered(run, &stored.latest)),
        next: Vec::new(),
    };
    let blocked = requalification_blocker(facts, record);
    view.headline = advice::headline(&view, blocked.as_ref());
    view.next = advice::next(&view, &facts.snapshot.breaker, blocked.as_ref());
    let case = stored_case.as_ref().filter(|case| case.is_open());
    if let Some(waiting) = plan::waiting_repair(&facts.snapshot, record, case) {
        view.next.insert(0, waiting.text());
    }
    Some(view)
}

/// Returns whether a test of the run has had no pass and no fail since. Otherwise the end of the run is history.
fn is_unanswered(run: &RunWithoutResult, latest: &BTreeMap<TestId, LatestResult>) -> bool {
    let answered = |test: &TestId| {
        let conclusive = latest.get(test).and_then(|last| last.conclusive);
        conclusive.is_some_and(|(_, at)| at >= run.ended)
    };
    !run.tests.iter().all(answered)
}

/// Returns in words what keeps the node from passing its requalification.
pub(super) fn blocked_by(facts: &Facts, record: &NodeRecord) -> Option<String> {
    requalification_blocker(facts, record).map(advice::Blocker::into_what)
}

/// Returns what keeps the node from passing its requalification.
fn requalification_blocker(facts: &Facts, record: &NodeRecord) -> Option<advice::Blocker> {
    let case = facts.snapshot.cases.iter().find(|case| Some(case.id) == record.case)?;
    let silent_after = facts.snapshot.policy.agents.silent_after;
    let agent_reports = record.has_live_agent(facts.cycle_at.unwrap_or(facts.now), silent_after);
    plan::blocked(&facts.snapshot, record, case).map(|blocked| advice::Blocker::new(record, &blocked, agent_reports))
}
