//! Many hands, one sync: results that wait at the same time are written in one transaction.
//!
//! A sync to disk takes longer than writing a result. Each thread that brings one joins the batch that is gathering and
//! waits; one thread takes the batch and keeps it. Where the database can commit first and sync later, a second thread
//! syncs: while it waits for the disk the next batch is written, and one sync serves all that were written meanwhile.
//! Whoever is in a batch is woken when it is durable, all at once. Nobody waits for a batch to fill. What is durable is
//! entered in history by a third thread, many batches at once ([`super::inbox`]).

use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
};

use super::{
    Store, bundle,
    error::StoreError,
    inbox::{Handed, Inbox},
    lease::Lease,
    records::{Accepted, JudgedResult},
};

/// The most results in one transaction.
const MOST: usize = 128;

/// What became of a batch, in its order. Whoever is in it waits for this.
type Written = OnceLock<Result<Vec<Accepted>, Arc<StoreError>>>;
/// A batch that is committed and not yet durable.
type Unsynced = (Batch, Vec<Accepted>);

/// The shared writer of results. Dropping it waits for what is under way.
#[derive(Debug)]
pub struct GroupCommit {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

impl GroupCommit {
    /// # Errors
    /// If the operating system has no thread to give.
    pub fn start(store: &Store, lease: &Lease) -> Result<Self, StoreError> {
        let apart = store.shared.db.syncs_apart();
        let mut group = Self { queue: Arc::default(), threads: Vec::new() };
        let (written, unsynced) = channel();
        if apart {
            let store = store.clone();
            group.spawn("doctor-sync", move || sync_what_is_written(&store, &unsynced))?;
        }
        let (writer, lease, queue) = (store.clone(), lease.clone(), Arc::clone(&group.queue));
        let written = apart.then_some(written);
        group.spawn("doctor-results", move || write_what_waits(&writer, &lease, &queue, written.as_ref()))?;
        let (store, queue) = (store.clone(), Arc::clone(&group.queue));
        group.spawn("doctor-enter", move || enter_what_is_kept(&store, &queue))?;
        Ok(group)
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), StoreError> {
        let refused =
            |why: std::io::Error| StoreError::Refused { operation: "starting the writer", why: why.to_string() };
        self.threads.push(std::thread::Builder::new().name(name.to_owned()).spawn(body).map_err(refused)?);
        Ok(())
    }

    /// Hands a result in and waits until it is durable.
    ///
    /// # Errors
    /// If the batch could not be written or made durable. Handing the result in again is safe.
    pub fn submit(&self, result: JudgedResult) -> Result<Accepted, Arc<StoreError>> {
        let alone = bundle::pack_alone(&result).map_err(Arc::new)?;
        let (written, place) = self.queue.join(Handed { result, alone }).ok_or_else(stopped)?;
        written.wait().as_ref().map(|accepted| accepted[place]).map_err(Arc::clone)
    }
}

impl Drop for GroupCommit {
    fn drop(&mut self) {
        self.queue.close();
        for thread in self.threads.drain(..) {
            // One that panicked has told so on standard error, and those who waited got an error.
            drop(thread.join());
        }
    }
}

fn stopped() -> Arc<StoreError> {
    Arc::new(StoreError::Refused { operation: "keeping a result", why: "the writer has stopped".to_owned() })
}

fn write_what_waits(store: &Store, lease: &Lease, queue: &Queue, unsynced: Option<&Sender<Unsynced>>) {
    let _closed_however_this_ends = CloseOnDrop { queue, inbox: store.inbox() };
    while let Some(mut batch) = queue.next() {
        let results = std::mem::take(&mut batch.results);
        match (store.keep_for_later(lease, results), unsynced) {
            // If nobody syncs any more the batch comes back, and says so to those who wait as it goes.
            (Ok(accepted), Some(unsynced)) => drop(unsynced.send((batch, accepted))),
            (written, _) => batch.answer(written.map_err(Arc::new)),
        }
    }
}

/// What cannot be entered now is tried again when more has come, and before anybody reads or writes anything else: they
/// are told why it cannot.
fn enter_what_is_kept(store: &Store, queue: &Queue) {
    let mut checkpoints = store.shared.db.checkpoints();
    while store.inbox().wait(|| queue.is_over()) {
        if let Err(error) = store.enter_some() {
            tracing::warn!(%error, "results that are kept could not be entered yet");
            if queue.is_over() {
                return;
            }
            store.inbox().rest();
        }
        if let Err(error) = checkpoints.when_due() {
            tracing::warn!(%error, "the log could not be brought into the database; whoever writes next will");
        }
    }
}

fn sync_what_is_written(store: &Store, unsynced: &Receiver<Unsynced>) {
    while let Ok(first) = unsynced.recv() {
        let all: Vec<Unsynced> = std::iter::once(first).chain(unsynced.try_iter()).collect();
        let synced = store.sync().map_err(Arc::new);
        for (batch, accepted) in all {
            batch.answer(synced.clone().map(|()| accepted));
        }
    }
}

/// Results that wait for the writer, in batches; the last one is gathering.
#[derive(Debug, Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    batches: VecDeque<Batch>,
    /// Nothing more may come.
    closed: bool,
    /// All that came was written, or will not be.
    over: bool,
}

#[derive(Debug, Default)]
struct Batch {
    results: Vec<Handed>,
    written: Arc<Written>,
}

impl Queue {
    /// Adds a result to the batch that is gathering, and tells where its answer will be. `None`: nobody writes any more.
    fn join(&self, one: Handed) -> Option<(Arc<Written>, usize)> {
        let mut waiting = self.lock();
        if waiting.closed {
            return None;
        }
        if waiting.batches.back().is_none_or(|batch| batch.results.len() >= MOST) {
            waiting.batches.push_back(Batch::default());
            self.arrived.notify_one();
        }
        let batch = waiting.batches.back_mut()?;
        batch.results.push(one);
        Some((Arc::clone(&batch.written), batch.results.len() - 1))
    }

    /// The oldest batch, as soon as there is one. `None`: closed, and nothing is left.
    fn next(&self) -> Option<Batch> {
        let waiting = self.lock();
        let idle = |waiting: &mut Waiting| waiting.batches.is_empty() && !waiting.closed;
        self.arrived.wait_while(waiting, idle).unwrap_or_else(PoisonError::into_inner).batches.pop_front()
    }

    fn close(&self) {
        self.lock().closed = true;
        self.arrived.notify_all();
    }

    /// Nobody takes batches any more.
    fn end(&self) {
        let mut waiting = self.lock();
        waiting.batches.clear();
        waiting.over = true;
    }

    fn is_over(&self) -> bool {
        self.lock().over
    }

    /// Nothing panics under this lock but a failing allocation, which leaves the queue as it was.
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Batch {
    fn answer(&self, answer: Result<Vec<Accepted>, Arc<StoreError>>) {
        // The first answer stands.
        drop(self.written.set(answer));
    }
}

/// A batch that goes without having been written says so to those who wait.
impl Drop for Batch {
    fn drop(&mut self) {
        if self.written.get().is_none() {
            self.answer(Err(stopped()));
        }
    }
}

/// A writer that dies leaves nobody waiting.
struct CloseOnDrop<'a> {
    queue: &'a Queue,
    inbox: &'a Inbox,
}

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.queue.close();
        self.queue.end();
        self.inbox.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_that_is_never_written_tells_those_who_wait() {
        let batch = Batch::default();
        let written = Arc::clone(&batch.written);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| written.wait().is_err());
            drop(batch);
            assert!(waits.join().unwrap());
        });
    }

    #[test]
    fn an_answer_stands_when_its_batch_is_gone() {
        let batch = Batch::default();
        let written = Arc::clone(&batch.written);
        batch.answer(Ok(vec![Accepted::Kept]));
        drop(batch);
        assert_eq!(written.wait().as_ref().unwrap(), &[Accepted::Kept]);
    }
}
