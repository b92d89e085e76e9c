//! Reading in this process, with an eye on the clock.
//!
//! Starting a process takes longer than reading what a fast check wants, so what is read from file systems of the kernel
//! and from local disks is read here, on a thread that somebody watches. If it hangs it is left behind and the next
//! reading gets a thread of its own: the checks go on, and what hangs is itself an answer. A process with such a thread
//! ends only when the kernel lets go of it; what is known to hang like that (network mounts, a driver that did not answer
//! lately) is therefore read in a child process instead.

use std::{
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread,
    time::Duration,
};

use doctor_checks::probe::ProbeOutput;

type Work = Box<dyn FnOnce() -> ProbeOutput + Send>;

/// A thread that reads what it is given, one thing at a time.
#[derive(Debug, Default)]
pub(super) struct WatchedReader {
    thread: Option<(Sender<Work>, Receiver<ProbeOutput>)>,
}

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// It has not come back, and was left behind.
    Hangs,
    /// The system has no thread to give, or the reading ended it.
    NoThread,
}

impl WatchedReader {
    pub(super) fn read(
        &mut self,
        limit: Duration,
        work: impl FnOnce() -> ProbeOutput + Send + 'static,
    ) -> Result<ProbeOutput, NoAnswer> {
        if self.thread.is_none() {
            self.thread = start();
        }
        let Some((give, take)) = &self.thread else { return Err(NoAnswer::NoThread) };
        let answer = match give.send(Box::new(work)) {
            Ok(()) => take.recv_timeout(limit).map_err(|error| match error {
                RecvTimeoutError::Timeout => NoAnswer::Hangs,
                RecvTimeoutError::Disconnected => NoAnswer::NoThread,
            }),
            Err(_) => Err(NoAnswer::NoThread),
        };
        if answer.is_err() {
            self.thread = None;
        }
        answer
    }
}

fn start() -> Option<(Sender<Work>, Receiver<ProbeOutput>)> {
    let (give, work) = channel::<Work>();
    let (done, take) = channel();
    let body = move || {
        while let Ok(work) = work.recv() {
            if done.send(work()).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("doctor-reader".to_owned()).spawn(body).ok()?;
    Some((give, take))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_hangs_is_left_behind_and_the_next_is_read_all_the_same() {
        let mut reader = WatchedReader::default();
        let text = |text: &str| ProbeOutput::Text(text.to_owned());
        assert_eq!(reader.read(Duration::from_secs(5), || ProbeOutput::Text("a".into())), Ok(text("a")));
        let (free, hang) = channel::<()>();
        let hanging = reader.read(Duration::from_millis(20), move || {
            // Until the test is over.
            let _until = hang.recv();
            ProbeOutput::Text("late".into())
        });
        assert_eq!(hanging, Err(NoAnswer::Hangs));
        assert_eq!(reader.read(Duration::from_secs(5), || ProbeOutput::Text("b".into())), Ok(text("b")));
        drop(free);
    }
}
