//! One case, one step further: reset, reboot, quarantine, replace or a person; evidence before each step that
//! destroys it; a proof before the node returns.

use super::{
    Action,
    draft::{Draft, because, named, policy_of},
    remedies::{SETTLES_WITHIN, worst_confirmed},
};
use crate::{
    case::{Case, Closed, Rung, StepKind, StepState},
    finding::{OpenFinding, Severity, Verdict},
    ids::TestId,
    lifecycle::{Life, LifeEvent},
    node::{MarkKind, Occupancy},
    policy::{Mode, Policy, WindowKind},
    run::{NonEmpty, Purpose},
    snapshot::NodeRecord,
    time::Span,
};

/// Proofs that brought nothing, before a person is asked.
const MOST_PROOFS: usize = 6;

pub(super) fn climb(draft: &mut Draft<'_>, node: u32, record: &NodeRecord, case: &Case) {
    if let Life::Proving { run } = record.life {
        if draft.snapshot.runs.iter().any(|active| active.run.id == run) {
            return;
        }
        match proof(draft, node, record, case, run.born()) {
            Proof::Well => give_back(draft, node, record, case),
            Proof::Bad(text) => escalate(draft, node, record, case, &text),
            Proof::Nothing => {
                draft.advance(node, &LifeEvent::ProofEnded, Some(case.id), "proof-empty", "the proof brought no result");
            }
        }
        return;
    }
    if worsened(draft, node, record, case) {
        return;
    }
    if case.waits_for_person() {
        if !record.node.marks.has_ours(MarkKind::Unhealthy) && !case.ever_done(StepKind::Mark) {
            drive(draft, node, record, case, StepKind::Mark);
        }
        return;
    }
    for kind in route(draft, case) {
        let done = match kind {
            StepKind::Mark => marked(draft, node, record, case),
            StepKind::Drain => drained(draft, node, record, case),
            StepKind::Reset | StepKind::Reboot => repaired(draft, node, record, case, kind),
            StepKind::Replace => replaced(draft, node, record, case),
            StepKind::Prove => prove(draft, node, record, case),
            StepKind::HandOver => hand_over(draft, node, record, case, "the policy says so"),
            StepKind::KeepEvidence | StepKind::Release | StepKind::Undrain | StepKind::Unmark => true,
        };
        if !done {
            return;
        }
    }
}

/// The steps of the case's rung, as the policy lists them.
fn route(draft: &Draft<'_>, case: &Case) -> Vec<StepKind> {
    if case.is_released() {
        return vec![StepKind::Prove];
    }
    let severity = match case.rung {
        Rung::Reset => Severity::Reset,
        Rung::Reboot => Severity::Reboot,
        Rung::Quarantine => return vec![StepKind::Mark, StepKind::Drain, StepKind::Prove],
        Rung::Replace => Severity::Isolate,
    };
    draft.snapshot.policy.repair.steps.get(&severity).cloned().unwrap_or_default()
}

/// Whether policy, mode and backend let us do this ourselves.
pub(super) fn may(draft: &Draft<'_>, kind: StepKind) -> bool {
    let (policy, caps) = (&draft.snapshot.policy, &draft.snapshot.caps);
    let acting = policy.mode == Mode::Act;
    match kind {
        StepKind::Mark | StepKind::Unmark => policy.mode != Mode::Observe && policy.allow.mark && caps.mark,
        StepKind::Drain => acting && policy.allow.drain && caps.drain,
        StepKind::Reset => acting && policy.allow.reset && caps.reset,
        StepKind::Reboot => acting && policy.allow.reboot && caps.reboot,
        StepKind::Replace => acting && policy.allow.replace && caps.replace,
        // What we drained we may undo, whatever the policy says by now.
        StepKind::Undrain => caps.drain,
        StepKind::KeepEvidence | StepKind::Prove | StepKind::HandOver | StepKind::Release => true,
    }
}

/// New trouble that asks for a higher rung.
fn worsened(draft: &mut Draft<'_>, node: u32, record: &NodeRecord, case: &Case) -> bool {
    let open: Vec<&OpenFinding> = record.findings.iter().collect();
    let Some(worst) = worst_confirmed(&open).filter(|worst| *worst > case.severity) else { return false };
    let text = format!("worse than before: {worst}");
    draft.act(Action::Worsen { case: case.id, node: record.node.name.clone() }, "worsened", text.clone());
    draft.touched.insert(node);
    let rung = Policy::first_rung(worst);
    if rung > case.rung && !case.waits_for_person() {
        draft.act(Action::Escalate { case: case.id, to: rung }, "worsened", text);
    }
    true
}

fn marked(draft: &mut Draft<'_>, node: u32, record: &NodeRecord, case: &Case) -> bool {
    if record.node.marks.has_ours(MarkKind::Unhealthy) {
        return true;
    }
    drive(draft, node, record, case, StepKind::Mark);
    false
}

/// No user work is left on it. Where draining is not ours to do, the mark keeps new work away and time does the rest.
fn drained(draft: &mut Draft<'_>, node: u32, record: &NodeRecord, case: &Case) -> bool {
    if may(draft, StepKind::Drain) && !record.node.marks.has_ours(MarkKind::Cordon) {
        drive(draft, node, record, case, StepKind::Drain);
        return false;
    }
    if !matches!(record.node.occupancy, Occupancy::Busy { .. }) {
        return true;
    }
    let since = case.step(StepKind::Drain).map_or(record.since, |step| step.at);
    if draft.snapshot.at.since(since) > draft.snapshot.policy.repair.drain_deadline {
        propose(draft, node, record, case, StepKind::Drain, "user work does not end; a person has to decide");
    }
    false
}

/// Reset or reboot, its evidence kept first, its end seen.
fn repaired(draft: &mut Draft<'_>, node: u32, record: &NodeRecord, case: &Case, kind: StepKind) -> bool {
    let repair = &draft.snapshot.policy.repair;
    let (deadline, most) = (if kind == StepKind::Reset { repair.reset_deadline } else { repair.reboot_deadline }, repair.tries);
    let rebooted = kind == StepKind::Reboot && boot_changed(record, case);
    match case.step(kind) {
        Some(step) if step.state == StepState::Done => {
            let back = record.node.occupancy.is_free();
            let same_boot = kind == StepKind::Reboot && !rebooted && boot_known(record, case);
            if back && !same_boot {
                return true;
            }
            if draft.snapshot.at.since(step.at) > deadline {
                draft.touched.insert(node);
                let settle = Action::Settle { case: case.id, op: step.op, done: false };
                draft.act(settle, "deadline", format!("{kind} did not bring the node back within {deadline}"));
            }
            return false;
        }
        Some(step) if step.state == StepState::Proposed => {
            if rebooted {
                draft.touched.insert(node);
                let settle = Action::Settle { case: case.id, op: step.op, done: true };
                draft.act(settle, "rebooted", "somebody rebooted it");
                return false;
            }
            if !may(draft, kind) {
                return false;
            }
        }
        Some(step) if step.state == StepState::Failed && step.tries >= most => {
            escalate(draft, node, record, case, &format!("{kind} failed {} times", step.tries));
            return false;
        }
        _ => {}
    }
    if !kept_evidence(draft, node, record, case) {
        return false;
    }
    if !may(draft, kind) {
        propose(draft, node, record, case, kind, "the policy leaves it to a person");
        return false;
    }
    let ready = match record.node.occupancy {
        Occupancy::Free => true,
        // A node that does not answer cannot be reset, but it can be rebooted.
        Occupancy::Unknown { .. } => kind == StepKind::Reboot,
        Occupancy::Busy { .. } => false,
    };
    if ready && draft.window(record, WindowKind::Maintenance) != Some(false) && !draft.active.contains(&node) {
        drive(draft, node, record, case, kind);
    }
    false
}

fn boot_known(record: &NodeRecord, case: &Case) -> bool {
    case.boot_id.is_some() && record.node.hardware.as_ref().is_some_and(|hardware| hardware.boot_id.is_some())
}

fn boot_changed(record: &NodeRecord, case: &Case) -> bool {
    let now = record.node.hardware.as_ref().and_then(|hardware| hardware.boot_id.as_ref());
    boot_known(record, case) && now != case.boot_id.as_ref()
}

fn kept_evidence(draft: &mut Draft<'_>, node: u32, record: &NodeRecord, case: &Case) -> bool {
    if case.step(StepKind::KeepEvidence).is_some_and(|step| step.state == StepState::Done) {
        return true;
    }
    drive(draft, node, record, case, StepKind::KeepEvidence);
    false
}

/// Replaced where we may, else handed to a person. The end of the road either way until something comes back.
fn replaced(draft: &mut Draft<'_>, node: u32, record: &NodeRecord, case: &Case) -> bool {
    if !may(draft, StepKind::Replace) {
        return hand_over(draft, node, record, case, "no restart cures it, and replacing is left to a person");
    }
    if !kept_evidence(draft, node, record, case) {
        return false;
    }
    match case.step(StepKind::Replace) {
        Some(step) if step.state == StepState::Done => {
            draft.advance(node, &LifeEvent::GivenUp, Some(case.id), "replacing", "waiting for another machine");
        }
        Some(step) if step.state == StepState::Failed && step.tries >= draft.snapshot.policy.repair.tries => {
            return hand_over(draft, node, record, case, "replacing it failed");
        }
        _ if draft.window(record, WindowKind::Maintenance) != Some(false) => {
            drive(draft, node, record, case, StepKind::Replace);
        }
        _ => {}
    }
    false
}

fn hand_over(draft: &mut Draft<'_>, node: u32, record: &NodeRecord, case: &Case, why: &str) -> bool {
    let op = draft.ids.op();
    let step = StepKind::HandOver;
    draft.act(Action::Step { case: case.id, node: record.node.name.clone(), step, op, tries: 1 }, "handed-over", why);
    draft.touched.insert(node);
    draft.advance(node, &LifeEvent::GivenUp, Some(case.id), "handed-over", why);
    false
}

/// Carries a step out, again where it was interrupted or failed. The same operation id is the same effect.
fn drive(draft: &mut Draft<'_>, node: u32, record: &NodeRecord, case: &Case, kind: StepKind) {
    let most = draft.snapshot.policy.repair.tries;
    let (op, tries) = match case.step(kind) {
        Some(step) if step.state == StepState::Intended => (step.op, step.tries),
        Some(step) if step.state == StepState::Failed => (draft.ids.op(), step.tries.saturating_add(1)),
        // Done, and yet not to be seen: give the backend time, then do it anew.
        Some(step) if step.state == StepState::Done && draft.snapshot.at.since(step.at) <= SETTLES_WITHIN => return,
        _ => (draft.ids.op(), 1),
    };
    // Marks are tried for ever, at a growing distance; the cycle's own length is the shortest.
    let last = case.step(kind).filter(|step| step.state == StepState::Failed);
    if let Some(step) = last
        && draft.snapshot.at.since(step.at) < Span::minutes(1).doubled(step.tries.min(10), Span::hours(1))
        && !(kind.destroys_evidence() && step.tries < most)
    {
        return;
    }
    let text = format!("for case {} at rung {}", case.id, case.rung);
    draft.touched.insert(node);
    draft.act(Action::Step { case: case.id, node: record.node.name.clone(), step: kind, op, tries }, "case", text.clone());
    if matches!(kind, StepKind::Reset | StepKind::Reboot | StepKind::Replace) {
        draft.advance(node, &LifeEvent::StepBegan { step: kind, tries }, Some(case.id), "case", text);
    }
}

fn propose(draft: &mut Draft<'_>, node: u32, record: &NodeRecord, case: &Case, kind: StepKind, why: &str) {
    if case.step(kind).is_none() {
        let op = draft.ids.op();
        draft.touched.insert(node);
        draft.act(Action::Propose { case: case.id, node: record.node.name.clone(), step: kind, op }, "not-allowed", why);
    }
}

fn escalate(draft: &mut Draft<'_>, node: u32, record: &NodeRecord, case: &Case, why: &str) {
    let Some(to) = case.rung.next() else {
        hand_over(draft, node, record, case, why);
        return;
    };
    draft.touched.insert(node);
    draft.act(Action::Escalate { case: case.id, to }, "did-not-help", why);
    let event = match record.life {
        Life::Proving { .. } => LifeEvent::ProofEnded,
        _ => LifeEvent::StepEnded,
    };
    draft.advance(node, &event, Some(case.id), "did-not-help", why);
}

/// What must pass before the node returns: what had failed, and what the policy adds.
fn required(draft: &Draft<'_>, node: u32, case: &Case) -> Vec<TestId> {
    let policy = &draft.snapshot.policy.repair.proving;
    let applicable = named(draft.snapshot, draft.index.applies(node));
    let failed = |test: &TestId| case.findings.iter().any(|finding| finding.check == *test);
    applicable.into_iter().filter(|test| policy.is_empty() || policy.contains(test) || failed(test)).collect()
}

enum Proof {
    Well,
    Bad(String),
    Nothing,
}

/// What the tests since then say. Only conclusive results count, and what had failed must have passed.
fn proof(draft: &Draft<'_>, node: u32, record: &NodeRecord, case: &Case, since: crate::time::Timestamp) -> Proof {
    let open: Vec<&OpenFinding> = record.findings.iter().collect();
    let mut passed = 0;
    let mut missing = false;
    for test in required(draft, node, case) {
        let Some(place) = draft.snapshot.tests.iter().position(|policy| policy.id == test) else { continue };
        let known = &record.records[place];
        let fresh = known.attempt().is_some_and(|at| at >= since);
        let had_failed = case.findings.iter().any(|finding| finding.check == test);
        match known.verdict().filter(|_| fresh) {
            Some(Verdict::Fail) => return Proof::Bad(format!("{test} fails still")),
            Some(Verdict::Pass) => passed += 1,
            Some(Verdict::NotApplicable) if !had_failed => {}
            _ => missing = true,
        }
    }
    if worst_confirmed(&open).is_some_and(|worst| worst > Severity::Monitor) {
        return Proof::Bad("something failing is still open against it".to_owned());
    }
    if missing || passed == 0 { Proof::Nothing } else { Proof::Well }
}

fn prove(draft: &mut Draft<'_>, node: u32, record: &NodeRecord, case: &Case) -> bool {
    let tests = required(draft, node, case);
    let Some(tests) = NonEmpty::new(tests) else {
        return hand_over(draft, node, record, case, "no test applies that could prove it");
    };
    let earlier: Vec<_> = {
        let given = case.steps.iter().rposition(|step| step.what == StepKind::Release).unwrap_or(0);
        case.steps[given..].iter().filter(|step| step.what == StepKind::Prove && step.rung == case.rung).collect()
    };
    if earlier.len() >= MOST_PROOFS {
        return hand_over(draft, node, record, case, "it could not be proved well: the tests bring no result");
    }
    let retry = &draft.snapshot.policy.retry;
    let wait = earlier.len().checked_sub(1).map(|n| retry.inconclusive.doubled(n as u32, retry.inconclusive_cap));
    let waiting = earlier.last().zip(wait).is_some_and(|(step, wait)| draft.snapshot.at < step.at.plus(wait));
    let full = draft.usage.jobs >= draft.snapshot.policy.limits.jobs;
    let shared = tests.iter().all(|test| {
        let place = draft.snapshot.tests.iter().position(|policy| policy.id == *test);
        place.is_some_and(|place| draft.usage.has_room(draft.snapshot, place)) && policy_of(draft.snapshot, test).is_some()
    });
    if waiting || full || !shared || !record.node.occupancy.is_free() || draft.active.contains(&node) {
        return false;
    }
    let (op, step) = (draft.ids.op(), StepKind::Prove);
    let text = "it is proved before it returns";
    draft.act(Action::Step { case: case.id, node: record.node.name.clone(), step, op, tries: 1 }, "proof", text);
    let asked = because(Purpose::Proving, "proof", format!("case {}: {text}", case.id));
    let run = draft.submit(node, tests, asked, Some(case.id));
    draft.advance(node, &LifeEvent::ProofBegan { run }, Some(case.id), "proof", text);
    false
}

/// Proved well: our marks go, then the case is closed. Only what is ours is taken away.
fn give_back(draft: &mut Draft<'_>, node: u32, record: &NodeRecord, case: &Case) {
    if record.node.marks.has_ours(MarkKind::Cordon) {
        drive(draft, node, record, case, StepKind::Undrain);
    } else if !record.node.marks.ours.is_empty() {
        drive(draft, node, record, case, StepKind::Unmark);
    } else {
        let name = record.node.name.clone();
        draft.act(Action::CloseCase { case: case.id, node: name, how: Closed::Returned }, "proved", "proved well");
        draft.advance(node, &LifeEvent::Returned, None, "proved", "proved well and back in service");
    }
}
