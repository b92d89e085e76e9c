//! Decides on nodes with open findings, marks or cases: suspicion, a new case, adoption of unknown marks.

use super::{
    Action, Notice,
    builder::{PlanBuilder, is_in_service},
    escalation, hardware_identity, holds,
    new_case::new_case,
    steps,
};
use crate::{
    case::{Case, CaseOutcome, RepairStep, Step, StepKind, StepState},
    finding::{OpenFinding, Severity, worst_confirmed},
    ids::{CaseId, RunId},
    lifecycle::{NodeEvent, NodeState},
    node::{MarkKind, Occupancy, OurMark},
    policy::Mode,
    reason::WithReason,
    snapshot::NodeRecord,
};

/// Fewer silent agents than this are never an incident, however small the cluster.
const MIN_SILENT_AGENTS: u32 = 3;

pub(super) fn plan(draft: &mut PlanBuilder<'_>) {
    let silent = silent_nodes(draft);
    let index = draft.index;
    // Hardware identity comes first: a case that moves with its machine must not be worked on under its old name.
    for &node in &index.needs_attention {
        if !draft.finished.contains(&node) {
            hardware_identity::plan(draft, node, &draft.snapshot.nodes[node as usize]);
        }
    }
    hardware_identity::rebind_lost_cases(draft);
    for &node in &index.needs_attention {
        let record = &draft.snapshot.nodes[node as usize];
        remove_stale_maintenance_mark(draft, node, record);
        if draft.finished.contains(&node) {
            continue;
        }
        if let Some(case) = draft.open_case(record) {
            complete_observed_steps(draft, node, record, case);
        }
        if holds::plan(draft, node, record) {
            continue;
        }
        match draft.open_case(record) {
            Some(case) if is_in_service(&record.state) => handle_proposed_mark(draft, node, record, case),
            Some(case) => escalation::advance(draft, node, record, case),
            None if record.state.is_out_of_service() || record.node.marks.keeps_out_of_service() => {
                adopt(draft, node, record);
            }
            None => handle_findings(draft, node, record, silent.binary_search(&node).is_ok()),
        }
    }
    for node in silent {
        let record = &draft.snapshot.nodes[node as usize];
        let spoken_of = draft.state_changed.contains(&node) || draft.finished.contains(&node);
        if record.state == NodeState::InService && !spoken_of && record.hold_at(draft.snapshot.at).is_none() {
            draft.apply_event(node, &NodeEvent::Suspected, None, "agent-silent", "its agent does not report");
        }
    }
    if let Some(why) = draft.breaker.opens_now().map(str::to_owned) {
        draft.push_action(Action::OpenBreaker, "breaker-opened", why);
    }
}

/// Removes a maintenance mark that outlived its run, or whose run is being cancelled because the node is wanted,
/// regardless of which controller set it.
fn remove_stale_maintenance_mark(draft: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord) {
    // The mark is temporary and ours, so it goes whatever the policy allows by now.
    if !record.node.marks.has_ours(MarkKind::Maintenance) || !draft.snapshot.capabilities.mark {
        return;
    }
    // A repair may need it too, and removes it itself.
    let repaired = |case: &Case| {
        let under_way = |step: &Step| {
            step.state == StepState::Intended
                && matches!(step.what, StepKind::Reset | StepKind::Reboot | StepKind::Replace)
        };
        case.steps.iter().any(under_way)
    };
    if draft.open_case(record).is_some_and(repaired) {
        return;
    }
    let name = &record.node.name;
    let on_it = draft.snapshot.runs.iter().filter(|active| active.run.nodes.contains(name));
    let ends = |run: RunId| {
        draft.actions.iter().any(|act| matches!(act.what, Action::Cancel { run: other, .. } if other == run))
    };
    if on_it.clone().any(|active| active.cancelling.is_none() && !ends(active.run.id)) {
        return;
    }
    let begins = |act: &WithReason<Action>| matches!(&act.what, Action::Submit(run) if run.nodes.contains(name));
    if draft.actions.iter().any(begins) {
        return;
    }
    let op = draft.ids.op();
    draft.touched.insert(node);
    // Two changes of one node in the same plan have no order: everything else waits for the next plan.
    draft.finished.insert(node);
    draft.push_action(Action::Tidy { node: name.clone(), op }, "tested", "no test runs on the node");
}

/// Completes steps that took effect although the controller stopped before recording it. Until then, the removal of the
/// mark by another party would go unnoticed.
fn complete_observed_steps(draft: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) {
    let marks = &record.node.marks;
    for step in case.steps.iter().filter(|step| step.state == StepState::Intended) {
        let seen = match step.what {
            StepKind::Mark => marks.has_ours(MarkKind::Unhealthy),
            StepKind::Drain => marks.has_ours(MarkKind::Cordon),
            StepKind::Undrain => !marks.has_ours(MarkKind::Cordon),
            StepKind::Unmark => marks.ours.iter().all(|mark| mark.kind == MarkKind::Cordon),
            // These leave no mark; they are requested again with the same id.
            _ => false,
        };
        if seen {
            draft.touched.insert(node);
            let settle = Action::Settle { case: case.id, op: step.op, done: true };
            draft.push_action(settle, "seen-done", format!("{} has taken effect", step.what));
        }
    }
}

/// Returns the nodes whose agent is silent, or none if so many are that the fault is Cluster Doctor's.
fn silent_nodes(draft: &mut PlanBuilder<'_>) -> Vec<u32> {
    let snapshot = draft.snapshot;
    let silent = draft.index.silent_since(snapshot.at.minus(snapshot.policy.agents.silent_after));
    let agents = draft.index.agents;
    let count = u32::try_from(silent.len()).unwrap_or(u32::MAX);
    let share = f64::from(count) * 100.0 / f64::from(agents.max(1));
    let incident = count >= MIN_SILENT_AGENTS && share >= snapshot.policy.agents.incident_percent;
    if incident {
        if !snapshot.silence_reported {
            let text = format!(
                "{count} of {agents} agents are silent: controller or network at fault; no node becomes suspect"
            );
            draft.push_action(
                Action::Notice(Notice::AgentsSilent { silent: count, of: agents }),
                "agents-silent",
                text,
            );
        }
        return Vec::new();
    }
    if snapshot.silence_reported {
        draft.push_action(Action::Notice(Notice::AgentsBack), "agents-back", "agents report again");
    }
    silent
}

/// Adopts a mark of ours that this store does not know (an older or empty store), or a node out of service whose case
/// is missing. It stays until an operator releases it.
fn adopt(draft: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord) {
    if is_in_service(&record.state) {
        let text = "found a mark of ours that is not in the database; it stays until an operator releases the node";
        open_for_operator(draft, node, Severity::Isolate, "mark-adopted", text);
    } else if !matches!(record.node.occupancy, Occupancy::Unknown { .. }) {
        // A name of unknown occupancy may be one that its machine has left, together with the case.
        let text = "the node is out of service without a case; it stays so until an operator releases it";
        open_for_operator(draft, node, Severity::Isolate, "case-missing", text);
    }
}

/// Opens a case that only an operator can end.
pub(super) fn open_for_operator(
    draft: &mut PlanBuilder<'_>,
    node: u32,
    severity: Severity,
    code: &'static str,
    text: &str,
) {
    let record = &draft.snapshot.nodes[node as usize];
    let (op, what) = (draft.ids.op(), StepKind::HandOver);
    let id = if let Some(case) = draft.open_case(record) {
        let step = Action::Step { case: case.id, node: record.node.name.clone(), step: what, op, tries: 1 };
        draft.push_action(step, code, text);
        case.id
    } else {
        let findings = record.findings.iter().map(|open| open.finding.clone()).collect();
        let mut case = new_case(draft, record, severity, findings);
        case.rung = RepairStep::Replace;
        let (rung, state, at) = (case.rung, StepState::Done, draft.snapshot.at);
        case.steps.push(Step { op, what, rung, state, at, tries: 1, text: text.to_owned() });
        let id = case.id;
        draft.push_action(Action::OpenCase(case), code, text);
        id
    };
    let marks = &record.node.marks;
    if !marks.has_ours(MarkKind::Unhealthy)
        && marks.blocking_foreign_mark().is_none()
        && steps::is_allowed(draft, StepKind::Mark)
    {
        mark(draft, record, id, code, text);
    }
    let after = |event: &NodeEvent| record.state.apply(event);
    let to =
        after(&NodeEvent::TakenOut).or_else(|| after(&NodeEvent::HandedOver)).unwrap_or_else(|| record.state.clone());
    draft.set_state(node, to, Some(id), code, text);
    draft.finished.insert(node);
}

/// Opens a case for an operator's quarantine: out of service immediately, examined as soon as the node is empty.
pub(super) fn open_to_examine(draft: &mut PlanBuilder<'_>, node: u32, evict: bool, text: &str) {
    let record = &draft.snapshot.nodes[node as usize];
    if let Some(open) = draft.open_case(record) {
        let close = Action::CloseCase { case: open.id, node: record.node.name.clone(), how: CaseOutcome::Withdrawn };
        draft.push_action(close, "operator", "superseded by an operator's quarantine");
    }
    let findings = record.findings.iter().map(|open| open.finding.clone()).collect();
    let mut case = new_case(draft, record, Severity::Isolate, findings);
    case.rung = RepairStep::Quarantine;
    let marks = &record.node.marks;
    let unmarked = !marks.has_ours(MarkKind::Unhealthy);
    let is_theirs = marks.blocking_foreign_mark().is_some();
    let asked = [
        unmarked.then_some(StepKind::Mark),
        Some(StepKind::Drain),
        evict.then_some(StepKind::Evict),
        Some(StepKind::Examine),
    ];
    for what in asked.into_iter().flatten() {
        let (op, rung, state, at) = (draft.ids.op(), case.rung, StepState::Intended, draft.snapshot.at);
        case.steps.push(Step { op, what, rung, state, at, tries: 1, text: text.to_owned() });
    }
    let id = case.id;
    let marking = case
        .step(StepKind::Mark)
        .filter(|_| !is_theirs && steps::is_commanded(draft, &case, StepKind::Mark))
        .map(|step| step.op);
    draft.push_action(Action::OpenCase(case), "operator", text);
    if let Some(op) = marking {
        let step = Action::Step { case: id, node: record.node.name.clone(), step: StepKind::Mark, op, tries: 1 };
        draft.push_action(step, "operator", text);
    }
    let to = record.state.apply(&NodeEvent::TakenOut).unwrap_or_else(|| record.state.clone());
    draft.set_state(node, to, Some(id), "operator", text);
    draft.finished.insert(node);
}

/// Handles a node without an open case: it becomes suspect, is taken out, or is cleared.
fn handle_findings(draft: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, silent: bool) {
    if !is_in_service(&record.state) {
        return;
    }
    let live: Vec<&OpenFinding> = record.findings.iter().filter(|open| is_live(draft, open)).collect();
    let Some(newest) = live.iter().max_by_key(|open| (open.is_confirmed(), open.finding.severity)) else {
        if !silent {
            draft.apply_event(node, &NodeEvent::Cleared, None, "cleared", "no finding is open any more");
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
            draft.apply_event(node, &NodeEvent::Suspected, None, code, text);
        }
    }
}

fn is_live(draft: &PlanBuilder<'_>, open: &OpenFinding) -> bool {
    draft.snapshot.at.since(open.last_seen) <= draft.snapshot.policy.repair.watch
}

/// Opens a case for a confirmed and severe finding; the node leaves service if the breaker allows it.
fn take_out(draft: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, severity: Severity, live: &[&OpenFinding]) {
    let worst = live.iter().filter(|open| open.is_confirmed()).max_by_key(|open| open.finding.severity);
    let text = worst.map_or_else(String::new, |open| open.finding.text.clone());
    if let Some(mark) = record.node.marks.blocking_foreign_mark() {
        let text = format!("{} already keeps the node out of service; {text}", mark.by);
        draft.apply_event(node, &NodeEvent::Suspected, None, "foreign-mark", text);
        return;
    }
    if !may_take_out(draft) {
        let case = new_case(draft, record, severity, live.iter().map(|open| open.finding.clone()).collect());
        let (id, op) = (case.id, draft.ids.op());
        draft.push_action(Action::OpenCase(case), "confirmed", text.clone());
        let propose = Action::Propose { case: id, node: record.node.name.clone(), step: StepKind::Mark, op };
        draft.push_action(propose, "not-allowed", "waiting for an operator: the controller may not mark the node");
        draft.set_state(node, NodeState::Suspect, Some(id), "confirmed", text);
        return;
    }
    if !breaker_allows(draft, node) {
        draft.apply_event(node, &NodeEvent::Suspected, None, "breaker-open", format!("the breaker is open; {text}"));
        return;
    }
    let case = new_case(draft, record, severity, live.iter().map(|open| open.finding.clone()).collect());
    let id = case.id;
    draft.push_action(Action::OpenCase(case), "confirmed", text.clone());
    if !steps::cannot_mark(draft) {
        mark(draft, record, id, "confirmed", &text);
    }
    draft.apply_event(node, &NodeEvent::TakenOut, Some(id), "confirmed", text);
    draft.finished.insert(node);
}

/// Returns whether nodes may be taken out of service at all. If the cluster has no marks, permission to mark suffices.
fn may_take_out(draft: &PlanBuilder<'_>) -> bool {
    let policy = &draft.snapshot.policy;
    let excludes = steps::cannot_mark(draft) && policy.mode != Mode::Observe && policy.allow.mark;
    excludes || steps::is_allowed(draft, StepKind::Mark)
}

fn breaker_allows(draft: &mut PlanBuilder<'_>, node: u32) -> bool {
    let index = draft.index;
    let pool = index.pool(node);
    draft.breaker.try_take_out(pool, index.pools[pool as usize].as_str(), &index.counts[pool as usize])
}

/// Handles a case whose mark was left to an operator: it ends when its findings do, and continues once the mark is set
/// or the controller may set it.
fn handle_proposed_mark(draft: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) {
    let marks = &record.node.marks;
    if record.findings.is_empty() {
        let text = "no finding is open any more";
        let close = Action::CloseCase { case: case.id, node: record.node.name.clone(), how: CaseOutcome::Withdrawn };
        draft.push_action(close, "cleared", text);
        draft.touched.insert(node);
        draft.apply_event(node, &NodeEvent::Cleared, None, "cleared", text);
    } else if marks.has_ours(MarkKind::Unhealthy) {
        draft.apply_event(node, &NodeEvent::TakenOut, Some(case.id), "marked", "the mark is set");
        draft.finished.insert(node);
    } else if marks.blocking_foreign_mark().is_none() && may_take_out(draft) && breaker_allows(draft, node) {
        let text = if steps::cannot_mark(draft) { "this cluster needs no mark" } else { "marking is allowed now" };
        if !steps::cannot_mark(draft) {
            mark(draft, record, case.id, "now-allowed", text);
        }
        draft.apply_event(node, &NodeEvent::TakenOut, Some(case.id), "now-allowed", text);
        draft.finished.insert(node);
    } else {
        let text = "waiting for an operator to mark the node";
        draft.apply_event(node, &NodeEvent::Suspected, Some(case.id), "confirmed", text);
    }
}

fn mark(draft: &mut PlanBuilder<'_>, record: &NodeRecord, case: CaseId, code: &'static str, text: &str) {
    let op = draft.ids.op();
    let step = Action::Step { case, node: record.node.name.clone(), step: StepKind::Mark, op, tries: 1 };
    draft.push_action(step, code, text);
}

/// Returns the mark for a node that was found bad.
pub const fn unhealthy_mark(case: CaseId) -> OurMark {
    OurMark { kind: MarkKind::Unhealthy, case: Some(case) }
}
