//! Requests to stop, from a signal or from the job's time limit.
//!
//! A probe may be blocked in poll(2) when the request arrives, so [`Stop`] offers a file descriptor to poll beside the
//! flag.

use std::{
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use signal_hook::consts::{SIGINT, SIGTERM};

/// The cause of a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    Signal,
    TimeLimit,
}

/// A stop request, tested before and during every operation that takes time.
#[derive(Debug, Default)]
pub struct Stop {
    signalled: Arc<AtomicBool>,
    wake: Option<UnixStream>,
    deadline: Option<Instant>,
}

impl Stop {
    /// A request that never comes.
    pub fn never() -> Self {
        Self::default()
    }

    /// Stops on SIGTERM and SIGINT.
    pub fn on_signals() -> io::Result<Self> {
        let signalled = Arc::new(AtomicBool::new(false));
        let (wake, woken) = UnixStream::pair()?;
        for signal in [SIGTERM, SIGINT] {
            // The flag must be set before the pipe wakes a waiter.
            signal_hook::flag::register(signal, Arc::clone(&signalled))?;
            signal_hook::low_level::pipe::register(signal, woken.try_clone()?)?;
        }
        Ok(Self { signalled, wake: Some(wake), deadline: None })
    }

    /// Also stops after `limit`.
    #[must_use]
    pub fn after(mut self, limit: Duration) -> Self {
        self.deadline = Instant::now().checked_add(limit);
        self
    }

    pub fn requested(&self) -> Option<StopReason> {
        if self.signalled.load(Ordering::SeqCst) {
            return Some(StopReason::Signal);
        }
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline).then_some(StopReason::TimeLimit)
    }

    /// Like [`Self::requested`], but waits up to `wait` for a request.
    pub(crate) fn requested_within(&self, wait: Duration) -> Option<StopReason> {
        let end = Instant::now() + wait;
        loop {
            let reason = self.requested();
            if reason.is_some() || Instant::now() >= end {
                return reason;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// A descriptor that becomes readable when a signal arrives.
    pub(crate) fn wake(&self) -> Option<impl AsFd + '_> {
        self.wake.as_ref()
    }

    /// Shortens `wait` so that it does not pass the deadline.
    pub(crate) fn cap_wait(&self, wait: Duration) -> Duration {
        self.deadline.map_or(wait, |deadline| wait.min(deadline.saturating_duration_since(Instant::now())))
    }
}
