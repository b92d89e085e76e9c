//! Errors of the store. None is ever a verdict on a node.

use std::path::PathBuf;

use doctor_core::{ids::RunId, time::Timestamp};
use tokio_postgres::error::SqlState;

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

    /// A newer program has migrated the store. `by`: its version, if the store says so.
    #[error(
        "the store has schema {found}{}, this program (doctor {}) knows schemas up to {known}: use the version that \
         migrated it, or newer",
        migrated_by(by.as_deref()), env!("CARGO_PKG_VERSION")
    )]
    NewerSchema { found: i64, known: i64, by: Option<String> },

    #[error(
        "the store has schema {found} of a development version, which this program cannot read: move the SQLite file \
         away (or create an empty PostgreSQL database) and start again"
    )]
    OldSchema { found: i64 },

    #[error("the store has no tables: start the controller (`doctor serve`) on it first, or `doctor run`")]
    NoSchema,

    #[error(
        "the store has schema {found}, this program (doctor {}) needs schema {needed} for this, and only a controller that \
         leads migrates it: start this version's controller (`doctor serve`), run `doctor db migrate`, or use the version \
         that wrote the store",
        env!("CARGO_PKG_VERSION")
    )]
    NotMigrated { found: i64, needed: i64 },

    /// A statement waited for too long for a process that creates or migrates the schema.
    #[error("another process creates or migrates the schema of the store: try again when it has ended")]
    SchemaLocked,

    /// SQLite's one writer was another process for longer than a command waits.
    #[error(
        "another process has been writing the store for {} s, as a migration of its schema does: try again when it has \
         ended (`doctor db lease show` names the controller)",
        waited.as_secs()
    )]
    WriterBusy { waited: std::time::Duration },

    /// The backup before a migration cannot be written. The store keeps its old schema.
    #[error(
        "the schema of the store was not migrated from {from} to {to}, because {why}: nothing was changed. The setting \
         `migration_backup` names another directory, or \"none\" if this store is backed up by other means"
    )]
    NoMigrationBackup { from: i64, to: i64, why: String },

    #[error("TLS to {database} cannot be set up: {why}")]
    Tls { database: String, why: String },

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
        matches!(self, Self::LeaseLost { .. } | Self::LeaseExpired { .. } | Self::NewerSchema { .. })
    }

    /// Whether a statement failed in a way that another schema explains: the database has answered.
    pub(super) fn may_be_of_the_schema(&self) -> bool {
        match self {
            Self::Unreadable { .. } => true,
            Self::Postgres { source, .. } => source.code().is_some(),
            // A table or column that is missing.
            Self::Sqlite { source: rusqlite::Error::SqlInputError { .. }, .. } => true,
            Self::Sqlite { source, .. } => matches!(
                source.sqlite_error_code(),
                Some(rusqlite::ErrorCode::Unknown | rusqlite::ErrorCode::ConstraintViolation)
            ),
            _ => false,
        }
    }

    /// Whether a statement has waited for a lock for longer than PostgreSQL's `lock_timeout`.
    pub(super) fn is_lock_timeout(&self) -> bool {
        matches!(self, Self::Postgres { source, .. } if source.code() == Some(&SqlState::LOCK_NOT_AVAILABLE))
    }

    /// Whether another process has kept SQLite's lock for longer than a statement waits for it.
    pub(super) fn is_busy(&self) -> bool {
        let Self::Sqlite { source, .. } = self else { return false };
        source.sqlite_error_code() == Some(rusqlite::ErrorCode::DatabaseBusy)
    }

    /// Whether PostgreSQL has cancelled the statement: at the deadline of the caller, at `statement_timeout`, or for an
    /// administrator.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, Self::Postgres { source, .. } if source.code() == Some(&SqlState::QUERY_CANCELED))
    }

    /// Whether the database refuses the values of a write: it would refuse them again. It works, and other writes succeed.
    pub fn refuses_values(&self) -> bool {
        match self {
            Self::Sqlite { source, .. } => match source.sqlite_error_code() {
                Some(code) => matches!(
                    code,
                    rusqlite::ErrorCode::ConstraintViolation
                        | rusqlite::ErrorCode::TooBig
                        | rusqlite::ErrorCode::TypeMismatch
                ),
                None => matches!(source, rusqlite::Error::ToSqlConversionFailure(_)),
            },
            // Cardinality, data, integrity constraint, and a limit of the program, such as the length of a key.
            Self::Postgres { source, .. } => source
                .code()
                .is_some_and(|code| ["21", "22", "23", "54"].iter().any(|class| code.code().starts_with(class))),
            _ => false,
        }
    }

    /// Whether the cause may be in some of the stored or written data, so that work on other data succeeds. A cancelled
    /// statement may have had too much of it; it may also be that the whole database is slow.
    pub fn is_of_some_data(&self) -> bool {
        self.refuses_values() || self.is_cancelled() || matches!(self, Self::Unreadable { .. } | Self::Refused { .. })
    }

    /// Whether a newer program has migrated the store, so that this one can never lead again.
    pub const fn is_superseded(&self) -> bool {
        matches!(self, Self::NewerSchema { .. })
    }

    /// Whether the store has an older schema and nothing else is wrong: it is migrated when this version's controller leads.
    pub const fn awaits_migration(&self) -> bool {
        matches!(self, Self::NotMigrated { .. })
    }
}

/// Returns the words that name the program which migrated the store.
fn migrated_by(by: Option<&str>) -> String {
    by.map(|version| format!(" (written by doctor {version})")).unwrap_or_default()
}

/// Why the store cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteObstacle {
    DiskFull,
    ReadOnly,
    /// The text of the error says more.
    Other,
}

impl std::fmt::Display for WriteObstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::DiskFull => "the disk is full",
            Self::ReadOnly => "it is read-only",
            Self::Other => "writing failed",
        })
    }
}

impl StoreError {
    /// Returns why a write failed, in words that say nothing of the store's content.
    pub fn write_obstacle(&self) -> WriteObstacle {
        match self {
            Self::Sqlite { source, .. } => match source.sqlite_error_code() {
                Some(rusqlite::ErrorCode::DiskFull) => WriteObstacle::DiskFull,
                Some(rusqlite::ErrorCode::ReadOnly) => WriteObstacle::ReadOnly,
                _ => WriteObstacle::Other,
            },
            Self::Postgres { source, .. } => match source.code() {
                Some(code) if *code == SqlState::DISK_FULL => WriteObstacle::DiskFull,
                Some(code) if *code == SqlState::READ_ONLY_SQL_TRANSACTION => WriteObstacle::ReadOnly,
                _ => WriteObstacle::Other,
            },
            Self::File { source, .. } => match source.kind() {
                std::io::ErrorKind::StorageFull => WriteObstacle::DiskFull,
                std::io::ErrorKind::ReadOnlyFilesystem => WriteObstacle::ReadOnly,
                _ => WriteObstacle::Other,
            },
            _ => WriteObstacle::Other,
        }
    }
}

pub type Result<T> = std::result::Result<T, StoreError>;
