//! The table `case_record`: one row per case, rewritten as a whole.

use doctor_core::{
    case::{Case, CaseState},
    ids::CaseId,
};

use super::{
    db::{Row, Tx, vals},
    error::{Result, StoreError},
    json,
};

pub(super) fn read_case(row: &Row<'_>) -> Result<Case> {
    json::read("case", row.text(0)?)
}

pub(super) fn find(tx: &mut Tx<'_>, case: CaseId) -> Result<Option<Case>> {
    tx.first("reading a case", "SELECT body FROM case_record WHERE id = $1", vals![case], read_case)
}

/// As [`find`]; a missing case is an error.
pub(super) fn get(tx: &mut Tx<'_>, case: CaseId) -> Result<Case> {
    find(tx, case)?.ok_or_else(|| StoreError::NotFound { what: "case", id: case.to_string() })
}

pub(super) fn put(tx: &mut Tx<'_>, case: &Case) -> Result<()> {
    let node = tx.node_id(&case.node, case.opened)?;
    let closed = match case.state {
        CaseState::Open => None,
        CaseState::Closed { at, .. } => Some(at),
    };
    let body = json::write(case)?;
    let sql = "INSERT INTO case_record (id, node, hardware_id, opened, closed, body) VALUES ($1, $2, $3, $4, $5, $6) \
               ON CONFLICT (id) DO UPDATE SET node = excluded.node, hardware_id = excluded.hardware_id, \
               closed = excluded.closed, body = excluded.body";
    let vals = vals![case.id, node, case.hardware.as_str(), case.opened, closed, &body];
    tx.execute("writing a case", sql, vals).map(drop)
}
