//! Reading in this process, with an eye on the clock.
//!
//! Starting a process takes longer than reading what a fast check wants, so what is read from file systems of the kernel
//! and from local disks is read here, on a thread that somebody watches: all of a pass in one go, because waking each
//! other for every file would take longer than the files. What hangs is left behind with its thread, and another one goes
//! on after it: the checks go on, and what hangs is itself an answer. A process with such a thread ends only when the
//! kernel lets go of it; what is known to hang like that (network mounts, a driver that did not answer lately) is
//! therefore read in a child process instead.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use doctor_checks::probe::{Probe, ProbeOutput};

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// It has not come back, and was left behind.
    Hangs,
    /// The system has no thread to give, or the reading ended it.
    NoThread,
}

/// Reads these in their order, each within its limit, and returns as many answers as there are probes. `make` makes what
/// reads them, on the thread that does. Ends early, with fewer answers, where something hung and `stop` then says so.
pub(super) fn read_all<R>(
    probes: &[Probe],
    limit: impl Fn(&Probe) -> Duration,
    make: impl Fn() -> R + Clone + Send + 'static,
    stop: impl Fn() -> bool,
) -> Vec<Result<ProbeOutput, NoAnswer>>
where
    R: FnMut(&Probe) -> ProbeOutput,
{
    let mut answers = Vec::with_capacity(probes.len());
    while answers.len() < probes.len() {
        let rest = &probes[answers.len()..];
        let (read, why) = on_one_thread(rest, &limit, make.clone());
        answers.extend(read.into_iter().map(Ok));
        if answers.len() < probes.len() {
            answers.push(Err(why));
            if stop() {
                break;
            }
        }
    }
    answers
}

/// The answers up to the first that does not come, and why it does not.
fn on_one_thread<R>(
    probes: &[Probe],
    limit: impl Fn(&Probe) -> Duration,
    make: impl Fn() -> R + Send + 'static,
) -> (Vec<ProbeOutput>, NoAnswer)
where
    R: FnMut(&Probe) -> ProbeOutput,
{
    let progress = Arc::new(Progress::new());
    let (theirs, owned) = (Arc::clone(&progress), probes.to_vec());
    let body = move || {
        let end = EndOf(&theirs);
        let mut read = make();
        for probe in &owned {
            if !end.0.add(read(probe)) {
                return;
            }
        }
    };
    let limits: Vec<Duration> = probes.iter().map(limit).collect();
    match thread::Builder::new().name("doctor-reader".to_owned()).spawn(body) {
        Ok(_left_to_itself) => progress.wait(&limits),
        Err(_) => (Vec::new(), NoAnswer::NoThread),
    }
}

/// How far the thread has come.
struct Progress {
    inside: Mutex<Inside>,
    ended: Condvar,
}

struct Inside {
    answers: Vec<ProbeOutput>,
    /// When it began with the one it is at.
    since: Instant,
    ended: bool,
    /// Nobody waits any more.
    left: bool,
}

impl Progress {
    fn new() -> Self {
        let inside = Inside { answers: Vec::new(), since: Instant::now(), ended: false, left: false };
        Self { inside: Mutex::new(inside), ended: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False if nobody wants more.
    fn add(&self, answer: ProbeOutput) -> bool {
        let mut inside = self.lock();
        inside.answers.push(answer);
        inside.since = Instant::now();
        !inside.left
    }

    /// Sleeps until the thread has ended, or until the one it is at has had its time.
    fn wait(&self, limits: &[Duration]) -> (Vec<ProbeOutput>, NoAnswer) {
        let mut inside = self.lock();
        loop {
            let limit = limits.get(inside.answers.len()).copied().filter(|_| !inside.ended);
            let Some(limit) = limit else { return (std::mem::take(&mut inside.answers), NoAnswer::NoThread) };
            let left = limit.saturating_sub(inside.since.elapsed());
            if left.is_zero() {
                inside.left = true;
                return (std::mem::take(&mut inside.answers), NoAnswer::Hangs);
            }
            inside = self.ended.wait_timeout(inside, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Says so however the thread ends, by a panic too.
struct EndOf<'a>(&'a Progress);

impl Drop for EndOf<'_> {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    fn names(names: &[&str]) -> Vec<Probe> {
        names.iter().map(|name| Probe::read(name)).collect()
    }

    fn echo(probe: &Probe) -> ProbeOutput {
        match probe {
            Probe::Read { path } if path == "panics" => panic!("as the test wants it"),
            Probe::Read { path } => ProbeOutput::Text(path.clone()),
            other => panic!("{other:?}"),
        }
    }

    fn text(text: &str) -> Result<ProbeOutput, NoAnswer> {
        Ok(ProbeOutput::Text(text.to_owned()))
    }

    #[test]
    fn what_hangs_is_left_behind_and_the_rest_is_read_all_the_same() {
        let (free, hang) = channel::<()>();
        let hang = Arc::new(Mutex::new(hang));
        let make = move || {
            let hang = Arc::clone(&hang);
            move |probe: &Probe| {
                if *probe == Probe::read("hangs") {
                    // Until the test is over.
                    let _until = hang.lock().unwrap().recv();
                }
                echo(probe)
            }
        };
        let limit = |probe: &Probe| Duration::from_millis(if *probe == Probe::read("hangs") { 20 } else { 5000 });
        let probes = names(&["a", "hangs", "b"]);
        let answers = read_all(&probes, limit, make.clone(), || false);
        assert_eq!(answers, [text("a"), Err(NoAnswer::Hangs), text("b")]);
        let answers = read_all(&probes, limit, make, || true);
        assert_eq!(answers, [text("a"), Err(NoAnswer::Hangs)], "told to stop");
        drop(free);
    }

    #[test]
    fn a_reading_that_panics_has_no_answer_and_the_next_has_one() {
        let answers = read_all(&names(&["panics", "b"]), |_| Duration::from_secs(5), || echo, || false);
        assert_eq!(answers, [Err(NoAnswer::NoThread), text("b")]);
    }
}
