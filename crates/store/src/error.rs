//! Errors of the store. None is ever a verdict on a node.

use std::path::PathBuf;

use doctor_core::{ids::RunId, time::Timestamp};

/// A failed store operation. Nothing was changed: every write is one transaction.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("`{text}` is not a store: give a file path, `sqlite:PATH` or `postgres://USER@HOST/DATABASE`: {why}")]
    BadUrl { text: String, why: String },

    #[error("cannot open the store {path}: {why}")]
    CannotOpen { path: String, why: String },

    #[error(
        "{path} is on a network file system ({kind}), where SQLite loses data: put the store on a local disk or block \
         volume, or use postgres://"
    )]
    NetworkFileSystem { path: PathBuf, kind: &'static str },

    #[error(
        "{path} is damaged or not a SQLite database, and was left as it is: {why}. Restore a backup into another file \
         with `doctor db restore`"
    )]
    Damaged { path: PathBuf, why: String },

    #[error(
        "the store has schema {found}, this program supports up to {known}: use the version that wrote it, or newer"
    )]
    NewerSchema { found: i64, known: i64 },

    #[error(
        "the store has schema {found} of a development version, which this program cannot read: move the SQLite file \
         away (or create an empty PostgreSQL database) and start again"
    )]
    OldSchema { found: i64 },

    #[error("the store has no tables: start the controller (`doctor serve`) on it first, or `doctor run`")]
    NoSchema,

    #[error(
        "the store has schema {found}, this program reads schema {needed}, and a command that only reads does not migrate \
         it: start this version's controller, which migrates it, or use the version that wrote it"
    )]
    NotMigrated { found: i64, needed: i64 },

    #[error(
        "{database} requires TLS, which this build does not support for PostgreSQL: use a local socket, a tunnel, or \
         `sslmode=disable`"
    )]
    TlsNotSupported { database: String },

    /// Another controller leads. The caller must stop acting immediately.
    #[error("lease lost: held by {by}, fence {fence}")]
    LeaseLost { by: String, fence: u64 },

    /// The lease expired and is not held by another controller yet. Acquire it again before acting.
    #[error("the lease expired at {at}: acquire it again")]
    LeaseExpired { at: Timestamp },

    #[error("{operation} in the SQLite store failed")]
    Sqlite {
        operation: &'static str,
        #[source]
        source: rusqlite::Error,
    },

    #[error("{operation} in the PostgreSQL store failed")]
    Postgres {
        operation: &'static str,
        #[source]
        source: tokio_postgres::Error,
    },

    /// The state that the plan was based on has changed. Nothing was done.
    #[error("{what} has changed since the plan was made: review the new plan")]
    StateChanged { what: String },

    /// The plan ends a run whose result has arrived since the plan was made. Nothing was done: enter the result first.
    #[error("a result of {run} has arrived since the plan was made: the next cycle enters it")]
    ResultWaits { run: RunId },

    /// The caller's deadline passed. The store is not at fault.
    #[error("{operation} exceeded the deadline of the request")]
    DeadlineExceeded { operation: &'static str },

    #[error("{operation} {path} failed")]
    File {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },

    /// The store contains a value that this program never writes.
    #[error("the store contains an unreadable {what}: {why}. Run `doctor db verify`")]
    Unreadable { what: &'static str, why: String },

    #[error("the store has no {what} {id}")]
    NotFound { what: &'static str, id: String },

    #[error("{operation}: {why}")]
    Refused { operation: &'static str, why: String },
}

impl StoreError {
    /// Whether the caller no longer leads and must stop acting.
    pub const fn is_lease_lost(&self) -> bool {
        matches!(self, Self::LeaseLost { .. } | Self::LeaseExpired { .. })
    }
}

pub type Result<T> = std::result::Result<T, StoreError>;
