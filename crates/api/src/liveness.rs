//! Liveness: whether the control loop still runs.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// A cycle that lasts this long will not end: every call to a cluster has its own timeout, and effects end with the
/// lease, usually after a minute.
const STUCK: Duration = Duration::from_secs(15 * 60);

/// When the loop last reported.
#[derive(Debug)]
pub(super) struct Pulse(Mutex<Beat>);

#[derive(Debug, Clone, Copy)]
struct Beat {
    at: Instant,
    /// The next report is late after this.
    within: Duration,
}

impl Pulse {
    pub(super) fn new(now: Instant) -> Self {
        Self(Mutex::new(Beat { at: now, within: STUCK }))
    }

    /// Records that a cycle starts or has ended, at `now`; cycles start `every` apart.
    pub(super) fn beat(&self, now: Instant, every: Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Beat { at: now, within: STUCK + every };
    }

    /// Returns how long the loop has been silent, if that is too long.
    pub(super) fn stopped(&self, now: Instant) -> Option<Duration> {
        let Beat { at, within } = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let silent = now.saturating_duration_since(at);
        (silent > within).then_some(silent)
    }

    /// Makes the loop late immediately: a test cannot wait for a quarter of an hour.
    #[cfg(test)]
    pub(super) fn stop(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Beat { at: Instant::now(), within: Duration::ZERO };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_without_cycles_is_stuck_and_one_between_cycles_is_not() {
        let start = Instant::now();
        let pulse = Pulse::new(start);
        assert_eq!(pulse.stopped(start + STUCK), None, "the first cycle gets the same time");
        assert!(pulse.stopped(start + STUCK + Duration::from_secs(1)).is_some());
        let hour = Duration::from_secs(3600);
        pulse.beat(start + hour, hour);
        assert_eq!(pulse.stopped(start + hour + hour + STUCK), None, "cycles an hour apart are a setting");
        assert_eq!(pulse.stopped(start + hour * 3), Some(hour * 2));
    }
}
