//! Whether the control loop makes progress, and how long one call to the cluster may take.
//!
//! The loop reports each step, the executor each effect, and a backend each host or node of a long call. A handle is a
//! pointer: reporting costs a lock that is free, so a backend may report for every host. From the reports follow three
//! things: the lease is renewed while there are any, `/healthz` fails when there are none, and the process ends itself so
//! that another controller takes over. A thread that does not belong to the loop must not report: it would hide a loop
//! that hangs.
//!
//! All limits derive from the interval of the cycle, which can change while the program runs.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// The least stall limit. Below it, a loop whose machine swaps or builds software would count as stuck.
pub const MIN_STALL_LIMIT: Duration = Duration::from_secs(60);

/// Returns how long a loop whose cycles start `every` apart may go without progress: two cycles, at least
/// [`MIN_STALL_LIMIT`].
pub fn stall_limit(every: Duration) -> Duration {
    every.saturating_mul(2).max(MIN_STALL_LIMIT)
}

/// A handle to the progress of one control loop. Clones report to the same loop.
#[derive(Debug, Clone)]
pub struct Progress(Arc<State>);

#[derive(Debug)]
struct State {
    last: Mutex<LastProgress>,
    limit_millis: AtomicU64,
    effects: Mutex<Effects>,
}

/// Which term of leadership may change the cluster, and until when.
#[derive(Debug, Clone, Copy, Default)]
struct Effects {
    term: u64,
    /// `None`: without an end, in a simulation.
    end: Option<BootTime>,
}

impl Effects {
    fn are_allowed(&self) -> bool {
        self.end.is_none_or(|end| BootTime::now() < end)
    }
}

/// A moment of the clock that goes on while the machine is suspended, as the lease does. [`Instant`] stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTime(Duration);

impl BootTime {
    pub fn now() -> Self {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        // Neither is negative.
        Self(Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0)))
    }

    #[must_use]
    pub fn plus(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span))
    }
}

/// The right to change the cluster in one term of leadership. It ends with the term: if this process leads again later, it
/// gets another one.
#[derive(Debug, Clone)]
pub struct EffectsPermit {
    progress: Progress,
    term: u64,
}

impl EffectsPermit {
    /// Returns whether an effect on the cluster may still be started.
    pub fn is_valid(&self) -> bool {
        let effects = *self.progress.effects();
        effects.term == self.term && effects.are_allowed()
    }
}

#[derive(Debug, Clone, Copy)]
struct LastProgress {
    at: Instant,
    step: &'static str,
}

/// A loop that has made no progress for longer than its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stall {
    /// What the loop does since.
    pub step: &'static str,
    pub lasted: Duration,
    pub limit: Duration,
}

impl std::fmt::Display for Stall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (lasted, limit) = (self.lasted.as_secs(), self.limit.as_secs());
        write!(f, "no progress for {lasted} s (limit {limit} s) in step `{}`", self.step)
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new(MIN_STALL_LIMIT)
    }
}

impl Progress {
    /// Creates the handle of a loop that starts now and counts as stuck after `limit` without progress.
    pub fn new(limit: Duration) -> Self {
        let last = Mutex::new(LastProgress { at: Instant::now(), step: "start" });
        let limit_millis = AtomicU64::new(millis(limit));
        Self(Arc::new(State { last, limit_millis, effects: Mutex::default() }))
    }

    fn effects(&self) -> MutexGuard<'_, Effects> {
        self.0.effects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn last(&self) -> MutexGuard<'_, LastProgress> {
        self.0.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports that the loop begins this step, and so has ended the one before.
    pub fn enter(&self, step: &'static str) {
        *self.last() = LastProgress { at: Instant::now(), step };
    }

    /// Reports that the current step advances: one more host has answered, one more effect has ended.
    pub fn tick(&self) {
        self.last().at = Instant::now();
    }

    /// Sets the limit, from the next look on.
    pub fn set_limit(&self, limit: Duration) {
        self.0.limit_millis.store(millis(limit), Ordering::Relaxed);
    }

    /// Returns how long the loop may go without progress.
    pub fn limit(&self) -> Duration {
        Duration::from_millis(self.0.limit_millis.load(Ordering::Relaxed))
    }

    /// Returns how long one call to the cluster may take before the backend gives it up: three quarters of the stall
    /// limit, 45 s with the default cycle. A call that advances, host by host, may take longer in all if it reports that
    /// by [`Self::tick`]; this limit then holds for each host. The rest is for the cycle's own work between two calls.
    pub fn call_deadline(&self) -> Duration {
        self.limit() * 3 / 4
    }

    /// Begins a term of leadership, which is the fence of a lease just acquired, and allows effects on the cluster
    /// until the end of the lease. `None`: without an end, in a simulation. The fence may be smaller than that of an
    /// earlier term: a database that was restored has an earlier fence.
    pub fn begin_term(&self, term: u64, end: Option<BootTime>) {
        *self.effects() = Effects { term, end };
    }

    /// Sets until when effects on the cluster may be started in this term: until the end of the lease, counted from
    /// before it was renewed. `None`: without an end, in a simulation. Does nothing if another term has begun.
    pub fn allow_effects_until(&self, term: u64, end: Option<BootTime>) {
        let mut effects = self.effects();
        if term == effects.term {
            *effects = Effects { term, end };
        }
    }

    /// Allows no further effect of this term, because the lease was lost or given up. Does nothing if another term has
    /// begun.
    pub fn end_effects(&self, term: u64) {
        self.allow_effects_until(term, Some(BootTime(Duration::ZERO)));
    }

    /// Returns whether an effect on the cluster may still be started. The engine checks the lease in the store before each
    /// effect; a process that is suspended after that finds out only here. A backend calls this as late as it can, right
    /// before it sends a request that changes something, and returns an error with [`Effect::NotAppliedRetry`] if not.
    ///
    /// [`Effect::NotAppliedRetry`]: crate::Effect::NotAppliedRetry
    pub fn effects_allowed(&self) -> bool {
        self.effects().are_allowed()
    }

    /// Returns the right to change the cluster in the present term, for work that may still wait or run in a later one.
    pub fn effects_permit(&self) -> EffectsPermit {
        EffectsPermit { progress: self.clone(), term: self.effects().term }
    }

    /// Returns the stall if the loop has made no progress for longer than its limit.
    pub fn stall(&self) -> Option<Stall> {
        let LastProgress { at, step } = *self.last();
        let (lasted, limit) = (at.elapsed(), self.limit());
        (lasted > limit).then_some(Stall { step, lasted, limit })
    }
}

fn millis(limit: Duration) -> u64 {
    u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stall_limit_is_two_cycles_and_at_least_a_minute() {
        for (every, limit) in [(0, 60), (30, 60), (31, 62), (3600, 7200)] {
            assert_eq!(stall_limit(Duration::from_secs(every)), Duration::from_secs(limit), "{every}");
        }
        assert_eq!(Progress::default().call_deadline(), Duration::from_secs(45));
    }

    #[test]
    fn a_loop_is_stuck_without_reports_and_names_the_step_it_is_in() {
        let progress = Progress::new(Duration::from_secs(3600));
        assert_eq!(progress.stall(), None);
        progress.enter("observe");
        progress.set_limit(Duration::ZERO);
        std::thread::yield_now();
        let began = Instant::now();
        let stall = loop {
            match progress.stall() {
                Some(stall) => break stall,
                None => assert!(began.elapsed() < Duration::from_secs(60), "time does not pass"),
            }
        };
        assert_eq!(stall.step, "observe");
        assert!(stall.to_string().ends_with("in step `observe`"), "{stall}");
        progress.set_limit(Duration::from_secs(3600));
        progress.tick();
        assert_eq!(progress.stall(), None);
    }

    #[test]
    fn effects_are_allowed_until_the_lease_ends() {
        let progress = Progress::default();
        assert!(progress.effects_allowed(), "a simulation has no limit");
        progress.begin_term(1, Some(BootTime::now().plus(Duration::from_secs(3600))));
        assert!(progress.effects_allowed());
        progress.allow_effects_until(1, Some(BootTime::now()));
        assert!(!progress.effects_allowed());
    }

    #[test]
    fn a_lost_lease_ends_the_effects_of_its_term_and_a_later_term_does_not_bring_them_back() {
        let progress = Progress::default();
        let hour = || Some(BootTime::now().plus(Duration::from_secs(3600)));
        progress.begin_term(4, hour());
        let permit = progress.effects_permit();
        assert!(permit.is_valid());
        progress.end_effects(4);
        assert!(!permit.is_valid() && !progress.effects_allowed());
        progress.begin_term(5, hour());
        assert!(!permit.is_valid(), "work of the term before");
        assert!(progress.effects_allowed() && progress.effects_permit().is_valid());
        // What is reported late of the term before changes nothing.
        progress.end_effects(4);
        assert!(progress.effects_allowed());
    }

    #[test]
    fn a_new_term_allows_effects_although_a_restored_database_gave_it_a_smaller_fence() {
        let progress = Progress::default();
        let hour = || Some(BootTime::now().plus(Duration::from_secs(3600)));
        progress.begin_term(7, hour());
        let permit = progress.effects_permit();
        progress.end_effects(7);
        progress.begin_term(3, hour());
        assert!(progress.effects_allowed() && progress.effects_permit().is_valid());
        // What is reported late of the term before changes nothing.
        progress.end_effects(7);
        assert!(progress.effects_allowed());
        progress.end_effects(3);
        progress.allow_effects_until(7, hour());
        assert!(!progress.effects_allowed() && !permit.is_valid());
        progress.allow_effects_until(3, hour());
        assert!(progress.effects_allowed(), "the lease was renewed after all");
    }
}
