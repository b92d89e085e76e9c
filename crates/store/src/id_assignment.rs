//! Ids of names: loads them from their tables and assigns new ones.
//!
//! Ids are assigned under a lock held until the transaction ends, so a higher id is never visible before a lower one.
//! Loading the ids above the highest known one therefore finds all new names.

use std::sync::Arc;

use doctor_core::{
    finding::Severity,
    ids::{NodeName, TestId},
    lifecycle::NodeState,
    reason::ReasonCode,
    time::Timestamp,
};

use super::{
    db::{Row, SqlValue, Tx, vals},
    error::{Result, StoreError},
    id_cache::{OutcomeKind, parsed},
    json,
};

const LOAD: &str = "loading names";

impl Tx<'_> {
    /// Loads names that other processes have added.
    pub(super) fn refresh_ids(&mut self) -> Result<()> {
        let there = self.highest_ids()?;
        self.load_new_ids(there)
    }

    /// Returns the highest ids in the tables of names, and notes the schema of the store.
    pub(super) fn highest_ids(&mut self) -> Result<[Option<i64>; 3]> {
        let sql = "SELECT (SELECT MAX(id) FROM node), (SELECT MAX(id) FROM test), (SELECT MAX(id) FROM outcome), \
                   (SELECT MAX(version) FROM schema_version)";
        let there = self
            .first(LOAD, sql, &[], |row| Ok(([row.opt_int(0)?, row.opt_int(1)?, row.opt_int(2)?], row.opt_int(3)?)))?;
        let (there, schema) = there.unwrap_or_default();
        self.schema = schema.unwrap_or(0);
        Ok(there)
    }

    /// Loads names above the highest known ids. `there`: the highest ids in the tables.
    pub(super) fn load_new_ids(&mut self, there: [Option<i64>; 3]) -> Result<()> {
        let [node, test, outcome] = there.map(|id| id.unwrap_or(0));
        let known = self.ids.highest_numbers();
        let mut fresh = Arc::clone(&self.ids);
        if node > known[0] {
            let names = Arc::make_mut(&mut fresh);
            self.rows(LOAD, "SELECT id, name FROM node WHERE id > $1 ORDER BY id", vals![known[0]], |row| {
                names.add_node(row.int(0)?, parsed("node name", NodeName::new(row.text(1)?))?);
                Ok(())
            })?;
        }
        if test > known[1] {
            let names = Arc::make_mut(&mut fresh);
            self.rows(LOAD, "SELECT id, name FROM test WHERE id > $1 ORDER BY id", vals![known[1]], |row| {
                names.add_test(row.int(0)?, parsed("test name", TestId::new(row.text(1)?))?);
                Ok(())
            })?;
        }
        if outcome > known[2] {
            let names = Arc::make_mut(&mut fresh);
            let sql = "SELECT id, verdict, severity, reason, untrusted, imported, by_agent FROM outcome \
                       WHERE id > $1 ORDER BY id";
            self.rows(LOAD, sql, vals![known[2]], |row| {
                names.add_outcome(row.int(0)?, read_outcome(row)?);
                Ok(())
            })?;
        }
        self.ids = fresh;
        Ok(())
    }

    /// Returns a node's id, creating its row if there is none.
    pub(super) fn node_id(&mut self, name: &NodeName, now: Timestamp) -> Result<i64> {
        if let Some(id) = self.ids.node_id(name) {
            return Ok(id);
        }
        let state = json::write(&NodeState::InService)?;
        let sql = "INSERT INTO node (name, state, state_since) VALUES ($1, $2, $3) ON CONFLICT (name) DO NOTHING";
        let id = self.insert_name("node", name.as_str(), sql, vals![name.as_str(), &state, now])?;
        Arc::make_mut(&mut self.ids).add_node(id, name.clone());
        Ok(id)
    }

    pub(super) fn test_id(&mut self, name: &TestId) -> Result<i64> {
        if let Some(id) = self.ids.test_id(name) {
            return Ok(id);
        }
        let sql = "INSERT INTO test (name) VALUES ($1) ON CONFLICT (name) DO NOTHING";
        let id = self.insert_name("test", name.as_str(), sql, vals![name.as_str()])?;
        Arc::make_mut(&mut self.ids).add_test(id, name.clone());
        Ok(id)
    }

    pub(super) fn outcome_id(&mut self, kind: &OutcomeKind) -> Result<i64> {
        if let Some(id) = self.ids.outcome_id(kind) {
            return Ok(id);
        }
        let name = kind.name();
        let sql = "INSERT INTO outcome (name, verdict, severity, reason, untrusted, imported, by_agent) \
                   VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT (name) DO NOTHING";
        let OutcomeKind { verdict, severity, reason, untrusted, imported, by_agent } = kind;
        let severity = severity.map(Severity::code);
        let vals = vals![&name, verdict.code(), severity, reason.as_str(), *untrusted, *imported, *by_agent];
        let id = self.insert_name("outcome", &name, sql, vals)?;
        Arc::make_mut(&mut self.ids).add_outcome(id, kind.clone());
        Ok(id)
    }

    fn insert_name(&mut self, table: &'static str, name: &str, insert: &str, vals: &[SqlValue<'_>]) -> Result<i64> {
        let operation = "adding a name";
        if !self.is_sqlite() {
            self.execute(operation, "SELECT pg_advisory_xact_lock(7301118)", &[])?;
            self.refresh_ids()?;
        }
        self.execute(operation, insert, vals)?;
        let sql = format!("SELECT id FROM {table} WHERE name = $1");
        self.first(operation, &sql, vals![name], |row| row.int(0))?
            .ok_or_else(|| StoreError::Unreadable { what: "name", why: format!("{name} was added and is missing") })
    }
}

fn read_outcome(row: &Row<'_>) -> Result<OutcomeKind> {
    Ok(OutcomeKind {
        verdict: parsed("verdict", row.text(1)?.parse())?,
        severity: row.opt_text(2)?.map(|code| parsed("severity", code.parse())).transpose()?,
        reason: parsed("reason", ReasonCode::new(row.text(3)?))?,
        untrusted: row.int(4)? != 0,
        imported: row.int(5)? != 0,
        by_agent: row.int(6)? != 0,
    })
}
