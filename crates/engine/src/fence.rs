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
    match store.holds_lease(lease, now())? {
        left if left.times(LAST_PART) < lease.ttl => extend(clock, lease, progress, || store.keep(lease, now())),
        _ => Ok(()),
    }
}

/// Renews the lease by `renew`, and allows effects until it ends. Counted from before the renewal: whatever time it took
/// is missing, never too much.
///
/// # Errors
/// Those of `renew`.
pub(crate) fn extend<T, E>(
    clock: &dyn Clock,
    lease: &Lease,
    progress: &Progress,
    renew: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let began = BootTime::now();
    let renewed = renew()?;
    allow_effects(clock, lease, progress, began);
    Ok(renewed)
}

/// Allows effects until the end of a lease that was acquired or renewed after `began`.
pub(crate) fn allow_effects(clock: &dyn Clock, lease: &Lease, progress: &Progress, began: BootTime) {
    let end = clock.virtual_now().is_none().then(|| began.plus(lease.ttl.to_std()));
    progress.allow_effects_until(lease.fence, end);
}
