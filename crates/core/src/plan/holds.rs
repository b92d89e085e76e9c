//! Hands off: holds that operators asked for, and those that are read from what somebody did to a node of ours.

use super::draft::Draft;
use crate::{
    case::{Case, Step, StepKind, StepState},
    lifecycle::{Life, LifeEvent},
    node::MarkKind,
    snapshot::NodeRecord,
    time::Span,
};

/// A change of ours may take this long to show in what the backend reports.
pub(super) const SETTLES_WITHIN: Span = Span::minutes(2);

/// Holds: asked for, over, or read from the cluster. True if the node's affairs are settled by it.
pub(super) fn plan(draft: &mut Draft<'_>, node: u32, record: &NodeRecord) -> bool {
    if let Some(hold) = record.hold_at(draft.snapshot.at) {
        let event = LifeEvent::HeldBy { by: hold.by.clone() };
        draft.advance(node, &event, record.case, "held", format!("held by {}: {}", hold.by, hold.why));
        return true;
    }
    let case = draft.open_case(record);
    let foreign = record.node.marks.foreign_block();
    if let Life::Held { .. } = record.life {
        // As long as its cause is to be seen, a hold that we read from the cluster stays.
        if !case.is_some_and(|case| foreign.is_some() || mark_was_removed(draft, record, case)) {
            let event = LifeEvent::LetGo { out: case.is_some_and(|case| !is_left_to_a_person(case)) };
            draft.advance(node, &event, record.case, "hold-over", "the hold is over");
        }
        return true;
    }
    let Some(case) = case.filter(|_| record.life.is_out()) else { return false };
    if let Some(mark) = foreign {
        let text = format!("{} marked it too ({}); it is theirs now", mark.by, mark.text);
        draft.advance(node, &LifeEvent::HeldBy { by: mark.by.clone() }, Some(case.id), "foreign-mark", text);
        return true;
    }
    if mark_was_removed(draft, record, case) {
        let by = LifeEvent::HeldBy { by: "whoever removed our mark".to_owned() };
        let text = "our mark was removed by somebody else; we do not put it back";
        draft.advance(node, &by, Some(case.id), "mark-removed", text);
        return true;
    }
    false
}

/// Marking it was only proposed: users still have this node.
fn is_left_to_a_person(case: &Case) -> bool {
    let last = case.steps.iter().rev().find(|step| matches!(step.what, StepKind::Mark | StepKind::HandOver));
    last.is_some_and(|step| step.what == StepKind::Mark && step.state == StepState::Proposed)
}

/// We set a mark or a cordon, we did not take it away, and it is not there.
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
