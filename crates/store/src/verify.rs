//! Consistency checks over the whole store.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use doctor_core::{
    ids::{CaseId, RunId},
    time::Timestamp,
};

use super::{
    Store, cases,
    db::Tx,
    error::Result,
    records::VerifyReport,
    result_writer::{HOUR, hourly_column, read_test_status, result_time},
    test_status::{NextResult, StoredTestStatus},
};

/// Inconsistencies of one kind that are listed; the rest are counted.
const NAMED: usize = 20;

impl Store {
    /// Checks the whole store. Reads everything once and changes nothing.
    pub fn verify(&self) -> Result<VerifyReport> {
        self.read(|tx| {
            let mut report = Report::default();
            database(tx, &mut report)?;
            history(tx, &mut report)?;
            runs(tx, &mut report)?;
            open_cases(tx, &mut report)?;
            verify_ingest_queue(tx, &mut report)?;
            Ok(report.verified)
        })
    }
}

#[derive(Debug, Default)]
struct Report {
    verified: VerifyReport,
}

impl Report {
    fn add(&mut self, checked: String, mut problems: Vec<String>) {
        let more = problems.len().saturating_sub(NAMED);
        problems.truncate(NAMED);
        self.verified.problems.append(&mut problems);
        if more > 0 {
            self.verified.problems.push(format!("… and {more} more of this kind"));
        }
        self.verified.checked.push(checked);
    }
}

fn database(tx: &mut Tx<'_>, report: &mut Report) -> Result<()> {
    if !tx.is_sqlite() {
        return Ok(());
    }
    let lines = tx.all("checking the file", "PRAGMA integrity_check", &[], |row| Ok(row.text(0)?.to_owned()))?;
    let problems = lines.into_iter().filter(|line| line != "ok").map(|line| format!("the file is damaged: {line}"));
    report.add("the database file".to_owned(), problems.collect());
    Ok(())
}

/// Recomputes `latest_result` and the hourly counts from the history of runs.
fn history(tx: &mut Tx<'_>, report: &mut Report) -> Result<()> {
    let names = Arc::clone(&tx.ids);
    let mut latest: HashMap<(i64, i64), StoredTestStatus> = HashMap::new();
    let sql = "SELECT node, test, attempted_at, outcome, run, settled_at, conclusive_outcome, conclusive_at, \
               inconclusive_count FROM latest_result";
    tx.rows("reading latest results", sql, &[], |row| {
        let (key, status) = read_test_status(row, &names)?;
        latest.insert(key, status);
        Ok(())
    })?;
    let mut counts_from: HashMap<i64, Timestamp> = HashMap::new();
    let sql = "SELECT id, results_valid_from FROM node WHERE results_valid_from IS NOT NULL";
    tx.rows("reading nodes", sql, &[], |row| {
        counts_from.insert(row.int(0)?, row.timestamp(1)?);
        Ok(())
    })?;

    let mut fold = Fold { latest, ..Fold::default() };
    let mut rows = 0_u64;
    let sql = "SELECT node, run, test, outcome, offset_ms FROM history ORDER BY node, run, test";
    tx.rows("reading history", sql, &[], |row| {
        rows += 1;
        let (node, run, test, outcome) = (row.int(0)?, row.run(1)?, row.int(2)?, row.int(3)?);
        let kind = names.outcome(outcome)?;
        if kind.untrusted || kind.by_agent {
            return Ok(());
        }
        let at = result_time(run, row.int(4)?);
        fold.counts.entry((at.millis().div_euclid(HOUR), test)).or_default()[hourly_column(kind.verdict)] += 1;
        if kind.counts_as_latest() && counts_from.get(&node).is_none_or(|from| at > *from) {
            let run = run.number().cast_signed();
            fold.add(
                node,
                test,
                NextResult { at, run, outcome, verdict: kind.verdict, not_judged: kind.is_not_judged() },
            );
        }
        Ok(())
    })?;
    fold.finish_node();
    let missing: Vec<_> = fold.latest.keys().copied().collect();
    let mut problems = fold.wrong;
    problems.extend(missing.into_iter().map(|key| (key, "is in `latest_result` but not in `history`")));
    let mut problems: Vec<String> = problems
        .into_iter()
        .map(|((node, test), what)| {
            let node = names.node(node).map_or_else(|_| node.to_string(), ToString::to_string);
            let test = names.test(test).map_or_else(|_| test.to_string(), ToString::to_string);
            format!("{node} {test} {what}")
        })
        .collect();
    problems.sort();
    report.add(format!("latest results, compared with {rows} rows of history"), problems);
    hourly(tx, report, &fold.counts)
}

/// Folds history by node as it is read.
#[derive(Debug, Default)]
struct Fold {
    latest: HashMap<(i64, i64), StoredTestStatus>,
    node: i64,
    tests: BTreeMap<i64, Vec<NextResult>>,
    wrong: Vec<((i64, i64), &'static str)>,
    counts: BTreeMap<(i64, i64), [i64; 4]>,
}

impl Fold {
    fn add(&mut self, node: i64, test: i64, result: NextResult) {
        if node != self.node {
            self.finish_node();
            self.node = node;
        }
        self.tests.entry(test).or_default().push(result);
    }

    fn finish_node(&mut self) {
        for (test, results) in std::mem::take(&mut self.tests) {
            let key = (self.node, test);
            match (self.latest.remove(&key), StoredTestStatus::fold(results)) {
                (Some(stored), Some(folded)) if stored == folded => {}
                (Some(_), _) => self.wrong.push((key, "differs between `latest_result` and `history`")),
                (None, _) => self.wrong.push((key, "is in `history` but not in `latest_result`")),
            }
        }
    }
}

/// Compares hourly counts. Retention deletes history rows and keeps the counts, so a count may be higher than history
/// but never lower.
fn hourly(tx: &mut Tx<'_>, report: &mut Report, counts: &BTreeMap<(i64, i64), [i64; 4]>) -> Result<()> {
    let mut stored: HashMap<(i64, i64), [i64; 4]> = HashMap::new();
    let sql = "SELECT hour, test, passed, failed, inconclusive, not_applicable FROM hourly_count";
    tx.rows("reading counts", sql, &[], |row| {
        let counts = [row.int(2)?, row.int(3)?, row.int(4)?, row.int(5)?];
        stored.insert((row.int(0)?, row.int(1)?), counts);
        Ok(())
    })?;
    let too_low = counts.iter().filter(|(key, counted)| {
        let stored = stored.get(*key).copied().unwrap_or_default();
        stored.iter().zip(counted.iter()).any(|(stored, counted)| stored < counted)
    });
    let problems = too_low.map(|((hour, test), _)| {
        format!("the hourly counts of test {test} at {} are too low", Timestamp::from_millis(hour * HOUR))
    });
    report.add("hourly counts".to_owned(), problems.collect());
    Ok(())
}

fn runs(tx: &mut Tx<'_>, report: &mut Report) -> Result<()> {
    let names = Arc::clone(&tx.ids);
    let mut problems = Vec::new();
    let mut busy: HashMap<i64, RunId> = HashMap::new();
    let sql = "SELECT a.run, a.node, r.end_kind FROM pending_results a JOIN run r ON r.id = a.run";
    tx.rows("reading runs", sql, &[], |row| {
        let (run, node) = (row.run(0)?, row.int(1)?);
        let name = names.node(node).map_or_else(|_| node.to_string(), ToString::to_string);
        if let Some(other) = busy.insert(node, run) {
            problems.push(format!("{name} has two runs, {other} and {run}"));
        }
        if row.opt_text(2)?.is_some() {
            problems.push(format!("{run} on {name} is both ended and active"));
        }
        Ok(())
    })?;
    let sql = "SELECT run FROM pending_results a WHERE LENGTH(run_key) <> 64 \
               OR NOT EXISTS (SELECT 1 FROM run_node n WHERE n.run = a.run AND n.node = a.node)";
    tx.rows("reading runs", sql, &[], |row| {
        problems.push(format!("{} is active without a key, or is not a run of that node", row.run(0)?));
        Ok(())
    })?;
    let sql = "SELECT o.run, o.node FROM job_output o \
               WHERE NOT EXISTS (SELECT 1 FROM run_node n WHERE n.run = o.run AND n.node = o.node)";
    tx.rows("reading the output of jobs", sql, &[], |row| {
        problems.push(format!("{} has output of node {}, on which it did not run", row.run(0)?, row.int(1)?));
        Ok(())
    })?;
    report.add(format!("{} active runs", busy.len()), problems);
    Ok(())
}

/// Checks that each document in the ingest queue is of a run on its node.
fn verify_ingest_queue(tx: &mut Tx<'_>, report: &mut Report) -> Result<()> {
    let operation = "reading the ingest queue";
    let sql = "SELECT q.id, q.run, q.node FROM ingest_queue q WHERE q.run IS NOT NULL \
               AND NOT EXISTS (SELECT 1 FROM run_node n WHERE n.run = q.run AND n.node = q.node)";
    let problems = tx.all(operation, sql, &[], |row| {
        let (id, run, node) = (row.int(0)?, row.run(1)?, row.int(2)?);
        Ok(format!("message {id} in the ingest queue is a result of {run} on node {node}, which has no part in it"))
    })?;
    let count = tx.first(operation, "SELECT COUNT(*) FROM ingest_queue", &[], |row| row.int(0))?.unwrap_or(0);
    report.add(format!("{count} messages in the ingest queue"), problems);
    Ok(())
}

fn open_cases(tx: &mut Tx<'_>, report: &mut Report) -> Result<()> {
    let names = Arc::clone(&tx.ids);
    let open = cases::open_cases(tx)?;
    let mut problems: Vec<String> = open
        .iter()
        .filter(|(_, node, _)| names.node(*node).is_err())
        .map(|(case, _, name)| format!("{case} is open on an unknown node: {name}"))
        .collect();
    let known: HashSet<CaseId> = open.iter().map(|(case, ..)| *case).collect();
    tx.rows("reading nodes", "SELECT name, case_id FROM node WHERE case_id IS NOT NULL", &[], |row| {
        if let Some(case) = row.opt_case(1)?.filter(|case| !known.contains(case)) {
            problems.push(format!("{} refers to {case}, which is not open", row.text(0)?));
        }
        Ok(())
    })?;
    report.add(format!("{} open cases", open.len()), problems);
    Ok(())
}
