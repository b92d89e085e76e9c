//! Holds: those that operators requested, and those inferred from changes that another party made to a node of ours.

use super::draft::Draft;
use crate::{
    case::{Case, Step, StepKind, StepState},
    lifecycle::{Life, LifeEvent},
    node::MarkKind,
    snapshot::NodeRecord,
    time::Span,
};

/// How long one of our changes may take to appear in the backend's report.
pub(super) const SETTLES_WITHIN: Span = Span::minutes(2);

/// Handles requested, expired and inferred holds. Returns true if nothing else is to be done with the node in this
/// cycle.
pub(super) fn plan(draft: &mut Draft<'_>, node: u32, record: &NodeRecord) -> bool {
    if let Some(hold) = record.hold_at(draft.snapshot.at) {
        let event = LifeEvent::HeldBy { by: hold.by.clone() };
        draft.advance(node, &event, record.case, "held", format!("held by {}: {}", hold.by, hold.why));
        return true;
    }
    let case = draft.open_case(record);
    let foreign = record.node.marks.foreign_block();
    if let Life::Held { .. } = record.life {
        // An inferred hold stays as long as its cause is visible.
        if !case.is_some_and(|case| foreign.is_some() || mark_was_removed(draft, record, case)) {
            let event = LifeEvent::LetGo { out: case.is_some_and(|case| !is_left_to_a_person(case)) };
            draft.advance(node, &event, record.case, "hold-over", "the hold has ended");
        }
        return true;
    }
    let Some(case) = case.filter(|_| record.life.is_out()) else { return false };
    if let Some(mark) = foreign {
        let text = format!("{} also marked the node ({}); the controller leaves it alone", mark.by, mark.text);
        draft.advance(node, &LifeEvent::HeldBy { by: mark.by.clone() }, Some(case.id), "foreign-mark", text);
        return true;
    }
    if mark_was_removed(draft, record, case) {
        let by = LifeEvent::HeldBy { by: "another party, which removed our mark".to_owned() };
        let text = "another party removed our mark; the controller does not set it again";
        draft.advance(node, &by, Some(case.id), "mark-removed", text);
        return true;
    }
    false
}

/// Returns whether marking was only proposed, so that users still have this node.
fn is_left_to_a_person(case: &Case) -> bool {
    let last = case.steps.iter().rev().find(|step| matches!(step.what, StepKind::Mark | StepKind::HandOver));
    last.is_some_and(|step| step.what == StepKind::Mark && step.state == StepState::Proposed)
}

/// Returns whether a mark or cordon that we set, and did not remove, is missing.
fn mark_was_removed(draft: &Draft<'_>, record: &NodeRecord, case: &Case) -> bool {
    let gone = |kind: MarkKind, set: StepKind, unset: StepKind| {
        let was_set = |step: &Step| step.what == set && step.state != StepState::Proposed;
        let last = case.steps.iter().rev().find(|step| was_set(step) || step.what == unset);
        !record.node.marks.has_ours(kind)
            && last.is_some_and(|step| {
                step.what == set && step.state == StepState::Done && draft.snapshot.at.since(step.at) > SETTLES_WITHIN
            })
    };
    !case.is_released()
        && (gone(MarkKind::Unhealthy, StepKind::Mark, StepKind::Unmark)
            || gone(MarkKind::Cordon, StepKind::Drain, StepKind::Undrain))
}
