//! The delivery worker of one receiver: composes, sends, retries and gives up messages.

use std::time::{Duration, Instant};

use doctor_backend::clock::{Clock, SystemClock};
use doctor_core::{
    alert::{self, Notification, ServiceNotification, Subject},
    time::{Span, Timestamp},
};
use doctor_store::{
    Store, StoreError,
    outbox::{ClaimedMessage, DeliveryOutcome},
};

use super::{AlertSettings, Channel, DeliveryError, Message, Receiver, Retry, send};

/// The delay between attempts doubles up to this.
const MAX_RETRY_DELAY: Span = Span::minutes(5);
/// Time beyond an attempt's timeout before another process may claim the message.
const CLAIM_MARGIN: Span = Span::from_secs(5);
/// Refresh interval: an Alertmanager forgets alerts that are not sent again, and all of them after a restart.
const REFRESH: Duration = Duration::from_secs(300);
/// Retry interval after a failure of the store.
const STORE_RETRY: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct DeliveryWorker {
    name: String,
    receiver: Receiver,
    settings: AlertSettings,
    store: Store,
    /// Since when notes wait without a message.
    gathering_since: Option<Instant>,
    refreshed: Option<Instant>,
    /// The last error, so that it is logged once.
    last_error: Option<String>,
}

impl DeliveryWorker {
    pub(super) fn new(name: &str, receiver: Receiver, settings: &AlertSettings, store: Store) -> Self {
        let (name, settings) = (name.to_owned(), settings.clone());
        Self { name, receiver, settings, store, gathering_since: None, refreshed: None, last_error: None }
    }

    /// Does what is due and returns the delay until the next call.
    pub(super) fn poll(&mut self) -> Duration {
        self.step().unwrap_or_else(|error| {
            self.log_once(&format!("cannot read the outbox: {error}"));
            STORE_RETRY
        })
    }

    /// Delivers what waits, without waiting for further notes.
    pub(super) fn deliver_now(&mut self) {
        self.settings.group_wait = Span::ZERO;
        self.settings.group_interval = Span::ZERO;
        while self.poll().is_zero() {}
    }

    fn step(&mut self) -> Result<Duration, StoreError> {
        let now = SystemClock.now();
        let mut waiting = self.store.pending_alerts()?.remove(&self.name).unwrap_or_default();
        if waiting.notes > 0 && waiting.messages == 0 {
            let gathered = self.gathering_since.get_or_insert_with(Instant::now).elapsed();
            let more = self.settings.group_wait.to_std().saturating_sub(gathered);
            let since = waiting.composed.map_or(self.settings.group_interval, |composed| now.since(composed));
            let rest = self.settings.group_interval.to_std().saturating_sub(since.to_std());
            if !more.max(rest).is_zero() {
                return Ok(more.max(rest));
            }
            self.store.compose_alert(&self.name, now, now.plus(self.settings.give_up))?;
            self.gathering_since = None;
            waiting.messages = 1;
        }
        if waiting.messages == 0 {
            self.refresh(now)?;
            return Ok(Duration::MAX);
        }
        let until = now.plus(self.settings.timeout).plus(CLAIM_MARGIN);
        if let Some(message) = self.store.claim_alert(&self.name, now, until)? {
            let outcome = self.attempt(&message);
            self.store.record_delivery(message.id, &outcome, SystemClock.now())?;
            // A message to be retried later needs no immediate call.
            return Ok(if matches!(outcome, DeliveryOutcome::Retry { .. }) { Duration::MAX } else { Duration::ZERO });
        }
        Ok(Duration::MAX)
    }

    fn attempt(&mut self, message: &ClaimedMessage) -> DeliveryOutcome {
        let ClaimedMessage { key, composed, notes, given_up_before: lost_before, attempts: tries, .. } = message;
        let outgoing = Message { key, composed: *composed, notes, lost_before: *lost_before, now: SystemClock.now() };
        match self.send(&outgoing) {
            Ok(()) => {
                if self.last_error.take().is_some() || *tries > 1 {
                    tracing::info!(receiver = self.name, tries, "message delivered");
                }
                DeliveryOutcome::Delivered
            }
            Err(error) => self.handle_failure(message, &error),
        }
    }

    fn send(&self, message: &Message<'_>) -> Result<(), DeliveryError> {
        send(&self.receiver.channel, message, self.settings.timeout, self.settings.ca.as_deref())
    }

    fn handle_failure(&mut self, message: &ClaimedMessage, error: &DeliveryError) -> DeliveryOutcome {
        let now = SystemClock.now();
        match next_attempt(error.retry, self.settings.retry, message.attempts, now)
            .filter(|next| *next < message.expires)
        {
            Some(next) => {
                self.log_once(&error.text);
                DeliveryOutcome::Retry { next, error: error.text.clone() }
            }
            None => {
                let (receiver, tries, what) = (&self.name, message.attempts, alert::summary(&message.notes));
                tracing::error!(receiver, tries, what, %error, "message lost");
                DeliveryOutcome::GivenUp { error: format!("given up after attempt {tries}: {}", error.text) }
            }
        }
    }

    fn log_once(&mut self, text: &str) {
        if self.last_error.as_deref() != Some(text) {
            tracing::warn!(receiver = self.name, error = %text, "delivery failed, will retry");
            self.last_error = Some(text.to_owned());
        }
    }

    /// Sends all open alerts to an Alertmanager, including those sent before. A failure is ignored, because the next
    /// refresh follows soon; notes that must arrive go through the outbox.
    fn refresh(&mut self, now: Timestamp) -> Result<(), StoreError> {
        if !matches!(self.receiver.channel, Channel::Alertmanager { .. })
            || self.refreshed.is_some_and(|at| at.elapsed() < REFRESH)
        {
            return Ok(());
        }
        self.refreshed = Some(Instant::now());
        let muted = self.store.mutes()?;
        let cases = self.store.cases(Timestamp::MAX)?;
        let cases = cases
            .iter()
            .filter(|case| case.is_open() && !muted.contains_key(&case.id))
            .map(alert::open_case_notification);
        let conditions = self.store.alert_conditions()?.into_iter().map(|(condition, since)| {
            let text = format!("{condition} since {since}");
            Notification {
                at: since,
                subject: Subject::Service(ServiceNotification { condition, raised: true, since, text }),
            }
        });
        let mut route = self.receiver.route.clone();
        route.changes.clear();
        let notes: Vec<Notification> = cases.chain(conditions).filter(|note| route.accepts(note)).collect();
        if !notes.is_empty() {
            let message = Message { key: "refresh", composed: now, notes: &notes, lost_before: 0, now };
            if let Err(error) = self.send(&message) {
                tracing::debug!(receiver = self.name, %error, "refresh of open alerts failed");
            }
        }
        Ok(())
    }
}

/// Returns when to retry after this many attempts; `None`: never.
fn next_attempt(retry: Retry, first: Span, tries: u32, now: Timestamp) -> Option<Timestamp> {
    let wait = first.doubled(tries.saturating_sub(1), MAX_RETRY_DELAY.max(first));
    match retry {
        Retry::Never => None,
        Retry::Later => Some(now.plus(wait)),
        Retry::After(requested) => Some(now.plus(wait.max(requested.min(Span::hours(1))))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_delays_double_up_to_a_limit_and_respect_retry_after() {
        let now = Timestamp::from_secs(0);
        let after = |retry, tries| next_attempt(retry, Span::from_secs(5), tries, now).map(|at| at.since(now).secs());
        let delays: Vec<_> = [1, 2, 3, 8, 60].map(|tries| after(Retry::Later, tries)).into();
        assert_eq!(delays, [Some(5), Some(10), Some(20), Some(300), Some(300)]);
        assert_eq!(after(Retry::After(Span::from_secs(60)), 1), Some(60));
        assert_eq!(after(Retry::After(Span::days(3)), 1), Some(3600), "an hour at most");
        assert_eq!(after(Retry::After(Span::ZERO), 2), Some(10));
        assert_eq!(after(Retry::Never, 1), None);
    }
}
