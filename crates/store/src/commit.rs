//! Commits a plan before it is carried out: every action of a cycle, in one transaction.

use std::collections::BTreeSet;

use doctor_core::{
    case::{StepKind, StepState},
    ids::{CaseId, NodeName, RunId},
    plan::{Action, Notice},
    reason::WithReason,
    snapshot::{Breaker, CommandKind},
    time::{Span, Timestamp},
};

use super::{
    Store, acknowledged_events,
    audit::{self, Counter, NewAuditLine},
    cases::{self, NewStep},
    db::{ColumnType, Tx, vals},
    error::{Result, StoreError},
    fencing::Lease,
    findings::{CheckFindings, FindingChanges, OpenFindings},
    ingest_queue, json, measured_counts, nodes, operator_commands, outbox,
    records::{CycleId, CycleIntent},
    runs,
    runs_without_result::conclude,
};

impl Store {
    /// Writes a cycle's plan. After this returns, each of its effects happens exactly once, possibly after a restart.
    ///
    /// # Errors
    /// [`StoreError::ResultWaits`] if the plan ends a run whose result has arrived since the plan was made.
    pub fn commit(&self, lease: &Lease, intent: &CycleIntent<'_>) -> Result<CycleId> {
        self.write(lease, |tx| {
            let submitted = intent.actions.iter().filter(|action| matches!(action.value, Action::Submit(_))).count();
            let cycle = tx.insert(
                "writing a cycle",
                "INSERT INTO cycle (at, actions, submitted, policy_version) VALUES ($1, $2, $3, $4)",
                vals![intent.at, intent.actions.len() as u64, submitted as u64, intent.policy_version],
            )?;
            let cycle = CycleId(cycle.cast_unsigned());
            let taken_out = nodes_taken_out(tx, intent.actions)?;
            let mut lines = Vec::with_capacity(intent.actions.len());
            for action in intent.actions {
                apply(tx, intent, action, &taken_out)?;
                lines.push(line(tx, action, intent.at)?);
            }
            audit::append(tx, intent.at, Some(cycle), &lines)?;
            open_attributed_findings(tx, intent)?;
            write_reasons(tx, intent)?;
            outbox::queue(tx, intent.notifications)?;
            audit::add_counts(tx, &[(Counter::Cycles, 1)])?;
            Ok(cycle)
        })
    }

    /// Records how long the cycle took, and what kept it from observing or doing everything.
    pub fn finish_cycle(&self, lease: &Lease, cycle: CycleId, elapsed: Span, error: Option<&str>) -> Result<()> {
        let sql = "UPDATE cycle SET duration_ms = $2, error = $3 WHERE id = $1";
        self.write(lease, |tx| tx.execute("finishing a cycle", sql, vals![cycle.0, elapsed, error]).map(drop))
    }
}

fn apply(
    tx: &mut Tx<'_>,
    intent: &CycleIntent<'_>,
    action: &WithReason<Action>,
    taken_out: &BTreeSet<NodeName>,
) -> Result<()> {
    let at = intent.at;
    match &action.value {
        Action::Submit(run) => {
            let key = intent.keys.get(&run.id).ok_or_else(|| StoreError::Refused {
                operation: "writing a cycle",
                why: format!("the plan submits {} without a key for it", run.id),
            })?;
            if run.case.is_some() {
                // Kernel events up to now are what requalification answers; from here on only new ones count.
                for node in run.nodes.iter() {
                    let node = tx.node_id(node, at)?;
                    acknowledged_events::acknowledge(tx, node, at)?;
                }
            }
            runs::plan_run(tx, run, key)
        }
        // An earlier cycle stored it.
        Action::Resubmit { .. } => Ok(()),
        Action::Cancel { run, why } => runs::cancel_run(tx, *run, *why, at),
        Action::Conclude { run, .. } if ingest_queue::result_is_queued(tx, *run)? => {
            Err(StoreError::ResultWaits { run: *run })
        }
        Action::Conclude { run, end } => conclude(tx, *run, *end, at, intent.retry).map(drop),
        Action::OpenCase(case) => cases::open(tx, case),
        Action::Escalate { case, to } => cases::escalate(tx, *case, *to),
        Action::RaiseSeverity { case, node } => cases::raise_severity(tx, *case, node, at),
        Action::Advise { case, advice, .. } => cases::advise(tx, *case, *advice),
        Action::Step { case, node, step, op, attempts: tries } => {
            if *step == StepKind::Requalify {
                // Also where no run is submitted, because the agent's checks alone decide.
                let node = tx.node_id(node, at)?;
                acknowledged_events::acknowledge(tx, node, at)?;
            }
            let state = if step.is_bookkeeping() { StepState::Done } else { StepState::Intended };
            let text = action.text.as_str();
            cases::add_step(tx, *case, &NewStep { op: *op, what: *step, state, attempts: *tries, text }, at)?;
            if *step == StepKind::SaveEvidence { cases::pin_evidence(tx, *case) } else { Ok(()) }
        }
        Action::RequestRepair { case, op, request, .. } => cases::request_repair(tx, *case, *op, request, at),
        Action::Propose { case, step, op, .. } => {
            let (state, text) = (StepState::Proposed, action.text.as_str());
            cases::add_step(tx, *case, &NewStep { op: *op, what: *step, state, attempts: 0, text }, at)
        }
        Action::CompleteStep { case, op, done } => cases::complete_step(tx, *case, *op, *done, at),
        Action::WithdrawStep { case, op, .. } => cases::withdraw_step(tx, *case, *op),
        Action::SetState { node, to, case } => {
            let id = tx.node_id(node, at)?;
            let was_out = nodes::node_state(tx, id)?.is_some_and(|state| state.is_out_of_service());
            if to.is_out_of_service() && !was_out && taken_out.contains(node) {
                let sql = "INSERT INTO node_taken_out (at, node) VALUES ($1, $2) ON CONFLICT DO NOTHING";
                tx.execute("recording a node taken out of service", sql, vals![at, id])?;
            }
            nodes::set_node_state(tx, id, to, at, *case)
        }
        Action::CloseCase { case, node, how } => cases::close(tx, *case, node, *how, at),
        Action::RebindCase { case, node } => cases::rebind(tx, *case, node, at),
        Action::OpenBreaker => {
            operator_commands::set_breaker(tx, &Breaker::Open { since: at, why: action.text.clone() })
        }
        Action::Notice(Notice::AgentsSilent { .. }) => operator_commands::set_agent_silence_reported(tx, true),
        Action::Notice(Notice::AgentsBack) => operator_commands::set_agent_silence_reported(tx, false),
        Action::CompleteCommand { command: request } => {
            if let Some(CommandKind::Release { node }) = read_command(tx, *request)? {
                let node = tx.node_id(&node, at)?;
                acknowledged_events::release(tx, node, at)?;
                measured_counts::release(tx, node, at)?;
            }
            delete_command(tx, *request)
        }
        Action::WithdrawCommand { command, .. } => delete_command(tx, *command),
        Action::HardwareIdentified { node, hardware } => {
            let id = tx.node_id(node, at)?;
            nodes::set_hardware(tx, id, hardware, at)
        }
        Action::StartTrial { command: request, run } => add_trial(tx, *request, *run),
        // Written together with all attributed faults, below.
        Action::AttributeFault { .. } => Ok(()),
        // The mark exists on the node only.
        Action::RemoveMaintenanceMark { .. } => Ok(()),
        Action::HardwareReplaced { node, hardware } => {
            let id = tx.node_id(node, at)?;
            nodes::reset_for_new_hardware(tx, id, hardware, at)
        }
    }
}

/// Returns the nodes that this plan marks on its own initiative, which the breaker counts. Excludes nodes that an
/// operator asked to quarantine or repair, that were found marked, or that return from a hold.
fn nodes_taken_out(tx: &mut Tx<'_>, actions: &[WithReason<Action>]) -> Result<BTreeSet<NodeName>> {
    let mut nodes = BTreeSet::new();
    for action in actions {
        if let Action::Step { node, step: StepKind::Mark, .. } = &action.value {
            nodes.insert(node.clone());
        }
    }
    for action in actions {
        if let Action::CompleteCommand { command: request } = action.value
            && let Some(CommandKind::Quarantine { node, .. } | CommandKind::Repair { node, .. }) =
                read_command(tx, request)?
        {
            nodes.remove(&node);
        }
    }
    Ok(nodes)
}

/// Adds a run to a request for tests; its end determines the next step.
fn add_trial(tx: &mut Tx<'_>, request: u64, new: RunId) -> Result<()> {
    let Some(mut command) = read_command(tx, request)? else { return Ok(()) };
    match &mut command {
        CommandKind::Test { run, .. } => *run = Some(new),
        CommandKind::MultiNodeTest { trials, .. } => trials.push(new),
        CommandKind::Release { .. }
        | CommandKind::Quarantine { .. }
        | CommandKind::Repair { .. }
        | CommandKind::CancelRun { .. } => return Ok(()),
    }
    let body = json::write(&command)?;
    tx.execute("adding a trial", "UPDATE operator_command SET body = $2 WHERE id = $1", vals![request, &body]).map(drop)
}

/// Opens the findings of multi-node trials against the nodes that they implicate.
fn open_attributed_findings(tx: &mut Tx<'_>, intent: &CycleIntent<'_>) -> Result<()> {
    let attributed = intent.actions.iter().filter_map(|action| match &action.value {
        Action::AttributeFault { node, test, run, .. } => Some((node, test, *run)),
        _ => None,
    });
    let mut changes = FindingChanges::default();
    for ((node, test, run), findings) in attributed.zip(intent.attributed_findings) {
        let (node, check) = (tx.node_id(node, intent.at)?, tx.test_id(test)?);
        let reported = CheckFindings {
            node,
            check,
            run: Some(run),
            at: intent.at,
            findings,
            is_conclusive: true,
            is_requalification: false,
            boot: None,
        };
        OpenFindings::load(tx, &[node])?.apply(&reported, &mut changes);
    }
    changes.write(tx)?;
    audit::append(tx, intent.at, None, &changes.audit_lines)
}

fn delete_command(tx: &mut Tx<'_>, request: u64) -> Result<()> {
    tx.execute("completing a request", "DELETE FROM operator_command WHERE id = $1", vals![request]).map(drop)
}

fn read_command(tx: &mut Tx<'_>, request: u64) -> Result<Option<CommandKind>> {
    let sql = "SELECT body FROM operator_command WHERE id = $1";
    tx.first("reading a request", sql, vals![request], |row| json::read("command", row.text(0)?))
}

/// Returns an action's audit name and its subject.
fn subject(action: &Action) -> (&'static str, Option<&NodeName>, Option<CaseId>, Option<RunId>) {
    match action {
        Action::Submit(run) => ("submit", Some(run.nodes.first()), run.case, Some(run.id)),
        Action::Resubmit { run } => ("resubmit", None, None, Some(*run)),
        Action::Cancel { run, .. } => ("cancel", None, None, Some(*run)),
        Action::Conclude { run, .. } => ("conclude", None, None, Some(*run)),
        Action::OpenCase(case) => ("open-case", Some(&case.node), Some(case.id), None),
        Action::Escalate { case, .. } => ("escalate", None, Some(*case), None),
        Action::RaiseSeverity { case, node } => ("worsen", Some(node), Some(*case), None),
        Action::Advise { case, node, .. } => ("advise", Some(node), Some(*case), None),
        Action::Step { case, node, .. } => ("step", Some(node), Some(*case), None),
        Action::RequestRepair { case, node, .. } => ("request-repair", Some(node), Some(*case), None),
        Action::Propose { case, node, .. } => ("propose", Some(node), Some(*case), None),
        Action::CompleteStep { case, .. } => ("settle", None, Some(*case), None),
        Action::WithdrawStep { case, node, .. } => ("withdraw-step", Some(node), Some(*case), None),
        Action::SetState { node, case, .. } => ("move", Some(node), *case, None),
        Action::CloseCase { case, node, .. } => ("close-case", Some(node), Some(*case), None),
        Action::RebindCase { case, node } => ("follow", Some(node), Some(*case), None),
        Action::OpenBreaker => ("open-breaker", None, None, None),
        Action::Notice(_) => ("notice", None, None, None),
        Action::CompleteCommand { .. } => ("answer", None, None, None),
        Action::WithdrawCommand { node, .. } => ("withdraw-command", Some(node), None, None),
        Action::HardwareIdentified { node, .. } => ("identify", Some(node), None, None),
        Action::StartTrial { run, .. } => ("try", None, None, Some(*run)),
        Action::AttributeFault { node, run, .. } => ("name", Some(node), None, Some(*run)),
        Action::RemoveMaintenanceMark { node, .. } => ("tidy", Some(node), None, None),
        Action::HardwareReplaced { node, .. } => ("rename", Some(node), None, None),
    }
}

fn line(tx: &mut Tx<'_>, action: &WithReason<Action>, at: Timestamp) -> Result<NewAuditLine> {
    let (what, node, case, run) = subject(&action.value);
    let node = match (node, run, case) {
        (Some(node), ..) => Some(tx.node_id(node, at)?),
        (None, Some(run), _) => runs::nodes_of(tx, run)?.first().copied(),
        (None, None, Some(case)) => {
            let sql = "SELECT node FROM case_record WHERE id = $1";
            tx.first("reading a case", sql, vals![case], |row| row.int(0))?
        }
        (None, None, None) => None,
    };
    let code = action.code.as_str().to_owned();
    Ok(NewAuditLine { action: what, node, case, run, code, text: action.text.clone(), ..NewAuditLine::default() })
}

fn write_reasons(tx: &mut Tx<'_>, intent: &CycleIntent<'_>) -> Result<()> {
    let mut written = Vec::with_capacity(intent.changed_reasons.len());
    for (node, reason) in intent.changed_reasons {
        written.push((tx.node_id(node, intent.at)?, json::write(reason)?));
    }
    let mut rows = Vec::with_capacity(written.len() * 3);
    for (node, body) in &written {
        rows.extend_from_slice(vals![*node, intent.at, body]);
    }
    let conflict = "ON CONFLICT (node) DO UPDATE SET since = excluded.since, body = excluded.body";
    let kinds = [ColumnType::Int, ColumnType::Int, ColumnType::Text];
    tx.insert_many("writing reasons", "skip_reason (node, since, body)", &kinds, &rows, conflict)
}
