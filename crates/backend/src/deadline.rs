//! The deadline of a call to a backend, for everything that the call starts.
//!
//! [`super::bounded`] sets a deadline for each call. The process runner, the HTTP client, SSH sessions and the backends' own
//! clients take the shorter of their own limit and [`time_left`], and start nothing when no time is left. A call of several
//! requests therefore ends in time, whatever their limits are, and a call that was given up has no late effect.
//!
//! The deadline belongs to the thread: it reaches a request without passing through every function in between. A thread that
//! works for the call enters the deadline of the thread that started it ([`Deadline::current`], [`enter`]). Code outside a
//! call, such as a command of an operator, has no deadline and only its own limits.

use std::{
    cell::RefCell,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crate::progress::EffectsPermit;

/// Why nothing is started any more.
pub const TIME_IS_UP: &str = "not started: the time for this call to the cluster is over";

/// The moment by which a call ends. Clones share the cancellation.
#[derive(Debug, Clone)]
pub struct Deadline {
    at: Instant,
    cancelled: Arc<AtomicBool>,
    /// Of a change: it starts nothing once the lease has ended, even if this process leads again.
    permit: Option<EffectsPermit>,
}

thread_local! {
    static CURRENT: RefCell<Option<Deadline>> = const { RefCell::new(None) };
}

impl Deadline {
    pub fn after(limit: Duration) -> Self {
        Self::of_change(limit, None)
    }

    /// Returns the deadline of a change: no time is left either when effects are no longer allowed.
    pub fn of_change(limit: Duration, permit: Option<EffectsPermit>) -> Self {
        Self { at: Instant::now() + limit, cancelled: Arc::default(), permit }
    }

    /// Returns the deadline of the call that this thread works for.
    pub fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Ends the call now: from here on, no time is left.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Returns whether the call was cancelled, or may change nothing any more because its lease has ended.
    pub fn is_cancelled(&self) -> bool {
        let is_lost = || self.permit.as_ref().is_some_and(|permit| !permit.is_valid());
        self.cancelled.load(Ordering::Relaxed) || is_lost()
    }

    /// Returns the time until the deadline; zero after it.
    pub fn left(&self) -> Duration {
        if self.is_cancelled() {
            return Duration::ZERO;
        }
        self.at.saturating_duration_since(Instant::now())
    }
}

/// Runs `work` on this thread under a deadline, usually that of the thread that started this one. `None`: without one.
pub fn enter<T>(deadline: Option<Deadline>, work: impl FnOnce() -> T) -> T {
    /// Restores the previous deadline, also after a panic.
    struct Restore(Option<Deadline>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.set(self.0.take());
        }
    }
    let _restore = Restore(CURRENT.replace(deadline));
    work()
}

/// Returns the shorter of a request's own limit and the time that is left of the call.
pub fn time_left(own: Duration) -> Duration {
    Deadline::current().map_or(own, |deadline| own.min(deadline.left()))
}

/// Returns whether the call that this thread works for was cancelled, or its lease has ended.
pub fn is_cancelled() -> bool {
    Deadline::current().is_some_and(|deadline| deadline.is_cancelled())
}

/// Returns whether the call that this thread works for has no time left.
pub fn is_over() -> bool {
    Deadline::current().is_some_and(|deadline| deadline.left().is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn a_request_gets_the_shorter_of_its_own_limit_and_what_is_left_of_the_call() {
        assert_eq!(time_left(HOUR), HOUR, "there is no call");
        let call = Deadline::after(Duration::from_secs(600));
        enter(Some(call.clone()), || {
            assert!(time_left(HOUR) <= Duration::from_secs(600));
            assert_eq!(time_left(Duration::from_secs(1)), Duration::from_secs(1));
            assert!(!is_over() && !is_cancelled());
            call.cancel();
            assert!(is_over() && is_cancelled() && time_left(HOUR).is_zero());
        });
        assert_eq!(time_left(HOUR), HOUR, "the call has ended");
    }

    #[test]
    fn a_call_whose_time_is_over_was_not_cancelled_and_one_whose_lease_has_ended_was() {
        enter(Some(Deadline::after(Duration::ZERO)), || assert!(is_over() && !is_cancelled()));
        let lease = crate::progress::Progress::default();
        enter(Some(Deadline::of_change(HOUR, Some(lease.effects_permit()))), || {
            assert!(!is_cancelled());
            lease.end_effects(0);
            assert!(is_over() && is_cancelled());
        });
    }

    #[test]
    fn a_thread_of_the_call_has_its_deadline_and_other_threads_have_none() {
        let call = Deadline::after(Duration::ZERO);
        enter(Some(call), || {
            let inherited = Deadline::current();
            std::thread::scope(|scope| {
                assert!(!scope.spawn(is_over).join().unwrap());
                assert!(scope.spawn(|| enter(inherited, is_over)).join().unwrap());
            });
        });
    }

    #[test]
    fn a_panic_leaves_no_deadline_behind() {
        let panicked =
            std::panic::catch_unwind(|| enter(Some(Deadline::after(Duration::ZERO)), || panic!("on purpose")));
        assert!(panicked.is_err() && !is_over());
    }
}
