//! A PostgreSQL transaction from begin to commit, retried where a conflict with another one ended it.

use std::{borrow::Cow, sync::Arc, time::Instant};

use tokio_postgres::error::SqlState;

use super::{
    Access, Body,
    postgres::PgSession,
    tx::{Conn, Tx},
};
use crate::{
    error::{Result, StoreError},
    id_cache::IdCache,
};

/// Maximum attempts of a transaction that conflicts with another one.
const TRIES: u32 = 5;
/// A consistent snapshot.
const READING: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";

pub(super) fn transaction(
    session: &mut PgSession,
    access: Access,
    names: &mut Arc<IdCache>,
    body: Body<'_>,
) -> Result<()> {
    let mut tries = 0;
    loop {
        tries += 1;
        match attempt(session, access, names, body) {
            Err(StoreError::Postgres { source, .. }) if tries < TRIES && is_retryable(&source) => {}
            result => return result,
        }
    }
}

fn attempt(session: &mut PgSession, access: Access, names: &mut Arc<IdCache>, body: Body<'_>) -> Result<()> {
    let begin = match (access, session.deadline) {
        (Access::ReadStatement, None) => return body(&mut Tx::new(Conn::Postgres(session), Arc::clone(names))),
        (Access::Read, None) => Cow::Borrowed(READING),
        (Access::Read | Access::ReadStatement, Some(until)) => {
            let left = until.saturating_duration_since(Instant::now()).as_millis().max(1);
            Cow::Owned(format!("{READING}; SET LOCAL statement_timeout TO {left}"))
        }
        // It locks no row of the lease, so this is what a migration waits for, and what waits for a migration.
        (Access::Enqueue, _) => Cow::Borrowed("BEGIN; LOCK TABLE ingest_queue IN ROW EXCLUSIVE MODE"),
        (Access::Write | Access::EnterQueued | Access::RenewLease | Access::WriteExclusive, _) => {
            Cow::Borrowed("BEGIN")
        }
    };
    session.begin(begin);
    let mut tx = Tx::new(Conn::Postgres(session), Arc::clone(names));
    let result = body(&mut tx);
    let known = Arc::clone(&tx.ids);
    match result {
        Ok(()) => {
            // A commit after a failed statement is a rollback and returns the failure.
            session.script("committing", "COMMIT")?;
            *names = known;
            Ok(())
        }
        // Report the first error, not that of the rollback.
        Err(error) => {
            session.roll_back();
            Err(error)
        }
    }
}

/// Deadlocks and serialization failures are resolved by retrying.
fn is_retryable(error: &tokio_postgres::Error) -> bool {
    error
        .code()
        .is_some_and(|code| *code == SqlState::T_R_SERIALIZATION_FAILURE || *code == SqlState::T_R_DEADLOCK_DETECTED)
}
