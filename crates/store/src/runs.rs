//! Runs, from plan to end, and how they are read back.

use std::{collections::BTreeMap, sync::Arc};

use doctor_checks::document::RunKey;
use doctor_core::{
    ids::{JobId, NodeName, RunId, TestId},
    reason::{ReasonCode, WithReason},
    run::{CancelReason, NonEmpty, Outcome, Report, Run, RunEnd, RunState},
    snapshot::Cancelling,
    time::{Span, Timestamp},
};

use super::{
    Store,
    db::{ColumnType, Row, Tx, vals},
    error::{Result, StoreError},
    fencing::Lease,
    id_cache::{IdCache, parsed},
    nodes,
    records::{RunRecord, StoredRun},
    result_writer::result_time,
};

/// Values of the `state` column. A run without rows in `pending_results` has ended, whatever its state.
pub(super) const PLANNED: &str = "planned";
const SUBMITTED: &str = "submitted";
const RUNNING: &str = "running";

/// Values of the `end_kind` column. A completed run has none.
pub(super) const INCOMPLETE: &str = "incomplete";
pub(super) const NOT_STARTED: &str = "not-started";
/// The end of a completed run, in counts.
const COMPLETED: &str = "completed";

/// The job id where the backend never returned one.
const JOB_UNKNOWN: &str = "unknown";

/// The key exists while the run is active.
const COLUMNS: &str = "SELECT id, state, nodes, tests, purpose, reason_code, reason_text, case_id, planned, \
                       time_limit, (SELECT MIN(run_key) FROM pending_results WHERE pending_results.run = run.id), job, \
                       submitted, started, ended, end_kind, end_reason, cancel_reason, cancel_since FROM run";

impl Store {
    /// Returns active runs, oldest first.
    pub fn active_runs(&self) -> Result<Vec<StoredRun>> {
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            let sql = format!("{COLUMNS} WHERE id IN (SELECT run FROM pending_results) ORDER BY id");
            tx.all("reading active runs", &sql, &[], |row| {
                let secret = row.opt_text(10)?.and_then(RunKey::from_hex);
                let key = secret.ok_or_else(|| unreadable("an active run has no key"))?;
                let RunRecord { run, started, cancelling, .. } = read_run(row, &names)?;
                Ok(StoredRun { run, key, started, cancelling })
            })
        })
    }

    /// Returns an active run.
    pub fn active_run(&self, run: RunId) -> Result<Option<StoredRun>> {
        let sql = format!("{COLUMNS} WHERE id = $1");
        let found = self.query_once(|tx| {
            let names = Arc::clone(&tx.ids);
            tx.first("reading a run", &sql, vals![run], |row| {
                // The key exists while the run is active.
                let key = row.opt_text(10)?.and_then(RunKey::from_hex);
                let RunRecord { run, started, cancelling, .. } = read_run(row, &names)?;
                Ok(key.map(|key| StoredRun { run, key, started, cancelling }))
            })
        })?;
        Ok(found.flatten())
    }

    /// Returns whether there was ever such a run on this node.
    pub fn had_run(&self, run: RunId, node: &NodeName) -> Result<bool> {
        self.read(|tx| {
            let Some(node) = tx.ids.node_id(node) else { return Ok(false) };
            let sql = "SELECT 1 FROM run_node WHERE run = $1 AND node = $2";
            Ok(tx.first("reading a run", sql, vals![run, node], |_| Ok(()))?.is_some())
        })
    }

    /// Returns a run in any state.
    pub fn run(&self, run: RunId) -> Result<Option<RunRecord>> {
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            let sql = format!("{COLUMNS} WHERE id = $1");
            let mut record = tx.first("reading a run", &sql, vals![run], |row| read_run(row, &names))?;
            if let Some(record) = &mut record {
                add_report(tx, record)?;
            }
            Ok(record)
        })
    }

    /// Returns runs, newest first, without their reports.
    pub fn last_runs(&self, limit: u32) -> Result<Vec<RunRecord>> {
        self.runs_before(None, limit, None)
    }

    /// As [`Store::last_runs`], for runs before this one. For one node: active runs and those with a result.
    pub fn runs_before(&self, before: Option<RunId>, limit: u32, node: Option<&NodeName>) -> Result<Vec<RunRecord>> {
        let operation = "reading runs";
        let before = before.map_or(i64::MAX, |run| i64::try_from(run.number()).unwrap_or(i64::MAX));
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            let read = |row: &Row<'_>| read_run(row, &names);
            let mut records = match node {
                None => {
                    let sql = format!("{COLUMNS} WHERE id < $1 ORDER BY id DESC LIMIT $2");
                    tx.all(operation, &sql, vals![before, limit], read)?
                }
                Some(node) => {
                    let Some(node) = names.node_id(node) else { return Ok(Vec::new()) };
                    let sql = format!(
                        "{COLUMNS} WHERE id IN (SELECT run FROM pending_results WHERE node = $2 AND run < $1 \
                         UNION SELECT run FROM (SELECT run FROM history WHERE node = $2 AND run < $1 GROUP BY run \
                         ORDER BY run DESC LIMIT $3) AS newest) ORDER BY id DESC LIMIT $3"
                    );
                    tx.all(operation, &sql, vals![before, node, limit], read)?
                }
            };
            for record in records.iter_mut().filter(|record| record.ended.is_none()) {
                if matches!(record.run.state, RunState::Ended(_)) {
                    let outcomes = outcomes_of(tx, record)?;
                    end_with(record, &outcomes);
                }
            }
            Ok(records)
        })
    }

    /// Counts how runs planned since this time ended; every ending is listed.
    pub fn run_outcomes(&self, since: Timestamp) -> Result<[(&'static str, u64); 3]> {
        let sql = "SELECT COALESCE(end_kind, 'completed'), COUNT(*) FROM run WHERE id >= $1 \
                   AND NOT EXISTS (SELECT 1 FROM pending_results WHERE pending_results.run = run.id) GROUP BY 1";
        let mut outcomes = [(COMPLETED, 0), (INCOMPLETE, 0), (NOT_STARTED, 0)];
        self.read(|tx| {
            tx.rows("counting how runs ended", sql, vals![RunId::born_at(since)], |row| {
                let ending = row.text(0)?.to_owned();
                if let Some(known) = outcomes.iter_mut().find(|(outcome, _)| *outcome == ending) {
                    known.1 = row.unsigned(1)?;
                }
                Ok(())
            })
        })?;
        Ok(outcomes)
    }

    /// Records that the backend accepted the job.
    pub fn record_submitted(&self, lease: &Lease, run: RunId, job: &JobId, at: Timestamp) -> Result<()> {
        let sql = "UPDATE run SET state = 'submitted', job = $2, submitted = $3 \
                   WHERE id = $1 AND state = 'planned'";
        self.write(lease, |tx| {
            tx.execute("recording a submission", sql, vals![run, &job.0, at])?;
            // The output of an earlier attempt, such as why its submission was refused, says nothing about this job.
            let sql = "DELETE FROM job_output WHERE run = $1";
            tx.execute("recording a submission", sql, vals![run]).map(drop)
        })
    }

    /// Records that the job runs on its nodes, which ends their back-off.
    pub fn record_running(&self, lease: &Lease, run: RunId, started: Timestamp) -> Result<()> {
        let sql = "UPDATE run SET state = 'running', started = COALESCE(started, $2) \
                   WHERE id = $1 AND EXISTS (SELECT 1 FROM pending_results WHERE run = $1)";
        self.write(lease, |tx| {
            tx.execute("recording a start", sql, vals![run, started])?;
            let nodes = nodes_of(tx, run)?;
            nodes::clear_back_off(tx, &nodes)
        })
    }
}

/// Stores a run about to be submitted. The database rejects a second run on a node.
pub(super) fn plan_run(tx: &mut Tx<'_>, run: &Run, key: &RunKey) -> Result<()> {
    let operation = "planning a run";
    let mut node_ids = Vec::with_capacity(run.nodes.len());
    for node in run.nodes.iter() {
        node_ids.push(tx.node_id(node, run.planned)?);
    }
    let mut test_ids = Vec::with_capacity(run.tests.len());
    for test in run.tests.iter() {
        test_ids.push(tx.test_id(test)?);
    }
    let sql = "INSERT INTO run (id, state, nodes, tests, node_count, purpose, reason_code, reason_text, case_id, \
               planned, time_limit) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";
    let count = i64::try_from(node_ids.len()).unwrap_or(i64::MAX);
    let (nodes, tests, secret) = (encode_ids(&node_ids), encode_ids(&test_ids), key.to_hex());
    let purpose = &run.purpose;
    tx.execute(
        operation,
        sql,
        vals![
            run.id,
            PLANNED,
            &nodes,
            &tests,
            count,
            purpose.value.code(),
            purpose.code.as_str(),
            &purpose.text,
            run.case,
            run.planned,
            run.limit
        ],
    )?;
    let rows: Vec<_> = node_ids.iter().flat_map(|node| [run.id.into(), (*node).into()]).collect();
    tx.insert_many(operation, "run_node (run, node)", &[ColumnType::Int; 2], &rows, "")?;
    let mut rows = Vec::with_capacity(node_ids.len() * 4);
    for node in &node_ids {
        rows.extend_from_slice(vals![run.id, *node, &secret, false]);
    }
    let kinds = [ColumnType::Int, ColumnType::Int, ColumnType::Text, ColumnType::Int];
    tx.insert_many(operation, "pending_results (run, node, run_key, complete)", &kinds, &rows, "")?;
    let sqlite = "DELETE FROM skip_reason WHERE node = $1";
    let postgres = "DELETE FROM skip_reason WHERE node = ANY ($1::int8[])";
    let rows: Vec<_> = node_ids.into_iter().map(Into::into).collect();
    tx.execute_each(operation, (sqlite, postgres), &[ColumnType::Int], &rows)
}

/// Marks the run for cancellation. A second reason does not replace the first.
pub(super) fn cancel_run(tx: &mut Tx<'_>, run: RunId, why: CancelReason, at: Timestamp) -> Result<()> {
    let sql = "UPDATE run SET cancel_reason = $2, cancel_since = $3 \
               WHERE id = $1 AND cancel_reason IS NULL AND EXISTS (SELECT 1 FROM pending_results WHERE run = $1)";
    tx.execute("cancelling a run", sql, vals![run, why.code(), at]).map(drop)
}

pub(super) fn nodes_of(tx: &mut Tx<'_>, run: RunId) -> Result<Vec<i64>> {
    tx.all("reading a run's nodes", "SELECT node FROM run_node WHERE run = $1", vals![run], |row| row.int(0))
}

pub(super) fn encode_ids(ids: &[i64]) -> String {
    ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

pub(super) fn decode_ids(text: &str) -> Result<Vec<i64>> {
    text.split(',').map(|id| parsed("list of numbers", id.parse())).collect()
}

fn named<T>(text: &str, name: impl Fn(i64) -> Result<T>) -> Result<NonEmpty<T>> {
    let all: Result<Vec<T>> = decode_ids(text)?.into_iter().map(name).collect();
    NonEmpty::new(all?).ok_or_else(|| unreadable("a run has no nodes or tests"))
}

fn unreadable(why: &str) -> StoreError {
    StoreError::Unreadable { what: "run", why: why.to_owned() }
}

fn read_run(row: &Row<'_>, names: &IdCache) -> Result<RunRecord> {
    let nodes: NonEmpty<NodeName> = named(row.text(2)?, |id| names.node(id).cloned())?;
    let tests: NonEmpty<TestId> = named(row.text(3)?, |id| names.test(id).cloned())?;
    let job = row.opt_text(11)?.map(|job| JobId(job.to_owned()));
    let (submitted, started) = (row.opt_timestamp(12)?, row.opt_timestamp(13)?);
    let some = |what: &str| unreadable(&format!("a {what} run has no job or time"));
    let state = match row.text(1)? {
        _ if row.opt_text(10)?.is_none() => RunState::Ended(read_end(row)?),
        PLANNED => RunState::Planned,
        SUBMITTED => {
            let (job, at) = job.zip(submitted).ok_or_else(|| some(SUBMITTED))?;
            RunState::Submitted { job, at }
        }
        // A run may be seen running although the reply to its submission was lost.
        RUNNING => {
            let since = started.ok_or_else(|| some(RUNNING))?;
            RunState::Running { job: job.unwrap_or_else(|| JobId(JOB_UNKNOWN.to_owned())), since }
        }
        other => return Err(unreadable(&format!("`{other}` is not a state of an active run"))),
    };
    let cancelling = match (row.opt_text(17)?, row.opt_timestamp(18)?) {
        (Some(why), Some(since)) => Some(Cancelling { why: parsed("cancel reason", why.parse())?, since }),
        _ => None,
    };
    let run = Run {
        id: row.run(0)?,
        nodes,
        tests,
        state,
        purpose: WithReason {
            value: parsed("purpose", row.text(4)?.parse())?,
            code: parsed("reason", ReasonCode::new(row.text(5)?))?,
            text: row.text(6)?.to_owned(),
        },
        case: row.opt_case(7)?,
        planned: row.timestamp(8)?,
        limit: Span::from_millis(row.int(9)?),
    };
    Ok(RunRecord { run, submitted, started, ended: row.opt_timestamp(14)?, cancelling })
}

fn read_end(row: &Row<'_>) -> Result<RunEnd> {
    parse_end(row.opt_text(15)?, row.opt_text(16)?)
}

/// Parses the columns `end_kind` and `end_reason`.
pub(super) fn parse_end(kind: Option<&str>, why: Option<&str>) -> Result<RunEnd> {
    let why = why.unwrap_or_default();
    Ok(match kind {
        None => RunEnd::Completed(Report::default()),
        Some(INCOMPLETE) => RunEnd::Incomplete { why: parsed("end of a run", why.parse())?, partial: None },
        Some(NOT_STARTED) => RunEnd::NotStarted(parsed("end of a run", why.parse())?),
        Some(other) => return Err(unreadable(&format!("`{other}` is not an ending of a run"))),
    })
}

/// Adds an ended run's outcomes, and derives its end time from them.
fn add_report(tx: &mut Tx<'_>, record: &mut RunRecord) -> Result<()> {
    if !matches!(record.run.state, RunState::Ended(_)) {
        return Ok(());
    }
    let outcomes = outcomes_of(tx, record)?;
    end_with(record, &outcomes);
    match &mut record.run.state {
        RunState::Ended(RunEnd::Completed(report)) => report.outcomes = outcomes,
        RunState::Ended(RunEnd::Incomplete { partial, .. }) => *partial = Some(Report { outcomes }),
        _ => {}
    }
    Ok(())
}

/// Sets the end of a completed run to its last result. If its start was not observed, its duration is that of its
/// tests.
fn end_with(record: &mut RunRecord, outcomes: &[Outcome]) {
    let Some(last) = outcomes.iter().map(|outcome| outcome.at).max().filter(|_| record.ended.is_none()) else { return };
    let on_last = outcomes.iter().filter(|outcome| outcome.at == last);
    let mut durations: BTreeMap<&NodeName, Span> = BTreeMap::new();
    for outcome in on_last {
        let sum = durations.entry(&outcome.node).or_insert(Span::ZERO);
        *sum = [*sum, outcome.duration].into_iter().sum();
    }
    let longest = durations.into_values().max().unwrap_or(Span::ZERO);
    record.ended = Some(last);
    record.started = record.started.or(Some(last.minus(longest)));
}

/// Returns a run's outcomes from history.
fn outcomes_of(tx: &mut Tx<'_>, record: &RunRecord) -> Result<Vec<Outcome>> {
    let names = Arc::clone(&tx.ids);
    let id = record.run.id;
    let mut outcomes = Vec::new();
    for node in record.run.nodes.iter() {
        let Some(number) = names.node_id(node) else { continue };
        let sql =
            "SELECT test, outcome, offset_ms, duration_ms FROM history WHERE node = $1 AND run = $2 ORDER BY test";
        tx.rows("reading a report", sql, vals![number, id], |row| {
            let kind = names.outcome(row.int(1)?)?;
            outcomes.push(Outcome {
                node: node.clone(),
                test: names.test(row.int(0)?)?.clone(),
                verdict: kind.verdict,
                reason: kind.reason.clone(),
                at: result_time(id, row.int(2)?),
                duration: Span::from_millis(row.int(3)?),
                findings: Vec::new(),
            });
            Ok(())
        })?;
    }
    Ok(outcomes)
}
