//! A demo that continues after its month at a multiple of real time, for live viewing.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use doctor_backend::clock::Clock;
use doctor_core::time::Span;
use doctor_engine::{settings::Settings, snapshot_feed::SnapshotFeed, trigger::Trigger};
use doctor_store::Store;

use super::Session;
use crate::{harness::session::SessionError, machine::scaled};

/// The interval at which the stop flag and operator commands are noticed.
const TICK: Duration = Duration::from_millis(100);
/// The longest real time between two cycles.
const MAX_STEP: Duration = Duration::from_secs(2);

/// A session whose time follows real time.
#[derive(Debug)]
pub struct RunningDemo {
    session: Session,
}

impl RunningDemo {
    pub(super) const fn new(session: Session) -> Self {
        Self { session }
    }

    pub const fn store(&self) -> &Store {
        self.session.store()
    }

    pub const fn settings(&self) -> &Settings {
        self.session.settings()
    }

    pub fn clock(&self) -> Arc<dyn Clock> {
        self.session.clock()
    }

    /// Continues until `stop` is set, `speed` times as fast as real time, with an additional cycle for every wake-up.
    ///
    /// # Errors If the store fails.
    pub fn advance(
        &mut self,
        speed: f64,
        snapshot_feed: Arc<SnapshotFeed>,
        trigger: &Trigger,
        stop: &AtomicBool,
    ) -> Result<(), SessionError> {
        self.session.set_snapshot_feed(snapshot_feed);
        let every = Span::minutes(5).to_std().div_f64(speed).clamp(TICK, MAX_STEP);
        let (began, start) = (Instant::now(), self.session.backend().world().now());
        let mut last_cycle: Option<Instant> = None;
        while !stop.load(Ordering::Relaxed) {
            let triggered = trigger.wait(TICK);
            if triggered || last_cycle.is_none_or(|last_cycle| last_cycle.elapsed() >= every) {
                last_cycle = Some(Instant::now());
                let until = start.plus(scaled(Span::from_secs(1), began.elapsed().as_secs_f64() * speed));
                self.session.run_until(until, |_, _| Ok(()))?;
                // After the last step, so that viewers see the current state.
                self.session.cycle()?;
            }
        }
        self.session.stop()
    }
}
