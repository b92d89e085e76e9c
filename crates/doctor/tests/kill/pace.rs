//! How fast this machine is while the story is played.
//!
//! The cluster's clock runs with ours, and a machine that is short of time does less in an hour there. A controller that is
//! given milliseconds on it does not get to the end of a cycle, and what is left undone then is nobody's fault. So lives and
//! patience are measured by what a start takes: about the work of a cycle, and done by every controller.

use std::{fmt, time::Duration};

use doctor_core::time::Span;
use doctor_sim::Patience;

use crate::stage::{OUTAGE, SPEED};

/// The longest life, where nothing is slow.
const LIFE: Duration = Duration::from_millis(400);

#[derive(Debug, Default)]
pub(crate) struct Pace {
    last: Duration,
    slowest: Duration,
}

impl Pace {
    pub(crate) fn started(&mut self, took: Duration) {
        self.last = took;
        self.slowest = self.slowest.max(took);
    }

    /// The longest that a controller lives from now: for a few cycles.
    pub(crate) fn life(&self) -> Duration {
        LIFE.max(self.last * 2)
    }

    /// How much a controller that is killed all the time is forgiven.
    ///
    /// `view`: between looking at a node and submitting to it lie planning and a transaction, and on a machine that builds
    /// something beside this test they may take seconds; each is [`SPEED`] seconds there. `leave`: a job that is in a user's
    /// way is cancelled by the first controller that lives to the end of a cycle, once the cluster answers, and a refused
    /// cancellation is asked for again. All other invariants are exact.
    pub(crate) fn patience(&self) -> Patience {
        let there = |real: Duration| Span::from_millis((real.as_secs_f64() * 1000.0 * SPEED) as i64);
        let view = Duration::from_secs(5).max(self.slowest * 5);
        Patience { view: there(view), leave: there(view * 2) + OUTAGE.times(2) }
    }
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a controller started within {:.1} s", self.slowest.as_secs_f64())
    }
}
