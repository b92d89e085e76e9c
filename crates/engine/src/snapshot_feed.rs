//! The snapshot feed: after each cycle the engine publishes its snapshot to the threads that serve people, and
//! continues.
//!
//! Only the newest snapshot is kept. A slow reader misses intermediate ones; the engine never waits for a reader.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use doctor_core::{ids::NodeName, snapshot::Snapshot, time::Timestamp};

use crate::settings::Settings;

/// The cluster as a cycle left it.
#[derive(Debug, Clone)]
pub struct ObservedSnapshot {
    pub snapshot: Snapshot,
    /// When the cluster last answered; before `snapshot.at` while it does not.
    pub observed_at: Option<Timestamp>,
    /// The backend's name.
    pub backend: String,
    /// Nodes that the cycle's actions have changed in the store.
    pub changed_in_store: Vec<NodeName>,
    /// The settings of that cycle.
    pub settings: Settings,
}

/// The feed itself.
#[derive(Debug, Default)]
pub struct SnapshotFeed {
    state: Mutex<FeedState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct FeedState {
    pending: Option<FeedMessage>,
    closed: bool,
}

/// A message of the feed.
#[derive(Debug)]
pub enum FeedMessage {
    /// This process leads, and observed this.
    Snapshot(Box<ObservedSnapshot>),
    /// This process is not the leader (any more): read the store.
    ReadStore,
}

impl SnapshotFeed {
    fn lock(&self) -> MutexGuard<'_, FeedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn publish(&self, observed: ObservedSnapshot) {
        self.send(FeedMessage::Snapshot(Box::new(observed)));
    }

    pub(crate) fn publish_not_leading(&self) {
        self.send(FeedMessage::ReadStore);
    }

    fn send(&self, message: FeedMessage) {
        self.lock().pending = Some(message);
        self.changed.notify_all();
    }

    /// Closes the feed: there are no readers any more.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Waits for a message, at most this long. `None`: there is none, or the feed is closed.
    pub fn wait(&self, timeout: Duration) -> Option<FeedMessage> {
        let is_idle = |state: &mut FeedState| state.pending.is_none() && !state.closed;
        let result = self.changed.wait_timeout_while(self.lock(), timeout, is_idle);
        let (mut state, _) = result.unwrap_or_else(PoisonError::into_inner);
        state.pending.take()
    }
}
