//! The cycle trigger: wakes the thread that waits for the next cycle when new input arrives.

use std::{
    sync::{Condvar, Mutex, PoisonError},
    time::Duration,
};

/// Any number of calls to `ring` cause one wake-up.
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

    /// Waits for a call to `ring`, at most this long. Returns whether there was one since the last call.
    pub fn wait(&self, most: Duration) -> bool {
        let rung = self.fired.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut rung, _) =
            self.condvar.wait_timeout_while(rung, most, |rung| !*rung).unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut rung)
    }
}
