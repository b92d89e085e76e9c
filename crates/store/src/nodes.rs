//! Nodes as a cycle loads them, and the changes that a plan makes to them.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use doctor_core::{
    finding::OpenFinding,
    ids::{CaseId, HardwareId, NodeName},
    lifecycle::NodeState,
    measured_count::GPU_COUNT,
    node::Hardware,
    policy::Retry,
    snapshot::{Backoff, TestRecord},
    time::{Span, Timestamp},
};

use super::{
    Store,
    agent_results::{self, CheckTimes},
    db::{ColumnType, Row, Tx, vals},
    error::Result,
    id_cache::{IdCache, parsed},
    job_failures, json, measured_counts,
    records::{SkipReasonRow, StoredNode},
};

/// Minimum interval between updates of a machine's last-seen time.
const LAST_SEEN_INTERVAL: Span = Span::hours(1);

impl Store {
    /// Returns all known nodes.
    pub fn load_nodes(&self) -> Result<BTreeMap<NodeName, StoredNode>> {
        self.read(|tx| load(tx, None))
    }

    /// Returns the names of all known nodes, in no order.
    pub fn node_names(&self) -> Result<Vec<NodeName>> {
        self.read(|tx| Ok(tx.ids.all_nodes().cloned().collect()))
    }

    /// Returns the known ones of these nodes.
    pub fn load_nodes_named(&self, names: &[NodeName]) -> Result<BTreeMap<NodeName, StoredNode>> {
        self.read(|tx| {
            let ids: Vec<i64> = names.iter().filter_map(|name| tx.ids.node_id(name)).collect();
            load(tx, Some(&ids))
        })
    }

    /// Returns nodes that the controller took out of service on its own initiative since this time.
    pub fn nodes_taken_out_since(&self, since: Timestamp) -> Result<Vec<(NodeName, Timestamp)>> {
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            let sql = "SELECT node, at FROM node_taken_out WHERE at >= $1 ORDER BY at, node";
            tx.all("reading nodes taken out of service", sql, vals![since], |row| {
                Ok((names.node(row.int(0)?)?.clone(), row.timestamp(1)?))
            })
        })
    }

    /// Returns why the planner last skipped a node. `None` while it has a run, or if it was never considered.
    pub fn skip_reason(&self, node: &NodeName) -> Result<Option<SkipReasonRow>> {
        self.read(|tx| {
            let Some(id) = tx.ids.node_id(node) else { return Ok(None) };
            let names = Arc::clone(&tx.ids);
            let sql = "SELECT node, since, body FROM skip_reason WHERE node = $1";
            tx.first("reading a reason", sql, vals![id], |row| read_reason(row, &names))
        })
    }

    pub fn skip_reasons(&self) -> Result<Vec<SkipReasonRow>> {
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            let sql = "SELECT node, since, body FROM skip_reason";
            let mut all = tx.all("reading reasons", sql, &[], |row| read_reason(row, &names))?;
            all.sort_by(|a, b| a.node.cmp(&b.node));
            Ok(all)
        })
    }

    /// Returns the machines that have had a name, newest first, with first and last sighting and reported hardware.
    pub fn hardware_history(&self, node: &NodeName) -> Result<Vec<(HardwareId, Timestamp, Timestamp, Hardware)>> {
        self.read(|tx| {
            let Some(id) = tx.ids.node_id(node) else { return Ok(Vec::new()) };
            let sql =
                "SELECT hardware_id, first_seen, last_seen, body FROM hardware WHERE node = $1 ORDER BY last_seen DESC";
            tx.all("reading hardware", sql, vals![id], |row| {
                let id = parsed("hardware id", HardwareId::new(row.text(0)?))?;
                Ok((id, row.timestamp(1)?, row.timestamp(2)?, json::read("hardware", row.text(3)?)?))
            })
        })
    }

    /// As [`Self::hardware_history`], without the hardware.
    pub fn hardware_ids(&self, node: &NodeName) -> Result<Vec<(HardwareId, Timestamp, Timestamp)>> {
        self.read(|tx| {
            let Some(id) = tx.ids.node_id(node) else { return Ok(Vec::new()) };
            let sql = "SELECT hardware_id, first_seen, last_seen FROM hardware WHERE node = $1 ORDER BY last_seen DESC";
            tx.all("reading hardware", sql, vals![id], |row| {
                Ok((parsed("hardware id", HardwareId::new(row.text(0)?))?, row.timestamp(1)?, row.timestamp(2)?))
            })
        })
    }
}

fn read_reason(row: &Row<'_>, names: &IdCache) -> Result<SkipReasonRow> {
    let node = names.node(row.int(0)?)?.clone();
    Ok(SkipReasonRow { node, since: row.timestamp(1)?, reason: json::read("reason", row.text(2)?)? })
}

/// `ids`: only these; `None`: all.
fn load(tx: &mut Tx<'_>, ids: Option<&[i64]>) -> Result<BTreeMap<NodeName, StoredNode>> {
    let names = Arc::clone(&tx.ids);
    let mut nodes: HashMap<i64, StoredNode> = HashMap::new();
    let mut checked: HashMap<i64, CheckTimes> = HashMap::new();
    let columns = format!(
        "SELECT n.id, n.state, n.state_since, n.hardware_id, n.backoff_until, n.backoff_count, n.hold, n.case_id, \
         c.accepted_value, n.agent_checked FROM node n \
         LEFT JOIN measured_count c ON c.node = n.id AND c.metric = '{GPU_COUNT}'"
    );
    some_or_all(tx, &columns, "n.id", ids, |row| {
        nodes.insert(row.int(0)?, read_node(row)?);
        if let Some(text) = row.opt_text(9)? {
            checked.insert(row.int(0)?, CheckTimes::decode(Some(text))?);
        }
        Ok(())
    })?;
    let columns =
        "SELECT node, test, attempted_at, outcome, settled_at, inconclusive_count, conclusive_at FROM latest_result";
    some_or_all(tx, columns, "node", ids, |row| {
        let Some(node) = nodes.get_mut(&row.int(0)?) else { return Ok(()) };
        let outcome = names.outcome(row.int(3)?)?;
        let (settled, judged) = (row.opt_timestamp(4)?, row.opt_timestamp(6)?);
        let record = TestRecord::restore(settled, judged, Some((outcome.verdict, row.timestamp(2)?)), row.count(5)?)
            .with_not_judged(outcome.is_not_judged());
        node.records.insert(names.test(row.int(1)?)?.clone(), record);
        Ok(())
    })?;
    agent_results::combine_records(tx, ids, &checked, |node, test, record| {
        if let Some(node) = nodes.get_mut(&node) {
            let known = node.records.entry(test.clone()).or_insert(TestRecord::NEVER);
            *known = known.combine(record);
        }
    })?;
    some_or_all(tx, "SELECT node, body FROM finding", "node", ids, |row| {
        let finding: OpenFinding = json::read("finding", row.text(1)?)?;
        if let Some(node) = nodes.get_mut(&row.int(0)?) {
            node.findings.push(finding);
        }
        Ok(())
    })?;
    nodes
        .into_iter()
        .map(|(id, mut node)| {
            let key = |open: &OpenFinding| {
                (open.finding.check.clone(), open.finding.entity.clone(), open.finding.rule.clone())
            };
            node.findings.sort_by_cached_key(key);
            Ok((names.node(id)?.clone(), node))
        })
        .collect()
}

fn some_or_all(
    tx: &mut Tx<'_>,
    columns: &str,
    key: &str,
    ids: Option<&[i64]>,
    visit: impl FnMut(&Row<'_>) -> Result<()>,
) -> Result<()> {
    match ids {
        None => tx.rows("loading nodes", columns, &[], visit),
        Some(ids) => tx.rows_by_key("loading nodes", &format!("{columns} WHERE {key} IN {{keys}}"), ids, visit),
    }
}

fn read_node(row: &Row<'_>) -> Result<StoredNode> {
    let backoff = match (row.opt_timestamp(4)?, row.opt_int(5)?) {
        (Some(until), Some(_)) => Some(Backoff { until, sightings: row.count(5)? }),
        _ => None,
    };
    Ok(StoredNode {
        state: json::read("state", row.text(1)?)?,
        state_since: row.timestamp(2)?,
        records: BTreeMap::new(),
        findings: Vec::new(),
        backoff,
        hold: row.opt_text(6)?.map(|text| json::read("hold", text)).transpose()?,
        hardware: row.opt_text(3)?.map(|text| parsed("hardware id", HardwareId::new(text))).transpose()?,
        case: row.opt_case(7)?,
        remembered_gpus: row.opt_text(8)?.map_or(Ok(0), measured_counts::whole)?,
    })
}

pub(super) fn node_state(tx: &mut Tx<'_>, node: i64) -> Result<Option<NodeState>> {
    let sql = "SELECT state FROM node WHERE id = $1";
    tx.first("reading a node", sql, vals![node], |row| json::read("state", row.text(0)?))
}

/// Sets the node's state, and its case if one is given; only closing the case clears it.
pub(super) fn set_node_state(
    tx: &mut Tx<'_>,
    node: i64,
    state: &NodeState,
    at: Timestamp,
    case: Option<CaseId>,
) -> Result<()> {
    let state = json::write(state)?;
    let sql = "UPDATE node SET state = $2, state_since = $3, case_id = COALESCE($4, case_id) WHERE id = $1";
    tx.execute("writing a node's state", sql, vals![node, &state, at, case]).map(drop)
}

/// Records the machine behind a name, unless a report or result has identified it already.
pub(super) fn set_hardware(tx: &mut Tx<'_>, node: i64, hardware: &HardwareId, at: Timestamp) -> Result<()> {
    let sql = "UPDATE node SET hardware_id = $2, hardware_seen_at = $3 WHERE id = $1 AND hardware_id IS NULL";
    tx.execute("recording a node's hardware", sql, vals![node, hardware.as_str(), at]).map(drop)
}

/// Resets a node whose name now belongs to another machine: earlier results do not count for it. History keeps its
/// rows.
pub(super) fn reset_for_new_hardware(tx: &mut Tx<'_>, node: i64, hardware: &HardwareId, at: Timestamp) -> Result<()> {
    let operation = "resetting a node";
    let state = json::write(&NodeState::InService)?;
    let sql = "UPDATE node SET state = $2, state_since = $3, results_valid_from = $3, hardware_id = $4, \
               boot_id = NULL, hardware_seen_at = $3, backoff_until = NULL, backoff_count = NULL, case_id = NULL, \
               last_report_number = NULL, last_report_sent_at = NULL WHERE id = $1";
    tx.execute(operation, sql, vals![node, &state, at, hardware.as_str()])?;
    tx.execute(operation, "DELETE FROM latest_result WHERE node = $1", vals![node])?;
    tx.execute(operation, "DELETE FROM acknowledged_event WHERE node = $1", vals![node])?;
    tx.execute(operation, "DELETE FROM finding WHERE node = $1", vals![node])?;
    measured_counts::delete_of_node(tx, node)?;
    agent_results::delete_of_node(tx, node)?;
    job_failures::delete_of_node(tx, node)
}

/// Backs off nodes whose job did not start, longer each time.
pub(super) fn back_off(tx: &mut Tx<'_>, nodes: &[i64], at: Timestamp, retry: &Retry) -> Result<()> {
    let mut rows = Vec::new();
    tx.rows_by_key("reading back-offs", "SELECT id, backoff_count FROM node WHERE id IN {keys}", nodes, |row| {
        let before = row.opt_int(1)?.map_or(Ok(0), |_| row.count(1))?;
        let wait = retry.not_started.doubled(before, retry.not_started_cap);
        rows.extend_from_slice(vals![row.int(0)?, at.plus(wait), before.saturating_add(1)]);
        Ok(())
    })?;
    let sqlite = "UPDATE node SET backoff_until = $2, backoff_count = $3 WHERE id = $1";
    let postgres = "UPDATE node SET backoff_until = b.until, backoff_count = b.times \
                    FROM UNNEST($1::int8[], $2::int8[], $3::int8[]) AS b (id, until, times) WHERE node.id = b.id";
    tx.execute_each("backing off", (sqlite, postgres), &[ColumnType::Int; 3], &rows)
}

pub(super) fn clear_back_off(tx: &mut Tx<'_>, nodes: &[i64]) -> Result<()> {
    let sqlite =
        "UPDATE node SET backoff_until = NULL, backoff_count = NULL WHERE id = $1 AND backoff_count IS NOT NULL";
    let postgres = "UPDATE node SET backoff_until = NULL, backoff_count = NULL \
                    WHERE id = ANY ($1::int8[]) AND backoff_count IS NOT NULL";
    let rows: Vec<_> = nodes.iter().map(|id| (*id).into()).collect();
    tx.execute_each("ending back-offs", (sqlite, postgres), &[ColumnType::Int], &rows)
}

/// The known machine behind a name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct KnownHardware {
    pub(super) hardware: Option<String>,
    pub(super) boot: Option<String>,
    pub(super) seen: Option<Timestamp>,
}

/// A report or result from a node, with its hardware.
#[derive(Debug)]
pub(super) struct HardwareReport<'a> {
    pub(super) node: i64,
    pub(super) hardware: &'a Hardware,
    pub(super) at: Timestamp,
}

/// Records the machines that reported for nodes. A machine other than the node's known one is recorded beside it; the
/// planner decides whether the node was replaced.
pub(super) fn record_hardware(
    tx: &mut Tx<'_>,
    known: impl Fn(i64) -> Option<KnownHardware>,
    spoke: &[HardwareReport<'_>],
) -> Result<()> {
    let mut seen: BTreeMap<(i64, HardwareId), (Timestamp, String)> = BTreeMap::new();
    let mut behind: BTreeMap<i64, (HardwareId, Option<&str>, Timestamp)> = BTreeMap::new();
    for one in spoke {
        let Some(hardware) = one.hardware.id() else { continue };
        let known = known(one.node).unwrap_or_default();
        let same = known.hardware.as_deref() == Some(hardware.as_str());
        let recent = known.seen.is_some_and(|seen| one.at.since(seen) < LAST_SEEN_INTERVAL);
        if same && recent && known.boot == one.hardware.boot_id {
            continue;
        }
        // If several machines report for a node in one batch, the first wins.
        if same || known.hardware.is_none() {
            behind.entry(one.node).or_insert_with(|| (hardware.clone(), one.hardware.boot_id.as_deref(), one.at));
        }
        seen.insert((one.node, hardware), (one.at, json::write(one.hardware)?));
    }
    let operation = "recording hardware";
    let mut rows = Vec::with_capacity(seen.len() * 5);
    for ((node, hardware), (at, body)) in &seen {
        rows.extend_from_slice(vals![*node, hardware.as_str(), *at, *at, body]);
    }
    let into = "hardware (node, hardware_id, first_seen, last_seen, body)";
    let conflict = "ON CONFLICT (node, hardware_id) DO UPDATE SET last_seen = excluded.last_seen, body = excluded.body";
    tx.insert_many(
        operation,
        into,
        &[ColumnType::Int, ColumnType::Text, ColumnType::Int, ColumnType::Int, ColumnType::Text],
        &rows,
        conflict,
    )?;
    let mut rows = Vec::with_capacity(behind.len() * 4);
    for (node, (hardware, boot, at)) in &behind {
        rows.extend_from_slice(vals![*node, hardware.as_str(), *boot, *at]);
    }
    let sqlite = "UPDATE node SET hardware_id = $2, boot_id = $3, hardware_seen_at = $4 WHERE id = $1";
    let postgres = "UPDATE node SET hardware_id = s.hardware, boot_id = s.boot, hardware_seen_at = s.seen \
                    FROM UNNEST($1::int8[], $2::text[], $3::text[], $4::int8[]) AS s (id, hardware, boot, seen) \
                    WHERE node.id = s.id";
    tx.execute_each(
        operation,
        (sqlite, postgres),
        &[ColumnType::Int, ColumnType::Text, ColumnType::Text, ColumnType::Int],
        &rows,
    )
}
