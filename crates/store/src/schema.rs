//! The database schema and its migrations.
//!
//! A migration is one numbered SQL script for both databases. Its statements never change after its release. Words in
//! braces stand for the few things that the databases spell differently.
//!
//! A program writes its own schema only: each write checks the number inside its transaction. It reads a newer schema if
//! the migration says that programs of this age read it correctly ([`Migration::readable_since`], which the store keeps
//! in `meta`), and an older one from [`READABLE_FROM`] on. See `docs/design/0018-who-migrates-the-store.md`.

use std::cmp::Ordering;

use super::{
    db::{Tx, vals},
    error::{Result, StoreError},
};

/// The schema of the first migration. Schemas 1 to 10 were those of development versions, which are rejected.
const FIRST: i64 = 11;

/// One step of the schema.
#[derive(Debug, Clone, Copy)]
pub struct Migration {
    /// The script, for both databases.
    pub sql: &'static str,
    /// The oldest schema whose programs read the result correctly. A migration that only adds keeps the number of the one
    /// before; one that moves, renames or reinterprets what older programs read sets it to its own number.
    pub readable_since: i64,
}

/// In order; the first takes an empty database to schema [`FIRST`].
const MIGRATIONS: [Migration; 3] = [
    Migration { sql: include_str!("migrations/0001.sql"), readable_since: FIRST },
    // It adds the table `job_output`.
    Migration { sql: include_str!("migrations/0002.sql"), readable_since: FIRST },
    // It replaces the table `ingest_queue`, which only controllers read.
    Migration { sql: include_str!("migrations/0003.sql"), readable_since: FIRST },
];

/// The oldest schema that this program reads without migrating it. What a command needs of a later schema is reported by
/// that command.
pub(super) const READABLE_FROM: i64 = FIRST;

/// Key in `meta` of the oldest schema whose programs read this store.
const READABLE_SINCE: &str = "schema-readable-since";
/// Key in `meta` of the version of the program that migrated or created the store.
const MIGRATED_BY: &str = "schema-migrated-by";
/// The advisory lock of PostgreSQL under which a schema is created or migrated.
const SCHEMA_LOCK: &str = "SELECT pg_advisory_xact_lock(7301117)";

/// The schema this program reads and writes.
pub(super) const LATEST_VERSION: i64 = FIRST + MIGRATIONS.len() as i64 - 1;

/// Every table, in an order that satisfies references on insert.
pub(super) const TABLES: [&str; 37] = [
    "meta",
    "counter",
    "node",
    "test",
    "outcome",
    "hardware",
    "run",
    "run_node",
    "job_output",
    "pending_results",
    "history",
    "latest_result",
    "agent_result",
    "hourly_count",
    "node_hours",
    "finding",
    "acknowledged_event",
    "measured_count",
    "case_record",
    "mute",
    "evidence",
    "evidence_pack",
    "ingest_queue",
    "cycle",
    "skip_reason",
    "audit_log",
    "node_taken_out",
    "operator_command",
    "pause",
    "lease",
    "agent",
    "token",
    "job_failure",
    "alert_message",
    "alert_note",
    "alert_condition",
    "cluster_state",
];

/// Tables whose ids the database generates.
pub(super) const TABLES_WITH_SERIAL_ID: [&str; 8] =
    ["node", "test", "outcome", "cycle", "audit_log", "operator_command", "alert_message", "alert_note"];

/// The migrations that a handle of the store knows: those of this program, and in tests those of an invented later one.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SchemaHistory {
    later: &'static [Migration],
}

impl SchemaHistory {
    /// The schema of this program.
    pub(super) const CURRENT: Self = Self { later: &[] };

    /// The schema of a later program, for tests.
    pub(super) const fn followed_by(later: &'static [Migration]) -> Self {
        Self { later }
    }

    /// The schema that is read and written.
    pub(super) const fn latest(self) -> i64 {
        LATEST_VERSION + self.later.len() as i64
    }

    fn steps(self) -> impl Iterator<Item = (i64, Migration)> {
        (FIRST..).zip(MIGRATIONS.into_iter().chain(self.later.iter().copied()))
    }
}

/// Takes the lock under which the schema is created or migrated, until the transaction ends. SQLite has one writer.
pub(super) fn lock(tx: &mut Tx<'_>) -> Result<()> {
    if !tx.is_sqlite() {
        // Two programs that open an empty database concurrently must not both create the tables.
        tx.execute("locking the schema", SCHEMA_LOCK, &[]).map_err(|error| match error.is_lock_timeout() {
            true => StoreError::SchemaLocked,
            false => error,
        })?;
    }
    Ok(())
}

/// Creates the schema in an empty database. A store that has this schema already is accepted, any other is refused and
/// stays as it is.
pub(super) fn create_or_check(tx: &mut Tx<'_>, history: SchemaHistory) -> Result<()> {
    lock(tx)?;
    match find(tx)? {
        None => apply(tx, history, history.latest(), None),
        Some(found) => check_writable(tx, history, found),
    }
}

/// Migrates a store, or creates one, to the latest schema. Fails on a schema that this program would misread.
pub(super) fn migrate(tx: &mut Tx<'_>, history: SchemaHistory) -> Result<()> {
    create_at(tx, history, history.latest())
}

/// As [`migrate`], to a schema that may be older: for a copy of a store that is not migrated yet.
pub(super) fn create_at(tx: &mut Tx<'_>, history: SchemaHistory, target: i64) -> Result<()> {
    lock(tx)?;
    let found = find(tx)?;
    match found {
        Some(found) if found < FIRST => Err(StoreError::OldSchema { found }),
        Some(found) if found > history.latest() => Err(newer(tx, history, found)),
        _ => apply(tx, history, target, found),
    }
}

fn apply(tx: &mut Tx<'_>, history: SchemaHistory, target: i64, found: Option<i64>) -> Result<()> {
    let operation = "migrating the schema";
    tx.script(operation, "CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL PRIMARY KEY)")?;
    let mut readable_since = FIRST;
    let mut changed = false;
    for (number, migration) in history.steps().take_while(|(number, _)| *number <= target) {
        readable_since = readable_since.max(migration.readable_since);
        if found >= Some(number) {
            continue;
        }
        tx.script(operation, &for_database(migration.sql, tx.is_sqlite()))?;
        tx.execute(operation, "INSERT INTO schema_version (version) VALUES ($1)", vals![number])?;
        changed = true;
    }
    if changed {
        let since = readable_since.to_string();
        for (key, value) in [(READABLE_SINCE, since.as_str()), (MIGRATED_BY, env!("CARGO_PKG_VERSION"))] {
            let sql =
                "INSERT INTO meta (key, value) VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET value = excluded.value";
            tx.execute(operation, sql, vals![key, value])?;
        }
    }
    Ok(())
}

/// Fails unless this program may write a store of this schema, which is the case for its own schema only.
pub(super) fn check_writable(tx: &mut Tx<'_>, history: SchemaHistory, found: i64) -> Result<()> {
    match found.cmp(&history.latest()) {
        Ordering::Equal => Ok(()),
        Ordering::Less if found < FIRST => Err(StoreError::OldSchema { found }),
        Ordering::Less => Err(not_migrated(history, found)),
        Ordering::Greater => Err(newer(tx, history, found)),
    }
}

/// Fails unless this program reads a store of this schema correctly, as far as it can without what is missing in it.
pub(super) fn check_readable(tx: &mut Tx<'_>, history: SchemaHistory, found: i64) -> Result<()> {
    match found.cmp(&history.latest()) {
        Ordering::Equal => Ok(()),
        Ordering::Less if found < FIRST => Err(StoreError::OldSchema { found }),
        Ordering::Less if found < READABLE_FROM => Err(not_migrated(history, found)),
        Ordering::Less => Ok(()),
        Ordering::Greater => match setting(tx, READABLE_SINCE)?.and_then(|since| since.parse::<i64>().ok()) {
            Some(since) if since <= history.latest() => Ok(()),
            _ => Err(newer(tx, history, found)),
        },
    }
}

/// Fails unless a process that only reads can read this store. It creates and migrates nothing.
pub(super) fn check_existing(tx: &mut Tx<'_>, history: SchemaHistory) -> Result<()> {
    let found = find(tx)?.ok_or(StoreError::NoSchema)?;
    check_readable(tx, history, found)
}

/// Whether a controller of this program migrates a store of this schema, or needs not.
pub(super) const fn can_be_migrated(found: i64) -> bool {
    FIRST <= found && found <= LATEST_VERSION
}

/// The error for a store that has an older schema than is needed.
pub(super) const fn not_migrated(history: SchemaHistory, found: i64) -> StoreError {
    StoreError::NotMigrated { found, needed: history.latest() }
}

/// The error for a store that a newer program has migrated. It names that program if the store still says so.
pub(super) fn newer(tx: &mut Tx<'_>, history: SchemaHistory, found: i64) -> StoreError {
    // The newer program may keep it elsewhere.
    let by = setting(tx, MIGRATED_BY).ok().flatten();
    StoreError::NewerSchema { found, known: history.latest(), by }
}

/// Returns which program migrated or created the store, if it says so.
pub(super) fn migrated_by(tx: &mut Tx<'_>) -> Result<Option<String>> {
    setting(tx, MIGRATED_BY)
}

fn setting(tx: &mut Tx<'_>, key: &str) -> Result<Option<String>> {
    let sql = "SELECT value FROM meta WHERE key = $1";
    tx.first("reading the schema version", sql, vals![key], |row| Ok(row.text(0)?.to_owned()))
}

/// Returns the schema of a database that may be empty: `None`.
pub(super) fn find(tx: &mut Tx<'_>) -> Result<Option<i64>> {
    let exists = match tx.is_sqlite() {
        true => "SELECT 1 FROM sqlite_schema WHERE name = 'schema_version'",
        false => "SELECT 1 WHERE to_regclass('schema_version') IS NOT NULL",
    };
    match tx.first("reading the schema version", exists, &[], |_| Ok(()))? {
        Some(()) => version(tx),
        None => Ok(None),
    }
}

/// Returns `None` if the table has no row.
pub(super) fn version(tx: &mut Tx<'_>) -> Result<Option<i64>> {
    let sql = "SELECT MAX(version) FROM schema_version";
    Ok(tx.first("reading the schema version", sql, &[], |row| row.opt_int(0))?.flatten())
}

/// Returns the version once no migration runs any more, and keeps migrations out until the transaction ends. On PostgreSQL
/// a migration locks the table of the lease; SQLite has one writer.
pub(super) fn version_beside_migrations(tx: &mut Tx<'_>) -> Result<i64> {
    let lock = if tx.is_sqlite() { "" } else { " FOR KEY SHARE OF l" };
    let sql = format!("SELECT (SELECT MAX(version) FROM schema_version) FROM lease l WHERE l.id = 1{lock}");
    let found = tx.first("reading the schema version", &sql, &[], |row| row.opt_int(0))?;
    found.flatten().ok_or(StoreError::NoSchema)
}

fn for_database(text: &str, sqlite: bool) -> String {
    let placeholders: [(&str, &str, &str); 6] = [
        // The database generates the id.
        ("{serial}", "INTEGER PRIMARY KEY AUTOINCREMENT", "INTEGER GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY"),
        // The program supplies the id.
        ("{number}", "INTEGER", "BIGINT"),
        ("{ref}", "INTEGER", "INTEGER"),
        ("{blob}", "BLOB", "BYTEA"),
        // Small rows are stored in their index.
        ("{compact}", "WITHOUT ROWID", ""),
        // A line for PostgreSQL only; a comment for SQLite.
        ("{only-postgres}", "--", ""),
    ];
    placeholders.iter().fold(text.to_owned(), |text, (placeholder, for_sqlite, for_postgres)| {
        text.replace(placeholder, if sqlite { for_sqlite } else { for_postgres })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::Conn;

    #[test]
    fn every_table_of_the_schema_is_in_the_backup_list() {
        let all = MIGRATIONS.map(|migration| migration.sql).concat();
        let mut created: Vec<&str> = all
            .lines()
            .filter_map(|line| line.strip_prefix("CREATE TABLE "))
            .map(|rest| rest.split([' ', '(']).next().unwrap())
            .collect();
        let mut listed = TABLES.to_vec();
        created.sort_unstable();
        // A later migration may create a table anew.
        created.dedup();
        listed.sort_unstable();
        assert_eq!(created, listed);
        for table in TABLES_WITH_SERIAL_ID {
            assert!(all.contains(&format!("CREATE TABLE {table} (")) && TABLES.contains(&table), "{table}");
        }
    }

    fn migrate(database: &rusqlite::Connection) -> Result<()> {
        super::migrate(&mut Tx::new(Conn::Sqlite(database), std::sync::Arc::default()), SchemaHistory::CURRENT)
    }

    /// Returns an empty database, or one that says it has this schema.
    fn database(version: Option<i64>) -> rusqlite::Connection {
        let database = rusqlite::Connection::open_in_memory().unwrap();
        if let Some(version) = version {
            let tables = "CREATE TABLE schema_version (version BIGINT); CREATE TABLE node (id INTEGER)";
            database.execute_batch(tables).unwrap();
            database.execute("INSERT INTO schema_version (version) VALUES (?1)", [version]).unwrap();
        }
        database
    }

    #[test]
    fn an_empty_database_gets_the_schema_once() {
        let database = database(None);
        let mut tx = Tx::new(Conn::Sqlite(&database), std::sync::Arc::default());
        for _ in 0..2 {
            migrate(&database).unwrap();
            assert_eq!(version(&mut tx).unwrap(), Some(LATEST_VERSION));
        }
        for table in TABLES {
            tx.all("test", &format!("SELECT 1 FROM {table}"), &[], |_| Ok(())).unwrap();
        }
    }

    #[test]
    fn a_store_of_the_first_release_is_migrated() {
        let database = database(None);
        database.execute_batch("CREATE TABLE schema_version (version BIGINT NOT NULL PRIMARY KEY)").unwrap();
        database.execute_batch(&for_database(MIGRATIONS[0].sql, true)).unwrap();
        database.execute("INSERT INTO schema_version (version) VALUES (?1)", [FIRST]).unwrap();
        migrate(&database).unwrap();
        let mut tx = Tx::new(Conn::Sqlite(&database), std::sync::Arc::default());
        assert_eq!(version(&mut tx).unwrap(), Some(LATEST_VERSION));
        tx.all("test", "SELECT run, node, at, ending, text FROM job_output", &[], |_| Ok(())).unwrap();
        tx.all("test", "SELECT id, node, run, received, body FROM ingest_queue", &[], |_| Ok(())).unwrap();
        tx.all("test", "SELECT run, node, queued FROM pending_results", &[], |_| Ok(())).unwrap();
    }

    #[test]
    fn a_store_of_a_development_version_is_rejected_with_instructions() {
        for found in [1, 10] {
            let database = database(Some(found));
            let error = migrate(&database).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "the store has schema {found} of a development version, which this program cannot read: move the \
                     SQLite file away (or create an empty PostgreSQL database) and start again"
                )
            );
            let tables = "SELECT COUNT(*) FROM sqlite_schema WHERE type = 'table'";
            assert_eq!(database.query_row(tables, (), |row| row.get::<_, i64>(0)).unwrap(), 2, "it is unchanged");
        }
    }

    #[test]
    fn a_store_of_a_newer_program_is_rejected() {
        let error = migrate(&database(Some(LATEST_VERSION + 1))).unwrap_err();
        assert!(matches!(error, StoreError::NewerSchema { known: LATEST_VERSION, .. }), "{error}");
    }

    #[test]
    fn a_writer_accepts_its_own_schema_only_and_a_reader_what_it_reads_correctly() {
        let check = |database: &rusqlite::Connection, found: i64| {
            let mut tx = Tx::new(Conn::Sqlite(database), std::sync::Arc::default());
            let writes = check_writable(&mut tx, SchemaHistory::CURRENT, found);
            (writes, check_readable(&mut tx, SchemaHistory::CURRENT, found))
        };
        let store = database(None);
        let mut tx = Tx::new(Conn::Sqlite(&store), std::sync::Arc::default());
        assert!(matches!(check_existing(&mut tx, SchemaHistory::CURRENT), Err(StoreError::NoSchema)));
        migrate(&store).unwrap();
        check_existing(&mut tx, SchemaHistory::CURRENT).unwrap();
        assert!(matches!(check(&store, LATEST_VERSION), (Ok(()), Ok(()))));
        assert!(matches!(check(&store, FIRST), (Err(StoreError::NotMigrated { found: FIRST, .. }), Ok(()))));
        let below = check(&store, FIRST - 1);
        assert!(matches!(below, (Err(StoreError::OldSchema { .. }), Err(StoreError::OldSchema { .. }))));
        let since = |number: i64| {
            let sql = "UPDATE meta SET value = ?1 WHERE key = 'schema-readable-since'";
            assert_eq!(store.execute(sql, [number.to_string()]).unwrap(), 1);
        };
        since(LATEST_VERSION);
        assert!(matches!(check(&store, LATEST_VERSION + 2), (Err(StoreError::NewerSchema { .. }), Ok(()))));
        since(LATEST_VERSION + 1);
        let (writes, reads) = check(&store, LATEST_VERSION + 2);
        let by = Some(env!("CARGO_PKG_VERSION").to_owned());
        for error in [writes.unwrap_err(), reads.unwrap_err()] {
            assert!(matches!(&error, StoreError::NewerSchema { by: named, .. } if *named == by), "{error}");
        }
    }

    #[test]
    fn the_number_of_the_readable_schema_is_that_of_the_strictest_migration() {
        const LATER: &[Migration] = &[
            Migration { sql: "ALTER TABLE pause RENAME TO stopped", readable_since: LATEST_VERSION + 1 },
            Migration { sql: "ALTER TABLE stopped ADD COLUMN x TEXT", readable_since: FIRST },
        ];
        let database = database(None);
        let mut tx = Tx::new(Conn::Sqlite(&database), std::sync::Arc::default());
        super::migrate(&mut tx, SchemaHistory::followed_by(LATER)).unwrap();
        assert_eq!(version(&mut tx).unwrap(), Some(LATEST_VERSION + 2));
        assert_eq!(setting(&mut tx, READABLE_SINCE).unwrap(), Some((LATEST_VERSION + 1).to_string()));
        for migration in MIGRATIONS {
            assert!((FIRST..=LATEST_VERSION).contains(&migration.readable_since));
        }
    }

    #[test]
    fn no_placeholder_is_left_in_the_schema_text() {
        for text in MIGRATIONS {
            for sqlite in [true, false] {
                assert!(!for_database(text.sql, sqlite).contains(['{', '}']));
            }
        }
    }
}
