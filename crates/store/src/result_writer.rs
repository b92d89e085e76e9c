//! Writes results: history, `latest_result` and the hourly counts change together or not at all.

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    sync::Arc,
};

use doctor_core::{
    finding::Verdict,
    ids::RunId,
    snapshot::TestRecord,
    time::{Span, Timestamp},
};

use super::{
    db::{ColumnType, Row, SqlValue, Tx, vals},
    error::Result,
    id_cache::{IdCache, OutcomeKind},
    nodes::KnownHardware,
    test_status::{NextResult, StoredTestStatus},
};

pub(super) const HOUR: i64 = 3_600_000;

/// Longer delays between a run's creation and its result are rare enough to record.
const USUAL_RESULT_DELAY: Span = Span::hours(6);
const LONGEST_RESULT_DELAY_KEY: &str = "longest-run-millis";

/// A result about to be written, with ids instead of names.
#[derive(Debug, Clone)]
pub(super) struct NewHistoryRow {
    pub(super) node: i64,
    pub(super) run: RunId,
    pub(super) test: i64,
    pub(super) kind: OutcomeKind,
    pub(super) at: Timestamp,
    pub(super) duration: Span,
    /// The bundle of its document, if any.
    pub(super) bundle: Option<i64>,
}

/// Rows of `latest_result` before results are posted.
pub(super) type TestStatuses = HashMap<(i64, i64), StoredTestStatus>;

/// State of the nodes before results are posted, read in one statement.
#[derive(Debug, Default)]
pub(super) struct StateBefore {
    pub(super) test_statuses: TestStatuses,
    nodes: HashMap<i64, NodeStateBefore>,
}

#[derive(Debug, Default)]
struct NodeStateBefore {
    hardware: KnownHardware,
    /// Results up to this time belong to an earlier machine with this name.
    results_valid_from: Option<Timestamp>,
    backs_off: bool,
    has_findings: bool,
}

impl StateBefore {
    pub(super) fn results_valid_from(&self, node: i64) -> Option<Timestamp> {
        self.nodes.get(&node)?.results_valid_from
    }

    /// Whether a result belongs to the machine that has the name now.
    pub(super) fn is_current_machine(&self, node: i64, at: Timestamp) -> bool {
        self.results_valid_from(node).is_none_or(|from| at > from)
    }

    pub(super) fn hardware(&self, node: i64) -> Option<KnownHardware> {
        self.nodes.get(&node).map(|before| before.hardware.clone())
    }

    pub(super) fn nodes_with_backoff(&self) -> Vec<i64> {
        self.nodes.iter().filter(|(_, before)| before.backs_off).map(|(node, _)| *node).collect()
    }

    pub(super) fn nodes_with_findings(&self) -> Vec<i64> {
        self.nodes.iter().filter(|(_, before)| before.has_findings).map(|(node, _)| *node).collect()
    }
}

const READING_NODES: &str = "reading nodes and their latest results";
const NODES: &str = "SELECT l.node, l.test, l.attempted_at, l.outcome, l.run, l.settled_at, l.conclusive_outcome, \
                     l.conclusive_at, l.inconclusive_count, n.id, n.hardware_id, n.boot_id, n.hardware_seen_at, \
                     n.results_valid_from, n.backoff_count, EXISTS (SELECT 1 FROM finding f WHERE f.node = n.id) \
                     FROM node n LEFT JOIN latest_result l ON l.node = n.id WHERE n.id IN {keys}";

/// Announces a later call of [`load_state_before`] for these nodes.
pub(super) fn prefetch(tx: &mut Tx<'_>, nodes: &[i64]) {
    tx.prefetch(READING_NODES, NODES, nodes);
}

pub(super) fn load_state_before(tx: &mut Tx<'_>, nodes: &[i64]) -> Result<StateBefore> {
    let names = Arc::clone(&tx.ids);
    let mut before = StateBefore::default();
    tx.rows_by_key(READING_NODES, NODES, nodes, |row| {
        if row.opt_int(0)?.is_some() {
            let (key, status) = read_test_status(row, &names)?;
            before.test_statuses.insert(key, status);
        }
        if let Entry::Vacant(vacant) = before.nodes.entry(row.int(9)?) {
            vacant.insert(read_node_before(row, 10)?);
        }
        Ok(())
    })?;
    Ok(before)
}

/// As [`load_state_before`], without the latest results.
pub(super) fn load_nodes_before(tx: &mut Tx<'_>, nodes: &[i64]) -> Result<StateBefore> {
    let sql = "SELECT n.id, n.hardware_id, n.boot_id, n.hardware_seen_at, n.results_valid_from, n.backoff_count, \
               EXISTS (SELECT 1 FROM finding f WHERE f.node = n.id) FROM node n WHERE n.id IN {keys}";
    let mut before = StateBefore::default();
    tx.rows_by_key("reading nodes", sql, nodes, |row| {
        before.nodes.insert(row.int(0)?, read_node_before(row, 1)?);
        Ok(())
    })?;
    Ok(before)
}

/// Reads the columns from this one on: hardware_id, boot_id, hardware_seen_at, results_valid_from, backoff_count, and
/// whether there are findings.
fn read_node_before(row: &Row<'_>, first: usize) -> Result<NodeStateBefore> {
    Ok(NodeStateBefore {
        hardware: KnownHardware {
            hardware: row.opt_text(first)?.map(str::to_owned),
            boot: row.opt_text(first + 1)?.map(str::to_owned),
            seen: row.opt_timestamp(first + 2)?,
        },
        results_valid_from: row.opt_timestamp(first + 3)?,
        backs_off: row.opt_int(first + 4)?.is_some(),
        has_findings: row.flag(first + 5)?,
    })
}

/// Columns: node, test, attempted_at, outcome, run, settled_at, conclusive_outcome, conclusive_at, inconclusive_count.
pub(super) fn read_test_status(row: &Row<'_>, names: &IdCache) -> Result<((i64, i64), StoredTestStatus)> {
    let outcome = row.int(3)?;
    let kind = names.outcome(outcome)?;
    let (settled, judged) = (row.opt_timestamp(5)?, row.opt_timestamp(7)?);
    let record = TestRecord::restore(settled, judged, Some((kind.verdict, row.timestamp(2)?)), row.count(8)?)
        .with_not_judged(kind.is_not_judged());
    let sure = row.opt_int(6)?.zip(row.opt_timestamp(7)?);
    Ok(((row.int(0)?, row.int(1)?), StoredTestStatus { record, outcome, run: row.int(4)?, conclusive: sure }))
}

/// An agent chooses the time and the number of its reports, and so the id under which they are in history; it may be
/// that of a run on its node. Then the result of the run replaces the agent's. Beside a result of a run, the outcome is
/// NULL and the transaction fails.
const REPLACES_AGENTS: &str = "ON CONFLICT (node, run, test) DO UPDATE SET \
                               outcome = CASE WHEN (SELECT o.by_agent FROM outcome o WHERE o.id = history.outcome) = 1 \
                               THEN excluded.outcome END, offset_ms = excluded.offset_ms, \
                               duration_ms = excluded.duration_ms, evidence_pack = excluded.evidence_pack";

/// Writes new entries. The transaction fails if a result of the same run and test exists already.
pub(super) fn write_results(tx: &mut Tx<'_>, before: &StateBefore, entries: &[NewHistoryRow]) -> Result<()> {
    let mut numbered = Vec::with_capacity(entries.len());
    for entry in entries {
        numbered.push((entry, tx.outcome_id(&entry.kind)?));
    }
    let mut rows = Vec::with_capacity(entries.len() * 7);
    let mut longest = USUAL_RESULT_DELAY.millis();
    for (entry, outcome) in &numbered {
        let since_birth = entry.at.millis().saturating_sub(entry.run.born().millis());
        longest = longest.max(since_birth);
        rows.extend_from_slice(vals![
            entry.node,
            entry.run,
            entry.test,
            *outcome,
            since_birth,
            entry.duration,
            entry.bundle
        ]);
    }
    let into = "history (node, run, test, outcome, offset_ms, duration_ms, evidence_pack)";
    tx.insert_many("adding history", into, &[ColumnType::Int; 7], &rows, REPLACES_AGENTS)?;
    if longest > USUAL_RESULT_DELAY.millis() {
        let sql = "INSERT INTO counter (name, value) VALUES ($1, $2) \
                   ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE counter.value < excluded.value";
        tx.execute("recording the longest run", sql, vals![LONGEST_RESULT_DELAY_KEY, longest])?;
    }
    let believed: Vec<(&NewHistoryRow, i64)> =
        numbered.into_iter().filter(|(entry, _)| !entry.kind.untrusted).collect();
    let latest: Vec<_> = believed.iter().copied().filter(|(entry, _)| entry.kind.counts_as_latest()).collect();
    update_latest(tx, before, &latest)?;
    count_hourly(tx, believed.iter().map(|(entry, _)| *entry))
}

/// Adds changed results of agents: node, what stands for the run, test and outcome. They count in no rate, because
/// results that do not change are not added.
pub(super) fn write_agent_results(tx: &mut Tx<'_>, results: &[(i64, RunId, i64, i64)]) -> Result<()> {
    let mut rows: Vec<SqlValue<'_>> = Vec::with_capacity(results.len() * 6);
    for (node, run, test, outcome) in results {
        rows.extend_from_slice(vals![*node, *run, *test, *outcome, 0_i64, 0_i64]);
    }
    let into = "history (node, run, test, outcome, offset_ms, duration_ms)";
    tx.insert_many("adding history", into, &[ColumnType::Int; 6], &rows, "ON CONFLICT (node, run, test) DO NOTHING")
}

/// Returns the longest delay between a run's creation and its result.
pub(super) fn longest_result_delay(tx: &mut Tx<'_>) -> Result<Span> {
    let sql = "SELECT value FROM counter WHERE name = $1";
    let noted = tx.first("reading counters", sql, vals![LONGEST_RESULT_DELAY_KEY], |row| row.int(0))?;
    Ok(Span::from_millis(noted.unwrap_or(0)).max(USUAL_RESULT_DELAY))
}

fn update_latest(tx: &mut Tx<'_>, before: &StateBefore, entries: &[(&NewHistoryRow, i64)]) -> Result<()> {
    let mut by_test: BTreeMap<(i64, i64), Vec<NextResult>> = BTreeMap::new();
    for (entry, outcome) in entries {
        if before.is_current_machine(entry.node, entry.at) {
            let run = entry.run.number().cast_signed();
            let not_judged = entry.kind.is_not_judged();
            let result = NextResult { at: entry.at, run, outcome: *outcome, verdict: entry.kind.verdict, not_judged };
            by_test.entry((entry.node, entry.test)).or_default().push(result);
        }
    }
    let mut rows = Vec::new();
    let mut new = Vec::new();
    for (key, mut results) in by_test {
        results.sort_unstable_by_key(|result| (result.at, result.run));
        let old = before.test_statuses.get(&key).copied().unwrap_or(StoredTestStatus::EMPTY);
        let status = if results.iter().all(|result| old.precedes(result)) {
            let mut status = old;
            results.iter().for_each(|result| status.add(result));
            Some(status)
        } else {
            recompute(tx, key, before.results_valid_from(key.0))?
        };
        if let Some(status) = status {
            let rows = if before.test_statuses.contains_key(&key) { &mut rows } else { &mut new };
            push_test_status(rows, key, &status);
        }
    }
    update_test_statuses(tx, &rows)?;
    insert_test_statuses(tx, &new)
}

fn push_test_status(rows: &mut Vec<SqlValue<'_>>, (node, test): (i64, i64), status: &StoredTestStatus) {
    let record = &status.record;
    rows.extend_from_slice(vals![
        node,
        test,
        record.attempt(),
        status.outcome,
        status.run,
        record.settled(),
        status.conclusive.map(|(outcome, _)| outcome),
        status.conclusive.map(|(_, at)| at),
        record.misses()
    ]);
}

fn insert_test_statuses(tx: &mut Tx<'_>, rows: &[SqlValue<'_>]) -> Result<()> {
    let into = "latest_result (node, test, attempted_at, outcome, run, settled_at, conclusive_outcome, \
                conclusive_at, inconclusive_count)";
    let conflict = "ON CONFLICT (node, test) DO UPDATE SET attempted_at = excluded.attempted_at, \
                    outcome = excluded.outcome, run = excluded.run, settled_at = excluded.settled_at, \
                    conclusive_outcome = excluded.conclusive_outcome, conclusive_at = excluded.conclusive_at, \
                    inconclusive_count = excluded.inconclusive_count";
    tx.insert_many("updating latest results", into, &[ColumnType::Int; 9], rows, conflict)
}

/// Updates existing rows, which is cheaper than an upsert.
fn update_test_statuses(tx: &mut Tx<'_>, rows: &[SqlValue<'_>]) -> Result<()> {
    let sqlite = "UPDATE latest_result SET attempted_at = $3, outcome = $4, run = $5, settled_at = $6, \
                  conclusive_outcome = $7, conclusive_at = $8, inconclusive_count = $9 WHERE node = $1 AND test = $2";
    let postgres = "UPDATE latest_result l SET attempted_at = s.attempted_at, outcome = s.outcome, run = s.run, \
                    settled_at = s.settled_at, conclusive_outcome = s.conclusive_outcome, \
                    conclusive_at = s.conclusive_at, inconclusive_count = s.inconclusive_count \
                    FROM UNNEST($1::int8[], $2::int8[], $3::int8[], $4::int8[], $5::int8[], $6::int8[], $7::int8[], \
                    $8::int8[], $9::int8[]) \
                    AS s (node, test, attempted_at, outcome, run, settled_at, conclusive_outcome, conclusive_at, \
                    inconclusive_count) \
                    WHERE l.node = s.node AND l.test = s.test";
    tx.execute_each("updating latest results", (sqlite, postgres), &[ColumnType::Int; 9], rows)
}

/// Folds a test's whole history. Slow; used for results that arrive out of order.
fn recompute(
    tx: &mut Tx<'_>,
    (node, test): (i64, i64),
    counts_from: Option<Timestamp>,
) -> Result<Option<StoredTestStatus>> {
    let names = Arc::clone(&tx.ids);
    let mut results = Vec::new();
    let sql = "SELECT run, outcome, offset_ms FROM history WHERE node = $1 AND test = $2";
    tx.rows("reading history", sql, vals![node, test], |row| {
        let (run, outcome) = (row.run(0)?, row.int(1)?);
        let kind = names.outcome(outcome)?;
        let at = result_time(run, row.int(2)?);
        if kind.counts_as_latest() && !kind.by_agent && counts_from.is_none_or(|from| at > from) {
            let (verdict, not_judged) = (kind.verdict, kind.is_not_judged());
            results.push(NextResult { at, run: run.number().cast_signed(), outcome, verdict, not_judged });
        }
        Ok(())
    })?;
    Ok(StoredTestStatus::fold(results))
}

/// Recomputes `latest_result` rows whose history changed, as when an import becomes trusted.
pub(super) fn recompute_latest(tx: &mut Tx<'_>, keys: &[(i64, i64)], before: &StateBefore) -> Result<()> {
    let mut rows = Vec::new();
    for key in keys {
        if let Some(status) = recompute(tx, *key, before.results_valid_from(key.0))? {
            push_test_status(&mut rows, *key, &status);
        }
    }
    insert_test_statuses(tx, &rows)
}

/// Counts rows already in history that become trusted.
pub(super) fn count_newly_trusted(tx: &mut Tx<'_>, entries: &[NewHistoryRow]) -> Result<()> {
    count_hourly(tx, entries.iter())
}

fn count_hourly<'a>(tx: &mut Tx<'_>, entries: impl Iterator<Item = &'a NewHistoryRow>) -> Result<()> {
    let mut counts: BTreeMap<(i64, i64), [i64; 4]> = BTreeMap::new();
    for entry in entries {
        let hour = entry.at.millis().div_euclid(HOUR);
        counts.entry((hour, entry.test)).or_default()[hourly_column(entry.kind.verdict)] += 1;
    }
    let mut rows = Vec::with_capacity(counts.len() * 6);
    for ((hour, test), [passed, failed, inconclusive, not_applicable]) in counts {
        rows.extend_from_slice(vals![hour, test, passed, failed, inconclusive, not_applicable]);
    }
    let conflict = "ON CONFLICT (hour, test) DO UPDATE SET passed = hourly_count.passed + excluded.passed, \
                    failed = hourly_count.failed + excluded.failed, \
                    inconclusive = hourly_count.inconclusive + excluded.inconclusive, \
                    not_applicable = hourly_count.not_applicable + excluded.not_applicable";
    let into = "hourly_count (hour, test, passed, failed, inconclusive, not_applicable)";
    tx.upsert_contended("counting results", into, &[ColumnType::Int; 6], &rows, conflict)
}

/// Returns the column of `hourly_count` that counts a verdict.
pub(super) const fn hourly_column(verdict: Verdict) -> usize {
    match verdict {
        Verdict::Pass => 0,
        Verdict::Fail => 1,
        Verdict::Inconclusive => 2,
        Verdict::NotApplicable => 3,
    }
}

/// Returns a history row's time, which is stored relative to its run's creation.
pub(super) fn result_time(run: RunId, since_birth: i64) -> Timestamp {
    Timestamp::from_millis(run.born().millis().saturating_add(since_birth))
}
