//! Bounded queue of finished spans. Adding to it never blocks.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use doctor_engine::spans::Counts;

use super::otlp::Ended;

/// Maximum spans per request.
pub(super) const BATCH: usize = 512;

#[derive(Debug)]
pub(super) struct Queue {
    most: usize,
    waiting: Mutex<Waiting>,
    bell: Condvar,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Waiting {
    spans: VecDeque<Ended>,
    stopped: bool,
}

impl Queue {
    pub(super) fn new(most: usize) -> Self {
        Self { most, waiting: Mutex::default(), bell: Condvar::new(), counts: Arc::default() }
    }

    pub(super) fn counts(&self) -> Arc<Counts> {
        Arc::clone(&self.counts)
    }

    pub(super) fn push(&self, span: Ended) {
        let mut waiting = self.waiting();
        if waiting.spans.len() >= self.most || waiting.stopped {
            self.counts.add_dropped(1);
            return;
        }
        waiting.spans.push_back(span);
        if waiting.spans.len() == BATCH {
            self.bell.notify_one();
        }
    }

    /// Waits this long, or, if `eager`, until a full batch waits. Returns whether the queue was stopped.
    pub(super) fn wait(&self, limit: Duration, eager: bool) -> bool {
        let until = Instant::now() + limit;
        let mut waiting = self.waiting();
        while !waiting.stopped && (!eager || waiting.spans.len() < BATCH) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            waiting = self.bell.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        waiting.stopped
    }

    /// Returns the next batch, oldest first.
    pub(super) fn take(&self) -> Vec<Ended> {
        let mut waiting = self.waiting();
        let count = waiting.spans.len().min(BATCH);
        waiting.spans.drain(..count).collect()
    }

    pub(super) fn taken(&self, spans: usize) {
        self.counts.add_exported(spans);
    }

    pub(super) fn lost(&self, spans: usize) {
        self.counts.add_dropped(spans);
    }

    pub(super) fn stop(&self) {
        self.waiting().stopped = true;
        self.bell.notify_one();
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
