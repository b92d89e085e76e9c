//! Measures how fast this machine is during the test.
//!
//! The cluster's clock follows ours, so a slow machine does less per simulated hour. A controller that lives only
//! milliseconds on it does not complete a cycle, and unfinished work is then not a defect. Lifetimes and tolerances
//! therefore scale with the duration of a start, which is about the work of a cycle and is done by every controller.

use std::{fmt, time::Duration};

use doctor_core::time::Span;
use doctor_sim::Tolerances;

use crate::fixture::{OUTAGE, SPEED};

/// The longest lifetime on a fast machine.
const MIN_LIFETIME: Duration = Duration::from_millis(400);

#[derive(Debug, Default)]
pub(crate) struct StartupTimes {
    last: Duration,
    slowest: Duration,
}

impl StartupTimes {
    pub(crate) fn record(&mut self, elapsed: Duration) {
        self.last = elapsed;
        self.slowest = self.slowest.max(elapsed);
    }

    /// Returns the duration of the slowest start.
    pub(crate) const fn slowest(&self) -> Duration {
        self.slowest
    }

    /// Returns the longest lifetime of the next controller: a few cycles.
    pub(crate) fn controller_lifetime(&self) -> Duration {
        MIN_LIFETIME.max(self.last * 2)
    }

    /// Returns the tolerances for a controller that is killed all the time.
    ///
    /// `view`: planning and a transaction come between observing a node and submitting to it. On a machine that also
    /// builds software they may take seconds, each of which is [`SPEED`] seconds in the cluster. `leave`: the first
    /// controller that completes a cycle cancels a job in a user's way, once the cluster answers, and repeats a refused
    /// cancellation. All other invariants are exact.
    pub(crate) fn patience(&self) -> Tolerances {
        let simulated = |real: Duration| Span::from_millis((real.as_secs_f64() * 1000.0 * SPEED) as i64);
        let view = Duration::from_secs(5).max(self.slowest * 5);
        Tolerances { view: simulated(view), leave: simulated(view * 2) + OUTAGE.times(2) }
    }
}

impl fmt::Display for StartupTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a controller started within {:.1} s", self.slowest.as_secs_f64())
    }
}
