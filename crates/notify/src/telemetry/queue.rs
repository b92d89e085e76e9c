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
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, pending: Mutex::default(), condvar: Condvar::new(), counts: Arc::default() }
    }

    pub(super) fn counts(&self) -> Arc<ExportCounts> {
        Arc::clone(&self.counts)
    }

    pub(super) fn push(&self, span: FinishedSpan) {
        let mut pending = self.lock();
        if pending.spans.len() >= self.capacity || pending.stopped {
            self.counts.add_dropped(1);
            return;
        }
        pending.spans.push_back(span);
        if pending.spans.len() == BATCH {
            self.condvar.notify_one();
        }
    }

    /// Waits this long, or, if `eager`, until a full batch waits. Returns whether the queue was stopped.
    pub(super) fn wait(&self, limit: Duration, eager: bool) -> bool {
        let until = Instant::now() + limit;
        let mut pending = self.lock();
        while !pending.stopped && (!eager || pending.spans.len() < BATCH) {
            let remaining = until.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                break;
            }
            pending = self.condvar.wait_timeout(pending, remaining).unwrap_or_else(PoisonError::into_inner).0;
        }
        pending.stopped
    }

    /// Returns the next batch, oldest first.
    pub(super) fn take(&self) -> Vec<FinishedSpan> {
        let mut pending = self.lock();
        let count = pending.spans.len().min(BATCH);
        pending.spans.drain(..count).collect()
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
