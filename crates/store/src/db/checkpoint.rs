//! Bringing SQLite's log into the database file while others go on writing.
//!
//! A writer that finds the log long does it itself, and everybody waits for it. Most of it can be done beside the writer,
//! who then has little left to do. Nothing is lost or gained by when it happens: what is in the log is durable.

use std::time::{Duration, Instant};

use rusqlite::Connection;

use super::{sqlite::SqliteFile, sqlite_error};
use crate::error::Result;

/// Not more often than this: a page that is written again meanwhile is brought over once.
const EVERY: Duration = Duration::from_millis(200);

/// Its connection is opened when it is first needed.
#[derive(Debug)]
pub(crate) struct Checkpoints<'a> {
    file: Option<&'a SqliteFile>,
    connection: Option<Connection>,
    last: Option<Instant>,
}

impl<'a> Checkpoints<'a> {
    /// `None`: there is no log.
    pub(super) const fn new(file: Option<&'a SqliteFile>) -> Self {
        Self { file, connection: None, last: None }
    }

    /// Brings over what can be without keeping anybody waiting, if it was long enough ago.
    pub(crate) fn when_due(&mut self) -> Result<()> {
        let Some(file) = self.file else { return Ok(()) };
        if self.last.is_some_and(|last| last.elapsed() < EVERY) {
            return Ok(());
        }
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => file.connect()?,
        };
        let fail = sqlite_error("bringing the log into the database");
        connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", (), |_| Ok(())).map_err(fail)?;
        self.connection = Some(connection);
        self.last = Some(Instant::now());
        Ok(())
    }
}
