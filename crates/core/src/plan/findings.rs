//! Decides on nodes with open findings, marks or cases: suspicion, a new case, adoption of unknown marks.

use super::{
    Action, Notice,
    builder::{PlanBuilder, is_in_service},
    escalation, hardware_identity, holds,
    new_case::new_case,
    repair_request, steps,
};
use crate::{
    case::{Case, CaseOutcome, OperatorRequest, RepairStep, Step, StepKind, StepState},
    finding::{OpenFinding, Severity, worst_confirmed},
    ids::{CaseId, RunId},
    lifecycle::{NodeEvent, NodeState},
    node::{MarkKind, Occupancy, OurMark},
    policy::Mode,
    reason::WithReason,
    snapshot::NodeRecord,
};

/// Fewer silent agents than this are never an incident, however small the cluster.
pub const MIN_SILENT_AGENTS: u32 = 3;

pub(super) fn plan(builder: &mut PlanBuilder<'_>) {
    let silent = silent_nodes(builder);
    let index = builder.index;
    // Hardware identity comes first: a case that moves with its machine must not be worked on under its old name.
    for &node in &index.needs_attention {
        if !builder.finished.contains(&node) {
            hardware_identity::plan(builder, node, &builder.snapshot.nodes[node as usize]);
        }
    }
    hardware_identity::rebind_lost_cases(builder);
    for &node in &index.needs_attention {
        let record = &builder.snapshot.nodes[node as usize];
        remove_stale_maintenance_mark(builder, node, record);
        if builder.finished.contains(&node) {
            continue;
        }
        if let Some(case) = builder.open_case(record) {
            complete_observed_steps(builder, node, record, case);
        }
        if holds::plan(builder, node, record) {
            continue;
        }
        match builder.open_case(record) {
            Some(case) if is_in_service(&record.state) => handle_proposed_mark(builder, node, record, case),
            Some(case) => match case.requested_repair() {
                Some(request) => repair_request::advance(builder, node, record, case, request),
                None => escalation::advance(builder, node, record, case),
            },
            None if record.state.is_out_of_service() || record.node.marks.keeps_out_of_service() => {
                adopt(builder, node, record);
            }
            None => handle_findings(builder, node, record, silent.binary_search(&node).is_ok()),
        }
    }
    for node in silent {
        let record = &builder.snapshot.nodes[node as usize];
        let spoken_of = builder.state_changed.contains(&node) || builder.finished.contains(&node);
        if record.state == NodeState::InService && !spoken_of && record.hold_at(builder.snapshot.at).is_none() {
            builder.apply_event(node, &NodeEvent::Suspected, None, "agent-silent", "its agent does not report");
        }
    }
    if let Some(why) = builder.breaker.opens_now().map(str::to_owned) {
        builder.push_action(Action::OpenBreaker, "breaker-opened", why);
    }
}

/// Removes a maintenance mark that outlived its run, or whose run is being cancelled because a user needs the node,
/// regardless of which controller set it.
fn remove_stale_maintenance_mark(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord) {
    // The mark is temporary and ours, so it goes whatever the policy allows by now.
    if !record.node.marks.has_ours(MarkKind::Maintenance) || !builder.snapshot.capabilities.mark {
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
    if builder.open_case(record).is_some_and(repaired) {
        return;
    }
    let name = &record.node.name;
    let on_it = builder.snapshot.runs.iter().filter(|active| active.run.nodes.contains(name));
    let ends = |run: RunId| {
        builder.actions.iter().any(|act| matches!(act.value, Action::Cancel { run: other, .. } if other == run))
    };
    if on_it.clone().any(|active| active.cancelling.is_none() && !ends(active.run.id)) {
        return;
    }
    let begins = |act: &WithReason<Action>| matches!(&act.value, Action::Submit(run) if run.nodes.contains(name));
    if builder.actions.iter().any(begins) {
        return;
    }
    let op = builder.ids.op();
    builder.touched.insert(node);
    // Two changes of one node in the same plan have no order: everything else waits for the next plan.
    builder.finished.insert(node);
    builder.push_action(Action::RemoveMaintenanceMark { node: name.clone(), op }, "tested", "no test runs on the node");
}

/// Completes steps that took effect although the controller stopped before recording it. Until then, the removal of the
/// mark by another party would go unnoticed.
fn complete_observed_steps(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) {
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
            builder.touched.insert(node);
            let settle = Action::CompleteStep { case: case.id, op: step.op, done: true };
            builder.push_action(settle, "seen-done", format!("{} has taken effect", step.what));
        }
    }
}

/// Returns the nodes whose agent is silent, or none if so many are that the fault is Cluster Doctor's.
fn silent_nodes(builder: &mut PlanBuilder<'_>) -> Vec<u32> {
    let snapshot = builder.snapshot;
    let silent = builder.index.silent_since(snapshot.at.minus(snapshot.policy.agents.silent_after));
    let agents = builder.index.agents;
    let count = u32::try_from(silent.len()).unwrap_or(u32::MAX);
    let share = f64::from(count) * 100.0 / f64::from(agents.max(1));
    let incident = count >= MIN_SILENT_AGENTS && share >= snapshot.policy.agents.incident_percent;
    if incident {
        if !snapshot.silence_reported {
            let text = format!(
                "{count} of {agents} agents are silent: controller or network at fault; no node becomes suspect"
            );
            builder.push_action(
                Action::Notice(Notice::AgentsSilent { silent: count, total: agents }),
                "agents-silent",
                text,
            );
        }
        return Vec::new();
    }
    if snapshot.silence_reported {
        builder.push_action(Action::Notice(Notice::AgentsBack), "agents-back", "agents report again");
    }
    silent
}

/// Adopts a mark of ours that this store does not know (an older or empty store), or a node out of service whose case
/// is missing. It stays until an operator releases it.
fn adopt(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord) {
    if is_in_service(&record.state) {
        let text = "found a mark of ours that is not in the database; it stays until an operator releases the node";
        open_for_operator(builder, node, Severity::Isolate, "mark-adopted", text);
    } else if !matches!(record.node.occupancy, Occupancy::Unknown { .. }) {
        // A name of unknown occupancy may be one that its machine has left, together with the case.
        let text = "the node is out of service without a case; it stays so until an operator releases it";
        open_for_operator(builder, node, Severity::Isolate, "case-missing", text);
    }
}

/// Opens a case that only an operator can end.
pub(super) fn open_for_operator(
    builder: &mut PlanBuilder<'_>,
    node: u32,
    severity: Severity,
    code: &'static str,
    text: &str,
) {
    let record = &builder.snapshot.nodes[node as usize];
    let (op, what) = (builder.ids.op(), StepKind::HandOver);
    let id = if let Some(case) = builder.open_case(record) {
        let step = Action::Step { case: case.id, node: record.node.name.clone(), step: what, op, attempts: 1 };
        builder.push_action(step, code, text);
        case.id
    } else {
        let findings = record.findings.iter().map(|open| open.finding.clone()).collect();
        let mut case = new_case(builder, record, severity, findings);
        case.repair_step = RepairStep::Replace;
        let (rung, state, at) = (case.repair_step, StepState::Done, builder.snapshot.at);
        case.steps.push(Step { op, what, repair_step: rung, state, at, attempts: 1, text: text.to_owned() });
        let id = case.id;
        builder.push_action(Action::OpenCase(case), code, text);
        id
    };
    let marks = &record.node.marks;
    if !marks.has_ours(MarkKind::Unhealthy)
        && marks.blocking_foreign_mark().is_none()
        && steps::is_allowed(builder, StepKind::Mark)
    {
        mark(builder, record, id, code, text);
    }
    let after = |event: &NodeEvent| record.state.apply(event);
    let to =
        after(&NodeEvent::TakenOut).or_else(|| after(&NodeEvent::HandedOver)).unwrap_or_else(|| record.state.clone());
    builder.set_state(node, to, Some(id), code, text);
    builder.finished.insert(node);
}

/// Opens a case for an operator's quarantine: out of service immediately, examined as soon as the node is empty.
pub(super) fn open_to_examine(builder: &mut PlanBuilder<'_>, node: u32, evict: bool, request: &OperatorRequest) {
    let text = request.text();
    let record = &builder.snapshot.nodes[node as usize];
    if let Some(open) = builder.open_case(record) {
        let close = Action::CloseCase { case: open.id, node: record.node.name.clone(), how: CaseOutcome::Withdrawn };
        builder.push_action(close, "operator", "superseded by an operator's quarantine");
    }
    let findings = record.findings.iter().map(|open| open.finding.clone()).collect();
    let mut case = new_case(builder, record, Severity::Isolate, findings);
    case.repair_step = RepairStep::Quarantine;
    case.request = Some(request.clone());
    let marks = &record.node.marks;
    let unmarked = !marks.has_ours(MarkKind::Unhealthy);
    let is_theirs = marks.blocking_foreign_mark().is_some();
    let commanded = [
        unmarked.then_some(StepKind::Mark),
        Some(StepKind::Drain),
        evict.then_some(StepKind::Evict),
        Some(StepKind::Examine),
    ];
    for what in commanded.into_iter().flatten() {
        let (op, rung, state, at) = (builder.ids.op(), case.repair_step, StepState::Intended, builder.snapshot.at);
        case.steps.push(Step { op, what, repair_step: rung, state, at, attempts: 1, text: text.clone() });
    }
    let id = case.id;
    let marking = case
        .step(StepKind::Mark)
        .filter(|_| !is_theirs && steps::is_commanded(builder, &case, StepKind::Mark))
        .map(|step| step.op);
    builder.push_action(Action::OpenCase(case), "operator", text.clone());
    if let Some(op) = marking {
        let step = Action::Step { case: id, node: record.node.name.clone(), step: StepKind::Mark, op, attempts: 1 };
        builder.push_action(step, "operator", text.clone());
    }
    let to = record.state.apply(&NodeEvent::TakenOut).unwrap_or_else(|| record.state.clone());
    builder.set_state(node, to, Some(id), "operator", text);
    builder.finished.insert(node);
}

/// Handles a node without an open case: it becomes suspect, is taken out, or is cleared.
fn handle_findings(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, silent: bool) {
    if !is_in_service(&record.state) {
        return;
    }
    let live: Vec<&OpenFinding> = record.findings.iter().filter(|open| is_live(builder, open)).collect();
    let Some(newest) = live.iter().max_by_key(|open| (open.is_confirmed(), open.finding.severity)) else {
        if !silent {
            builder.apply_event(node, &NodeEvent::Cleared, None, "cleared", "no finding is open any more");
        }
        return;
    };
    let worst = worst_confirmed(&live);
    match worst {
        Some(severity) if severity > Severity::Monitor && builder.snapshot.policy.mode != Mode::Observe => {
            take_out(builder, node, record, severity, &live);
        }
        _ => {
            let text = newest.finding.text.clone();
            let code = if newest.is_confirmed() { "watched" } else { "unconfirmed" };
            builder.apply_event(node, &NodeEvent::Suspected, None, code, text);
        }
    }
}

fn is_live(builder: &PlanBuilder<'_>, open: &OpenFinding) -> bool {
    builder.snapshot.at.since(open.last_seen) <= builder.snapshot.policy.repair.watch
}

/// Opens a case for a confirmed and severe finding; the node leaves service if the breaker allows it.
fn take_out(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, severity: Severity, live: &[&OpenFinding]) {
    let worst = live.iter().filter(|open| open.is_confirmed()).max_by_key(|open| open.finding.severity);
    let text = worst.map_or_else(String::new, |open| open.finding.text.clone());
    if let Some(mark) = record.node.marks.blocking_foreign_mark() {
        let text = format!("{} already keeps the node out of service; {text}", mark.by);
        builder.apply_event(node, &NodeEvent::Suspected, None, "foreign-mark", text);
        return;
    }
    if !may_take_out(builder) {
        let case = new_case(builder, record, severity, live.iter().map(|open| open.finding.clone()).collect());
        let (id, op) = (case.id, builder.ids.op());
        builder.push_action(Action::OpenCase(case), "confirmed", text.clone());
        let propose = Action::Propose { case: id, node: record.node.name.clone(), step: StepKind::Mark, op };
        builder.push_action(propose, "not-allowed", "waiting for an operator: the controller may not mark the node");
        builder.set_state(node, NodeState::Suspect, Some(id), "confirmed", text);
        return;
    }
    if !breaker_allows(builder, node) {
        builder.apply_event(node, &NodeEvent::Suspected, None, "breaker-open", format!("the breaker is open; {text}"));
        return;
    }
    let case = new_case(builder, record, severity, live.iter().map(|open| open.finding.clone()).collect());
    let id = case.id;
    builder.push_action(Action::OpenCase(case), "confirmed", text.clone());
    if !steps::cannot_mark(builder) {
        mark(builder, record, id, "confirmed", &text);
    }
    builder.apply_event(node, &NodeEvent::TakenOut, Some(id), "confirmed", text);
    builder.finished.insert(node);
}

/// Returns whether nodes may be taken out of service at all. If the cluster has no marks, permission to mark suffices.
fn may_take_out(builder: &PlanBuilder<'_>) -> bool {
    let policy = &builder.snapshot.policy;
    let excludes = steps::cannot_mark(builder) && policy.mode != Mode::Observe && policy.allow.mark;
    excludes || steps::is_allowed(builder, StepKind::Mark)
}

fn breaker_allows(builder: &mut PlanBuilder<'_>, node: u32) -> bool {
    let index = builder.index;
    let pool = index.pool(node);
    builder.breaker.try_take_out(pool, index.pools[pool as usize].as_str(), &index.counts[pool as usize])
}

/// Handles a case whose mark was left to an operator: it ends when its findings do, and continues once the mark is set
/// or the controller may set it.
fn handle_proposed_mark(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case) {
    let marks = &record.node.marks;
    if record.findings.is_empty() {
        let text = "no finding is open any more";
        let close = Action::CloseCase { case: case.id, node: record.node.name.clone(), how: CaseOutcome::Withdrawn };
        builder.push_action(close, "cleared", text);
        builder.touched.insert(node);
        builder.apply_event(node, &NodeEvent::Cleared, None, "cleared", text);
    } else if marks.has_ours(MarkKind::Unhealthy) {
        builder.apply_event(node, &NodeEvent::TakenOut, Some(case.id), "marked", "the mark is set");
        builder.finished.insert(node);
    } else if marks.blocking_foreign_mark().is_none() && may_take_out(builder) && breaker_allows(builder, node) {
        let text = if steps::cannot_mark(builder) { "this cluster needs no mark" } else { "marking is allowed now" };
        if !steps::cannot_mark(builder) {
            mark(builder, record, case.id, "now-allowed", text);
        }
        builder.apply_event(node, &NodeEvent::TakenOut, Some(case.id), "now-allowed", text);
        builder.finished.insert(node);
    } else {
        let text = "waiting for an operator to mark the node";
        builder.apply_event(node, &NodeEvent::Suspected, Some(case.id), "confirmed", text);
    }
}

fn mark(builder: &mut PlanBuilder<'_>, record: &NodeRecord, case: CaseId, code: &'static str, text: &str) {
    let op = builder.ids.op();
    let step = Action::Step { case, node: record.node.name.clone(), step: StepKind::Mark, op, attempts: 1 };
    builder.push_action(step, code, text);
}

/// Returns the mark for a node that was found bad.
pub const fn unhealthy_mark(case: CaseId) -> OurMark {
    OurMark { kind: MarkKind::Unhealthy, case: Some(case) }
}
