//! Tracing spans of a cycle, a call to the cluster and an API request. Without a collector, a span costs one
//! comparison. The exporter is in `doctor-notify`.

use std::{
    fmt::Display,
    sync::atomic::{AtomicU64, Ordering},
};

#[doc(hidden)]
pub use tracing;

use crate::redact::redact;

/// The target of our spans. Log lines do not show them.
pub const TARGET: &str = "doctor_trace";

/// Creates one of our spans. `otel.kind` ("client", "server") is the side of the call, `failed` the error, and
/// `traceparent` the parent span in another process.
#[macro_export]
macro_rules! span {
    ($($rest:tt)*) => { $crate::spans::tracing::info_span!(target: $crate::spans::TARGET, $($rest)*) };
}
pub use crate::span;

/// Runs the work within the span and records its error in the field `failed`.
pub fn in_span<T, E: Display>(span: &tracing::Span, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    let outcome = span.in_scope(work);
    if let Err(error) = &outcome {
        record_failure(span, error);
    }
    outcome
}

/// Records that the span's work failed.
pub fn record_failure(span: &tracing::Span, error: &impl Display) {
    if !span.is_disabled() {
        span.record("failed", &*redact(&error.to_string()));
    }
}

/// Counters of spans since the process started.
#[derive(Debug, Default)]
pub struct ExportCounts {
    exported: AtomicU64,
    dropped: AtomicU64,
}

impl ExportCounts {
    /// Spans accepted by the collector.
    pub fn exported(&self) -> u64 {
        self.exported.load(Ordering::Relaxed)
    }

    /// Spans lost: the queue was full, or the collector rejected them.
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
