//! The snapshot feed: after each cycle the engine publishes its snapshot to the threads that serve people, and
//! continues.
//!
//! Only the newest snapshot is kept. A slow reader misses intermediate ones; the engine never waits for a reader.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use doctor_core::{ids::NodeName, snapshot::Snapshot};

use crate::settings::Settings;

/// The cluster as a cycle left it.
#[derive(Debug, Clone)]
pub struct Seen {
    pub snapshot: Snapshot,
    /// Nodes that the cycle's actions have changed in the store.
    pub behind: Vec<NodeName>,
    /// The settings of that cycle.
    pub settings: Settings,
}

/// The feed itself.
#[derive(Debug, Default)]
pub struct Audience {
    inside: Mutex<Inside>,
    bell: Condvar,
}

#[derive(Debug, Default)]
struct Inside {
    waiting: Option<News>,
    closed: bool,
}

/// A message of the feed.
#[derive(Debug)]
pub enum News {
    /// This process leads, and observed this.
    Seen(Box<Seen>),
    /// This process does not lead (any more): read the store.
    AskTheStore,
}

impl Audience {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn show(&self, snapshot: &Snapshot, behind: Vec<NodeName>, settings: &Settings) {
        let seen = Seen { snapshot: snapshot.clone(), behind, settings: settings.clone() };
        self.tell(News::Seen(Box::new(seen)));
    }

    pub(crate) fn hide(&self) {
        self.tell(News::AskTheStore);
    }

    fn tell(&self, news: News) {
        self.lock().waiting = Some(news);
        self.bell.notify_all();
    }

    /// Closes the feed: there are no readers any more.
    pub fn close(&self) {
        self.lock().closed = true;
        self.bell.notify_all();
    }

    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Waits for a message, at most this long. `None`: there is none, or the feed is closed.
    pub fn wait(&self, most: Duration) -> Option<News> {
        let quiet = |inside: &mut Inside| inside.waiting.is_none() && !inside.closed;
        let waited = self.bell.wait_timeout_while(self.lock(), most, quiet);
        let (mut inside, _) = waited.unwrap_or_else(PoisonError::into_inner);
        inside.waiting.take()
    }
}
