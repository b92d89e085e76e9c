//! Reads probes in this process on a thread with a watchdog.
//!
//! Starting a process takes longer than the reads of a fast check, so kernel file systems and local disks are read
//! here. One thread reads a whole pass, because a wake-up per file would take longer than the files. A read that hangs
//! is abandoned with its thread, and another thread continues after it: the other checks go on, and the hang is itself
//! a result. A process with such a thread exits only when the kernel releases it; what is known to hang (network
//! mounts, a driver that did not answer lately) is therefore read in a child process instead.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use doctor_checks::probe::{Probe, ProbeOutput};

/// Why a probe has no output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// It did not return in time and was abandoned.
    Hangs,
    /// No thread could be started, or the read ended the thread.
    NoThread,
}

/// Reads the probes in order, each within its limit, and returns one result per probe. `make` creates the reader on its
/// thread. After a hang it asks `stop`, and returns fewer results if that is true.
pub(super) fn read_all<R>(
    probes: &[Probe],
    limit: impl Fn(&Probe) -> Duration,
    make: impl Fn() -> R + Clone + Send + 'static,
    stop: impl Fn() -> bool,
) -> Vec<Result<ProbeOutput, NoAnswer>>
where
    R: FnMut(&Probe) -> ProbeOutput,
{
    let mut outputs = Vec::with_capacity(probes.len());
    while outputs.len() < probes.len() {
        let rest = &probes[outputs.len()..];
        let (read, no_answer) = on_one_thread(rest, &limit, make.clone());
        outputs.extend(read.into_iter().map(Ok));
        if outputs.len() < probes.len() {
            outputs.push(Err(no_answer));
            if stop() {
                break;
            }
        }
    }
    outputs
}

/// Returns the outputs up to the first that fails to arrive, and why that one does.
fn on_one_thread<R>(
    probes: &[Probe],
    limit: impl Fn(&Probe) -> Duration,
    make: impl Fn() -> R + Send + 'static,
) -> (Vec<ProbeOutput>, NoAnswer)
where
    R: FnMut(&Probe) -> ProbeOutput,
{
    let progress = Arc::new(Progress::new());
    let (thread_progress, owned) = (Arc::clone(&progress), probes.to_vec());
    let body = move || {
        let end = EndGuard(&thread_progress);
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

/// The progress of the reading thread.
struct Progress {
    state: Mutex<ProgressState>,
    ended: Condvar,
}

struct ProgressState {
    answers: Vec<ProbeOutput>,
    /// When the current probe was started.
    since: Instant,
    ended: bool,
    /// The caller has given up.
    abandoned: bool,
}

impl Progress {
    fn new() -> Self {
        let inside = ProgressState { answers: Vec::new(), since: Instant::now(), ended: false, abandoned: false };
        Self { state: Mutex::new(inside), ended: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, ProgressState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an output. Returns false if the caller has given up.
    fn add(&self, output: ProbeOutput) -> bool {
        let mut inside = self.lock();
        inside.answers.push(output);
        inside.since = Instant::now();
        !inside.abandoned
    }

    /// Waits until the thread has ended or the current probe has exceeded its limit.
    fn wait(&self, limits: &[Duration]) -> (Vec<ProbeOutput>, NoAnswer) {
        let mut inside = self.lock();
        loop {
            let limit = limits.get(inside.answers.len()).copied().filter(|_| !inside.ended);
            let Some(limit) = limit else { return (std::mem::take(&mut inside.answers), NoAnswer::NoThread) };
            let remaining = limit.saturating_sub(inside.since.elapsed());
            if remaining.is_zero() {
                inside.abandoned = true;
                return (std::mem::take(&mut inside.answers), NoAnswer::Hangs);
            }
            inside = self.ended.wait_timeout(inside, remaining).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Signals the end of the thread, even by a panic.
struct EndGuard<'a>(&'a Progress);

impl Drop for EndGuard<'_> {
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
    fn a_hung_probe_is_abandoned_and_the_others_are_read() {
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
        let outputs = read_all(&probes, limit, make.clone(), || false);
        assert_eq!(outputs, [text("a"), Err(NoAnswer::Hangs), text("b")]);
        let outputs = read_all(&probes, limit, make, || true);
        assert_eq!(outputs, [text("a"), Err(NoAnswer::Hangs)], "stop requested");
        drop(free);
    }

    #[test]
    fn a_probe_that_panics_has_no_output_and_the_next_one_has() {
        let outputs = read_all(&names(&["panics", "b"]), |_| Duration::from_secs(5), || echo, || false);
        assert_eq!(outputs, [Err(NoAnswer::NoThread), text("b")]);
    }
}
