//! Hardware identity: a machine became known under a node name, was exchanged, or came back under another name. Its
//! history and its case follow the machine.

use super::{Action, builder::PlanBuilder, new_case::new_case};
use crate::{
    case::{Case, CaseOutcome, RepairStep, StepKind, StepState},
    finding::Severity,
    ids::HardwareId,
    lifecycle::{NodeEvent, NodeState},
    node::Occupancy,
    snapshot::NodeRecord,
};

/// Handles a node whose machine is new. A node with another machine, or with a case that moved to it, is left alone for
/// the rest of the cycle.
pub(super) fn plan(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord) {
    if !record.is_new_machine() {
        return;
    }
    let Some(now) = record.node.hardware.as_ref().and_then(|hardware| hardware.id()) else { return };
    builder.touched.insert(node);
    let name = &record.node.name;
    let state = if record.hardware.is_none() {
        let action = Action::HardwareIdentified { node: name.clone(), hardware: now.clone() };
        builder.push_action(action, "machine-known", format!("{name} is machine {now}"));
        record.state.clone()
    } else {
        handle_replacement(builder, node, record, &now);
        NodeState::InService
    };
    if let Some(case) = case_elsewhere(builder, record, &now) {
        rebind_case(builder, node, record, &state, case);
    } else if record.hardware.is_none() {
        // Only its identity became known; nothing else has changed.
        return;
    } else if record.node.marks.keeps_out_of_service() {
        open_case_for_new_machine(builder, node, record, now, &state);
    }
    builder.finished.insert(node);
}

/// Moves cases whose machine has been known under another name for a while. Both names may have been visible for a
/// time, when the machine could not be attributed to either.
pub(super) fn rebind_lost_cases(builder: &mut PlanBuilder<'_>) {
    let snapshot = builder.snapshot;
    let is_gone = |case: &&Case| {
        let record = builder.record(&case.node);
        record.is_none_or(|record| matches!(record.node.occupancy, Occupancy::Unknown { .. }))
    };
    let lost: Vec<&Case> = snapshot.cases.iter().filter(|case| case.is_open()).filter(is_gone).collect();
    if lost.is_empty() {
        return;
    }
    for (node, record) in (0..).zip(&snapshot.nodes) {
        let Some(hardware) = record.node.hardware.as_ref().filter(|hardware| hardware.is_known()) else { continue };
        let is_there = !matches!(record.node.occupancy, Occupancy::Unknown { .. }) && !record.is_new_machine();
        let is_free = record.case.is_none() && !builder.finished.contains(&node);
        let Some(case) = lost.iter().find(|case| hardware.matches(&case.hardware) && case.node != record.node.name)
        else {
            continue;
        };
        let taken = builder.actions.iter().any(|act| match &act.value {
            Action::RebindCase { case: other, .. } | Action::CloseCase { case: other, .. } => *other == case.id,
            _ => false,
        });
        if is_there && is_free && !taken {
            builder.touched.insert(node);
            rebind_case(builder, node, record, &record.state, case);
            builder.finished.insert(node);
        }
    }
}

/// Handles another machine under the same name. The old machine's case is closed, unless that machine appears under
/// another name in this snapshot.
fn handle_replacement(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, now: &HardwareId) {
    let name = &record.node.name;
    if let Some(case) = builder.open_case(record)
        && !appears_elsewhere(builder, node, &case.hardware)
    {
        let close = Action::CloseCase { case: case.id, node: name.clone(), how: CaseOutcome::Replaced };
        builder.push_action(close, "machine-exchanged", format!("another machine has the name {name} now"));
    }
    let action = Action::HardwareReplaced { node: name.clone(), hardware: now.clone() };
    builder.push_action(action, "machine-exchanged", format!("{name} is machine {now} now; its history starts anew"));
}

fn appears_elsewhere(builder: &PlanBuilder<'_>, here: u32, machine: &HardwareId) -> bool {
    builder.index.needs_attention.iter().filter(|node| **node != here).any(|node| {
        let record = &builder.snapshot.nodes[*node as usize];
        record.is_new_machine() && record.node.hardware.as_ref().is_some_and(|hardware| hardware.matches(machine))
    })
}

/// Returns the open case of this machine under another name, unless that name still belongs to the same machine or the
/// case was already moved in this plan: two boards with one serial number are no reason to take nodes out.
fn case_elsewhere<'a>(builder: &PlanBuilder<'a>, record: &NodeRecord, now: &HardwareId) -> Option<&'a Case> {
    let cases = builder.snapshot.cases.iter();
    let case =
        cases.filter(|case| case.is_open() && case.hardware == *now).find(|case| case.node != record.node.name)?;
    let still_there = builder.record(&case.node).is_some_and(|other| {
        !matches!(other.node.occupancy, Occupancy::Unknown { .. })
            && other.node.hardware.as_ref().is_none_or(|hardware| hardware.matches(now))
    });
    let taken = builder
        .actions
        .iter()
        .any(|act| matches!(act.value, Action::RebindCase { case: other, .. } if other == case.id));
    (!still_there && !taken).then_some(case)
}

fn rebind_case(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, state: &NodeState, case: &Case) {
    let name = &record.node.name;
    let text = format!("machine {} is now named {name}; its case is still open", case.hardware);
    if let Some(own) = builder.open_case(record).filter(|_| record.hardware.is_none()) {
        let close = Action::CloseCase { case: own.id, node: name.clone(), how: CaseOutcome::Withdrawn };
        builder.push_action(close, "machine-followed", "superseded by the open case of its machine");
    }
    builder.push_action(Action::RebindCase { case: case.id, node: name.clone() }, "machine-followed", text.clone());
    builder.finished.extend(builder.find(&case.node));
    // The old name's marks are not on this node; they were not removed by another party.
    for step in case.steps.iter().filter(|step| step.state == StepState::Done) {
        if matches!(step.what, StepKind::Mark | StepKind::Drain | StepKind::Evict) {
            let settle = Action::CompleteStep { case: case.id, op: step.op, done: false };
            builder.push_action(
                settle,
                "machine-followed",
                format!("{} was done under the old name {}", step.what, case.node),
            );
        }
    }
    let events = [NodeEvent::TakenOut, NodeEvent::StepEnded, NodeEvent::RequalificationEnded];
    if let Some(to) = events.iter().find_map(|event| state.apply(event)) {
        builder.set_state(node, to, Some(case.id), "machine-followed", text);
    }
}

/// Opens a case for a new machine under a marked name: the mark is removed after a requalification run.
fn open_case_for_new_machine(
    builder: &mut PlanBuilder<'_>,
    node: u32,
    record: &NodeRecord,
    now: HardwareId,
    state: &NodeState,
) {
    let text = "a new machine is tested before it enters service";
    let mut case = new_case(builder, record, Severity::Isolate, Vec::new());
    case.hardware = now;
    case.repair_step = RepairStep::Quarantine;
    let id = case.id;
    builder.push_action(Action::OpenCase(case), "machine-exchanged", text);
    if let Some(to) = state.apply(&NodeEvent::TakenOut) {
        builder.set_state(node, to, Some(id), "machine-exchanged", text);
    }
}
