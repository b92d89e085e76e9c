//! The backup before a migration: where it is written, and how it appears complete or not at all.
//!
//! A backup has the format of `doctor db backup` and the schema of the store before the migration, so that the older
//! program restores it. It is written under a temporary name and gets its own name directly before the migration commits.
//! A file of an earlier migration is never replaced.

use std::{
    fmt,
    fs::File,
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown},
    path::{Path, PathBuf},
};

use rusqlite::Connection;

use super::{
    db::{Tx, sqlite_error},
    error::{Result, StoreError},
    publish::{TemporaryFile, file_error},
    url::StoreUrl,
};

/// Space that must be left beside the backup: the migration itself writes, and so does the controller after it.
const RESERVE: u64 = 64 << 20;
/// The largest PostgreSQL database that is exported without being asked to. Beyond it an export takes longer than a
/// controller should be away, and the database's own tools are the better ones.
const MAX_EXPORT: u64 = 4 << 30;
/// How much is written between two syncs. A single sync of a large file could take longer than the control loop may go
/// without progress.
const SYNC_EVERY: u64 = 64 << 20;
/// How many backups of one schema are kept beside each other.
const MOST: u32 = 99;
/// The name of a PostgreSQL store's backup before the schema.
const POSTGRES_NAME: &str = "doctor";

/// Whether and where a controller writes a backup before it migrates the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MigrationBackup {
    /// SQLite: beside the store, always. PostgreSQL: in this directory, if it can be written and the database is small;
    /// otherwise none is written, because a server has backups of its own and the migration is one transaction.
    Auto { postgres: PathBuf },
    /// In this directory, always.
    Directory(PathBuf),
    /// Never.
    None,
}

/// The backup of one migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlannedBackup {
    File(PathBuf),
    /// None is written, for this reason.
    Skipped(String),
}

impl fmt::Display for PlannedBackup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Skipped(why) => write!(f, "none: {why}"),
        }
    }
}

/// Decides where the backup of a store of this size goes.
///
/// # Errors
/// If one is required and there is no room for it.
pub(super) fn plan(
    url: &StoreUrl,
    setting: &MigrationBackup,
    (from, to): (i64, i64),
    size: u64,
) -> Result<PlannedBackup> {
    let refused = |why: String| StoreError::NoMigrationBackup { from, to, why };
    let in_folder = |folder: &Path, name: &str| -> Result<PlannedBackup> {
        check_room(folder, size).map_err(refused)?;
        free_name(folder, &format!("{name}.schema-{from}")).map(PlannedBackup::File).map_err(refused)
    };
    let skipped = |why: &str| Ok(PlannedBackup::Skipped(why.to_owned()));
    match (setting, url) {
        (MigrationBackup::None, _) => skipped("`migration_backup` is \"none\""),
        (MigrationBackup::Directory(folder), url) => in_folder(folder, &name_of(url)),
        (MigrationBackup::Auto { .. }, StoreUrl::Sqlite(path)) => in_folder(folder_of(path), &name_of(url)),
        (MigrationBackup::Auto { postgres }, StoreUrl::Postgres(_)) => {
            if size > MAX_EXPORT {
                let (size, most) = (gigabytes(size), gigabytes(MAX_EXPORT));
                return skipped(&format!(
                    "the database has {size} GB, and more than {most} GB are not exported unless `migration_backup` names \
                     a directory; the server's own backups have it"
                ));
            }
            match in_folder(postgres, POSTGRES_NAME) {
                Err(StoreError::NoMigrationBackup { why, .. }) => {
                    skipped(&format!("{why}; the server's own backups have the database"))
                }
                planned => planned,
            }
        }
    }
}

/// Returns the size of a SQLite store with its log.
pub(super) fn file_size(path: &Path) -> Result<u64> {
    let size = |path: &Path| match std::fs::metadata(path) {
        Ok(found) => Ok(found.len()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(file_error("reading the size of", path)(error)),
    };
    let mut log = path.as_os_str().to_owned();
    log.push("-wal");
    Ok(size(path)? + size(Path::new(&log))?)
}

/// Returns the size of a PostgreSQL store.
pub(super) fn database_size(tx: &mut Tx<'_>) -> Result<u64> {
    let sql = "SELECT pg_database_size(current_database())";
    let size = tx.first("reading the size of the database", sql, &[], |row| row.int(0))?;
    Ok(u64::try_from(size.unwrap_or(0)).unwrap_or(0))
}

fn gigabytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 30)
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn name_of(url: &StoreUrl) -> String {
    match url {
        StoreUrl::Sqlite(path) => path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
        StoreUrl::Postgres(_) => POSTGRES_NAME.to_owned(),
    }
}

/// Checks that a backup of this size can be written into this directory. Returns why not.
fn check_room(folder: &Path, size: u64) -> std::result::Result<(), String> {
    let unusable = |error: rustix::io::Errno| {
        format!("the backup cannot be written into {}: {}", folder.display(), io::Error::from(error))
    };
    let found = rustix::fs::statvfs(folder).map_err(unusable)?;
    let (free, needed) = (found.f_bavail.saturating_mul(found.f_frsize), size.saturating_add(RESERVE));
    if free < needed {
        return Err(format!(
            "its backup needs {} MB in {}, where {} MB are free",
            needed.div_ceil(1 << 20),
            folder.display(),
            free >> 20
        ));
    }
    // It is opened to be synced.
    let rights = rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    rustix::fs::access(folder, rights).map_err(unusable)
}

/// Returns the first name of `STEM.bak`, `STEM.2.bak`, … that does not exist.
fn free_name(folder: &Path, stem: &str) -> std::result::Result<PathBuf, String> {
    let names = (1..=MOST).map(|number| match number {
        1 => folder.join(format!("{stem}.bak")),
        _ => folder.join(format!("{stem}.{number}.bak")),
    });
    // A link counts as existing, wherever it points.
    let mut free =
        names.filter(|path| path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound));
    free.next().ok_or_else(|| format!("{MOST} backups of this schema are in {}: move them away", folder.display()))
}

/// A complete backup that has a temporary name. Dropping it deletes it.
#[derive(Debug)]
pub(super) struct WrittenBackup {
    file: Option<WrittenFile>,
    planned: PlannedBackup,
}

/// A synced file and what is needed to give it its name: after the migration nothing may fail that could fail before.
#[derive(Debug)]
struct WrittenFile {
    temporary: TemporaryFile,
    dest: PathBuf,
    folder: File,
    schema: i64,
}

/// The file of a backup that has its own name, and its schema.
#[derive(Debug, Default)]
pub(super) struct PublishedBackup(Option<(PathBuf, i64)>);

impl PublishedBackup {
    /// Returns the schema of the file. `None`: there is no file.
    pub(super) fn schema(&self) -> Option<i64> {
        self.0.as_ref().map(|(_, schema)| *schema)
    }

    /// Removes the file, if there is one.
    pub(super) fn remove(&mut self) {
        let Some((path, _)) = self.0.take() else { return };
        if let Err(error) = std::fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), %error, "the backup of a failed migration could not be removed");
        }
    }
}

/// Reports that the copy advances, and syncs what was written.
pub(super) type Advanced<'a> = &'a mut dyn FnMut() -> Result<()>;

/// Writes the planned backup under a temporary name and syncs it: `fill` copies the store into it and reports each part,
/// after which `advanced` is called.
pub(super) fn write(
    planned: &PlannedBackup,
    url: &StoreUrl,
    (from, to): (i64, i64),
    advanced: &dyn Fn(),
    fill: impl FnOnce(&mut Connection, Advanced<'_>) -> Result<()>,
) -> Result<WrittenBackup> {
    let PlannedBackup::File(dest) = planned else { return Ok(WrittenBackup { file: None, planned: planned.clone() }) };
    let mut path = dest.as_os_str().to_owned();
    path.push(".tmp");
    let temporary = TemporaryFile { path: path.into() };
    let failed = |error: StoreError| StoreError::NoMigrationBackup { from, to, why: why(&error, &temporary.path) };
    let written = create(&temporary.path).and_then(|file| {
        let unsynced = file_error("syncing", &temporary.path);
        let mut synced = 0;
        let mut copy = temporary.open()?;
        fill(&mut copy, &mut || {
            let length = file.metadata().map_err(&unsynced)?.len();
            if length.saturating_sub(synced) >= SYNC_EVERY {
                file.sync_data().map_err(&unsynced)?;
                synced = length;
            }
            advanced();
            Ok(())
        })?;
        check(&copy, from)?;
        copy.close().map_err(|(_, error)| sqlite_error("closing the backup")(error))?;
        like_original(url, &temporary.path)?;
        file.sync_all().map_err(&unsynced)?;
        advanced();
        let folder = folder_of(dest);
        File::open(folder).map_err(file_error("opening", folder))
    });
    let folder = written.map_err(failed)?;
    let file = WrittenFile { temporary, dest: dest.clone(), folder, schema: from };
    Ok(WrittenBackup { file: Some(file), planned: planned.clone() })
}

impl WrittenBackup {
    /// Makes the backup durable under its own name, and sets `published` when it has that name. It replaces no file.
    pub(super) fn publish(self, published: &mut PublishedBackup) -> Result<PlannedBackup> {
        if let Some(WrittenFile { temporary, dest, folder, schema }) = self.file {
            rename_to_new(&temporary.path, &dest).map_err(file_error("naming the backup", &dest))?;
            *published = PublishedBackup(Some((dest.clone(), schema)));
            drop(temporary);
            folder.sync_all().map_err(file_error("syncing", folder_of(&dest)))?;
        }
        Ok(self.planned)
    }
}

/// Renames a file, and fails if the new name exists.
fn rename_to_new(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // Not every file system can; those that cannot have links.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => std::fs::hard_link(from, to),
        renamed => Ok(renamed?),
    }
}

/// Creates the file for its owner only, in place of what an interrupted migration left.
fn create(path: &Path) -> Result<File> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(file_error("removing", path)(error)),
        _ => {}
    }
    let created = File::options().write(true).create_new(true).mode(0o600).open(path);
    created.map_err(file_error("creating", path))
}

/// Checks that the copy has the schema that the store has.
fn check(copy: &Connection, expected: i64) -> Result<()> {
    let sql = "SELECT MAX(version) FROM schema_version";
    let found: i64 = copy.query_row(sql, (), |row| row.get(0)).map_err(sqlite_error("checking the backup"))?;
    match found == expected {
        true => Ok(()),
        false => {
            let why = format!("it has schema {found}, the store {expected}");
            Err(StoreError::Unreadable { what: "backup", why })
        }
    }
}

/// Gives the copy the mode of the store, and its owner if this user may: the controller's user has to be able to restore
/// it. A copy of a PostgreSQL database stays with its owner.
fn like_original(url: &StoreUrl, copy: &Path) -> Result<()> {
    let StoreUrl::Sqlite(path) = url else { return Ok(()) };
    let original = std::fs::metadata(path).map_err(file_error("reading the mode of", path))?;
    let owner = std::fs::metadata(copy).map_err(file_error("reading the mode of", copy))?;
    if (owner.uid(), owner.gid()) != (original.uid(), original.gid()) {
        // Only root may; the mode below then gives nobody else more than the store does.
        let _refused = chown(copy, Some(original.uid()), Some(original.gid()));
    }
    let mode = std::fs::Permissions::from_mode(original.permissions().mode() & 0o777);
    std::fs::set_permissions(copy, mode).map_err(file_error("restricting", copy))
}

/// Returns the error with its causes.
fn why(error: &StoreError, path: &Path) -> String {
    let mut text = format!("its backup {} could not be written: {error}", path.display());
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sqlite(folder: &Path) -> StoreUrl {
        StoreUrl::Sqlite(folder.join("doctor.db"))
    }

    #[test]
    fn a_backup_is_named_after_the_store_and_its_schema_and_replaces_none() {
        let folder = tempfile::tempdir().unwrap();
        let auto = MigrationBackup::Auto { postgres: "/proc/nonexistent".into() };
        for expected in ["doctor.db.schema-12.bak", "doctor.db.schema-12.2.bak", "doctor.db.schema-12.3.bak"] {
            let planned = plan(&sqlite(folder.path()), &auto, (12, 13), 1).unwrap();
            assert_eq!(planned, PlannedBackup::File(folder.path().join(expected)));
            // A link that points nowhere is a file of another party, too.
            std::os::unix::fs::symlink("/proc/nonexistent/x", folder.path().join(expected)).unwrap();
        }
    }

    #[test]
    fn a_store_without_room_for_its_backup_is_refused_with_the_place_and_the_setting() {
        // The process file system has no free block.
        let no_room = MigrationBackup::Directory("/proc".into());
        let error = plan(&sqlite(Path::new("/x")), &no_room, (12, 14), 5 << 20).unwrap_err().to_string();
        assert!(error.contains("not migrated from 12 to 14") && error.contains("69 MB in /proc"), "{error}");
        assert!(error.contains("nothing was changed") && error.contains("migration_backup"), "{error}");
        let missing = MigrationBackup::Directory("/proc/nonexistent/backups".into());
        let error = plan(&sqlite(Path::new("/x")), &missing, (12, 14), 1).unwrap_err().to_string();
        assert!(error.contains("/proc/nonexistent/backups: No such file"), "{error}");
    }

    #[test]
    fn a_large_postgresql_database_is_left_to_its_own_backups_unless_a_directory_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let url: StoreUrl = "postgres://doctor@db.example/doctor".parse().unwrap();
        let auto = |folder: &Path| MigrationBackup::Auto { postgres: folder.to_owned() };
        let small = plan(&url, &auto(folder.path()), (12, 13), 1 << 20).unwrap();
        assert_eq!(small, PlannedBackup::File(folder.path().join("doctor.schema-12.bak")));
        let large = plan(&url, &auto(folder.path()), (12, 13), 50 << 30).unwrap();
        assert!(large.to_string().contains("none: the database has 50 GB"), "{large}");
        let nowhere = plan(&url, &auto(Path::new("/proc/nonexistent")), (12, 13), 1 << 20).unwrap();
        assert!(nowhere.to_string().contains("none: the backup cannot be written"), "{nowhere}");
        let named = MigrationBackup::Directory("/proc".into());
        assert!(plan(&url, &named, (12, 13), 50 << 30).is_err(), "a named directory is required to have room");
        let none = plan(&url, &MigrationBackup::None, (12, 13), 50 << 30).unwrap();
        assert!(matches!(none, PlannedBackup::Skipped(_)));
    }
}
