//! Posts spans to the collector, on its own thread.

use std::{sync::Arc, time::Duration};

use super::{
    TelemetrySettings,
    otlp::{self, FinishedSpan},
    queue::Queue,
};
use crate::alert::{DeliveryError, Retry, UrlSource, http::Client, read_secret};

/// Maximum delay of a finished span.
const FLUSH_INTERVAL: Duration = Duration::from_secs(2);
/// The delay after a failure doubles up to this.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Sender {
    url: UrlSource,
    settings: TelemetrySettings,
    instance: String,
    queue: Arc<Queue>,
}

impl Sender {
    pub(super) fn new(url: UrlSource, settings: TelemetrySettings, instance: &str, queue: Arc<Queue>) -> Self {
        Self { url, settings, instance: instance.to_owned(), queue }
    }

    /// Runs until the queue is stopped. A batch is retried until the collector accepts it, or rejects it for good;
    /// meanwhile the queue fills, and spans that do not fit are counted.
    pub(super) fn run(self) {
        let (mut batch, mut pause, mut failing) = (Vec::new(), FLUSH_INTERVAL, false);
        loop {
            let last = self.queue.wait(pause, pause == FLUSH_INTERVAL);
            loop {
                if batch.is_empty() {
                    batch = self.queue.take();
                }
                if batch.is_empty() {
                    break;
                }
                let result = self.post(&batch);
                match &result {
                    Ok(_) if failing => {
                        tracing::info!(dropped = self.queue.counts().dropped(), "trace export recovered");
                    }
                    Err(error) if !failing => tracing::warn!(%error, "trace export failed"),
                    Ok(_) | Err(_) => {}
                }
                failing = result.is_err();
                let rejected = match result {
                    Ok(rejected) => rejected.min(batch.len()),
                    Err(error) if error.retry == Retry::Never => batch.len(),
                    Err(_) => {
                        pause = (pause * 2).min(MAX_RETRY_DELAY);
                        break;
                    }
                };
                self.queue.count_exported(batch.len() - rejected);
                self.queue.count_dropped(rejected);
                batch.clear();
                pause = FLUSH_INTERVAL;
            }
            if last {
                return;
            }
        }
    }

    /// Posts a batch. Returns how many of its spans the collector rejected.
    fn post(&self, batch: &[FinishedSpan]) -> Result<usize, DeliveryError> {
        let url = self.url.read()?;
        let token = self.settings.token.as_ref().map(read_secret).transpose()?;
        let bearer = token.map(|token| format!("Bearer {token}"));
        let headers: Vec<(&str, &str)> = bearer.iter().map(|value| ("authorization", value.as_str())).collect();
        let body = otlp::document(&self.instance, &self.settings.resource, batch).to_string();
        let client = Client::new(self.settings.timeout, self.settings.ca.as_deref());
        Ok(rejected_spans(&client.post_for_response(&url, &headers, body.as_bytes())?))
    }
}

/// Returns the number of rejected spans in a response, given as a number or, as OTLP does, as a string.
fn rejected_spans(response: &str) -> usize {
    let response: serde_json::Value = serde_json::from_str(response).unwrap_or_default();
    let count = &response["partialSuccess"]["rejectedSpans"];
    let count = count.as_u64().or_else(|| count.as_str()?.parse().ok());
    usize::try_from(count.unwrap_or(0)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejected_spans_are_read_from_a_partial_success() {
        for (response, count) in [
            ("{}", 0),
            ("", 0),
            ("{\"partialSuccess\":{}}", 0),
            ("{\"partialSuccess\":{\"rejectedSpans\":\"3\"}}", 3),
            ("{\"partialSuccess\":{\"rejectedSpans\":4,\"errorMessage\":\"x\"}}", 4),
        ] {
            assert_eq!(rejected_spans(response), count, "{response}");
        }
    }
}
