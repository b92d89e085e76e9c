//! A thin layer that runs one SQL text on SQLite and PostgreSQL.
//!
//! It is not a query builder. Statements are written once with `$1` placeholders, which both databases read. Where a
//! batch must be one message on PostgreSQL and a loop on SQLite, [`Tx::insert_many`] and [`Tx::execute_each`] take both forms.
//! Statements are prepared once per connection and cached.

mod batch;
mod checkpoint;
mod copy_reader;
mod postgres;
mod postgres_limits;
mod postgres_tls;
mod postgres_transaction;
mod row;
mod sqlite;
mod tx;

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

#[cfg(test)]
pub(super) use self::tx::plans;
pub(super) use self::{
    checkpoint::Checkpointer,
    postgres::SendOrder,
    row::{ColumnType, Row, SqlValue, vals},
    sqlite::{BUSY, check_sqlite_writable, open_read_only, probe_sqlite},
    tx::{Conn, Tx},
};
use self::{
    postgres::{PgServer, PgSession},
    postgres_limits::{RENEWAL_LIMIT, SessionKind},
    sqlite::SqliteFile,
};
use super::{
    error::{Result, StoreError},
    id_cache::IdCache,
    url::StoreUrl,
};

/// Idle sessions of each kind that are kept open. Further sessions may exist briefly; they are closed after use.
const IDLE: usize = 6;

/// Connections for writers and readers, to either database.
pub(super) enum Db {
    /// The readers are dropped first: only the last connection to close empties the log, and a reader cannot.
    Sqlite {
        readers: Mutex<Vec<rusqlite::Connection>>,
        writer: Mutex<rusqlite::Connection>,
        file: Option<SqliteFile>,
    },
    Postgres {
        writers: Mutex<Vec<PgSession>>,
        readers: Mutex<Vec<PgSession>>,
        server: Box<PgServer>,
        only_reads: bool,
    },
}

/// The body of a transaction. It returns its result through a captured variable, so that the runner is compiled once
/// and not per result type.
type Body<'a> = &'a mut dyn FnMut(&mut Tx<'_>) -> Result<()>;

/// A callback for the rows of a result.
type Visit<'a> = &'a mut dyn FnMut(&Row<'_>) -> Result<()>;

/// How far a transaction excludes others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// A consistent snapshot.
    Read,
    /// No transaction, for a single-statement query.
    ReadStatement,
    /// Concurrent with writers of other rows.
    Write,
    /// As `Write`, for messages that are added to the ingest queue. Where [`Db::has_separate_sync`], durable only after
    /// [`Db::sync`].
    Enqueue,
    /// As `Write`, for messages that are in the ingest queue. On SQLite, durable some time later: a crash of the host also
    /// ends this process, and what is lost is still in the ingest queue. PostgreSQL commits durably, because this process
    /// would not notice that a restarted server had lost the commit.
    EnterQueued,
    /// As `Write`, for the renewal of the lease. On PostgreSQL it is given up when the server does not answer: the
    /// thread that renews would wait for ever.
    RenewLease,
    /// Excludes all other writers.
    WriteExclusive,
}

/// Checks the URL of a PostgreSQL database without connecting.
pub(super) fn check_postgres_url(text: &str, redacted: &str) -> Result<()> {
    postgres::server(text, redacted).map(drop)
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
                let server = postgres::server(text, &url.to_string())?;
                let writers = Mutex::new(vec![PgSession::connect(&server, SessionKind::Writer)?]);
                Ok(Self::Postgres { writers, readers: Mutex::default(), server: Box::new(server), only_reads: false })
            }
        }
    }

    /// Opens an existing database for reading. Every write fails.
    pub(super) fn open_to_read(url: &StoreUrl) -> Result<Self> {
        match url {
            StoreUrl::Sqlite(path) => {
                let file = SqliteFile::check_for_reading(path)?;
                let writer = file.connect_reader()?;
                Ok(Self::Sqlite { writer: Mutex::new(writer), readers: Mutex::default(), file: Some(file) })
            }
            StoreUrl::Postgres(_) => {
                let mut opened = Self::open(url)?;
                if let Self::Postgres { only_reads, .. } = &mut opened {
                    *only_reads = true;
                }
                Ok(opened)
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

    /// Runs `body` inside one transaction. An error leaves the database unchanged. A read that is not finished by
    /// `until` is abandoned.
    pub(super) fn transaction(
        &self,
        access: Access,
        until: Option<Instant>,
        names: &mut std::sync::Arc<IdCache>,
        body: Body<'_>,
    ) -> Result<()> {
        match self {
            Self::Sqlite { writer, readers, file } => match (access, file) {
                (Access::Read | Access::ReadStatement, Some(file)) => {
                    let idle = lock(readers).pop();
                    let mut connection = idle.map_or_else(|| file.connect_reader(), Ok)?;
                    let result = sqlite::transaction_until(until, &mut connection, access, names, body);
                    let mut readers = lock(readers);
                    if readers.len() < IDLE {
                        readers.push(connection);
                    }
                    result
                }
                (Access::Read | Access::ReadStatement, None) => {
                    sqlite::transaction_until(until, &mut lock(writer), access, names, body)
                }
                _ => sqlite::transaction(&lock(writer), access, names, body),
            },
            Self::Postgres { writers, readers, server, only_reads } => {
                let (idle, kind, until) = match access {
                    Access::Read | Access::ReadStatement => (readers, SessionKind::Reader, until),
                    _ if *only_reads => {
                        let why = "the store was opened for reading".to_owned();
                        return Err(StoreError::Refused { operation: "writing", why });
                    }
                    Access::RenewLease => (writers, SessionKind::Writer, Some(Instant::now() + RENEWAL_LIMIT)),
                    Access::Write | Access::Enqueue | Access::EnterQueued | Access::WriteExclusive => {
                        (writers, SessionKind::Writer, None)
                    }
                };
                in_session((idle, kind), server, until, |session| {
                    postgres_transaction::transaction(session, access, names, body)
                })
            }
        }
    }

    /// Whether commit and sync are separate steps. PostgreSQL does both in one.
    pub(super) const fn has_separate_sync(&self) -> bool {
        matches!(self, Self::Sqlite { file: Some(_), .. })
    }

    /// Makes durable everything committed before this call.
    pub(super) fn sync(&self) -> Result<()> {
        match self {
            Self::Sqlite { file: Some(file), .. } => file.sync_log(),
            Self::Sqlite { file: None, .. } | Self::Postgres { .. } => Ok(()),
        }
    }

    /// Returns the checkpointer that runs beside the writer; it does nothing where there is no write-ahead log.
    pub(super) const fn checkpoints(&self) -> Checkpointer<'_> {
        match self {
            Self::Sqlite { file, .. } => Checkpointer::new(file.as_ref()),
            Self::Postgres { .. } => Checkpointer::new(None),
        }
    }

    /// Runs `body` on a live SQLite connection, for SQLite's own backup API. Returns `None` on PostgreSQL.
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

/// Runs `body` on an idle or new session. After a server restart the next call reconnects; calls in progress fail.
fn in_session(
    (idle, kind): (&Mutex<Vec<PgSession>>, SessionKind),
    server: &PgServer,
    until: Option<Instant>,
    body: impl FnOnce(&mut PgSession) -> Result<()>,
) -> Result<()> {
    let session = lock(idle).pop().filter(|session| !session.is_closed());
    let mut session = session.map_or_else(|| PgSession::connect_until(server, kind, until), Ok)?;
    session.deadline = until;
    // The server cancels a reader's statement at the deadline. Any other one has limits of its own, and an
    // administrator can end it.
    let has_deadline = kind == SessionKind::Reader && until.is_some();
    let result = body(&mut session).map_err(|error| match error {
        StoreError::Postgres { operation, .. } if has_deadline && error.is_cancelled() => {
            StoreError::DeadlineExceeded { operation }
        }
        other => other,
    });
    let mut idle = lock(idle);
    if idle.len() < IDLE && !session.is_closed() {
        idle.push(session);
    }
    result
}

/// Locks, ignoring poison: a thread that panicked left its transaction open, and the next one rolls it back before it
/// begins.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn sqlite_error(operation: &'static str) -> impl Fn(rusqlite::Error) -> StoreError {
    move |source| match source.sqlite_error_code() {
        // Only the deadline interrupts a statement.
        Some(rusqlite::ErrorCode::OperationInterrupted) => StoreError::DeadlineExceeded { operation },
        _ => StoreError::Sqlite { operation, source },
    }
}

pub(super) fn postgres_error(operation: &'static str) -> impl Fn(tokio_postgres::Error) -> StoreError {
    move |source| StoreError::Postgres { operation, source }
}
