//! Spans of a cycle, a call to the cluster and a request to the API. While no collector is configured, a span costs one comparison.
//! Their export is in `doctor-notify`.

use std::{
    fmt::Display,
    sync::atomic::{AtomicU64, Ordering},
};

#[doc(hidden)]
pub use tracing;

use crate::scrub::scrub;

/// What spans of ours are known by. Log lines do not show them.
pub const TARGET: &str = "doctor_trace";

/// A span of ours. `otel.kind` ("client", "server") says on which side of a call it is, `failed` that it went wrong and how,
/// `traceparent` what it belongs to elsewhere.
#[macro_export]
macro_rules! span {
    ($($rest:tt)*) => { $crate::spans::tracing::info_span!(target: $crate::spans::TARGET, $($rest)*) };
}
pub use crate::span;

/// Does the work within the span, which has a field `failed` for its error.
pub fn within<T, E: Display>(span: &tracing::Span, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    let outcome = span.in_scope(work);
    if let Err(error) = &outcome {
        failed(span, error);
    }
    outcome
}

/// The span's work went wrong.
pub fn failed(span: &tracing::Span, error: &impl Display) {
    if !span.is_disabled() {
        span.record("failed", &*scrub(&error.to_string()));
    }
}

/// What became of spans, since this process began.
#[derive(Debug, Default)]
pub struct Counts {
    exported: AtomicU64,
    dropped: AtomicU64,
}

impl Counts {
    /// Taken by the collector.
    pub fn exported(&self) -> u64 {
        self.exported.load(Ordering::Relaxed)
    }

    /// Lost: the queue was full, or the collector refused them.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    pub fn add_exported(&self, spans: usize) {
        self.exported.fetch_add(spans as u64, Ordering::Relaxed);
    }

    pub fn add_dropped(&self, spans: usize) {
        self.dropped.fetch_add(spans as u64, Ordering::Relaxed);
    }
}
