//! The published copy: the table and view that the seed's queries use, in one SQLite file replaced by renaming.
//!
//! The copy is made in a private directory of this machine ([`super::CopyFolder`]), never on the shared directory, where a node could
//! exchange the file under SQLite; the caller then copies its bytes there.
//!
//! A reader has the old file or the new one, whole. A change is published by copying the last copy beside it, adding
//! the rows of runs that ended since, and renaming. Everything is rewritten only after an import, after retention
//! deleted rows, if the file is missing, or if its row count disagrees with the hourly counts (a clock that jumped back
//! hides runs from a search by time). The copy records how far it goes. Nothing is written when nothing changed. A slow
//! copy is followed by a pause twenty times as long, so that publishing ten million rows never takes more than a
//! twentieth of the time.
//!
//! Untrusted rows, "not applicable" and results of agents are not published: the seed's schema has results of runs only.

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use doctor_core::time::Timestamp;
use rusqlite::{Connection, OpenFlags};

use super::{
    Store,
    audit::{self, Counter},
    db::{Access, Row, Tx, sqlite_error, vals},
    error::{Result, StoreError},
    operator_commands::meta,
    records::PublishOutcome,
    result_writer::result_time,
};

/// A faster copy needs no pause.
const FAST_COPY: Duration = Duration::from_millis(250);
const PAUSE: u32 = 20;
/// Runs created up to a minute earlier are examined again, because clocks are set back.
const OVERLAP: i64 = 60_000 << 21;

const TABLES: &str = "
    CREATE TABLE runs (
        node TEXT NOT NULL,
        test TEXT NOT NULL,
        timestamp INTEGER NOT NULL,
        result TEXT NOT NULL CHECK (result IN ('pass', 'fail', 'incomplete'))
    );
    CREATE VIEW latest_status AS
        SELECT node, test, MAX(timestamp) AS timestamp, result FROM runs GROUP BY node, test;
    CREATE TABLE doctor_copy (
        store TEXT NOT NULL,
        changes INTEGER NOT NULL,
        rewrites INTEGER NOT NULL,
        upto INTEGER NOT NULL,
        forgotten INTEGER NOT NULL
    );
";
const INDEX: &str = "CREATE INDEX IF NOT EXISTS runs_node_test_timestamp ON runs (node, test, timestamp)";

/// How far a copy goes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CopyVersion {
    store: String,
    changes: i64,
    rewrites: i64,
    /// The lowest run that could still get results when the copy was made.
    next_run: i64,
    /// Results that were counted but deleted before the copy was made.
    deleted: i64,
}

/// The row count of an incremental copy is wrong; everything must be rewritten.
struct RowCountMismatch;

/// When the last copy was made and how long it took.
#[derive(Debug, Clone, Copy)]
pub(super) struct LastCopy {
    ended: Instant,
    took: Duration,
}

impl Store {
    /// Brings the copy at `dest`, a file in a directory that only this user can write, up to date.
    pub fn publish(&self, dest: &Path) -> Result<PublishOutcome> {
        let last = *self.shared.last_publish.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|last| last.took > FAST_COPY && last.ended.elapsed() < last.took * PAUSE) {
            return Ok(PublishOutcome::Deferred);
        }
        let began = Instant::now();
        let before = read_version(dest);
        let now = self.read(current_version)?;
        if before.as_ref().is_some_and(|before| before.changes == now.changes && is_same_lineage(before, &now)) {
            return Ok(PublishOutcome::Unchanged);
        }
        let written = match before.filter(|before| is_same_lineage(before, &now)) {
            Some(before) => match self.extend_copy(dest, &before)? {
                Ok(written) => written,
                Err(RowCountMismatch) => self.write_copy(dest)?,
            },
            None => self.write_copy(dest)?,
        };
        self.write_unfenced(Access::Write, |tx| audit::add_counts(tx, &[(Counter::Published, 1)]))?;
        let last = LastCopy { ended: Instant::now(), took: began.elapsed() };
        *self.shared.last_publish.lock().unwrap_or_else(PoisonError::into_inner) = Some(last);
        Ok(written)
    }

    /// Writes the last copy plus the rows added since.
    fn extend_copy(
        &self,
        dest: &Path,
        last: &CopyVersion,
    ) -> Result<std::result::Result<PublishOutcome, RowCountMismatch>> {
        let temporary = TemporaryFile::beside(dest)?;
        std::fs::copy(dest, &temporary.path).map_err(file_error("copying", dest))?;
        let copy = temporary.open()?;
        let (mark, added, counted) = self.read(|tx| {
            let mark = CopyVersion { deleted: last.deleted, ..current_version(tx)? };
            begin(&copy)?;
            let added = copy_added(tx, &copy, last.next_run.saturating_sub(OVERLAP))?;
            Ok((mark, added, publishable_count(tx)?))
        })?;
        finish(&copy, &mark)?;
        let copied: i64 =
            copy.query_row("SELECT COUNT(*) FROM runs", (), |row| row.get(0)).map_err(sqlite_error(WRITE))?;
        if copied != counted - last.deleted {
            return Ok(Err(RowCountMismatch));
        }
        close(copy)?;
        temporary.rename(dest)?;
        Ok(Ok(PublishOutcome::Written { rows: added, whole: false }))
    }

    fn write_copy(&self, dest: &Path) -> Result<PublishOutcome> {
        let temporary = TemporaryFile::beside(dest)?;
        let copy = temporary.open()?;
        let (mark, rows) = self.read(|tx| {
            begin(&copy)?;
            let rows = copy_all(tx, &copy)?;
            let mark = CopyVersion { deleted: publishable_count(tx)? - rows.cast_signed(), ..current_version(tx)? };
            Ok((mark, rows))
        })?;
        finish(&copy, &mark)?;
        close(copy)?;
        temporary.rename(dest)?;
        Ok(PublishOutcome::Written { rows, whole: true })
    }
}

fn begin(copy: &Connection) -> Result<()> {
    copy.execute_batch("BEGIN").map_err(sqlite_error(WRITE))
}

/// Builds the index and commits. Not inside a transaction of the store: PostgreSQL would end a session that waits for it as idle.
fn finish(copy: &Connection, mark: &CopyVersion) -> Result<()> {
    copy.execute_batch(INDEX).map_err(sqlite_error(WRITE))?;
    write_mark(copy, mark)?;
    copy.execute_batch("COMMIT").map_err(sqlite_error(WRITE))
}

fn close(copy: Connection) -> Result<()> {
    copy.close().map_err(|(_, error)| sqlite_error(WRITE)(error))
}

/// Returns the number of publishable results ever counted.
fn publishable_count(tx: &mut Tx<'_>) -> Result<i64> {
    let sql = "SELECT CAST(SUM(passed + failed + inconclusive) AS BIGINT) FROM hourly_count";
    Ok(tx.first("reading counts", sql, &[], |row| row.opt_int(0))?.flatten().unwrap_or(0))
}

const WRITE: &str = "writing the published copy";

fn is_same_lineage(before: &CopyVersion, now: &CopyVersion) -> bool {
    before.store == now.store && before.rewrites == now.rewrites
}

fn current_version(tx: &mut Tx<'_>) -> Result<CopyVersion> {
    // Runs older than every pending one get no further results.
    let sql = "SELECT COALESCE((SELECT MIN(run) FROM pending_results), (SELECT MAX(id) + 1 FROM run))";
    let upto = tx.first("reading runs", sql, &[], |row| row.opt_int(0))?;
    Ok(CopyVersion {
        store: meta(tx, super::STORE_ID)?.unwrap_or_default(),
        changes: audit::read_counter(tx, Counter::HistoryChanges)?.cast_signed(),
        rewrites: audit::read_counter(tx, Counter::HistoryRewrites)?.cast_signed(),
        next_run: upto.flatten().unwrap_or(0),
        deleted: 0,
    })
}

/// Returns `None` if the file is missing or not a copy of ours.
fn read_version(dest: &Path) -> Option<CopyVersion> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let copy = Connection::open_with_flags_and_vfs(dest, flags, UNLOCKED_VFS).ok()?;
    copy.query_row("SELECT store, changes, rewrites, upto, forgotten FROM doctor_copy", (), |row| {
        Ok(CopyVersion {
            store: row.get(0)?,
            changes: row.get(1)?,
            rewrites: row.get(2)?,
            next_run: row.get(3)?,
            deleted: row.get(4)?,
        })
    })
    .ok()
}

fn write_mark(copy: &Connection, mark: &CopyVersion) -> Result<()> {
    copy.execute("DELETE FROM doctor_copy", ())
        .and_then(|_| {
            let sql = "INSERT INTO doctor_copy (store, changes, rewrites, upto, forgotten) VALUES (?1, ?2, ?3, ?4, ?5)";
            copy.execute(sql, (&mark.store, mark.changes, mark.rewrites, mark.next_run, mark.deleted))
        })
        .map(drop)
        .map_err(sqlite_error(WRITE))
}

/// Copies all of history, in an order that makes the index cheap to build.
fn copy_all(tx: &mut Tx<'_>, copy: &Connection) -> Result<u64> {
    copy.execute_batch(TABLES).map_err(sqlite_error(WRITE))?;
    let sql = "SELECT node, run, test, outcome, offset_ms FROM history ORDER BY node, run, test";
    copy_rows(tx, copy, sql, &[], "INSERT INTO runs (node, test, timestamp, result) VALUES (?1, ?2, ?3, ?4)")
}

/// Copies the rows of runs that were pending the last time, and of runs planned since.
fn copy_added(tx: &mut Tx<'_>, copy: &Connection, since: i64) -> Result<u64> {
    const INSERT: &str = "INSERT INTO runs (node, test, timestamp, result) SELECT ?1, ?2, ?3, ?4 WHERE NOT EXISTS \
                          (SELECT 1 FROM runs WHERE node = ?1 AND test = ?2 AND timestamp = ?3 AND result = ?4)";
    let sql = "SELECT h.node, h.run, h.test, h.outcome, h.offset_ms FROM run_node n \
               JOIN history h ON h.node = n.node AND h.run = n.run WHERE n.run >= $1";
    copy_rows(tx, copy, sql, vals![since], INSERT)
}

fn copy_rows(
    tx: &mut Tx<'_>,
    copy: &Connection,
    sql: &str,
    vals: &[super::db::SqlValue<'_>],
    insert: &str,
) -> Result<u64> {
    let names = Arc::clone(&tx.ids);
    let fail = sqlite_error(WRITE);
    let mut statement = copy.prepare(insert).map_err(&fail)?;
    let mut rows = 0;
    tx.rows("reading history", sql, vals, |row: &Row<'_>| {
        let kind = names.outcome(row.int(3)?)?;
        let is_published = !kind.untrusted && !kind.by_agent;
        let Some(verdict) = kind.verdict.seed_word().filter(|_| is_published) else { return Ok(()) };
        let at: Timestamp = result_time(row.run(1)?, row.int(4)?);
        let (node, test) = (names.node(row.int(0)?)?, names.test(row.int(2)?)?);
        rows += statement.execute((node.as_str(), test.as_str(), at.secs(), verdict)).map_err(&fail)? as u64;
        Ok(())
    })?;
    Ok(rows)
}

/// SQLite VFS without locks: a temporary file has one writer and no reader, and locks on a share may hang.
pub(super) const UNLOCKED_VFS: &str = "unix-none";

/// A temporary file beside the one it will replace. Dropping it deletes the file.
#[derive(Debug)]
pub(super) struct TemporaryFile {
    pub(super) path: PathBuf,
}

impl TemporaryFile {
    pub(super) fn beside(dest: &Path) -> Result<Self> {
        let name = dest.file_name().ok_or_else(|| StoreError::Refused {
            operation: "writing a file",
            why: format!("{} does not name a file", dest.display()),
        })?;
        let name = format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id());
        let temporary = Self { path: dest.with_file_name(name) };
        temporary.remove();
        Ok(temporary)
    }

    /// Opens the temporary file, created with default permissions; a caller that needs it private restricts it before writing.
    pub(super) fn open(&self) -> Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags_and_vfs(&self.path, flags, UNLOCKED_VFS).map_err(|error| {
            StoreError::CannotOpen { path: self.path.display().to_string(), why: error.to_string() }
        })?;
        connection
            .execute_batch(
                "PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; \
                 PRAGMA cache_size = -65536;",
            )
            .map_err(sqlite_error("setting up"))?;
        Ok(connection)
    }

    /// Syncs the file, renames it, then syncs the directory.
    pub(super) fn rename(self, dest: &Path) -> Result<()> {
        let synced = File::open(&self.path).and_then(|file| file.sync_all());
        synced.map_err(file_error("syncing", &self.path))?;
        std::fs::rename(&self.path, dest).map_err(file_error("replacing", dest))?;
        let folder = dest.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(file_error("syncing", folder))
    }

    fn remove(&self) {
        // Usually there is nothing to remove; if removal fails, the next write fails with a better message.
        drop(std::fs::remove_file(&self.path));
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        self.remove();
    }
}

pub(super) fn file_error(operation: &'static str, path: &Path) -> impl Fn(std::io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::File { operation, path: path.clone(), source }
}
