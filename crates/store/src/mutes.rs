//! Muted cases: acknowledged or snoozed by an operator.

use std::collections::BTreeMap;

use doctor_core::{
    alert::Mute,
    case::Case,
    ids::{CaseId, NodeName},
    time::Timestamp,
};

use super::{
    Store, case_table,
    db::{Access, Tx, vals},
    error::Result,
    json,
    operator_commands::{self, OperatorCommands},
    outbox,
    records::RoutedNote,
};

impl Store {
    /// Returns the muted cases.
    pub fn mutes(&self) -> Result<BTreeMap<CaseId, Mute>> {
        self.transaction(Access::Read, &mut |tx| {
            let sql = "SELECT case_id, body FROM mute";
            let rows = tx.all("reading muted cases", sql, &[], |row| {
                Ok((CaseId::from_number(row.unsigned(0)?), json::read("mute", row.text(1)?)?))
            })?;
            Ok(rows.into_iter().collect())
        })
    }

    /// Suppresses notifications of the case until the given time or until it closes. A later mute replaces an earlier
    /// one.
    pub fn mute(&self, case: &Case, mute: &Mute) -> Result<()> {
        self.operator_transaction(|commands| commands.mute(case.id, &case.node, mute))
    }

    /// Ends an expired mute, and queues the notifications of that in the same transaction.
    pub fn end_mute(
        &self,
        case: CaseId,
        now: Timestamp,
        notes_for: &dyn Fn(&Case, &Mute) -> Vec<RoutedNote>,
    ) -> Result<()> {
        let operation = "ending a snooze";
        self.write_unfenced(Access::WriteExclusive, |tx| {
            let sql = "SELECT body FROM mute WHERE case_id = $1";
            let mute: Option<Mute> = tx.first(operation, sql, vals![case], |row| json::read("mute", row.text(0)?))?;
            let Some(mute) = mute.filter(|mute| mute.until.is_some_and(|until| until <= now)) else { return Ok(()) };
            unmute(tx, case)?;
            let case = case_table::find(tx, case)?;
            outbox::queue(tx, &case.map_or_else(Vec::new, |case| notes_for(&case, &mute)))
        })
    }
}

impl OperatorCommands<'_, '_> {
    /// Whether this case is stored and open.
    pub fn is_case_open(&mut self, case: CaseId) -> Result<bool> {
        Ok(case_table::find(self.tx, case)?.is_some_and(|case| case.is_open()))
    }

    /// Suppresses notifications of a case of this node.
    pub fn mute(&mut self, case: CaseId, node: &NodeName, mute: &Mute) -> Result<()> {
        let body = json::write(mute)?;
        let sql =
            "INSERT INTO mute (case_id, body) VALUES ($1, $2) ON CONFLICT (case_id) DO UPDATE SET body = excluded.body";
        self.tx.execute("muting a case", sql, vals![case, &body])?;
        let node = self.tx.node_id(node, mute.at)?;
        let what = if mute.until.is_some() { "snooze" } else { "acknowledge" };
        operator_commands::audit_operator(self.tx, what, Some(node), (&mute.by, &mute.why), mute.at)
    }
}

/// Removes the mute of a case.
pub(super) fn unmute(tx: &mut Tx<'_>, case: CaseId) -> Result<()> {
    tx.execute("ending a snooze", "DELETE FROM mute WHERE case_id = $1", vals![case]).map(drop)
}
