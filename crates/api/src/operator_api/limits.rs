//! Request limits that several modules share.

use std::time::Duration;

/// Maximum duration of a request, including the wait for a worker.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
