//! Everything the controller must not forget: one struct over SQLite or PostgreSQL.
//!
//! What it gives, and what the rest of the program relies on:
//!
//! - **Intent before effect.** [`Store::commit`] writes a whole plan in one transaction. A crash between that and the
//!   effect leaves an intent that the next cycle completes; a crash before it leaves nothing.
//! - **Exactly once.** A run has one result per node ([`Store::accept`]); the database itself refuses two runs on one
//!   node and two history rows for one test of one run.
//! - **One leader.** Every write of a controller proves its [`Lease`] inside the transaction.
//! - **Durable when acknowledged.** SQLite runs with a write-ahead log and full syncing; [`GroupCommit`] makes many
//!   results share one.
//! - **`latest` is history, folded.** Results in the order of their time, by `TestRecord::add`; a result that comes
//!   late has its test folded again from the beginning. [`Store::verify`] compares the two.
//!
//! The store is a struct and not a trait: SQLite in memory is the test double, and one suite runs on both databases.
//! Calls block and may come from any thread. Reading does not wait for writing, except in memory.

pub mod access;
pub mod error;
#[doc(hidden)]
pub mod fuzzed;
pub mod records;

mod accept;
mod agent;
mod agent_keys;
mod audit;
mod backup;
mod bundle;
mod case_file;
mod cases;
mod cluster;
mod commit;
mod compression;
mod conclude;
mod db;
mod evidence;
mod failed_work;
mod findings;
mod group;
mod history;
mod import;
mod inbox;
mod json;
mod leader_election;
mod lease;
mod ledger;
mod mutes;
mod name_numbers;
mod names;
mod nodes;
mod operators;
pub mod outbox;
mod publish;
mod retention;
mod runs;
#[cfg(test)]
mod scans;
mod schema;
mod settled;
mod spent;
mod standalone_evidence;
mod standing;
mod tokens;
mod url;
mod verify;

use std::{
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Instant,
};

use self::{
    db::{Access, Db, Tx},
    inbox::Inbox,
    names::Names,
};
pub use self::{
    error::{Result, StoreError},
    group::GroupCommit,
    lease::{Lease, LeaseError, this_process},
    operators::Orders,
    tokens::ApiCall,
    url::StoreUrl,
};

/// The store. Clones share one.
#[derive(Debug, Clone)]
pub struct Store {
    shared: Arc<Shared>,
    /// See [`Store::until`].
    until: Option<Instant>,
}

#[derive(Debug)]
struct Shared {
    db: Db,
    names: RwLock<Arc<Names>>,
    last_copy: Mutex<Option<publish::LastCopy>>,
    inbox: Inbox,
}

/// The name under which a store keeps its own identity, by which it knows its published copy.
const STORE_ID: &str = "store-id";

impl Store {
    /// Opens a store, creates it if there is none, and brings its schema up to date.
    ///
    /// # Errors
    /// If it is damaged, newer than this program, on a network file system, or cannot be reached. It is not changed
    /// then.
    pub fn open(url: &StoreUrl) -> Result<Self> {
        Self::over(Db::open(url)?)
    }

    /// A store that lives as long as its last clone.
    pub fn open_in_memory() -> Result<Self> {
        Self::over(Db::in_memory()?)
    }

    fn over(db: Db) -> Result<Self> {
        let inbox = Inbox::new(db.is_sqlite());
        let shared = Shared { db, names: RwLock::default(), last_copy: Mutex::default(), inbox };
        let store = Self { shared: Arc::new(shared), until: None };
        store.transaction(Access::WriteAlone, &mut |tx| {
            schema::migrate(tx)?;
            if operators::meta(tx, STORE_ID)?.is_none() {
                operators::set_meta(tx, STORE_ID, &new_identity()?)?;
            }
            Ok(())
        })?;
        store.enter_what_a_dead_process_left()?;
        Ok(store)
    }

    /// The same store, for questions of somebody who waits no longer than this: what was not read by then fails with
    /// [`StoreError::Late`], and what it was busy with ends. Such questions never wait for who writes: results that came in and
    /// are not entered yet are seen a moment later, as by another process.
    #[must_use]
    pub fn until(&self, until: Instant) -> Self {
        Self { shared: Arc::clone(&self.shared), until: Some(until) }
    }

    /// What is to be done before a question, or why it is not asked any more.
    fn before_reading(&self) -> Result<()> {
        match self.until {
            None => self.enter_what_waits(),
            Some(until) if Instant::now() >= until => Err(StoreError::Late { operation: "reading" }),
            Some(_) => Ok(()),
        }
    }

    /// One unchanging picture of the store, with all in it that was kept before this call.
    fn read<T>(&self, mut body: impl FnMut(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        self.before_reading()?;
        self.transaction(Access::Read, &mut |tx| {
            tx.refresh_names()?;
            body(tx)
        })
    }

    /// A question of one statement, which needs no transaction around it. It is asked with the names that are known, and
    /// once more with all there are if it asks for or finds (`None`, unreadable) a name that is not among them.
    fn ask<T>(&self, mut body: impl FnMut(&mut Tx<'_>) -> Result<Option<T>>) -> Result<Option<T>> {
        self.before_reading()?;
        match self.transaction(Access::ReadOnce, &mut body) {
            Ok(None) | Err(StoreError::Unreadable { .. }) => self.read(body),
            answer => answer,
        }
    }

    /// A write of the controller: it fails if the lease was taken over.
    fn write<T>(&self, lease: &Lease, body: impl FnMut(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        self.write_as(Access::Write, lease, body)
    }

    fn write_as<T>(&self, access: Access, lease: &Lease, body: impl FnMut(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        self.write_foreseeing(access, lease, |_| {}, body)
    }

    /// As [`Self::write_as`], with what `body` will ask first: PostgreSQL is asked it together with the lease. If the
    /// lease is ours then, it was when that was read.
    fn write_foreseeing<T>(
        &self,
        access: Access,
        lease: &Lease,
        foresee: impl Fn(&mut Tx<'_>),
        body: impl FnMut(&mut Tx<'_>) -> Result<T>,
    ) -> Result<T> {
        let _no_results_come = self.shared.inbox.close();
        self.enter_what_waits()?;
        self.write_beside_results(access, lease, foresee, body)
    }

    /// As [`Self::write_foreseeing`], for what goes on while results come in: their own way.
    fn write_beside_results<T>(
        &self,
        access: Access,
        lease: &Lease,
        foresee: impl Fn(&mut Tx<'_>),
        mut body: impl FnMut(&mut Tx<'_>) -> Result<T>,
    ) -> Result<T> {
        self.transaction(access, &mut |tx| {
            foresee(tx);
            lease::begin_write(tx, access, Some(lease))?;
            body(tx)
        })
    }

    /// Makes durable what was committed as [`Access::WriteResults`].
    fn sync(&self) -> Result<()> {
        self.shared.db.sync()
    }

    /// A write that anybody may make.
    fn write_unfenced<T>(&self, access: Access, mut body: impl FnMut(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        let _no_results_come = self.shared.inbox.close();
        self.enter_what_waits()?;
        self.transaction(access, &mut |tx| {
            lease::begin_write(tx, access, None)?;
            body(tx)
        })
    }

    fn transaction<T>(&self, access: Access, body: &mut dyn FnMut(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        let mut value = None;
        self.transact(access, &mut |tx| {
            value = Some(body(tx)?);
            Ok(())
        })?;
        Ok(value.expect("a transaction that was committed has come to its end"))
    }

    fn transact(&self, access: Access, body: &mut dyn FnMut(&mut Tx<'_>) -> Result<()>) -> Result<()> {
        let mut names = Arc::clone(&self.shared.names.read().unwrap_or_else(PoisonError::into_inner));
        let before = Arc::clone(&names);
        self.shared.db.transaction(access, self.until, &mut names, body)?;
        if !Arc::ptr_eq(&before, &names) {
            let mut shared = self.shared.names.write().unwrap_or_else(PoisonError::into_inner);
            // Both are true; the one that knows more saves more.
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
