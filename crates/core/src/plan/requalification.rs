//! Requalification: the tests that must pass before a node returns to service, and the removal of our marks afterwards.
//!
//! It combines the agent's checks since its beginning with the tests of a run. It ends in one of three ways. Well: every
//! failed test has passed since, and no finding is open. Bad: a test still fails. Nothing: the tests gave no conclusive
//! result, which proves nothing; the run is repeated, then an operator decides. The agent repeats its checks by itself:
//! requalification waits for them, and does not repeat the run.

use super::{
    Action,
    builder::{PlanBuilder, purpose_with_reason},
    capacity::pool_block,
    examination,
    required_tests::{CombinedResults, RequiredTests, record_of, verdict_since},
    steps::{escalate, hand_over, is_allowed, propose, take_step},
};
use crate::{
    case::{Case, CaseOutcome, Step, StepKind, StepState},
    finding::{Severity, Verdict},
    ids::{RunId, TestId},
    lifecycle::{NodeEvent, NodeState},
    node::MarkKind,
    policy::TestPolicy,
    run::{NonEmpty, Purpose},
    snapshot::{NodeRecord, Snapshot},
    time::Timestamp,
};

/// Requalification runs without a conclusive result before the node is handed over to an operator.
const MAX_REQUALIFICATION_RUNS: usize = 6;
/// Names of tests in a sentence; the rest is counted.
const MAX_NAMES: usize = 5;

/// Returns the tests that must pass before the node returns: those that failed or fail now, and those that the policy
/// adds.
fn required_tests<'a>(snapshot: &'a Snapshot, record: &NodeRecord, case: &Case) -> RequiredTests<'a> {
    let policy = &snapshot.policy.repair.requalification;
    let failed = |test: &TestPolicy| {
        let open = record.findings.iter().map(|open| &open.finding);
        case.findings.iter().chain(open).any(|finding| finding.check == test.id)
    };
    let is_required =
        |test: &TestPolicy| (policy.is_empty() && test.routine) || policy.contains(&test.id) || failed(test);
    RequiredTests::new(snapshot, record, is_required)
}

enum RequalificationResult {
    Passed,
    Failed(String),
    /// These tests gave no conclusive result.
    Inconclusive(Vec<TestId>),
    /// The agent has not reported a conclusive result of these yet.
    WaitingForAgent(Vec<TestId>),
}

/// Evaluates the requalification once its run has ended.
pub(super) fn conclude(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case, run: Option<RunId>) {
    if run.is_some_and(|run| builder.snapshot.runs.iter().any(|active| active.run.id == run)) {
        return;
    }
    if case.is_under_examination() {
        examination::conclude(builder, node, record, case, run);
        return;
    }
    let began = beginning(record, case, run);
    match evaluate(builder.snapshot, record, case, began) {
        RequalificationResult::Passed => return_to_service(builder, node, record, case),
        RequalificationResult::Failed(text) => escalate(builder, node, record, case, &text),
        RequalificationResult::Inconclusive(tests) => {
            let text = match &tests[..] {
                [] => "requalification gave no conclusive result".to_owned(),
                tests => format!("requalification gave no conclusive result: {}", names(tests)),
            };
            builder.apply_event(node, &NodeEvent::RequalificationEnded, Some(case.id), "proof-empty", text);
        }
        RequalificationResult::WaitingForAgent(tests) => {
            let deadline = builder.snapshot.policy.repair.requalification_deadline;
            if builder.snapshot.at.since(began) > deadline {
                let why = format!("no conclusive result of the agent's checks within {deadline}: {}", names(&tests));
                hand_over(builder, node, record, case, &why);
            }
        }
    }
}

/// Returns when the requalification began. Results from before do not count.
fn beginning(record: &NodeRecord, case: &Case, run: Option<RunId>) -> Timestamp {
    let born = run.map(RunId::born);
    let step = case.step(StepKind::Requalify).map(|step| step.at);
    // After the clock went back, new ids still carry a later time; the step has the real one.
    step.into_iter().chain(born).min().unwrap_or(record.since)
}

/// Evaluates the results since then. Only conclusive results count, and every test that had failed must have passed.
fn evaluate(snapshot: &Snapshot, record: &NodeRecord, case: &Case, since: Timestamp) -> RequalificationResult {
    let required = required_tests(snapshot, record, case);
    let mut results = CombinedResults::new(snapshot, record, case, &required, since);
    if let Some(test) = results.failed.first() {
        return RequalificationResult::Failed(format!("{test} still fails"));
    }
    for open in &record.findings {
        if !open.is_confirmed() || open.finding.severity == Severity::Monitor {
            continue;
        }
        let check = &open.finding.check;
        if open.last_seen > since {
            return RequalificationResult::Failed(format!("{check} still has an open finding"));
        }
        let from_agent = required.from_agent.iter().any(|test| test.id == *check);
        let verdict = record_of(snapshot, record, check).and_then(|known| verdict_since(known, since, from_agent));
        if verdict == Some(Verdict::Pass) {
            continue;
        }
        // Not seen again, but not cleared either: absence is not recovery.
        let list = if from_agent { &mut results.awaited } else { &mut results.missing };
        if !list.contains(check) {
            list.push(check.clone());
        }
    }
    match results {
        CombinedResults { missing, .. } if !missing.is_empty() => RequalificationResult::Inconclusive(missing),
        CombinedResults { awaited, .. } if !awaited.is_empty() => RequalificationResult::WaitingForAgent(awaited),
        CombinedResults { passed: 0, .. } => RequalificationResult::Inconclusive(Vec::new()),
        _ => RequalificationResult::Passed,
    }
}

/// What keeps a node from passing its requalification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Blocked {
    /// The last run gave no conclusive result of these tests.
    Inconclusive(Vec<TestId>),
    /// The agent has reported no conclusive result of these since the repair.
    WaitingForAgent { tests: Vec<TestId>, repair: Option<StepKind> },
}

/// Returns what keeps the node of this case from passing its requalification, if that is known.
pub(crate) fn blocked(snapshot: &Snapshot, record: &NodeRecord, case: &Case) -> Option<Blocked> {
    if case.is_under_examination() || case.waits_for_operator() {
        return None;
    }
    let run = match record.state {
        NodeState::Requalifying { run } => run,
        // Between two runs.
        NodeState::Quarantined if case.step(StepKind::Requalify).is_some() => None,
        _ => return None,
    };
    if run.is_some_and(|run| snapshot.runs.iter().any(|active| active.run.id == run)) {
        return None;
    }
    match evaluate(snapshot, record, case, beginning(record, case, run)) {
        RequalificationResult::Inconclusive(tests) => Some(Blocked::Inconclusive(tests)),
        RequalificationResult::WaitingForAgent(tests) => {
            Some(Blocked::WaitingForAgent { tests, repair: last_repair(case) })
        }
        RequalificationResult::Passed | RequalificationResult::Failed(_) => None,
    }
}

/// Returns the repair that the requalification follows, if there was one at this escalation level.
fn last_repair(case: &Case) -> Option<StepKind> {
    const REPAIRS: [StepKind; 4] = [StepKind::Reset, StepKind::Reboot, StepKind::Replace, StepKind::Release];
    let is_repair = |step: &&Step| {
        step.state == StepState::Done && step.repair_step == case.repair_step && REPAIRS.contains(&step.what)
    };
    case.steps.iter().rev().find(is_repair).map(|step| step.what)
}

/// Formats the names of tests for a sentence.
pub(crate) fn names(tests: &[TestId]) -> String {
    let shown: Vec<&str> = tests.iter().take(MAX_NAMES).map(TestId::as_str).collect();
    match tests.len().saturating_sub(MAX_NAMES) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Starts a requalification when the node is free and the limits allow it. Always returns false: its end is a separate
/// state change.
pub(super) fn start(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) -> bool {
    let required = required_tests(builder.snapshot, record, case);
    if required.is_empty() {
        return hand_over(builder, node, record, case, "no requalification test applies to the node");
    }
    let tests = NonEmpty::new(required.job_tests());
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
    let has_room = tests.as_ref().is_none_or(|tests| builder.usage.allows_run(builder, node, tests));
    if !builder.accepts_requalification(node) || !has_room {
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
    // Without a test that runs in a job, the agent's checks alone decide.
    let run = tests.map(|tests| builder.submit(node, tests, purpose, Some(case.id)));
    builder.apply_event(node, &NodeEvent::RequalificationStarted { run }, Some(case.id), "proof", text);
    false
}

/// Returns the requalification runs at this escalation level since an operator last released the node, or requested a
/// repair.
fn requalification_runs(case: &Case) -> Vec<&Step> {
    let decides = |step: &Step| matches!(step.what, StepKind::Release | StepKind::RequestRepair);
    let given = case.steps.iter().rposition(decides).unwrap_or(0);
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
