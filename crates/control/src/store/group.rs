//! Many hands, one sync: results that wait at the same time are written in one transaction.
//!
//! A sync to disk takes longer than writing a result. Each thread that brings one compresses its document itself and
//! waits; one thread takes whatever has gathered meanwhile and writes it together. Nobody waits for a batch to fill.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
    },
    thread::JoinHandle,
};

use super::{
    Store,
    error::StoreError,
    evidence::Packed,
    lease::Lease,
    records::{Accepted, JudgedResult},
};

/// The most results in one transaction.
const MOST: usize = 256;

type Answer = Result<Accepted, Arc<StoreError>>;

struct Waiting {
    result: JudgedResult,
    packed: Packed,
    answer: SyncSender<Answer>,
}

/// The shared writer of results. Dropping it waits for what is under way.
#[derive(Debug)]
pub struct GroupCommit {
    door: Option<Sender<Waiting>>,
    writer: Option<JoinHandle<()>>,
}

impl GroupCommit {
    /// # Errors
    /// If the operating system has no thread to give.
    pub fn start(store: Store, lease: Lease) -> Result<Self, StoreError> {
        let (door, waiting) = channel();
        let writer = std::thread::Builder::new()
            .name("doctor-results".to_owned())
            .spawn(move || write_what_waits(&store, &lease, &waiting))
            .map_err(|error| StoreError::Refused { operation: "starting the writer", why: error.to_string() })?;
        Ok(Self { door: Some(door), writer: Some(writer) })
    }

    /// Hands a result in and waits until it is durable.
    ///
    /// # Errors
    /// If the batch could not be written; then none of it was.
    pub fn submit(&self, mut result: JudgedResult) -> Answer {
        let packed = Packed::new(&result.evidence).map_err(Arc::new)?;
        result.evidence = Vec::new();
        let (answer, written) = sync_channel(1);
        let gone = || {
            Arc::new(StoreError::Refused { operation: "keeping a result", why: "the writer has stopped".to_owned() })
        };
        let door = self.door.as_ref().ok_or_else(gone)?;
        door.send(Waiting { result, packed, answer }).map_err(|_| gone())?;
        written.recv().map_err(|_| gone())?
    }
}

impl Drop for GroupCommit {
    fn drop(&mut self) {
        self.door = None;
        if let Some(writer) = self.writer.take() {
            // A writer that panicked has told so on standard error, and those who waited got an error.
            drop(writer.join());
        }
    }
}

fn write_what_waits(store: &Store, lease: &Lease, waiting: &Receiver<Waiting>) {
    while let Ok(first) = waiting.recv() {
        let mut batch = vec![first];
        batch.extend(waiting.try_iter().take(MOST - 1));
        let rows: Vec<(&JudgedResult, &Packed)> = batch.iter().map(|one| (&one.result, &one.packed)).collect();
        let written = store.accept_packed(lease, &rows).map_err(Arc::new);
        for (i, one) in batch.iter().enumerate() {
            let answer = match &written {
                Ok(accepted) => Ok(accepted[i]),
                Err(error) => Err(Arc::clone(error)),
            };
            // Somebody who stopped waiting does not need the answer.
            drop(one.answer.send(answer));
        }
    }
}
