//! The last check before an effect on the cluster: whether this controller still leads, and long enough.

use doctor_backend::clock::Clock;
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
pub(crate) fn check(store: &Store, clock: &dyn Clock, lease: &Lease) -> Result<(), StoreError> {
    let now = || LeaseClock::of(clock.virtual_now());
    match store.holds_lease(lease, now())? {
        left if left.times(LAST_PART) < lease.ttl => store.keep(lease, now()),
        _ => Ok(()),
    }
}
