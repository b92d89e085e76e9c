//! The steps of a case: which ones the controller may take, and how a step is taken, proposed or handed over.

use super::{Action, builder::PlanBuilder, holds::VISIBLE_WITHIN};
use crate::{
    case::{Case, StepKind, StepState},
    lifecycle::{NodeEvent, NodeState},
    policy::Mode,
    snapshot::NodeRecord,
    time::Span,
};

/// Returns whether policy, mode and backend allow the controller to take this step.
pub(super) fn is_allowed(builder: &PlanBuilder<'_>, kind: StepKind) -> bool {
    let (policy, caps) = (&builder.snapshot.policy, &builder.snapshot.capabilities);
    let acting = policy.mode == Mode::Act;
    match kind {
        StepKind::Mark => policy.mode != Mode::Observe && policy.allow.mark && caps.mark,
        StepKind::Drain => acting && policy.allow.drain && caps.drain,
        StepKind::Evict => acting && policy.allow.evict && caps.evict,
        StepKind::Reset => acting && policy.allow.reset && caps.reset,
        StepKind::Reboot => acting && policy.allow.reboot && caps.reboot,
        StepKind::Replace => acting && policy.allow.replace && caps.replace,
        // The controller may undo its own changes whatever else is allowed by now; in mode `observe` an operator has
        // to.
        StepKind::Unmark => policy.mode != Mode::Observe && caps.mark,
        StepKind::Undrain => policy.mode != Mode::Observe && caps.drain,
        StepKind::SaveEvidence
        | StepKind::Requalify
        | StepKind::Examine
        | StepKind::HandOver
        | StepKind::Release
        | StepKind::RequestRepair => true,
    }
}

/// Returns whether the cluster has no means to keep users off a node. Taking a node out of service then only excludes
/// it from what we offer; the remaining steps use what the backend supports.
pub(super) fn cannot_mark(builder: &PlanBuilder<'_>) -> bool {
    let caps = &builder.snapshot.capabilities;
    !caps.mark && !caps.drain
}

/// Returns whether an operator ordered this step for the node; it then needs no permission in the policy.
pub(super) fn is_commanded(builder: &PlanBuilder<'_>, case: &Case, kind: StepKind) -> bool {
    let caps = &builder.snapshot.capabilities;
    let can = match kind {
        StepKind::Mark => caps.mark,
        StepKind::Drain => caps.drain,
        StepKind::Evict => caps.evict,
        _ => false,
    };
    let ordered = case.is_under_examination() && case.step(kind).is_some_and(|step| step.state != StepState::Proposed);
    ordered && can && builder.snapshot.policy.mode != Mode::Observe
}

pub(super) fn hand_over(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case, why: &str) -> bool {
    let op = builder.ids.op();
    let step = StepKind::HandOver;
    builder.push_action(
        Action::Step { case: case.id, node: record.node.name.clone(), step, op, attempts: 1 },
        "handed-over",
        why,
    );
    builder.touched.insert(node);
    builder.apply_event(node, &NodeEvent::HandedOver, Some(case.id), "handed-over", why);
    false
}

/// Takes a step, and repeats it if it was interrupted or failed. The same operation id has the same effect.
pub(super) fn take_step(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case, kind: StepKind) {
    let most = builder.snapshot.policy.repair.attempts;
    let (op, tries) = match case.step(kind) {
        Some(step) if step.state == StepState::Intended => (step.op, step.attempts),
        Some(step) if step.state == StepState::Failed => (builder.ids.op(), step.attempts.saturating_add(1)),
        // Done, but not visible: give the backend time, then repeat it. Saved evidence is never visible.
        Some(step)
            if step.state == StepState::Done
                && kind != StepKind::SaveEvidence
                && builder.snapshot.at.since(step.at) <= VISIBLE_WITHIN =>
        {
            return;
        }
        _ => (builder.ids.op(), 1),
    };
    // Marks are retried for ever, with a growing delay of at least one cycle.
    let last = case.step(kind).filter(|step| step.state == StepState::Failed);
    if let Some(step) = last
        && builder.snapshot.at.since(step.at) < Span::minutes(1).doubled(step.attempts.min(10), Span::hours(1))
        && !(kind.destroys_evidence() && step.attempts < most)
    {
        return;
    }
    let text = format!("for case {}, repair step {}", case.id, case.repair_step);
    builder.touched.insert(node);
    builder.push_action(
        Action::Step { case: case.id, node: record.node.name.clone(), step: kind, op, attempts: tries },
        "case",
        text.clone(),
    );
    if matches!(kind, StepKind::Reset | StepKind::Reboot | StepKind::Replace) {
        builder.apply_event(node, &NodeEvent::StepStarted { step: kind, attempts: tries }, Some(case.id), "case", text);
    }
}

pub(super) fn propose(
    builder: &mut PlanBuilder<'_>,
    node: u32,
    record: &NodeRecord,
    case: &Case,
    kind: StepKind,
    why: &str,
) {
    if case.step(kind).is_none_or(|step| step.state != StepState::Proposed) {
        let op = builder.ids.op();
        builder.touched.insert(node);
        builder.push_action(
            Action::Propose { case: case.id, node: record.node.name.clone(), step: kind, op },
            "not-allowed",
            why,
        );
    }
}

pub(super) fn escalate(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case, why: &str) {
    // After a repair that an operator requested, the operator decides what follows.
    if let Some((request, repair)) = case.requested_repair() {
        let text = format!("{} requested by {} did not help: {why}; waiting for an operator", repair.what, request.by);
        hand_over(builder, node, record, case, &text);
        return;
    }
    let Some(to) = case.repair_step.next() else {
        hand_over(builder, node, record, case, why);
        return;
    };
    builder.touched.insert(node);
    builder.push_action(Action::Escalate { case: case.id, to }, "did-not-help", why);
    let event = match record.state {
        NodeState::Requalifying { .. } => NodeEvent::RequalificationEnded,
        _ => NodeEvent::StepEnded,
    };
    builder.apply_event(node, &event, Some(case.id), "did-not-help", why);
}
