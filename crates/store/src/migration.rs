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
    migration_backup::{self, MigrationBackup, PlannedBackup},
    schema::{self, SchemaHistory},
    url::StoreUrl,
};

/// Limits of the migrating transaction on PostgreSQL. A table is waited for as long as a slow reader may take; without a
/// limit, all readers would queue behind the migration. A new index may take longer than any other statement. A process
/// that is frozen in the transaction loses it.
const POSTGRES_LIMITS: &str = "SET LOCAL lock_timeout TO '30s'; SET LOCAL statement_timeout TO 0; \
                               SET LOCAL idle_in_transaction_session_timeout TO '10min'; \
                               LOCK TABLE lease, ingest_queue IN EXCLUSIVE MODE";

/// Migrates the store of a controller.
#[derive(Debug)]
pub(super) struct Migrator {
    url: StoreUrl,
    backup: MigrationBackup,
    /// Whether the schema is known to be the latest: only a restore could replace it, and that needs an empty store.
    is_current: AtomicBool,
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
        let mut attempt = Attempt::NothingToDo;
        migrator.is_running.store(true, Ordering::Relaxed);
        let done = self.transact(Access::WriteExclusive, &mut |tx| {
            attempt = self.attempt_migration(tx, migrator, holder, (clock, ttl), began)?;
            Ok(())
        });
        migrator.is_running.store(false, Ordering::Relaxed);
        done?;
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

    /// Whether this process migrates the store at the moment, which may take minutes in which nothing else is done.
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
        began: Instant,
    ) -> Result<Attempt> {
        let history = self.shared.schema;
        if !tx.is_sqlite() {
            tx.script("locking the lease", POSTGRES_LIMITS)?;
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
        let size = match &migrator.url {
            StoreUrl::Sqlite(path) => migration_backup::file_size(path)?,
            StoreUrl::Postgres(_) => migration_backup::database_size(tx)?,
        };
        let planned = migration_backup::plan(&migrator.url, &migrator.backup, (from, to), size)?;
        let written = migration_backup::write(&planned, &migrator.url, (from, to), |copy| {
            match self.shared.db.with_sqlite(|live| backup::copy_pages(live, copy)) {
                Some(copied) => copied,
                None => backup::export_as(tx, copy, history, from),
            }
        })?;
        schema::migrate(tx, history)?;
        // The migration took its time; a virtual clock stood still meanwhile.
        let now = clock_now(tx, clock)?;
        let sql = "UPDATE lease SET holder = $1, fence = fence + 1, expires = $2 WHERE id = 1";
        tx.execute("taking the lease", sql, vals![holder, now.plus(ttl)])?;
        // Directly before the commit: a migration that fails or is killed leaves no backup behind.
        let backup = written.publish()?;
        Ok(Attempt::Migrated(MigrationReport { from, to, backup, took: began.elapsed() }))
    }
}
