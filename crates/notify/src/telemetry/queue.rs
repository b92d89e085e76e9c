//! Bounded queue of finished spans. Adding to it never blocks.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use doctor_engine::spans::ExportCounts;

use super::otlp::FinishedSpan;

/// Maximum spans per request.
pub(super) const BATCH: usize = 512;

#[derive(Debug)]
pub(super) struct Queue {
    capacity: usize,
    pending: Mutex<Pending>,
    condvar: Condvar,
    counts: Arc<ExportCounts>,
}

#[derive(Debug, Default)]
struct Pending {
    spans: VecDeque<FinishedSpan>,
    stopped: bool,
}

impl Queue {
    pub(super) fn new(most: usize) -> Self {
        Self { capacity: most, pending: Mutex::default(), condvar: Condvar::new(), counts: Arc::default() }
    }

    pub(super) fn counts(&self) -> Arc<ExportCounts> {
        Arc::clone(&self.counts)
    }

    pub(super) fn push(&self, span: FinishedSpan) {
        let mut waiting = self.lock();
        if waiting.spans.len() >= self.capacity || waiting.stopped {
            self.counts.add_dropped(1);
            return;
        }
        waiting.spans.push_back(span);
        if waiting.spans.len() == BATCH {
            self.condvar.notify_one();
        }
    }

    /// Waits this long, or, if `eager`, until a full batch waits. Returns whether the queue was stopped.
    pub(super) fn wait(&self, limit: Duration, eager: bool) -> bool {
        let until = Instant::now() + limit;
        let mut waiting = self.lock();
        while !waiting.stopped && (!eager || waiting.spans.len() < BATCH) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            waiting = self.condvar.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        waiting.stopped
    }

    /// Returns the next batch, oldest first.
    pub(super) fn take(&self) -> Vec<FinishedSpan> {
        let mut waiting = self.lock();
        let count = waiting.spans.len().min(BATCH);
        waiting.spans.drain(..count).collect()
    }

    pub(super) fn count_exported(&self, spans: usize) {
        self.counts.add_exported(spans);
    }

    pub(super) fn count_dropped(&self, spans: usize) {
        self.counts.add_dropped(spans);
    }

    pub(super) fn stop(&self) {
        self.lock().stopped = true;
        self.condvar.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
