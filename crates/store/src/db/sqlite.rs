//! SQLite connections, the default: one file on a local disk, or memory for tests and simulations.

use std::{
    ffi::OsString,
    fs::File,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use rusqlite::{Connection, FileControl, OpenFlags, config::DbConfig};

use super::{Access, Body, Conn, Tx, sqlite_error};
use crate::{
    error::{Result, StoreError},
    id_cache::IdCache,
};

/// How long a statement waits for the one writer.
pub(crate) const BUSY: Duration = Duration::from_secs(5);
/// A file up to this size is fully checked before it is opened, in a fraction of a second. `doctor db verify` checks a
/// larger one, because every command opens the store.
const CHECKED_WHOLE_BYTES: u64 = 64 << 20;
/// SQLite VM instructions between checks of the deadline: a fraction of a millisecond.
const STEPS: i32 = 10_000;
/// Page cache of a reader, in KiB. There are several readers, and the kernel caches the file as well.
const READER_CACHE: i32 = 4096;
/// Prepared statements cached; the store has fewer.
const STATEMENTS: usize = 192;

const WRITABLE: &str = "it must be writable, and so must its directory";

/// A path checked to be fit for a live database.
#[derive(Debug)]
pub(crate) struct SqliteFile {
    path: PathBuf,
    /// The write-ahead log, opened on the first explicit sync. SQLite keeps the file while any connection is open.
    log: OnceLock<File>,
}

impl SqliteFile {
    /// Rejects a network file system, and an existing file that is not a sound database. Writes nothing.
    pub(super) fn check(path: &Path) -> Result<Self> {
        let file = Self::on_local_disk(path)?;
        if has_content(path)? {
            refuse_damaged(path)?;
        }
        Ok(file)
    }

    /// As [`Self::check`], for a process that only reads: an empty file is an error, and so is a file that this user cannot
    /// read without writing beside it.
    pub(super) fn check_for_reading(path: &Path) -> Result<Self> {
        let file = Self::on_local_disk(path)?;
        if !has_content(path)? {
            return Err(StoreError::NoSchema);
        }
        check_header(path)?;
        readable_without_writing(path)?;
        refuse_damaged(path)?;
        Ok(file)
    }

    fn on_local_disk(path: &Path) -> Result<Self> {
        check_folder(path)?;
        Ok(Self { path: path.to_owned(), log: OnceLock::new() })
    }

    /// Syncs the log, and with it every transaction committed before.
    pub(super) fn sync_log(&self) -> Result<()> {
        let path = log_of(&self.path);
        let fail = |source| StoreError::File { operation: "syncing", path: PathBuf::from(&path), source };
        let log = match self.log.get() {
            Some(log) => log,
            None => {
                let opened = File::open(&path).map_err(fail)?;
                self.log.get_or_init(|| opened)
            }
        };
        log.sync_data().map_err(fail)
    }

    pub(super) fn connect(&self) -> Result<Connection> {
        create_private(&self.path)?;
        let connection =
            Connection::open(&self.path).map_err(|error| cannot_open(&self.path, format!("{error}; {WRITABLE}")))?;
        if connection.is_readonly("main").map_err(sqlite_error("setting up"))? {
            return Err(cannot_open(&self.path, "it is read-only: give this user write access".to_owned()));
        }
        prepare(&connection)?;
        keep_log(&connection)?;
        // FULL, because results are durable when acknowledged. The log grows longer than usual between checkpoints,
        // because the same pages of `latest_result` are rewritten often. Under load most of a checkpoint runs beside
        // the writer (checkpoint.rs); this setting is where the writer does the rest. The page cache is small: SQLite
        // walks all of it in every commit that has split a page, and the kernel caches the file.
        connection
            .execute_batch(
                "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 16000; \
                 PRAGMA journal_size_limit = 67108864; PRAGMA cache_size = -8192;",
            )
            .map_err(sqlite_error("setting up"))?;
        Ok(connection)
    }

    pub(super) fn connect_reader(&self) -> Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(&self.path, flags)
            .map_err(|error| cannot_open(&self.path, error.to_string()))?;
        prepare(&connection)?;
        let small = format!("PRAGMA cache_size = -{READER_CACHE}");
        connection.execute_batch(&small).map_err(sqlite_error("setting up"))?;
        Ok(connection)
    }
}

/// Returns the directory of this file, which must exist on a local file system.
fn check_folder(path: &Path) -> Result<&Path> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if !folder.is_dir() {
        return Err(cannot_open(path, format!("there is no directory {}: create it first", folder.display())));
    }
    match network_file_system(folder)? {
        Some(kind) => Err(StoreError::NetworkFileSystem { path: path.to_owned(), kind }),
        None => Ok(folder),
    }
}

/// Opens a database to read it, and leaves no file behind. Without a write-ahead log no process has it open: it is read
/// without locks, because SQLite would otherwise create the log and its index. `None`: it does not exist or is empty.
///
/// # Errors
/// If opening it for writing would refuse it, unless that is for a lack of rights.
pub(crate) fn probe_sqlite(path: &Path) -> Result<Option<Connection>> {
    check_folder(path)?;
    if !has_content(path)? {
        return Ok(None);
    }
    if Path::new(&log_of(path)).exists() {
        refuse_damaged(path)?;
        return open_read_only(path).map(Some);
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_URI;
    let connection = Connection::open_with_flags(immutable_uri(path), flags);
    let connection = connection.map_err(|error| cannot_open(path, error.to_string()))?;
    let checked: rusqlite::Result<String> = connection.query_row(quick_check(path)?, (), |row| row.get(0));
    if !checked.is_ok_and(|output| output == "ok") {
        // Another process may have written meanwhile, so the check that takes locks decides.
        refuse_damaged(path)?;
        return open_read_only(path).map(Some);
    }
    Ok(Some(connection))
}

/// Checks that this user may write the file, if it exists, and its directory. Changes nothing.
///
/// # Errors
/// Those of opening it for writing.
pub(crate) fn check_sqlite_writable(path: &Path) -> Result<()> {
    let unwritable = |error: std::io::Error| cannot_open(path, format!("{error}; {WRITABLE}"));
    let check = |path: &Path, rights| rustix::fs::access(path, rights).map_err(|error| unwritable(error.into()));
    // The file is not opened: see `check_header`.
    if has_content(path)? {
        check(path, rustix::fs::Access::WRITE_OK)?;
    }
    check(check_folder(path)?, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK)
}

/// Returns the URI by which SQLite reads a file without locks.
fn immutable_uri(path: &Path) -> String {
    use std::{fmt::Write as _, os::unix::ffi::OsStrExt as _};
    let mut uri = "file:".to_owned();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'_' | b'-' => uri.push(char::from(*byte)),
            other => {
                let _infallible = write!(uri, "%{other:02X}");
            }
        }
    }
    uri + "?immutable=1"
}

/// Returns the statement that checks a database of this size, whose result is `ok`.
fn quick_check(path: &Path) -> Result<&'static str> {
    let bytes = std::fs::metadata(path).map_err(|error| cannot_open(path, error.to_string()))?.len();
    Ok(if bytes <= CHECKED_WHOLE_BYTES { "PRAGMA quick_check(1)" } else { "SELECT 'ok' FROM sqlite_schema LIMIT 1" })
}

/// Keeps the write-ahead log and its index when the last connection closes; the log is empty then. SQLite reads a
/// database through them, and a user without write permission cannot create them.
fn keep_log(connection: &Connection) -> Result<()> {
    let mut keep = 1;
    connection.file_control(Some("main"), FileControl::PersistWal(&mut keep)).map_err(sqlite_error("setting up"))
}

/// Returns the path of this database's write-ahead log.
fn log_of(path: &Path) -> OsString {
    beside(path, "-wal")
}

fn beside(path: &Path, suffix: &str) -> OsString {
    let mut name: OsString = path.as_os_str().to_owned();
    name.push(suffix);
    name
}

/// Fails if this user may not read the log and its index, or would have to create them and may not. Without them a
/// reader cannot know whether a controller writes at the same time: opening the file as immutable could return half a
/// change.
fn readable_without_writing(path: &Path) -> Result<()> {
    let read = open_read_only(path)?.query_row("SELECT COUNT(*) FROM sqlite_schema", (), |_| Ok(()));
    let Err(rusqlite::Error::SqliteFailure(error, _)) = read else { return Ok(()) };
    let (log, index) = (log_of(path), beside(path, "-shm"));
    let both_exist = Path::new(&log).exists() && Path::new(&index).exists();
    let names = format!("{} and {}", Path::new(&log).display(), Path::new(&index).display());
    let why = match error.code {
        rusqlite::ErrorCode::CannotOpen | rusqlite::ErrorCode::ReadOnly if both_exist => {
            format!("this user may not read {names}: give them the mode of the store")
        }
        rusqlite::ErrorCode::CannotOpen | rusqlite::ErrorCode::ReadOnly => format!(
            "this user may not create {names}, which are missing: start the controller, which keeps them, or run one \
             command as its user"
        ),
        // A log with a header and no content, which SQLite reads only after it has repaired it.
        rusqlite::ErrorCode::FileLockingProtocolFailed => format!(
            "a controller was killed when it began to write, and this user may not repair {names}: start the controller, or \
             run one command as its user"
        ),
        // The check for damage reports it.
        _ => return Ok(()),
    };
    Err(cannot_open(path, why))
}

/// Creates the file readable by its owner only: the store holds the keys of active runs. SQLite gives its log the same
/// mode.
fn create_private(path: &Path) -> Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    match File::options().write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(cannot_open(path, format!("{error}; {WRITABLE}")))
        }
        _ => Ok(()),
    }
}

fn cannot_open(path: &Path, why: String) -> StoreError {
    StoreError::CannotOpen { path: path.display().to_string(), why }
}

fn prepare(connection: &Connection) -> Result<()> {
    connection.set_prepared_statement_cache_capacity(STATEMENTS);
    connection.busy_timeout(BUSY).map_err(sqlite_error("setting up"))?;
    // Otherwise SQLite prepares a statement again whenever a value changes that its plan might depend on.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true).map_err(sqlite_error("setting up"))?;
    connection
        .execute_batch("PRAGMA foreign_keys = ON; PRAGMA temp_store = MEMORY;")
        .map_err(sqlite_error("setting up"))
}

pub(super) fn in_memory() -> Result<Connection> {
    let connection = Connection::open_in_memory().map_err(sqlite_error("opening a store in memory"))?;
    prepare(&connection)?;
    Ok(connection)
}

/// Opens a database read-only. Creates nothing.
pub(crate) fn open_read_only(path: &Path) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(|error| cannot_open(path, error.to_string()))?;
    connection.busy_timeout(BUSY).map_err(sqlite_error("setting up"))?;
    Ok(connection)
}

/// As [`transaction`], interrupted at the deadline.
pub(super) fn transaction_until(
    until: Option<Instant>,
    connection: &mut Connection,
    access: Access,
    names: &mut Arc<IdCache>,
    body: Body<'_>,
) -> Result<()> {
    let Some(until) = until else { return transaction(connection, access, names, body) };
    let set_up = sqlite_error("setting up");
    connection.progress_handler(STEPS, Some(move || Instant::now() >= until)).map_err(&set_up)?;
    let result = transaction(connection, access, names, body);
    connection.progress_handler(0, None::<fn() -> bool>).map_err(&set_up)?;
    result
}

pub(super) fn transaction(
    connection: &Connection,
    access: Access,
    names: &mut Arc<IdCache>,
    body: Body<'_>,
) -> Result<()> {
    if !connection.is_autocommit() {
        connection.execute_batch("ROLLBACK").map_err(sqlite_error("rolling back after a panic"))?;
        set_sync(connection, "FULL")?;
    }
    if !matches!(access, Access::Enqueue | Access::EnterQueued) {
        return attempt(connection, access, names, body);
    }
    set_sync(connection, "NORMAL")?;
    let result = attempt(connection, access, names, body);
    set_sync(connection, "FULL")?;
    result
}

/// Sets the sync level. SQLite applies this pragma when it parses the statement, not when it runs it, so a cached
/// statement would have no effect.
fn set_sync(connection: &Connection, level: &str) -> Result<()> {
    let sql = format!("PRAGMA synchronous = {level}");
    connection.execute_batch(&sql).map_err(sqlite_error("setting the sync mode"))
}

fn attempt(connection: &Connection, access: Access, names: &mut Arc<IdCache>, body: Body<'_>) -> Result<()> {
    let begin = match access {
        Access::ReadStatement => return body(&mut Tx::new(Conn::Sqlite(connection), Arc::clone(names))),
        Access::Read => "BEGIN",
        Access::Write | Access::Enqueue | Access::EnterQueued | Access::RenewLease | Access::WriteExclusive => {
            "BEGIN IMMEDIATE"
        }
    };
    run(connection, "beginning a transaction", begin)?;
    let mut tx = Tx::new(Conn::Sqlite(connection), Arc::clone(names));
    let result = body(&mut tx).and_then(|value| {
        run(connection, "committing", "COMMIT")?;
        Ok(value)
    });
    if result.is_ok() {
        *names = tx.ids;
    } else if !connection.is_autocommit() {
        // Report the first error. If the rollback fails, the check above rolls back before the next transaction.
        drop(connection.execute_batch("ROLLBACK"));
    }
    result
}

fn run(connection: &Connection, operation: &'static str, sql: &str) -> Result<()> {
    let fail = sqlite_error(operation);
    connection.prepare_cached(sql).and_then(|mut statement| statement.execute(())).map(drop).map_err(fail)
}

fn has_content(path: &Path) -> Result<bool> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(cannot_open(path, "it is a directory: name a file in it".to_owned())),
        Ok(found) => Ok(found.len() > 0),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(cannot_open(path, error.to_string())),
    }
}

/// Checks that the file starts as every SQLite database does. SQLite reads it: closing any other descriptor of the file drops all
/// locks that this process has on it, and another process would then take the database for unused.
fn check_header(path: &Path) -> Result<()> {
    let read = open_read_only(path)?.query_row("PRAGMA schema_version", (), |_| Ok(()));
    match read {
        Err(rusqlite::Error::SqliteFailure(error, _)) if error.code == rusqlite::ErrorCode::NotADatabase => {
            let why = "it does not start with the SQLite header".to_owned();
            Err(StoreError::Damaged { path: path.to_owned(), why })
        }
        // The other checks report it.
        _ => Ok(()),
    }
}

/// Rejects a file that is not a database or is damaged. SQLite would modify such a file when opening it for writing.
fn refuse_damaged(path: &Path) -> Result<()> {
    let damaged = |why: String| StoreError::Damaged { path: path.to_owned(), why };
    check_header(path)?;
    // The last writer's log is part of the database. Reading it needs its index, which a read-only open may not create;
    // then the check is left to the open for writing, which recovers the log first.
    let log = log_of(path);
    let connection = open_read_only(path)?;
    let checked: rusqlite::Result<String> = connection.query_row(quick_check(path)?, (), |row| row.get(0));
    match checked {
        Ok(output) if output == "ok" => Ok(()),
        Ok(output) => Err(damaged(output)),
        Err(rusqlite::Error::SqliteFailure(error, _))
            if error.code == rusqlite::ErrorCode::CannotOpen && Path::new(&log).exists() =>
        {
            Ok(())
        }
        Err(error) => Err(damaged(error.to_string())),
    }
}

/// File systems on which two hosts may open the file concurrently, or whose locks and fsync depend on a remote server.
/// Numbers are from the kernel's `magic.h` and the projects' own headers.
const NETWORK: [(u32, &str); 13] = [
    (0x6969, "NFS"),
    (0x517B, "SMB"),
    (0xFF53_4D42, "CIFS"),
    (0xFE53_4D42, "SMB2"),
    (0x0BD0_0BD0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x00C3_6400, "Ceph"),
    (0x6573_5546, "FUSE"),
    (0x5346_414F, "AFS"),
    (0x6B41_4653, "AFS"),
    (0x0102_1997, "9p"),
    (0x1983_0326, "BeeGFS"),
    (0x564C, "NCP"),
];

fn network_file_system(folder: &Path) -> Result<Option<&'static str>> {
    let found = rustix::fs::statfs(folder).map_err(|error| cannot_open(folder, error.to_string()))?;
    Ok(network_kind(found.f_type as u64))
}

/// Returns the network file system with this magic number. The kernel returns it in a signed machine word, of which
/// only the low 32 bits count.
fn network_kind(number: u64) -> Option<&'static str> {
    let low = u32::try_from(number & 0xFFFF_FFFF).expect("masked to 32 bits");
    NETWORK.iter().find(|(magic, _)| *magic == low).map(|(_, kind)| *kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_known_by_their_number_and_local_ones_are_not_among_them() {
        assert_eq!(network_kind(0x6969), Some("NFS"));
        // Sign-extended to 64 bits.
        assert_eq!(network_kind(0xFFFF_FFFF_FF53_4D42), Some("CIFS"));
        for (local, name) in [
            (0xEF53_u64, "ext4"),
            (0x5846_5342, "xfs"),
            (0x0102_1994, "tmpfs"),
            (0x794C_7630, "overlay"),
            (0x7461_636F, "ocfs2"),
            (0x9123_683E, "btrfs"),
            (0x2FC1_2FC1, "zfs"),
        ] {
            assert_eq!(network_kind(local), None, "{name}");
        }
    }
}
