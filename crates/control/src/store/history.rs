//! Reading results: the latest of each test, the past of a node, rates over a time.

use std::{cmp::Ordering, sync::Arc};

use doctor_core::{
    finding::Verdict,
    ids::{NodeName, TestId},
    plan::MOST_TESTS,
    time::{Span, Timestamp},
};

use super::{
    Store,
    db::{Row, Tx, Val, vals},
    error::Result,
    ledger::{HOUR, longest_run, moment_of},
    names::Names,
    records::{FailureRate, HistoryFilter, HistoryPlace, HistoryRow, LatestRow},
};

/// Rows kept beyond what was asked for while searching, before the surplus is thrown away.
const SURPLUS: usize = 4096;

/// Between a moment and the lowest run number of that moment.
const BIRTH_SHIFT: u32 = 21;

impl Store {
    /// Where every test on every node stands.
    pub fn latest_all(&self) -> Result<Vec<LatestRow>> {
        self.read(|tx| {
            let names = Arc::clone(&tx.names);
            let mut places = Vec::new();
            let rows = tx.all_numbers("reading latest results", ALL_LATEST, |row| {
                let of = (row.int(0)?, row.int(1)?);
                places.push((of, places.len()));
                let (attempt, outcome) = (row.moment(2)?, row.int(3)?);
                let sure = match row.opt_int(5)? {
                    None => Some((outcome, attempt)),
                    Some(NO_OUTCOME) => None,
                    Some(sure) => Some((sure, row.opt_moment(6)?.unwrap_or(attempt))),
                };
                let misses = if row.opt_int(7)?.is_none() { 0 } else { row.count(7)? };
                latest_row(row, of, sure, misses, &names)
            })?;
            // In SQLite they lie in this order; PostgreSQL would take longer to bring them into it.
            if places.is_sorted() {
                return Ok(rows);
            }
            // The places are a fifth of what the rows are, and are moved about in their stead.
            places.sort_unstable();
            let mut rows: Vec<Option<LatestRow>> = rows.into_iter().map(Some).collect();
            Ok(places.into_iter().filter_map(|(_, place)| rows.get_mut(place)?.take()).collect())
        })
    }

    /// Where a node's tests stand.
    pub fn latest_of(&self, node: &NodeName) -> Result<Vec<LatestRow>> {
        self.read(|tx| {
            let Some(id) = tx.names.node_number(node) else { return Ok(Vec::new()) };
            let names = Arc::clone(&tx.names);
            let sql = format!("{LATEST} WHERE node = $1 ORDER BY test");
            tx.all("reading latest results", &sql, vals![id], |row| read_latest(row, (id, row.int(1)?), &names))
        })
    }

    /// Where one test stands on every node.
    pub fn latest_of_test(&self, test: &TestId) -> Result<Vec<LatestRow>> {
        self.read(|tx| {
            let Some(id) = tx.names.test_number(test) else { return Ok(Vec::new()) };
            let names = Arc::clone(&tx.names);
            let sql = format!("{LATEST} WHERE test = $1 ORDER BY node");
            tx.all("reading latest results", &sql, vals![id], |row| read_latest(row, (row.int(0)?, id), &names))
        })
    }

    /// Past results, newest first.
    pub fn history(&self, filter: &HistoryFilter) -> Result<Vec<HistoryRow>> {
        let mut rows = match &filter.node {
            // One statement answers this.
            Some(node) if filter.since.is_none() && filter.verdict.is_none() => {
                self.ask(|tx| of_node(tx, node, filter))?.unwrap_or_default()
            }
            Some(node) => self.read(|tx| of_node(tx, node, filter))?.unwrap_or_default(),
            None => self.read(|tx| of_all(tx, filter))?,
        };
        rows.sort_by(newest_first);
        rows.truncate(most(filter));
        Ok(rows)
    }

    /// How often each test failed since then. Counted by the hour: the hour in which `since` lies counts whole, which
    /// is what makes a month of ten million results one short scan.
    pub fn failure_rates(&self, since: Timestamp) -> Result<Vec<FailureRate>> {
        let sql = "SELECT test, CAST(SUM(passed) AS BIGINT), CAST(SUM(failed) AS BIGINT), \
                   CAST(SUM(inconclusive) AS BIGINT), CAST(SUM(not_applicable) AS BIGINT) \
                   FROM hourly WHERE hour >= $1 GROUP BY test ORDER BY test";
        self.read(|tx| {
            let names = Arc::clone(&tx.names);
            tx.all("counting failures", sql, vals![since.millis().div_euclid(HOUR)], |row| {
                Ok(FailureRate {
                    test: names.test(row.int(0)?)?.clone(),
                    pass: row.number(1)?,
                    fail: row.number(2)?,
                    inconclusive: row.number(3)?,
                    not_applicable: row.number(4)?,
                })
            })
        })
    }
}

const LATEST: &str = "SELECT node, test, attempt, outcome, run, sure, sure_at, misses FROM latest";

/// The same for all of them at once, where PostgreSQL takes longer to write a value than to see that it can be left out:
/// nothing stands for a last sure outcome that is the last one, and for no misses.
const ALL_LATEST: &str = "SELECT node, test, attempt, outcome, run, \
     CASE WHEN sure = outcome AND sure_at = attempt THEN NULL ELSE COALESCE(sure, 0) END, \
     NULLIF(sure_at, attempt), NULLIF(misses, 0) FROM latest";

const NO_OUTCOME: i64 = 0;

/// `of`: its first two columns.
fn read_latest(row: &Row<'_>, of: (i64, i64), names: &Names) -> Result<LatestRow> {
    let sure = row.opt_int(5)?.zip(row.opt_moment(6)?);
    latest_row(row, of, sure, row.count(7)?, names)
}

/// `sure`: its last outcome that said something, and when.
fn latest_row(
    row: &Row<'_>,
    of: (i64, i64),
    sure: Option<(i64, Timestamp)>,
    misses: u32,
    names: &Names,
) -> Result<LatestRow> {
    let kind = names.outcome(row.int(3)?)?;
    let conclusive = sure.map(|(sure, at)| Ok((names.outcome(sure)?.verdict, at))).transpose()?;
    Ok(LatestRow {
        node: names.node(of.0)?.clone(),
        test: names.test(of.1)?.clone(),
        at: row.moment(2)?,
        verdict: kind.verdict,
        reason: kind.reason.clone(),
        run: if kind.imported { None } else { Some(row.run(4)?) },
        conclusive,
        misses,
    })
}

fn most(filter: &HistoryFilter) -> usize {
    filter.limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// The lowest number a run can have whose result is not older than this. Rows are found by their run, so a search by
/// time looks as much further back as a result ever came after its run was born, and then looks at the time itself.
fn lowest_run(tx: &mut Tx<'_>, since: Timestamp) -> Result<i64> {
    let born = since.minus(longest_run(tx)?);
    Ok(born.millis().clamp(0, i64::MAX >> BIRTH_SHIFT) << BIRTH_SHIFT)
}

fn newest_first(a: &HistoryRow, b: &HistoryRow) -> Ordering {
    (b.at, b.run, &a.node, &a.test).cmp(&(a.at, a.run, &b.node, &b.test))
}

/// Whether a row comes after this place, newest first.
fn follows(row: &HistoryRow, place: &HistoryPlace) -> bool {
    (row.at, row.run, &place.node, &place.test) < (place.at, place.run, &row.node, &row.test)
}

/// The numbers of outcomes with this verdict, as SQL; nothing if every verdict is wanted.
fn with_verdict(names: &Names, verdict: Option<Verdict>, column: &str) -> String {
    let Some(verdict) = verdict else { return String::new() };
    let ids: Vec<String> = names.outcomes_with(verdict).map(|id| id.to_string()).collect();
    // No outcome has the number 0.
    let ids = if ids.is_empty() { "0".to_owned() } else { ids.join(", ") };
    format!(" AND {column} IN ({ids})")
}

/// `None`: the node or the test is not known.
fn of_node(tx: &mut Tx<'_>, node: &NodeName, filter: &HistoryFilter) -> Result<Option<Vec<HistoryRow>>> {
    let Some(node) = tx.names.node_number(node) else { return Ok(None) };
    let lowest = filter.since.map_or(Ok(0), |since| lowest_run(tx, since))?;
    // A node has one run at a time, so what follows a row is of its run or of an older one. What was imported has no run.
    let place = filter.after.as_ref().and_then(|place| place.run);
    let highest = place.map_or(i64::MAX, |run| i64::try_from(run.number()).unwrap_or(i64::MAX));
    let mut only = with_verdict(&tx.names, filter.verdict, "outcome");
    let mut vals: Vec<Val<'_>> = vec![node.into(), lowest.into(), highest.into()];
    if let Some(test) = &filter.test {
        let Some(test) = tx.names.test_number(test) else { return Ok(None) };
        vals.push(test.into());
        only += " AND test = $4";
    }
    let mut sql = format!(
        "SELECT node, run, test, outcome, at, took FROM history WHERE node = $1 AND run >= $2 AND run <= $3{only}"
    );
    // A node has one run at a time, so the newest runs have the newest results. The run in which the limit falls is read
    // whole: which of its tests come first is told by their names. So is the run of the place.
    let imported = filter.after.is_some() && place.is_none();
    if let (Some(limit), None, false) = (filter.limit, filter.since, imported) {
        let more = if place.is_some() { i64::try_from(MOST_TESTS).unwrap_or(i64::MAX) } else { 0 };
        vals.push((i64::from(limit.max(1) - 1) + more).into());
        sql += &format!(
            " AND run >= COALESCE((SELECT run FROM history WHERE node = $1 AND run <= $3{only} ORDER BY run DESC \
             LIMIT 1 OFFSET ${}), 0)",
            vals.len()
        );
    }
    let names = Arc::clone(&tx.names);
    let rows = tx.all("reading history", &sql, &vals, |row| read_row(row, &names, filter))?;
    Ok(Some(rows.into_iter().flatten().collect()))
}

/// Rows of all nodes.
fn of_all(tx: &mut Tx<'_>, filter: &HistoryFilter) -> Result<Vec<HistoryRow>> {
    let test = match &filter.test {
        Some(test) => match tx.names.test_number(test) {
            Some(id) => Some(id),
            None => return Ok(Vec::new()),
        },
        None => None,
    };
    match (filter.since, filter.limit) {
        (Some(since), _) => all_since(tx, filter, test, since),
        (None, None) => all_since(tx, filter, test, Timestamp::MIN),
        (None, Some(limit)) if filter.after.is_none() && filter.verdict.is_none() => {
            let since = far_enough(tx, test, limit)?;
            all_since(tx, filter, test, since)
        }
        (None, Some(limit)) => search_back(tx, filter, test, limit),
    }
}

/// How far back enough rows reach is not known beforehand: further and further, until there are enough or all.
fn search_back(tx: &mut Tx<'_>, filter: &HistoryFilter, test: Option<i64>, limit: u32) -> Result<Vec<HistoryRow>> {
    const FIRST: Span = Span::hours(6);
    let from = match &filter.after {
        Some(place) => place.at,
        None => far_enough(tx, test, 1)?,
    };
    let mut back = FIRST;
    loop {
        let since = from.minus(back);
        let rows = all_since(tx, filter, test, since)?;
        if rows.len() >= limit as usize || since.millis() <= 0 {
            return Ok(rows);
        }
        back = back.times(8);
    }
}

/// Each node's newest runs are found by the primary key.
fn all_since(tx: &mut Tx<'_>, filter: &HistoryFilter, test: Option<i64>, since: Timestamp) -> Result<Vec<HistoryRow>> {
    let lowest = lowest_run(tx, since)?;
    let highest = filter.after.as_ref().map_or(i64::MAX, |place| highest_run(place.at));
    let of_verdict = with_verdict(&tx.names, filter.verdict, "h.outcome");
    let mut sql = format!(
        "SELECT h.node, h.run, h.test, h.outcome, h.at, h.took FROM node n \
         JOIN history h ON h.node = n.id AND h.run >= $1 AND h.run <= $2{of_verdict}"
    );
    let mut vals: Vec<Val<'_>> = vec![lowest.into(), highest.into()];
    if let Some(test) = test {
        vals.push(test.into());
        sql += " WHERE h.test = $3";
    }
    let names = Arc::clone(&tx.names);
    let mut rows = Vec::new();
    tx.rows("reading history", &sql, &vals, |row| {
        rows.extend(read_row(row, &names, filter)?);
        if rows.len() >= most(filter).saturating_add(SURPLUS) {
            rows.sort_by(newest_first);
            rows.truncate(most(filter));
        }
        Ok(())
    })?;
    Ok(rows)
}

/// The highest number a run can have whose result is not younger than this: a run is born before its result, but for
/// clocks that disagree.
fn highest_run(at: Timestamp) -> i64 {
    let latest = at.plus(Span::hours(1)).millis().clamp(0, (i64::MAX >> BIRTH_SHIFT) - 1);
    ((latest + 1) << BIRTH_SHIFT) - 1
}

/// A moment since which there are at least so many results: `latest` alone has that many.
fn far_enough(tx: &mut Tx<'_>, test: Option<i64>, limit: u32) -> Result<Timestamp> {
    let last = i64::from(limit.max(1)) - 1;
    let found = match test {
        None => {
            let sql = "SELECT attempt FROM latest ORDER BY attempt DESC LIMIT 1 OFFSET $1";
            tx.first("reading latest results", sql, vals![last], |row| row.moment(0))?
        }
        Some(test) => {
            let sql = "SELECT attempt FROM latest WHERE test = $2 ORDER BY attempt DESC LIMIT 1 OFFSET $1";
            tx.first("reading latest results", sql, vals![last, test], |row| row.moment(0))?
        }
    };
    Ok(found.unwrap_or(Timestamp::MIN))
}

/// `None`: it is older than what was asked for, or not after the place.
fn read_row(row: &Row<'_>, names: &Names, filter: &HistoryFilter) -> Result<Option<HistoryRow>> {
    let run = row.run(1)?;
    let at = moment_of(run, row.int(4)?);
    if filter.since.is_some_and(|since| at < since) {
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
        run: (!kind.imported).then_some(run),
        took: Span::from_millis(row.int(5)?),
        untrusted: kind.untrusted,
    };
    Ok(Some(row).filter(|row| filter.after.as_ref().is_none_or(|place| follows(row, place))))
}
