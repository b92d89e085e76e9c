//! A repair that an operator requested: the node leaves service, is drained and emptied, its evidence is saved, the step
//! is performed once, and the node is requalified.
//!
//! It needs no permission in the policy and no maintenance window, and the circuit breaker does not block it. It needs
//! what the backend can do, a mode other than `observe`, and a pool that is not paused: until then, nothing of it begins.
//! An intent alone is no beginning: before the step is sent, the node's own report is collected, and the cluster may refuse
//! the step for a while. The executor records the moment right before it sends the step ([`SentRepair`]). Up to then a
//! pause or mode `observe` withdraws the intent; from then on the step is completed in any mode.
//!
//! If the step fails, or the node does not come back or does not pass its requalification, the case is handed over: no
//! harsher step follows by itself. A request that something else keeps from beginning lapses after [`REQUEST_LIFETIME`].
//!
//! [`SentRepair`]: crate::case::SentRepair

use super::{
    Action,
    builder::PlanBuilder,
    escalation::{self, deadline},
    new_case::new_case,
    requalification,
    steps::{hand_over, take_step},
};
use crate::{
    case::{Case, OperatorRequest, Repair, RequestedRepair, Step, StepKind, StepState},
    finding::Severity,
    ids::{NodeName, PoolName},
    lifecycle::{NodeEvent, NodeState},
    node::{MarkKind, Occupancy},
    policy::Mode,
    run::{CancelReason, ObservedJobState, Purpose},
    snapshot::{Capabilities, CommandKind, NodeRecord, Pause, PendingCommand, Snapshot},
    time::Span,
};

/// How long a requested repair may be kept from beginning by a hold, a pause, the mode or another party. Later, an operator
/// who ends one of these no longer expects the repair. User work that ends in its own time does not count.
pub const REQUEST_LIFETIME: Span = Span::hours(24);

/// Why no repair that an operator requests may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairBlock<'a> {
    /// In mode `observe` the controller changes nothing in the cluster.
    Observing,
    /// The node's pool is paused, or everything is.
    Paused(&'a Pause),
}

impl RepairBlock<'_> {
    /// Returns the reason.
    pub fn text(&self) -> String {
        match self {
            Self::Observing => "mode `observe` changes nothing in the cluster".to_owned(),
            Self::Paused(Pause { pool, by, why, .. }) => {
                let what = pool.as_ref().map_or_else(|| "everything".to_owned(), |pool| format!("pool {pool}"));
                format!("{what} is paused by {by} ({why})")
            }
        }
    }

    /// Returns what ends it.
    pub fn ended_by(&self) -> String {
        match self {
            Self::Observing => "set `mode = \"recommend\"` or `mode = \"act\"` in the policy file".to_owned(),
            Self::Paused(Pause { pool, .. }) => {
                let flag = pool.as_ref().map_or_else(String::new, |pool| format!(" --pool {pool}"));
                format!("`doctor resume{flag} --why …`")
            }
        }
    }
}

/// Returns what keeps repairs that an operator requests from beginning in this pool now.
pub fn repair_block<'a>(snapshot: &'a Snapshot, pool: &PoolName) -> Option<RepairBlock<'a>> {
    if snapshot.policy.mode == Mode::Observe {
        return Some(RepairBlock::Observing);
    }
    let active = snapshot.pauses.iter().filter(|pause| pause.until.is_none_or(|until| until > snapshot.at));
    let applies = |pause: &&Pause| pause.pool.as_ref().is_none_or(|paused| paused == pool);
    active.into_iter().find(applies).map(RepairBlock::Paused)
}

/// Returns whether the backend can perform this repair.
pub const fn can_repair(caps: &Capabilities, repair: Repair) -> bool {
    match repair {
        Repair::Reset => caps.reset,
        Repair::Reboot => caps.reboot,
        Repair::Replace => caps.replace,
    }
}

/// Handles an operator's command. Returns whether it is completed: the case carries it from then on. Until it may begin,
/// it stays open.
pub(super) fn accept(
    builder: &mut PlanBuilder<'_>,
    command: &PendingCommand,
    (name, what, evict): (&NodeName, Repair, bool),
) -> bool {
    let Some(node) = builder.find(name) else { return true };
    if let Some(why) = withdrawal(builder.snapshot, command, name) {
        let text = format!("{what} requested by {} ({}) is withdrawn: {why}", command.by, command.why);
        let withdraw = Action::WithdrawCommand { command: command.id, node: name.clone() };
        builder.push_action(withdraw, "withdrawn", text);
        return false;
    }
    let record = &builder.snapshot.nodes[node as usize];
    let held = record.hold_at(builder.snapshot.at).is_some()
        || matches!(record.state, NodeState::Held { .. })
        || record.node.marks.blocking_foreign_mark().is_some();
    let changed = builder.state_changed.contains(&node) || builder.finished.contains(&node);
    if held || changed || repair_block(builder.snapshot, &record.node.pool).is_some() {
        return false;
    }
    let case = builder.open_case(record);
    if case.is_some_and(|case| step_in_progress(builder, record, case).is_some()) {
        return false;
    }
    let request = OperatorRequest {
        by: command.by.clone(),
        why: command.why.clone(),
        repair: Some(RequestedRepair { what, op: builder.ids.op(), evict, sent: None }),
    };
    begin(builder, node, case, &request);
    true
}

/// Returns why a command that has not begun is withdrawn: a later command of an operator replaces it, or it has waited for
/// too long.
fn withdrawal(snapshot: &Snapshot, command: &PendingCommand, name: &NodeName) -> Option<String> {
    let replaces = |later: &PendingCommand| {
        let (by, why) = (&later.by, &later.why);
        match &later.kind {
            CommandKind::Repair { node, step, .. } if node == name => Some(format!("{by} requested {step} ({why})")),
            CommandKind::Release { node } if node == name => Some(format!("{by} released the node ({why})")),
            CommandKind::Repair { .. }
            | CommandKind::Release { .. }
            | CommandKind::Test { .. }
            | CommandKind::Quarantine { .. }
            | CommandKind::CancelRun { .. }
            | CommandKind::MultiNodeTest { .. } => None,
        }
    };
    let later = snapshot.commands.iter().filter(|later| later.id > command.id);
    let is_old = snapshot.at.since(command.at) > REQUEST_LIFETIME;
    later
        .filter_map(replaces)
        .next_back()
        .or_else(|| is_old.then(|| format!("it could not begin within {REQUEST_LIFETIME}")))
}

/// Returns the repair step that has begun on the node and may still take effect.
fn step_in_progress(builder: &PlanBuilder<'_>, record: &NodeRecord, case: &Case) -> Option<StepKind> {
    let NodeState::Repairing { step: kind, .. } = record.state else { return None };
    let begun = |step: &&Step| {
        step.what == kind
            && matches!(step.state, StepState::Intended | StepState::Done)
            && builder.snapshot.at.since(step.at) <= deadline(builder, kind)
    };
    case.steps.iter().rev().find(begun).map(|step| step.what)
}

/// Opens a case for the request, or takes the open one over. The node is out of service from now on.
fn begin(builder: &mut PlanBuilder<'_>, node: u32, open: Option<&Case>, request: &OperatorRequest) {
    let record = &builder.snapshot.nodes[node as usize];
    let (text, name) = (request.text(), record.node.name.clone());
    let case = match open {
        Some(case) => {
            end_other_work(builder, record, case);
            case.id
        }
        None => {
            let findings = record.findings.iter().map(|open| open.finding.clone()).collect();
            let case =
                Case { request: Some(request.clone()), ..new_case(builder, record, Severity::Isolate, findings) };
            let id = case.id;
            builder.push_action(Action::OpenCase(case), "operator", text.clone());
            id
        }
    };
    let ask = Action::RequestRepair { case, node: name, op: builder.ids.op(), request: request.clone() };
    builder.push_action(ask, "operator", text.clone());
    let events = [NodeEvent::TakenOut, NodeEvent::StepEnded, NodeEvent::RequalificationEnded];
    match events.iter().find_map(|event| record.state.apply(event)) {
        Some(to) => builder.set_state(node, to, Some(case), "operator", text),
        // It is quarantined already.
        None => drop(builder.touched.insert(node)),
    }
    builder.finished.insert(node);
}

/// Ends an examination or a requalification run of the case that the repair makes meaningless.
fn end_other_work(builder: &mut PlanBuilder<'_>, record: &NodeRecord, case: &Case) {
    if let Some(step) = case.step(StepKind::Examine).filter(|_| case.is_under_examination()) {
        let settle = Action::CompleteStep { case: case.id, op: step.op, done: false };
        builder.push_action(settle, "operator", "a repair was requested before the examination ended");
    }
    let NodeState::Requalifying { run: Some(run) } = record.state else { return };
    let Some(active) = builder.snapshot.runs.iter().find(|active| active.run.id == run) else { return };
    let ends = builder.actions.iter().any(|action| match action.value {
        Action::Cancel { run: other, .. } | Action::Conclude { run: other, .. } => other == run,
        Action::Resubmit { run: other } => other == run,
        _ => false,
    });
    let over = active.cancelling.is_some() || matches!(active.job, ObservedJobState::Ended { .. });
    if active.run.purpose.value == Purpose::Requalification && !ends && !over {
        let cancel = Action::Cancel { run, why: CancelReason::Withdrawn };
        builder.push_action(cancel, CancelReason::Withdrawn.code(), "an operator requested a repair");
    }
}

/// Takes the requested repair of an open case one step further.
pub(super) fn advance(
    builder: &mut PlanBuilder<'_>,
    node: u32,
    record: &NodeRecord,
    case: &Case,
    (request, repair): (&OperatorRequest, &RequestedRepair),
) {
    if let NodeState::Requalifying { run } = record.state {
        requalification::conclude(builder, node, record, case, run);
        return;
    }
    if escalation::raise_severity(builder, node, record, case) {
        return;
    }
    let kind = repair.what.step();
    let Some(step) = case.steps.iter().find(|step| step.op == repair.op) else {
        prepare(builder, node, record, case, (request, repair));
        return;
    };
    // What counts as our reboot is a boot since the step was sent, whatever was found before.
    let boot_id = repair.sent.as_ref().and_then(|sent| sent.boot_id.clone());
    let case = &Case { boot_id, ..case.clone() };
    match step.state {
        StepState::Intended => complete(builder, node, record, case, (repair, step)),
        StepState::Done if kind == StepKind::Replace => {
            let text = "waiting for the replacement machine";
            builder.apply_event(node, &NodeEvent::HandedOver, Some(case.id), "replacing", text);
        }
        StepState::Done => {
            if escalation::has_come_back(builder, node, record, case, step) {
                requalification::start(builder, node, record, case);
            }
        }
        StepState::Failed | StepState::Proposed => {
            let how = if step.text == request.text() {
                "failed, or did not take effect in time".to_owned()
            } else {
                format!("failed: {}", step.text)
            };
            let why = format!("the {kind} requested by {} {how}; waiting for an operator", request.by);
            hand_over(builder, node, record, case, &why);
        }
    }
}

/// Marks, drains and empties the node and saves its evidence, then performs the step. While a pause or mode `observe`
/// blocks the repair, only a mark or drain that was recorded as intended is completed.
fn prepare(
    builder: &mut PlanBuilder<'_>,
    node: u32,
    record: &NodeRecord,
    case: &Case,
    (request, repair): (&OperatorRequest, &RequestedRepair),
) {
    let (caps, kind) = (builder.snapshot.capabilities, repair.what.step());
    if let Some(kept) = lapsed(builder, record, case) {
        let asked = format!("{} requested by {}", repair.what, request.by);
        let why = format!("{asked} did not begin within {REQUEST_LIFETIME}: {kept}; waiting for an operator");
        hand_over(builder, node, record, case, &why);
        return;
    }
    let manual = record.node.manual_replacement().filter(|_| repair.what == Repair::Replace);
    if !can_repair(&caps, repair.what) || manual.is_some() {
        let why = manual.map_or_else(|| format!("the cluster cannot {kind} a node"), str::to_owned);
        hand_over(builder, node, record, case, &format!("{}, requested by {}: {why}", repair.what, request.by));
        return;
    }
    for (mark, set, can) in
        [(MarkKind::Unhealthy, StepKind::Mark, caps.mark), (MarkKind::Cordon, StepKind::Drain, caps.drain)]
    {
        if can && !record.node.marks.has_ours(mark) {
            take_unless_blocked(builder, node, record, case, set);
            return;
        }
    }
    let emptied = is_emptied(builder, node, record, case, repair);
    if !emptied || repair_block(builder.snapshot, &record.node.pool).is_some() {
        return;
    }
    if escalation::ensure_evidence_saved(builder, node, record, case) && !builder.active.contains(&node) {
        perform(builder, node, record, case, repair);
    }
}

/// Returns what kept the repair from beginning for longer than its lifetime: a pause or the mode does now, or a hold or
/// another party did until the node entered its present state.
fn lapsed(builder: &PlanBuilder<'_>, record: &NodeRecord, case: &Case) -> Option<String> {
    let until = case.repair_requested_at()?.plus(REQUEST_LIFETIME);
    if builder.snapshot.at <= until {
        return None;
    }
    let block = repair_block(builder.snapshot, &record.node.pool).map(|block| block.text());
    block.or_else(|| (record.since > until).then(|| "the node was held, or the repair was paused".to_owned()))
}

fn take_unless_blocked(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case, kind: StepKind) {
    let intended = case.step(kind).is_some_and(|step| step.state == StepState::Intended);
    if intended || repair_block(builder.snapshot, &record.node.pool).is_none() {
        take_step(builder, node, record, case, kind);
    }
}

/// Returns whether the step would end no user work, apart from work that the operator gave up with `--drain`.
fn is_emptied(
    builder: &mut PlanBuilder<'_>,
    node: u32,
    record: &NodeRecord,
    case: &Case,
    repair: &RequestedRepair,
) -> bool {
    let evicts = repair.evict && builder.snapshot.capabilities.evict;
    let evicted = is_evicted(case);
    let busy = matches!(record.node.occupancy, Occupancy::Busy { .. });
    // Work that uses no GPU does not make a node busy, but the step would end it all the same.
    if evicts && (busy || !evicted) {
        // Unlike a mark, an eviction is stopped halfway: the work that is left keeps running.
        if repair_block(builder.snapshot, &record.node.pool).is_none() {
            take_step(builder, node, record, case, StepKind::Evict);
        }
        escalation::propose_if_stuck(builder, node, record, case);
        return false;
    }
    if escalation::is_empty(record, case, repair.what.step()) || is_given_up(builder, record, case, repair) {
        return true;
    }
    escalation::propose_if_stuck(builder, node, record, case);
    false
}

fn is_evicted(case: &Case) -> bool {
    case.steps_since_request().iter().any(|step| step.what == StepKind::Evict && step.state == StepState::Done)
}

/// Returns whether the operator gave up the work that may run on a node which does not answer. A reset needs a node that
/// answers.
fn is_given_up(builder: &PlanBuilder<'_>, record: &NodeRecord, case: &Case, repair: &RequestedRepair) -> bool {
    let unknown = matches!(record.node.occupancy, Occupancy::Unknown { .. });
    let evicted = is_evicted(case) || !builder.snapshot.capabilities.evict;
    unknown && repair.evict && evicted && repair.what != Repair::Reset
}

/// Plans the step with the one operation id of the request: a repetition has no further effect.
fn perform(builder: &mut PlanBuilder<'_>, node: u32, record: &NodeRecord, case: &Case, repair: &RequestedRepair) {
    let kind = repair.what.step();
    let text = case.request.as_ref().map_or_else(String::new, OperatorRequest::text);
    let step = Action::Step { case: case.id, node: record.node.name.clone(), step: kind, op: repair.op, attempts: 1 };
    builder.touched.insert(node);
    builder.push_action(step, "operator", text.clone());
    builder.apply_event(node, &NodeEvent::StepStarted { step: kind, attempts: 1 }, Some(case.id), "operator", text);
}

/// Completes the step that was recorded as intended. Once it was sent it may have begun, so mode and pause no longer
/// matter; before that, they withdraw it.
fn complete(
    builder: &mut PlanBuilder<'_>,
    node: u32,
    record: &NodeRecord,
    case: &Case,
    (repair, step): (&RequestedRepair, &Step),
) {
    let (kind, limit) = (step.what, deadline(builder, step.what));
    if repair.sent.is_none()
        && let Some(why) = interruption(builder, record, kind)
    {
        let text = format!("{kind} was not sent to the cluster: {why}");
        builder.touched.insert(node);
        let withdraw = Action::WithdrawStep { case: case.id, node: record.node.name.clone(), op: step.op };
        builder.push_action(withdraw, "withdrawn", text.clone());
        builder.apply_event(node, &NodeEvent::StepEnded, Some(case.id), "withdrawn", text);
    } else if builder.snapshot.at.since(step.at) > limit {
        let happened = kind == StepKind::Reboot && escalation::boot_changed(record, case);
        let text = match happened {
            true => "the node was rebooted".to_owned(),
            false => format!("{kind} did not happen within {limit}"),
        };
        builder.touched.insert(node);
        let settle = Action::CompleteStep { case: case.id, op: step.op, done: happened };
        builder.push_action(settle, "deadline", text);
    } else if escalation::is_empty(record, case, kind) || is_given_up(builder, record, case, repair) {
        perform(builder, node, record, case, repair);
    } else {
        escalation::propose_if_stuck(builder, node, record, case);
    }
}

/// Returns why a step that was not sent yet has to be prepared again: it is blocked, or a hold has interrupted it.
fn interruption(builder: &PlanBuilder<'_>, record: &NodeRecord, kind: StepKind) -> Option<String> {
    let block = repair_block(builder.snapshot, &record.node.pool).map(|block| block.text());
    let in_progress = matches!(&record.state, NodeState::Repairing { step, .. } if *step == kind);
    block.or_else(|| (!in_progress).then(|| "the node was held meanwhile".to_owned()))
}
