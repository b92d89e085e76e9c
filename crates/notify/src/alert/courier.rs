//! The delivery worker of one receiver: composes, sends, retries and gives up messages.

use std::time::{Duration, Instant};

use doctor_backend::clock::{Clock, SystemClock};
use doctor_core::{
    alert::{self, About, Note, ServiceNote},
    time::{Span, Timestamp},
};
use doctor_store::{
    Store, StoreError,
    outbox::{Claimed, Tried},
};

use super::{AlertSettings, Letter, NotSent, Receiver, Retry, Way, send};

/// The delay between attempts doubles up to this.
const LONGEST_RETRY: Span = Span::minutes(5);
/// Time beyond an attempt's timeout before another process may claim the message.
const MARGIN: Span = Span::from_secs(5);
/// Refresh interval: an Alertmanager forgets alerts that are not sent again, and all of them after a restart.
const REFRESH: Duration = Duration::from_secs(300);
/// Retry interval after a failure of the store.
const STORE_FAILED: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Courier {
    name: String,
    receiver: Receiver,
    settings: AlertSettings,
    store: Store,
    /// Since when notes wait without a message.
    gathering: Option<Instant>,
    refreshed: Option<Instant>,
    /// The last error, so that it is logged once.
    said: Option<String>,
}

impl Courier {
    pub(super) fn new(name: &str, receiver: Receiver, settings: &AlertSettings, store: Store) -> Self {
        let (name, settings) = (name.to_owned(), settings.clone());
        Self { name, receiver, settings, store, gathering: None, refreshed: None, said: None }
    }

    /// Does what is due and returns the delay until the next call.
    pub(super) fn look(&mut self) -> Duration {
        self.turn().unwrap_or_else(|error| {
            self.say_once(&format!("cannot read the outbox: {error}"));
            STORE_FAILED
        })
    }

    /// Delivers what waits, without waiting for further notes.
    pub(super) fn deliver_now(&mut self) {
        self.settings.gather = Span::ZERO;
        self.settings.every = Span::ZERO;
        while self.look().is_zero() {}
    }

    fn turn(&mut self) -> Result<Duration, StoreError> {
        let now = SystemClock.now();
        let mut waiting = self.store.alerts_waiting()?.remove(&self.name).unwrap_or_default();
        if waiting.notes > 0 && waiting.messages == 0 {
            let gathered = self.gathering.get_or_insert_with(Instant::now).elapsed();
            let more = self.settings.gather.to_std().saturating_sub(gathered);
            let since = waiting.composed.map_or(self.settings.every, |composed| now.since(composed));
            let rest = self.settings.every.to_std().saturating_sub(since.to_std());
            if !more.max(rest).is_zero() {
                return Ok(more.max(rest));
            }
            self.store.compose_alert(&self.name, now, now.plus(self.settings.give_up))?;
            self.gathering = None;
            waiting.messages = 1;
        }
        if waiting.messages == 0 {
            self.refresh(now)?;
            return Ok(Duration::MAX);
        }
        let until = now.plus(self.settings.timeout).plus(MARGIN);
        if let Some(message) = self.store.claim_alert(&self.name, now, until)? {
            let tried = self.attempt(&message);
            self.store.settle_alert(message.id, &tried, SystemClock.now())?;
            // A message to be retried later needs no immediate call.
            return Ok(if matches!(tried, Tried::Again { .. }) { Duration::MAX } else { Duration::ZERO });
        }
        Ok(Duration::MAX)
    }

    fn attempt(&mut self, message: &Claimed) -> Tried {
        let Claimed { key, composed, notes, lost_before, tries, .. } = message;
        let letter = Letter { key, composed: *composed, notes, lost_before: *lost_before, now: SystemClock.now() };
        match self.send(&letter) {
            Ok(()) => {
                if self.said.take().is_some() || *tries > 1 {
                    tracing::info!(receiver = self.name, tries, "message delivered");
                }
                Tried::Delivered
            }
            Err(error) => self.failed(message, &error),
        }
    }

    fn send(&self, letter: &Letter<'_>) -> Result<(), NotSent> {
        send(&self.receiver.way, letter, self.settings.timeout, self.settings.ca.as_deref())
    }

    fn failed(&mut self, message: &Claimed, error: &NotSent) -> Tried {
        let now = SystemClock.now();
        match next_try(error.retry, self.settings.retry, message.tries, now).filter(|next| *next < message.give_up) {
            Some(next) => {
                self.say_once(&error.text);
                Tried::Again { next, trouble: error.text.clone() }
            }
            None => {
                let (receiver, tries, what) = (&self.name, message.tries, alert::tally(&message.notes));
                tracing::error!(receiver, tries, what, %error, "message lost");
                Tried::Lost { trouble: format!("given up after attempt {tries}: {}", error.text) }
            }
        }
    }

    fn say_once(&mut self, text: &str) {
        if self.said.as_deref() != Some(text) {
            tracing::warn!(receiver = self.name, error = %text, "delivery failed, will retry");
            self.said = Some(text.to_owned());
        }
    }

    /// Sends all open alerts to an Alertmanager, including those sent before. A failure is ignored, because the next
    /// refresh follows soon; notes that must arrive go through the outbox.
    fn refresh(&mut self, now: Timestamp) -> Result<(), StoreError> {
        if !matches!(self.receiver.way, Way::Alertmanager { .. })
            || self.refreshed.is_some_and(|at| at.elapsed() < REFRESH)
        {
            return Ok(());
        }
        self.refreshed = Some(Instant::now());
        let muted = self.store.mutes()?;
        let cases = self.store.cases(Timestamp::MAX)?;
        let cases = cases.iter().filter(|case| case.is_open() && !muted.contains_key(&case.id)).map(alert::standing);
        let conditions = self.store.alert_conditions()?.into_iter().map(|(condition, since)| {
            let text = format!("{condition} since {since}");
            Note { at: since, about: About::Service(ServiceNote { condition, raised: true, since, text }) }
        });
        let mut all = self.receiver.route.clone();
        all.changes.clear();
        let notes: Vec<Note> = cases.chain(conditions).filter(|note| all.wants(note)).collect();
        if !notes.is_empty() {
            let letter = Letter { key: "refresh", composed: now, notes: &notes, lost_before: 0, now };
            if let Err(error) = self.send(&letter) {
                tracing::debug!(receiver = self.name, %error, "refresh of open alerts failed");
            }
        }
        Ok(())
    }
}

/// Returns when to retry after this many attempts; `None`: never.
fn next_try(retry: Retry, first: Span, tries: u32, now: Timestamp) -> Option<Timestamp> {
    let wait = first.doubled(tries.saturating_sub(1), LONGEST_RETRY.max(first));
    match retry {
        Retry::Never => None,
        Retry::Later => Some(now.plus(wait)),
        Retry::After(asked) => Some(now.plus(wait.max(asked.min(Span::hours(1))))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_come_less_and_less_often_and_a_receiver_may_ask_for_more_time() {
        let now = Timestamp::from_secs(0);
        let after = |retry, tries| next_try(retry, Span::from_secs(5), tries, now).map(|at| at.since(now).secs());
        let waits: Vec<_> = [1, 2, 3, 8, 60].map(|tries| after(Retry::Later, tries)).into();
        assert_eq!(waits, [Some(5), Some(10), Some(20), Some(300), Some(300)]);
        assert_eq!(after(Retry::After(Span::from_secs(60)), 1), Some(60));
        assert_eq!(after(Retry::After(Span::days(3)), 1), Some(3600), "an hour at most");
        assert_eq!(after(Retry::After(Span::ZERO), 2), Some(10));
        assert_eq!(after(Retry::Never, 1), None);
    }
}
