//! The controller's only source of the current time.

use doctor_core::time::Timestamp;

/// A source of time. Pure code does not use it; its callers pass it timestamps.
pub trait Clock: Send + Sync {
    fn now(&self) -> Timestamp;
    /// Blocks until `moment`. A virtual clock jumps there instead.
    fn sleep_until(&self, moment: Timestamp);
}

/// The system's real-time clock.
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
