//! Being told to stop: by a signal or by the job's own time limit.
//!
//! A probe may be waiting in poll(2) when the word comes, so there is a file descriptor to wait on beside the flag.

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

/// Who said stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopWhy {
    Signal,
    TimeLimit,
}

/// Looked at before and during everything that takes time.
#[derive(Debug, Default)]
pub struct Stop {
    told: Arc<AtomicBool>,
    wake: Option<UnixStream>,
    deadline: Option<Instant>,
}

impl Stop {
    /// Nobody will say stop.
    pub fn never() -> Self {
        Self::default()
    }

    /// SIGTERM and SIGINT say stop.
    pub fn on_signals() -> io::Result<Self> {
        let told = Arc::new(AtomicBool::new(false));
        let (wake, woken) = UnixStream::pair()?;
        for signal in [SIGTERM, SIGINT] {
            // The flag first: whoever is woken finds it set.
            signal_hook::flag::register(signal, Arc::clone(&told))?;
            signal_hook::low_level::pipe::register(signal, woken.try_clone()?)?;
        }
        Ok(Self { told, wake: Some(wake), deadline: None })
    }

    /// So does the end of this time.
    #[must_use]
    pub fn after(mut self, limit: Duration) -> Self {
        self.deadline = Instant::now().checked_add(limit);
        self
    }

    pub fn told(&self) -> Option<StopWhy> {
        if self.told.load(Ordering::SeqCst) {
            return Some(StopWhy::Signal);
        }
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline).then_some(StopWhy::TimeLimit)
    }

    /// The same, and if nobody has said so yet, whether it is said within this time.
    pub(crate) fn told_within(&self, wait: Duration) -> Option<StopWhy> {
        let end = Instant::now() + wait;
        loop {
            let told = self.told();
            if told.is_some() || Instant::now() >= end {
                return told;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Readable once a signal came.
    pub(crate) fn wake(&self) -> Option<impl AsFd + '_> {
        self.wake.as_ref()
    }

    /// How long one may wait without looking again.
    pub(crate) fn at_most(&self, wait: Duration) -> Duration {
        self.deadline.map_or(wait, |deadline| wait.min(deadline.saturating_duration_since(Instant::now())))
    }
}
