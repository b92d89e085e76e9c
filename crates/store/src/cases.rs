//! Cases, and the changes that a plan makes to them: each step rewrites the whole case.

use std::sync::Arc;

use doctor_core::{
    case::{Advice, Case, CaseOutcome, CaseState, OperatorRequest, RepairStep, SentRepair, Step, StepKind, StepState},
    ids::{CaseId, NodeName, OpId, PoolName},
    time::Timestamp,
    view::CaseSpan,
};

use super::{
    Store,
    audit::{self, NewAuditLine},
    case_table::{find, get, put, read_case},
    db::{Tx, vals},
    error::{Result, StoreError},
    evidence,
    fencing::Lease,
    findings, mutes,
    operator_commands::OperatorCommands,
};

impl Store {
    /// Returns open cases and those closed after this time, oldest first.
    pub fn cases(&self, closed_after: Timestamp) -> Result<Vec<Case>> {
        self.read(|tx| {
            let operation = "reading cases";
            let mut cases = tx.all(operation, "SELECT body FROM case_record WHERE closed IS NULL", &[], read_case)?;
            let sql = "SELECT body FROM case_record WHERE closed IS NOT NULL AND closed > $1";
            cases.extend(tx.all(operation, sql, vals![closed_after], read_case)?);
            cases.sort_by_key(|case| case.id);
            Ok(cases)
        })
    }

    /// As [`Store::cases`], reduced to what statistics need.
    pub fn case_spans(&self, closed_after: Timestamp) -> Result<Vec<CaseSpan>> {
        self.read(|tx| {
            let mut spans = Vec::new();
            for (sql, vals) in [
                ("SELECT body FROM case_record WHERE closed IS NULL", &[][..]),
                ("SELECT body FROM case_record WHERE closed IS NOT NULL AND closed > $1", vals![closed_after]),
            ] {
                tx.rows("reading cases", sql, vals, |row| {
                    spans.push(CaseSpan::from(&read_case(row)?));
                    Ok(())
                })?;
            }
            Ok(spans)
        })
    }

    /// Returns all cases, newest first.
    pub fn cases_all(&self, limit: u32) -> Result<Vec<Case>> {
        let sql = "SELECT body FROM case_record ORDER BY id DESC LIMIT $1";
        self.read(|tx| tx.all("reading cases", sql, vals![limit], read_case))
    }

    /// As [`Store::cases_all`], for cases before this one; optionally only open ones.
    pub fn cases_before(&self, before: CaseId, open: bool, limit: u32) -> Result<Vec<Case>> {
        let sql = match open {
            true => "SELECT body FROM case_record WHERE closed IS NULL AND id < $1 ORDER BY id DESC LIMIT $2",
            false => "SELECT body FROM case_record WHERE id < $1 ORDER BY id DESC LIMIT $2",
        };
        self.read(|tx| tx.all("reading cases", sql, vals![before, limit], read_case))
    }

    pub fn case(&self, case: CaseId) -> Result<Option<Case>> {
        self.read(|tx| find(tx, case))
    }

    /// Records the outcome of a step.
    pub fn record_step(
        &self,
        lease: &Lease,
        case: CaseId,
        op: OpId,
        outcome: std::result::Result<(), &str>,
        at: Timestamp,
    ) -> Result<()> {
        self.write(lease, |tx| {
            let mut file = get(tx, case)?;
            let Some(step) = file.steps.iter_mut().find(|step| step.op == op) else {
                return Err(StoreError::NotFound { what: "step", id: op.to_string() });
            };
            step.at = at;
            step.state = if outcome.is_ok() { StepState::Done } else { StepState::Failed };
            if let Err(why) = outcome {
                why.clone_into(&mut step.text);
            }
            let (what, text) = match outcome {
                Ok(()) => ("step-done", step.text.clone()),
                Err(why) => ("step-failed", why.to_owned()),
            };
            let code = step.what.code().to_owned();
            put(tx, &file)?;
            let node = tx.ids.node_id(&file.node);
            audit::append(
                tx,
                at,
                None,
                &[NewAuditLine { action: what, node, case: Some(case), code, text, ..NewAuditLine::default() }],
            )
        })
    }
}

/// Whether a requested repair may be sent to the cluster now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendPermit {
    /// This is the first attempt that may reach the cluster.
    First,
    /// An earlier attempt may have reached it.
    Repeated,
    /// A pause has begun, and nothing was sent before it.
    Paused,
}

impl Store {
    /// Records that a requested repair is sent now, unless it is paused. The pauses are read in the same transaction, so that
    /// one that was stored since the plan was made still stops the repair.
    pub fn record_sent(
        &self,
        lease: &Lease,
        (case, op): (CaseId, OpId),
        pool: &PoolName,
        sent: &SentRepair,
    ) -> Result<SendPermit> {
        self.write(lease, |tx| {
            let mut file = get(tx, case)?;
            let Some(repair) = file.repair_with_op_mut(op) else {
                return Err(StoreError::NotFound { what: "requested repair", id: op.to_string() });
            };
            if repair.sent.is_some() {
                return Ok(SendPermit::Repeated);
            }
            for pool in [None, Some(pool)] {
                let pause = OperatorCommands { tx }.pause_of(pool)?;
                if pause.is_some_and(|pause| pause.until.is_none_or(|until| sent.at < until)) {
                    return Ok(SendPermit::Paused);
                }
            }
            repair.sent = Some(sent.clone());
            put(tx, &file)?;
            Ok(SendPermit::First)
        })
    }

    /// Records that the first attempt to send a requested repair changed nothing.
    pub fn record_not_sent(&self, lease: &Lease, case: CaseId, op: OpId) -> Result<()> {
        self.write(lease, |tx| {
            let mut file = get(tx, case)?;
            if let Some(repair) = file.repair_with_op_mut(op) {
                repair.sent = None;
            }
            put(tx, &file)
        })
    }
}

pub(super) fn withdraw_step(tx: &mut Tx<'_>, case: CaseId, op: OpId) -> Result<()> {
    let mut file = get(tx, case)?;
    file.withdraw_step(op);
    put(tx, &file)
}

pub(super) fn open(tx: &mut Tx<'_>, case: &Case) -> Result<()> {
    put(tx, case)?;
    let node = tx.node_id(&case.node, case.opened)?;
    set_node_case(tx, node, Some(case.id))?;
    evidence::pin(tx, case.id, node)
}

fn set_node_case(tx: &mut Tx<'_>, node: i64, case: Option<CaseId>) -> Result<()> {
    tx.execute("recording a case", "UPDATE node SET case_id = $2 WHERE id = $1", vals![node, case]).map(drop)
}

pub(super) fn escalate(tx: &mut Tx<'_>, case: CaseId, to: RepairStep) -> Result<()> {
    let mut file = get(tx, case)?;
    file.repair_step = to;
    put(tx, &file)
}

/// Records an operator's request to repair the node of the case.
pub(super) fn request_repair(
    tx: &mut Tx<'_>,
    case: CaseId,
    op: OpId,
    request: &OperatorRequest,
    at: Timestamp,
) -> Result<()> {
    let mut file = get(tx, case)?;
    file.request_repair(request, op, at);
    put(tx, &file)
}

/// Records the advice from the tests of a node that an operator quarantined.
pub(super) fn advise(tx: &mut Tx<'_>, case: CaseId, advice: Advice) -> Result<()> {
    let mut file = get(tx, case)?;
    file.advice = Some(advice);
    put(tx, &file)
}

/// Replaces the case's findings by those open against its node now, and raises its severity to the worst of them.
pub(super) fn raise_severity(tx: &mut Tx<'_>, case: CaseId, node: &NodeName, at: Timestamp) -> Result<()> {
    let mut file = get(tx, case)?;
    let id = tx.node_id(node, at)?;
    let open = findings::open_findings(tx, id)?;
    if let Some(worst) = open.iter().map(|open| open.finding.severity).max() {
        file.severity = file.severity.max(worst);
    }
    file.findings = open.into_iter().map(|open| open.finding).collect();
    let sql = "SELECT boot_id FROM node WHERE id = $1";
    if let Some(boot) =
        tx.first("reading a node", sql, vals![id], |row| Ok(row.opt_text(0)?.map(str::to_owned)))?.flatten()
    {
        file.boot_id = Some(boot);
    }
    put(tx, &file)?;
    evidence::pin(tx, case, id)
}

/// A step that a plan has just decided.
#[derive(Debug)]
pub(super) struct NewStep<'a> {
    pub(super) op: OpId,
    pub(super) what: StepKind,
    pub(super) state: StepState,
    pub(super) attempts: u32,
    pub(super) text: &'a str,
}

/// Adds the step, or resumes the one with the same operation id.
pub(super) fn add_step(tx: &mut Tx<'_>, case: CaseId, new: &NewStep<'_>, at: Timestamp) -> Result<()> {
    let mut file = get(tx, case)?;
    let repair_step = file.repair_step;
    let step = Step {
        op: new.op,
        what: new.what,
        repair_step,
        state: new.state,
        at,
        attempts: new.attempts,
        text: new.text.to_owned(),
    };
    match file.steps.iter_mut().find(|known| known.op == new.op) {
        // The step's deadline counts from its first attempt.
        Some(known) if known.state == StepState::Intended => *known = Step { at: known.at, ..step },
        Some(known) => *known = step,
        None => file.steps.push(step),
    }
    put(tx, &file)
}

/// Pins the case's evidence until the case is closed and its retention has passed.
pub(super) fn pin_evidence(tx: &mut Tx<'_>, case: CaseId) -> Result<()> {
    let file = get(tx, case)?;
    let node = tx.node_id(&file.node, file.opened)?;
    evidence::pin(tx, case, node)
}

pub(super) fn complete_step(tx: &mut Tx<'_>, case: CaseId, op: OpId, done: bool, at: Timestamp) -> Result<()> {
    let mut file = get(tx, case)?;
    if let Some(step) = file.steps.iter_mut().find(|step| step.op == op) {
        step.state = if done { StepState::Done } else { StepState::Failed };
        step.at = at;
    }
    put(tx, &file)
}

/// Closes the case and clears its node's findings. A node that belongs to another case by now keeps that case and its
/// findings.
pub(super) fn close(tx: &mut Tx<'_>, case: CaseId, node: &NodeName, how: CaseOutcome, at: Timestamp) -> Result<()> {
    let mut file = get(tx, case)?;
    file.state = CaseState::Closed { at, how };
    put(tx, &file)?;
    mutes::unmute(tx, case)?;
    let id = tx.node_id(node, at)?;
    let operation = "closing a case";
    let sql = "UPDATE node SET case_id = NULL WHERE id = $1 AND case_id = $2";
    if tx.execute(operation, sql, vals![id, case])? > 0 {
        tx.execute(operation, "DELETE FROM finding WHERE node = $1", vals![id])?;
    }
    Ok(())
}

/// Moves the case to the name under which its hardware was found again.
pub(super) fn rebind(tx: &mut Tx<'_>, case: CaseId, node: &NodeName, at: Timestamp) -> Result<()> {
    let mut file = get(tx, case)?;
    let operation = "rebinding a case";
    tx.execute(operation, "UPDATE node SET case_id = NULL WHERE case_id = $1", vals![case])?;
    file.node = node.clone();
    put(tx, &file)?;
    let id = tx.node_id(node, at)?;
    set_node_case(tx, id, Some(case))
}

/// Returns open cases, each with its node.
pub(super) fn open_cases(tx: &mut Tx<'_>) -> Result<Vec<(CaseId, i64, String)>> {
    let names = Arc::clone(&tx.ids);
    tx.all("reading cases", "SELECT id, node FROM case_record WHERE closed IS NULL ORDER BY id", &[], |row| {
        let node = row.int(1)?;
        let name = names.node(node).map_or_else(|_| format!("number {node}"), ToString::to_string);
        Ok((CaseId::from_number(row.unsigned(0)?), node, name))
    })
}
