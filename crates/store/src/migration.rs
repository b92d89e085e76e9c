//! Migration of a store by the controller that leads.
//!
//! The lease, the backup and the migration are one transaction. While it runs, no other process writes: on SQLite there is
//! one writer, on PostgreSQL the transaction locks the table of the lease, whose row each write locks first, and the ingest
//! queue, to which any process adds. A crash at any instant therefore leaves the old schema, and a backup in the worst
//! case; the commit takes the lease and has the new schema. A controller of the old schema finds a higher fence and the
//! newer schema in its next write.
//!
//! Rejected: a migration when any command opens the store. An operator's command of a new version would take the store
//! away from a controller that leads, and would run without a backup.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use doctor_core::time::Span;

use super::{
    Store, backup,
    db::{Access, Db, Tx, vals},
    error::{Result, StoreError},
    fencing::{self, LeaseError, LeaseRow, may_take},
    lease_clock::{LeaseClock, clock_now},
    lease_term::limit_expiry,
    migration_backup::{self, MigrationBackup, PlannedBackup, PublishedBackup},
    schema::{self, SchemaHistory},
    url::StoreUrl,
};

/// Begins the migrating transaction on PostgreSQL. A table is waited for as long as a slow reader may take; without a
/// limit, all readers would queue behind the migration. A new index may take longer than any other statement.
const POSTGRES_BEGIN: &str = "SET LOCAL lock_timeout TO '30s'; SET LOCAL statement_timeout TO 0; \
                              LOCK TABLE lease, ingest_queue IN EXCLUSIVE MODE";
/// The transaction idles while a part of the backup is synced, which a slow disk does in seconds. A process that is
/// frozen in it blocks all others for this long and then loses it. Set only when this process may take the lease: until
/// then the usual limit holds, because a leader that is alive waits for the lock.
const POSTGRES_IDLE_LIMIT: &str = "SET LOCAL idle_in_transaction_session_timeout TO '90s'";

/// Migrates the store of a controller.
#[derive(Debug)]
pub(super) struct Migrator {
    url: StoreUrl,
    backup: MigrationBackup,
    /// Whether the schema is known to be the latest: only a restore could replace it, and that needs an empty store.
    is_current: AtomicBool,
    /// Whether a statement of the migration runs, or its commit.
    is_running: AtomicBool,
    report: Mutex<Option<MigrationReport>>,
}

impl Migrator {
    pub(super) fn new(url: &StoreUrl, backup: MigrationBackup) -> Self {
        let (is_current, is_running) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { url: url.clone(), backup, is_current, is_running, report: Mutex::default() }
    }
}

/// What a migration would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigrationPlan {
    pub from: i64,
    pub to: i64,
    pub backup: PlannedBackup,
}

/// What a migration has done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigrationReport {
    pub from: i64,
    pub to: i64,
    pub backup: PlannedBackup,
    pub took: Duration,
}

/// The result of an attempt to take the lease of a store with an older schema.
enum Attempt {
    HeldByOther(LeaseRow),
    Migrated(MigrationReport),
    /// Another controller has migrated the store.
    NothingToDo,
}

impl Store {
    /// Returns what a controller with this setting would do with the schema of a store. `None`: nothing.
    ///
    /// # Errors
    /// If the store cannot be opened for changes, or the backup could not be written.
    pub fn plan_migration(url: &StoreUrl, backup: &MigrationBackup) -> Result<Option<MigrationPlan>> {
        let probe = Self::probe(url)?;
        let history = SchemaHistory::CURRENT;
        let Some(from) = probe.schema.filter(|found| *found < history.latest()) else { return Ok(None) };
        let size = match url {
            StoreUrl::Sqlite(path) => migration_backup::file_size(path)?,
            StoreUrl::Postgres(_) => {
                let mut size = 0;
                Db::open(url)?.transaction(Access::Read, None, &mut std::sync::Arc::default(), &mut |tx| {
                    size = migration_backup::database_size(tx)?;
                    Ok(())
                })?;
                size
            }
        };
        let to = history.latest();
        let backup = migration_backup::plan(url, backup, (from, to), size)?;
        Ok(Some(MigrationPlan { from, to, backup }))
    }

    /// Takes the lease and migrates the store of a controller if it has an older schema. `None`: another controller did.
    ///
    /// # Errors
    /// [`LeaseError::Held`] while another controller leads. After any error the store has its old schema.
    pub fn migrate(
        &self,
        holder: &str,
        clock: impl Into<LeaseClock>,
        ttl: Span,
    ) -> std::result::Result<Option<MigrationReport>, LeaseError> {
        let Some(migrator) = &self.shared.migrator else { return Ok(None) };
        let (clock, began): (LeaseClock, Instant) = (clock.into(), Instant::now());
        let (mut attempt, mut published) = (Attempt::NothingToDo, PublishedBackup::default());
        let done = self.transact(Access::WriteExclusive, &mut |tx| {
            // A transaction that is repeated was rolled back.
            published.remove();
            attempt = self.attempt_migration(tx, migrator, holder, (clock, ttl), (began, &mut published))?;
            // A migration writes more than any other transaction, and its commit syncs it.
            migrator.is_running.store(matches!(attempt, Attempt::Migrated(_)), Ordering::Relaxed);
            Ok(())
        });
        migrator.is_running.store(false, Ordering::Relaxed);
        if let Err(error) = done {
            self.remove_backup_of_failed_migration(published);
            return Err(error.into());
        }
        match attempt {
            Attempt::HeldByOther(held) => Err(LeaseError::Held { by: held.holder, until: held.expires }),
            Attempt::NothingToDo => {
                migrator.is_current.store(true, Ordering::Relaxed);
                Ok(None)
            }
            Attempt::Migrated(report) => {
                migrator.is_current.store(true, Ordering::Relaxed);
                *migrator.report.lock().unwrap_or_else(PoisonError::into_inner) = Some(report.clone());
                tracing::info!(from = report.from, to = report.to, backup = %report.backup, "store migrated");
                Ok(Some(report))
            }
        }
    }

    /// Returns what this process has migrated, once.
    pub fn take_migration_report(&self) -> Option<MigrationReport> {
        let migrator = self.shared.migrator.as_ref()?;
        migrator.report.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether a statement that migrates the store runs at the moment, or its commit, which may take minutes in which nothing
    /// else is done. The wait for the lease and the backup before it are no part of this: they report progress.
    pub fn is_migrating(&self) -> bool {
        self.shared.migrator.as_ref().is_some_and(|migrator| migrator.is_running.load(Ordering::Relaxed))
    }

    /// Returns the older schema that this controller would migrate.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn awaited_migration(&self) -> Result<Option<i64>> {
        let Some(migrator) = &self.shared.migrator else { return Ok(None) };
        if migrator.is_current.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let found = self.found_schema()?;
        let older = found.filter(|found| *found < self.shared.schema.latest());
        if older.is_none() {
            migrator.is_current.store(true, Ordering::Relaxed);
        }
        Ok(older)
    }

    /// Replaces the error of a statement that failed because the store has another schema than this program.
    pub(super) fn explain_by_schema(&self, error: StoreError) -> StoreError {
        if !error.may_be_of_the_schema() {
            return error;
        }
        let history = self.shared.schema;
        let mut explained = None;
        let asked = self.transact(Access::Read, &mut |tx| {
            let found = schema::find(tx)?;
            explained = match found {
                Some(found) if found > history.latest() => Some(schema::newer(tx, history, found)),
                Some(found) if found < history.latest() => Some(schema::not_migrated(history, found)),
                _ => None,
            };
            Ok(())
        });
        match (asked, explained) {
            (Ok(()), Some(explained)) => explained,
            _ => error,
        }
    }

    /// Removes the backup if the store still has the schema from before the migration: each further attempt would leave one
    /// more. Where the commit may have succeeded, or the store does not answer, the backup stays.
    fn remove_backup_of_failed_migration(&self, mut published: PublishedBackup) {
        let Some(from) = published.schema() else { return };
        // It waits for the end of the failed transaction, which the server may still work on.
        let found = self.transaction(Access::Write, &mut |tx| schema::version_beside_migrations(tx));
        if found.is_ok_and(|found| found == from) {
            published.remove();
        }
    }

    fn found_schema(&self) -> Result<Option<i64>> {
        let mut found = None;
        self.transact(Access::Read, &mut |tx| {
            found = schema::find(tx)?;
            Ok(())
        })?;
        Ok(found)
    }

    fn attempt_migration(
        &self,
        tx: &mut Tx<'_>,
        migrator: &Migrator,
        holder: &str,
        (clock, ttl): (LeaseClock, Span),
        (began, published): (Instant, &mut PublishedBackup),
    ) -> Result<Attempt> {
        let history = self.shared.schema;
        if !tx.is_sqlite() {
            tx.script("locking the lease", POSTGRES_BEGIN)?;
        }
        let (from, to) = (schema::find(tx)?.ok_or(StoreError::NoSchema)?, history.latest());
        match schema::check_writable(tx, history, from) {
            Ok(()) => return Ok(Attempt::NothingToDo),
            Err(error) if error.awaits_migration() => {}
            Err(error) => return Err(error),
        }
        let held = fencing::read(tx)?;
        // After the row is locked, because waiting for the lock takes time.
        let now = clock_now(tx, clock)?;
        if !may_take(&held, holder, now) {
            return Ok(Attempt::HeldByOther(limit_expiry(tx, held, now, ttl)?));
        }
        if !tx.is_sqlite() {
            tx.script("setting up", POSTGRES_IDLE_LIMIT)?;
        }
        let size = match &migrator.url {
            StoreUrl::Sqlite(path) => migration_backup::file_size(path)?,
            StoreUrl::Postgres(_) => migration_backup::database_size(tx)?,
        };
        let planned = migration_backup::plan(&migrator.url, &migrator.backup, (from, to), size)?;
        let advanced = || self.report_progress();
        let written = migration_backup::write(&planned, &migrator.url, (from, to), &advanced, |copy, advanced| {
            // No other connection writes while this transaction has the lock, so the copy is not begun again.
            match self.shared.db.with_sqlite(|live| backup::copy_in_steps(live, copy, advanced)) {
                Some(copied) => copied,
                None => backup::export_as(tx, copy, history, from, advanced),
            }
        })?;
        migrator.is_running.store(true, Ordering::Relaxed);
        let migrated = schema::migrate(tx, history);
        // The end of a statement is progress, and reported before it counts as ended.
        self.report_progress();
        migrator.is_running.store(false, Ordering::Relaxed);
        migrated?;
        // The migration took its time; a virtual clock stood still meanwhile.
        let now = clock_now(tx, clock)?;
        let sql = "UPDATE lease SET holder = $1, fence = fence + 1, expires = $2 WHERE id = 1";
        tx.execute("taking the lease", sql, vals![holder, now.plus(ttl)])?;
        // Directly before the commit: a migration that fails or is killed leaves no backup behind.
        let backup = written.publish(published)?;
        Ok(Attempt::Migrated(MigrationReport { from, to, backup, took: began.elapsed() }))
    }
}
