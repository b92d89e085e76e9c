//! The controller's only source of the current time.

use doctor_core::time::Timestamp;

/// A source of time. Pure code does not use it; its callers pass it timestamps.
pub trait Clock: Send + Sync {
    fn now(&self) -> Timestamp;
    /// Blocks until `moment`. A virtual clock jumps there instead.
    fn sleep_until(&self, moment: Timestamp);
    /// Returns the current time of a clock that only a simulation moves. Leases count by it then, because such a
    /// simulation is one process. `None`: real time passes, and leases count by the database's clock.
    fn virtual_now(&self) -> Option<Timestamp> {
        None
    }
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
