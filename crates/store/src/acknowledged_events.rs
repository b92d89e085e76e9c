//! Acknowledged kernel events. The kernel log still contains them and agents report them again; they have been dealt
//! with, and only newer events count.

use std::{collections::BTreeMap, sync::Arc};

use doctor_core::{
    finding::{Evidence, OpenFinding},
    ids::NodeName,
    observation::{AcknowledgedEvents, EventKey},
    reason::ReasonCode,
    time::Timestamp,
};

use super::{
    Store,
    audit::{self, NewAuditLine},
    db::{ColumnType, Tx, vals},
    error::Result,
    findings,
    id_cache::parsed,
};

impl Store {
    /// Returns, by node, the events that do not count again.
    pub fn acknowledged_events(&self) -> Result<BTreeMap<NodeName, Vec<AcknowledgedEvents>>> {
        self.read(|tx| {
            let names = Arc::clone(&tx.ids);
            let mut all: BTreeMap<NodeName, Vec<AcknowledgedEvents>> = BTreeMap::new();
            let sql = "SELECT node, test, reason_code, entity, event_key FROM acknowledged_event \
                       ORDER BY node, test, reason_code, entity";
            tx.rows("reading acknowledged events", sql, &[], |row| {
                let settled = AcknowledgedEvents {
                    check: names.test(row.int(1)?)?.clone(),
                    code: parsed("reason code", ReasonCode::new(row.text(2)?))?,
                    entity: parsed("entity", row.text(3)?.parse())?,
                    up_to: parsed("event key", row.text(4)?.parse())?,
                };
                all.entry(names.node(row.int(0)?)?.clone()).or_default().push(settled);
                Ok(())
            })?;
            Ok(all)
        })
    }
}

fn event_of(open: &OpenFinding) -> Option<&(ReasonCode, EventKey)> {
    match &open.finding.evidence {
        Evidence::Event { known_by, .. } => known_by.as_ref(),
        Evidence::Measured { .. } | Evidence::Nothing => None,
    }
}

/// Acknowledges all events open against the node.
pub(super) fn acknowledge(tx: &mut Tx<'_>, node: i64, at: Timestamp) -> Result<()> {
    use ColumnType::{Int, Text};
    let mut open = findings::open_findings(tx, node)?;
    // Two rules may match one kind of event; the one seen last reaches furthest.
    open.sort_by_key(|open| open.last_seen);
    let mut acknowledged = BTreeMap::new();
    for open in &open {
        let Some((code, key)) = event_of(open) else { continue };
        let check = tx.test_id(&open.finding.check)?;
        acknowledged.insert((check, code.to_string(), open.finding.entity.to_string()), key.to_string());
    }
    let mut rows = Vec::with_capacity(acknowledged.len() * 6);
    for ((check, code, entity), key) in &acknowledged {
        rows.extend_from_slice(vals![node, *check, code, entity, key, at]);
    }
    let into = "acknowledged_event (node, test, reason_code, entity, event_key, at)";
    let conflict = "ON CONFLICT (node, test, reason_code, entity) DO UPDATE \
                    SET event_key = excluded.event_key, at = excluded.at";
    tx.insert_many("acknowledging events", into, &[Int, Int, Text, Text, Text, Int], &rows, conflict)
}

/// Acknowledges events of a node that an operator releases. Clears its findings, unless it is in a case: then
/// requalification clears them.
pub(super) fn release(tx: &mut Tx<'_>, node: i64, at: Timestamp) -> Result<()> {
    acknowledge(tx, node, at)?;
    let sql = "SELECT case_id FROM node WHERE id = $1";
    if tx.first("reading a node", sql, vals![node], |row| row.opt_case(0))?.flatten().is_some() {
        return Ok(());
    }
    let mut lines = Vec::new();
    for open in findings::open_findings(tx, node)?.iter().filter(|open| event_of(open).is_some()) {
        let finding = &open.finding;
        let check = tx.test_id(&finding.check)?;
        let sql = "DELETE FROM finding WHERE node = $1 AND test = $2 AND entity = $3 AND rule = $4";
        let (entity, rule) = (finding.entity.to_string(), finding.rule.to_string());
        tx.execute("clearing findings", sql, vals![node, check, &entity, &rule])?;
        lines.push(NewAuditLine {
            action: "finding-cleared",
            node: Some(node),
            code: finding.reason.to_string(),
            text: format!("{}: {}: released by an operator", finding.check, finding.entity),
            ..NewAuditLine::default()
        });
    }
    audit::append(tx, at, None, &lines)
}
