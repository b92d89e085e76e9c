//! The one place where the controller learns what time it is.

use doctor_core::time::Timestamp;

/// A source of time. Pure code never sees it; it is given moments.
pub trait Clock: Send + Sync {
    fn now(&self) -> Timestamp;
    /// Waits until then. A virtual clock jumps.
    fn sleep_until(&self, moment: Timestamp);
}

/// The machine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(jiff::Timestamp::now().as_millisecond())
    }

    fn sleep_until(&self, moment: Timestamp) {
        std::thread::sleep(moment.since(self.now()).to_std());
    }
}
