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
    db::{Kind, Row, Tx, Val, vals},
    error::Result,
    names::{Names, OutcomeKind},
    nodes::KnownHardware,
    standing::{NextResult, Standing},
};

pub(super) const HOUR: i64 = 3_600_000;

/// Longer delays between a run's creation and its result are rare enough to record.
const USUAL_RUN: Span = Span::hours(6);
const LONGEST_RUN: &str = "longest-run-millis";

/// A result about to be written, with ids instead of names.
#[derive(Debug, Clone)]
pub(super) struct Posting {
    pub(super) node: i64,
    pub(super) run: RunId,
    pub(super) test: i64,
    pub(super) kind: OutcomeKind,
    pub(super) at: Timestamp,
    pub(super) took: Span,
    /// The bundle of its document, if any.
    pub(super) bundle: Option<i64>,
}

/// Rows of `latest_result` before results are posted.
pub(super) type Standings = HashMap<(i64, i64), Standing>;

/// State of the nodes before results are posted, read in one statement.
#[derive(Debug, Default)]
pub(super) struct Before {
    pub(super) standings: Standings,
    nodes: HashMap<i64, NodeBefore>,
}

#[derive(Debug, Default)]
struct NodeBefore {
    hardware: KnownHardware,
    /// Results up to this time belong to an earlier machine with this name.
    counts_from: Option<Timestamp>,
    backs_off: bool,
    has_findings: bool,
}

impl Before {
    pub(super) fn counts_from(&self, node: i64) -> Option<Timestamp> {
        self.nodes.get(&node)?.counts_from
    }

    /// Whether a result belongs to the machine that has the name now.
    pub(super) fn counts(&self, node: i64, at: Timestamp) -> bool {
        self.counts_from(node).is_none_or(|from| at > from)
    }

    pub(super) fn hardware(&self, node: i64) -> Option<KnownHardware> {
        self.nodes.get(&node).map(|before| before.hardware.clone())
    }

    pub(super) fn backing_off(&self) -> Vec<i64> {
        self.nodes.iter().filter(|(_, before)| before.backs_off).map(|(node, _)| *node).collect()
    }

    pub(super) fn with_findings(&self) -> Vec<i64> {
        self.nodes.iter().filter(|(_, before)| before.has_findings).map(|(node, _)| *node).collect()
    }
}

const READING_NODES: &str = "reading nodes and their latest results";
const NODES: &str = "SELECT l.node, l.test, l.attempted_at, l.outcome, l.run, l.settled_at, l.conclusive_outcome, \
                     l.conclusive_at, l.inconclusive_count, n.id, n.hardware_id, n.boot_id, n.hardware_seen_at, \
                     n.results_valid_from, n.backoff_count, EXISTS (SELECT 1 FROM finding f WHERE f.node = n.id) \
                     FROM node n LEFT JOIN latest_result l ON l.node = n.id WHERE n.id IN {keys}";

/// Announces a later call of [`before`] for these nodes.
pub(super) fn foresee(tx: &mut Tx<'_>, nodes: &[i64]) {
    tx.foresee(READING_NODES, NODES, nodes);
}

pub(super) fn before(tx: &mut Tx<'_>, nodes: &[i64]) -> Result<Before> {
    let names = Arc::clone(&tx.names);
    let mut before = Before::default();
    tx.keyed(READING_NODES, NODES, nodes, |row| {
        if row.opt_int(0)?.is_some() {
            let (key, standing) = read_standing(row, &names)?;
            before.standings.insert(key, standing);
        }
        if let Entry::Vacant(vacant) = before.nodes.entry(row.int(9)?) {
            vacant.insert(NodeBefore {
                hardware: KnownHardware {
                    hardware: row.opt_text(10)?.map(str::to_owned),
                    boot: row.opt_text(11)?.map(str::to_owned),
                    seen: row.opt_moment(12)?,
                },
                counts_from: row.opt_moment(13)?,
                backs_off: row.opt_int(14)?.is_some(),
                has_findings: row.flag(15)?,
            });
        }
        Ok(())
    })?;
    Ok(before)
}

/// Columns: node, test, attempted_at, outcome, run, settled_at, conclusive_outcome, conclusive_at, inconclusive_count.
pub(super) fn read_standing(row: &Row<'_>, names: &Names) -> Result<((i64, i64), Standing)> {
    let outcome = row.int(3)?;
    let verdict = names.outcome(outcome)?.verdict;
    let (settled, judged) = (row.opt_moment(5)?, row.opt_moment(7)?);
    let record = TestRecord::restore(settled, judged, Some((verdict, row.moment(2)?)), row.count(8)?);
    let sure = row.opt_int(6)?.zip(row.opt_moment(7)?);
    Ok(((row.int(0)?, row.int(1)?), Standing { record, outcome, run: row.int(4)?, sure }))
}

/// Writes new entries. The transaction fails if one exists already.
pub(super) fn post(tx: &mut Tx<'_>, before: &Before, entries: &[Posting]) -> Result<()> {
    let mut numbered = Vec::with_capacity(entries.len());
    for entry in entries {
        numbered.push((entry, tx.outcome_id(&entry.kind)?));
    }
    let mut rows = Vec::with_capacity(entries.len() * 7);
    let mut longest = USUAL_RUN.millis();
    for (entry, outcome) in &numbered {
        let since_birth = entry.at.millis().saturating_sub(entry.run.born().millis());
        longest = longest.max(since_birth);
        rows.extend_from_slice(vals![
            entry.node,
            entry.run,
            entry.test,
            *outcome,
            since_birth,
            entry.took,
            entry.bundle
        ]);
    }
    let into = "history (node, run, test, outcome, offset_ms, duration_ms, evidence_pack)";
    tx.bulk("adding history", into, &[Kind::Int; 7], &rows, "")?;
    if longest > USUAL_RUN.millis() {
        let sql = "INSERT INTO counter (name, value) VALUES ($1, $2) \
                   ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE counter.value < excluded.value";
        tx.run("recording the longest run", sql, vals![LONGEST_RUN, longest])?;
    }
    let believed: Vec<(&Posting, i64)> = numbered.into_iter().filter(|(entry, _)| !entry.kind.untrusted).collect();
    update_latest(tx, before, &believed)?;
    count_hourly(tx, believed.iter().map(|(entry, _)| *entry))
}

/// Returns the longest delay between a run's creation and its result.
pub(super) fn longest_run(tx: &mut Tx<'_>) -> Result<Span> {
    let sql = "SELECT value FROM counter WHERE name = $1";
    let noted = tx.first("reading counters", sql, vals![LONGEST_RUN], |row| row.int(0))?;
    Ok(Span::from_millis(noted.unwrap_or(0)).max(USUAL_RUN))
}

fn update_latest(tx: &mut Tx<'_>, before: &Before, entries: &[(&Posting, i64)]) -> Result<()> {
    let mut by_test: BTreeMap<(i64, i64), Vec<NextResult>> = BTreeMap::new();
    for (entry, outcome) in entries {
        if before.counts(entry.node, entry.at) {
            let run = entry.run.number().cast_signed();
            let result = NextResult { at: entry.at, run, outcome: *outcome, verdict: entry.kind.verdict };
            by_test.entry((entry.node, entry.test)).or_default().push(result);
        }
    }
    let mut rows = Vec::new();
    let mut new = Vec::new();
    for (key, mut results) in by_test {
        results.sort_unstable_by_key(|result| (result.at, result.run));
        let old = before.standings.get(&key).copied().unwrap_or(Standing::NOTHING);
        let standing = if results.iter().all(|result| old.precedes(result)) {
            let mut standing = old;
            results.iter().for_each(|result| standing.add(result));
            Some(standing)
        } else {
            recompute(tx, key, before.counts_from(key.0))?
        };
        if let Some(standing) = standing {
            let rows = if before.standings.contains_key(&key) { &mut rows } else { &mut new };
            push_standing(rows, key, &standing);
        }
    }
    change_standings(tx, &rows)?;
    write_standings(tx, &new)
}

fn push_standing(rows: &mut Vec<Val<'_>>, (node, test): (i64, i64), standing: &Standing) {
    let record = &standing.record;
    rows.extend_from_slice(vals![
        node,
        test,
        record.attempt(),
        standing.outcome,
        standing.run,
        record.settled(),
        standing.sure.map(|(outcome, _)| outcome),
        standing.sure.map(|(_, at)| at),
        record.misses()
    ]);
}

fn write_standings(tx: &mut Tx<'_>, rows: &[Val<'_>]) -> Result<()> {
    let into = "latest_result (node, test, attempted_at, outcome, run, settled_at, conclusive_outcome, \
                conclusive_at, inconclusive_count)";
    let conflict = "ON CONFLICT (node, test) DO UPDATE SET attempted_at = excluded.attempted_at, \
                    outcome = excluded.outcome, run = excluded.run, settled_at = excluded.settled_at, \
                    conclusive_outcome = excluded.conclusive_outcome, conclusive_at = excluded.conclusive_at, \
                    inconclusive_count = excluded.inconclusive_count";
    tx.bulk("updating latest results", into, &[Kind::Int; 9], rows, conflict)
}

/// Updates existing rows, which is cheaper than an upsert.
fn change_standings(tx: &mut Tx<'_>, rows: &[Val<'_>]) -> Result<()> {
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
    tx.each("updating latest results", (sqlite, postgres), &[Kind::Int; 9], rows)
}

/// Folds a test's whole history. Slow; used for results that arrive out of order.
fn recompute(tx: &mut Tx<'_>, (node, test): (i64, i64), counts_from: Option<Timestamp>) -> Result<Option<Standing>> {
    let names = Arc::clone(&tx.names);
    let mut results = Vec::new();
    let sql = "SELECT run, outcome, offset_ms FROM history WHERE node = $1 AND test = $2";
    tx.rows("reading history", sql, vals![node, test], |row| {
        let (run, outcome) = (row.run(0)?, row.int(1)?);
        let kind = names.outcome(outcome)?;
        let at = moment_of(run, row.int(2)?);
        if !kind.untrusted && counts_from.is_none_or(|from| at > from) {
            results.push(NextResult { at, run: run.number().cast_signed(), outcome, verdict: kind.verdict });
        }
        Ok(())
    })?;
    Ok(Standing::fold(results))
}

/// Recomputes `latest_result` rows whose history changed, as when an import becomes trusted.
pub(super) fn refold(tx: &mut Tx<'_>, keys: &[(i64, i64)], before: &Before) -> Result<()> {
    let mut rows = Vec::new();
    for key in keys {
        if let Some(standing) = recompute(tx, *key, before.counts_from(key.0))? {
            push_standing(&mut rows, *key, &standing);
        }
    }
    write_standings(tx, &rows)
}

/// Counts rows already in history that become trusted.
pub(super) fn count_believed(tx: &mut Tx<'_>, entries: &[Posting]) -> Result<()> {
    count_hourly(tx, entries.iter())
}

fn count_hourly<'a>(tx: &mut Tx<'_>, entries: impl Iterator<Item = &'a Posting>) -> Result<()> {
    let mut counts: BTreeMap<(i64, i64), [i64; 4]> = BTreeMap::new();
    for entry in entries {
        let hour = entry.at.millis().div_euclid(HOUR);
        counts.entry((hour, entry.test)).or_default()[place(entry.kind.verdict)] += 1;
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
    tx.add_up("counting results", into, &[Kind::Int; 6], &rows, conflict)
}

/// Returns the column of `hourly_count` that counts a verdict.
pub(super) const fn place(verdict: Verdict) -> usize {
    match verdict {
        Verdict::Pass => 0,
        Verdict::Fail => 1,
        Verdict::Inconclusive => 2,
        Verdict::NotApplicable => 3,
    }
}

/// Returns a history row's time, which is stored relative to its run's creation.
pub(super) fn moment_of(run: RunId, since_birth: i64) -> Timestamp {
    Timestamp::from_millis(run.born().millis().saturating_add(since_birth))
}
