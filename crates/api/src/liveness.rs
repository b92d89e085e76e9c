//! Liveness: whether the control loop still runs.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// A cycle that lasts this long will not end: every call to a cluster has its own timeout, and effects end with the
/// lease, usually after a minute.
const STUCK_AFTER: Duration = Duration::from_secs(15 * 60);

/// When the loop last reported.
#[derive(Debug)]
pub(super) struct LoopWatchdog(Mutex<LastProgress>);

#[derive(Debug, Clone, Copy)]
struct LastProgress {
    at: Instant,
    /// The next report is late after this.
    within: Duration,
}

impl LoopWatchdog {
    pub(super) fn new(now: Instant) -> Self {
        Self(Mutex::new(LastProgress { at: now, within: STUCK_AFTER }))
    }

    /// Records that a cycle starts or has ended, at `now`; cycles start `every` apart.
    pub(super) fn record(&self, now: Instant, every: Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = LastProgress { at: now, within: STUCK_AFTER + every };
    }

    /// Returns how long the loop has been silent, if that is too long.
    pub(super) fn stuck_for(&self, now: Instant) -> Option<Duration> {
        let LastProgress { at, within } = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let silent = now.saturating_duration_since(at);
        (silent > within).then_some(silent)
    }

    /// Makes the loop late immediately: a test cannot wait for a quarter of an hour.
    #[cfg(test)]
    pub(super) fn set_stuck(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) =
            LastProgress { at: Instant::now(), within: Duration::ZERO };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_without_cycles_is_stuck_and_one_between_cycles_is_not() {
        let start = Instant::now();
        let watchdog = LoopWatchdog::new(start);
        assert_eq!(watchdog.stuck_for(start + STUCK_AFTER), None, "the first cycle gets the same time");
        assert!(watchdog.stuck_for(start + STUCK_AFTER + Duration::from_secs(1)).is_some());
        let hour = Duration::from_secs(3600);
        watchdog.record(start + hour, hour);
        assert_eq!(watchdog.stuck_for(start + hour + hour + STUCK_AFTER), None, "cycles an hour apart are a setting");
        assert_eq!(watchdog.stuck_for(start + hour * 3), Some(hour * 2));
    }
}
