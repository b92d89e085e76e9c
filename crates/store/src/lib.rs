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
mod db;
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
mod measured_counts;
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

use std::{
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Instant,
};

pub use self::{
    accept::{Entered, Entering},
    error::{Result, StoreError},
    fencing::{Lease, LeaseError, this_process},
    group_commit::{GroupCommit, SubmitOutcome},
    job_outputs::Earlier,
    operator_commands::OperatorCommands,
    probe::StoreProbe,
    tokens::ApiCall,
    url::StoreUrl,
};
use self::{
    db::{Access, Db, Tx},
    id_cache::IdCache,
    ingest_queue::IngestQueue,
};

/// A handle to the store. Clones share one database.
#[derive(Debug, Clone)]
pub struct Store {
    shared: Arc<Shared>,
    /// See [`Store::with_deadline`].
    deadline: Option<Instant>,
}

#[derive(Debug)]
struct Shared {
    db: Db,
    ids: RwLock<Arc<IdCache>>,
    last_publish: Mutex<Option<publish::LastCopy>>,
    ingest_queue: IngestQueue,
}

/// Key of the store's own identity in `meta`, by which the store recognises its published copy.
const STORE_ID: &str = "store-id";

impl Store {
    /// Opens a store, creating it if it does not exist, and migrates its schema.
    ///
    /// # Errors
    /// If the store is damaged, of a newer program or a development version, on a network file system, or unreachable.
    /// It is unchanged in that case.
    pub fn open(url: &StoreUrl) -> Result<Self> {
        Self::from_db(Db::open(url)?)
    }

    /// Opens an existing store for reading. It needs no write permission, for the file or for its directory, never
    /// migrates the schema, and every write through it fails.
    ///
    /// # Errors
    /// As [`Self::open`], and if the store does not exist or has another schema.
    pub fn open_to_read(url: &StoreUrl) -> Result<Self> {
        let store = Self::over(Db::open_to_read(url)?);
        store.transaction(Access::Read, &mut schema::check_current)?;
        Ok(store)
    }

    /// Opens an in-memory store, which lasts until its last clone is dropped.
    pub fn open_in_memory() -> Result<Self> {
        Self::from_db(Db::in_memory()?)
    }

    fn over(db: Db) -> Self {
        let ingest_queue = IngestQueue::new();
        let shared = Shared { db, ids: RwLock::default(), last_publish: Mutex::default(), ingest_queue };
        Self { shared: Arc::new(shared), deadline: None }
    }

    fn from_db(db: Db) -> Result<Self> {
        let store = Self::over(db);
        store.transaction(Access::WriteExclusive, &mut |tx| {
            schema::migrate(tx)?;
            if operator_commands::meta(tx, STORE_ID)?.is_none() {
                operator_commands::set_meta(tx, STORE_ID, &new_identity()?)?;
            }
            Ok(())
        })?;
        Ok(store)
    }

    /// Returns a handle to the same store whose reads fail with [`StoreError::DeadlineExceeded`] after this instant. A statement
    /// still running then is interrupted.
    #[must_use]
    pub fn with_deadline(&self, until: Instant) -> Self {
        Self { shared: Arc::clone(&self.shared), deadline: Some(until) }
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
            tx.refresh_ids()?;
            body(tx)
        })
    }

    /// Runs a single-statement query without a transaction. It uses the cached names, and runs again with fresh ones if
    /// the query requests or finds (`None`, unreadable) a name that is not cached.
    fn query_once<T>(&self, mut body: impl FnMut(&mut Tx<'_>) -> Result<Option<T>>) -> Result<Option<T>> {
        self.check_deadline()?;
        match self.transaction(Access::ReadStatement, &mut body) {
            Ok(None) | Err(StoreError::Unreadable { .. }) => self.read(body),
            answer => answer,
        }
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
            fencing::begin_write(tx, access, Some(lease))?;
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
            fencing::begin_write(tx, access, None)?;
            body(tx)
        })
    }

    fn transaction<T>(&self, access: Access, body: &mut dyn FnMut(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        let mut value = None;
        self.transact(access, &mut |tx| {
            value = Some(body(tx)?);
            Ok(())
        })?;
        Ok(value.expect("a committed transaction has a value"))
    }

    fn transact(&self, access: Access, body: &mut dyn FnMut(&mut Tx<'_>) -> Result<()>) -> Result<()> {
        let mut names = Arc::clone(&self.shared.ids.read().unwrap_or_else(PoisonError::into_inner));
        let before = Arc::clone(&names);
        self.shared.db.transaction(access, self.deadline, &mut names, body)?;
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
