//! Escalation: takes one open case one step further, through reset, reboot, quarantine, replacement and hand-over.
//! Evidence is saved before each step that destroys it. `proof` decides whether a node returns.

use super::{
    Action,
    builder::PlanBuilder,
    examination, requalification,
    steps::{cannot_mark, escalate, hand_over, is_allowed, is_commanded, propose, take_step},
};
use crate::{
    case::{Case, RepairStep, Step, StepKind, StepState},
    finding::{OpenFinding, Severity, worst_confirmed},
    lifecycle::{NodeEvent, NodeState},
    node::{MarkKind, Occupancy},
    policy::{Policy, WindowKind},
    snapshot::NodeRecord,
    time::Span,
};

pub(super) fn advance(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) {
    if let NodeState::Requalifying { run } = record.state {
        requalification::conclude(builder, node, record, case, run);
        return;
    }
    if raise_severity(builder, node, record, case) {
        return;
    }
    if case.waits_for_operator() {
        let unmarked = !record.node.marks.has_ours(MarkKind::Unhealthy) && !case.ever_done(StepKind::Mark);
        if unmarked && is_allowed(builder, StepKind::Mark) {
            take_step(builder, node, record, case, StepKind::Mark);
        }
        return;
    }
    if restart_in_progress(builder, node, record, case) {
        return;
    }
    for kind in repair_steps(builder, case) {
        let done = match kind {
            StepKind::Mark => ensure_marked(builder, node, record, case),
            StepKind::Drain => ensure_drained(builder, node, record, case),
            StepKind::Reset | StepKind::Reboot => ensure_repaired(builder, node, record, case, kind),
            StepKind::Replace => ensure_replaced(builder, node, record, case),
            StepKind::Requalify => requalification::start(builder, node, record, case),
            StepKind::Examine => examination::start(builder, node, record, case),
            StepKind::HandOver => hand_over(builder, node, record, case, "the policy's next repair step is hand-over"),
            // Part of draining.
            StepKind::Evict => true,
            StepKind::SaveEvidence
            | StepKind::Release
            | StepKind::RequestRepair
            | StepKind::Undrain
            | StepKind::Unmark => true,
        };
        if !done {
            return;
        }
    }
    hand_over(builder, node, record, case, "the policy lists no further repair step");
}

/// Returns the steps of the case's escalation level, as listed in the policy.
fn repair_steps(builder: &PlanBuilder<'_>, case: &Case) -> Vec<StepKind> {
    if case.is_released() {
        return vec![StepKind::Requalify];
    }
    if case.is_under_examination() {
        return vec![StepKind::Mark, StepKind::Drain, StepKind::Examine];
    }
    let severity = match case.repair_step {
        RepairStep::Reset => Severity::Reset,
        RepairStep::Reboot => Severity::Reboot,
        RepairStep::Quarantine => return vec![StepKind::Mark, StepKind::Drain, StepKind::Requalify],
        RepairStep::Replace => Severity::Isolate,
    };
    builder.snapshot.policy.repair.steps.get(&severity).cloned().unwrap_or_default()
}

/// Handles a new finding that needs a higher escalation level.
pub(super) fn raise_severity(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) -> bool {
    let open: Vec<&OpenFinding> = record.findings.iter().collect();
    let Some(worst) = worst_confirmed(&open).filter(|worst| *worst > case.severity) else { return false };
    let text = format!("severity raised to {worst}");
    builder.push_action(
        Action::RaiseSeverity { case: case.id, node: record.node.name.clone() },
        "worsened",
        text.clone(),
    );
    builder.touched.insert(node);
    let repair_step = Policy::first_repair_step(worst);
    if repair_step > case.repair_step && !case.waits_for_operator() && case.requested_repair().is_none() {
        builder.push_action(Action::Escalate { case: case.id, to: repair_step }, "worsened", text);
    }
    true
}

fn ensure_marked(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) -> bool {
    if record.node.marks.has_ours(MarkKind::Unhealthy) || cannot_mark(builder) {
        return true;
    }
    if is_allowed(builder, StepKind::Mark) || is_commanded(builder, case, StepKind::Mark) {
        take_step(builder, node, record, case, StepKind::Mark);
    } else {
        let why = "waiting for an operator: the controller may not mark the node";
        propose(builder, node, record, case, StepKind::Mark, why);
    }
    false
}

/// Returns whether no user work is left. If the controller may not drain, the mark keeps new work away and running work
/// ends in its own time.
fn ensure_drained(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) -> bool {
    let permitted = |kind| is_allowed(builder, kind) || is_commanded(builder, case, kind);
    let (drains, evicts) = (permitted(StepKind::Drain), permitted(StepKind::Evict));
    // An operator's order is executed outside maintenance windows too.
    let now = case.is_under_examination() || allows_disruption(builder, record);
    if drains && !record.node.marks.has_ours(MarkKind::Cordon) {
        if now {
            take_step(builder, node, record, case, StepKind::Drain);
        }
        return false;
    }
    let busy = matches!(record.node.occupancy, Occupancy::Busy { .. });
    let evicted = case.step(StepKind::Evict).is_some_and(|step| step.state == StepState::Done);
    // Work that uses no GPU does not make a node busy, but a restart would end it all the same.
    let restarts = is_commanded(builder, case, StepKind::Evict)
        || repair_steps(builder, case).iter().any(|step| step.destroys_evidence());
    if evicts && drains && (busy || (!evicted && restarts)) {
        // Once the decision was left to an operator, user work is not evicted again.
        let proposed = case.step(StepKind::Drain).is_some_and(|step| step.state == StepState::Proposed);
        if now && !proposed {
            take_step(builder, node, record, case, StepKind::Evict);
        }
        propose_if_stuck(builder, node, record, case);
        return false;
    }
    if !busy {
        return true;
    }
    propose_if_stuck(builder, node, record, case);
    false
}

/// Proposes the drain to an operator if user work does not end, or cannot be ruled out, for too long.
pub(super) fn propose_if_stuck(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) {
    let why = match record.node.occupancy {
        Occupancy::Busy { .. } => "user work did not end within the drain deadline; waiting for an operator",
        Occupancy::Free => "eviction did not finish within the drain deadline; waiting for an operator",
        Occupancy::Unknown { .. } => "occupancy unknown, user work may be running; waiting for an operator",
    };
    let drained = case.step(StepKind::Drain).map_or(record.since, |step| step.at);
    // An earlier escalation level may have drained the node long before an operator requested the repair.
    let since = case.repair_requested_at().map_or(drained, |asked| drained.max(asked));
    if builder.snapshot.at.since(since) > builder.snapshot.policy.repair.drain_deadline {
        propose(builder, node, record, case, StepKind::Drain, why);
    }
}

/// Returns whether the step would end no user work. A node that does not answer may still run some: it must have been
/// seen free since it was drained. Such a node cannot be reset.
pub(super) fn is_empty(record: &NodeRecord, case: &Case, kind: StepKind) -> bool {
    match record.node.occupancy {
        Occupancy::Free => true,
        Occupancy::Unknown { .. } if kind == StepKind::Replace && record.node.is_vacant() => true,
        Occupancy::Unknown { .. } => kind != StepKind::Reset && was_empty(case),
        Occupancy::Busy { .. } => false,
    }
}

/// Returns whether a step that requires a free node was taken since the drain; no new work can have started since then.
fn was_empty(case: &Case) -> bool {
    let (mut drained, mut empty) = (false, false);
    for step in case.steps.iter().filter(|step| step.state != StepState::Proposed) {
        match step.what {
            StepKind::Drain | StepKind::Undrain => {
                drained = step.what == StepKind::Drain && step.state == StepState::Done;
                empty = false;
            }
            StepKind::SaveEvidence | StepKind::Requalify => empty = drained,
            _ => {}
        }
    }
    empty
}

/// Returns whether disruptive steps are allowed now.
fn allows_disruption(builder: &PlanBuilder<'_>, record: &NodeRecord) -> bool {
    builder.window(record, WindowKind::Maintenance) != Some(false)
}

/// Resets or reboots the node, after its evidence is saved, and waits until it is back.
fn ensure_repaired(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case, kind: StepKind) -> bool {
    match case.step(kind) {
        Some(step) if step.state == StepState::Done => return has_come_back(builder, node, record, case, step),
        Some(step) if step.state == StepState::Proposed => {
            if kind == StepKind::Reboot && boot_changed(record, case) {
                builder.touched.insert(node);
                let settle = Action::CompleteStep { case: case.id, op: step.op, done: true };
                builder.push_action(settle, "rebooted", "the node was rebooted by other means");
                return false;
            }
            if !is_allowed(builder, kind) {
                return false;
            }
        }
        Some(step) if step.state == StepState::Failed && step.attempts >= builder.snapshot.policy.repair.attempts => {
            escalate(builder, node, record, case, &format!("{kind} failed (try {})", step.attempts));
            return false;
        }
        Some(step) if step.state == StepState::Intended && is_allowed(builder, kind) => {
            // The step may have begun, so it is continued at any hour. What the node shows takes precedence, and a
            // changed boot id proves only a first try.
            let limit = deadline(builder, kind);
            let happened = kind == StepKind::Reboot && step.attempts <= 1 && boot_changed(record, case);
            if builder.snapshot.at.since(step.at) > limit {
                builder.touched.insert(node);
                let text = if happened {
                    "the node was rebooted".to_owned()
                } else {
                    format!("{kind} did not happen within {limit}")
                };
                builder.push_action(
                    Action::CompleteStep { case: case.id, op: step.op, done: happened },
                    "deadline",
                    text,
                );
            } else if is_empty(record, case, kind) {
                take_step(builder, node, record, case, kind);
            } else {
                propose_if_stuck(builder, node, record, case);
            }
            return false;
        }
        _ => {}
    }
    let (ours, empty) = (is_allowed(builder, kind), is_empty(record, case, kind));
    if ours && !empty {
        propose_if_stuck(builder, node, record, case);
        return false;
    }
    // A saved-evidence step later proves that the node was empty.
    if empty && !ensure_evidence_saved(builder, node, record, case) {
        return false;
    }
    if !ours {
        // Nothing keeps users off the node until an operator acts.
        if cannot_mark(builder) && is_allowed(builder, StepKind::Replace) && record.node.manual_replacement().is_none()
        {
            escalate(builder, node, record, case, &format!("{kind} is not available here; the node can be replaced"));
            return false;
        }
        let why = format!("waiting for an operator: the controller may not {kind} the node");
        propose(builder, node, record, case, kind, &why);
        return false;
    }
    if allows_disruption(builder, record) && !builder.active.contains(&node) {
        take_step(builder, node, record, case, kind);
    }
    false
}

/// Returns whether the node came back after a completed reset or reboot. Once it did, a later outage has another cause.
pub(super) fn has_come_back(
    builder: &mut PlanBuilder<'_>,
    node: u32,
    record: &NodeRecord,
    case: &Case,
    step: &Step,
) -> bool {
    let kind = step.what;
    if !matches!(record.state, NodeState::Repairing { step, .. } if step == kind) {
        return true;
    }
    let same_boot = kind == StepKind::Reboot && boot_known(record, case) && !boot_changed(record, case);
    if record.node.occupancy.is_free() && !same_boot {
        return true;
    }
    let deadline = deadline(builder, kind);
    if builder.snapshot.at.since(step.at) > deadline {
        builder.touched.insert(node);
        let settle = Action::CompleteStep { case: case.id, op: step.op, done: false };
        builder.push_action(settle, "deadline", format!("{kind} did not bring the node back within {deadline}"));
    }
    false
}

/// Returns whether a reset or reboot of a lower escalation level is still in progress. A finding that arrives after the
/// step was sent raises the case while the node restarts: the next step waits until the node is back or the deadline has
/// passed.
fn restart_in_progress(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) -> bool {
    let NodeState::Repairing { step: kind @ (StepKind::Reset | StepKind::Reboot), .. } = record.state else {
        return false;
    };
    let Some(step) = case.steps.iter().rev().find(|step| step.what == kind) else { return false };
    if step.repair_step == case.repair_step {
        // `ensure_repaired` handles it.
        return false;
    }
    match step.state {
        StepState::Proposed | StepState::Failed => false,
        StepState::Done => !has_come_back(builder, node, record, case, step),
        // It may have been carried out, and is not sent again.
        StepState::Intended => {
            let happened = kind == StepKind::Reboot && step.attempts <= 1 && boot_changed(record, case);
            let limit = deadline(builder, kind);
            if happened || builder.snapshot.at.since(step.at) > limit {
                builder.touched.insert(node);
                let settle = Action::CompleteStep { case: case.id, op: step.op, done: happened };
                let text = if happened {
                    "the node was rebooted".to_owned()
                } else {
                    format!("{kind} was not confirmed within {limit}")
                };
                builder.push_action(settle, if happened { "rebooted" } else { "deadline" }, text);
            }
            true
        }
    }
}

pub(super) fn deadline(builder: &PlanBuilder<'_>, kind: StepKind) -> Span {
    let repair = &builder.snapshot.policy.repair;
    if kind == StepKind::Reset { repair.reset_deadline } else { repair.reboot_deadline }
}

fn boot_known(record: &NodeRecord, case: &Case) -> bool {
    case.boot_id.is_some() && record.node.hardware.as_ref().is_some_and(|hardware| hardware.boot_id.is_some())
}

pub(super) fn boot_changed(record: &NodeRecord, case: &Case) -> bool {
    let now = record.node.hardware.as_ref().and_then(|hardware| hardware.boot_id.as_ref());
    boot_known(record, case) && now != case.boot_id.as_ref()
}

/// Returns whether the evidence was saved at this escalation level, after the last step that destroyed some.
pub(super) fn ensure_evidence_saved(
    builder: &mut PlanBuilder<'_>,
    node: u32,
    record: &NodeRecord,
    case: &Case,
) -> bool {
    let ended = |step: &&Step| matches!(step.state, StepState::Done | StepState::Failed);
    let last = case.steps.iter().rev().filter(ended).find(|step| {
        (step.what == StepKind::SaveEvidence && step.state == StepState::Done) || step.what.destroys_evidence()
    });
    if last.is_some_and(|step| step.what == StepKind::SaveEvidence && step.repair_step == case.repair_step) {
        return true;
    }
    take_step(builder, node, record, case, StepKind::SaveEvidence);
    false
}

/// Replaces the node if that is allowed, otherwise hands it over. Either way the case waits until the node changes.
fn ensure_replaced(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) -> bool {
    if let Some(how) = record.node.manual_replacement() {
        return hand_over(builder, node, record, case, how);
    }
    if !is_allowed(builder, StepKind::Replace) {
        let why = "a restart does not fix it; waiting for an operator to replace the node";
        return hand_over(builder, node, record, case, why);
    }
    match case.step(StepKind::Replace) {
        Some(step) if step.state == StepState::Done => {
            builder.apply_event(
                node,
                &NodeEvent::HandedOver,
                Some(case.id),
                "replacing",
                "waiting for the replacement machine",
            );
        }
        Some(step) if step.state == StepState::Failed && step.attempts >= builder.snapshot.policy.repair.attempts => {
            return hand_over(builder, node, record, case, "replacing the node failed");
        }
        // The replacement was requested repeatedly, and the backend has not confirmed it. A controller that leads since a moment
        // ago repeats the request first, under its own id: an earlier leader may have stopped before it recorded the answer.
        Some(step)
            if step.state == StepState::Intended
                && builder.snapshot.at.since(step.at) > builder.snapshot.policy.repair.reboot_deadline
                && builder.snapshot.planned_at.is_some_and(|planned_at| planned_at > step.at) =>
        {
            let settle = Action::CompleteStep { case: case.id, op: step.op, done: false };
            builder.push_action(settle, "deadline", "the backend did not confirm the replacement in time");
            // It may have been carried out. Under another id it would be a second replacement.
            let why = "the backend did not confirm the replacement in time; it may have been carried out";
            return hand_over(builder, node, record, case, why);
        }
        _ => {
            if !is_empty(record, case, StepKind::Replace) {
                propose_if_stuck(builder, node, record, case);
                return false;
            }
            let ready = allows_disruption(builder, record) && !builder.active.contains(&node);
            if ensure_evidence_saved(builder, node, record, case) && ready {
                take_step(builder, node, record, case, StepKind::Replace);
            }
        }
    }
    false
}
