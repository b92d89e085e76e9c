//! Reads results: the latest of each test, the history of a node, failure rates.

use std::{cmp::Ordering, sync::Arc};

use doctor_core::{
    finding::Verdict,
    ids::{NodeName, RunId, TestId},
    time::{Span, Timestamp},
};

use super::{
    Store, agent_results,
    db::{Row, SqlValue, Tx, vals},
    error::Result,
    id_cache::IdCache,
    records::{FailureRate, HistoryCursor, HistoryFilter, HistoryPage, HistoryRow, LatestRow},
    result_writer::{HOUR, longest_result_delay, result_time},
};

/// Rows collected beyond the limit before the surplus is discarded.
const SURPLUS: usize = 4096;

/// Bound on the work of one query over all nodes: a fraction of a second.
#[derive(Debug, Clone, Copy)]
struct SearchBudget {
    /// Approximate number of rows read per stretch.
    rows_per_slice: i64,
    /// Cost of looking up all nodes for one stretch, in rows.
    lookups: i64,
    /// Maximum of both together.
    most: i64,
}

const SEARCH_BUDGET: SearchBudget = SearchBudget { rows_per_slice: 20_000, lookups: 10_000, most: 300_000 };

/// Hourly counts read to size one stretch.
const HOURS: i64 = 1000;

/// Shift between a time and the lowest run id of that time.
const RUN_ID_TIME_SHIFT: u32 = 21;

impl Store {
    /// Returns the latest result of every test on every node, of those that runs had.
    pub fn latest_all(&self) -> Result<Vec<LatestRow>> {
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            // The names are those of this transaction, so no row has a higher id.
            if !tx.is_sqlite() && names.have_small_numbers() {
                return packed_latest(tx, &names);
            }
            let sql = format!("{LATEST} ORDER BY node, test");
            let read = |row: &Row<'_>| read_latest(row, (row.int(0)?, row.int(1)?), &names);
            tx.all("reading latest results", &sql, &[], read)
        })
    }

    /// Returns the latest results of a node, those of its agent included.
    pub fn latest_of(&self, node: &NodeName) -> Result<Vec<LatestRow>> {
        self.read(|tx| {
            let Some(id) = tx.ids.node_id(node) else { return Ok(Vec::new()) };
            let names = Arc::clone(&tx.ids);
            let sql = format!("{LATEST} WHERE node = $1 ORDER BY test");
            let of_runs =
                tx.all("reading latest results", &sql, vals![id], |row| read_latest(row, (id, row.int(1)?), &names))?;
            agent_results::latest_of(tx, id, of_runs)
        })
    }

    /// Returns the latest result of one test on every node, those of agents included.
    pub fn latest_of_test(&self, test: &TestId) -> Result<Vec<LatestRow>> {
        self.read(|tx| {
            let Some(id) = tx.ids.test_id(test) else { return Ok(Vec::new()) };
            let names = Arc::clone(&tx.ids);
            // The key starts with the node: each node is looked up, and no other test is read.
            let sql = "SELECT l.node, l.test, l.attempted_at, l.outcome, l.run, l.conclusive_outcome, l.conclusive_at, \
                       l.inconclusive_count FROM node n CROSS JOIN latest_result l \
                       WHERE l.node = n.id AND l.test = $1 ORDER BY n.id";
            let of_runs =
                tx.all("reading latest results", sql, vals![id], |row| read_latest(row, (row.int(0)?, id), &names))?;
            agent_results::latest_of_test(tx, id, of_runs)
        })
    }

    /// Returns past results, newest first.
    pub fn history(&self, filter: &HistoryFilter) -> Result<Vec<HistoryRow>> {
        let HistoryPage { mut rows, searched_back_to: mut searched } = self.history_page(filter)?;
        while let Some(before) = searched {
            let found = u32::try_from(rows.len()).unwrap_or(u32::MAX);
            let limit = filter.limit.map(|limit| limit.saturating_sub(found));
            let part = self.history_page(&HistoryFilter { before: Some(before), limit, ..filter.clone() })?;
            rows.extend(part.rows);
            searched = part.searched_back_to;
        }
        Ok(rows)
    }

    /// As [`Self::history`], with bounded work: where matches are rare, it returns fewer rows than there are.
    pub fn history_page(&self, filter: &HistoryFilter) -> Result<HistoryPage> {
        let (mut rows, searched) = match &filter.node {
            // A single statement suffices.
            Some(node) if filter.since.is_none() && filter.verdict.is_none() => {
                (self.query_once(|tx| node_history(tx, node, filter))?.unwrap_or_default(), None)
            }
            Some(node) => (self.read(|tx| node_history(tx, node, filter))?.unwrap_or_default(), None),
            None => self.read(|tx| all_nodes_history(tx, filter, SEARCH_BUDGET))?,
        };
        rows.sort_by(newest_first);
        rows.truncate(row_limit(filter));
        Ok(HistoryPage { rows, searched_back_to: searched })
    }

    /// Returns how often each test failed since this time. Counts are hourly, and the hour that contains `since` counts
    /// fully. That makes a month of ten million results one short scan.
    pub fn failure_rates(&self, since: Timestamp) -> Result<Vec<FailureRate>> {
        let sql = "SELECT test, CAST(SUM(passed) AS BIGINT), CAST(SUM(failed) AS BIGINT), \
                   CAST(SUM(inconclusive) AS BIGINT), CAST(SUM(not_applicable) AS BIGINT) \
                   FROM hourly_count WHERE hour >= $1 GROUP BY test ORDER BY test";
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            tx.all("counting failures", sql, vals![since.millis().div_euclid(HOUR)], |row| {
                Ok(FailureRate {
                    test: names.test(row.int(0)?)?.clone(),
                    pass: row.unsigned(1)?,
                    fail: row.unsigned(2)?,
                    inconclusive: row.unsigned(3)?,
                    not_applicable: row.unsigned(4)?,
                })
            })
        })
    }
}

const LATEST: &str = "SELECT node, test, attempted_at, outcome, run, conclusive_outcome, conclusive_at, \
                      inconclusive_count FROM latest_result";

/// As [`LATEST`], packed for PostgreSQL, where encoding a value costs more than testing that it can be omitted. Node,
/// test and outcome are one number; NULL replaces a conclusive outcome equal to the latest, and zero misses.
const PACKED_LATEST: &str = "SELECT (node::bigint << 32) | (test::bigint << 16) | outcome, attempted_at, run, \
     CASE WHEN conclusive_outcome = outcome AND conclusive_at = attempted_at THEN NULL \
     ELSE COALESCE(conclusive_outcome, 0) END, \
     NULLIF(conclusive_at, attempted_at), NULLIF(inconclusive_count, 0) FROM latest_result";

const NO_OUTCOME: i64 = 0;

fn packed_latest(tx: &mut Tx<'_>, names: &IdCache) -> Result<Vec<LatestRow>> {
    const SIXTEEN_BITS: i64 = 0xffff;
    let mut order: Vec<(i64, usize)> = Vec::new();
    let rows = tx.all_integers("reading latest results", PACKED_LATEST, |row| {
        let packed = row.int(0)?;
        order.push((packed, order.len()));
        let (outcome, at) = (packed & SIXTEEN_BITS, row.timestamp(1)?);
        let conclusive = match row.opt_int(3)? {
            None => Some((outcome, at)),
            Some(NO_OUTCOME) => None,
            Some(conclusive) => Some((conclusive, row.opt_timestamp(4)?.unwrap_or(at))),
        };
        let misses = if row.opt_int(5)?.is_none() { 0 } else { row.count(5)? };
        let found =
            LatestIds { node: packed >> 32, test: packed >> 16 & SIXTEEN_BITS, at, outcome, conclusive, misses };
        latest_row(&found, || row.run(2), names)
    })?;
    // Cheaper here than on the server.
    order.sort_unstable();
    let mut rows: Vec<Option<LatestRow>> = rows.into_iter().map(Some).collect();
    let mut sorted = Vec::with_capacity(rows.len());
    sorted.extend(order.into_iter().filter_map(|(_, index)| rows.get_mut(index)?.take()));
    Ok(sorted)
}

/// `(node, test)` are the row's first two columns.
fn read_latest(row: &Row<'_>, (node, test): (i64, i64), names: &IdCache) -> Result<LatestRow> {
    let sure = row.opt_int(5)?.zip(row.opt_timestamp(6)?);
    let found =
        LatestIds { node, test, at: row.timestamp(2)?, outcome: row.int(3)?, conclusive: sure, misses: row.count(7)? };
    latest_row(&found, || row.run(4), names)
}

/// A row of `latest_result`, with ids instead of names.
struct LatestIds {
    node: i64,
    test: i64,
    at: Timestamp,
    outcome: i64,
    /// The last conclusive outcome, and when.
    conclusive: Option<(i64, Timestamp)>,
    misses: u32,
}

/// Calls `run` only if the result has a run.
fn latest_row(found: &LatestIds, run: impl FnOnce() -> Result<RunId>, names: &IdCache) -> Result<LatestRow> {
    let kind = names.outcome(found.outcome)?;
    let conclusive = found.conclusive.map(|(sure, at)| Ok((names.outcome(sure)?.verdict, at))).transpose()?;
    Ok(LatestRow {
        node: names.node(found.node)?.clone(),
        test: names.test(found.test)?.clone(),
        at: found.at,
        verdict: kind.verdict,
        reason: kind.reason.clone(),
        run: if kind.has_run() { Some(run()?) } else { None },
        conclusive,
        misses: found.misses,
    })
}

fn row_limit(filter: &HistoryFilter) -> usize {
    filter.limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Returns the lowest id of a run whose result may be as new as `since`. Rows are indexed by run, so a search by time
/// goes further back by the longest delay between a run's creation and its result, and then filters by time.
fn lowest_run(tx: &mut Tx<'_>, since: Timestamp) -> Result<i64> {
    let born = since.minus(longest_result_delay(tx)?);
    Ok(born.millis().clamp(0, i64::MAX >> RUN_ID_TIME_SHIFT) << RUN_ID_TIME_SHIFT)
}

fn newest_first(a: &HistoryRow, b: &HistoryRow) -> Ordering {
    (b.at, b.run, &a.node, &a.test).cmp(&(a.at, a.run, &b.node, &b.test))
}

/// Whether a row comes after this cursor, newest first.
fn follows(row: &HistoryRow, cursor: &HistoryCursor) -> bool {
    (row.at, row.run, &cursor.node, &cursor.test) < (cursor.at, cursor.run, &row.node, &row.test)
}

/// Returns an SQL condition on outcomes with this verdict; empty for every verdict.
fn with_verdict(names: &IdCache, verdict: Option<Verdict>, column: &str) -> String {
    let Some(verdict) = verdict else { return String::new() };
    let ids: Vec<String> = names.outcomes_with(verdict).map(|id| id.to_string()).collect();
    // No outcome has id 0.
    let ids = if ids.is_empty() { "0".to_owned() } else { ids.join(", ") };
    format!(" AND {column} IN ({ids})")
}

/// Returns `None` if the node or the test is unknown.
fn node_history(tx: &mut Tx<'_>, node: &NodeName, filter: &HistoryFilter) -> Result<Option<Vec<HistoryRow>>> {
    let Some(node) = tx.ids.node_id(node) else { return Ok(None) };
    let lowest = filter.since.map_or(Ok(0), |since| lowest_run(tx, since))?;
    // A node has one run at a time, so later rows are of the same run or an older one, or of the agent up to the
    // cursor's time. Rows of imports and of agents have no run, and the id in their place is made of their time.
    let cursor = filter.after.as_ref().and_then(|cursor| Some((cursor.at, cursor.run?)));
    let highest = cursor.map_or(i64::MAX, |(at, run)| run.number().cast_signed().max(last_run(at)));
    let mut only = with_verdict(&tx.ids, filter.verdict, "outcome");
    let mut vals: Vec<SqlValue<'_>> = vec![node.into(), lowest.into(), highest.into()];
    if let Some(test) = &filter.test {
        let Some(test) = tx.ids.test_id(test) else { return Ok(None) };
        vals.push(test.into());
        only += " AND test = $4";
    }
    let mut sql = format!(
        "SELECT node, run, test, outcome, offset_ms, duration_ms FROM history \
         WHERE node = $1 AND run >= $2 AND run <= $3{only}"
    );
    // A node has one run at a time, so the newest runs have the newest results. The run that the limit falls into is
    // read whole, because the order of its tests is by name. So are the run of the cursor and the results of its moment.
    let imported = filter.before.is_some() || (filter.after.is_some() && cursor.is_none());
    if let (Some(limit), None, false) = (filter.limit, filter.since, imported) {
        let more = if cursor.is_some() { 2 * tx.ids.tests() } else { 0 };
        vals.push((i64::from(limit.max(1) - 1) + more).into());
        let last = format!(
            "(SELECT run FROM history WHERE node = $1 AND run <= $3{only} ORDER BY run DESC LIMIT 1 OFFSET ${})",
            vals.len()
        );
        // Where that is a result of the agent, a run that was created before it may have newer results.
        let of_agents: Vec<String> = tx.ids.outcomes_of_agents().map(|id| id.to_string()).collect();
        let run_before = match of_agents.is_empty() {
            true => String::new(),
            false => format!(
                "(SELECT MAX(run) FROM history WHERE node = $1 AND run <= {last}{only} AND outcome NOT IN ({})), ",
                of_agents.join(", ")
            ),
        };
        sql += &format!(" AND run >= COALESCE({run_before}{last}, 0)");
    }
    let names = Arc::clone(&tx.ids);
    let rows = tx.all("reading history", &sql, &vals, |row| read_row(row, &names, filter))?;
    Ok(Some(rows.into_iter().flatten().collect()))
}

/// Rows of all nodes, and how far back the search went if it stopped early.
type SearchResult = (Vec<HistoryRow>, Option<Timestamp>);

/// Searches one stretch of time after another, newest first, until there are enough rows, no more history, or the
/// effort is spent.
fn all_nodes_history(tx: &mut Tx<'_>, filter: &HistoryFilter, effort: SearchBudget) -> Result<SearchResult> {
    let test = match &filter.test {
        Some(test) => match tx.ids.test_id(test) {
            Some(id) => Some(id),
            None => return Ok((Vec::new(), None)),
        },
        None => None,
    };
    let longest = longest_result_delay(tx)?;
    let lowest = filter.since.map_or(Ok(0), |since| lowest_run(tx, since))?;
    let begin = [filter.after.as_ref().map(|cursor| cursor.at), filter.before].into_iter().flatten().min();
    let mut high = begin.map_or(i64::MAX, highest_run);
    let (mut rows, mut spent) = (Vec::new(), 0);
    loop {
        let (low, counted) =
            if filter.limit.is_some() { time_slice(tx, high, effort.rows_per_slice)? } else { (lowest, 0) };
        let low = low.max(lowest);
        read_slice(tx, filter, test, (low, high), &mut rows)?;
        spent += counted + effort.lookups;
        if low <= lowest {
            return Ok((rows, None));
        }
        // Rows not searched belong to runs created earlier, and are no newer than this.
        let searched = Timestamp::from_millis(low >> RUN_ID_TIME_SHIFT).plus(longest);
        rows.sort_by(newest_first);
        rows.truncate(row_limit(filter));
        let enough = rows.len() >= row_limit(filter) && rows.last().is_none_or(|row| row.at > searched);
        if enough {
            return Ok((rows, None));
        }
        // The next query continues where this one stops, so each must advance.
        if spent >= effort.most && begin.is_none_or(|begin| searched < begin) {
            rows.retain(|row| row.at > searched);
            return Ok((rows, Some(searched)));
        }
        high = low - 1;
    }
}

/// Returns the lowest run id of a stretch that ends with `high` and has about `target` rows, and the number of rows, by
/// the hourly counts.
fn time_slice(tx: &mut Tx<'_>, high: i64, target: i64) -> Result<(i64, i64)> {
    let last = (high >> RUN_ID_TIME_SHIFT) / HOUR;
    let sql = "SELECT hour, CAST(SUM(passed + failed + inconclusive + not_applicable) AS BIGINT) FROM hourly_count \
               WHERE hour <= $1 GROUP BY hour ORDER BY hour DESC LIMIT $2";
    let mut rows = 0;
    let mut first = None;
    let hours = tx.all("counting results", sql, vals![last, HOURS], |row| Ok((row.int(0)?, row.int(1)?)))?;
    for (hour, count) in &hours {
        first = Some(*hour);
        rows += count;
        if rows >= target {
            break;
        }
    }
    // There is little or nothing before the first counted hour.
    let all = hours.len() < usize::try_from(HOURS).unwrap_or(usize::MAX) && rows < target;
    Ok((first.filter(|_| !all).map_or(0, |hour| (hour * HOUR) << RUN_ID_TIME_SHIFT), rows))
}

/// Reads the rows of one stretch. Each node's runs are found by the primary key: SQLite joins the tables of a CROSS
/// JOIN in the written order, and would otherwise scan all of history.
fn read_slice(
    tx: &mut Tx<'_>,
    filter: &HistoryFilter,
    test: Option<i64>,
    (low, high): (i64, i64),
    rows: &mut Vec<HistoryRow>,
) -> Result<()> {
    let of_verdict = with_verdict(&tx.ids, filter.verdict, "h.outcome");
    let mut sql = format!(
        "SELECT h.node, h.run, h.test, h.outcome, h.offset_ms, h.duration_ms FROM node n CROSS JOIN history h \
         WHERE h.node = n.id AND h.run >= $1 AND h.run <= $2{of_verdict}"
    );
    let mut vals: Vec<SqlValue<'_>> = vec![low.into(), high.into()];
    if let Some(test) = test {
        vals.push(test.into());
        sql += " AND h.test = $3";
    }
    let names = Arc::clone(&tx.ids);
    tx.rows("reading history", &sql, &vals, |row| {
        rows.extend(read_row(row, &names, filter)?);
        if rows.len() >= row_limit(filter).saturating_add(SURPLUS) {
            rows.sort_by(newest_first);
            rows.truncate(row_limit(filter));
        }
        Ok(())
    })
}

/// Returns the highest id of a run that was created at this time.
fn last_run(at: Timestamp) -> i64 {
    ((at.millis().clamp(0, (i64::MAX >> RUN_ID_TIME_SHIFT) - 1) + 1) << RUN_ID_TIME_SHIFT) - 1
}

/// Returns the highest id of a run whose result may be as old as `at`. A run precedes its result, except for clock
/// differences; hence the margin of an hour.
fn highest_run(at: Timestamp) -> i64 {
    last_run(at.plus(Span::hours(1)))
}

/// Returns `None` if the row is outside the time range or not after the cursor.
fn read_row(row: &Row<'_>, names: &IdCache, filter: &HistoryFilter) -> Result<Option<HistoryRow>> {
    let run = row.run(1)?;
    let at = result_time(run, row.int(4)?);
    if filter.since.is_some_and(|since| at < since) || filter.before.is_some_and(|before| at > before) {
        return Ok(None);
    }
    let kind = names.outcome(row.int(3)?)?;
    let row = HistoryRow {
        node: names.node(row.int(0)?)?.clone(),
        test: names.test(row.int(2)?)?.clone(),
        at,
        verdict: kind.verdict,
        reason: kind.reason.clone(),
        severity: kind.severity,
        run: kind.has_run().then_some(run),
        duration: Span::from_millis(row.int(5)?),
        untrusted: kind.untrusted,
        by_agent: kind.by_agent,
    };
    Ok(Some(row).filter(|row| filter.after.as_ref().is_none_or(|cursor| follows(row, cursor))))
}

#[cfg(test)]
mod tests {
    use doctor_core::{ids::RunId, reason::ReasonCode};

    use super::*;
    use crate::{
        db::Access,
        id_cache::OutcomeKind,
        result_writer::{self, NewHistoryRow, StateBefore},
    };

    const HOURS: i64 = 90;
    const NODES: i64 = 3;

    /// Three nodes with a run each hour, some of which took seven hours; every tenth result failed.
    fn store() -> Store {
        let store = Store::open_in_memory().unwrap();
        let kind = |verdict| OutcomeKind {
            verdict,
            severity: None,
            reason: ReasonCode::new("said").unwrap(),
            untrusted: false,
            imported: false,
            by_agent: false,
        };
        store
            .write_unfenced(Access::Write, |tx| {
                let mut entries = Vec::new();
                let tests = [tx.test_id(&TestId::new("dl").unwrap())?, tx.test_id(&TestId::new("ib").unwrap())?];
                for (n, (hour, of)) in (0..HOURS).flat_map(|hour| (0..NODES).map(move |of| (hour, of))).enumerate() {
                    let born = Timestamp::from_secs(1_700_000_000 + hour * 3600 + of);
                    let node = tx.node_id(&NodeName::new(&format!("n{of}")).unwrap(), born)?;
                    let duration = if hour == HOURS - 8 { Span::hours(7) } else { Span::minutes(5 + of) };
                    for test in tests {
                        let verdict = if n % 10 == 0 { Verdict::Fail } else { Verdict::Pass };
                        let run = RunId::born_at(born);
                        let (at, kind) = (born.plus(duration), kind(verdict));
                        entries.push(NewHistoryRow { node, run, test, kind, at, duration, bundle: None });
                    }
                }
                result_writer::write_results(tx, &StateBefore::default(), &entries)
            })
            .unwrap();
        store
    }

    fn parts(store: &Store, filter: &HistoryFilter, effort: SearchBudget) -> (Vec<HistoryRow>, usize) {
        let mut filter = filter.clone();
        let (mut all, mut queries) = (Vec::new(), 0);
        loop {
            queries += 1;
            let (mut rows, searched) = store.read(|tx| all_nodes_history(tx, &filter, effort)).unwrap();
            rows.sort_by(newest_first);
            rows.truncate(row_limit(&filter));
            let last = rows.last().map(HistoryRow::cursor);
            let full = rows.len() == row_limit(&filter);
            all.extend(rows);
            match (searched, last) {
                (Some(searched), _) => filter = HistoryFilter { after: None, before: Some(searched), ..filter },
                (None, Some(last)) if full => filter = HistoryFilter { after: Some(last), before: None, ..filter },
                _ => return (all, queries),
            }
        }
    }

    #[test]
    fn partial_searches_add_up_to_the_full_history_for_any_budget() {
        let store = store();
        let all = store.history(&HistoryFilter::default()).unwrap();
        assert_eq!(all.len() as i64, HOURS * NODES * 2);
        assert!(all.is_sorted_by(|a, b| newest_first(a, b) != Ordering::Greater));
        let since = Some(all[200].at);
        let little = SearchBudget { rows_per_slice: 5, lookups: 1, most: 40 };
        for (test, verdict, since) in [
            (None, None, None),
            (Some("ib"), None, None),
            (None, Some(Verdict::Fail), None),
            (Some("dl"), Some(Verdict::Fail), since),
            (None, None, since),
            (None, Some(Verdict::Inconclusive), None),
        ] {
            let test = test.map(|test| TestId::new(test).unwrap());
            let expected = all.iter().filter(|row| {
                test.as_ref().is_none_or(|test| row.test == *test)
                    && verdict.is_none_or(|verdict| row.verdict == verdict)
                    && since.is_none_or(|since| row.at >= since)
            });
            let expected: Vec<HistoryRow> = expected.cloned().collect();
            for (limit, effort) in [(7, little), (7, SEARCH_BUDGET), (1000, little), (1, little)] {
                let filter = HistoryFilter {
                    test: test.clone(),
                    verdict,
                    since,
                    limit: Some(limit),
                    ..HistoryFilter::default()
                };
                let (found, queries) = parts(&store, &filter, effort);
                assert_eq!(found, expected, "{filter:?} {effort:?}");
                assert!(effort.most > 1000 || since.is_some() || queries > 2, "{filter:?}: the query was not bounded");
                let once = store.history(&filter).unwrap();
                assert_eq!(once, expected[..expected.len().min(limit as usize)], "{filter:?}");
            }
        }
    }
}
