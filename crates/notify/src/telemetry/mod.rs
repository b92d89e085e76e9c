//! Traces for OpenTelemetry: what a cycle, a call to the cluster and a question to the API took, and what led to what.
//!
//! Places that are worth a span say so with `span!` of `doctor-engine`; while nobody wants traces, that costs one comparison. Where the
//! configuration names a collector, a layer below the log ([`TraceLayer`]) gives spans ids of their own and puts those that have
//! ended into a queue, and a thread posts them as OTLP over HTTP in its JSON form. The queue has an end, and putting something into
//! it waits for nobody: a collector that is away, slow or hangs costs spans, which are counted, and no cycle a moment.
//!
//! Way rejected: the libraries of OpenTelemetry. They bring a second HTTP client, protocol buffers and a runtime for a
//! document that is written in forty lines.

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

use doctor_engine::spans::Counts;

pub use self::{
    config::{BadTelemetry, TelemetrySettings},
    layer::TraceLayer,
};
use self::{queue::Queue, sender::Sender};

/// When the program ends, what waits is sent if that is quick.
const FAREWELL: Duration = Duration::from_secs(2);

/// The thread that posts spans.
#[derive(Debug)]
pub struct Traces {
    queue: Arc<Queue>,
    over: mpsc::Receiver<()>,
}

impl Traces {
    /// Begins to send, as `instance` of the service; `None`: no collector is named. Spans come from the layer.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(settings: &TelemetrySettings, instance: &str) -> io::Result<Option<(Self, TraceLayer)>> {
        let Some(url) = settings.traces.clone() else { return Ok(None) };
        let queue = Arc::new(Queue::new(settings.queue));
        let sender = Sender::new(url, settings.clone(), instance, Arc::clone(&queue));
        let (tell, over) = mpsc::channel::<()>();
        thread::Builder::new().name("doctor-traces".to_owned()).spawn(move || {
            sender.run();
            drop(tell);
        })?;
        let layer = TraceLayer::new(Arc::clone(&queue));
        Ok(Some((Self { queue, over }, layer)))
    }

    pub fn counts(&self) -> Arc<Counts> {
        self.queue.counts()
    }

    /// Sends what waits. A collector that does not take it at once is not waited for.
    pub fn stop(self) {
        self.queue.stop();
        // Over, or not in time: nothing is left to do about it.
        let _over = self.over.recv_timeout(FAREWELL);
    }
}
