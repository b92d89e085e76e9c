//! The audit trail, the counters, and cycle records.

use std::sync::Arc;

use doctor_core::{
    ids::{CaseId, NodeName, RunId},
    reason::ReasonCode,
    time::{Span, Timestamp},
};

use super::{
    Store,
    db::{ColumnType, Row, SqlValue, Tx, vals},
    error::Result,
    id_cache::{IdCache, parsed},
    records::{AuditRow, Counters, CycleId, CycleRow},
};

/// The actor recorded for actions that no operator requested.
pub(super) const CONTROLLER: &str = "doctor";

/// An audit line about to be written.
#[derive(Debug, Clone, Default)]
pub(super) struct NewAuditLine {
    pub(super) at: Option<Timestamp>,
    pub(super) actor: Option<String>,
    pub(super) action: &'static str,
    pub(super) node: Option<i64>,
    pub(super) case: Option<CaseId>,
    pub(super) run: Option<RunId>,
    pub(super) code: String,
    pub(super) text: String,
    /// Origin of the request.
    pub(super) origin: Option<String>,
    /// The plan shown for confirmation before the action.
    pub(super) plan: Option<String>,
}

pub(super) fn append(tx: &mut Tx<'_>, at: Timestamp, cycle: Option<CycleId>, lines: &[NewAuditLine]) -> Result<()> {
    use ColumnType::{Int, Text};
    let mut rows = Vec::with_capacity(lines.len() * 11);
    for line in lines {
        let actor = line.actor.as_deref().unwrap_or(CONTROLLER);
        rows.extend_from_slice(vals![
            line.at.unwrap_or(at),
            actor,
            line.action,
            line.node,
            line.case,
            line.run,
            &line.code,
            &line.text,
            cycle.map(|CycleId(number)| number),
            line.origin.as_deref(),
            line.plan.as_deref()
        ]);
    }
    let into = "audit_log (at, actor, action, node, case_id, run, reason_code, reason_text, cycle, origin, plan)";
    let kinds = [Int, Text, Text, Int, Int, Int, Text, Text, Int, Text, Text];
    tx.insert_many("writing the audit trail", into, &kinds, &rows, "")
}

/// Counters kept in the database, under the names below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Counter {
    ResultsStored,
    ResultsDuplicate,
    ResultsOfUnknownRuns,
    DocumentsRejected,
    RunsEnded,
    Cycles,
    Published,
    /// Changes of history; a change of this counter triggers a new published copy.
    HistoryChanges,
    /// Changes of history without a run: imports and retention.
    HistoryRewrites,
    /// Writes by any other process than the controller, which reloads everything when this changes.
    OperatorChanges,
    AlertsDelivered,
    AlertsLost,
}

impl Counter {
    const fn name(self) -> &'static str {
        match self {
            Self::ResultsStored => "results-kept",
            Self::ResultsDuplicate => "results-duplicate",
            Self::ResultsOfUnknownRuns => "results-of-unknown-runs",
            Self::DocumentsRejected => "documents-rejected",
            Self::RunsEnded => "runs-ended",
            Self::Cycles => "cycles",
            Self::Published => "published",
            Self::HistoryChanges => "history-changes",
            Self::HistoryRewrites => "history-rewrites",
            Self::OperatorChanges => "operator-changes",
            Self::AlertsDelivered => "alerts-delivered",
            Self::AlertsLost => "alerts-lost",
        }
    }
}

pub(super) fn add_counts(tx: &mut Tx<'_>, counts: &[(Counter, u64)]) -> Result<()> {
    let mut rows: Vec<SqlValue<'_>> = Vec::with_capacity(counts.len() * 2);
    for (counter, n) in counts.iter().filter(|(_, n)| *n > 0) {
        rows.extend_from_slice(vals![counter.name(), *n]);
    }
    let conflict = "ON CONFLICT (name) DO UPDATE SET value = counter.value + excluded.value";
    tx.upsert_contended("counting", "counter (name, value)", &[ColumnType::Text, ColumnType::Int], &rows, conflict)
}

pub(super) fn read_counter(tx: &mut Tx<'_>, counter: Counter) -> Result<u64> {
    let sql = "SELECT value FROM counter WHERE name = $1";
    Ok(tx.first("reading counters", sql, vals![counter.name()], |row| row.unsigned(0))?.unwrap_or(0))
}

impl Store {
    /// Returns audit lines, newest first, of one node or of all.
    pub fn audit(&self, limit: u32, node: Option<&NodeName>) -> Result<Vec<AuditRow>> {
        Ok(self.audit_before(None, limit, node)?.into_iter().map(|(_, row)| row).collect())
    }

    /// As [`Store::audit`], for lines before this number, each with its number.
    pub fn audit_before(
        &self,
        before: Option<u64>,
        limit: u32,
        node: Option<&NodeName>,
    ) -> Result<Vec<(u64, AuditRow)>> {
        let operation = "reading the audit trail";
        // Compared as BIGINT: PostgreSQL's ids are INTEGER, and the bound would be read as one.
        let before = before.and_then(|before| i64::try_from(before).ok()).unwrap_or(i64::MAX);
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            let read = |row: &Row<'_>| Ok((row.unsigned(NUMBER)?, read_line(row, &names)?));
            match node {
                None => {
                    let sql = format!("{COLUMNS} WHERE id < CAST($1 AS BIGINT) ORDER BY id DESC LIMIT $2");
                    tx.all(operation, &sql, vals![before, limit], read)
                }
                Some(node) => match names.node_id(node) {
                    None => Ok(Vec::new()),
                    Some(id) => {
                        let sql =
                            format!("{COLUMNS} WHERE node = $1 AND id < CAST($2 AS BIGINT) ORDER BY id DESC LIMIT $3");
                        tx.all(operation, &sql, vals![id, before, limit], read)
                    }
                },
            }
        })
    }

    /// Returns the decisions of one cycle, in plan order.
    pub fn audit_of_cycle(&self, cycle: CycleId) -> Result<Vec<AuditRow>> {
        let sql = format!("{COLUMNS} WHERE cycle = $1 ORDER BY id");
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            tx.all("reading the audit trail", &sql, vals![cycle.0], |row| read_line(row, &names))
        })
    }

    /// Returns cycles, newest first.
    pub fn cycles(&self, limit: u32) -> Result<Vec<CycleRow>> {
        let sql = "SELECT at, actions, submitted, duration_ms, error FROM cycle ORDER BY id DESC LIMIT $1";
        self.read(|tx| {
            tx.all("reading cycles", sql, vals![limit], |row| {
                Ok(CycleRow {
                    at: row.timestamp(0)?,
                    actions: row.count(1)?,
                    submitted: row.count(2)?,
                    duration: row.opt_int(3)?.map(Span::from_millis),
                    error: row.opt_text(4)?.map(str::to_owned),
                })
            })
        })
    }

    /// Returns when the oldest cycle that is kept took place.
    ///
    /// # Errors
    /// If the store fails.
    pub fn first_cycle_at(&self) -> Result<Option<Timestamp>> {
        let sql = "SELECT at FROM cycle ORDER BY id LIMIT 1";
        self.read(|tx| tx.first("reading the first cycle", sql, vals![], |row| row.timestamp(0)))
    }

    pub fn counters(&self) -> Result<Counters> {
        self.read(|tx| {
            Ok(Counters {
                results_stored: read_counter(tx, Counter::ResultsStored)?,
                results_duplicate: read_counter(tx, Counter::ResultsDuplicate)?,
                results_of_unknown_runs: read_counter(tx, Counter::ResultsOfUnknownRuns)?,
                documents_rejected: read_counter(tx, Counter::DocumentsRejected)?,
                runs_ended: read_counter(tx, Counter::RunsEnded)?,
                cycles: read_counter(tx, Counter::Cycles)?,
                published: read_counter(tx, Counter::Published)?,
                alerts_delivered: read_counter(tx, Counter::AlertsDelivered)?,
                alerts_given_up: read_counter(tx, Counter::AlertsLost)?,
            })
        })
    }

    /// Returns a counter that grows with every write by any other process than the controller.
    pub fn operator_changes(&self) -> Result<u64> {
        self.read(|tx| read_counter(tx, Counter::OperatorChanges))
    }
}

const COLUMNS: &str =
    "SELECT at, actor, action, node, case_id, run, reason_code, reason_text, origin, plan, id FROM audit_log";
/// Index of the line's number among those columns.
const NUMBER: usize = 10;

fn read_line(row: &Row<'_>, names: &IdCache) -> Result<AuditRow> {
    Ok(AuditRow {
        at: row.timestamp(0)?,
        by: row.text(1)?.to_owned(),
        what: row.text(2)?.to_owned(),
        node: row.opt_int(3)?.map(|id| names.node(id).cloned()).transpose()?,
        case: row.opt_case(4)?,
        run: row.opt_int(5)?.map(|number| RunId::from_number(number.cast_unsigned())),
        code: parsed("reason", ReasonCode::new(row.text(6)?))?,
        text: row.text(7)?.to_owned(),
        origin: row.opt_text(8)?.map(str::to_owned),
        plan: row.opt_text(9)?.map(str::to_owned),
    })
}
