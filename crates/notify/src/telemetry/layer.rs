//! A `tracing` layer that records our spans and queues them when they end.

use std::{
    fmt::Debug,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use tracing::{
    Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
};
use tracing_subscriber::{Layer, layer::Context, registry::LookupSpan};

use super::{
    otlp::{Attribute, FinishedSpan, SpanKind},
    queue::Queue,
    traceparent::{self, SpanContext},
};

/// Records spans with `TARGET` of `doctor-engine`; filter out all others.
#[derive(Debug)]
pub struct TraceLayer {
    queue: Arc<Queue>,
}

/// Maximum length of a text in a span.
const MAX_VALUE_BYTES: usize = 300;

impl TraceLayer {
    pub(super) const fn new(queue: Arc<Queue>) -> Self {
        Self { queue }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for TraceLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut fields = SpanFields { name: attributes.metadata().name().to_owned(), ..SpanFields::default() };
        attributes.record(&mut fields);
        let local = span.parent().and_then(|parent| parent.extensions().get::<OpenSpan>().map(|open| open.context));
        let parent = fields.remote_parent.or(local);
        let mut random = [0; 24];
        // Without random bits, span ids could collide.
        if getrandom::fill(&mut random).is_err() {
            return;
        }
        let (mut trace_id, mut span_id) = ([0; 16], [0; 8]);
        trace_id.copy_from_slice(&random[..16]);
        span_id.copy_from_slice(&random[16..]);
        let span_context = SpanContext {
            trace: parent.map_or(trace_id, |parent| parent.trace),
            span: span_id,
            sampled: parent.is_none_or(|parent| parent.sampled),
        };
        let open = OpenSpan { context: span_context, parent: parent.map(|parent| parent.span), started: now(), fields };
        span.extensions_mut().insert(open);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<OpenSpan>() {
            values.record(&mut open.fields);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let Some(open) = span.extensions_mut().remove::<OpenSpan>() else { return };
        if open.context.sampled {
            self.queue.push(open.finish());
        }
    }
}

/// A span in progress.
struct OpenSpan {
    context: SpanContext,
    parent: Option<[u8; 8]>,
    started: u64,
    fields: SpanFields,
}

impl OpenSpan {
    fn finish(self) -> FinishedSpan {
        let SpanFields { name, kind, attributes, failed, .. } = self.fields;
        let (context, parent, started) = (self.context, self.parent, self.started);
        // The clock may have been set back.
        FinishedSpan { context, parent, name, kind, started, ended: now().max(started), attributes, failed }
    }
}

/// The fields of a span.
#[derive(Default)]
struct SpanFields {
    name: String,
    kind: SpanKind,
    remote_parent: Option<SpanContext>,
    attributes: Vec<(&'static str, Attribute)>,
    failed: Option<String>,
}

impl Visit for SpanFields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let truncated = || value.chars().take(MAX_VALUE_BYTES).collect::<String>();
        match field.name() {
            "otel.name" => self.name = truncated(),
            "otel.kind" => {
                self.kind = match value {
                    "client" => SpanKind::Client,
                    "server" => SpanKind::Server,
                    _ => SpanKind::Internal,
                };
            }
            "traceparent" => self.remote_parent = traceparent::parse(value),
            "failed" => self.failed = Some(truncated()),
            name => self.attributes.push((name, Attribute::Text(truncated()))),
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.attributes.push((field.name(), Attribute::Int(value)));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        self.attributes.push((field.name(), Attribute::Int(value)));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.attributes.push((field.name(), Attribute::Float(value)));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.attributes.push((field.name(), Attribute::Bool(value)));
    }
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;
    use doctor_engine::spans::span;

    /// Returns the queued spans after running `work`, and the number dropped.
    fn traced(capacity: usize, work: impl FnOnce()) -> (Vec<FinishedSpan>, u64) {
        let queue = Arc::new(Queue::new(capacity));
        let subscriber = tracing_subscriber::registry().with(TraceLayer::new(Arc::clone(&queue)));
        tracing::subscriber::with_default(subscriber, work);
        (queue.take(), queue.counts().dropped())
    }

    #[test]
    fn spans_have_parents_also_from_other_threads_and_processes() {
        let header = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let (spans, dropped) = traced(16, || {
            let root = span!(
                "cycle",
                otel.kind = "server",
                nodes = 3_u64,
                traceparent = header,
                failed = tracing::field::Empty
            );
            let child = span!(parent: &root, "act");
            root.record("failed", "it broke");
            child.in_scope(|| drop(span!("backend.submit", run = %7)));
        });
        let [submit, act, cycle] = &spans[..] else { panic!("{spans:?}") };
        assert_eq!((submit.name.as_str(), act.name.as_str(), cycle.name.as_str()), ("backend.submit", "act", "cycle"));
        assert_eq!((submit.parent, act.parent), (Some(act.context.span), Some(cycle.context.span)));
        assert_eq!(cycle.parent, Some([0, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7]));
        assert!(spans.iter().all(|span| span.context.trace == cycle.context.trace && span.context.trace[0] == 0x4b));
        assert_eq!((cycle.kind, cycle.failed.as_deref()), (SpanKind::Server, Some("it broke")));
        assert_eq!(cycle.attributes, [("nodes", Attribute::Int(3))]);
        assert_eq!(submit.attributes, [("run", Attribute::Text("7".to_owned()))]);
        assert!(cycle.started <= act.started && act.ended <= cycle.ended && dropped == 0);
    }

    #[test]
    fn unsampled_spans_are_not_recorded_and_dropped_ones_are_counted() {
        let (spans, _) = traced(16, || {
            let request = span!("api", traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00");
            request.in_scope(|| drop(span!("make")));
        });
        assert_eq!(spans, []);
        let (spans, dropped) = traced(2, || (0..5).for_each(|_| drop(span!("cycle"))));
        assert_eq!((spans.len(), dropped), (2, 3));
        assert_ne!(spans[0].context.trace, spans[1].context.trace);
    }
}
