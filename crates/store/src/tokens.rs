//! API tokens, and audit lines for API requests.

use doctor_core::{ids::NodeName, time::Timestamp};

use super::{
    Store,
    audit::{self, NewAuditLine},
    db::{Access, vals},
    error::{Result, StoreError},
    id_cache::parsed,
    operator_commands::{OperatorCommands, audit_operator},
};
use crate::access::{TokenDigest, TokenRow};

/// An API request and its outcome, for the audit trail.
#[derive(Debug, Clone, Default)]
pub struct ApiCall {
    /// `api-hold`, `api-refused`, …
    pub action: &'static str,
    pub by: String,
    /// `done`, or the reason for rejection.
    pub code: &'static str,
    pub text: String,
    /// Address of the client.
    pub origin: String,
    /// The plan that the client confirmed.
    pub plan: Option<String>,
    /// The node, if the request concerns one.
    pub node: Option<NodeName>,
}

impl Store {
    /// Adds a token. A name is never reused, because the audit trail could not distinguish the two.
    pub fn add_token(&self, token: &TokenRow, why: &str) -> Result<()> {
        self.write_unfenced(Access::Write, |tx| {
            let known = "SELECT 1 FROM token WHERE name = $1";
            if tx.first("adding a token", known, vals![&token.name], |_| Ok(()))?.is_some() {
                let why = format!("the token name `{}` is already used: choose another name", token.name);
                return Err(StoreError::Refused { operation: "adding a token", why });
            }
            let sql = "INSERT INTO token (name, role, digest, created_by, created, expires) \
                       VALUES ($1, $2, $3, $4, $5, $6)";
            let digest = token.digest.to_hex();
            let (role, expires) = (token.role.code(), token.expires);
            tx.execute("adding a token", sql, vals![&token.name, role, &digest, &token.by, token.created, expires])?;
            let text = format!("{} ({role}): {why}", token.name);
            audit_operator(tx, "add-token", None, (&token.by, &text), token.created)
        })
    }

    /// Revokes a token. Returns `false` if it does not exist or is revoked already.
    pub fn revoke_token(&self, name: &str, by: &str, why: &str, at: Timestamp) -> Result<bool> {
        self.write_unfenced(Access::Write, |tx| {
            let sql = "UPDATE token SET revoked = $2 WHERE name = $1 AND revoked IS NULL";
            if tx.execute("revoking a token", sql, vals![name, at])? == 0 {
                return Ok(false);
            }
            audit_operator(tx, "revoke-token", None, (by, &format!("{name}: {why}")), at)?;
            Ok(true)
        })
    }

    /// Returns every token ever created, by name.
    pub fn tokens(&self) -> Result<Vec<TokenRow>> {
        let sql = "SELECT name, role, digest, created_by, created, expires, revoked FROM token ORDER BY name";
        self.read(|tx| {
            tx.all("reading tokens", sql, &[], |row| {
                let digest = TokenDigest::from_hex(row.text(2)?).ok_or_else(|| StoreError::Unreadable {
                    what: "token",
                    why: "its digest is not 64 hexadecimal digits".to_owned(),
                })?;
                Ok(TokenRow {
                    name: row.text(0)?.to_owned(),
                    role: parsed("role", row.text(1)?.parse())?,
                    by: row.text(3)?.to_owned(),
                    created: row.timestamp(4)?,
                    expires: row.opt_timestamp(5)?,
                    revoked: row.opt_timestamp(6)?,
                    digest,
                })
            })
        })
    }

    /// Records a rejected API request. An accepted one is recorded with its effect.
    pub fn record_call(&self, call: &ApiCall, at: Timestamp) -> Result<()> {
        self.operator_transaction(|orders| orders.record_call(call, at))
    }
}

impl OperatorCommands<'_, '_> {
    /// Records an API request.
    pub fn record_call(&mut self, call: &ApiCall, at: Timestamp) -> Result<()> {
        let node = call.node.as_ref().and_then(|node| self.tx.ids.node_id(node));
        let line = NewAuditLine {
            actor: Some(call.by.clone()),
            action: call.action,
            node,
            code: call.code.to_owned(),
            text: call.text.clone(),
            origin: Some(call.origin.clone()),
            plan: call.plan.clone(),
            ..NewAuditLine::default()
        };
        audit::append(self.tx, at, None, &[line])
    }
}
