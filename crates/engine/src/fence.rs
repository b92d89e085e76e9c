//! The last check before an effect on the cluster: whether this controller still leads, and long enough.

use doctor_backend::{
    clock::Clock,
    progress::{BootTime, Progress},
};
use doctor_store::{Lease, LeaseClock, Store, StoreError};

/// An effect is not started in the last quarter of the lease, unless the lease can be renewed first: the call itself takes
/// time, and another controller may lead before it ends. A loop that makes progress renews its lease three times in each
/// ttl, so this happens only after renewals have failed.
const LAST_PART: i64 = 4;

/// Checks in the store that this controller may start an effect now.
///
/// # Errors
/// If the lease was lost or has expired, or the store fails. A lease that expired is not renewed here: the process was
/// suspended for longer than the lease, and its plan is as old.
pub(crate) fn check(store: &Store, clock: &dyn Clock, lease: &Lease, progress: &Progress) -> Result<(), StoreError> {
    let now = || LeaseClock::of(clock.virtual_now());
    match store.holds_lease(lease, now()).inspect_err(|error| end_effects_if_lost(error, lease, progress))? {
        left if left.times(LAST_PART) < lease.ttl => extend(clock, lease, progress, || store.keep(lease, now())),
        _ => Ok(()),
    }
}

/// Ends what is in flight in the term of this lease if the error says that the lease was lost.
pub(crate) fn end_effects_if_lost(error: &StoreError, lease: &Lease, progress: &Progress) {
    if error.is_lease_lost() {
        progress.end_effects(lease.fence);
    }
}

/// Renews the lease by `renew`, and allows effects until it ends. Counted from before the renewal: whatever time it took
/// is missing, never too much.
///
/// # Errors
/// Those of `renew`.
pub(crate) fn extend(
    clock: &dyn Clock,
    lease: &Lease,
    progress: &Progress,
    renew: impl FnOnce() -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let began = BootTime::now();
    renew().inspect_err(|error| end_effects_if_lost(error, lease, progress))?;
    allow_effects(clock, lease, progress, began);
    Ok(())
}

/// Begins the term of a lease that was acquired after `began`, and allows effects until its end.
pub(crate) fn begin_term(clock: &dyn Clock, lease: &Lease, progress: &Progress, began: BootTime) {
    progress.begin_term(lease.fence, end_of(clock, lease, began));
}

/// Allows effects until the end of a lease that was renewed after `began`.
pub(crate) fn allow_effects(clock: &dyn Clock, lease: &Lease, progress: &Progress, began: BootTime) {
    progress.allow_effects_until(lease.fence, end_of(clock, lease, began));
}

fn end_of(clock: &dyn Clock, lease: &Lease, began: BootTime) -> Option<BootTime> {
    clock.virtual_now().is_none().then(|| began.plus(lease.ttl.to_std()))
}

#[cfg(test)]
mod tests {
    use doctor_backend::clock::SystemClock;
    use doctor_core::time::Span;

    use super::*;

    #[test]
    fn a_loss_that_the_loop_finds_ends_what_is_in_flight() {
        let store = Store::open_in_memory().unwrap();
        let lead = || {
            let lease = store.acquire("a leader", LeaseClock::Database, Span::hours(1)).unwrap();
            let progress = Progress::default();
            begin_term(&SystemClock, &lease, &progress, BootTime::now());
            check(&store, &SystemClock, &lease, &progress).unwrap();
            let permit = progress.effects_permit();
            assert!(permit.is_valid());
            store.take_lease(lease.fence, "ann", "a test").unwrap();
            (lease, progress, permit)
        };
        let (lease, progress, permit) = lead();
        assert!(check(&store, &SystemClock, &lease, &progress).unwrap_err().is_lease_lost());
        assert!(!permit.is_valid());
        let (lease, progress, permit) = lead();
        let renew = || store.renew(&lease, LeaseClock::Database);
        assert!(extend(&SystemClock, &lease, &progress, renew).unwrap_err().is_lease_lost());
        assert!(!permit.is_valid());
    }
}
