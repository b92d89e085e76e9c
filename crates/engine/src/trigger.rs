//! The cycle trigger: wakes the thread that waits for the next cycle when new input arrives.

use std::{
    sync::{Condvar, Mutex, PoisonError},
    time::Duration,
};

/// Any number of calls to `fire` cause one wake-up.
#[derive(Debug, Default)]
pub struct Trigger {
    fired: Mutex<bool>,
    condvar: Condvar,
}

impl Trigger {
    pub fn fire(&self) {
        *self.fired.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.condvar.notify_all();
    }

    /// Waits for a call to `fire`, at most this long. Returns whether there was one since the last call.
    pub fn wait(&self, timeout: Duration) -> bool {
        let fired = self.fired.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut fired, _) =
            self.condvar.wait_timeout_while(fired, timeout, |fired| !*fired).unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut fired)
    }
}
