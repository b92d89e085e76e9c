//! Node-hours that runs have used, summed in slots of ten minutes as runs end: a day's budget is the sum of a few rows,
//! however many runs there were.

use std::collections::BTreeMap;

use doctor_core::time::{Span, Timestamp};

use super::{
    Store,
    db::{ColumnType, Tx, vals},
    error::Result,
};

/// Slot length, in milliseconds.
const SLOT: i64 = 600_000;

/// The time span of an ended run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RunSpan {
    pub(super) started: Timestamp,
    pub(super) ended: Timestamp,
    pub(super) nodes: i64,
}

impl Store {
    /// Returns the node-time that ended runs used since this time. The slot that contains `since` counts fully.
    pub fn node_time_since(&self, since: Timestamp) -> Result<Span> {
        let sql = "SELECT CAST(SUM(node_millis) AS BIGINT) FROM node_hours WHERE slot >= $1";
        self.read(|tx| {
            let slot = since.millis().div_euclid(SLOT);
            let spent = tx.first("counting node-hours", sql, vals![slot], |row| row.opt_int(0))?;
            Ok(Span::from_millis(spent.flatten().unwrap_or(0)))
        })
    }
}

impl Store {
    /// As [`Self::node_time_since`], by day (UTC); days without any are omitted.
    pub fn node_time_by_day(&self, since: Timestamp) -> Result<Vec<(Timestamp, Span)>> {
        const DAY: i64 = 86_400_000 / SLOT;
        let sql = "SELECT slot, node_millis FROM node_hours WHERE slot >= $1";
        self.read(|tx| {
            let mut days: BTreeMap<i64, i64> = BTreeMap::new();
            tx.rows("counting node-hours", sql, vals![since.millis().div_euclid(SLOT)], |row| {
                *days.entry(row.int(0)?.div_euclid(DAY)).or_default() += row.int(1)?;
                Ok(())
            })?;
            let day = |(day, millis)| (Timestamp::from_millis(day * DAY * SLOT), Span::from_millis(millis));
            Ok(days.into_iter().map(day).collect())
        })
    }
}

pub(super) fn add(tx: &mut Tx<'_>, spells: &[RunSpan]) -> Result<()> {
    let slots = by_slot(spells);
    let mut rows = Vec::with_capacity(slots.len() * 2);
    for (slot, millis) in slots {
        rows.extend_from_slice(vals![slot, millis]);
    }
    let conflict = "ON CONFLICT (slot) DO UPDATE SET node_millis = node_hours.node_millis + excluded.node_millis";
    tx.upsert_contended("counting node-hours", "node_hours (slot, node_millis)", &[ColumnType::Int; 2], &rows, conflict)
}

fn by_slot(spells: &[RunSpan]) -> BTreeMap<i64, i64> {
    let mut slots: BTreeMap<i64, i64> = BTreeMap::new();
    for spell in spells {
        let (mut from, to) = (spell.started.millis(), spell.ended.millis());
        while from < to {
            let slot = from.div_euclid(SLOT);
            let until = to.min((slot + 1) * SLOT);
            *slots.entry(slot).or_default() += (until - from) * spell.nodes;
            from = until;
        }
    }
    slots
}

/// Deletes expired slots.
pub(super) fn prune(tx: &mut Tx<'_>, before: Timestamp) -> Result<()> {
    let slot = before.millis().div_euclid(SLOT);
    tx.execute("deleting node-hours", "DELETE FROM node_hours WHERE slot < $1", vals![slot]).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_counts_in_every_ten_minute_slot_it_overlaps() {
        let at = Timestamp::from_millis;
        let long = RunSpan { started: at(SLOT / 2), ended: at(2 * SLOT + 1), nodes: 2 };
        let none = RunSpan { started: at(7), ended: at(7), nodes: 9 };
        let slots: Vec<(i64, i64)> = by_slot(&[long, none]).into_iter().collect();
        assert_eq!(slots, [(0, SLOT), (1, 2 * SLOT), (2, 2)]);
        let back = RunSpan { started: at(9), ended: at(-9), nodes: 1 };
        assert!(by_slot(&[back]).is_empty(), "a clock that was set back adds no node-hours");
    }
}
