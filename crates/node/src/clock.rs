//! The node's clock. What it says goes into evidence; the order of results is the controller's.

use std::time::{SystemTime, UNIX_EPOCH};

use doctor_core::time::Timestamp;

pub fn now() -> Timestamp {
    // A clock before 1970 is a broken clock; the controller finds that out from the document.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_millis(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}
