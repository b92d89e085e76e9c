//! Requalification: the tests that must pass before a node returns to service, and the removal of our marks afterwards.
//!
//! A requalification run ends in one of three ways. Well: every failed test has passed since, and no finding is open. Bad: a
//! test still fails. Nothing: the tests gave no conclusive result, which proves nothing; the run is repeated, then an
//! operator decides.

use super::{
    Action,
    builder::{PlanBuilder, is_routine, purpose_with_reason, tests_in},
    capacity::pool_block,
    steps::{escalate, hand_over, is_allowed, propose, take_step},
};
use crate::{
    case::{Advice, Case, CaseOutcome, Step, StepKind},
    finding::{Severity, Verdict},
    ids::{RunId, TestId},
    lifecycle::{NodeEvent, NodeState},
    node::MarkKind,
    run::{NonEmpty, Purpose},
    snapshot::NodeRecord,
    time::Timestamp,
};

/// Requalification runs without a conclusive result before the node is handed over to an operator.
const MAX_REQUALIFICATION_RUNS: usize = 6;

/// Returns the tests that must pass before the node returns: those that failed or fail now, and those that the policy
/// adds.
fn required_tests(builder: &PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) -> Vec<TestId> {
    let policy = &builder.snapshot.policy.repair.requalification;
    let applicable = tests_in(builder.snapshot, builder.index.applies(node));
    let failed = |test: &TestId| {
        let open = record.findings.iter().map(|open| &open.finding);
        case.findings.iter().chain(open).any(|finding| finding.check == *test)
    };
    applicable
        .into_iter()
        .filter(|test| {
            (policy.is_empty() && is_routine(builder.snapshot, test)) || policy.contains(test) || failed(test)
        })
        .collect()
}

enum RequalificationResult {
    Passed,
    Failed(String),
    Inconclusive,
}

/// Returns the tests of an examination requested by an operator: the policy's list, and those that had failed.
fn examination_tests(builder: &PlanBuilder<'_>, node: u32, case: &Case) -> Vec<TestId> {
    let list = &builder.snapshot.policy.repair.examine;
    let failed = |test: &TestId| case.findings.iter().any(|finding| finding.check == *test);
    let listed = |test: &TestId| if list.is_empty() { is_routine(builder.snapshot, test) } else { list.contains(test) };
    let applicable = tests_in(builder.snapshot, builder.index.applies(node));
    applicable.into_iter().filter(|test| listed(test) || failed(test)).collect()
}

/// Starts the examination when the node is empty and the limits allow it.
pub(super) fn examine(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) -> bool {
    let Some(tests) = NonEmpty::new(examination_tests(builder, node, case)) else {
        return advise(
            builder,
            node,
            record,
            case,
            Advice::ExamineAgain,
            "no test of repair.examine applies to the node",
        );
    };
    if !builder.accepts_requalification(node) || !builder.usage.allows_run(builder, node, &tests) {
        return false;
    }
    let text = "an operator requested an examination";
    let purpose = purpose_with_reason(Purpose::Requalification, "quarantine", format!("case {}: {text}", case.id));
    let run = builder.submit(node, tests, purpose, Some(case.id));
    builder.apply_event(node, &NodeEvent::RequalificationStarted { run }, Some(case.id), "quarantine", text);
    false
}

/// Derives a recommendation from the tests since then. A test without a result leaves it open.
fn evaluate_examination(
    builder: &PlanBuilder<'_>,
    node: u32,
    record: &NodeRecord,
    case: &Case,
    since: Timestamp,
) -> (Advice, String) {
    let (mut passed, mut missing) = (0_usize, Vec::new());
    for test in examination_tests(builder, node, case) {
        let Some(index) = builder.snapshot.tests.iter().position(|policy| policy.id == test) else { continue };
        let known = &record.test_records[index];
        match known.verdict().filter(|_| known.attempt().is_some_and(|at| at >= since)) {
            Some(Verdict::Pass) => passed += 1,
            Some(Verdict::NotApplicable | Verdict::Fail) => {}
            Some(Verdict::Inconclusive) | None => missing.push(test.to_string()),
        }
    }
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
    missing.extend(
        record.findings.iter().filter(|open| open.last_seen < since).map(|open| open.finding.check.to_string()),
    );
    missing.sort();
    missing.dedup();
    match passed {
        _ if !missing.is_empty() => (Advice::ExamineAgain, format!("no result from {}", missing.join(", "))),
        0 => (Advice::ExamineAgain, "no test applies to the node".to_owned()),
        _ => (Advice::Return, format!("tests passed: {passed}; no open finding")),
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

/// Evaluates the requalification run once it has ended.
pub(super) fn conclude(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case, run: RunId) {
    if builder.snapshot.runs.iter().any(|active| active.run.id == run) {
        return;
    }
    if case.is_under_examination() {
        let (advice, why) = evaluate_examination(builder, node, record, case, run.born().min(builder.snapshot.at));
        advise(builder, node, record, case, advice, &why);
        return;
    }
    // After the clock went back, new ids still carry a later time; the step has the real one.
    let began = case.step(StepKind::Requalify).map_or(run.born(), |step| step.at.min(run.born()));
    match evaluate(builder, node, record, case, began) {
        RequalificationResult::Passed => return_to_service(builder, node, record, case),
        RequalificationResult::Failed(text) => escalate(builder, node, record, case, &text),
        RequalificationResult::Inconclusive => {
            let text = "requalification gave no conclusive result";
            builder.apply_event(node, &NodeEvent::RequalificationEnded, Some(case.id), "proof-empty", text);
        }
    }
}

/// Evaluates the tests since then. Only conclusive results count, and every test that had failed must have passed.
fn evaluate(
    builder: &PlanBuilder<'_>,
    node: u32,
    record: &NodeRecord,
    case: &Case,
    since: Timestamp,
) -> RequalificationResult {
    let mut passed = 0;
    let mut missing = false;
    for test in required_tests(builder, node, record, case) {
        let Some(index) = builder.snapshot.tests.iter().position(|policy| policy.id == test) else { continue };
        let known = &record.test_records[index];
        let fresh = known.attempt().is_some_and(|at| at >= since);
        let had_failed = case.findings.iter().any(|finding| finding.check == test);
        match known.verdict().filter(|_| fresh) {
            Some(Verdict::Fail) => return RequalificationResult::Failed(format!("{test} still fails")),
            Some(Verdict::Pass) => passed += 1,
            Some(Verdict::NotApplicable) if !had_failed => {}
            _ => missing = true,
        }
    }
    for open in &record.findings {
        if open.is_confirmed() && open.finding.severity > Severity::Monitor {
            if open.last_seen >= since {
                return RequalificationResult::Failed(format!("{} still has an open finding", open.finding.check));
            }
            // Not seen again, but not cleared either: absence is not recovery.
            missing = true;
        }
    }
    if missing || passed == 0 { RequalificationResult::Inconclusive } else { RequalificationResult::Passed }
}

/// Starts a requalification run when the node is free and the limits allow it. Always returns false: the end of the run is a
/// separate state change.
pub(super) fn start(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) -> bool {
    let Some(tests) = NonEmpty::new(required_tests(builder, node, record, case)) else {
        return hand_over(builder, node, record, case, "no requalification test applies to the node");
    };
    let earlier = requalification_runs(case);
    if earlier.len() >= MAX_REQUALIFICATION_RUNS {
        return hand_over(builder, node, record, case, "the requalification runs gave no conclusive result");
    }
    let pool = builder.index.pool(node);
    let retry = &builder.snapshot.policy.retry;
    let wait = earlier.len().checked_sub(1).map(|n| retry.inconclusive.doubled(n as u32, retry.inconclusive_cap));
    let waits = earlier.last().zip(wait).is_some_and(|(step, wait)| builder.snapshot.at < step.at.plus(wait));
    if waits || pool_block(builder, pool).is_some() {
        return wait_for_requalification(builder, node, record, case);
    }
    if !builder.accepts_requalification(node) || !builder.usage.allows_run(builder, node, &tests) {
        let repair = &builder.snapshot.policy.repair;
        let due = earlier.last().map_or(record.since, |step| step.at.max(record.since));
        if builder.snapshot.at.since(due) > repair.requalification_deadline && !builder.active.contains(&node) {
            let why = format!("requalification could not start within {}", repair.requalification_deadline);
            return hand_over(builder, node, record, case, &why);
        }
        return wait_for_requalification(builder, node, record, case);
    }
    let (op, step) = (builder.ids.op(), StepKind::Requalify);
    let text = "requalification before the node returns to service";
    builder.push_action(
        Action::Step { case: case.id, node: record.node.name.clone(), step, op, attempts: 1 },
        "proof",
        text,
    );
    let purpose = purpose_with_reason(Purpose::Requalification, "proof", format!("case {}: {text}", case.id));
    let run = builder.submit(node, tests, purpose, Some(case.id));
    builder.apply_event(node, &NodeEvent::RequalificationStarted { run }, Some(case.id), "proof", text);
    false
}

/// Returns the requalification runs at this escalation level since an operator last released the node.
fn requalification_runs(case: &Case) -> Vec<&Step> {
    let given = case.steps.iter().rposition(|step| step.what == StepKind::Release).unwrap_or(0);
    case.steps[given..]
        .iter()
        .filter(|step| step.what == StepKind::Requalify && step.repair_step == case.repair_step)
        .collect()
}

/// Ends the repair step, whatever happens until the requalification run can start.
fn wait_for_requalification(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) -> bool {
    if matches!(record.state, NodeState::Repairing { .. }) {
        builder.apply_event(node, &NodeEvent::StepEnded, Some(case.id), "repaired", "waiting for requalification");
    }
    false
}

/// Returns a node that passed: removes our marks, then closes the case. Foreign marks stay.
fn return_to_service(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) {
    let marks = &record.node.marks;
    let step = if marks.has_ours(MarkKind::Cordon) { StepKind::Undrain } else { StepKind::Unmark };
    if marks.ours.is_empty() {
        let name = record.node.name.clone();
        let close = Action::CloseCase { case: case.id, node: name, how: CaseOutcome::Returned };
        builder.push_action(close, "proved", "requalification passed");
        builder.apply_event(node, &NodeEvent::Returned, None, "proved", "requalification passed; back in service");
    } else if is_allowed(builder, step) {
        take_step(builder, node, record, case, step);
    } else {
        propose(
            builder,
            node,
            record,
            case,
            step,
            "requalification passed; waiting for an operator to remove our mark",
        );
    }
}
