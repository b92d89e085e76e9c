//! Ends runs that have no result: writes incomplete history rows if the test had started, and nothing if it had not.

use std::collections::HashSet;

use doctor_core::{
    finding::Verdict,
    ids::RunId,
    plan::Conclusion,
    policy::Retry,
    reason::ReasonCode,
    run::{IncompleteWhy, NotStarted},
    time::{Span, Timestamp},
};

use super::{
    Store,
    audit::{self, Counter, Line},
    db::{Tx, vals},
    error::Result,
    lease::Lease,
    ledger::{self, Posting},
    names::OutcomeKind,
    nodes,
    runs::{self, INCOMPLETE, NOT_STARTED},
    spent::{self, Spell},
};

impl Store {
    /// Records that the backend rejected the job. The run ends without a history row and its nodes back off.
    pub fn record_rejected(&self, lease: &Lease, run: RunId, why: &str, at: Timestamp, retry: &Retry) -> Result<()> {
        self.write(lease, |tx| {
            let end = Conclusion::NotStarted(NotStarted::Rejected);
            if !conclude(tx, run, end, at, retry)? {
                return Ok(());
            }
            let node = runs::nodes_of(tx, run)?.first().copied();
            let code = NotStarted::Rejected.code().to_owned();
            let line =
                Line { what: "run-rejected", node, run: Some(run), code, words: why.to_owned(), ..Line::default() };
            audit::append(tx, at, None, &[line])
        })
    }
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
    if tx.run(operation, sql, vals![run, ending, why, at])? == 0 {
        return Ok(false);
    }
    tx.run(operation, "DELETE FROM pending_results WHERE run = $1", vals![run])?;
    let sql = "SELECT started, node_count FROM run WHERE id = $1 AND started IS NOT NULL";
    let spell = tx.first("reading a run", sql, vals![run], |row| {
        Ok(Spell { began: row.moment(0)?, ended: at, nodes: row.int(1)? })
    })?;
    spent::add(tx, spell.as_slice())?;
    match end {
        Conclusion::Incomplete(why) => add_incomplete_rows(tx, run, why, at)?,
        Conclusion::NotStarted(NotStarted::PendingTooLong | NotStarted::Rejected) => {
            let nodes = runs::nodes_of(tx, run)?;
            nodes::back_off(tx, &nodes, at, retry)?;
        }
        Conclusion::NotStarted(NotStarted::NodeTaken | NotStarted::Withdrawn) => {}
    }
    audit::count(tx, &[(Counter::RunsEnded, 1)])?;
    Ok(true)
}

/// Adds a row with the reason for every test of the run that has no result.
fn add_incomplete_rows(tx: &mut Tx<'_>, run: RunId, why: IncompleteWhy, at: Timestamp) -> Result<()> {
    let sql = "SELECT tests, started FROM run WHERE id = $1";
    let found =
        tx.first("reading a run", sql, vals![run], |row| Ok((runs::unlist(row.text(0)?)?, row.opt_moment(1)?)))?;
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
    let took = started.map_or(Span::ZERO, |started| at.since(started));
    let mut entries = Vec::new();
    for node in &nodes {
        for test in tests.iter().filter(|test| !answered.contains(&(*node, **test))) {
            entries.push(Posting { node: *node, run, test: *test, kind: kind.clone(), at, took, bundle: None });
        }
    }
    let before = ledger::before(tx, &nodes)?;
    ledger::post(tx, &before, &entries)?;
    audit::count(tx, &[(Counter::Changes, 1)])
}
