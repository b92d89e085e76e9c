//! The load average that our own jobs cause, to be subtracted from the machine's.

use std::{
    sync::{Mutex, PoisonError},
    time::Instant,
};

/// The time constant with which the kernel's one-minute load average decays.
const MEMORY_SECONDS: f64 = 60.0;

/// Our own share of the load average, computed in the same way as the kernel's.
#[derive(Debug, Default)]
pub(super) struct OwnLoad {
    last: Mutex<Option<(Instant, f64)>>,
}

impl OwnLoad {
    /// Records that `threads` of ours run now. Returns our share of the load average.
    #[expect(clippy::cast_precision_loss, reason = "a count of threads")]
    pub(super) fn follow(&self, threads: usize, now: Instant) -> f64 {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let share = match *last {
            None => 0.0,
            Some((before, share)) => {
                let keep = (-now.saturating_duration_since(before).as_secs_f64() / MEMORY_SECONDS).exp();
                share * keep + threads as f64 * (1.0 - keep)
            }
        };
        *last = Some((now, share));
        share
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn own_load_rises_and_decays_like_the_kernel_load_average() {
        let own_load = OwnLoad::default();
        let start = Instant::now();
        assert!(own_load.follow(8, start) < 1e-9);
        let after = |seconds| start + Duration::from_secs(seconds);
        let grown = own_load.follow(8, after(60));
        assert!((grown - 8.0 * (1.0 - (-1.0_f64).exp())).abs() < 1e-9, "{grown}");
        assert!(own_load.follow(0, after(360)) < 0.1);
    }
}
