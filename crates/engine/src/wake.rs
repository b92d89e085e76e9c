//! A bell between threads: whoever waits for the next cycle is woken when something has come in.

use std::{
    sync::{Condvar, Mutex, PoisonError},
    time::Duration,
};

/// Rings once for any number of callers.
#[derive(Debug, Default)]
pub struct Wake {
    rung: Mutex<bool>,
    bell: Condvar,
}

impl Wake {
    pub fn ring(&self) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.bell.notify_all();
    }

    /// Waits for the bell, at most this long. True if it rang since the last call.
    pub fn wait(&self, most: Duration) -> bool {
        let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut rung, _) =
            self.bell.wait_timeout_while(rung, most, |rung| !*rung).unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut rung)
    }
}
