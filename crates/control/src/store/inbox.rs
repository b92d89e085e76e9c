//! Results that are kept and do not stand in history yet.
//!
//! To enter a result touches a page of history, of `latest` and of what is awaited, each somewhere else for each node. A
//! few results at a time, which is all that those who wait for an answer can be kept waiting for, that is most of what a
//! result costs; hundreds at a time share pages, statements and transactions. So a batch is first only kept: its
//! documents and what was found in them are one bundle, which is written and made durable, and whoever brought a result
//! is told so. Later many bundles are entered together.
//!
//! What makes this one store and not two:
//!
//! - A bundle is in the inbox from the transaction that keeps it to the one that enters its results.
//! - Whoever reads, in this process, first enters all that was kept before.
//! - Whoever writes anything else, in this process, first closes the inbox and enters what is in it: nothing changes
//!   under a result that was admitted.
//! - Another process sees results when they are entered, a moment later. One that opens the store or takes the lease
//!   enters what it finds. Two that enter the same do so one after the other, because both hold the lease's row, and the
//!   second finds nothing.

use std::{
    collections::{HashSet, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard},
    time::Duration,
};

use doctor_core::ids::{NodeName, RunId};

use super::{
    Store,
    accept::{self, Asked, Expected},
    bundle,
    db::{Access, Kind, Tx, Val},
    error::Result,
    evidence::Packed,
    lease::Lease,
    records::{Accepted, JudgedResult},
};

/// So many results are entered at once. More share more, and keep the next batch waiting for longer.
const ENTERED_AT_ONCE: usize = 512;
/// With so many waiting, a batch is not kept before some of them are entered.
const MOST_WAITING: usize = 4 * ENTERED_AT_ONCE;
/// Fewer than are entered at once wait no longer than this for more.
const LINGER: Duration = Duration::from_millis(50);

/// After a failure.
const PAUSE: Duration = Duration::from_secs(1);

/// What this process has kept and not entered.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    /// Shared by those who keep results, alone for other writes.
    gate: RwLock<()>,
    waiting: Mutex<Waiting>,
    arrived: Condvar,
    /// Held while results are entered.
    entering: Mutex<()>,
}

#[derive(Debug, Default)]
struct Waiting {
    batches: VecDeque<Arc<Batch>>,
    results: usize,
    known: HashSet<(RunId, NodeName)>,
    /// Batches there ever were.
    kept: u64,
}

/// Results that were kept in one transaction, each with its bundle.
#[derive(Debug)]
struct Batch {
    number: u64,
    lease: Lease,
    results: Vec<(JudgedResult, i64)>,
}

/// A result on its way in.
#[derive(Debug)]
pub(super) struct Handed {
    pub(super) result: JudgedResult,
    /// Its document, if that is to stand alone.
    pub(super) alone: Option<Packed>,
}

impl Inbox {
    /// While this is held no results come in.
    pub(super) fn close(&self) -> RwLockWriteGuard<'_, ()> {
        self.gate.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until it is worth while to enter some, or `ended`. `false`: it has ended and nothing waits.
    pub(super) fn wait(&self, ended: impl Fn() -> bool) -> bool {
        let none_yet = |waiting: &mut Waiting| waiting.results == 0 && !ended();
        let few = |waiting: &mut Waiting| waiting.results < ENTERED_AT_ONCE && !ended();
        let waiting = self.arrived.wait_while(self.lock(), none_yet).unwrap_or_else(PoisonError::into_inner);
        let (waiting, _) =
            self.arrived.wait_timeout_while(waiting, LINGER, few).unwrap_or_else(PoisonError::into_inner);
        waiting.results > 0
    }

    /// After a failure: waits for a while, or until more has come.
    pub(super) fn rest(&self) {
        drop(self.arrived.wait_timeout(self.lock(), PAUSE));
    }

    /// Whoever waits looks again.
    pub(super) fn wake(&self) {
        // Under the lock, so that nobody is between looking and waiting.
        let _waiting = self.lock();
        self.arrived.notify_all();
    }

    fn add(&self, lease: &Lease, results: Vec<(JudgedResult, i64)>) {
        let mut waiting = self.lock();
        waiting.kept += 1;
        waiting.results += results.len();
        waiting.known.extend(results.iter().map(|(result, _)| (result.run, result.node.clone())));
        let number = waiting.kept;
        waiting.batches.push_back(Arc::new(Batch { number, lease: lease.clone(), results }));
        if waiting.results >= ENTERED_AT_ONCE || waiting.batches.len() == 1 {
            self.arrived.notify_all();
        }
    }

    /// The oldest, of one lease.
    fn oldest(&self) -> Vec<Arc<Batch>> {
        let waiting = self.lock();
        let Some(first) = waiting.batches.front() else { return Vec::new() };
        let mut results = 0;
        let some = waiting.batches.iter().take_while(|batch| {
            let fits = results == 0 || results + batch.results.len() <= ENTERED_AT_ONCE;
            results += batch.results.len();
            fits && batch.lease == first.lease
        });
        some.cloned().collect()
    }

    fn remove(&self, entered: &[Arc<Batch>]) {
        let mut waiting = self.lock();
        for batch in entered {
            waiting.batches.retain(|other| other.number != batch.number);
            waiting.results -= batch.results.len();
            for (result, _) in &batch.results {
                waiting.known.remove(&(result.run, result.node.clone()));
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    /// The inbox of this process.
    pub(super) fn inbox(&self) -> &Inbox {
        &self.shared.inbox
    }

    /// Keeps results, to be entered later. Where syncing is apart they are not durable yet.
    pub(super) fn keep_for_later(&self, lease: &Lease, batch: Vec<Handed>) -> Result<Vec<Accepted>> {
        while self.inbox().lock().results >= MOST_WAITING {
            self.enter_some()?;
        }
        let _others_wait = self.inbox().gate.read().unwrap_or_else(PoisonError::into_inner);
        // Before the database is asked: what is entered meanwhile is gone from here and answered there.
        let known: Vec<bool> = {
            let waiting = self.inbox().lock();
            batch.iter().map(|one| waiting.known.contains(&(one.result.run, one.result.node.clone()))).collect()
        };
        let asked = Asked::of(batch.iter().map(|one| &one.result));
        let (accepted, bundles) = self.write_beside_results(
            Access::WriteResults,
            lease,
            |tx| asked.foresee_runs(tx),
            |tx| keep(tx, &asked, &batch, &known),
        )?;
        let kept = batch.into_iter().zip(&accepted).filter(|(_, accepted)| **accepted == Accepted::Kept);
        let kept: Vec<(JudgedResult, i64)> =
            kept.zip(bundles).map(|((one, _), bundle)| (without_document(one.result), bundle)).collect();
        if !kept.is_empty() {
            self.inbox().add(lease, kept);
        }
        Ok(accepted)
    }

    /// Enters all that this process had kept before this call.
    pub(super) fn enter_what_waits(&self) -> Result<()> {
        let newest = self.inbox().lock().kept;
        while self.inbox().lock().batches.front().is_some_and(|oldest| oldest.number <= newest) {
            self.enter_some()?;
        }
        Ok(())
    }

    /// Enters the oldest of what waits.
    pub(super) fn enter_some(&self) -> Result<()> {
        let _one_at_a_time = self.inbox().entering.lock().unwrap_or_else(PoisonError::into_inner);
        let batches = self.inbox().oldest();
        let Some(first) = batches.first() else { return Ok(()) };
        let results: Vec<(&JudgedResult, i64)> =
            batches.iter().flat_map(|batch| &batch.results).map(|(result, bundle)| (result, *bundle)).collect();
        let asked = Asked::of(results.iter().map(|(result, _)| *result));
        let entered = self.write_beside_results(
            Access::EnterResults,
            &first.lease,
            |tx| asked.foresee(tx),
            |tx| {
                let there = still_there(tx, &results)?;
                let results: Vec<_> = results.iter().copied().filter(|(_, bundle)| there.contains(bundle)).collect();
                accept::enter(tx, &asked, &results)?;
                take_out(tx, &there)
            },
        );
        match entered {
            // Whoever leads now has entered them.
            Err(error) if error.is_lease_lost() => {}
            other => other?,
        }
        self.inbox().remove(&batches);
        Ok(())
    }

    /// Enters what is in the inbox and this process knows nothing of.
    pub(super) fn enter_what_a_dead_process_left(&self) -> Result<()> {
        let sql = "SELECT 1 FROM inbox LIMIT 1";
        let some = self.read(|tx| tx.first("reading the inbox", sql, &[], |_| Ok(())))?.is_some();
        if some { self.write_unfenced(Access::WriteAlone, enter_what_is_left) } else { Ok(()) }
    }
}

fn without_document(mut result: JudgedResult) -> JudgedResult {
    result.evidence = Vec::new();
    result
}

/// What became of each, and the bundles of those that were admitted.
fn keep(tx: &mut Tx<'_>, asked: &Asked, batch: &[Handed], known: &[bool]) -> Result<(Vec<Accepted>, Vec<i64>)> {
    let mut expected = Expected::load(tx, &asked.runs)?;
    let accepted: Vec<Accepted> = batch
        .iter()
        .zip(known)
        .map(|(one, known)| if *known { Accepted::Duplicate } else { expected.admit(tx, &one.result) })
        .collect();
    let with_documents = batch.iter().map(|one| (&one.result, &one.alone));
    let arrivals = expected.arrivals(tx, with_documents.zip(&accepted));
    let bundles = bundle::keep(tx, &arrivals)?;
    let mut new = bundles.clone();
    new.dedup();
    let rows: Vec<Val<'_>> = new.into_iter().map(Val::Int).collect();
    tx.bulk("keeping results", "inbox (bundle)", &[Kind::Int], &rows, "")?;
    accept::count_turned_away(tx, &accepted)?;
    Ok((accepted, bundles))
}

/// Which of their bundles nobody else has entered.
fn still_there(tx: &mut Tx<'_>, results: &[(&JudgedResult, i64)]) -> Result<HashSet<i64>> {
    let mut bundles: Vec<i64> = results.iter().map(|(_, bundle)| *bundle).collect();
    bundles.dedup();
    let mut there = HashSet::with_capacity(bundles.len());
    tx.keyed("reading the inbox", "SELECT bundle FROM inbox WHERE bundle IN {keys}", &bundles, |row| {
        there.insert(row.int(0)?);
        Ok(())
    })?;
    Ok(there)
}

fn take_out(tx: &mut Tx<'_>, bundles: &HashSet<i64>) -> Result<()> {
    let rows: Vec<Val<'_>> = bundles.iter().map(|bundle| (*bundle).into()).collect();
    let sqlite = "DELETE FROM inbox WHERE bundle = $1";
    let postgres = "DELETE FROM inbox WHERE bundle = ANY ($1::int8[])";
    tx.each("emptying the inbox", (sqlite, postgres), &[Kind::Int], &rows)
}

/// Enters all that is in the inbox, in a transaction that nobody else writes beside.
pub(super) fn enter_what_is_left(tx: &mut Tx<'_>) -> Result<()> {
    let operation = "reading the inbox";
    let left = tx.all(operation, "SELECT bundle FROM inbox ORDER BY bundle", &[], |row| row.int(0))?;
    for bundle in left {
        let sql = "SELECT body FROM bundle WHERE id = $1";
        let results = tx.first(operation, sql, &[bundle.into()], |row| bundle::results(row.blob(0)?))?;
        let results = results.unwrap_or_default();
        let asked = Asked::of(results.iter());
        let results: Vec<(&JudgedResult, i64)> = results.iter().map(|result| (result, bundle)).collect();
        accept::enter(tx, &asked, &results)?;
        take_out(tx, &HashSet::from([bundle]))?;
    }
    Ok(())
}
