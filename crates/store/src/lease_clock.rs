//! The clock by which a lease counts.
//!
//! Two controllers compare the end of the lease with the time. If each used its own clock, one whose clock is ahead would
//! take a lease that is alive, and one whose clock is ahead while it leads would hold the lease long after its death. So
//! both ask the database: PostgreSQL has one clock for all its clients. SQLite has none of its own, but all of its
//! processes are on one machine, which has one.

use std::time::{SystemTime, UNIX_EPOCH};

use doctor_core::time::Timestamp;

use super::{
    db::Tx,
    error::{Result, StoreError},
    fencing::{LeaseRow, read},
};

/// The server's clock at the execution of the statement: `now()` would be that of the start of the transaction, which may
/// have waited for the lease's row since.
const SERVER_MILLIS: &str = "(EXTRACT(EPOCH FROM clock_timestamp()) * 1000)::BIGINT";

/// The clock by which a lease counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseClock {
    /// The database's: the server's on PostgreSQL, this machine's on SQLite.
    Database,
    /// One that only a simulation moves, in one process. It shows this time.
    Virtual(Timestamp),
}

impl LeaseClock {
    /// Returns the clock of a process in which `virtual_now` is the time if that is simulated.
    pub fn of(virtual_now: Option<Timestamp>) -> Self {
        virtual_now.map_or(Self::Database, Self::Virtual)
    }

    pub(super) const fn is_virtual(self) -> bool {
        matches!(self, Self::Virtual(_))
    }
}

impl From<Timestamp> for LeaseClock {
    fn from(now: Timestamp) -> Self {
        Self::Virtual(now)
    }
}

/// Returns the time by this clock.
pub(super) fn clock_now(tx: &mut Tx<'_>, clock: LeaseClock) -> Result<Timestamp> {
    match clock {
        LeaseClock::Virtual(now) => Ok(now),
        LeaseClock::Database if tx.is_sqlite() => machine_now(),
        LeaseClock::Database => {
            let now = tx.first("reading the clock", &format!("SELECT {SERVER_MILLIS}"), &[], |row| row.timestamp(0))?;
            now.ok_or_else(|| StoreError::Unreadable { what: "clock", why: "the server returned no time".to_owned() })
        }
    }
}

/// Locks the lease's row against other changes, but not against writes that lock its key, and returns the time by this
/// clock after the wait for the row.
pub(super) fn lock_and_read_clock(tx: &mut Tx<'_>, clock: LeaseClock) -> Result<Timestamp> {
    if tx.is_sqlite() {
        // The begin of the transaction has waited for the lock.
        return clock_now(tx, clock);
    }
    // The subquery locks the row. An expression beside FOR UPDATE would be evaluated before the wait, and so would one of
    // an UPDATE if the transaction that held the row has left it as it was.
    let sql = format!("SELECT {SERVER_MILLIS} FROM (SELECT id FROM lease WHERE id = 1 FOR NO KEY UPDATE) locked");
    let now = tx.first("locking the lease", &sql, &[], |row| row.timestamp(0))?;
    let now = now.ok_or_else(|| StoreError::Unreadable { what: "lease", why: "its row is missing".to_owned() })?;
    Ok(match clock {
        LeaseClock::Virtual(shown) => shown,
        LeaseClock::Database => now,
    })
}

/// Returns the lease's row and the time by this clock, in one statement.
pub(super) fn read_with_clock(tx: &mut Tx<'_>, clock: LeaseClock) -> Result<(LeaseRow, Timestamp)> {
    if tx.is_sqlite() || clock.is_virtual() {
        return Ok((read(tx)?, clock_now(tx, clock)?));
    }
    let sql = format!("SELECT holder, fence, expires, {SERVER_MILLIS} FROM lease WHERE id = 1");
    let found = tx.first("reading the lease", &sql, &[], |row| {
        let (holder, fence) = (row.text(0)?.to_owned(), row.unsigned(1)?);
        Ok((LeaseRow { holder, fence, expires: row.timestamp(2)? }, row.timestamp(3)?))
    })?;
    found.ok_or_else(|| StoreError::Unreadable { what: "lease", why: "its row is missing".to_owned() })
}

fn machine_now() -> Result<Timestamp> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_err(|_| StoreError::Refused {
        operation: "reading the clock",
        why: "this machine's clock is before 1970: set it".to_owned(),
    })?;
    Ok(Timestamp::from_millis(i64::try_from(since.as_millis()).unwrap_or(i64::MAX)))
}
