//! Ends runs that have no result: writes incomplete history rows if the test had started, and nothing if it had not.

use std::{collections::HashSet, sync::Arc};

use doctor_core::{
    finding::Verdict,
    ids::{NodeName, RunId},
    plan::Conclusion,
    policy::Retry,
    reason::ReasonCode,
    run::{IncompleteReason, NotStartedReason},
    time::{Span, Timestamp},
};

use super::{
    Store,
    audit::{self, Counter, NewAuditLine},
    db::{Tx, vals},
    error::Result,
    fencing::Lease,
    id_cache::{OutcomeKind, parsed},
    ingest_queue, job_outputs,
    node_hours::{self, RunSpan},
    nodes,
    records::RunEndRow,
    result_writer::{self, NewHistoryRow},
    runs::{self, INCOMPLETE, NOT_STARTED},
};

impl Store {
    /// Records that the backend rejected the job. The run ends without a history row and its nodes back off.
    pub fn record_rejected(&self, lease: &Lease, run: RunId, why: &str, at: Timestamp, retry: &Retry) -> Result<()> {
        self.write(lease, |tx| {
            let end = Conclusion::NotStarted(NotStartedReason::Rejected);
            // A job that has sent a result was not rejected.
            if ingest_queue::result_is_queued(tx, run)? || !conclude(tx, run, end, at, retry)? {
                return Ok(());
            }
            let node = runs::nodes_of(tx, run)?.first().copied();
            let code = NotStartedReason::Rejected.code().to_owned();
            let line = NewAuditLine {
                action: "run-rejected",
                node,
                run: Some(run),
                code,
                text: why.to_owned(),
                ..NewAuditLine::default()
            };
            audit::append(tx, at, None, &[line])
        })
    }

    /// Returns how the latest runs ended, newest first, without their results.
    pub fn last_run_ends(&self, limit: u32) -> Result<Vec<RunEndRow>> {
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            let sql = "SELECT id, nodes, COALESCE(ended, started, planned), end_kind, end_reason FROM run \
                       WHERE id < $1 AND NOT EXISTS (SELECT 1 FROM pending_results WHERE pending_results.run = run.id) \
                       ORDER BY id DESC LIMIT $2";
            let mut rows = tx.all("reading how runs ended", sql, vals![i64::MAX, limit], |row| {
                let nodes = runs::decode_ids(row.text(1)?)?;
                let nodes: Result<Vec<NodeName>> = nodes.into_iter().map(|id| names.node(id).cloned()).collect();
                let reason = row.opt_text(4)?.unwrap_or_default();
                let end = match row.opt_text(3)? {
                    None => None,
                    Some(INCOMPLETE) => Some(Conclusion::Incomplete(parsed("end of a run", reason.parse())?)),
                    Some(_) => Some(Conclusion::NotStarted(parsed("end of a run", reason.parse())?)),
                };
                Ok(RunEndRow { run: row.run(0)?, nodes: nodes?, at: row.timestamp(2)?, end, text: None })
            })?;
            for row in &mut rows {
                row.text = reason_text(tx, row)?;
            }
            Ok(rows)
        })
    }
}

/// Returns why a run has no result: what its job printed last, or else what the audit trail says, such as the answer of a
/// scheduler that rejected it.
fn reason_text(tx: &mut Tx<'_>, row: &RunEndRow) -> Result<Option<String>> {
    let code = match row.end {
        None => return Ok(None),
        Some(Conclusion::Incomplete(why)) => why.code(),
        Some(Conclusion::NotStarted(why)) => why.code(),
    };
    if let Some(quote) = job_outputs::quote(tx, row.run)? {
        return Ok(Some(quote));
    }
    let Some(node) = row.nodes.first().and_then(|node| tx.ids.node_id(node)) else { return Ok(None) };
    let sql = "SELECT reason_text FROM audit_log WHERE node = $1 AND run = $2 AND reason_code = $3 \
               ORDER BY id DESC LIMIT 1";
    tx.first("reading why a run has no result", sql, vals![node, row.run, code], |row| Ok(row.text(0)?.to_owned()))
}

/// Ends a run. Returns `false` and changes nothing if it has ended already, because its result arrived meanwhile.
pub(super) fn conclude(tx: &mut Tx<'_>, run: RunId, end: Conclusion, at: Timestamp, retry: &Retry) -> Result<bool> {
    let operation = "ending a run";
    let (ending, why) = match end {
        Conclusion::Incomplete(why) => (INCOMPLETE, why.code()),
        Conclusion::NotStarted(why) => (NOT_STARTED, why.code()),
    };
    let sql = "UPDATE run SET state = 'ended', end_kind = $2, end_reason = $3, ended = $4 \
               WHERE id = $1 AND EXISTS (SELECT 1 FROM pending_results WHERE run = $1)";
    if tx.execute(operation, sql, vals![run, ending, why, at])? == 0 {
        return Ok(false);
    }
    tx.execute(operation, "DELETE FROM pending_results WHERE run = $1", vals![run])?;
    let sql = "SELECT started, node_count FROM run WHERE id = $1 AND started IS NOT NULL";
    let spell = tx.first("reading a run", sql, vals![run], |row| {
        Ok(RunSpan { started: row.timestamp(0)?, ended: at, nodes: row.int(1)? })
    })?;
    node_hours::add(tx, spell.as_slice())?;
    match end {
        Conclusion::Incomplete(why) => add_incomplete_rows(tx, run, why, at)?,
        Conclusion::NotStarted(NotStartedReason::PendingTooLong | NotStartedReason::Rejected) => {
            let nodes = runs::nodes_of(tx, run)?;
            nodes::back_off(tx, &nodes, at, retry)?;
        }
        Conclusion::NotStarted(NotStartedReason::NodeTaken | NotStartedReason::Withdrawn) => {}
    }
    audit::add_counts(tx, &[(Counter::RunsEnded, 1)])?;
    Ok(true)
}

/// Adds a row with the reason for every test of the run that has no result.
fn add_incomplete_rows(tx: &mut Tx<'_>, run: RunId, why: IncompleteReason, at: Timestamp) -> Result<()> {
    let sql = "SELECT tests, started FROM run WHERE id = $1";
    let found =
        tx.first("reading a run", sql, vals![run], |row| Ok((runs::decode_ids(row.text(0)?)?, row.opt_timestamp(1)?)))?;
    let Some((tests, started)) = found else { return Ok(()) };
    let nodes = runs::nodes_of(tx, run)?;
    let mut answered: HashSet<(i64, i64)> = HashSet::new();
    for node in &nodes {
        let sql = "SELECT test FROM history WHERE node = $1 AND run = $2";
        tx.rows("reading a run's results", sql, vals![*node, run], |row| {
            answered.insert((*node, row.int(0)?));
            Ok(())
        })?;
    }
    let kind = OutcomeKind::new(Verdict::Inconclusive, None, ReasonCode::fixed(why.code()));
    let duration = started.map_or(Span::ZERO, |started| at.since(started));
    let mut entries = Vec::new();
    for node in &nodes {
        for test in tests.iter().filter(|test| !answered.contains(&(*node, **test))) {
            entries.push(NewHistoryRow {
                node: *node,
                run,
                test: *test,
                kind: kind.clone(),
                at,
                duration,
                bundle: None,
            });
        }
    }
    let before = result_writer::load_state_before(tx, &nodes)?;
    result_writer::write_results(tx, &before, &entries)?;
    audit::add_counts(tx, &[(Counter::HistoryChanges, 1)])
}
