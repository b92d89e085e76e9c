//! Raw documents behind results: reads them from their bundle or their own row, and pins those that a case depends on
//! until the case no longer needs them.

use doctor_core::ids::{CaseId, NodeName, RunId};

use super::{
    Store,
    compression::Packed,
    db::{ColumnType, SqlValue, Tx, vals},
    error::Result,
    evidence_pack,
    records::EvidenceRow,
    standalone_evidence::{self, EvidenceInsert},
};

/// Pins the evidence of a case: of its own runs, and of runs whose findings are open against its node.
pub(super) fn pin(tx: &mut Tx<'_>, case: CaseId, node: i64) -> Result<()> {
    let operation = "pinning evidence";
    let sql = "SELECT rn.run, rn.node FROM run_node rn JOIN run r ON r.id = rn.run WHERE r.case_id = $1";
    let mut rests_on = tx.all(operation, sql, vals![case], |row| Ok((row.run(0)?, row.int(1)?)))?;
    let sql = "SELECT run, node FROM finding WHERE node = $1 AND run IS NOT NULL";
    rests_on.extend(tx.all(operation, sql, vals![node], |row| Ok((row.run(0)?, row.int(1)?)))?);
    let rows: Vec<SqlValue<'_>> =
        rests_on.iter().flat_map(|(run, node)| [(*run).into(), (*node).into(), case.into()]).collect();
    let sqlite = "UPDATE evidence SET case_id = $3 WHERE run = $1 AND node = $2 AND case_id IS NULL";
    let postgres = "UPDATE evidence e SET case_id = p.case_id \
                    FROM UNNEST($1::int8[], $2::int8[], $3::int8[]) AS p (run, node, case_id) \
                    WHERE e.run = p.run AND e.node = p.node AND e.case_id IS NULL";
    tx.execute_each(operation, (sqlite, postgres), &[ColumnType::Int; 3], &rows)?;
    rests_on.into_iter().try_for_each(|(run, node)| extract_from_pack(tx, case, run, node))
}

/// Copies a document out of its bundle into its own row, because retention deletes bundles as a whole.
fn extract_from_pack(tx: &mut Tx<'_>, case: CaseId, run: RunId, node: i64) -> Result<()> {
    let sql = "SELECT 1 FROM evidence WHERE run = $1 AND node = $2";
    if tx.first("pinning evidence", sql, vals![run, node], |_| Ok(()))?.is_some() {
        return Ok(());
    }
    let Some(found) = evidence_pack::find(tx, run, node)? else { return Ok(()) };
    let packed = Packed::new(&found.bytes)?;
    let EvidenceRow { received, policy_version, profile_version, .. } = found;
    let row =
        EvidenceInsert { run, node, received, policy_version, profile_version, packed: &packed, case: Some(case) };
    standalone_evidence::insert(tx, &[row])?;
    evidence_pack::mark_extracted(tx, run, node)
}

impl Store {
    /// Returns the raw document behind a result, if it is still stored.
    pub fn evidence(&self, run: RunId, node: &NodeName) -> Result<Option<EvidenceRow>> {
        self.read(|tx| {
            let Some(id) = tx.ids.node_id(node) else { return Ok(None) };
            let alone = standalone_evidence::find(tx, run, id)?;
            alone.map_or_else(|| evidence_pack::find(tx, run, id), |alone| Ok(Some(alone)))
        })
    }
}
