//! Between the engine and whoever shows the cluster to people: after each cycle the engine leaves what it saw, and goes on.
//!
//! Only the newest is kept. Whoever is slow misses what lay in between and not what is; the engine waits for nobody.

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
    /// Nodes of which the store knows more since the cycle acted.
    pub behind: Vec<NodeName>,
    /// By what it was judged.
    pub settings: Settings,
}

/// Where it is left.
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

/// What there is to know.
#[derive(Debug)]
pub enum News {
    /// This process leads, and saw this.
    Seen(Box<Seen>),
    /// This process does not lead (any more): the store knows.
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

    /// Nobody listens any more.
    pub fn close(&self) {
        self.lock().closed = true;
        self.bell.notify_all();
    }

    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Waits for news, at most this long. `None`: there is none, or it is closed.
    pub fn wait(&self, most: Duration) -> Option<News> {
        let quiet = |inside: &mut Inside| inside.waiting.is_none() && !inside.closed;
        let waited = self.bell.wait_timeout_while(self.lock(), most, quiet);
        let (mut inside, _) = waited.unwrap_or_else(PoisonError::into_inner);
        inside.waiting.take()
    }
}
