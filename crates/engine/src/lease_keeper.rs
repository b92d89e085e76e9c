//! Renews the lease beside the control loop, while the loop makes progress.
//!
//! A cycle may last longer than the lease: a large cluster, slow hosts, a slow scheduler. A loop that renewed only between
//! cycles would lose its lease in each of them and drop all of its effects. A thread that renewed without a condition
//! would keep the lease for a loop that hangs for ever. So the thread renews only while the loop reports progress
//! ([`Progress`]); without it the lease runs out and another controller leads.

use std::{
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use doctor_backend::{
    clock::SystemClock,
    progress::{BootTime, Progress},
};
use doctor_store::{Lease, LeaseClock, Store};

use crate::fence;

/// Renewals in each ttl: two may fail before the lease expires.
const RENEWALS: u32 = 3;
/// Attempts in each ttl after a renewal failed, or while the loop is stuck and may go on.
const RETRIES: u32 = 12;

/// The thread that renews the lease. Dropping it ends the thread, and the lease is renewed no longer.
#[derive(Debug)]
pub struct LeaseKeeper(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The lease to renew, and when.
    due: Option<(Lease, Instant)>,
    closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a renewal is due, and returns since when. `None`: the keeper was dropped.
    fn next(&self) -> Option<(Lease, Instant)> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            let left = match &state.due {
                None => Duration::MAX,
                Some((lease, at)) => match at.saturating_duration_since(Instant::now()) {
                    Duration::ZERO => return Some((lease.clone(), *at)),
                    left => left,
                },
            };
            state = match left {
                Duration::MAX => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                left => self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// Sets when the lease is renewed next and calls `kept`, unless the loop has renewed it, replaced it or given it up since
    /// it was due.
    fn renew_after(&self, (lease, was_due): (&Lease, Instant), parts: u32, kept: impl FnOnce()) {
        if let Some((due, at)) = &mut self.lock().due
            && (due.fence, *at) == (lease.fence, was_due)
        {
            *at = Instant::now() + lease.ttl.to_std() / parts;
            kept();
        }
    }
}

impl LeaseKeeper {
    /// Starts the thread, which does nothing until the engine has a lease. `store` must not report progress.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(store: &Store, progress: &Progress) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let (theirs, store, progress) = (Arc::clone(&shared), store.clone(), progress.clone());
        thread::Builder::new().name("doctor-lease".to_owned()).spawn(move || run(&theirs, &store, &progress))?;
        Ok(Self(shared))
    }

    /// Renews this lease from now on; it has just been renewed. `None`: renews none.
    pub(crate) fn keep(&self, lease: Option<&Lease>) {
        let due = |lease: &Lease| (lease.clone(), Instant::now() + lease.ttl.to_std() / RENEWALS);
        self.0.lock().due = lease.map(due);
        self.0.changed.notify_all();
    }
}

impl Drop for LeaseKeeper {
    fn drop(&mut self) {
        // Not joined: a renewal may wait for a database that does not answer.
        self.0.lock().closed = true;
        self.0.changed.notify_all();
    }
}

fn run(shared: &Shared, store: &Store, progress: &Progress) {
    // Whether the present trouble was logged.
    let (mut stuck, mut failing) = (false, false);
    while let Some((lease, was_due)) = shared.next() {
        let renew_after = |parts, kept: &dyn Fn()| shared.renew_after((&lease, was_due), parts, kept);
        if let Some(stall) = progress.stall() {
            if !std::mem::replace(&mut stuck, true) {
                tracing::error!(%stall, "the control loop is stuck: the lease is no longer renewed");
            }
            renew_after(RETRIES, &|| {});
            continue;
        }
        stuck = false;
        let began = BootTime::now();
        match store.keep(&lease, LeaseClock::Database) {
            Ok(()) => {
                failing = false;
                renew_after(RENEWALS, &|| fence::allow_effects(&SystemClock, &lease, progress, began));
            }
            // The loop finds out before its next effect. A change in flight finds out here.
            Err(error) if error.is_lease_lost() => {
                renew_after(RETRIES, &|| progress.end_effects(lease.fence));
            }
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "renewal of the lease failed; it is retried");
                }
                renew_after(RETRIES, &|| {});
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use doctor_core::time::Span;
    use doctor_store::{LeaseError, StoreUrl};

    use super::*;

    /// For tests that wait for the end of a lease.
    const SHORT: Span = Span::from_secs(3);
    /// Tells dead from slow.
    const WAIT_LIMIT: Duration = Duration::from_secs(120);

    fn wait_until(what: &str, mut level: impl FnMut() -> bool) {
        let began = Instant::now();
        while !level() {
            assert!(began.elapsed() < WAIT_LIMIT, "{what} did not happen");
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn leader(ttl: Span) -> (tempfile::TempDir, Store, Lease, Progress, LeaseKeeper) {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(&StoreUrl::Sqlite(folder.path().join("doctor.db"))).unwrap();
        let lease = store.acquire("a leader", LeaseClock::Database, ttl).unwrap();
        let progress = Progress::new(Duration::from_secs(3600));
        let keeper = LeaseKeeper::start(&store, &progress).unwrap();
        fence::begin_term(&SystemClock, &lease, &progress, BootTime::now());
        keeper.keep(Some(&lease));
        (folder, store, lease, progress, keeper)
    }

    /// The lease is long, so that a machine that runs the thread late does not lose it. The test moves the thread's schedule.
    #[test]
    fn the_lease_is_renewed_again_and_again_before_it_ends_while_the_loop_makes_progress() {
        let ttl = Span::from_secs(3600);
        let (_folder, store, lease, _progress, keeper) = leader(ttl);
        let status = || store.lease_status(doctor_core::time::Timestamp::MIN).unwrap().unwrap();
        let due = || keeper.0.lock().due.as_ref().unwrap().1;
        for _ in 0..3 {
            let end = status().until;
            assert!(due() <= Instant::now() + ttl.to_std() / RENEWALS, "two more may fail before the lease ends");
            wait_until("a later moment than the last renewal", || status().now > end.minus(ttl));
            let now = Instant::now();
            keeper.0.lock().due = Some((lease.clone(), now));
            keeper.0.changed.notify_all();
            wait_until("a renewal", || status().until > end);
            wait_until("the next one to be scheduled", || due() > now);
            assert!(status().alive && status().fence == lease.fence);
        }
        store.holds_lease(&lease, LeaseClock::Database).unwrap();
        let held = store.acquire("a standby", LeaseClock::Database, ttl).unwrap_err();
        assert!(matches!(held, LeaseError::Held { .. }), "{held}");
    }

    #[test]
    fn a_loop_without_progress_loses_its_lease_to_a_standby() {
        let (_folder, store, lease, progress, _keeper) = leader(SHORT);
        progress.enter("a call that hangs");
        progress.set_limit(Duration::from_millis(1));
        wait_until("a takeover", || store.acquire("a standby", LeaseClock::Database, SHORT).is_ok());
        assert!(store.holds_lease(&lease, LeaseClock::Database).unwrap_err().is_lease_lost());
        // The loop goes on after all: the lease is not taken back behind the standby.
        progress.set_limit(Duration::from_secs(3600));
        progress.tick();
        assert!(store.keep(&lease, LeaseClock::Database).unwrap_err().is_lease_lost());
    }

    #[test]
    fn a_change_in_flight_ends_when_the_lease_is_taken_away() {
        let (_folder, store, lease, progress, _keeper) = leader(SHORT);
        let permit = progress.effects_permit();
        // Renewed for long, by the loop: only the loss ends it.
        progress.allow_effects_until(lease.fence, Some(BootTime::now().plus(WAIT_LIMIT * 10)));
        store.take_lease(lease.fence, "ann", "a test").unwrap();
        wait_until("the end of effects", || !permit.is_valid());
        assert!(!progress.effects_allowed());
    }

    #[test]
    fn a_dropped_keeper_renews_no_longer() {
        let (_folder, store, _lease, _progress, keeper) = leader(SHORT);
        drop(keeper);
        wait_until("the end of the lease", || {
            !store.lease_status(doctor_core::time::Timestamp::MIN).unwrap().unwrap().alive
        });
    }
}
