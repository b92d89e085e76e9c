//! Measured counts and sizes by node and metric, written only when one changes.

use std::{collections::BTreeMap, sync::Arc};

use doctor_core::{ids::NodeName, measured_count::MeasuredCount, time::Timestamp};

use super::{
    Store,
    db::{ColumnType, Row, Tx, vals},
    error::Result,
    fencing::Lease,
    id_cache::parsed,
    records::NodeCounts,
};

impl Store {
    /// Returns the counts of these nodes. A node of which nothing was measured is absent.
    pub fn measured_counts(&self, nodes: &[NodeName]) -> Result<BTreeMap<NodeName, NodeCounts>> {
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            let ids: Vec<i64> = nodes.iter().filter_map(|name| names.node_id(name)).collect();
            let mut counts: BTreeMap<NodeName, NodeCounts> = BTreeMap::new();
            let sql = "SELECT node, metric, value, at, accepted_value, accepted_at FROM measured_count \
                       WHERE node IN {keys}";
            tx.rows_by_key(READING, sql, &ids, |row| {
                let (metric, count) = read_count(row)?;
                counts.entry(names.node(row.int(0)?)?.clone()).or_default().insert(metric, count);
                Ok(())
            })?;
            Ok(counts)
        })
    }

    /// Returns the accepted counts of all nodes, in no order.
    pub fn accepted_counts(&self) -> Result<Vec<(NodeName, Arc<str>, f64)>> {
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            let mut metrics: Vec<Arc<str>> = Vec::new();
            let sql = "SELECT node, metric, accepted_value FROM measured_count";
            tx.all(READING, sql, &[], |row| {
                let metric = row.text(1)?;
                let known = metrics.iter().find(|known| &***known == metric).cloned();
                let metric = known.unwrap_or_else(|| {
                    let new: Arc<str> = metric.into();
                    metrics.push(Arc::clone(&new));
                    new
                });
                Ok((names.node(row.int(0)?)?.clone(), metric, number(row.text(2)?)?))
            })
        })
    }

    /// Writes new and changed counts.
    pub fn record_measured_counts(
        &self,
        lease: &Lease,
        counts: &[(NodeName, String, MeasuredCount)],
        now: Timestamp,
    ) -> Result<()> {
        self.write(lease, |tx| {
            let mut rows = Vec::with_capacity(counts.len());
            for (node, metric, count) in counts {
                rows.push((tx.node_id(node, now)?, metric.as_str(), *count));
            }
            write(tx, &rows)
        })
    }
}

const READING: &str = "reading measured counts";

/// Columns: any, metric, value, at, accepted_value, accepted_at.
fn read_count(row: &Row<'_>) -> Result<(String, MeasuredCount)> {
    let count = MeasuredCount {
        value: number(row.text(2)?)?,
        since: row.timestamp(3)?,
        accepted: number(row.text(4)?)?,
        accepted_at: row.timestamp(5)?,
    };
    Ok((row.text(1)?.to_owned(), count))
}

fn number(text: &str) -> Result<f64> {
    parsed("measured count", text.parse())
}

/// Parses a stored count of devices. A node may have reported any number, and all nodes are read together: one that no
/// machine can have is cut to the nearest limit.
pub(super) fn whole(text: &str) -> Result<u32> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the conversion saturates")]
    let devices = number(text)?.round() as u32;
    Ok(devices)
}

fn write(tx: &mut Tx<'_>, counts: &[(i64, &str, MeasuredCount)]) -> Result<()> {
    use ColumnType::{Int, Text};
    let texts: Vec<(String, String)> =
        counts.iter().map(|(_, _, count)| (count.value.to_string(), count.accepted.to_string())).collect();
    let mut rows = Vec::with_capacity(counts.len() * 6);
    for ((node, metric, count), (value, accepted)) in counts.iter().zip(&texts) {
        rows.extend_from_slice(vals![*node, *metric, value, count.since, accepted, count.accepted_at]);
    }
    let into = "measured_count (node, metric, value, at, accepted_value, accepted_at)";
    let conflict = "ON CONFLICT (node, metric) DO UPDATE SET value = excluded.value, at = excluded.at, \
                    accepted_value = excluded.accepted_value, accepted_at = excluded.accepted_at";
    tx.insert_many("writing measured counts", into, &[Int, Text, Text, Int, Text, Int], &rows, conflict)
}

/// Accepts the present counts of a node that an operator releases.
pub(super) fn release(tx: &mut Tx<'_>, node: i64, at: Timestamp) -> Result<()> {
    let sql = "SELECT node, metric, value, at, accepted_value, accepted_at FROM measured_count \
               WHERE node = $1 AND value <> accepted_value";
    let counts = tx.all(READING, sql, vals![node], read_count)?;
    let released: Vec<(i64, &str, MeasuredCount)> =
        counts.iter().map(|(metric, count)| (node, metric.as_str(), count.released(metric, at))).collect();
    write(tx, &released)
}

/// Deletes the counts of the machine that had the node's name before.
pub(super) fn delete_of_node(tx: &mut Tx<'_>, node: i64) -> Result<()> {
    tx.execute("resetting a node", "DELETE FROM measured_count WHERE node = $1", vals![node]).map(drop)
}
