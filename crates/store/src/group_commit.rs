//! Group commit: results that wait concurrently are written in one transaction and one sync.
//!
//! A sync takes longer than writing a result. Each submitting thread adds its result to the open batch and waits; one
//! thread takes the batch and writes it. Where the database can commit first and sync later, a second thread syncs:
//! while it waits for the disk the next batch is written, and one sync covers all batches written meanwhile. All
//! threads of a batch wake together when it is durable. No batch waits to fill up. A third thread enters durable
//! results in history, many batches together ([`super::ingest_queue`]).

use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
};

use super::{
    Store,
    error::StoreError,
    evidence_pack,
    fencing::Lease,
    ingest_queue::{IngestQueue, SubmittedResult},
    records::{Accepted, ClassifiedResult},
};

/// Maximum results per transaction.
const MAX_BATCH: usize = 128;

/// The outcome of a batch, in order, which its submitters wait for.
type BatchOutcome = OnceLock<Result<Vec<Accepted>, Arc<StoreError>>>;
/// A batch that is committed but not yet durable.
type Unsynced = (CommitBatch, Vec<Accepted>);

/// The shared writer of results. Dropping it waits for work in progress.
#[derive(Debug)]
pub struct GroupCommit {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

impl GroupCommit {
    /// # Errors
    /// If the operating system cannot create a thread.
    pub fn start(store: &Store, lease: &Lease) -> Result<Self, StoreError> {
        let apart = store.shared.db.has_separate_sync();
        let mut group = Self { queue: Arc::default(), threads: Vec::new() };
        let (written, unsynced) = channel();
        if apart {
            let store = store.clone();
            group.spawn("doctor-sync", move || run_syncer(&store, &unsynced))?;
        }
        let (writer, lease, queue) = (store.clone(), lease.clone(), Arc::clone(&group.queue));
        let written = apart.then_some(written);
        group.spawn("doctor-results", move || run_writer(&writer, &lease, &queue, written.as_ref()))?;
        let (store, queue) = (store.clone(), Arc::clone(&group.queue));
        group.spawn("doctor-enter", move || run_applier(&store, &queue))?;
        Ok(group)
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), StoreError> {
        let refused =
            |why: std::io::Error| StoreError::Refused { operation: "starting the writer", why: why.to_string() };
        self.threads.push(std::thread::Builder::new().name(name.to_owned()).spawn(body).map_err(refused)?);
        Ok(())
    }

    /// Submits a result and waits until it is durable.
    ///
    /// # Errors
    /// If the batch could not be written or made durable. Submitting the result again is safe.
    pub fn submit(&self, result: ClassifiedResult) -> Result<Accepted, Arc<StoreError>> {
        let standalone = evidence_pack::compress_standalone(&result).map_err(Arc::new)?;
        let (written, index) = self.queue.join(SubmittedResult { result, standalone }).ok_or_else(stopped)?;
        written.wait().as_ref().map(|accepted| accepted[index]).map_err(Arc::clone)
    }
}

impl Drop for GroupCommit {
    fn drop(&mut self) {
        self.queue.close();
        for thread in self.threads.drain(..) {
            // A panic was printed to standard error, and its waiters got an error.
            drop(thread.join());
        }
    }
}

fn stopped() -> Arc<StoreError> {
    Arc::new(StoreError::Refused { operation: "storing a result", why: "the writer has stopped".to_owned() })
}

fn run_writer(store: &Store, lease: &Lease, queue: &Queue, unsynced: Option<&Sender<Unsynced>>) {
    let _closed_however_this_ends = CloseOnDrop { queue, ingest_queue: store.ingest_queue() };
    while let Some(mut batch) = queue.next() {
        let results = std::mem::take(&mut batch.results);
        match (store.enqueue_results(lease, results), unsynced) {
            // If the sync thread has ended, the batch comes back and its drop returns an error to the waiters.
            (Ok(accepted), Some(unsynced)) => drop(unsynced.send((batch, accepted))),
            (written, _) => batch.resolve(written.map_err(Arc::new)),
        }
    }
}

/// Enters stored results in history. A failure is retried when more results arrive and before any other read or write,
/// whose caller gets the error.
fn run_applier(store: &Store, queue: &Queue) {
    let mut checkpoints = store.shared.db.checkpoints();
    while store.ingest_queue().wait(|| queue.is_over()) {
        if let Err(error) = store.apply_oldest_batches() {
            tracing::warn!(%error, "entering results in history failed; will be retried");
            if queue.is_over() {
                return;
            }
            store.ingest_queue().wait_after_failure();
        }
        if let Err(error) = checkpoints.run_if_due() {
            tracing::warn!(%error, "checkpoint failed; the next writer runs it");
        }
    }
}

fn run_syncer(store: &Store, unsynced: &Receiver<Unsynced>) {
    while let Ok(first) = unsynced.recv() {
        let all: Vec<Unsynced> = std::iter::once(first).chain(unsynced.try_iter()).collect();
        let synced = store.sync().map_err(Arc::new);
        for (batch, accepted) in all {
            batch.resolve(synced.clone().map(|()| accepted));
        }
    }
}

/// Results waiting for the writer, in batches; the last one is open.
#[derive(Debug, Default)]
struct Queue {
    state: Mutex<QueueState>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    batches: VecDeque<CommitBatch>,
    /// No further results are accepted.
    closed: bool,
    /// Every accepted result is written, or never will be.
    ended: bool,
}

#[derive(Debug, Default)]
struct CommitBatch {
    results: Vec<SubmittedResult>,
    outcome: Arc<BatchOutcome>,
}

impl Queue {
    /// Adds a result to the open batch and returns where its outcome appears. Returns `None` if the writer has stopped.
    fn join(&self, one: SubmittedResult) -> Option<(Arc<BatchOutcome>, usize)> {
        let mut waiting = self.lock();
        if waiting.closed {
            return None;
        }
        if waiting.batches.back().is_none_or(|batch| batch.results.len() >= MAX_BATCH) {
            waiting.batches.push_back(CommitBatch::default());
            self.arrived.notify_one();
        }
        let batch = waiting.batches.back_mut()?;
        batch.results.push(one);
        Some((Arc::clone(&batch.outcome), batch.results.len() - 1))
    }

    /// Waits for the oldest batch. Returns `None` when the queue is closed and empty.
    fn next(&self) -> Option<CommitBatch> {
        let waiting = self.lock();
        let idle = |waiting: &mut QueueState| waiting.batches.is_empty() && !waiting.closed;
        self.arrived.wait_while(waiting, idle).unwrap_or_else(PoisonError::into_inner).batches.pop_front()
    }

    fn close(&self) {
        self.lock().closed = true;
        self.arrived.notify_all();
    }

    /// Marks the queue as abandoned by the writer.
    fn end(&self) {
        let mut waiting = self.lock();
        waiting.batches.clear();
        waiting.ended = true;
    }

    fn is_over(&self) -> bool {
        self.lock().ended
    }

    /// Locks, ignoring poison: only a failed allocation can panic under this lock, and it leaves the queue unchanged.
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CommitBatch {
    fn resolve(&self, answer: Result<Vec<Accepted>, Arc<StoreError>>) {
        // The first outcome counts.
        drop(self.outcome.set(answer));
    }
}

/// Returns an error to the waiters of a batch that was never written.
impl Drop for CommitBatch {
    fn drop(&mut self) {
        if self.outcome.get().is_none() {
            self.resolve(Err(stopped()));
        }
    }
}

/// Releases all waiters if the writer dies.
struct CloseOnDrop<'a> {
    queue: &'a Queue,
    ingest_queue: &'a IngestQueue,
}

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.queue.close();
        self.queue.end();
        self.ingest_queue.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiters_of_a_batch_that_is_never_written_get_an_error() {
        let batch = CommitBatch::default();
        let written = Arc::clone(&batch.outcome);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| written.wait().is_err());
            drop(batch);
            assert!(waits.join().unwrap());
        });
    }

    #[test]
    fn a_result_stays_readable_after_its_batch_is_dropped() {
        let batch = CommitBatch::default();
        let written = Arc::clone(&batch.outcome);
        batch.resolve(Ok(vec![Accepted::Stored]));
        drop(batch);
        assert_eq!(written.wait().as_ref().unwrap(), &[Accepted::Stored]);
    }
}
