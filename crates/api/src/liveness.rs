//! Liveness: whether the control loop makes progress.

use std::sync::{Mutex, PoisonError};

use doctor_backend::progress::{Progress, Stall};

/// The progress of the loop beside this endpoint.
#[derive(Debug, Default)]
pub(super) struct LoopWatchdog(Mutex<Progress>);

impl LoopWatchdog {
    pub(super) fn set(&self, progress: &Progress) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone_from(progress);
    }

    /// Returns how the loop is stuck, if it is. A loop that does not run yet has as long as a step.
    pub(super) fn stall(&self) -> Option<Stall> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).stall()
    }
}
