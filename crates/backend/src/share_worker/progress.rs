//! Whether a thread waits for the file server now, and since when.

use std::{
    cell::Cell,
    io::{self, Read},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use doctor_core::time::Timestamp;

use crate::clock::{Clock, SystemClock};

/// How long one listing, and one removal, may take. Nodes can put any number of entries into a directory, and other work waits
/// meanwhile; what is left is removed the next time.
const PART_TIME: Duration = Duration::from_secs(5);
/// How many steps one removal has: an entry that is listed and one that is removed are two.
const REMOVAL_STEPS: u32 = 10_000;

/// The call that a thread has made to the file system and that has not returned.
#[derive(Debug, Clone, Copy)]
struct Call {
    what: &'static str,
    began: Instant,
    at: Timestamp,
}

/// A call that has taken too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stall {
    pub what: &'static str,
    pub since: Timestamp,
}

/// The calls of one thread. Clones are of the same thread.
#[derive(Debug, Clone, Default)]
pub struct Progress {
    call: Arc<Mutex<Option<Call>>>,
}

/// A call in progress. Dropping it ends the call.
#[derive(Debug)]
pub struct InCall<'a>(&'a Progress);

impl Progress {
    /// Notes that a call begins.
    pub fn begin(&self, what: &'static str) -> InCall<'_> {
        *self.lock() = Some(Call { what, began: Instant::now(), at: SystemClock.now() });
        InCall(self)
    }

    /// Notes that the file system answered a part of the call: what is slow and goes on is not taken for dead.
    pub fn answered(&self) {
        if let Some(call) = self.lock().as_mut() {
            (call.began, call.at) = (Instant::now(), SystemClock.now());
        }
    }

    /// Returns what a listing asks at each entry: whether to go on. Each question notes an answer.
    pub fn while_listing(&self) -> impl Fn() -> bool + '_ {
        self.limited(u32::MAX)
    }

    /// Returns what a removal asks at each entry: whether to go on. Each question notes an answer.
    pub fn while_removing(&self) -> impl Fn() -> bool + '_ {
        self.limited(REMOVAL_STEPS)
    }

    fn limited(&self, steps: u32) -> impl Fn() -> bool + '_ {
        let (until, left) = (Instant::now() + PART_TIME, Cell::new(steps));
        move || {
            self.answered();
            let before = left.replace(left.get().saturating_sub(1));
            before > 0 && Instant::now() < until
        }
    }

    /// Returns the call if it has waited for longer than `limit`.
    pub fn stall(&self, limit: Duration) -> Option<Stall> {
        let call = (*self.lock())?;
        (call.began.elapsed() >= limit).then_some(Stall { what: call.what, since: call.at })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Call>> {
        self.call.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for InCall<'_> {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}

/// A reader that notes each answer.
#[derive(Debug)]
pub struct Noting<'a, R> {
    pub reader: R,
    pub progress: &'a Progress,
}

impl<R: Read> Read for Noting<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer);
        self.progress.answered();
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_has_a_limited_number_of_steps_and_each_is_an_answer() {
        let progress = Progress::default();
        let _call = progress.begin("removing");
        let began = progress.lock().unwrap().began;
        let go_on = progress.while_removing();
        assert!((0..=REMOVAL_STEPS).any(|_| !go_on()));
        assert!(progress.lock().unwrap().began > began);
    }

    #[test]
    fn a_call_stalls_until_it_answers_or_ends() {
        let progress = Progress::default();
        assert_eq!(progress.stall(Duration::ZERO), None);
        let call = progress.begin("reading results");
        assert_eq!(progress.stall(Duration::ZERO).unwrap().what, "reading results");
        assert_eq!(progress.stall(Duration::from_secs(3600)), None);
        let mut text = String::new();
        Noting { reader: "x".as_bytes(), progress: &progress }.read_to_string(&mut text).unwrap();
        assert!(progress.stall(Duration::ZERO).is_some(), "it goes on");
        drop(call);
        assert_eq!(progress.stall(Duration::ZERO), None);
    }
}
