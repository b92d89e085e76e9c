//! Results that are stored but not yet entered in history.
//!
//! Entering a result touches pages of history, `latest_result` and `pending_results`, at different places for each
//! node. In batches as small as waiting submitters allow, that is most of the cost of a result; hundreds together share
//! pages, statements and transactions. So a batch is first only stored: its documents and results form a bundle, which
//! is written and made durable, and the submitters are acknowledged. Later many bundles are entered together.
//!
//! These rules make it one consistent store:
//!
//! - A bundle is in the inbox from the transaction that stores it to the one that enters its results.
//! - A reader in this process first enters everything stored before.
//! - Any other writer in this process first closes the inbox and enters its content: nothing changes underneath an
//!   admitted result.
//! - Another process sees results when they are entered, a moment later. A process that opens the store or takes the
//!   lease enters what it finds. Two processes that enter the same results do so one after the other, because both lock
//!   the lease's row, and the second finds nothing.

use std::{
    collections::{HashSet, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard},
    time::Duration,
};

use doctor_core::ids::RunId;

use super::{
    Store,
    accept::{self, Admission, Admitted, Asked, Expected, TurnedAway},
    bundle::{self, Arrival},
    compression::Packed,
    db::{Access, Kind, Tx, Val},
    error::{Result, StoreError},
    lease::Lease,
    records::{Accepted, JudgedResult},
};

/// Maximum wait of fewer results than [`Limits::enough`].
const LINGER: Duration = Duration::from_millis(50);

/// Wait after a failure.
const PAUSE: Duration = Duration::from_secs(1);

/// Batch sizes for entering results.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// Enter immediately from this many results.
    enough: usize,
    /// Maximum results entered in one transaction.
    at_once: usize,
    /// From this many waiting, a batch is stored only after some have been entered.
    most: usize,
}

/// SQLite has one writer, so the thread that stores results also enters them while others wait.
const ON_SQLITE: Limits = Limits { enough: 4096, at_once: 4096, most: 4096 };
/// Entering runs concurrently with storing, so the server is busy from the start and little is left at the end.
const ON_POSTGRES: Limits = Limits { enough: 1024, at_once: 2048, most: 8192 };

/// Results that this process has stored and not entered.
#[derive(Debug)]
pub(super) struct Inbox {
    limits: Limits,
    /// Shared by threads that store results, exclusive for other writes.
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
    known: HashSet<(RunId, i64)>,
    /// Number of batches ever stored.
    kept: u64,
}

/// Results stored in one transaction, each with its bundle.
#[derive(Debug)]
struct Batch {
    number: u64,
    lease: Lease,
    results: Vec<Admission>,
}

/// A submitted result.
#[derive(Debug)]
pub(super) struct Handed {
    pub(super) result: JudgedResult,
    /// Its document, if it is stored on its own.
    pub(super) alone: Option<Packed>,
}

impl Inbox {
    pub(super) fn new(sqlite: bool) -> Self {
        Self {
            limits: if sqlite { ON_SQLITE } else { ON_POSTGRES },
            gate: RwLock::default(),
            waiting: Mutex::default(),
            arrived: Condvar::new(),
            entering: Mutex::default(),
        }
    }

    /// Blocks incoming results while the guard is held.
    pub(super) fn close(&self) -> RwLockWriteGuard<'_, ()> {
        self.gate.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until results should be entered. Returns `false` when `ended` holds and nothing waits.
    pub(super) fn wait(&self, ended: impl Fn() -> bool) -> bool {
        let none_yet = |waiting: &mut Waiting| waiting.results == 0 && !ended();
        let few = |waiting: &mut Waiting| waiting.results < self.limits.enough && !ended();
        let waiting = self.arrived.wait_while(self.lock(), none_yet).unwrap_or_else(PoisonError::into_inner);
        let (waiting, _) =
            self.arrived.wait_timeout_while(waiting, LINGER, few).unwrap_or_else(PoisonError::into_inner);
        waiting.results > 0 || !ended()
    }

    /// Waits after a failure for a while, or until more results arrive.
    pub(super) fn rest(&self) {
        drop(self.arrived.wait_timeout(self.lock(), PAUSE));
    }

    /// Wakes all waiters to check their condition again.
    pub(super) fn wake(&self) {
        // Under the lock, so that no waiter is between its check and its wait.
        let _waiting = self.lock();
        self.arrived.notify_all();
    }

    fn add(&self, lease: &Lease, results: Vec<Admission>) {
        let mut waiting = self.lock();
        waiting.kept += 1;
        waiting.results += results.len();
        waiting.known.extend(results.iter().filter_map(identity));
        let number = waiting.kept;
        waiting.batches.push_back(Arc::new(Batch { number, lease: lease.clone(), results }));
        if waiting.results >= self.limits.enough || waiting.batches.len() == 1 {
            self.arrived.notify_all();
        }
    }

    /// Returns the oldest batches of one lease, up to the limit.
    fn oldest(&self) -> Vec<Arc<Batch>> {
        let waiting = self.lock();
        let Some(first) = waiting.batches.front() else { return Vec::new() };
        let mut results = 0;
        let some = waiting.batches.iter().take_while(|batch| {
            let fits = results == 0 || results + batch.results.len() <= self.limits.at_once;
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
            for one in batch.results.iter().filter_map(identity) {
                waiting.known.remove(&one);
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

    /// Returns the number of results that this process has stored and not entered yet.
    pub fn results_waiting(&self) -> usize {
        self.inbox().lock().results
    }

    /// Stores results to be entered later. Where syncing is a separate step they are not durable yet.
    pub(super) fn keep_for_later(&self, lease: &Lease, batch: Vec<Handed>) -> Result<Vec<Accepted>> {
        while self.inbox().lock().results >= self.inbox().limits.most {
            self.enter_some()?;
        }
        let _others_wait = self.inbox().gate.read().unwrap_or_else(PoisonError::into_inner);
        // Before the query: results entered meanwhile leave the inbox, and the database reports them.
        let known = self.known(&batch);
        let asked = Asked::of(batch.iter().map(|one| &one.result).collect());
        let (admitted, bundles) = self.write_beside_results(
            Access::WriteResults,
            lease,
            |tx| asked.foresee_runs(tx),
            |tx| keep(tx, &asked, &batch, &known),
        )?;
        let mut bundles = bundles.into_iter();
        let mut kept = Vec::with_capacity(bundles.len());
        let mut accepted = Vec::with_capacity(batch.len());
        for (Handed { mut result, .. }, admitted) in batch.into_iter().zip(admitted) {
            accepted.push(admitted.map_or_else(Accepted::from, |_| Accepted::Kept));
            let Ok(admitted) = admitted else { continue };
            if let Some(bundle) = bundles.next() {
                result.evidence = Vec::new();
                kept.push(Admission { result, bundle, admitted: Some(admitted) });
            }
        }
        if !kept.is_empty() {
            self.inbox().add(lease, kept);
        }
        Ok(accepted)
    }

    /// Returns which of these are in the inbox of this process.
    fn known(&self, batch: &[Handed]) -> Vec<bool> {
        let names = Arc::clone(&self.shared.names.read().unwrap_or_else(PoisonError::into_inner));
        let waiting = self.inbox().lock();
        let known = |result: &JudgedResult| Some((result.run, names.node_number(&result.node)?));
        batch.iter().map(|one| known(&one.result).is_some_and(|one| waiting.known.contains(&one))).collect()
    }

    /// Enters everything this process stored before this call.
    pub(super) fn enter_what_waits(&self) -> Result<()> {
        let newest = self.inbox().lock().kept;
        while self.inbox().lock().batches.front().is_some_and(|oldest| oldest.number <= newest) {
            self.enter_some()?;
        }
        Ok(())
    }

    /// Enters the oldest waiting batches and returns the number of results.
    pub(super) fn enter_some(&self) -> Result<usize> {
        let _one_at_a_time = self.inbox().entering.lock().unwrap_or_else(PoisonError::into_inner);
        let batches = self.inbox().oldest();
        let Some(first) = batches.first() else { return Ok(0) };
        let results: Vec<&Admission> = batches.iter().flat_map(|batch| &batch.results).collect();
        let asked = Asked::to_enter(&results);
        let entered = self.write_beside_results(
            Access::EnterResults,
            &first.lease,
            |tx| asked.foresee(tx),
            |tx| {
                let there = still_there(tx, &results)?;
                let results: Vec<_> = results.iter().copied().filter(|one| there.contains(&one.bundle)).collect();
                accept::enter(tx, &asked, &results)?;
                take_out(tx, &there)
            },
        );
        match entered {
            // The new leader has entered them.
            Err(error) if error.is_lease_lost() => {}
            other => other?,
        }
        self.inbox().remove(&batches);
        Ok(results.len())
    }

    /// Enters results in the inbox that this process did not store.
    pub(super) fn enter_what_a_dead_process_left(&self) -> Result<()> {
        let sql = "SELECT 1 FROM ingest_queue LIMIT 1";
        let some = self.read(|tx| tx.first("reading the inbox", sql, &[], |_| Ok(())))?.is_some();
        if some { self.write_unfenced(Access::WriteAlone, enter_what_is_left) } else { Ok(()) }
    }
}

fn identity(one: &Admission) -> Option<(RunId, i64)> {
    Some((one.result.run, one.admitted?.node))
}

/// The outcome of each result in a batch, and the bundles of the admitted ones.
type Kept = (Vec<std::result::Result<Admitted, TurnedAway>>, Vec<i64>);

fn keep(tx: &mut Tx<'_>, asked: &Asked<'_>, batch: &[Handed], known: &[bool]) -> Result<Kept> {
    let mut expected = Expected::load(tx, &asked.runs)?;
    let admitted: Vec<_> = batch
        .iter()
        .zip(known)
        .map(|(one, known)| if *known { Err(TurnedAway::Duplicate) } else { expected.admit(tx, &one.result) })
        .collect();
    let arrivals: Vec<Arrival<'_>> = batch
        .iter()
        .zip(&admitted)
        .filter_map(|(Handed { result, alone }, admitted)| {
            let &Admitted { node, case, .. } = admitted.as_ref().ok()?;
            Some(Arrival { node, result, alone: alone.as_ref(), case })
        })
        .collect();
    let bundles = bundle::keep(tx, &arrivals)?;
    let mut new = bundles.clone();
    new.dedup();
    let rows: Vec<Val<'_>> = new.into_iter().map(Val::Int).collect();
    tx.bulk("storing results", "ingest_queue (evidence_pack)", &[Kind::Int], &rows, "")?;
    accept::count_turned_away(tx, &admitted)?;
    Ok((admitted, bundles))
}

/// Returns which of their bundles no other process has entered.
fn still_there(tx: &mut Tx<'_>, results: &[&Admission]) -> Result<HashSet<i64>> {
    let mut bundles: Vec<i64> = results.iter().map(|one| one.bundle).collect();
    bundles.dedup();
    let mut there = HashSet::with_capacity(bundles.len());
    let sql = "SELECT evidence_pack FROM ingest_queue WHERE evidence_pack IN {keys}";
    tx.keyed("reading the inbox", sql, &bundles, |row| {
        there.insert(row.int(0)?);
        Ok(())
    })?;
    Ok(there)
}

fn take_out(tx: &mut Tx<'_>, bundles: &HashSet<i64>) -> Result<()> {
    let rows: Vec<Val<'_>> = bundles.iter().map(|bundle| (*bundle).into()).collect();
    let sqlite = "DELETE FROM ingest_queue WHERE evidence_pack = $1";
    let postgres = "DELETE FROM ingest_queue WHERE evidence_pack = ANY ($1::int8[])";
    tx.each("emptying the inbox", (sqlite, postgres), &[Kind::Int], &rows)
}

/// Enters the whole inbox, in a transaction that excludes other writers.
pub(super) fn enter_what_is_left(tx: &mut Tx<'_>) -> Result<()> {
    let operation = "reading the inbox";
    let sql = "SELECT evidence_pack FROM ingest_queue ORDER BY evidence_pack";
    let left = tx.all(operation, sql, &[], |row| row.int(0))?;
    for bundle in left {
        let sql = "SELECT body FROM evidence_pack WHERE id = $1";
        let results = tx.first(operation, sql, &[bundle.into()], |row| bundle::results(row.blob(0)?))?;
        let lost = || StoreError::Unreadable { what: "bundle", why: format!("bundle {bundle} is missing") };
        let results = results.ok_or_else(lost)?.into_iter();
        let results: Vec<_> = results.map(|result| Admission { result, bundle, admitted: None }).collect();
        let results: Vec<&Admission> = results.iter().collect();
        accept::enter(tx, &Asked::to_enter(&results), &results)?;
        take_out(tx, &HashSet::from([bundle]))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Instant};

    use doctor_core::time::Span;

    use super::*;
    use crate::StoreUrl;

    #[test]
    fn a_read_with_a_deadline_does_not_wait_for_results_to_be_entered() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(&StoreUrl::Sqlite(folder.path().join("doctor.db"))).unwrap();
        let lease = Lease { holder: "me".to_owned(), fence: 1, ttl: Span::minutes(1) };
        store.inbox().add(&lease, Vec::new());
        let entering = store.inbox().entering.lock().unwrap();
        let _writing = store.inbox().close();
        let (answer, answered) = mpsc::channel();
        let asking = store.until(Instant::now() + Duration::from_secs(300));
        std::thread::spawn(move || answer.send(asking.tokens().map(|tokens| tokens.len())));
        let tokens = answered.recv_timeout(Duration::from_secs(120)).expect("a read while results are entered");
        assert_eq!(tokens.unwrap(), 0);
        drop(entering);
    }
}
