//! Operator commands: holds, requests, pauses, the breaker. Any process may write these; each adds an audit line with
//! actor and reason.

use doctor_core::{
    ids::{NodeName, PoolName},
    lifecycle::NodeState,
    node::Hold,
    snapshot::{Breaker, CommandKind, Pause, PendingCommand},
    time::Timestamp,
};

use super::{
    Store,
    audit::{self, Counter, NewAuditLine},
    db::{Access, Tx, vals},
    error::Result,
    json,
};

const BREAKER: &str = "breaker";
const AGENT_SILENCE_KEY: &str = "silence-reported";

impl Store {
    pub fn breaker(&self) -> Result<Breaker> {
        self.read(|tx| match meta(tx, BREAKER)? {
            Some(text) => json::read("breaker", &text),
            None => Ok(Breaker::Closed { since: None }),
        })
    }

    /// Whether the current silence of agents has been reported already.
    pub fn agent_silence_reported(&self) -> Result<bool> {
        self.read(|tx| Ok(meta(tx, AGENT_SILENCE_KEY)?.as_deref() == Some("true")))
    }

    /// Returns active pauses.
    pub fn pauses(&self, now: Timestamp) -> Result<Vec<Pause>> {
        self.read(|tx| {
            let sql = "SELECT body FROM pause ORDER BY pool";
            let mut pauses: Vec<Pause> = tx.all("reading pauses", sql, &[], |row| json::read("pause", row.text(0)?))?;
            pauses.retain(|pause| pause.until.is_none_or(|until| now < until));
            Ok(pauses)
        })
    }

    /// Returns open requests, oldest first.
    pub fn open_commands(&self) -> Result<Vec<PendingCommand>> {
        let sql = "SELECT id, actor, reason, at, body FROM operator_command ORDER BY id";
        self.read(|tx| {
            tx.all("reading requests", sql, &[], |row| {
                Ok(PendingCommand {
                    id: row.unsigned(0)?,
                    by: row.text(1)?.to_owned(),
                    why: row.text(2)?.to_owned(),
                    at: row.timestamp(3)?,
                    kind: json::read("command", row.text(4)?)?,
                })
            })
        })
    }

    /// Runs `body` in one transaction.
    pub fn operator_transaction<T>(
        &self,
        mut body: impl FnMut(&mut OperatorCommands<'_, '_>) -> Result<T>,
    ) -> Result<T> {
        self.write_unfenced(Access::Write, |tx| body(&mut OperatorCommands { tx }))
    }

    /// Places a hold: the controller does not touch the node.
    pub fn hold(&self, node: &NodeName, hold: &Hold) -> Result<()> {
        self.operator_transaction(|orders| orders.hold(node, hold))
    }

    pub fn unhold(&self, node: &NodeName, by: &str, why: &str, at: Timestamp) -> Result<()> {
        self.operator_transaction(|orders| orders.unhold(node, by, why, at))
    }

    /// Adds a request for the controller, which the next cycles carry out. Returns the request's id.
    pub fn add_command(&self, what: &CommandKind, by: &str, why: &str, at: Timestamp) -> Result<u64> {
        self.operator_transaction(|orders| orders.add_command(what, by, why, at))
    }

    /// Pauses validation in a pool, or everywhere. A second pause of the same pool replaces the first.
    pub fn pause(&self, pause: &Pause) -> Result<()> {
        self.operator_transaction(|orders| orders.pause(pause))
    }

    /// Ends the pause of a pool, or of everything.
    pub fn resume(&self, pool: Option<&PoolName>, by: &str, why: &str, at: Timestamp) -> Result<()> {
        self.operator_transaction(|orders| orders.resume(pool, by, why, at))
    }

    /// Closes the breaker, so that the controller may take out nodes again. Earlier events no longer count.
    pub fn close_breaker(&self, by: &str, why: &str, at: Timestamp) -> Result<()> {
        self.operator_transaction(|orders| orders.close_breaker(by, why, at))
    }
}

/// Operator commands within one transaction.
pub struct OperatorCommands<'a, 'tx> {
    pub(super) tx: &'a mut Tx<'tx>,
}

impl std::fmt::Debug for OperatorCommands<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OperatorCommands").finish_non_exhaustive()
    }
}

impl OperatorCommands<'_, '_> {
    /// Returns a node's state and hold; the defaults for an unknown node.
    pub fn state_and_hold(&mut self, node: &NodeName) -> Result<(NodeState, Option<Hold>)> {
        let unknown = (NodeState::InService, None);
        let Some(id) = self.tx.ids.node_id(node) else { return Ok(unknown) };
        // Locked until the transaction ends; SQLite has no other writer.
        let lock = if self.tx.is_sqlite() { "" } else { " FOR UPDATE" };
        let sql = format!("SELECT state, hold FROM node WHERE id = $1{lock}");
        let found = self.tx.first("reading a node", &sql, vals![id], |row| {
            let hold = row.opt_text(1)?.map(|text| json::read("hold", text)).transpose()?;
            Ok((json::read("state", row.text(0)?)?, hold))
        })?;
        Ok(found.unwrap_or(unknown))
    }

    /// Returns the stored pause of a pool, or of everything.
    pub fn pause_of(&mut self, pool: Option<&PoolName>) -> Result<Option<Pause>> {
        let pool = pool.map_or("", PoolName::as_str);
        let sql = "SELECT body FROM pause WHERE pool = $1";
        self.tx.first("reading pauses", sql, vals![pool], |row| json::read("pause", row.text(0)?))
    }

    pub fn hold(&mut self, node: &NodeName, hold: &Hold) -> Result<()> {
        let id = self.tx.node_id(node, hold.since)?;
        let body = json::write(hold)?;
        self.tx.execute("holding a node", "UPDATE node SET hold = $2 WHERE id = $1", vals![id, &body])?;
        audit_operator(self.tx, "hold", Some(id), (&hold.by, &hold.why), hold.since)
    }

    pub fn unhold(&mut self, node: &NodeName, by: &str, why: &str, at: Timestamp) -> Result<()> {
        let id = self.tx.node_id(node, at)?;
        self.tx.execute("ending a hold", "UPDATE node SET hold = NULL WHERE id = $1", vals![id])?;
        audit_operator(self.tx, "unhold", Some(id), (by, why), at)
    }

    pub fn add_command(&mut self, what: &CommandKind, by: &str, why: &str, at: Timestamp) -> Result<u64> {
        let body = json::write(what)?;
        let sql = "INSERT INTO operator_command (actor, reason, at, body) VALUES ($1, $2, $3, $4)";
        let id = self.tx.insert("adding a request", sql, vals![by, why, at, &body])?;
        let (kind, node) = match what {
            CommandKind::Test { node, .. } => ("ask-test", Some(node)),
            CommandKind::Release { node } => ("ask-release", Some(node)),
            CommandKind::Quarantine { node, .. } => ("ask-quarantine", Some(node)),
            CommandKind::Repair { node, .. } => ("ask-repair", Some(node)),
            CommandKind::CancelRun { .. } => ("ask-withdraw", None),
            CommandKind::MultiNodeTest { nodes, .. } => ("ask-together", Some(nodes.first())),
        };
        let node = node.map(|node| self.tx.node_id(node, at)).transpose()?;
        audit_operator(self.tx, kind, node, (by, why), at)?;
        Ok(id.cast_unsigned())
    }

    pub fn pause(&mut self, pause: &Pause) -> Result<()> {
        let body = json::write(pause)?;
        let pool = pause.pool.as_ref().map_or("", PoolName::as_str);
        let sql =
            "INSERT INTO pause (pool, body) VALUES ($1, $2) ON CONFLICT (pool) DO UPDATE SET body = excluded.body";
        self.tx.execute("pausing", sql, vals![pool, &body])?;
        audit_operator(self.tx, "pause", None, (&pause.by, &pause.why), pause.since)
    }

    pub fn resume(&mut self, pool: Option<&PoolName>, by: &str, why: &str, at: Timestamp) -> Result<()> {
        let pool = pool.map_or("", PoolName::as_str);
        self.tx.execute("resuming", "DELETE FROM pause WHERE pool = $1", vals![pool])?;
        audit_operator(self.tx, "resume", None, (by, why), at)
    }

    /// Records that an operator starts a report on a node at once. The controller has no part in it.
    pub fn record_report(&mut self, node: &NodeName, by: &str, why: &str, at: Timestamp) -> Result<()> {
        let node = self.tx.node_id(node, at)?;
        audit_operator(self.tx, "report", Some(node), (by, why), at)
    }

    pub fn close_breaker(&mut self, by: &str, why: &str, at: Timestamp) -> Result<()> {
        set_breaker(self.tx, &Breaker::Closed { since: Some(at) })?;
        audit_operator(self.tx, "close-breaker", None, (by, why), at)
    }
}

pub(super) fn set_breaker(tx: &mut Tx<'_>, breaker: &Breaker) -> Result<()> {
    set_meta(tx, BREAKER, &json::write(breaker)?)
}

pub(super) fn set_agent_silence_reported(tx: &mut Tx<'_>, reported: bool) -> Result<()> {
    set_meta(tx, AGENT_SILENCE_KEY, if reported { "true" } else { "false" })
}

pub(super) fn meta(tx: &mut Tx<'_>, key: &str) -> Result<Option<String>> {
    let sql = "SELECT value FROM meta WHERE key = $1";
    tx.first("reading a setting", sql, vals![key], |row| Ok(row.text(0)?.to_owned()))
}

pub(super) fn set_meta(tx: &mut Tx<'_>, key: &str, value: &str) -> Result<()> {
    let sql = "INSERT INTO meta (key, value) VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET value = excluded.value";
    tx.execute("writing a setting", sql, vals![key, value]).map(drop)
}

/// Adds an audit line for an operator's command.
pub(super) fn audit_operator(
    tx: &mut Tx<'_>,
    what: &'static str,
    node: Option<i64>,
    (by, why): (&str, &str),
    at: Timestamp,
) -> Result<()> {
    let line = NewAuditLine {
        actor: Some(by.to_owned()),
        action: what,
        node,
        code: "operator".to_owned(),
        text: why.to_owned(),
        ..NewAuditLine::default()
    };
    audit::append(tx, at, None, &[line])?;
    audit::add_counts(tx, &[(Counter::OperatorChanges, 1)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StoreError;

    #[test]
    fn commands_submitted_together_are_written_atomically() {
        let store = Store::open_in_memory().unwrap();
        let (node, at) = (NodeName::new("a").unwrap(), Timestamp::from_secs(1000));
        let hold = Hold { by: "ann".to_owned(), why: "fan".to_owned(), since: at, until: None };
        let failed = store.operator_transaction(|orders| {
            orders.hold(&node, &hold)?;
            orders.close_breaker("ann", "seen", at)?;
            Err::<(), _>(StoreError::Refused { operation: "testing", why: "the disk is full".to_owned() })
        });
        assert!(failed.is_err());
        assert!(store.audit(10, None).unwrap().is_empty(), "nothing was written");
        assert_eq!(store.breaker().unwrap(), Breaker::Closed { since: None });
        store
            .operator_transaction(|orders| {
                orders.hold(&node, &hold).and_then(|()| orders.close_breaker("ann", "seen", at))
            })
            .unwrap();
        assert_eq!(store.audit(10, None).unwrap().len(), 2);
    }
}
