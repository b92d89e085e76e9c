//! Judges whether a store can be opened, and reads what is known of it, without creating, migrating or changing it.

use std::{path::Path, sync::Arc};

use doctor_core::time::Timestamp;

use super::{
    Store,
    db::{Access, Conn, Db, Tx, check_postgres_url, check_sqlite_writable, probe_sqlite},
    error::{Result, StoreError},
    fencing,
    schema::{self, LATEST_VERSION, SchemaHistory},
    url::StoreUrl,
};

/// What opening a store would find.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreProbe {
    /// `None`: the store is empty or does not exist, and opening creates it.
    pub schema: Option<i64>,
    /// The version of the program that created or migrated the store, if the store says so.
    pub migrated_by: Option<String>,
    /// Whether the API has a token.
    pub has_tokens: bool,
    /// The leader and when its lease expires; `None` if the lease is free.
    pub leader: Option<(String, Timestamp)>,
}

impl StoreProbe {
    /// Whether opening the store changes nothing in its schema.
    pub fn is_current(&self) -> bool {
        self.schema == Some(LATEST_VERSION)
    }

    /// The error of a store that this program cannot migrate.
    fn foreign_schema(&self, found: i64) -> StoreError {
        match found > LATEST_VERSION {
            true => StoreError::NewerSchema { found, known: LATEST_VERSION, by: self.migrated_by.clone() },
            false => StoreError::OldSchema { found },
        }
    }
}

/// Whether the store is to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Read,
    Write,
}

impl Store {
    /// The schema that this program reads and writes.
    pub const SCHEMA: i64 = LATEST_VERSION;

    /// Checks what can be known of a URL without connecting.
    ///
    /// # Errors
    /// If it is not a valid URL of the database, or requires what this build does not support.
    pub fn check_url(url: &StoreUrl) -> Result<()> {
        match url {
            StoreUrl::Sqlite(_) => Ok(()),
            StoreUrl::Postgres(text) => check_postgres_url(text, &url.to_string()),
        }
    }

    /// Checks that [`Store::open_to_lead`] would accept this store.
    ///
    /// # Errors
    /// Those of [`Store::open_to_lead`].
    pub fn probe(url: &StoreUrl) -> Result<StoreProbe> {
        let probe = look(url, Purpose::Write)?;
        match probe.schema {
            Some(found) if !schema::can_be_migrated(found) => Err(probe.foreign_schema(found)),
            _ => Ok(probe),
        }
    }

    /// Reads what is known of a store, which may have any schema and need not be writable.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn peek(url: &StoreUrl) -> Result<StoreProbe> {
        look(url, Purpose::Read)
    }
}

fn look(url: &StoreUrl, purpose: Purpose) -> Result<StoreProbe> {
    match url {
        StoreUrl::Sqlite(path) => probe_file(path, purpose),
        StoreUrl::Postgres(_) => probe_server(url, purpose),
    }
}

fn probe_file(path: &Path, purpose: Purpose) -> Result<StoreProbe> {
    let connection = probe_sqlite(path)?;
    if purpose == Purpose::Write {
        check_sqlite_writable(path)?;
    }
    let Some(connection) = connection else { return Ok(StoreProbe::default()) };
    let mut tx = Tx::new(Conn::Sqlite(&connection), Arc::default());
    read_probe(&mut tx, "SELECT 1 FROM sqlite_schema WHERE name = 'schema_version'")
}

fn probe_server(url: &StoreUrl, purpose: Purpose) -> Result<StoreProbe> {
    let db = Db::open(url)?;
    let mut probe = StoreProbe::default();
    db.transaction(Access::Read, None, &mut Arc::default(), &mut |tx| {
        let sql = "SELECT 1 WHERE pg_is_in_recovery() OR current_setting('default_transaction_read_only') = 'on'";
        refuse_unless(url, "it is read-only: name the primary server", purpose == Purpose::Read || !holds(tx, sql)?)?;
        probe = read_probe(tx, "SELECT 1 WHERE to_regclass('schema_version') IS NOT NULL")?;
        let sql = "SELECT 1 WHERE has_schema_privilege(current_schema(), 'CREATE')";
        let may_create = purpose == Purpose::Read || probe.schema.is_some() || holds(tx, sql)?;
        refuse_unless(url, "it is empty, and this user may not create tables in it", may_create)
    })?;
    Ok(probe)
}

/// `has_schema` returns a row if the store has a schema.
fn read_probe(tx: &mut Tx<'_>, has_schema: &str) -> Result<StoreProbe> {
    if !holds(tx, has_schema)? {
        return Ok(StoreProbe::default());
    }
    let schema = schema::version(tx)?;
    // A store of a development version, or one that holds only its number, has no such table.
    let migrated_by = schema.filter(|found| *found >= schema::READABLE_FROM);
    let migrated_by = migrated_by.and_then(|_| schema::migrated_by(tx).ok()).flatten();
    let known = StoreProbe { schema, migrated_by, ..StoreProbe::default() };
    if schema.is_none_or(|found| schema::check_readable(tx, SchemaHistory::CURRENT, found).is_err()) {
        return Ok(known);
    }
    let has_tokens = holds(tx, "SELECT 1 FROM token LIMIT 1")?;
    let lease = fencing::read(tx)?;
    let leader = (!lease.holder.is_empty()).then_some((lease.holder, lease.expires));
    Ok(StoreProbe { has_tokens, leader, ..known })
}

fn holds(tx: &mut Tx<'_>, sql: &str) -> Result<bool> {
    Ok(tx.first("looking at the store", sql, &[], |_| Ok(()))?.is_some())
}

fn refuse_unless(url: &StoreUrl, why: &str, holds: bool) -> Result<()> {
    match holds {
        true => Ok(()),
        false => Err(StoreError::CannotOpen { path: url.to_string(), why: why.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn looking_at_a_store_creates_and_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("100% of it.db");
        let url = StoreUrl::Sqlite(path.clone());
        assert_eq!(Store::probe(&url).unwrap(), StoreProbe::default());
        assert!(names(folder.path()).is_empty());

        drop(Store::open(&url).unwrap());
        let before = (names(folder.path()), std::fs::read(&path).unwrap());
        let probe = Store::probe(&url).unwrap();
        assert!(probe.is_current() && !probe.has_tokens && probe.leader.is_none(), "{probe:?}");
        assert_eq!((names(folder.path()), std::fs::read(&path).unwrap()), before);
    }

    /// The shared lock tells other processes that the database is in use: without it one of them could end the log while this
    /// process writes.
    #[test]
    fn looking_at_a_store_that_this_process_has_open_keeps_its_lock() {
        use std::os::unix::fs::MetadataExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("doctor.db");
        let url = StoreUrl::Sqlite(path.clone());
        let store = Store::open(&url).unwrap();
        let inode = format!(":{}", std::fs::metadata(&path).unwrap().ino());
        let is_locked = || {
            let locks = std::fs::read_to_string("/proc/locks").unwrap();
            locks.lines().any(|lock| lock.split_whitespace().any(|field| field.ends_with(&inode)))
        };
        assert!(is_locked());
        assert!(Store::peek(&url).unwrap().is_current() && is_locked());
        assert!(Store::probe(&url).unwrap().is_current() && is_locked());
        drop(Store::open_to_read(&url).unwrap());
        assert!(is_locked());
        drop(Store::open(&url).unwrap());
        assert!(is_locked());
        drop(store);
        assert!(!is_locked());
    }

    #[test]
    fn a_store_that_opening_would_refuse_is_refused_in_the_same_words() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("text.db"), "this is no database").unwrap();
        std::fs::create_dir(at("folder.db")).unwrap();
        let newer = rusqlite::Connection::open(at("newer.db")).unwrap();
        newer
            .execute_batch("CREATE TABLE schema_version (version BIGINT); INSERT INTO schema_version VALUES (99)")
            .unwrap();
        drop(newer);
        for name in ["text.db", "folder.db", "newer.db", "missing/x.db", "text.db/x.db"] {
            let url = StoreUrl::Sqlite(at(name));
            let (probed, opened) = (Store::probe(&url).unwrap_err(), Store::open(&url).unwrap_err());
            assert_eq!(probed.to_string(), opened.to_string(), "{name}");
        }
    }
}
