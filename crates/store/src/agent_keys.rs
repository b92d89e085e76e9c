//! Agent credentials: keys of enrolled agents, agents that authenticate by a cluster token instead, and when each last
//! reported.

use doctor_checks::document::{RunKey, Schema, Versions};
use doctor_core::{ids::NodeName, time::Timestamp};

use super::{
    Store,
    audit::{self, NewAuditLine},
    db::{Access, ColumnType, Row, SqlValue, vals},
    error::{Result, StoreError},
    fencing::Lease,
    id_cache::parsed,
    operator_commands::audit_operator,
    records::{AgentAuth, AgentContact, AgentKey, AgentRow},
};

/// An agent that is not revoked and has no secret authenticates by a token of its cluster.
const COLUMNS: &str = "node, created, revoked, last_contact_at, last_message_number, last_message_sent_at, \
                       program_version, report_schema, policy_version, agent_key";

impl Store {
    /// Enrols the node's agent with this key, replacing any earlier one.
    pub fn enroll_agent(&self, node: &NodeName, key: &RunKey, by: &str, why: &str, at: Timestamp) -> Result<()> {
        self.write_unfenced(Access::Write, |tx| {
            let sql = "INSERT INTO agent (node, agent_key, created) VALUES ($1, $2, $3) ON CONFLICT (node) DO UPDATE \
                       SET agent_key = excluded.agent_key, created = excluded.created, revoked = NULL, \
                       last_contact_at = NULL, last_message_number = NULL, last_message_sent_at = NULL, \
                       program_version = NULL, report_schema = NULL, policy_version = NULL";
            tx.execute("enrolling an agent", sql, vals![node.as_str(), &key.to_hex(), at])?;
            let (id, text) = (tx.ids.node_id(node), format!("{node}: {why}"));
            audit_operator(tx, "enroll-agent", id, (by, &text), at)
        })
    }

    /// Revokes the node's agent. Returns `false` if none was enrolled.
    pub fn revoke_agent(&self, node: &NodeName, by: &str, why: &str, at: Timestamp) -> Result<bool> {
        self.write_unfenced(Access::Write, |tx| {
            // Delete the secret, so that a backup cannot leak it.
            let sql = "UPDATE agent SET revoked = $2, agent_key = '' WHERE node = $1 AND revoked IS NULL";
            if tx.execute("revoking an agent", sql, vals![node.as_str(), at])? == 0 {
                return Ok(false);
            }
            let (id, text) = (tx.ids.node_id(node), format!("{node}: {why}"));
            audit_operator(tx, "revoke-agent", id, (by, &text), at)?;
            Ok(true)
        })
    }

    /// Returns the credential with which messages from this node must be authenticated.
    pub fn agent_key(&self, node: &NodeName) -> Result<AgentKey> {
        // One statement without names, because each message of an agent asks for it.
        let sql = format!("SELECT {COLUMNS} FROM agent WHERE node = $1");
        let found = self.query_once(|tx| {
            let found = tx.first("reading an agent's key", &sql, vals![node.as_str()], |row| {
                Ok((read_agent(row)?, row.text(9)?.to_owned()))
            })?;
            Ok(Some(found))
        })?;
        let Some((agent, secret)) = found.flatten() else { return Ok(AgentKey::Unknown) };
        if agent.revoked.is_some() {
            return Ok(AgentKey::Revoked);
        }
        if agent.auth == AgentAuth::Token {
            return Ok(AgentKey::ClusterToken { last_contact: agent.last_contact });
        }
        let key = RunKey::from_hex(&secret).ok_or_else(|| StoreError::Unreadable {
            what: "agent's key",
            why: format!("the key of {node} is not 64 hexadecimal digits"),
        })?;
        Ok(AgentKey::Enrolled { key, last_contact: agent.last_contact, since: agent.created })
    }

    /// Records agents that authenticate by a token of their cluster, each since the given time. A known agent is
    /// unchanged.
    pub fn register_agents(&self, nodes: &[(NodeName, Timestamp)]) -> Result<()> {
        self.write_unfenced(Access::Write, |tx| {
            for (node, at) in nodes {
                let sql = "INSERT INTO agent (node, agent_key, created) VALUES ($1, '', $2) \
                           ON CONFLICT (node) DO NOTHING";
                if tx.execute("registering an agent", sql, vals![node.as_str(), *at])? > 0 {
                    let (code, text) = ("token".to_owned(), format!("{node}: its agent uses a token of the cluster"));
                    let node = tx.ids.node_id(node);
                    let line = NewAuditLine { action: "introduce-agent", node, code, text, ..NewAuditLine::default() };
                    audit::append(tx, *at, None, &[line])?;
                }
            }
            Ok(())
        })
    }

    /// Returns every agent ever enrolled or recorded, by node.
    pub fn agents(&self) -> Result<Vec<AgentRow>> {
        self.read(|tx| tx.all("reading agents", &format!("SELECT {COLUMNS} FROM agent ORDER BY node"), &[], read_agent))
    }

    /// Records the latest contact of several agents in one write.
    pub fn record_agent_contacts(&self, lease: &Lease, contacts: &[(NodeName, AgentContact)]) -> Result<()> {
        use ColumnType::{Int, Text};
        if contacts.is_empty() {
            return Ok(());
        }
        let schemas: Vec<String> = contacts.iter().map(|(_, contact)| contact.versions.schema.to_string()).collect();
        self.write(lease, |tx| {
            let mut rows: Vec<SqlValue<'_>> = Vec::with_capacity(contacts.len() * 7);
            for ((node, contact), schema) in contacts.iter().zip(&schemas) {
                let AgentContact { at, number, sent, versions } = contact;
                let program = &versions.program;
                rows.extend_from_slice(vals![node.as_str(), *at, *number, *sent, program, schema, versions.policy]);
            }
            let sqlite = "UPDATE agent SET last_contact_at = $2, last_message_number = $3, last_message_sent_at = $4, \
                          program_version = $5, report_schema = $6, policy_version = $7 \
                          WHERE node = $1 AND revoked IS NULL";
            let postgres = "UPDATE agent SET last_contact_at = h.at, last_message_number = h.number, \
                            last_message_sent_at = h.sent, program_version = h.program, \
                            report_schema = h.schema, policy_version = h.policy FROM UNNEST($1::text[], $2::int8[], \
                            $3::int8[], $4::int8[], $5::text[], $6::text[], $7::int8[]) \
                            AS h (node, at, number, sent, program, schema, policy) \
                            WHERE agent.node = h.node AND agent.revoked IS NULL";
            let kinds = [Text, Int, Int, Int, Text, Text, Int];
            tx.execute_each("recording contacts of agents", (sqlite, postgres), &kinds, &rows)
        })
    }
}

fn read_agent(row: &Row<'_>) -> Result<AgentRow> {
    let contact = match row.opt_timestamp(3)? {
        None => None,
        Some(at) => {
            let schema: Schema = parsed("report schema", row.text(7)?.parse())?;
            // A queue length from the past says nothing about the present.
            let versions = Versions { program: row.text(6)?.to_owned(), schema, policy: row.count(8)?, queued: 0 };
            Some(AgentContact { at, number: row.unsigned(4)?, sent: row.timestamp(5)?, versions })
        }
    };
    let node = parsed("node name", NodeName::new(row.text(0)?))?;
    let (created, revoked) = (row.timestamp(1)?, row.opt_timestamp(2)?);
    let speaks_by = if row.text(9)?.is_empty() && revoked.is_none() { AgentAuth::Token } else { AgentAuth::Key };
    Ok(AgentRow { node, auth: speaks_by, created, revoked, last_contact: contact })
}
