//! Operators' requests, handled before the planner's own decisions.
//!
//! A request stays until it is completed; one that has to wait (for the node to be free, for a hold to end) is handled
//! again in the next cycle.

use super::{
    Action,
    draft::{Draft, because, is_routine, is_touchable, named},
    remedies, together,
};
use crate::{
    case::{Case, Rung, StepKind},
    ids::{NodeName, TestId},
    lifecycle::{Life, LifeEvent},
    run::{NonEmpty, Purpose},
    snapshot::{Asked, Request},
};

pub(super) fn plan(draft: &mut Draft<'_>) {
    let snapshot = draft.snapshot;
    for request in &snapshot.requests {
        let answered = match &request.what {
            Asked::Test { node, tests } => test(draft, request, node, tests),
            Asked::Release { node } => release(draft, request, node),
            Asked::Quarantine { node, evict } => quarantine(draft, request, node, *evict),
            // Running work was handled before: the run has been cancelled by now, or there is none.
            Asked::Withdraw { .. } => true,
            Asked::Together { nodes, test, trials } => {
                if let Some(words) = together::plan(draft, request, (nodes, test, trials)) {
                    draft.act(Action::Answer { request: request.id }, "together", words);
                }
                false
            }
        };
        if answered {
            draft.act(Action::Answer { request: request.id }, "operator", format!("requested by {}", request.by));
        }
    }
}

/// Starts the requested tests as soon as the node is free and the limits allow it. A hold takes precedence, and so does
/// a repair in progress: a test on a node that is about to restart is meaningless.
fn test(draft: &mut Draft<'_>, request: &Request, name: &NodeName, tests: &[TestId]) -> bool {
    let Some(node) = draft.find(name) else { return true };
    let applicable = named(draft.snapshot, draft.index.applies(node));
    let meant = |test: &TestId| if tests.is_empty() { is_routine(draft.snapshot, test) } else { tests.contains(test) };
    let wanted = applicable.into_iter().filter(meant).collect();
    let Some(wanted) = NonEmpty::new(wanted) else { return true };
    let repairing = matches!(draft.snapshot.nodes[node as usize].life, Life::Repairing { .. });
    if repairing || !draft.is_open_to_proofs(node) || !draft.usage.admits(draft, node, &wanted) {
        return false;
    }
    let asked = because(Purpose::Requested, "operator", format!("requested by {}: {}", request.by, request.why));
    draft.submit(node, wanted, asked, None);
    true
}

/// Releases a node, after a proving run if it had been taken out.
fn release(draft: &mut Draft<'_>, request: &Request, name: &NodeName) -> bool {
    let Some(node) = draft.find(name) else { return true };
    let record = &draft.snapshot.nodes[node as usize];
    if record.hold_at(draft.snapshot.at).is_some() || draft.moved.contains(&node) {
        return false;
    }
    let text = format!("released by {}: {}", request.by, request.why);
    match (&record.life, draft.open_case(record)) {
        // The examination becomes a proving run and decides.
        (Life::Proving { .. }, Some(case)) if case.is_examined() => {
            give_back(draft, node, case, name, &text);
        }
        // A run decides already, or users have the node.
        (Life::Proving { .. } | Life::InService | Life::Suspect, _) => {}
        (Life::Held { .. }, None) => {
            draft.advance(node, &LifeEvent::LetGo { out: false }, None, "released", text);
            draft.left_alone.insert(node);
        }
        (life, Some(case)) => {
            if case.rung != Rung::Quarantine {
                let climb = Action::Escalate { case: case.id, to: Rung::Quarantine };
                draft.act(climb, "released", "requalification decides");
            }
            give_back(draft, node, case, name, &text);
            let event = match life {
                Life::Held { .. } => LifeEvent::LetGo { out: true },
                _ => LifeEvent::StepEnded,
            };
            draft.advance(node, &event, Some(case.id), "released", text);
        }
        // Out of service without a case: the mark is adopted first, and released afterwards.
        (Life::Quarantined | Life::Repairing { .. } | Life::Out, None) => return false,
    }
    true
}

/// Records an operator's release and ends an examination in progress.
fn give_back(draft: &mut Draft<'_>, node: u32, case: &Case, name: &NodeName, text: &str) {
    if let Some(step) = case.step(StepKind::Examine).filter(|_| case.is_examined()) {
        let settle = Action::Settle { case: case.id, op: step.op, done: false };
        draft.act(settle, "released", "released before the examination ended");
    }
    let (op, step) = (draft.ids.op(), StepKind::Release);
    draft.act(Action::Step { case: case.id, node: name.clone(), step, op, tries: 1 }, "released", text);
    draft.touched.insert(node);
    draft.left_alone.insert(node);
}

/// An operator's quarantine needs neither breaker nor confirmation.
fn quarantine(draft: &mut Draft<'_>, request: &Request, name: &NodeName, evict: bool) -> bool {
    let Some(node) = draft.find(name) else { return true };
    let record = &draft.snapshot.nodes[node as usize];
    if record.hold_at(draft.snapshot.at).is_some() || matches!(record.life, Life::Held { .. }) {
        return false;
    }
    if is_touchable(&record.life) && !draft.moved.contains(&node) {
        let text = format!("taken out by {}: {}", request.by, request.why);
        remedies::open_to_examine(draft, node, evict, &text);
    }
    true
}
