//! The latest results of nodes' agents, and until when they are known to hold.
//!
//! An agent runs some eighty checks every few minutes and reports what has changed. A row of `agent_result` and one of
//! history are written when a result changes; unchanged results of a node are renewed together, in one column of the
//! node. Results of runs are in `latest_result`; readers combine the two, and the newest result counts.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Write as _,
    sync::Arc,
};

use doctor_core::{finding::Verdict, ids::TestId, snapshot::TestRecord, time::Timestamp};

use super::{
    Store,
    db::{ColumnType, Row, SqlValue, Tx, vals},
    error::{Result, StoreError},
    fencing::Lease,
    id_cache::IdCache,
    records::{AgentConfirmation, ConfirmedRound, LatestRow},
    test_status::StoredTestStatus,
};

/// Agents have no runs.
pub(super) const NO_RUN: i64 = 0;

/// When an agent last ran each of its checks, by the check's id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct CheckTimes(BTreeMap<i64, Timestamp>);

impl CheckTimes {
    pub(super) fn decode(text: Option<&str>) -> Result<Self> {
        let unreadable = || StoreError::Unreadable {
            what: "times of an agent's checks",
            why: "expected TIME:TEST,TEST;TIME:TEST".to_owned(),
        };
        let mut times = BTreeMap::new();
        for group in text.into_iter().flat_map(|text| text.split(';')) {
            let (at, tests) = group.split_once(':').ok_or_else(unreadable)?;
            let at = Timestamp::from_millis(at.parse().map_err(|_| unreadable())?);
            for test in tests.split(',') {
                times.insert(test.parse().map_err(|_| unreadable())?, at);
            }
        }
        Ok(Self(times))
    }

    /// Checks that ran together are written together, the newest first.
    fn encode(&self) -> Option<String> {
        let mut groups: BTreeMap<Timestamp, Vec<i64>> = BTreeMap::new();
        for (test, at) in &self.0 {
            groups.entry(*at).or_default().push(*test);
        }
        let mut text = String::new();
        for (at, tests) in groups.into_iter().rev() {
            let separator = if text.is_empty() { "" } else { ";" };
            let tests = tests.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
            write!(text, "{separator}{}:{tests}", at.millis()).expect("writing to a string does not fail");
        }
        (!text.is_empty()).then_some(text)
    }

    pub(super) fn get(&self, test: i64) -> Option<Timestamp> {
        self.0.get(&test).copied()
    }

    pub(super) fn add(&mut self, test: i64, at: Timestamp) {
        let known = self.0.entry(test).or_insert(at);
        *known = at.max(*known);
    }

    /// Adds checks of an agent. A check without an id has no result that could be renewed.
    pub(super) fn add_rounds(&mut self, rounds: &[ConfirmedRound], names: &IdCache) {
        for round in rounds {
            for test in round.checks.iter().filter_map(|check| names.test_id(check)) {
                self.add(test, round.at);
            }
        }
    }
}

impl Store {
    /// Renews the results that agents have confirmed by running the checks again. A confirmation of results that this
    /// store does not have is ignored: the agent will report them.
    pub fn confirm_agent_results(&self, lease: &Lease, confirmations: &[AgentConfirmation]) -> Result<()> {
        if confirmations.is_empty() {
            return Ok(());
        }
        self.write(lease, |tx| {
            let names = Arc::clone(&tx.ids);
            let ids: Vec<i64> = confirmations.iter().filter_map(|confirmed| names.node_id(&confirmed.node)).collect();
            let mut known: HashMap<i64, (u64, CheckTimes)> = HashMap::new();
            let sql = "SELECT id, last_report_number, agent_checked FROM node \
                       WHERE id IN {keys} AND last_report_number IS NOT NULL";
            tx.rows_by_key("reading times of agents' checks", sql, &ids, |row| {
                known.insert(row.int(0)?, (row.unsigned(1)?, CheckTimes::decode(row.opt_text(2)?)?));
                Ok(())
            })?;
            for confirmed in confirmations {
                let Some(id) = names.node_id(&confirmed.node) else { continue };
                if let Some((last, times)) = known.get_mut(&id)
                    && confirmed.through <= *last
                {
                    times.add_rounds(&confirmed.rounds, &names);
                }
            }
            write_times(tx, known.into_iter().map(|(node, (_, times))| (node, times)))
        })
    }
}

/// Writes when agents last ran each of their checks.
pub(super) fn write_times(tx: &mut Tx<'_>, times: impl Iterator<Item = (i64, CheckTimes)>) -> Result<()> {
    let texts: Vec<(i64, Option<String>)> = times.map(|(node, times)| (node, times.encode())).collect();
    let mut rows: Vec<SqlValue<'_>> = Vec::with_capacity(texts.len() * 2);
    for (node, text) in &texts {
        rows.extend_from_slice(vals![*node, text.as_deref()]);
    }
    let sqlite = "UPDATE node SET agent_checked = $2 WHERE id = $1";
    let postgres = "UPDATE node SET agent_checked = c.checked \
                    FROM UNNEST($1::int8[], $2::text[]) AS c (id, checked) WHERE node.id = c.id";
    let kinds = [ColumnType::Int, ColumnType::Text];
    tx.execute_each("recording times of agents' checks", (sqlite, postgres), &kinds, &rows)
}

const COLUMNS: &str = "node, test, attempted_at, outcome, settled_at, conclusive_outcome, conclusive_at, \
                       inconclusive_count";

/// Reads a row of [`COLUMNS`], renewed by the time at which the agent last ran the check.
fn read_status(row: &Row<'_>, checked: Option<&CheckTimes>, names: &IdCache) -> Result<(i64, StoredTestStatus)> {
    let (test, outcome) = (row.int(1)?, row.int(3)?);
    let kind = names.outcome(outcome)?;
    let conclusive = row.opt_int(5)?.zip(row.opt_timestamp(6)?);
    let judged = conclusive.map(|(_, at)| at);
    let last = Some((kind.verdict, row.timestamp(2)?));
    let record =
        TestRecord::restore(row.opt_timestamp(4)?, judged, last, row.count(7)?).with_not_judged(kind.is_not_judged());
    let mut status = StoredTestStatus { record, outcome, run: NO_RUN, conclusive };
    if let Some(at) = checked.and_then(|checked| checked.get(test)) {
        renew(&mut status, at);
    }
    Ok((test, status))
}

fn renew(status: &mut StoredTestStatus, at: Timestamp) {
    if status.record.attempt().is_some_and(|attempt| attempt < at) {
        status.record.renew(at);
        if status.record.verdict().is_some_and(Verdict::is_conclusive) {
            status.conclusive = status.conclusive.map(|(outcome, _)| (outcome, at));
        }
    }
}

/// Returns the results of agents, by node and test.
pub(super) fn statuses_of<'a>(
    tx: &mut Tx<'_>,
    nodes: impl Iterator<Item = (i64, &'a CheckTimes)>,
) -> Result<HashMap<(i64, i64), StoredTestStatus>> {
    let names = Arc::clone(&tx.ids);
    let checked: HashMap<i64, &CheckTimes> = nodes.collect();
    let ids: Vec<i64> = checked.keys().copied().collect();
    let mut statuses = HashMap::new();
    let sql = format!("SELECT {COLUMNS} FROM agent_result WHERE node IN {{keys}}");
    tx.rows_by_key("reading results of agents", &sql, &ids, |row| {
        let node = row.int(0)?;
        let (test, status) = read_status(row, checked.get(&node).copied(), &names)?;
        statuses.insert((node, test), status);
        Ok(())
    })?;
    Ok(statuses)
}

/// Writes results of agents, by node and test.
pub(super) fn write_statuses(tx: &mut Tx<'_>, changed: &[((i64, i64), StoredTestStatus)]) -> Result<()> {
    let mut rows: Vec<SqlValue<'_>> = Vec::with_capacity(changed.len() * 8);
    for ((node, test), status) in changed {
        let record = &status.record;
        rows.extend_from_slice(vals![
            *node,
            *test,
            record.attempt(),
            status.outcome,
            record.settled(),
            status.conclusive.map(|(outcome, _)| outcome),
            status.conclusive.map(|(_, at)| at),
            record.misses()
        ]);
    }
    let into = format!("agent_result ({COLUMNS})");
    let conflict = "ON CONFLICT (node, test) DO UPDATE SET attempted_at = excluded.attempted_at, \
                    outcome = excluded.outcome, settled_at = excluded.settled_at, \
                    conclusive_outcome = excluded.conclusive_outcome, conclusive_at = excluded.conclusive_at, \
                    inconclusive_count = excluded.inconclusive_count";
    tx.insert_many("recording results of an agent", &into, &[ColumnType::Int; 8], &rows, conflict)
}

/// Combines the results of agents with the results of runs that these nodes have. `ids`: only these; `None`: all.
pub(super) fn combine_records(
    tx: &mut Tx<'_>,
    ids: Option<&[i64]>,
    checked: &HashMap<i64, CheckTimes>,
    mut combine: impl FnMut(i64, &TestId, TestRecord),
) -> Result<()> {
    let names = Arc::clone(&tx.ids);
    let visit = |row: &Row<'_>| {
        let node = row.int(0)?;
        let (test, status) = read_status(row, checked.get(&node), &names)?;
        combine(node, names.test(test)?, status.record);
        Ok(())
    };
    let sql = format!("SELECT {COLUMNS} FROM agent_result");
    match ids {
        None => tx.rows("loading nodes", &sql, &[], visit),
        Some(ids) => tx.rows_by_key("loading nodes", &format!("{sql} WHERE node IN {{keys}}"), ids, visit),
    }
}

/// Combines the latest results of runs on a node with those of its agent, in the order of test ids.
pub(super) fn latest_of(tx: &mut Tx<'_>, node: i64, of_runs: Vec<LatestRow>) -> Result<Vec<LatestRow>> {
    let sql = format!(
        "SELECT {}, n.agent_checked FROM node n CROSS JOIN agent_result WHERE agent_result.node = n.id AND n.id = $1",
        qualified_columns()
    );
    latest(tx, &sql, vals![node], of_runs)
}

/// As [`latest_of`], for one test on every node, in the order of node ids.
pub(super) fn latest_of_test(tx: &mut Tx<'_>, test: i64, of_runs: Vec<LatestRow>) -> Result<Vec<LatestRow>> {
    let sql = format!(
        "SELECT {}, n.agent_checked FROM node n CROSS JOIN agent_result \
         WHERE agent_result.node = n.id AND agent_result.test = $1",
        qualified_columns()
    );
    latest(tx, &sql, vals![test], of_runs)
}

fn qualified_columns() -> String {
    COLUMNS.split(", ").map(|column| format!("agent_result.{column}")).collect::<Vec<_>>().join(", ")
}

fn latest(tx: &mut Tx<'_>, sql: &str, vals: &[SqlValue<'_>], of_runs: Vec<LatestRow>) -> Result<Vec<LatestRow>> {
    let names = Arc::clone(&tx.ids);
    let key = |row: &LatestRow| (names.node_id(&row.node), names.test_id(&row.test));
    let mut rows: BTreeMap<_, LatestRow> = of_runs.into_iter().map(|row| (key(&row), row)).collect();
    let of_agents = tx.all("reading latest results", sql, vals, |row| {
        let checked = CheckTimes::decode(row.opt_text(8)?)?;
        let (test, status) = read_status(row, Some(&checked), &names)?;
        let kind = names.outcome(status.outcome)?;
        let conclusive = status.conclusive.map(|(sure, at)| Ok((names.outcome(sure)?.verdict, at))).transpose()?;
        Ok(LatestRow {
            node: names.node(row.int(0)?)?.clone(),
            test: names.test(test)?.clone(),
            at: row.timestamp(2)?.max(status.record.attempt().unwrap_or(Timestamp::MIN)),
            verdict: kind.verdict,
            reason: kind.reason.clone(),
            run: None,
            conclusive,
            misses: status.record.misses(),
        })
    })?;
    for of_agent in of_agents {
        match rows.remove(&key(&of_agent)) {
            None => drop(rows.insert(key(&of_agent), of_agent)),
            Some(of_run) => {
                let newest_conclusive = |row: &LatestRow| row.conclusive.map(|(_, at)| at);
                let conclusive = [&of_run, &of_agent].into_iter().max_by_key(|row| newest_conclusive(row));
                let conclusive = conclusive.and_then(|row| row.conclusive);
                let newest = if of_agent.at >= of_run.at { of_agent } else { of_run };
                rows.insert(key(&newest), LatestRow { conclusive, ..newest });
            }
        }
    }
    Ok(rows.into_values().collect())
}

/// Forgets the results of a node whose name now belongs to another machine.
pub(super) fn delete_of_node(tx: &mut Tx<'_>, node: i64) -> Result<()> {
    tx.execute("resetting a node", "DELETE FROM agent_result WHERE node = $1", vals![node])?;
    tx.execute("resetting a node", "UPDATE node SET agent_checked = NULL WHERE id = $1", vals![node]).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_checks_read_back_as_written_and_the_newest_counts() {
        let at = |minutes: i64| Timestamp::from_millis(1_794_700_800_000 + minutes * 60_000);
        let mut times = CheckTimes::decode(None).unwrap();
        assert_eq!(times.encode(), None);
        for (test, minutes) in [(3, 0), (1, 5), (2, 5), (3, 5), (1, 2), (9, -60)] {
            times.add(test, at(minutes));
        }
        let text = times.encode().unwrap();
        assert_eq!(text, "1794701100000:1,2,3;1794697200000:9");
        assert_eq!(CheckTimes::decode(Some(&text)).unwrap(), times);
        assert_eq!((times.get(1), times.get(9), times.get(4)), (Some(at(5)), Some(at(-60)), None));
        for bad in ["", "1", "1:", "x:1", "1:2;", "1:2,x"] {
            assert!(CheckTimes::decode(Some(bad)).is_err(), "{bad}");
        }
    }
}
