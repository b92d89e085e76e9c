//! The table `evidence`: documents stored on their own instead of in a bundle, because they are large or a case depends
//! on them.

use doctor_core::{
    ids::{CaseId, RunId},
    time::Timestamp,
};

use super::{
    compression::{Packed, decompress},
    db::{ColumnType, SqlValue, Tx, vals},
    error::Result,
    records::EvidenceRow,
};

/// An evidence row about to be written.
#[derive(Debug)]
pub(super) struct EvidenceInsert<'a> {
    pub(super) run: RunId,
    pub(super) node: i64,
    pub(super) received: Timestamp,
    pub(super) policy_version: u32,
    pub(super) profile_version: Option<u32>,
    pub(super) packed: &'a Packed,
    pub(super) case: Option<CaseId>,
}

pub(super) fn insert(tx: &mut Tx<'_>, all: &[EvidenceInsert<'_>]) -> Result<()> {
    use ColumnType::{Blob, Int};
    let mut rows: Vec<SqlValue<'_>> = Vec::with_capacity(all.len() * 8);
    for row in all {
        rows.extend_from_slice(vals![
            row.run,
            row.node,
            row.received,
            row.policy_version,
            row.profile_version,
            row.packed.truncated,
            row.case,
            row.packed.bytes.as_slice()
        ]);
    }
    let into = "evidence (run, node, received, policy_version, profile_version, truncated, case_id, body)";
    tx.insert_many("storing evidence", into, &[Int, Int, Int, Int, Int, Int, Int, Blob], &rows, "")
}

/// Returns a result's document, if it is stored on its own.
pub(super) fn find(tx: &mut Tx<'_>, run: RunId, node: i64) -> Result<Option<EvidenceRow>> {
    let sql = "SELECT body, truncated, received, policy_version, profile_version, case_id FROM evidence \
               WHERE run = $1 AND node = $2";
    tx.first("reading evidence", sql, vals![run, node], |row| {
        let bytes = decompress(row.blob(0)?)?;
        Ok(EvidenceRow {
            bytes,
            truncated: row.int(1)? != 0,
            received: row.timestamp(2)?,
            policy_version: row.count(3)?,
            profile_version: row.opt_int(4)?.map(|_| row.count(4)).transpose()?,
            pinned_by: row.opt_case(5)?,
        })
    })
}
