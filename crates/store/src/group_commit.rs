//! Group commit: messages that arrive concurrently are made durable in one transaction and one sync.
//!
//! A sync takes longer than writing a message. Each submitter adds its message to the open batch; one thread takes the
//! batch and writes it. Where the database can commit first and sync later, a second thread syncs: while it waits for
//! the disk the next batch is written, and one sync covers all batches written meanwhile. All submitters of a batch are
//! answered together when it is durable. No batch waits to fill up. A third thread keeps the write-ahead log short
//! beside the writer.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
};

use super::{
    Store,
    error::StoreError,
    ingest_queue::PackedMessage,
    messages::{Enqueued, VerifiedMessage},
};

/// Limits of one transaction: other writers wait for it.
const MAX_BATCH: usize = 128;
const MAX_BATCH_BYTES: usize = 8 << 20;

/// The outcome of one message.
pub type SubmitOutcome = Result<Enqueued, Arc<StoreError>>;
/// Receives the outcome of one message, on a thread that must not wait.
type Answer = Box<dyn FnOnce(SubmitOutcome) + Send>;

/// A batch that is committed but not yet durable.
type Unsynced = (CommitBatch, Vec<Enqueued>);

/// The shared writer of messages. Dropping it waits for work in progress.
#[derive(Debug)]
pub struct GroupCommit {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

impl GroupCommit {
    /// # Errors
    /// If the operating system cannot create a thread.
    pub fn start(store: &Store) -> Result<Self, StoreError> {
        let mut group = Self { queue: Arc::default(), threads: Vec::new() };
        let apart = store.shared.db.has_separate_sync();
        let (written, unsynced) = channel();
        let (synced, long) = channel();
        if apart {
            let syncer = store.clone();
            group.spawn("doctor-sync", move || run_syncer(&syncer, &unsynced, &synced))?;
            let store = store.clone();
            group.spawn("doctor-log", move || run_checkpoints(&store, &long))?;
        }
        let (store, queue) = (store.clone(), Arc::clone(&group.queue));
        let written = apart.then_some(written);
        group.spawn("doctor-ingest", move || run_writer(&store, &queue, written.as_ref()))?;
        Ok(group)
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), StoreError> {
        let refused =
            |why: std::io::Error| StoreError::Refused { operation: "starting the writer", why: why.to_string() };
        self.threads.push(std::thread::Builder::new().name(name.to_owned()).spawn(body).map_err(refused)?);
        Ok(())
    }

    /// Submits a message. `answer` is called once, when it is durable or will not be; submitting it again is safe.
    pub fn submit(&self, message: VerifiedMessage, answer: impl FnOnce(SubmitOutcome) + Send + 'static) {
        match PackedMessage::new(message) {
            Ok(packed) => self.queue.join(packed, Box::new(answer)),
            Err(error) => answer(Err(Arc::new(error))),
        }
    }

    /// Submits a message and waits for the outcome.
    ///
    /// # Errors
    /// If it could not be made durable. Submitting it again is safe.
    pub fn submit_and_wait(&self, message: VerifiedMessage) -> SubmitOutcome {
        let (sender, outcome) = channel();
        self.submit(message, move |answer| drop(sender.send(answer)));
        outcome.recv().unwrap_or_else(|_| Err(stopped()))
    }

    /// Returns the number of messages that are not durable yet.
    pub fn waiting(&self) -> usize {
        self.queue.lock().batches.iter().map(|batch| batch.messages.len()).sum()
    }
}

impl Drop for GroupCommit {
    fn drop(&mut self) {
        self.queue.close();
        for thread in self.threads.drain(..) {
            // A panic was printed to standard error, and its submitters got an error.
            drop(thread.join());
        }
    }
}

fn stopped() -> Arc<StoreError> {
    Arc::new(StoreError::Refused { operation: "storing a message", why: "the writer has stopped".to_owned() })
}

fn run_writer(store: &Store, queue: &Queue, unsynced: Option<&Sender<Unsynced>>) {
    let _closed_however_this_ends = CloseOnDrop(queue);
    while let Some(mut batch) = queue.next() {
        match (store.enqueue_messages(&batch.messages), unsynced) {
            (Ok(outcomes), Some(unsynced)) => {
                // What is kept of a message until it is entered is in the ingest queue.
                batch.messages = Vec::new();
                // If the sync thread has ended, the batch comes back and its drop answers the submitters with an error.
                drop(unsynced.send((batch, outcomes)));
            }
            (written, _) => batch.resolve(written.map_err(Arc::new)),
        }
    }
}

fn run_syncer(store: &Store, unsynced: &Receiver<Unsynced>, synced: &Sender<()>) {
    while let Ok(first) = unsynced.recv() {
        let all: Vec<Unsynced> = std::iter::once(first).chain(unsynced.try_iter()).collect();
        let result = store.sync().map_err(Arc::new);
        for (batch, outcomes) in all {
            batch.resolve(result.clone().map(|()| outcomes));
        }
        // The checkpoint thread ends only after this one.
        let _ended = synced.send(());
    }
}

fn run_checkpoints(store: &Store, synced: &Receiver<()>) {
    let mut checkpoints = store.shared.db.checkpoints();
    while synced.recv().is_ok() {
        synced.try_iter().for_each(|()| {});
        if let Err(error) = checkpoints.run_if_due() {
            tracing::warn!(%error, "checkpoint failed; the next writer runs it");
        }
    }
}

/// Messages waiting for the writer, in batches; the last one is open.
#[derive(Debug, Default)]
struct Queue {
    state: Mutex<QueueState>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    batches: VecDeque<CommitBatch>,
    /// No further messages are accepted.
    closed: bool,
}

#[derive(Default)]
struct CommitBatch {
    messages: Vec<PackedMessage>,
    bytes: usize,
    answers: Vec<Answer>,
}

impl std::fmt::Debug for CommitBatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CommitBatch").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Queue {
    /// Adds a message to the open batch.
    fn join(&self, packed: PackedMessage, answer: Answer) {
        let mut waiting = self.lock();
        if waiting.closed {
            drop(waiting);
            return answer(Err(stopped()));
        }
        let length = packed.stored_length();
        let is_full = |batch: &CommitBatch| batch.messages.len() >= MAX_BATCH || batch.bytes + length > MAX_BATCH_BYTES;
        if waiting.batches.back().is_none_or(is_full) {
            waiting.batches.push_back(CommitBatch::default());
            self.arrived.notify_one();
        }
        if let Some(batch) = waiting.batches.back_mut() {
            batch.bytes += length;
            batch.messages.push(packed);
            batch.answers.push(answer);
        }
    }

    /// Waits for the oldest batch. Returns `None` when the queue is closed and empty.
    fn next(&self) -> Option<CommitBatch> {
        let idle = |waiting: &mut QueueState| waiting.batches.is_empty() && !waiting.closed;
        self.arrived.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner).batches.pop_front()
    }

    fn close(&self) {
        self.lock().closed = true;
        self.arrived.notify_all();
    }

    /// Locks, ignoring poison: only a failed allocation can panic under this lock, and it leaves the queue unchanged.
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CommitBatch {
    fn resolve(mut self, outcome: Result<Vec<Enqueued>, Arc<StoreError>>) {
        let answers = std::mem::take(&mut self.answers);
        match outcome {
            Ok(outcomes) => answers.into_iter().zip(outcomes).for_each(|(answer, outcome)| answer(Ok(outcome))),
            Err(error) => answers.into_iter().for_each(|answer| answer(Err(Arc::clone(&error)))),
        }
    }
}

/// Answers the submitters of a batch that was never written.
impl Drop for CommitBatch {
    fn drop(&mut self) {
        self.answers.drain(..).for_each(|answer| answer(Err(stopped())));
    }
}

/// Answers all submitters if the writer dies.
struct CloseOnDrop<'a>(&'a Queue);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close();
        let left = std::mem::take(&mut self.0.lock().batches);
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn submitters_of_a_batch_that_is_never_written_get_an_error() {
        let (sender, outcomes) = channel();
        let answer: Answer = Box::new(move |outcome| sender.send(outcome).unwrap());
        let mut batch = CommitBatch::default();
        batch.answers.push(answer);
        drop(batch);
        assert!(outcomes.recv().unwrap().is_err());
        assert!(outcomes.recv().is_err(), "it was answered once");
    }

    #[test]
    fn each_submitter_gets_the_outcome_of_its_own_message_once() {
        let (sender, outcomes) = channel();
        let answer = |index: usize| -> Answer {
            let sender = sender.clone();
            Box::new(move |outcome| sender.send((index, outcome.unwrap())).unwrap())
        };
        let mut batch = CommitBatch::default();
        batch.answers.extend([answer(0), answer(1)]);
        batch.resolve(Ok(vec![Enqueued::Queued, Enqueued::Duplicate]));
        drop(sender);
        assert_eq!(outcomes.iter().collect::<Vec<_>>(), [(0, Enqueued::Queued), (1, Enqueued::Duplicate)]);
    }
}
