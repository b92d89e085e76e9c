//! The limits of a request that more than one module keeps to.

use std::time::Duration;

/// The most time that a request may take, the wait for its turn included.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
