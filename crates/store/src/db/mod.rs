//! The thin layer that lets one SQL text run on SQLite and on PostgreSQL.
//!
//! It is not a query builder. Statements are written once with `$1` placeholders, which both databases read; where a
//! batch must travel in one message on PostgreSQL and in one loop on SQLite, [`Tx::bulk`] and [`Tx::each`] say both.
//! Statements are prepared once per connection and kept.

mod batch;
mod checkpoint;
mod copied;
mod postgres;
mod postgres_transaction;
mod row;
mod sqlite;
mod tx;

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use tokio_postgres::{Config, error::SqlState};

#[cfg(test)]
pub(super) use self::tx::plans;
pub(super) use self::{
    checkpoint::Checkpoints,
    postgres::When,
    row::{Kind, Row, Val, vals},
    sqlite::open_read_only,
    tx::{Conn, Tx},
};
use self::{postgres::PgSession, sqlite::SqliteFile};
use super::{
    error::{Result, StoreError},
    names::Names,
    url::StoreUrl,
};

/// Sessions of a kind kept open for the next question. More may exist for a moment; they are closed after use.
const IDLE: usize = 6;

/// Writers and a few readers, of one of two kinds.
pub(super) enum Db {
    Sqlite { writer: Mutex<rusqlite::Connection>, readers: Mutex<Vec<rusqlite::Connection>>, file: Option<SqliteFile> },
    Postgres { writers: Mutex<Vec<PgSession>>, readers: Mutex<Vec<PgSession>>, config: Box<Config> },
}

/// What is done inside a transaction. What it finds it puts somewhere: what runs it is compiled once and not for each answer.
type Body<'a> = &'a mut dyn FnMut(&mut Tx<'_>) -> Result<()>;

/// Who is handed the rows of an answer.
type Visit<'a> = &'a mut dyn FnMut(&Row<'_>) -> Result<()>;

/// How much of the others a transaction keeps out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// One unchanging picture.
    Read,
    /// No transaction, for a question of one statement.
    ReadOnce,
    /// Beside other writers of other rows.
    Write,
    /// As `Write`, for results that come in. Where [`Db::syncs_apart`], durable only after [`Db::sync`].
    WriteResults,
    /// As `Write`, for results that are in the inbox. Where the machine cannot go down without this process, durable some
    /// time later: what is lost then is in the inbox again. A server that goes down alone must not forget it, because this
    /// process would not know.
    EnterResults,
    /// Nobody else writes meanwhile.
    WriteAlone,
}

impl Db {
    pub(super) fn open(url: &StoreUrl) -> Result<Self> {
        match url {
            StoreUrl::Sqlite(path) => {
                let file = SqliteFile::check(path)?;
                let writer = file.connect()?;
                Ok(Self::Sqlite { writer: Mutex::new(writer), readers: Mutex::default(), file: Some(file) })
            }
            StoreUrl::Postgres(text) => {
                let config = postgres::config(text, &url.to_string())?;
                let writers = Mutex::new(vec![PgSession::connect(&config)?]);
                Ok(Self::Postgres { writers, readers: Mutex::default(), config: Box::new(config) })
            }
        }
    }

    pub(super) fn in_memory() -> Result<Self> {
        let writer = sqlite::in_memory()?;
        Ok(Self::Sqlite { writer: Mutex::new(writer), readers: Mutex::default(), file: None })
    }

    pub(super) const fn is_sqlite(&self) -> bool {
        matches!(self, Self::Sqlite { .. })
    }

    /// Runs `body` inside one transaction. Whatever it returns as an error leaves the database as it was. A question that is not
    /// answered `until` then is given up.
    pub(super) fn transaction(
        &self,
        access: Access,
        until: Option<Instant>,
        names: &mut std::sync::Arc<Names>,
        body: Body<'_>,
    ) -> Result<()> {
        match self {
            Self::Sqlite { writer, readers, file } => match (access, file) {
                (Access::Read | Access::ReadOnce, Some(file)) => {
                    let idle = lock(readers).pop();
                    let mut connection = idle.map_or_else(|| file.connect_reader(), Ok)?;
                    let result = sqlite::transaction_until(until, &mut connection, access, names, body);
                    let mut readers = lock(readers);
                    if readers.len() < IDLE {
                        readers.push(connection);
                    }
                    result
                }
                (Access::Read | Access::ReadOnce, None) => {
                    sqlite::transaction_until(until, &mut lock(writer), access, names, body)
                }
                _ => sqlite::transaction(&lock(writer), access, names, body),
            },
            Self::Postgres { writers, readers, config } => {
                let (idle, until) = match access {
                    Access::Read | Access::ReadOnce => (readers, until),
                    Access::Write | Access::WriteResults | Access::EnterResults | Access::WriteAlone => (writers, None),
                };
                in_session(idle, config, until, |session| {
                    postgres_transaction::transaction(session, access, names, body)
                })
            }
        }
    }

    /// Whether a commit and its way to the disk can be had one after the other. PostgreSQL does both at once.
    pub(super) const fn syncs_apart(&self) -> bool {
        matches!(self, Self::Sqlite { file: Some(_), .. })
    }

    /// Makes durable what was committed before this call.
    pub(super) fn sync(&self) -> Result<()> {
        match self {
            Self::Sqlite { file: Some(file), .. } => file.sync_log(),
            Self::Sqlite { file: None, .. } | Self::Postgres { .. } => Ok(()),
        }
    }

    /// Who brings the log into the database file beside the writer, where there is such a log.
    pub(super) const fn checkpoints(&self) -> Checkpoints<'_> {
        match self {
            Self::Sqlite { file, .. } => Checkpoints::new(file.as_ref()),
            Self::Postgres { .. } => Checkpoints::new(None),
        }
    }

    /// The live SQLite connection, for the backup that only SQLite itself can make.
    pub(super) fn with_sqlite<T>(&self, body: impl FnOnce(&rusqlite::Connection) -> Result<T>) -> Option<Result<T>> {
        match self {
            Self::Sqlite { writer, readers, file } => Some(match file {
                None => body(&lock(writer)),
                Some(file) => {
                    let idle = lock(readers).pop();
                    idle.map_or_else(|| file.connect_reader(), Ok).and_then(|connection| body(&connection))
                }
            }),
            Self::Postgres { .. } => None,
        }
    }
}

impl std::fmt::Debug for Db {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.is_sqlite() { "Db::Sqlite" } else { "Db::Postgres" })
    }
}

/// A server that was restarted is reached again by the next call; what was under way has failed.
fn in_session(
    idle: &Mutex<Vec<PgSession>>,
    config: &Config,
    until: Option<Instant>,
    body: impl FnOnce(&mut PgSession) -> Result<()>,
) -> Result<()> {
    let session = lock(idle).pop().filter(|session| !session.is_closed());
    let mut session = session.map_or_else(|| PgSession::connect_until(config, until), Ok)?;
    session.until = until;
    let result = body(&mut session);
    let mut idle = lock(idle);
    if idle.len() < IDLE && !session.is_closed() {
        idle.push(session);
    }
    result
}

/// A thread that panicked in a transaction left it open; the next one rolls it back before it begins. The lock's
/// poison adds nothing to that.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn sqlite_error(operation: &'static str) -> impl Fn(rusqlite::Error) -> StoreError {
    move |source| match source.sqlite_error_code() {
        // Nothing else interrupts a statement than its time being over.
        Some(rusqlite::ErrorCode::OperationInterrupted) => StoreError::Late { operation },
        _ => StoreError::Sqlite { operation, source },
    }
}

pub(super) fn postgres_error(operation: &'static str) -> impl Fn(tokio_postgres::Error) -> StoreError {
    move |source| match source.code() {
        Some(code) if *code == SqlState::QUERY_CANCELED => StoreError::Late { operation },
        _ => StoreError::Postgres { operation, source },
    }
}
