//! Backup and restore. A backup is always a SQLite file with the store's schema, so it can be restored into either
//! database.

use std::{
    ffi::c_int,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use rusqlite::{
    Connection, OptionalExtension,
    backup::{Backup, StepResult},
};

use super::{
    Store,
    audit::{self, Counter},
    db::{Access, ColumnType, Conn, SqlValue, Tx, open_read_only, sqlite_error, vals},
    error::{Result, StoreError},
    id_cache::IdCache,
    migration_backup::Advanced,
    publish::TemporaryFile,
    schema::{self, SchemaHistory},
};

/// Rows sent to PostgreSQL at a time.
const ROWS: usize = 1000;
/// Pages of a step where a copy has steps: 16 MB, which a slow disk writes in seconds.
const STEP_PAGES: c_int = 4096;
/// How long a copy waits for a database that is locked. Only a recovery of its log locks it, which takes seconds.
const BUSY_LIMIT: Duration = Duration::from_secs(30);

impl Store {
    /// Writes the whole store into a new file. The file appears complete or not at all.
    pub fn backup(&self, dest: &Path) -> Result<()> {
        if dest.exists() {
            let why = format!("{} exists already: name a new file", dest.display());
            return Err(StoreError::Refused { operation: "backing up", why });
        }
        let temporary = TemporaryFile::beside(dest)?;
        let mut copy = temporary.open()?;
        restrict(&temporary.path)?;
        match self.shared.db.with_sqlite(|live| copy_pages(live, &mut copy)) {
            Some(copied) => copied?,
            None => self.export(&copy)?,
        }
        copy.close().map_err(|(_, error)| sqlite_error("closing the backup")(error))?;
        temporary.rename(dest)
    }

    /// Restores a backup into this store, which must be empty.
    pub fn restore(&self, from: &Path) -> Result<()> {
        let source = open_backup(from, self.shared.schema)?;
        self.write_unfenced(Access::WriteExclusive, |tx| {
            tx.lift_statement_timeout()?;
            refuse_unless_empty(tx)?;
            let mut from = Tx::new(Conn::Sqlite(&source), Arc::default());
            for table in schema::TABLES {
                let columns = columns_of(&source, table)?;
                tx.execute("restoring", &format!("DELETE FROM {table}"), &[])?;
                copy_table(&mut from, tx, table, &columns, &mut || Ok(()))?;
            }
            reset_sequences(tx)?;
            // The leader at backup time does not lead here.
            tx.execute("restoring", "UPDATE lease SET holder = '', expires = 0, fence = fence + 1", &[])?;
            audit::add_counts(
                tx,
                &[(Counter::HistoryRewrites, 1), (Counter::HistoryChanges, 1), (Counter::OperatorChanges, 1)],
            )?;
            // Name ids were replaced, so the transaction's cached names are invalid.
            tx.ids = Arc::new(IdCache::default());
            tx.refresh_ids()
        })
    }

    fn export(&self, copy: &Connection) -> Result<()> {
        self.read(|tx| {
            let found = tx.schema;
            export_as(tx, copy, self.shared.schema, found, &mut || Ok(()))
        })
    }
}

/// Copies all tables of a store that has this schema, which may be older, into an empty SQLite database. Reports each part
/// of a table.
pub(super) fn export_as(
    tx: &mut Tx<'_>,
    copy: &Connection,
    history: SchemaHistory,
    found: i64,
    advanced: Advanced<'_>,
) -> Result<()> {
    if found > history.latest() {
        // It may have columns that this program does not know.
        return Err(schema::newer(tx, history, found));
    }
    copy.execute_batch("BEGIN").map_err(sqlite_error("exporting"))?;
    let mut to = Tx::new(Conn::Sqlite(copy), Arc::default());
    schema::create_at(&mut to, history, found)?;
    for table in tables_of(copy)? {
        // The migrations have written the lease, and who wrote the schema.
        to.execute("exporting", &format!("DELETE FROM {table}"), &[])?;
        let columns = columns_of(copy, &table)?;
        copy_table(tx, &mut to, &table, &columns, advanced)?;
    }
    copy.execute_batch("COMMIT").map_err(sqlite_error("exporting"))
}

/// Returns the tables of a SQLite store in an order that satisfies references on insert: known tables first.
fn tables_of(copy: &Connection) -> Result<Vec<String>> {
    let fail = sqlite_error("reading the schema");
    let sql =
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' AND name <> 'schema_version'";
    let mut statement = copy.prepare(sql).map_err(&fail)?;
    let mut names: Vec<String> =
        statement.query_map((), |row| row.get(0)).and_then(Iterator::collect).map_err(&fail)?;
    let place = |name: &str| schema::TABLES.iter().position(|table| *table == name).unwrap_or(schema::TABLES.len());
    names.sort_by_key(|name| place(name));
    Ok(names)
}

/// Restricts the file to its owner: a backup contains the keys of active runs.
fn restrict(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let owner_only = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(path, owner_only).map_err(super::publish::file_error("restricting", path))
}

/// Copies a SQLite database as of now. All pages are one step: SQLite begins again with a copy in steps whenever another
/// connection writes, and a controller always does. Writers proceed meanwhile.
pub(super) fn copy_pages(live: &Connection, copy: &mut Connection) -> Result<()> {
    const ALL: c_int = -1;
    copy_by_steps_of(ALL, live, copy, BUSY_LIMIT, &mut || Ok(()))
}

/// As [`copy_pages`], in steps that are reported. Only for a caller that keeps all other connections from writing.
pub(super) fn copy_in_steps(live: &Connection, copy: &mut Connection, advanced: Advanced<'_>) -> Result<()> {
    copy_by_steps_of(STEP_PAGES, live, copy, BUSY_LIMIT, advanced)
}

fn copy_by_steps_of(
    pages: c_int,
    live: &Connection,
    copy: &mut Connection,
    busy_limit: Duration,
    advanced: Advanced<'_>,
) -> Result<()> {
    /// Between attempts while the database is locked.
    const PAUSE: Duration = Duration::from_millis(20);
    let fail = sqlite_error("backing up");
    {
        let backup = Backup::new(live, copy).map_err(&fail)?;
        let mut busy_since = None;
        loop {
            match backup.step(pages).map_err(&fail)? {
                StepResult::Done => break,
                StepResult::More => {
                    busy_since = None;
                    advanced()?;
                }
                // Busy or locked.
                _ => {
                    if busy_since.get_or_insert_with(Instant::now).elapsed() >= busy_limit {
                        let busy = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_BUSY);
                        return Err(fail(rusqlite::Error::SqliteFailure(busy, None)));
                    }
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }
    // A single file, without a write-ahead log beside it.
    copy.query_row("PRAGMA journal_mode = DELETE", (), |_| Ok(())).map_err(&fail)?;
    advanced()
}

/// Opens and checks a backup. An older one is migrated in memory; the file is unchanged.
fn open_backup(path: &Path, history: SchemaHistory) -> Result<Connection> {
    let damaged = |why: String| StoreError::Damaged { path: path.to_owned(), why };
    let no_store = || damaged("it is a SQLite database but not a backup of a store".to_owned());
    let file = open_read_only(path)?;
    let checked: rusqlite::Result<String> = file.query_row("PRAGMA quick_check(1)", (), |row| row.get(0));
    match checked {
        Ok(answer) if answer == "ok" => {}
        Ok(answer) => return Err(damaged(answer)),
        Err(error) => return Err(damaged(error.to_string())),
    }
    let version: Option<i64> = file
        .query_row("SELECT MAX(version) FROM schema_version", (), |row| row.get(0))
        .optional()
        .map_err(|_| no_store())?
        .flatten();
    let version = version.ok_or_else(no_store)?;
    if version == history.latest() {
        return Ok(file);
    }
    match schema::check_writable(&mut Tx::new(Conn::Sqlite(&file), Arc::default()), history, version) {
        Err(error) if !error.awaits_migration() => return Err(error),
        _ => {}
    }
    let mut memory = Connection::open_in_memory().map_err(sqlite_error("restoring"))?;
    copy_pages(&file, &mut memory)?;
    schema::migrate(&mut Tx::new(Conn::Sqlite(&memory), Arc::default()), history)?;
    Ok(memory)
}

fn refuse_unless_empty(tx: &mut Tx<'_>) -> Result<()> {
    for table in ["node", "run", "history", "case_record"] {
        let sql = format!("SELECT 1 FROM {table} LIMIT 1");
        if tx.first("restoring", &sql, &[], |_| Ok(()))?.is_some() {
            let why = "this store is not empty: restore into a new store, then replace this one".to_owned();
            return Err(StoreError::Refused { operation: "restoring", why });
        }
    }
    Ok(())
}

fn columns_of(sqlite: &Connection, table: &str) -> Result<Vec<(String, ColumnType)>> {
    let fail = sqlite_error("reading the schema");
    let mut statement = sqlite.prepare(&format!("PRAGMA table_info({table})")).map_err(&fail)?;
    let columns = statement.query_map((), |row| {
        let kind = match row.get::<_, String>(2)?.as_str() {
            "TEXT" => ColumnType::Text,
            "BLOB" => ColumnType::Blob,
            _ => ColumnType::Int,
        };
        Ok((row.get(1)?, kind))
    });
    columns.and_then(Iterator::collect).map_err(&fail)
}

/// A value in transit between two databases.
enum OwnedValue {
    Null,
    Int(i64),
    Text(String),
    Blob(Vec<u8>),
}

impl OwnedValue {
    fn as_val(&self) -> SqlValue<'_> {
        match self {
            Self::Null => SqlValue::Null,
            Self::Int(number) => SqlValue::Int(*number),
            Self::Text(text) => SqlValue::Text(text),
            Self::Blob(bytes) => SqlValue::Blob(bytes),
        }
    }
}

impl From<SqlValue<'_>> for OwnedValue {
    fn from(val: SqlValue<'_>) -> Self {
        match val {
            SqlValue::Null => Self::Null,
            SqlValue::Int(number) => Self::Int(number),
            SqlValue::Text(text) => Self::Text(text.to_owned()),
            SqlValue::Blob(bytes) => Self::Blob(bytes.to_vec()),
        }
    }
}

fn copy_table(
    from: &mut Tx<'_>,
    to: &mut Tx<'_>,
    table: &str,
    columns: &[(String, ColumnType)],
    advanced: Advanced<'_>,
) -> Result<()> {
    let names: Vec<&str> = columns.iter().map(|(name, _)| name.as_str()).collect();
    let kinds: Vec<ColumnType> = columns.iter().map(|(_, kind)| *kind).collect();
    let names = names.join(", ");
    let into = format!("{table} ({names})");
    let mut waiting: Vec<OwnedValue> = Vec::new();
    let mut send = |waiting: &mut Vec<OwnedValue>| {
        let rows: Vec<SqlValue<'_>> = waiting.iter().map(OwnedValue::as_val).collect();
        to.insert_many("copying a table", &into, &kinds, &rows, "")?;
        waiting.clear();
        advanced()
    };
    from.rows("copying a table", &format!("SELECT {names} FROM {table}"), &[], |row| {
        for column in 0..kinds.len() {
            waiting.push(row.any(column)?.into());
        }
        if waiting.len() >= ROWS * kinds.len() { send(&mut waiting) } else { Ok(()) }
    })?;
    send(&mut waiting)
}

/// Sets PostgreSQL's sequences to continue after the restored ids.
fn reset_sequences(tx: &mut Tx<'_>) -> Result<()> {
    if tx.is_sqlite() {
        return Ok(());
    }
    for table in schema::TABLES_WITH_SERIAL_ID {
        let sql = format!(
            "SELECT setval(pg_get_serial_sequence($1, 'id'), (SELECT COALESCE(MAX(id), 0) + 1 FROM {table}), false)"
        );
        tx.first("restoring", &sql, vals![table], |_| Ok(()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_database_that_stays_locked_is_not_waited_for_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("live.db");
        let owner = Connection::open(&path).unwrap();
        owner.execute_batch("CREATE TABLE t (x); BEGIN EXCLUSIVE").unwrap();
        let live = Connection::open(&path).unwrap();
        live.busy_timeout(Duration::ZERO).unwrap();
        let mut copy = Connection::open_in_memory().unwrap();
        let error = copy_by_steps_of(1, &live, &mut copy, Duration::from_millis(50), &mut || Ok(())).unwrap_err();
        let StoreError::Sqlite { source, .. } = &error else { panic!("{error}") };
        assert_eq!(source.sqlite_error_code(), Some(rusqlite::ErrorCode::DatabaseBusy), "{source}");
        owner.execute_batch("COMMIT").unwrap();
        let mut parts = 0;
        let mut count = || {
            parts += 1;
            Ok(())
        };
        copy_by_steps_of(1, &live, &mut copy, Duration::from_secs(60), &mut count).unwrap();
        assert!(parts > 1, "each step is reported");
    }
}
