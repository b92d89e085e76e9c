//! The examination of a node that an operator quarantined: its tests, and the recommendation that follows from them.

use super::{
    Action,
    builder::{PlanBuilder, purpose_with_reason},
    required_tests::{CombinedResults, RequiredTests},
    steps::hand_over,
};
use crate::{
    case::{Advice, Case, StepKind},
    finding::Severity,
    ids::{RunId, TestId},
    lifecycle::NodeEvent,
    policy::TestPolicy,
    run::{NonEmpty, Purpose},
    snapshot::{NodeRecord, Snapshot},
    time::Timestamp,
};

/// Returns the tests of an examination requested by an operator: the policy's list, and those that had failed.
fn examination_tests<'a>(snapshot: &'a Snapshot, record: &NodeRecord, case: &Case) -> RequiredTests<'a> {
    let list = &snapshot.policy.repair.examine;
    let failed = |test: &TestPolicy| case.findings.iter().any(|finding| finding.check == test.id);
    let listed = |test: &TestPolicy| if list.is_empty() { test.routine } else { list.contains(&test.id) };
    RequiredTests::new(snapshot, record, |test| listed(test) || failed(test))
}

/// Starts the examination when the node is empty and the limits allow it.
pub(super) fn start(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) -> bool {
    let required = examination_tests(builder.snapshot, record, case);
    if required.is_empty() {
        let why = "no test of repair.examine applies to the node";
        return advise(builder, node, record, case, Advice::ExamineAgain, why);
    }
    let tests = NonEmpty::new(required.job_tests());
    let has_room = tests.as_ref().is_none_or(|tests| builder.usage.allows_run(builder, node, tests));
    if !builder.accepts_requalification(node) || !has_room {
        return false;
    }
    let text = "an operator requested an examination";
    let purpose = purpose_with_reason(Purpose::Requalification, "quarantine", format!("case {}: {text}", case.id));
    let run = tests.map(|tests| builder.submit(node, tests, purpose, Some(case.id)));
    builder.apply_event(node, &NodeEvent::RequalificationStarted { run }, Some(case.id), "quarantine", text);
    false
}

/// Evaluates the examination once its run has ended, and the agent has reported what it contributes.
pub(super) fn conclude(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case, run: Option<RunId>) {
    let snapshot = builder.snapshot;
    let since = run.map_or(record.since, RunId::born).min(snapshot.at);
    let required = examination_tests(snapshot, record, case);
    let results = CombinedResults::new(snapshot, record, case, &required, since);
    let in_time = snapshot.at.since(since) <= snapshot.policy.repair.requalification_deadline;
    if !results.awaited.is_empty() && in_time {
        return;
    }
    let (advice, why) = recommend(record, results, since);
    advise(builder, node, record, case, advice, &why);
}

/// Derives a recommendation from the results since then. A test without a result leaves it open.
fn recommend(record: &NodeRecord, results: CombinedResults, since: Timestamp) -> (Advice, String) {
    let mut missing: Vec<TestId> = results.missing.into_iter().chain(results.awaited).collect();
    let fresh = record.findings.iter().filter(|open| open.last_seen >= since);
    if let Some(worst) = fresh.max_by_key(|open| open.finding.severity) {
        let advice = match worst.finding.severity {
            Severity::Monitor => Advice::ReturnFlagged,
            Severity::Reset | Severity::Reboot => Advice::Reboot,
            Severity::Isolate => Advice::Replace,
        };
        // A finding that only needs watching must not hide tests without a result.
        if advice != Advice::ReturnFlagged || missing.is_empty() {
            return (advice, format!("{}: {}", worst.finding.check, worst.finding.text));
        }
    }
    // Not seen again, but not cleared either: absence is not recovery.
    missing.extend(record.findings.iter().filter(|open| open.last_seen < since).map(|open| open.finding.check.clone()));
    missing.sort();
    missing.dedup();
    let names: Vec<&str> = missing.iter().map(TestId::as_str).collect();
    match results.passed {
        _ if !names.is_empty() => (Advice::ExamineAgain, format!("no result from {}", names.join(", "))),
        0 => (Advice::ExamineAgain, "no test applies to the node".to_owned()),
        passed => (Advice::Return, format!("tests passed: {passed}; no open finding")),
    }
}

/// Ends the examination and hands the decision over to an operator.
fn advise(
    builder: &mut PlanBuilder<'_>,
    node: u32,
    record: &NodeRecord,
    case: &Case,
    advice: Advice,
    why: &str,
) -> bool {
    if let Some(step) = case.step(StepKind::Examine) {
        let settle = Action::CompleteStep { case: case.id, op: step.op, done: true };
        builder.push_action(settle, "examined", "the examination has ended");
    }
    builder.push_action(Action::Advise { case: case.id, node: record.node.name.clone(), advice }, "examined", why);
    hand_over(builder, node, record, case, &format!("examination finished, recommendation: {advice} ({why})"))
}
