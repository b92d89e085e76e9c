//! Operators' requests, handled before the planner's own decisions.
//!
//! A request stays until it is completed; one that has to wait (for the node to be free, for a hold to end) is handled
//! again in the next cycle.

use super::{
    Action,
    builder::{PlanBuilder, is_in_service, purpose_with_reason},
    due::is_run_by_agent,
    findings, multi_node, repair_request,
    test_set::tests_of,
};
use crate::{
    case::{Case, OperatorRequest, RepairStep, StepKind},
    ids::{NodeName, RunId, TestId},
    lifecycle::{NodeEvent, NodeState},
    policy::TestPolicy,
    run::{NonEmpty, NotStartedReason, Purpose},
    snapshot::{CommandKind, PendingCommand, TrialResult},
};

pub(super) fn plan(builder: &mut PlanBuilder<'_>) {
    let snapshot = builder.snapshot;
    for request in &snapshot.commands {
        let answered = match &request.kind {
            CommandKind::Test { node, tests, run } => test(builder, request, (node, tests), *run),
            CommandKind::Release { node } => release(builder, request, node),
            CommandKind::Quarantine { node, evict } => quarantine(builder, request, node, *evict),
            CommandKind::Repair { node, step, evict } => {
                repair_request::accept(builder, request, (node, *step, *evict))
            }
            // Running work was handled before: the run has been cancelled by now, or there is none.
            CommandKind::CancelRun { .. } => true,
            CommandKind::MultiNodeTest { nodes, test, trials } => {
                if let Some(conclusion) = multi_node::plan(builder, request, (nodes, test, trials)) {
                    builder.push_action(Action::CompleteCommand { command: request.id }, "together", conclusion);
                }
                false
            }
        };
        if answered {
            builder.push_action(
                Action::CompleteCommand { command: request.id },
                "operator",
                format!("requested by {}", request.by),
            );
        }
    }
}

/// Starts the requested tests as soon as the node is free and the limits allow it. A hold takes precedence, and so does
/// a repair in progress: a test on a node that is about to restart is meaningless.
///
/// The request is completed when its run has ended. A run that never started, or that ended because users took the node, is
/// repeated: after the node's back-off, so that a cluster which rejects every job is not asked in every cycle.
fn test(
    builder: &mut PlanBuilder<'_>,
    request: &PendingCommand,
    (name, tests): (&NodeName, &[TestId]),
    earlier: Option<RunId>,
) -> bool {
    let Some(node) = builder.find(name) else { return true };
    let at = builder.snapshot.at;
    match earlier.map(|run| progress(builder, run)) {
        Some(RunProgress::Active) => return false,
        Some(RunProgress::Ended) => return true,
        Some(RunProgress::MustBeRepeated) => {
            let backoff = builder.snapshot.nodes[node as usize].backoff;
            if backoff.is_some_and(|backoff| backoff.until > at) {
                return false;
            }
        }
        None => {}
    }
    let Some(chosen) = NonEmpty::new(requested_tests(builder, node, tests)) else { return true };
    let repairing = matches!(builder.snapshot.nodes[node as usize].state, NodeState::Repairing { .. });
    if repairing || !builder.accepts_requalification(node) || !builder.usage.allows_run(builder, node, &chosen) {
        return false;
    }
    let purpose =
        purpose_with_reason(Purpose::Requested, "operator", format!("requested by {}: {}", request.by, request.why));
    let run = builder.submit(node, chosen, purpose, None);
    let text = format!("requested by {}", request.by);
    builder.push_action(Action::StartTrial { command: request.id, run }, "operator", text);
    false
}

/// How far the run of a request is.
enum RunProgress {
    Active,
    MustBeRepeated,
    Ended,
}

fn progress(builder: &PlanBuilder<'_>, run: RunId) -> RunProgress {
    if builder.snapshot.runs.iter().any(|active| active.run.id == run) {
        return RunProgress::Active;
    }
    match builder.snapshot.trials.iter().find(|trial| trial.run == run).map(|trial| &trial.result) {
        Some(TrialResult::Pending) => RunProgress::Active,
        Some(TrialResult::Inconclusive(why)) if is_repeated(why) => RunProgress::MustBeRepeated,
        _ => RunProgress::Ended,
    }
}

/// Returns whether a run that ended for this reason did not start, or was ended for users. An operator who withdraws a run
/// wants no other one.
fn is_repeated(why: &str) -> bool {
    match NotStartedReason::from_code(why) {
        Some(NotStartedReason::PendingTooLong | NotStartedReason::NodeTaken | NotStartedReason::Rejected) => true,
        Some(NotStartedReason::Withdrawn) | None => false,
    }
}

/// Returns the named tests that apply. Without names: the routine ones that no live agent runs, or all routine ones if
/// the agent runs every one of them.
fn requested_tests(builder: &PlanBuilder<'_>, node: u32, tests: &[TestId]) -> Vec<TestId> {
    let snapshot = builder.snapshot;
    let applicable = || tests_of(snapshot, builder.index.applies(node));
    if !tests.is_empty() {
        return applicable().filter(|test| tests.contains(&test.id)).map(|test| test.id.clone()).collect();
    }
    let record = &snapshot.nodes[node as usize];
    let routine = applicable().filter(|test| test.routine);
    let (by_agent, in_jobs): (Vec<&TestPolicy>, Vec<&TestPolicy>) =
        routine.partition(|test| is_run_by_agent(snapshot, record, test));
    let chosen = if in_jobs.is_empty() { by_agent } else { in_jobs };
    chosen.into_iter().map(|test| test.id.clone()).collect()
}

/// Releases a node, after a requalification run if it had been taken out.
fn release(builder: &mut PlanBuilder<'_>, request: &PendingCommand, name: &NodeName) -> bool {
    let Some(node) = builder.find(name) else { return true };
    let record = &builder.snapshot.nodes[node as usize];
    if record.hold_at(builder.snapshot.at).is_some() || builder.state_changed.contains(&node) {
        return false;
    }
    let text = format!("released by {}: {}", request.by, request.why);
    match (&record.state, builder.open_case(record)) {
        // The examination becomes a requalification run and decides.
        (NodeState::Requalifying { .. }, Some(case)) if case.is_under_examination() => {
            record_release(builder, node, case, name, &text);
        }
        // A run decides already, or users have the node.
        (NodeState::Requalifying { .. } | NodeState::InService | NodeState::Suspect, _) => {}
        (NodeState::Held { .. }, None) => {
            builder.apply_event(node, &NodeEvent::HoldEnded { out: false }, None, "released", text);
            builder.finished.insert(node);
        }
        (state, Some(case)) => {
            if case.repair_step != RepairStep::Quarantine {
                let escalate = Action::Escalate { case: case.id, to: RepairStep::Quarantine };
                builder.push_action(escalate, "released", "requalification decides");
            }
            record_release(builder, node, case, name, &text);
            let event = match state {
                NodeState::Held { .. } => NodeEvent::HoldEnded { out: true },
                _ => NodeEvent::StepEnded,
            };
            builder.apply_event(node, &event, Some(case.id), "released", text);
        }
        // Out of service without a case: the mark is adopted first, and released afterwards.
        (NodeState::Quarantined | NodeState::Repairing { .. } | NodeState::Out, None) => return false,
    }
    true
}

/// Records an operator's release and ends an examination in progress.
fn record_release(builder: &mut PlanBuilder<'_>, node: u32, case: &Case, name: &NodeName, text: &str) {
    if let Some(step) = case.step(StepKind::Examine).filter(|_| case.is_under_examination()) {
        let settle = Action::CompleteStep { case: case.id, op: step.op, done: false };
        builder.push_action(settle, "released", "released before the examination ended");
    }
    let (op, step) = (builder.ids.op(), StepKind::Release);
    builder.push_action(Action::Step { case: case.id, node: name.clone(), step, op, attempts: 1 }, "released", text);
    builder.touched.insert(node);
    builder.finished.insert(node);
}

/// An operator's quarantine needs neither breaker nor confirmation.
fn quarantine(builder: &mut PlanBuilder<'_>, request: &PendingCommand, name: &NodeName, evict: bool) -> bool {
    let Some(node) = builder.find(name) else { return true };
    let record = &builder.snapshot.nodes[node as usize];
    if record.hold_at(builder.snapshot.at).is_some() || matches!(record.state, NodeState::Held { .. }) {
        return false;
    }
    if is_in_service(&record.state) && !builder.state_changed.contains(&node) {
        let words = OperatorRequest { by: request.by.clone(), why: request.why.clone(), repair: None };
        findings::open_to_examine(builder, node, evict, &words);
    }
    true
}
