//! SQLite checkpoints, run concurrently with the writer.
//!
//! A writer that finds the log long checkpoints it, and all other writers wait. Most of that work can be done on a
//! second connection, which leaves the writer little. The timing does not affect durability: the content of the log is
//! durable.

use std::time::{Duration, Instant};

use rusqlite::Connection;

use super::{sqlite::SqliteFile, sqlite_error};
use crate::error::Result;

/// Minimum interval: a page that is rewritten in between is copied once.
const EVERY: Duration = Duration::from_millis(200);

/// Runs checkpoints. Opens its connection on first use.
#[derive(Debug)]
pub(crate) struct Checkpointer<'a> {
    file: Option<&'a SqliteFile>,
    connection: Option<Connection>,
    last: Option<Instant>,
}

impl<'a> Checkpointer<'a> {
    /// `None`: there is no log.
    pub(super) const fn new(file: Option<&'a SqliteFile>) -> Self {
        Self { file, connection: None, last: None }
    }

    /// Runs a passive checkpoint, which blocks no writer, if the last one is long enough ago.
    pub(crate) fn run_if_due(&mut self) -> Result<()> {
        let Some(file) = self.file else { return Ok(()) };
        if self.last.is_some_and(|last| last.elapsed() < EVERY) {
            return Ok(());
        }
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => file.connect()?,
        };
        let fail = sqlite_error("running a checkpoint");
        connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", (), |_| Ok(())).map_err(fail)?;
        self.connection = Some(connection);
        self.last = Some(Instant::now());
        Ok(())
    }
}
