//! The node's clock. Its timestamps go into evidence; the controller decides the order of results.

use std::time::{SystemTime, UNIX_EPOCH};

use doctor_core::time::Timestamp;

pub fn now() -> Timestamp {
    // A time before 1970 means a broken clock; the controller detects that from the document.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_millis(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}
