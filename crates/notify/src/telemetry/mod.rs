//! OpenTelemetry traces: how long cycles, calls to the cluster and API requests took, and what caused what.
//!
//! Code marks spans with `span!` of `doctor-engine`; while tracing is disabled, that costs one comparison. If a
//! collector is configured, a layer below the log ([`TraceLayer`]) assigns ids to spans and queues those that have
//! ended, and a thread posts them as OTLP over HTTP in JSON. The queue is bounded and adding to it never blocks: a
//! collector that is unreachable, slow or hanging costs spans, which are counted, and never delays a cycle.
//!
//! Alternative rejected: the OpenTelemetry libraries. They bring a second HTTP client, protocol buffers and a runtime
//! for a document that is written in forty lines.

mod config;
mod layer;
mod otlp;
mod queue;
mod sender;
mod traceparent;

use std::{
    io,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use doctor_engine::spans::ExportCounts;

pub use self::{
    config::{BadTelemetry, TelemetrySettings},
    layer::TraceLayer,
};
use self::{queue::Queue, sender::Sender};

/// Time allowed at exit to send what waits.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// The thread that posts spans.
#[derive(Debug)]
pub struct Traces {
    queue: Arc<Queue>,
    finished: mpsc::Receiver<()>,
}

impl Traces {
    /// Starts sending, as `instance` of the service; `None` if no collector is configured. The layer supplies the
    /// spans.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(settings: &TelemetrySettings, instance: &str) -> io::Result<Option<(Self, TraceLayer)>> {
        let Some(url) = settings.traces.clone() else { return Ok(None) };
        let queue = Arc::new(Queue::new(settings.queue));
        let sender = Sender::new(url, settings.clone(), instance, Arc::clone(&queue));
        let (done, finished) = mpsc::channel::<()>();
        thread::Builder::new().name("doctor-traces".to_owned()).spawn(move || {
            sender.run();
            drop(done);
        })?;
        let layer = TraceLayer::new(Arc::clone(&queue));
        Ok(Some((Self { queue, finished }, layer)))
    }

    pub fn counts(&self) -> Arc<ExportCounts> {
        self.queue.counts()
    }

    /// Sends what waits, for a limited time.
    pub fn stop(self) {
        self.queue.stop();
        // Done or timed out: nothing is left to do.
        let _result = self.finished.recv_timeout(SHUTDOWN_TIMEOUT);
    }
}
