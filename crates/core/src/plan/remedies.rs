//! What becomes of nodes with something open against them: doubt, cases, adoption, holds, machines that changed.

use super::{
    Action, Notice,
    draft::{Draft, is_touchable},
    ladder,
};
use crate::{
    case::{Case, CaseState, Closed, Rung, Step, StepKind, StepState},
    finding::{OpenFinding, Severity},
    ids::{CaseId, HardwareId},
    lifecycle::{Life, LifeEvent},
    node::{MarkKind, OurMark},
    policy::{Mode, Policy},
    snapshot::NodeRecord,
    time::Span,
};

/// A change of ours may take this long to show in what the backend reports.
pub(super) const SETTLES_WITHIN: Span = Span::minutes(2);

/// So few silent agents are never an incident of ours, however small the cluster.
const FEW_AGENTS: u32 = 3;

pub(super) fn plan(draft: &mut Draft<'_>) {
    let silent = silence(draft);
    let troubled: Vec<u32> = draft.index.troubled.iter().copied().collect();
    for node in troubled {
        let record = &draft.snapshot.nodes[node as usize];
        if draft.left_alone.contains(&node) || machine(draft, node, record) || hold(draft, node, record) {
            continue;
        }
        let case = record.case.and_then(|id| draft.case(id)).filter(|case| case.is_open());
        match case {
            Some(case) if record.life != Life::Suspect => ladder::climb(draft, node, record, case),
            Some(case) => proposed(draft, node, record, case),
            None if !record.node.marks.ours.is_empty() => adopt(draft, node, record),
            None => doubt(draft, node, record, silent.contains(&node)),
        }
    }
    for node in silent {
        let record = &draft.snapshot.nodes[node as usize];
        if record.life == Life::InService && record.findings.is_empty() && record.hold.is_none() {
            draft.advance(node, &LifeEvent::Doubted, None, "agent-silent", "its agent has not been heard");
        }
    }
    if let Some(why) = draft.gate.opens_now().map(str::to_owned) {
        draft.act(Action::OpenBreaker, "breaker-opened", why);
    }
}

/// Nodes whose agent is silent, or none if so many are that the fault is ours.
fn silence(draft: &mut Draft<'_>) -> Vec<u32> {
    let snapshot = draft.snapshot;
    let limit = snapshot.at.minus(snapshot.policy.agents.silent_after);
    let mut silent = Vec::new();
    let mut agents = 0_u32;
    for (node, record) in (0_u32..).zip(&snapshot.nodes) {
        if let Some(heard) = record.heard {
            agents += 1;
            if heard < limit && !record.life.is_out() {
                silent.push(node);
            }
        }
    }
    let count = u32::try_from(silent.len()).unwrap_or(u32::MAX);
    let share = f64::from(count) * 100.0 / f64::from(agents.max(1));
    let incident = count >= FEW_AGENTS && share >= snapshot.policy.agents.incident_percent;
    if incident {
        if !snapshot.silence_reported {
            let text = format!("{count} of {agents} agents are silent: an incident of ours; no node is suspected for it");
            draft.act(Action::Notice(Notice::AgentsSilent { silent: count, of: agents }), "agents-silent", text);
        }
        return Vec::new();
    }
    if snapshot.silence_reported {
        draft.act(Action::Notice(Notice::AgentsBack), "agents-back", "agents are heard again");
    }
    silent
}

/// A machine that became known, changed its name, or was exchanged. True if that is all for this cycle.
fn machine(draft: &mut Draft<'_>, node: u32, record: &NodeRecord) -> bool {
    let Some(now) = record.node.hardware.as_ref().and_then(crate::node::Hardware::id) else { return false };
    if record.hardware.as_ref() == Some(&now) {
        return false;
    }
    let name = &record.node.name;
    let mut elsewhere =
        draft.snapshot.cases.iter().filter(|case| case.is_open() && case.hardware == now && case.node != *name);
    let followed = elsewhere.next().map(|case| case.id);
    draft.touched.insert(node);
    draft.left_alone.insert(node);
    if record.hardware.is_none() {
        let action = Action::Identify { node: name.clone(), hardware: now.clone() };
        draft.act(action, "machine-known", format!("{name} is {now}"));
    } else {
        if let Some(case) = record.case.and_then(|id| draft.case(id)).filter(|case| case.is_open()) {
            let close = Action::CloseCase { case: case.id, node: name.clone(), how: Closed::Replaced };
            draft.act(close, "machine-exchanged", format!("another machine is called {name} now"));
        }
        let action = Action::Rename { node: name.clone(), hardware: now.clone() };
        draft.act(action, "machine-exchanged", format!("{name} is {now} now; its past begins anew"));
    }
    let out = Life::InService.after(&LifeEvent::TakenOut);
    if let (Some(case), Some(to)) = (followed, out.clone()) {
        let text = format!("{now} came back as {name} with its case open");
        draft.act(Action::Follow { case, node: name.clone() }, "machine-followed", text.clone());
        draft.act(Action::Move { node: name.clone(), to, case: Some(case) }, "machine-followed", text);
    } else if record.hardware.is_some()
        && !record.node.marks.ours.is_empty()
        && let Some(to) = out
    {
        // A new machine under a marked name: it proves itself, then the mark goes.
        let text = "a new machine proves itself before it serves";
        let mut case = new_case(draft, record, Severity::Isolate, Vec::new());
        case.hardware = now;
        case.rung = Rung::Quarantine;
        let id = case.id;
        draft.act(Action::OpenCase(case), "machine-exchanged", text);
        draft.act(Action::Move { node: name.clone(), to, case: Some(id) }, "machine-exchanged", text);
    }
    true
}

/// Holds: asked for, over, or read from what somebody did. True if the node is held after this.
fn hold(draft: &mut Draft<'_>, node: u32, record: &NodeRecord) -> bool {
    let case = record.case.and_then(|id| draft.case(id)).filter(|case| case.is_open());
    let asked = record.hold.as_ref().filter(|hold| hold.until.is_none_or(|until| until > draft.snapshot.at));
    if let Some(hold) = asked {
        let event = LifeEvent::HeldBy { by: hold.by.clone() };
        draft.advance(node, &event, record.case, "held", format!("held by {}: {}", hold.by, hold.why));
        return true;
    }
    let foreign = record.node.marks.foreign_block();
    if let Life::Held { .. } = record.life {
        let taken = case.is_some_and(|case| foreign.is_some() || mark_was_removed(draft, record, case));
        // A hold that an operator set is over; one that we read from the cluster is, when its cause is gone.
        if record.hold.is_some() || !taken {
            let event = LifeEvent::LetGo { out: case.is_some() };
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
        draft.advance(node, &by, Some(case.id), "mark-removed", "our mark was removed by somebody else; we do not put it back");
        return true;
    }
    false
}

/// We set the mark, we did not take it away, and it is not there.
fn mark_was_removed(draft: &Draft<'_>, record: &NodeRecord, case: &Case) -> bool {
    if record.node.marks.has_ours(MarkKind::Unhealthy) || case.is_released() {
        return false;
    }
    let last = case.steps.iter().rev().find(|step| matches!(step.what, StepKind::Mark | StepKind::Unmark));
    last.is_some_and(|step| {
        step.what == StepKind::Mark
            && step.state == StepState::Done
            && draft.snapshot.at.since(step.at) > SETTLES_WITHIN
    })
}

/// A mark of ours that this store knows nothing of: an older or empty store. It stays until a person says otherwise.
fn adopt(draft: &mut Draft<'_>, node: u32, record: &NodeRecord) {
    if is_touchable(&record.life) {
        let text = "a mark of ours was found that this store does not know; it stays until released";
        open_for_person(draft, node, Severity::Isolate, "mark-adopted", text);
    }
}

/// Opens a case that only a person ends: adopted marks, an operator's quarantine.
pub(super) fn open_for_person(draft: &mut Draft<'_>, node: u32, severity: Severity, code: &'static str, text: &str) {
    let record = &draft.snapshot.nodes[node as usize];
    let findings = record.findings.iter().map(|open| open.finding.clone()).collect();
    let mut case = new_case(draft, record, severity, findings);
    case.rung = Rung::Replace;
    let op = draft.ids.op();
    case.steps.push(Step {
        op,
        what: StepKind::HandOver,
        rung: case.rung,
        state: StepState::Done,
        at: draft.snapshot.at,
        tries: 1,
        text: text.to_owned(),
    });
    let id = case.id;
    draft.act(Action::OpenCase(case), code, text);
    if !record.node.marks.has_ours(MarkKind::Unhealthy) && ladder::may(draft, StepKind::Mark) {
        mark(draft, record, id, code, text);
    }
    draft.advance(node, &LifeEvent::TakenOut, Some(id), code, text);
    draft.left_alone.insert(node);
}

/// No case is open. Is there reason to doubt, to act, or to stop doubting?
fn doubt(draft: &mut Draft<'_>, node: u32, record: &NodeRecord, silent: bool) {
    if !is_touchable(&record.life) {
        return;
    }
    let live: Vec<&OpenFinding> = record.findings.iter().filter(|open| is_live(draft, open)).collect();
    let Some(newest) = live.iter().max_by_key(|open| (open.is_confirmed(), open.finding.severity)) else {
        if !silent {
            draft.advance(node, &LifeEvent::Cleared, None, "cleared", "nothing is open against it any more");
        }
        return;
    };
    let worst = worst_confirmed(&live);
    match worst {
        Some(severity) if severity > Severity::Monitor && draft.snapshot.policy.mode != Mode::Observe => {
            take_out(draft, node, record, severity, &live);
        }
        _ => {
            let text = newest.finding.text.clone();
            let code = if newest.is_confirmed() { "watched" } else { "unconfirmed" };
            draft.advance(node, &LifeEvent::Doubted, None, code, text);
        }
    }
}

pub(super) fn worst_confirmed(findings: &[&OpenFinding]) -> Option<Severity> {
    findings.iter().filter(|open| open.is_confirmed()).map(|open| open.finding.severity).max()
}

fn is_live(draft: &Draft<'_>, open: &OpenFinding) -> bool {
    draft.snapshot.at.since(open.last_seen) <= draft.snapshot.policy.repair.watch
}

/// Confirmed and bad enough: a case, and the node leaves service if the breaker lets it.
fn take_out(draft: &mut Draft<'_>, node: u32, record: &NodeRecord, severity: Severity, live: &[&OpenFinding]) {
    let worst = live.iter().filter(|open| open.is_confirmed()).max_by_key(|open| open.finding.severity);
    let text = worst.map_or_else(String::new, |open| open.finding.text.clone());
    if !ladder::may(draft, StepKind::Mark) {
        let case = new_case(draft, record, severity, live.iter().map(|open| open.finding.clone()).collect());
        let (id, op) = (case.id, draft.ids.op());
        draft.act(Action::OpenCase(case), "confirmed", text.clone());
        let propose = Action::Propose { case: id, node: record.node.name.clone(), step: StepKind::Mark, op };
        draft.act(propose, "not-allowed", "marking is left to a person");
        if !draft.advance(node, &LifeEvent::Doubted, Some(id), "confirmed", text.clone()) {
            let stay = Action::Move { node: record.node.name.clone(), to: Life::Suspect, case: Some(id) };
            draft.act(stay, "confirmed", text);
        }
        draft.touched.insert(node);
        return;
    }
    let pool = draft.index.pool(node);
    let name = draft.index.pools[pool as usize].clone();
    if !draft.gate.take_out(pool, name.as_str(), &draft.index.counts[pool as usize]) {
        draft.advance(node, &LifeEvent::Doubted, None, "breaker-open", format!("the breaker is open; {text}"));
        return;
    }
    let case = new_case(draft, record, severity, live.iter().map(|open| open.finding.clone()).collect());
    let id = case.id;
    draft.act(Action::OpenCase(case), "confirmed", text.clone());
    mark(draft, record, id, "confirmed", &text);
    draft.advance(node, &LifeEvent::TakenOut, Some(id), "confirmed", text);
    draft.left_alone.insert(node);
}

/// A case whose mark was left to a person: it ends when the findings do, or goes on when somebody marked.
fn proposed(draft: &mut Draft<'_>, node: u32, record: &NodeRecord, case: &Case) {
    if record.findings.is_empty() {
        let close = Action::CloseCase { case: case.id, node: record.node.name.clone(), how: Closed::Withdrawn };
        draft.act(close, "cleared", "nothing is open against it any more");
        draft.advance(node, &LifeEvent::Cleared, None, "cleared", "nothing is open against it any more");
    } else if ladder::may(draft, StepKind::Mark) {
        let pool = draft.index.pool(node);
        let name = draft.index.pools[pool as usize].clone();
        if draft.gate.take_out(pool, name.as_str(), &draft.index.counts[pool as usize]) {
            mark(draft, record, case.id, "now-allowed", "marking is allowed now");
            draft.advance(node, &LifeEvent::TakenOut, Some(case.id), "now-allowed", "marking is allowed now");
        }
    }
}

fn mark(draft: &mut Draft<'_>, record: &NodeRecord, case: CaseId, code: &'static str, text: &str) {
    let op = draft.ids.op();
    let step = Action::Step { case, node: record.node.name.clone(), step: StepKind::Mark, op, tries: 1 };
    draft.act(step, code, text);
}

fn new_case(
    draft: &mut Draft<'_>,
    record: &NodeRecord,
    severity: Severity,
    findings: Vec<crate::finding::Finding>,
) -> Case {
    let hardware = machine_of(record);
    let first = Policy::first_rung(severity);
    let rung = remembered(draft, &hardware).map_or(first, |tried| tried.max(first));
    Case {
        id: draft.ids.case(),
        hardware,
        node: record.node.name.clone(),
        opened: draft.snapshot.at,
        severity,
        findings,
        rung,
        steps: Vec::new(),
        state: CaseState::Open,
        boot_id: record.node.hardware.as_ref().and_then(|hardware| hardware.boot_id.clone()),
    }
}

/// The rung after the highest that was tried on this machine and is still remembered.
fn remembered(draft: &Draft<'_>, hardware: &HardwareId) -> Option<Rung> {
    let since = draft.snapshot.at.minus(draft.snapshot.policy.repair.memory);
    let tried = draft.snapshot.cases.iter().filter(|case| case.hardware == *hardware).filter(|case| {
        matches!(case.state, CaseState::Closed { at, how: Closed::Returned } if at > since)
    });
    tried
        .filter(|case| case.ever_done(StepKind::Reset) || case.ever_done(StepKind::Reboot))
        .map(|case| case.rung.next().unwrap_or(Rung::Replace))
        .max()
}

/// The machine's own name, or where it told none, the node's.
fn machine_of(record: &NodeRecord) -> HardwareId {
    let told = record.node.hardware.as_ref().and_then(crate::node::Hardware::id);
    told.or_else(|| record.hardware.clone()).unwrap_or_else(|| {
        HardwareId::new(record.node.name.as_str()).expect("what is safe as a node name is safe as a hardware id")
    })
}

/// The mark that says what we found.
pub const fn unhealthy(case: CaseId) -> OurMark {
    OurMark { kind: MarkKind::Unhealthy, case: Some(case) }
}
