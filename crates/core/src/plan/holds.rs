//! Holds: those that operators requested, and those inferred from changes that another party made to a node of ours.

use super::builder::PlanBuilder;
use crate::{
    case::{Case, Step, StepKind, StepState},
    lifecycle::{NodeEvent, NodeState},
    node::MarkKind,
    snapshot::NodeRecord,
    time::Span,
};

/// How long one of our changes may take to appear in the backend's report.
pub(super) const VISIBLE_WITHIN: Span = Span::minutes(2);

/// Handles requested, expired and inferred holds. Returns true if nothing else is to be done with the node in this
/// cycle.
pub(super) fn plan(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord) -> bool {
    if let Some(hold) = record.hold_at(builder.snapshot.at) {
        let event = NodeEvent::Held { by: hold.by.clone() };
        builder.apply_event(node, &event, record.case, "held", format!("held by {}: {}", hold.by, hold.why));
        return true;
    }
    let case = builder.open_case(record);
    let foreign = record.node.marks.blocking_foreign_mark();
    if let NodeState::Held { .. } = record.state {
        // An inferred hold stays as long as its cause is visible.
        if !case.is_some_and(|case| foreign.is_some() || mark_was_removed(builder, record, case)) {
            let event = NodeEvent::HoldEnded { out: case.is_some_and(|case| !is_mark_proposed(case)) };
            builder.apply_event(node, &event, record.case, "hold-over", "the hold has ended");
        }
        return true;
    }
    let Some(case) = case.filter(|_| record.state.is_out_of_service()) else { return false };
    if let Some(mark) = foreign {
        let text = format!("{} also marked the node ({}); the controller leaves it alone", mark.by, mark.text);
        builder.apply_event(node, &NodeEvent::Held { by: mark.by.clone() }, Some(case.id), "foreign-mark", text);
        return true;
    }
    if mark_was_removed(builder, record, case) {
        let by = NodeEvent::Held { by: "another party, which removed our mark".to_owned() };
        let text = "another party removed our mark; the controller does not set it again";
        builder.apply_event(node, &by, Some(case.id), "mark-removed", text);
        return true;
    }
    false
}

/// Returns whether marking was only proposed, so that users still have this node.
fn is_mark_proposed(case: &Case) -> bool {
    let last = case.steps.iter().rev().find(|step| matches!(step.what, StepKind::Mark | StepKind::HandOver));
    last.is_some_and(|step| step.what == StepKind::Mark && step.state == StepState::Proposed)
}

/// Returns whether a mark or cordon that we set, and did not remove, is missing.
fn mark_was_removed(builder: &PlanBuilder<'_>, record: &NodeRecord, case: &Case) -> bool {
    let is_missing = |kind: MarkKind, set: StepKind, unset: StepKind| {
        let was_set = |step: &Step| step.what == set && step.state != StepState::Proposed;
        let last = case.steps.iter().rev().find(|step| was_set(step) || step.what == unset);
        !record.node.marks.has_ours(kind)
            && last.is_some_and(|step| {
                step.what == set && step.state == StepState::Done && builder.snapshot.at.since(step.at) > VISIBLE_WITHIN
            })
    };
    !case.is_released()
        && (is_missing(MarkKind::Unhealthy, StepKind::Mark, StepKind::Unmark)
            || is_missing(MarkKind::Cordon, StepKind::Drain, StepKind::Undrain))
}
