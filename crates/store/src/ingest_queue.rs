//! Results that are stored but not yet entered in history.
//!
//! Entering a result touches pages of history, `latest_result` and `pending_results`, at different places for each
//! node. In batches as small as waiting submitters allow, that is most of the cost of a result; hundreds together share
//! pages, statements and transactions. So a batch is first only stored: its documents and results form a bundle, which
//! is written and made durable, and the submitters are acknowledged. Later many bundles are entered together.
//!
//! These rules make it one consistent store:
//!
//! - A bundle is in the ingest queue from the transaction that stores it to the one that enters its results.
//! - A reader in this process first enters everything stored before.
//! - Any other writer in this process first closes the ingest queue and enters its content: nothing changes underneath an
//!   admitted result.
//! - Another process sees results when they are entered, a moment later. A process that opens the store for writing or
//!   takes the lease enters what it finds. Two processes that enter the same results do so one after the other, because both lock
//!   the lease's row, and the second finds nothing.

use std::{
    collections::{HashSet, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard},
    time::Duration,
};

use doctor_core::ids::RunId;

use super::{
    Store,
    accept::{self, AdmissionInfo, AdmittedResult, BatchKeys, PendingRuns, RejectReason},
    compression::Packed,
    db::{Access, ColumnType, SqlValue, Tx},
    error::{Result, StoreError},
    evidence_pack::{self, IncomingResult},
    fencing::Lease,
    records::{Accepted, ClassifiedResult},
};

/// Maximum wait of fewer results than [`Limits::apply_at`].
const MAX_DELAY: Duration = Duration::from_millis(50);

/// Wait after a failure.
const PAUSE: Duration = Duration::from_secs(1);

/// Batch sizes for entering results.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// Enter immediately from this many results.
    apply_at: usize,
    /// Maximum results entered in one transaction.
    max_per_transaction: usize,
    /// From this many waiting, a batch is stored only after some have been entered.
    max_queued: usize,
}

/// SQLite has one writer, so the thread that stores results also enters them while others wait.
const SQLITE_LIMITS: Limits = Limits { apply_at: 4096, max_per_transaction: 4096, max_queued: 4096 };
/// Entering runs concurrently with storing, so the server is busy from the start and little is left at the end.
const POSTGRES_LIMITS: Limits = Limits { apply_at: 1024, max_per_transaction: 2048, max_queued: 8192 };

/// Results that this process has stored and not entered.
#[derive(Debug)]
pub(super) struct IngestQueue {
    limits: Limits,
    /// Shared by threads that store results, exclusive for other writes.
    submit_lock: RwLock<()>,
    queued: Mutex<QueuedResults>,
    arrived: Condvar,
    /// Held while results are entered.
    apply_lock: Mutex<()>,
}

#[derive(Debug, Default)]
struct QueuedResults {
    batches: VecDeque<Arc<StoredBatch>>,
    results: usize,
    queued_keys: HashSet<(RunId, i64)>,
    /// Number of batches ever stored.
    batches_stored: u64,
}

/// Results stored in one transaction, each with its bundle.
#[derive(Debug)]
struct StoredBatch {
    number: u64,
    lease: Lease,
    results: Vec<AdmittedResult>,
}

/// A submitted result.
#[derive(Debug)]
pub(super) struct SubmittedResult {
    pub(super) result: ClassifiedResult,
    /// Its document, if it is stored on its own.
    pub(super) standalone: Option<Packed>,
}

impl IngestQueue {
    pub(super) fn new(sqlite: bool) -> Self {
        Self {
            limits: if sqlite { SQLITE_LIMITS } else { POSTGRES_LIMITS },
            submit_lock: RwLock::default(),
            queued: Mutex::default(),
            arrived: Condvar::new(),
            apply_lock: Mutex::default(),
        }
    }

    /// Blocks incoming results while the guard is held.
    pub(super) fn block_submits(&self) -> RwLockWriteGuard<'_, ()> {
        self.submit_lock.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until results should be entered. Returns `false` when `ended` holds and nothing waits.
    pub(super) fn wait(&self, ended: impl Fn() -> bool) -> bool {
        let none_yet = |waiting: &mut QueuedResults| waiting.results == 0 && !ended();
        let few = |waiting: &mut QueuedResults| waiting.results < self.limits.apply_at && !ended();
        let waiting = self.arrived.wait_while(self.lock(), none_yet).unwrap_or_else(PoisonError::into_inner);
        let (waiting, _) =
            self.arrived.wait_timeout_while(waiting, MAX_DELAY, few).unwrap_or_else(PoisonError::into_inner);
        waiting.results > 0 || !ended()
    }

    /// Waits after a failure for a while, or until more results arrive.
    pub(super) fn wait_after_failure(&self) {
        drop(self.arrived.wait_timeout(self.lock(), PAUSE));
    }

    /// Wakes all waiters to check their condition again.
    pub(super) fn wake(&self) {
        // Under the lock, so that no waiter is between its check and its wait.
        let _waiting = self.lock();
        self.arrived.notify_all();
    }

    fn add(&self, lease: &Lease, results: Vec<AdmittedResult>) {
        let mut waiting = self.lock();
        waiting.batches_stored += 1;
        waiting.results += results.len();
        waiting.queued_keys.extend(results.iter().filter_map(identity));
        let number = waiting.batches_stored;
        waiting.batches.push_back(Arc::new(StoredBatch { number, lease: lease.clone(), results }));
        if waiting.results >= self.limits.apply_at || waiting.batches.len() == 1 {
            self.arrived.notify_all();
        }
    }

    /// Returns the oldest batches of one lease, up to the limit.
    fn oldest(&self) -> Vec<Arc<StoredBatch>> {
        let waiting = self.lock();
        let Some(first) = waiting.batches.front() else { return Vec::new() };
        let mut results = 0;
        let some = waiting.batches.iter().take_while(|batch| {
            let fits = results == 0 || results + batch.results.len() <= self.limits.max_per_transaction;
            results += batch.results.len();
            fits && batch.lease == first.lease
        });
        some.cloned().collect()
    }

    fn remove(&self, entered: &[Arc<StoredBatch>]) {
        let mut waiting = self.lock();
        for batch in entered {
            waiting.batches.retain(|other| other.number != batch.number);
            waiting.results -= batch.results.len();
            for one in batch.results.iter().filter_map(identity) {
                waiting.queued_keys.remove(&one);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, QueuedResults> {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    /// The ingest queue of this process.
    pub(super) fn ingest_queue(&self) -> &IngestQueue {
        &self.shared.ingest_queue
    }

    /// Returns the number of results that this process has stored and not entered yet.
    pub fn queued_results(&self) -> usize {
        self.ingest_queue().lock().results
    }

    /// Stores results to be entered later. Where syncing is a separate step they are not durable yet.
    pub(super) fn enqueue_results(&self, lease: &Lease, batch: Vec<SubmittedResult>) -> Result<Vec<Accepted>> {
        while self.ingest_queue().lock().results >= self.ingest_queue().limits.max_queued {
            self.apply_oldest_batches()?;
        }
        let _others_wait = self.ingest_queue().submit_lock.read().unwrap_or_else(PoisonError::into_inner);
        // Before the query: results entered meanwhile leave the ingest queue, and the database reports them.
        let known = self.are_queued(&batch);
        let keys = BatchKeys::new(batch.iter().map(|one| &one.result).collect());
        let (admitted, bundles) = self.write_concurrently(
            Access::EnqueueResults,
            lease,
            |tx| keys.prefetch_runs(tx),
            |tx| enqueue(tx, &keys, &batch, &known),
        )?;
        let mut bundles = bundles.into_iter();
        let mut stored = Vec::with_capacity(bundles.len());
        let mut accepted = Vec::with_capacity(batch.len());
        for (SubmittedResult { mut result, .. }, admitted) in batch.into_iter().zip(admitted) {
            accepted.push(admitted.map_or_else(Accepted::from, |_| Accepted::Stored));
            let Ok(admitted) = admitted else { continue };
            if let Some(bundle) = bundles.next() {
                result.evidence = Vec::new();
                stored.push(AdmittedResult { result, bundle, info: Some(admitted) });
            }
        }
        if !stored.is_empty() {
            self.ingest_queue().add(lease, stored);
        }
        Ok(accepted)
    }

    /// Returns which of these are in the ingest queue of this process.
    fn are_queued(&self, batch: &[SubmittedResult]) -> Vec<bool> {
        let names = Arc::clone(&self.shared.ids.read().unwrap_or_else(PoisonError::into_inner));
        let waiting = self.ingest_queue().lock();
        let known = |result: &ClassifiedResult| Some((result.run, names.node_id(&result.node)?));
        batch.iter().map(|one| known(&one.result).is_some_and(|one| waiting.queued_keys.contains(&one))).collect()
    }

    /// Enters everything this process stored before this call.
    pub(super) fn apply_queued_results(&self) -> Result<()> {
        let newest = self.ingest_queue().lock().batches_stored;
        while self.ingest_queue().lock().batches.front().is_some_and(|oldest| oldest.number <= newest) {
            self.apply_oldest_batches()?;
        }
        Ok(())
    }

    /// Enters the oldest waiting batches and returns the number of results.
    pub(super) fn apply_oldest_batches(&self) -> Result<usize> {
        let _one_at_a_time = self.ingest_queue().apply_lock.lock().unwrap_or_else(PoisonError::into_inner);
        let batches = self.ingest_queue().oldest();
        let Some(first) = batches.first() else { return Ok(0) };
        let results: Vec<&AdmittedResult> = batches.iter().flat_map(|batch| &batch.results).collect();
        let keys = BatchKeys::for_apply(&results);
        let entered = self.write_concurrently(
            Access::ApplyResults,
            &first.lease,
            |tx| keys.prefetch(tx),
            |tx| {
                let packs = remaining_packs(tx, &results)?;
                let results: Vec<_> = results.iter().copied().filter(|one| packs.contains(&one.bundle)).collect();
                accept::apply_admitted(tx, &keys, &results)?;
                remove_packs(tx, &packs)
            },
        );
        match entered {
            // The new leader has entered them.
            Err(error) if error.is_lease_lost() => {}
            other => other?,
        }
        self.ingest_queue().remove(&batches);
        Ok(results.len())
    }

    /// Enters results in the ingest queue that this process did not store.
    pub(super) fn recover_ingest_queue(&self) -> Result<()> {
        let sql = "SELECT 1 FROM ingest_queue LIMIT 1";
        let some = self.read(|tx| tx.first("reading the inbox", sql, &[], |_| Ok(())))?.is_some();
        if some { self.write_unfenced(Access::WriteExclusive, apply_all) } else { Ok(()) }
    }
}

fn identity(one: &AdmittedResult) -> Option<(RunId, i64)> {
    Some((one.result.run, one.info?.node))
}

/// The outcome of each result in a batch, and the bundles of the admitted ones.
type StoreOutcome = (Vec<std::result::Result<AdmissionInfo, RejectReason>>, Vec<i64>);

fn enqueue(tx: &mut Tx<'_>, keys: &BatchKeys<'_>, batch: &[SubmittedResult], known: &[bool]) -> Result<StoreOutcome> {
    let mut expected = PendingRuns::load(tx, &keys.runs)?;
    let admitted: Vec<_> = batch
        .iter()
        .zip(known)
        .map(|(one, known)| if *known { Err(RejectReason::Duplicate) } else { expected.admit(tx, &one.result) })
        .collect();
    let arrivals: Vec<IncomingResult<'_>> = batch
        .iter()
        .zip(&admitted)
        .filter_map(|(SubmittedResult { result, standalone }, admitted)| {
            let &AdmissionInfo { node, case, .. } = admitted.as_ref().ok()?;
            Some(IncomingResult { node, result, standalone: standalone.as_ref(), case })
        })
        .collect();
    let bundles = evidence_pack::store_results(tx, &arrivals)?;
    let mut new = bundles.clone();
    new.dedup();
    let rows: Vec<SqlValue<'_>> = new.into_iter().map(SqlValue::Int).collect();
    tx.insert_many("storing results", "ingest_queue (evidence_pack)", &[ColumnType::Int], &rows, "")?;
    accept::count_rejected_results(tx, &admitted)?;
    Ok((admitted, bundles))
}

/// Returns which of their bundles no other process has entered.
fn remaining_packs(tx: &mut Tx<'_>, results: &[&AdmittedResult]) -> Result<HashSet<i64>> {
    let mut bundles: Vec<i64> = results.iter().map(|one| one.bundle).collect();
    bundles.dedup();
    let mut there = HashSet::with_capacity(bundles.len());
    let sql = "SELECT evidence_pack FROM ingest_queue WHERE evidence_pack IN {keys}";
    tx.rows_by_key("reading the inbox", sql, &bundles, |row| {
        there.insert(row.int(0)?);
        Ok(())
    })?;
    Ok(there)
}

fn remove_packs(tx: &mut Tx<'_>, bundles: &HashSet<i64>) -> Result<()> {
    let rows: Vec<SqlValue<'_>> = bundles.iter().map(|bundle| (*bundle).into()).collect();
    let sqlite = "DELETE FROM ingest_queue WHERE evidence_pack = $1";
    let postgres = "DELETE FROM ingest_queue WHERE evidence_pack = ANY ($1::int8[])";
    tx.execute_each("emptying the inbox", (sqlite, postgres), &[ColumnType::Int], &rows)
}

/// Enters the whole ingest queue, in a transaction that excludes other writers.
pub(super) fn apply_all(tx: &mut Tx<'_>) -> Result<()> {
    let operation = "reading the inbox";
    let sql = "SELECT evidence_pack FROM ingest_queue ORDER BY evidence_pack";
    let left = tx.all(operation, sql, &[], |row| row.int(0))?;
    for bundle in left {
        let sql = "SELECT body FROM evidence_pack WHERE id = $1";
        let results = tx.first(operation, sql, &[bundle.into()], |row| evidence_pack::results(row.blob(0)?))?;
        let lost = || StoreError::Unreadable { what: "bundle", why: format!("bundle {bundle} is missing") };
        let results = results.ok_or_else(lost)?.into_iter();
        let results: Vec<_> = results.map(|result| AdmittedResult { result, bundle, info: None }).collect();
        let results: Vec<&AdmittedResult> = results.iter().collect();
        accept::apply_admitted(tx, &BatchKeys::for_apply(&results), &results)?;
        remove_packs(tx, &HashSet::from([bundle]))?;
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
    fn a_read_with_a_deadline_does_not_wait_for_queued_results() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(&StoreUrl::Sqlite(folder.path().join("doctor.db"))).unwrap();
        let lease = Lease { holder: "me".to_owned(), fence: 1, ttl: Span::minutes(1) };
        store.ingest_queue().add(&lease, Vec::new());
        let entering = store.ingest_queue().apply_lock.lock().unwrap();
        let _writing = store.ingest_queue().block_submits();
        let (answer, answered) = mpsc::channel();
        let asking = store.with_deadline(Instant::now() + Duration::from_secs(300));
        std::thread::spawn(move || answer.send(asking.tokens().map(|tokens| tokens.len())));
        let tokens = answered.recv_timeout(Duration::from_secs(120)).expect("a read while results are entered");
        assert_eq!(tokens.unwrap(), 0);
        drop(entering);
    }
}
