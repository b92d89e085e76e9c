//! The controller's persistent state: one struct over SQLite or PostgreSQL.
//!
//! Guarantees that the rest of the program relies on:
//!
//! - **Intent before effect.** [`Store::commit`] writes a whole plan in one transaction. A crash between the commit and
//!   the effect leaves an intent that the next cycle completes; a crash before the commit leaves nothing.
//! - **Exactly once.** A run has one result per node ([`Store::accept`]). Database constraints reject two runs on one
//!   node and two history rows for one test of one run.
//! - **One leader.** Every write by a controller checks its [`Lease`] inside the transaction.
//! - **Durable when acknowledged.** SQLite runs with a write-ahead log and full syncing; [`GroupCommit`] lets many
//!   messages of nodes share one sync. They wait in the ingest queue until the leader enters them in history.
//! - **`latest_result` is a fold of history.** `TestRecord::add` applies results in time order. A result that arrives
//!   out of order causes its test to be folded again from the start. [`Store::verify`] compares the two. Results of
//!   agents are in a table of their own, and readers combine the two.
//!
//! The store is a struct, not a trait: SQLite in memory is the test double, and one test suite runs on both databases.
//! Calls block and may come from any thread. Reads do not wait for writes, except in memory.

pub mod access;
pub mod error;
#[doc(hidden)]
pub mod fuzz_targets;
pub mod messages;
pub mod records;

mod accept;
mod acknowledged_events;
mod agent_findings;
mod agent_keys;
mod agent_results;
mod audit;
mod backup;
mod case_table;
mod cases;
mod cluster_state;
mod commit;
mod compression;
mod copy_folder;
mod db;
mod endpoint_keys;
mod evidence;
mod evidence_pack;
mod fencing;
mod findings;
mod group_commit;
mod history;
mod id_assignment;
mod id_cache;
mod import;
mod ingest_queue;
mod job_failures;
mod job_outputs;
mod json;
mod leader_election;
mod lease_clock;
mod lease_term;
mod measured_counts;
mod migration;
mod migration_backup;
mod mutes;
mod node_hours;
mod nodes;
mod operator_commands;
pub mod outbox;
mod probe;
mod publish;
#[cfg(test)]
mod query_plan_tests;
mod rejections;
mod result_writer;
mod retention;
mod runs;
mod runs_without_result;
mod schema;
mod standalone_evidence;
mod test_status;
mod test_survey;
mod tokens;
mod url;
mod verify;
mod write_probe;

use std::{
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, Instant},
};

#[doc(hidden)]
pub use self::schema::Migration;
pub use self::{
    accept::{Entered, Entering},
    cases::SendPermit,
    copy_folder::CopyFolder,
    error::{Result, StoreError, WriteObstacle},
    fencing::{Lease, LeaseError, this_process},
    group_commit::{GroupCommit, SubmitOutcome},
    job_outputs::Earlier,
    lease_clock::LeaseClock,
    lease_term::LeaseStatus,
    migration::{MigrationPlan, MigrationReport},
    migration_backup::{MigrationBackup, PlannedBackup},
    operator_commands::OperatorCommands,
    probe::StoreProbe,
    tokens::ApiCall,
    url::StoreUrl,
};
use self::{
    db::{Access, BUSY, Db, Tx},
    id_cache::IdCache,
    ingest_queue::IngestQueue,
    migration::Migrator,
    schema::SchemaHistory,
};

/// A handle to the store. Clones share one database.
#[derive(Debug, Clone)]
pub struct Store {
    shared: Arc<Shared>,
    /// See [`Store::with_deadline`].
    deadline: Option<Instant>,
    /// See [`Store::with_progress`].
    progress: Option<ProgressHook>,
}

/// Called after each transaction.
#[derive(Clone)]
struct ProgressHook(Arc<dyn Fn() + Send + Sync>);

impl std::fmt::Debug for ProgressHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ProgressHook")
    }
}

#[derive(Debug)]
struct Shared {
    db: Db,
    ids: RwLock<Arc<IdCache>>,
    last_publish: Mutex<Option<publish::LastCopy>>,
    ingest_queue: IngestQueue,
    schema: SchemaHistory,
    /// When the schema was last checked for queries that do not check it themselves.
    schema_checked: Mutex<Option<Instant>>,
    /// Set in a controller: migrates the store when the controller leads.
    migrator: Option<Migrator>,
}

/// Key of the store's own identity in `meta`, by which the store recognises its published copy.
const STORE_ID: &str = "store-id";

/// The pause of a controller that waits for SQLite's one writer, between two attempts to open the store.
const BUSY_PAUSE: Duration = Duration::from_millis(100);

/// How long a reading process may not notice that a newer program has migrated the store.
const SCHEMA_CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl Store {
    /// Opens a store for changes, creating it if it does not exist. It migrates nothing.
    ///
    /// # Errors
    /// If the store is damaged, of another schema, on a network file system, or unreachable. It is unchanged in that case.
    pub fn open(url: &StoreUrl) -> Result<Self> {
        Self::over(Db::open(url)?, SchemaHistory::CURRENT, None).prepare()
    }

    /// Opens a store for a controller, creating it if it does not exist. A store of an older schema is readable as far as
    /// this program can, every write fails, and [`Store::acquire`] migrates it after a backup.
    ///
    /// # Errors
    /// As [`Self::open`], but not for an older schema.
    pub fn open_to_lead(url: &StoreUrl, backup: MigrationBackup) -> Result<Self> {
        Self::open_to_lead_as(url, backup, SchemaHistory::CURRENT)
    }

    /// As [`Self::open_to_lead`], as a later program with these further migrations would open it: for tests of upgrades.
    ///
    /// # Errors
    /// Those of [`Self::open_to_lead`].
    #[doc(hidden)]
    pub fn open_as_later_program(url: &StoreUrl, backup: MigrationBackup, later: &'static [Migration]) -> Result<Self> {
        Self::open_to_lead_as(url, backup, SchemaHistory::followed_by(later))
    }

    fn open_to_lead_as(url: &StoreUrl, backup: MigrationBackup, schema: SchemaHistory) -> Result<Self> {
        Self::over(Db::open(url)?, schema, Some(Migrator::new(url, backup))).prepare()
    }

    /// Opens an existing store for reading. It needs no write permission, for the file or for its directory, never
    /// migrates the schema, and every write through it fails. A store of another schema is read as far as this program reads
    /// it correctly; what it cannot read fails with [`StoreError::NotMigrated`] or [`StoreError::NewerSchema`].
    ///
    /// # Errors
    /// As [`Self::open`], and if the store does not exist.
    pub fn open_to_read(url: &StoreUrl) -> Result<Self> {
        let store = Self::over(Db::open_to_read(url)?, SchemaHistory::CURRENT, None);
        store.transaction(Access::Read, &mut |tx| schema::check_existing(tx, store.shared.schema))?;
        Ok(store)
    }

    /// Opens an in-memory store, which lasts until its last clone is dropped.
    pub fn open_in_memory() -> Result<Self> {
        Self::over(Db::in_memory()?, SchemaHistory::CURRENT, None).prepare()
    }

    fn over(db: Db, schema: SchemaHistory, migrator: Option<Migrator>) -> Self {
        let shared = Shared {
            db,
            ids: RwLock::default(),
            last_publish: Mutex::default(),
            ingest_queue: IngestQueue::new(),
            schema,
            schema_checked: Mutex::default(),
            migrator,
        };
        Self { shared: Arc::new(shared), deadline: None, progress: None }
    }

    /// Creates the tables and the identity of an empty store. In a controller, a store that awaits its migration is left as it
    /// is.
    fn prepare(self) -> Result<Self> {
        // Another process that creates or migrates the schema may take longer than a statement of the controller may. A
        // controller waits for it; a command reports it.
        let waits = self.shared.migrator.is_some();
        let mut is_logged = false;
        let prepared = loop {
            let prepared = self.transaction(Access::WriteExclusive, &mut |tx| {
                tx.lift_statement_timeout()?;
                if waits {
                    tx.lift_lock_timeout()?;
                }
                schema::create_or_check(tx, self.shared.schema)?;
                if operator_commands::meta(tx, STORE_ID)?.is_none() {
                    operator_commands::set_meta(tx, STORE_ID, &new_identity()?)?;
                }
                Ok(())
            });
            match prepared {
                Err(error) if error.is_busy() && waits => {
                    if !std::mem::replace(&mut is_logged, true) {
                        tracing::warn!(
                            "another process writes the store, or migrates it; this one waits until it has ended"
                        );
                    }
                    std::thread::sleep(BUSY_PAUSE);
                }
                Err(error) if error.is_busy() => break Err(StoreError::WriterBusy { waited: BUSY }),
                other => break other,
            }
        };
        match prepared {
            Err(error) if error.awaits_migration() && waits => Ok(self),
            other => other.map(|()| self),
        }
    }

    /// Returns a handle to the same store whose reads fail with [`StoreError::DeadlineExceeded`] after this instant. A statement
    /// still running then is interrupted.
    #[must_use]
    pub fn with_deadline(&self, until: Instant) -> Self {
        Self { deadline: Some(until), progress: None, ..self.clone() }
    }

    /// Returns a handle to the same store that calls `hook` after each transaction, and in the steps of a migration. For the control loop alone, which
    /// reports that it advances: removing expired data takes many transactions.
    #[must_use]
    pub fn with_progress(&self, hook: impl Fn() + Send + Sync + 'static) -> Self {
        Self { progress: Some(ProgressHook(Arc::new(hook))), ..self.clone() }
    }

    /// Returns a handle to the same store without the hook of [`Self::with_progress`], for threads beside the loop: what they
    /// do is no progress of the loop.
    #[must_use]
    pub fn without_progress(&self) -> Self {
        Self { progress: None, ..self.clone() }
    }

    /// Fails if the deadline has passed.
    fn check_deadline(&self) -> Result<()> {
        match self.deadline {
            Some(until) if Instant::now() >= until => Err(StoreError::DeadlineExceeded { operation: "reading" }),
            _ => Ok(()),
        }
    }

    /// Runs `body` on one consistent snapshot.
    fn read<T>(&self, mut body: impl FnMut(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        self.check_deadline()?;
        self.transaction(Access::Read, &mut |tx| {
            let ids = tx.highest_ids()?;
            let found = tx.schema;
            schema::check_readable(tx, self.shared.schema, found)?;
            tx.load_new_ids(ids)?;
            body(tx)
        })
    }

    /// Runs a single-statement query without a transaction. It uses the cached names, and runs again with fresh ones if
    /// the query requests or finds (`None`, unreadable) a name that is not cached.
    fn query_once<T>(&self, mut body: impl FnMut(&mut Tx<'_>) -> Result<Option<T>>) -> Result<Option<T>> {
        self.check_deadline()?;
        self.check_schema_if_due()?;
        match self.transaction(Access::ReadStatement, &mut body) {
            Ok(None) | Err(StoreError::Unreadable { .. }) => self.read(body),
            answer => answer,
        }
    }

    /// Checks now and then that this program still reads the store correctly, for queries of one statement: a check in each
    /// would double what they cost.
    fn check_schema_if_due(&self) -> Result<()> {
        // Another thread that checks does so for all.
        let Ok(mut checked) = self.shared.schema_checked.try_lock() else { return Ok(()) };
        if checked.is_some_and(|at| at.elapsed() < SCHEMA_CHECK_INTERVAL) {
            return Ok(());
        }
        self.transaction(Access::Read, &mut |tx| schema::check_existing(tx, self.shared.schema))?;
        *checked = Some(Instant::now());
        Ok(())
    }

    /// Runs a controller's write, which fails if another controller has taken the lease.
    fn write<T>(&self, lease: &Lease, body: impl FnMut(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        self.write_as(Access::Write, lease, body)
    }

    fn write_as<T>(&self, access: Access, lease: &Lease, body: impl FnMut(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        self.write_with_prefetch(access, lease, |_| {}, body)
    }

    /// As [`Self::write_as`], announcing the first queries of `body`: PostgreSQL receives them together with the lease
    /// check. If the lease is ours then, it was ours when those rows were read.
    fn write_with_prefetch<T>(
        &self,
        access: Access,
        lease: &Lease,
        foresee: impl Fn(&mut Tx<'_>),
        mut body: impl FnMut(&mut Tx<'_>) -> Result<T>,
    ) -> Result<T> {
        self.transaction(access, &mut |tx| {
            foresee(tx);
            fencing::begin_write(tx, access, Some(lease), self.shared.schema)?;
            body(tx)
        })
    }

    /// Makes durable everything committed as [`Access::Enqueue`].
    fn sync(&self) -> Result<()> {
        self.shared.db.sync()
    }

    /// Runs a write that needs no lease: operators' commands and tools.
    fn write_unfenced<T>(&self, access: Access, mut body: impl FnMut(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        self.transaction(access, &mut |tx| {
            fencing::begin_write(tx, access, None, self.shared.schema)?;
            body(tx)
        })
    }

    fn transaction<T>(&self, access: Access, body: &mut dyn FnMut(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        let mut value = None;
        let done = self.transact(access, &mut |tx| {
            value = Some(body(tx)?);
            Ok(())
        });
        done.map_err(|error| self.explain_by_schema(error))?;
        Ok(value.expect("a committed transaction has a value"))
    }

    fn report_progress(&self) {
        if let Some(ProgressHook(hook)) = &self.progress {
            hook();
        }
    }

    fn transact(&self, access: Access, body: &mut dyn FnMut(&mut Tx<'_>) -> Result<()>) -> Result<()> {
        let mut names = Arc::clone(&self.shared.ids.read().unwrap_or_else(PoisonError::into_inner));
        let before = Arc::clone(&names);
        let result = self.shared.db.transaction(access, self.deadline, &mut names, body);
        self.report_progress();
        result?;
        if !Arc::ptr_eq(&before, &names) {
            let mut shared = self.shared.ids.write().unwrap_or_else(PoisonError::into_inner);
            // Both are valid; the larger one saves more lookups.
            if names.len() > shared.len() {
                *shared = names;
            }
        }
        Ok(())
    }
}

fn new_identity() -> Result<String> {
    let refused =
        |error: getrandom::Error| StoreError::Refused { operation: "creating a store", why: error.to_string() };
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes).map_err(refused)?;
    Ok(doctor_core::hex::encode(&bytes))
}
