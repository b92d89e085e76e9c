//! Watches what no case covers: conditions of the service itself, and expired snoozes.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use doctor_backend::clock::{Clock, SystemClock};
use doctor_core::{
    alert::{self, Condition, ServiceFacts},
    time::{Span, Timestamp},
};
use doctor_store::{Store, StoreError, outbox};

use super::AlertSettings;

const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Window over which rejected results are counted.
const REJECTION_WINDOW: Duration = Duration::from_secs(600);
/// Retention of completed messages.
const RETENTION: Span = Span::days(30);
const CLEANUP_INTERVAL: Duration = Duration::from_secs(3600);

pub(super) struct ServiceAlerts {
    settings: AlertSettings,
    store: Store,
    clock: Arc<dyn Clock>,
    /// When a cycle last observed the cluster, and when we learnt of it: a simulated cluster has its own time.
    last_observed: (Option<Timestamp>, Instant),
    /// Total of rejected documents, sampled over the last ten minutes plus one earlier sample.
    rejected: VecDeque<(Instant, u64)>,
    cleaned_up: Option<Instant>,
    last_error: Option<String>,
}

impl ServiceAlerts {
    pub(super) fn new(settings: AlertSettings, store: Store, clock: Arc<dyn Clock>) -> Self {
        let last_observed = (None, Instant::now());
        Self { settings, store, clock, last_observed, rejected: VecDeque::new(), cleaned_up: None, last_error: None }
    }

    /// Checks once and returns the delay until the next check.
    pub(super) fn check(&mut self) -> Duration {
        match self.conditions().and_then(|()| self.end_expired_snoozes()).and_then(|()| self.clean_up()) {
            Ok(()) => self.last_error = None,
            Err(error) => {
                let text = error.to_string();
                if self.last_error.as_ref() != Some(&text) {
                    tracing::warn!(error = %text, "service self-check failed");
                    self.last_error = Some(text);
                }
            }
        }
        CHECK_INTERVAL
    }

    fn conditions(&mut self) -> Result<(), StoreError> {
        let previous = self.store.alert_conditions()?;
        let facts = self.facts()?;
        let active = alert::conditions(&facts);
        let now = self.clock.now();
        let notes = alert::condition_changes(&previous, &active, now);
        if notes.is_empty() {
            return Ok(());
        }
        let since = |condition: &Condition| previous.get(condition).copied().unwrap_or(now);
        let current: BTreeMap<Condition, Timestamp> =
            active.keys().map(|condition| (*condition, since(condition))).collect();
        let routed = outbox::route_notes(&self.settings.routes(), &notes);
        // If another process was faster, it has queued the notifications.
        self.store.replace_conditions(&previous, &current, &routed).map(drop)
    }

    fn facts(&mut self) -> Result<ServiceFacts, StoreError> {
        let rejected = self.recent_rejections(Instant::now(), self.store.counters()?.documents_rejected);
        let observed_at = self.store.cluster_state_time()?;
        if observed_at != self.last_observed.0 {
            self.last_observed = (observed_at, Instant::now());
        }
        let unobserved_ms = i64::try_from(self.last_observed.1.elapsed().as_millis()).unwrap_or(i64::MAX);
        Ok(ServiceFacts {
            breaker: self.store.breaker()?,
            agents_silent: self.store.agent_silence_reported()?,
            unseen_for: Span::from_millis(unobserved_ms),
            cycle_old_after: self.settings.stale_after,
            rejected,
            max_rejected: self.settings.rejected,
            undelivered: self.store.alerts_given_up_since(SystemClock.now().minus(Span::days(1)))?,
        })
    }

    /// Returns how many were rejected in the last ten minutes, or since the first check.
    fn recent_rejections(&mut self, now: Instant, total: u64) -> u64 {
        self.rejected.push_back((now, total));
        while self.rejected.get(1).is_some_and(|(at, _)| now.saturating_duration_since(*at) >= REJECTION_WINDOW) {
            self.rejected.pop_front();
        }
        self.rejected.front().map_or(0, |(_, before)| total.saturating_sub(*before))
    }

    fn end_expired_snoozes(&self) -> Result<(), StoreError> {
        let now = self.clock.now();
        let is_expired = |until: Option<Timestamp>| until.is_some_and(|until| until <= now);
        for (case, _) in self.store.mutes()?.into_iter().filter(|(_, mute)| is_expired(mute.until)) {
            let routes = self.settings.routes();
            self.store.end_mute(case, now, &|case, mute| {
                let note = alert::still_open(case, mute, now);
                outbox::route_notes(&routes, note.as_slice())
            })?;
        }
        Ok(())
    }

    fn clean_up(&mut self) -> Result<(), StoreError> {
        if self.cleaned_up.is_some_and(|cleaned_up| cleaned_up.elapsed() < CLEANUP_INTERVAL) {
            return Ok(());
        }
        self.cleaned_up = Some(Instant::now());
        let known: Vec<&str> = self.settings.receivers.keys().map(String::as_str).collect();
        let lost = self.store.give_up_removed_receivers(&known, SystemClock.now())?;
        if lost > 0 {
            tracing::warn!(lost, "discarded messages to receivers that are no longer configured");
        }
        self.store.delete_old_alerts(SystemClock.now().minus(RETENTION)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejected_results_are_counted_over_ten_minutes() {
        let store = Store::open_in_memory().unwrap();
        let mut alerts = ServiceAlerts::new(AlertSettings::default(), store, Arc::new(SystemClock));
        let start = Instant::now();
        let at = |minutes: u64| start + Duration::from_secs(60 * minutes);
        assert_eq!(alerts.recent_rejections(at(0), 7), 0, "earlier rejections do not count");
        assert_eq!(alerts.recent_rejections(at(5), 9), 2);
        assert_eq!(alerts.recent_rejections(at(10), 20), 13);
        assert_eq!(alerts.recent_rejections(at(14), 20), 13);
        assert_eq!(alerts.recent_rejections(at(15), 20), 11);
        assert_eq!(alerts.recent_rejections(at(25), 20), 0);
    }
}
