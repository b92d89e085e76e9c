//! What operators asked for, seen to before anything we would like to do ourselves.

use super::{
    Action,
    draft::{Draft, because, is_touchable, named},
    remedies,
};
use crate::{
    case::{Rung, StepKind},
    finding::Severity,
    ids::{NodeName, TestId},
    lifecycle::{Life, LifeEvent},
    run::{CancelWhy, NonEmpty, Purpose},
    snapshot::{Asked, Request},
};

pub(super) fn plan(draft: &mut Draft<'_>) {
    let snapshot = draft.snapshot;
    for request in &snapshot.requests {
        let answered = match &request.what {
            Asked::Test { node, tests } => test(draft, request, node, tests),
            Asked::Release { node } => release(draft, request, node),
            Asked::Quarantine { node } => quarantine(draft, request, node),
            Asked::Withdraw { run } => {
                if snapshot.runs.iter().any(|active| active.run.id == *run && active.cancelling.is_none()) {
                    let cancel = Action::Cancel { run: *run, why: CancelWhy::Withdrawn };
                    draft.act(cancel, "operator", format!("asked by {}: {}", request.by, request.why));
                }
                true
            }
        };
        if answered {
            draft.act(Action::Answer { request: request.id }, "operator", format!("asked by {}", request.by));
        }
    }
}

/// Starts what was asked for as soon as the node is free. A hold comes before a wish.
fn test(draft: &mut Draft<'_>, request: &Request, name: &NodeName, tests: &[TestId]) -> bool {
    let Some(node) = draft.find(name) else { return true };
    let record = &draft.snapshot.nodes[node as usize];
    let held = matches!(record.life, Life::Held { .. }) || record.hold.is_some();
    let full = draft.usage.jobs >= draft.snapshot.policy.limits.jobs;
    if held || full || !record.node.occupancy.is_free() || draft.active.contains(&node) {
        return false;
    }
    let applicable = named(draft.snapshot, draft.index.applies(node));
    let wanted: Vec<TestId> =
        applicable.into_iter().filter(|test| tests.is_empty() || tests.contains(test)).collect();
    if let Some(wanted) = NonEmpty::new(wanted) {
        let asked = because(Purpose::Requested, "operator", format!("asked by {}: {}", request.by, request.why));
        draft.submit(node, wanted, asked, None);
    }
    true
}

/// Gives a node back, by way of a proof if it had been taken out.
fn release(draft: &mut Draft<'_>, request: &Request, name: &NodeName) -> bool {
    let Some(node) = draft.find(name) else { return true };
    let record = &draft.snapshot.nodes[node as usize];
    let text = format!("released by {}: {}", request.by, request.why);
    let open = record.case.and_then(|id| draft.case(id)).filter(|case| case.is_open());
    match (&record.life, open) {
        // A run decides already.
        (Life::Proving { .. }, _) => {}
        (Life::Held { .. }, None) => {
            draft.advance(node, &LifeEvent::LetGo { out: false }, None, "released", text);
        }
        (Life::InService | Life::Suspect, None) => {}
        (life, Some(case)) => {
            if case.rung != Rung::Quarantine {
                let climb = Action::Escalate { case: case.id, to: Rung::Quarantine };
                draft.act(climb, "released", "a proof decides");
            }
            let op = draft.ids.op();
            let step = StepKind::Release;
            draft.act(Action::Step { case: case.id, node: name.clone(), step, op, tries: 1 }, "released", text.clone());
            let event = match life {
                Life::Held { .. } => LifeEvent::LetGo { out: true },
                _ => LifeEvent::StepEnded,
            };
            draft.advance(node, &event, Some(case.id), "released", text);
            draft.touched.insert(node);
            draft.left_alone.insert(node);
        }
        // Out of service without a case: only adoption can have missed it, and that comes next.
        (_, None) => {}
    }
    true
}

/// An operator's own judgement needs no breaker and no confirmation.
fn quarantine(draft: &mut Draft<'_>, request: &Request, name: &NodeName) -> bool {
    let Some(node) = draft.find(name) else { return true };
    let record = &draft.snapshot.nodes[node as usize];
    if is_touchable(&record.life) && record.case.is_none() {
        let text = format!("taken out by {}: {}", request.by, request.why);
        remedies::open_for_person(draft, node, Severity::Isolate, "operator", &text);
    }
    true
}
