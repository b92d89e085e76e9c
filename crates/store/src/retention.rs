//! Deletes expired data, except the last conclusive result of a test on a node, anything since the result that last
//! settled it, and the evidence of an open case.
//!
//! The controller calls this periodically. It works in small steps, each its own transaction, so that results do not
//! wait for it.

use std::{collections::HashMap, sync::Arc};

use doctor_core::{ids::RunId, time::Timestamp};

use super::{
    Store,
    audit::{self, Counter},
    db::{ColumnType, SqlValue, Tx, vals},
    error::Result,
    fencing::Lease,
    job_failures, node_hours,
    records::{ExpiredLog, RetentionPolicy, RetentionSummary},
    result_writer::{self, StateBefore, result_time},
    runs,
};

/// Nodes per step.
const NODES: usize = 256;
/// Evidence rows per step.
const ROWS: u32 = 2000;
/// Bundles per step.
const BUNDLES: u32 = 200;
/// Runs whose logs are listed per call; the next call lists more.
const LOGS: u32 = 10_000;

impl Store {
    /// Deletes expired rows, and lists expired logs on the share. The caller deletes the logs and confirms with
    /// [`Self::logs_deleted`]; until then they are listed again.
    pub fn apply_retention(&self, lease: &Lease, now: Timestamp, keep: RetentionPolicy) -> Result<RetentionSummary> {
        let history = now.minus(keep.history);
        let mut pruned = RetentionSummary {
            history_rows: self.prune_history(lease, history)?,
            evidence_rows: self.prune_evidence(lease, now.minus(keep.evidence))?
                + self.prune_bundles(lease, now.minus(keep.evidence))?,
            logs: self.read(|tx| expired_logs(tx, now.minus(keep.logs)))?,
            ..RetentionSummary::default()
        };
        (pruned.run_rows, pruned.audit_rows) = self.write(lease, |tx| {
            let deleted = (prune_runs(tx, history)?, prune_audit(tx, history)?);
            if pruned.history_rows > 0 {
                audit::add_counts(tx, &[(Counter::HistoryRewrites, 1), (Counter::HistoryChanges, 1)])?;
            }
            Ok(deleted)
        })?;
        Ok(pruned)
    }

    /// Records that the logs of these runs are deleted from the share.
    pub fn logs_deleted(&self, lease: &Lease, runs: &[RunId]) -> Result<()> {
        let rows: Vec<SqlValue<'_>> = runs.iter().map(|run| (*run).into()).collect();
        let sqlite = "UPDATE run SET logs_pruned = 1 WHERE id = $1";
        let postgres = "UPDATE run SET logs_pruned = 1 WHERE id = ANY ($1::int8[])";
        self.write(lease, |tx| tx.execute_each("recording deleted logs", (sqlite, postgres), &[ColumnType::Int], &rows))
    }

    fn prune_history(&self, lease: &Lease, before: Timestamp) -> Result<u64> {
        let nodes: Vec<i64> =
            self.read(|tx| tx.all("reading nodes", "SELECT id FROM node ORDER BY id", &[], |row| row.int(0)))?;
        let mut deleted = 0;
        for some in nodes.chunks(NODES) {
            let old = self.read(|tx| deletable_rows(tx, some, before))?;
            if old.is_empty() {
                continue;
            }
            deleted += self.write(lease, |tx| {
                let sqlite = "DELETE FROM history WHERE node = $1 AND run = $2 AND test = $3";
                let postgres = "DELETE FROM history h USING UNNEST($1::int8[], $2::int8[], $3::int8[]) \
                                AS d (node, run, test) WHERE h.node = d.node AND h.run = d.run AND h.test = d.test";
                let rows: Vec<SqlValue<'_>> = old.iter().flatten().map(|number| (*number).into()).collect();
                tx.execute_each_counted("deleting history", (sqlite, postgres), &[ColumnType::Int; 3], &rows)
            })?;
        }
        Ok(deleted)
    }

    fn prune_evidence(&self, lease: &Lease, before: Timestamp) -> Result<u64> {
        // A document arrives after its run was created, so the primary key finds the old ones.
        let sql = "SELECT run, node FROM evidence WHERE run < $1 AND received < $2 AND (case_id IS NULL OR EXISTS \
                   (SELECT 1 FROM case_record c WHERE c.id = evidence.case_id AND c.closed IS NOT NULL \
                   AND c.closed < $2)) LIMIT $3";
        let mut deleted = 0;
        loop {
            let first_kept = first_run(before);
            let old = self.read(|tx| {
                tx.all("reading evidence", sql, vals![first_kept, before, ROWS], |row| Ok([row.int(0)?, row.int(1)?]))
            })?;
            if old.is_empty() {
                return Ok(deleted);
            }
            deleted += self.write(lease, |tx| {
                let sqlite = "DELETE FROM evidence WHERE run = $1 AND node = $2";
                let postgres = "DELETE FROM evidence e USING UNNEST($1::int8[], $2::int8[]) AS d (run, node) \
                                WHERE e.run = d.run AND e.node = d.node";
                let rows: Vec<SqlValue<'_>> = old.iter().flatten().map(|number| (*number).into()).collect();
                tx.execute_each_counted("deleting evidence", (sqlite, postgres), &[ColumnType::Int; 2], &rows)
            })?;
        }
    }

    /// Deletes expired bundles; documents that a case depends on were copied out. Returns the number of documents.
    fn prune_bundles(&self, lease: &Lease, before: Timestamp) -> Result<u64> {
        let sql = "SELECT id, documents FROM evidence_pack WHERE received < $1 ORDER BY received LIMIT $2";
        let mut deleted = 0;
        loop {
            let read = |tx: &mut Tx<'_>| {
                tx.all("reading evidence", sql, vals![before, BUNDLES], |row| Ok((row.int(0)?, row.unsigned(1)?)))
            };
            let old = self.read(read)?;
            if old.is_empty() {
                return Ok(deleted);
            }
            let rows: Vec<SqlValue<'_>> = old.iter().map(|(id, _)| (*id).into()).collect();
            let (sqlite, postgres) =
                ("DELETE FROM evidence_pack WHERE id = $1", "DELETE FROM evidence_pack WHERE id = ANY ($1::int8[])");
            self.write(lease, |tx| {
                tx.execute_each("deleting evidence", (sqlite, postgres), &[ColumnType::Int], &rows)
            })?;
            deleted += old.iter().map(|(_, documents)| documents).sum::<u64>();
        }
    }
}

/// Returns the lowest id of a run created at this time.
fn first_run(at: Timestamp) -> i64 {
    at.millis().clamp(0, i64::MAX >> 21) << 21
}

/// An expired history row.
#[derive(Debug, Clone, Copy)]
struct ExpiredRow {
    run: i64,
    test: i64,
    at: Timestamp,
    trusted: bool,
    conclusive: bool,
}

/// Returns history rows of these nodes that can be deleted, as node, run and test.
fn deletable_rows(tx: &mut Tx<'_>, nodes: &[i64], before: Timestamp) -> Result<Vec<[i64; 3]>> {
    let names = Arc::clone(&tx.ids);
    let state = result_writer::load_state_before(tx, nodes)?;
    let mut old: HashMap<i64, Vec<ExpiredRow>> = HashMap::new();
    let sql = format!(
        "SELECT node, run, test, outcome, offset_ms FROM history WHERE node IN {{keys}} AND run < {}",
        first_run(before)
    );
    tx.rows_by_key("reading history", &sql, nodes, |row| {
        let (node, run) = (row.int(0)?, row.run(1)?);
        let at = result_time(run, row.int(4)?);
        if at < before {
            let kind = names.outcome(row.int(3)?)?;
            // `latest_result` is not folded from results of agents.
            let trusted = kind.counts_as_latest() && !kind.by_agent;
            let conclusive = trusted && kind.verdict.is_conclusive();
            old.entry(node).or_default().push(ExpiredRow {
                run: row.int(1)?,
                test: row.int(2)?,
                at,
                trusted,
                conclusive,
            });
        }
        Ok(())
    })?;
    Ok(old.into_iter().flat_map(|(node, rows)| deletable_rows_of_node(node, &rows, &state, before)).collect())
}

fn deletable_rows_of_node(node: i64, rows: &[ExpiredRow], state: &StateBefore, before: Timestamp) -> Vec<[i64; 3]> {
    let mut last_conclusive: HashMap<i64, (Timestamp, i64)> = HashMap::new();
    for row in rows.iter().filter(|row| row.conclusive) {
        let newest = last_conclusive.entry(row.test).or_insert((row.at, row.run));
        *newest = (*newest).max((row.at, row.run));
    }
    let is_needed = |row: &ExpiredRow| {
        let status = state.test_statuses.get(&(node, row.test));
        // `latest_result` is folded from the result that settled the test and all since.
        let folded = row.trusted
            && state.is_current_machine(node, row.at)
            && status.is_some_and(|status| status.record.settled().is_none_or(|settled| row.at >= settled));
        let newer = status.and_then(|status| status.conclusive).is_some_and(|(_, at)| at >= before);
        folded || (!newer && last_conclusive.get(&row.test) == Some(&(row.at, row.run)))
    };
    rows.iter().filter(|row| !is_needed(row)).map(|row| [node, row.run, row.test]).collect()
}

/// Returns runs with expired logs, except the log of a test's newest result and those of an open case.
fn expired_logs(tx: &mut Tx<'_>, before: Timestamp) -> Result<Vec<ExpiredLog>> {
    let names = Arc::clone(&tx.ids);
    let sql = "SELECT r.id, r.tests, r.planned, n.node FROM run r JOIN run_node n ON n.run = r.id \
               WHERE r.id < $1 AND r.logs_pruned = 0 AND (r.started IS NOT NULL OR r.end_kind IS NULL) \
               AND NOT EXISTS (SELECT 1 FROM pending_results a WHERE a.run = r.id) \
               AND NOT EXISTS (SELECT 1 FROM latest_result l WHERE l.node = n.node AND l.run = r.id) \
               AND NOT EXISTS (SELECT 1 FROM case_record c WHERE c.id = r.case_id AND c.closed IS NULL) \
               AND NOT EXISTS (SELECT 1 FROM evidence e JOIN case_record c ON c.id = e.case_id \
               WHERE e.run = r.id AND c.closed IS NULL) ORDER BY r.id LIMIT $2";
    tx.all("searching old logs", sql, vals![first_run(before), LOGS], |row| {
        let tests: Result<Vec<_>> =
            runs::decode_ids(row.text(1)?)?.into_iter().map(|test| names.test(test).cloned()).collect();
        let node = names.node(row.int(3)?)?.clone();
        Ok(ExpiredLog { run: row.run(0)?, node, tests: tests?, planned: row.timestamp(2)? })
    })
}

/// Deletes runs without results and logs.
fn prune_runs(tx: &mut Tx<'_>, before: Timestamp) -> Result<u64> {
    let operation = "deleting runs";
    let sql = "SELECT r.id FROM run r WHERE r.id < $1 \
               AND (r.logs_pruned = 1 OR (r.started IS NULL AND r.end_kind IS NOT NULL)) \
               AND NOT EXISTS (SELECT 1 FROM pending_results a WHERE a.run = r.id) \
               AND NOT EXISTS (SELECT 1 FROM case_record c WHERE c.id = r.case_id AND c.closed IS NULL) \
               AND NOT EXISTS (SELECT 1 FROM run_node n JOIN history h ON h.node = n.node AND h.run = n.run \
               WHERE n.run = r.id) LIMIT $2";
    let old: Vec<SqlValue<'_>> =
        tx.all(operation, sql, vals![first_run(before), LOGS], |row| row.int(0).map(SqlValue::Int))?;
    for table in ["job_output WHERE run", "run_node WHERE run", "run WHERE id"] {
        let sqlite = format!("DELETE FROM {table} = $1");
        let postgres = format!("DELETE FROM {table} = ANY ($1::int8[])");
        tx.execute_each(operation, (&sqlite, &postgres), &[ColumnType::Int], &old)?;
    }
    Ok(old.len() as u64)
}

/// Deletes expired audit lines, except those of open cases, and expired cycle records.
fn prune_audit(tx: &mut Tx<'_>, before: Timestamp) -> Result<u64> {
    let operation = "deleting old audit lines";
    let sql = "DELETE FROM audit_log WHERE at < $1 AND NOT EXISTS \
               (SELECT 1 FROM case_record c WHERE c.id = audit_log.case_id AND c.closed IS NULL)";
    let lines = tx.execute(operation, sql, vals![before])?;
    tx.execute(operation, "DELETE FROM cycle WHERE at < $1", vals![before])?;
    tx.execute(operation, "DELETE FROM node_taken_out WHERE at < $1", vals![before])?;
    node_hours::prune(tx, before)?;
    job_failures::prune(tx, before)?;
    Ok(lines)
}
