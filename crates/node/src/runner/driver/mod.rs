//! Asks NVIDIA's driver through a helper process.
//!
//! A driver that hangs takes its caller with it: the call does not return, and a thread that is stuck in the kernel keeps its
//! whole process from ending. So this process never calls the driver. It starts a helper, the same program with
//! [`DRIVER_ARGUMENT`], and writes questions to it; the helper loads NVML, asks, and writes the answer back. One helper serves
//! all questions of a process, the agent's for as long as the agent runs.
//!
//! Before it calls the driver about a GPU, the helper says which one, so a question that is not answered in time names the GPU
//! that the driver hangs on. The helper is then killed, and the next question starts another one. A helper that is stuck in the
//! kernel survives SIGKILL. It is remembered as an abandoned probe is ([`super::abandoned`]); while it is there, one further
//! helper may be tried. When that one is stuck too, questions fail at once and say which processes are stuck, since when and on
//! which GPU, until one of them is gone.
//!
//! The helper opens a session with the driver for each question, and closes it and unloads the library before it answers.
//! Between questions it holds no device file and no library of the driver: while a process holds `/dev/nvidia*` open, no GPU can
//! be reset and the driver cannot be upgraded. Opening costs milliseconds on a machine with persistence mode; without it, the
//! driver would also have to keep every GPU awake for us.
//!
//! The helper inherits three pipes and nothing else: no other file descriptor, and of the environment only what libraries of
//! the driver read, so no key of a run. It ends when its pipe is closed, and by a signal when this process ends.

mod frame;
mod helper;

use std::{
    env,
    ffi::{OsStr, OsString},
    io::{self, Read, Write},
    os::{fd::AsFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use doctor_checks::gpu::GpuAnswer;
use doctor_core::{
    observation::{FailureKind, ProbeFailure},
    time::{Span, Timestamp},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::ioctl_fionbio,
};

use super::{
    abandoned::{AbandonedProbes, Stuck},
    child,
};
use crate::{
    clock::now,
    stop::{Stop, StopWhy},
};
use frame::{Asked, Incoming, MOST_ANSWER, Message};

pub use helper::serve_driver_questions;

/// The hidden argument by which this program asks the driver for the process that started it.
pub const DRIVER_ARGUMENT: &str = "__driver";

/// What is described as one probe, whatever is asked.
pub(super) const ASK: &str = "ask the driver";

/// Helpers that may be stuck before no further one is started.
const MOST_STUCK: usize = 2;

/// A killed helper, which holds next to nothing, is gone within a millisecond unless it is stuck in the kernel.
const KILL_GRACE: Duration = Duration::from_millis(500);

/// An error that a helper of at least this age tells is told only after a new one has told it too: the driver may have been
/// upgraded under it, and a library that cannot be unloaded would then be the old one.
const OLD: Duration = Duration::from_secs(60);

/// What libraries of the driver, the loader and the stand-in read of the environment.
const VARIABLES: [&str; 5] = ["PATH", "LANG", "LC_ALL", "TMPDIR", "LLVM_PROFILE_FILE"];
const VARIABLE_PREFIXES: [&str; 6] = ["LD_", "NVIDIA_", "NVML_", "__NV", "CUDA_", "DOCTOR_STANDIN"];

/// The helper process that asks the driver, of all runners that share this.
#[derive(Debug, Default)]
pub struct DriverHelper {
    running: Mutex<Option<Running>>,
}

/// What is asked, and within which limits.
pub(super) struct DriverQuestion<'a> {
    /// Who asks: what somebody else began is not taken for an answer to this.
    pub(super) runner: u64,
    pub(super) program: &'a Path,
    pub(super) root: &'a Path,
    pub(super) library: &'a OsStr,
    pub(super) fields: &'a [String],
    pub(super) limit: Duration,
    pub(super) stop: &'a Stop,
    pub(super) abandoned: &'a AbandonedProbes,
}

/// Why a helper gave no answer.
#[derive(Debug)]
enum Silence {
    TimedOut,
    Stopped(StopWhy),
    /// It closed its end of the pipe.
    Ended,
    Io(io::Error),
}

/// A question that has no answer yet.
#[derive(Debug)]
struct Pending {
    runner: u64,
    fields: Vec<String>,
    since: Timestamp,
}

#[derive(Debug)]
struct Running {
    child: Child,
    input: ChildStdin,
    output: ChildStdout,
    program: PathBuf,
    root: PathBuf,
    library: OsString,
    started: Instant,
    answered: bool,
    pending: Option<Pending>,
    /// What of the question does not fit into the pipe yet.
    unsent: Vec<u8>,
    incoming: Incoming,
    asked: Option<Asked>,
}

impl DriverHelper {
    fn lock(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a helper if there is none, and asks it. The answer is waited for in [`Self::ask`] with the same question.
    pub(super) fn begin(&self, question: &DriverQuestion<'_>) -> Result<(), ProbeFailure> {
        begin(&mut self.lock(), question).map(|_| ())
    }

    /// Asks, unless that was begun already, and waits for the answer.
    pub(super) fn ask(&self, question: &DriverQuestion<'_>) -> Result<GpuAnswer, ProbeFailure> {
        let mut slot = self.lock();
        loop {
            let running = begin(&mut slot, question)?;
            let is_old = running.started.elapsed() >= OLD;
            let was_used = running.answered;
            match running.hear(question) {
                Ok(answer) if answer.driver.is_err() && is_old => end(&mut slot),
                Ok(answer) => return Ok(answer),
                // Somebody killed it while it waited; that is no fault of the driver's.
                Err(Silence::Ended) if was_used => end(&mut slot),
                Err(silence) => {
                    let gone = slot.take().map(|running| running.give_up(&silence, question));
                    return Err(gone.unwrap_or_else(|| ProbeFailure::new(FailureKind::Failed, ASK)));
                }
            }
        }
    }
}

impl Drop for DriverHelper {
    fn drop(&mut self) {
        end(&mut self.lock());
    }
}

/// The helper that has this question, which is a new one where the old one does not fit or has ended.
fn begin<'a>(slot: &'a mut Option<Running>, question: &DriverQuestion<'_>) -> Result<&'a mut Running, ProbeFailure> {
    if let Some(why) = question.stop.told() {
        return Err(stopped(why));
    }
    if slot.as_ref().is_some_and(|running| !running.is_for(question)) {
        end(slot);
    }
    let running = match slot.take() {
        Some(running) => running,
        None => Running::start(question)?,
    };
    let running = slot.insert(running);
    if running.pending.is_none() {
        running.pending = Some(Pending { runner: question.runner, fields: question.fields.to_vec(), since: now() });
        let words = frame::Question { fields: question.fields.to_vec() };
        running.unsent = frame::frame(&words)
            .map_err(|error| ProbeFailure::new(FailureKind::Failed, format!("{ASK}: the question: {error}")))?;
        // What went wrong here goes wrong again where the answer is waited for.
        let _sent_now = running.send();
    }
    Ok(running)
}

/// Ends a helper that is not needed any more.
fn end(slot: &mut Option<Running>) {
    let Some(Running { mut child, input, output, pending, asked, .. }) = slot.take() else { return };
    drop((input, output));
    // Whether it still was there to be killed does not matter.
    let _killed = child.kill();
    if child::exits_within(&child, KILL_GRACE) {
        let _status = child.wait();
        return;
    }
    let pid = child.id();
    let since = pending.map_or_else(now, |pending| pending.since);
    let stuck = Stuck { pid, since: Some(since), doing: Some(doing(asked.as_ref())) };
    AbandonedProbes::of_this_process().add_stuck(ASK, stuck, child);
}

impl Running {
    fn start(question: &DriverQuestion<'_>) -> Result<Self, ProbeFailure> {
        let stuck = question.abandoned.all_hanging(ASK);
        if stuck.len() >= MOST_STUCK {
            let text = format!(
                "{ASK}: it is not asked: {}; a further one is started when one of them is gone",
                told_stuck(&stuck)
            );
            return Err(ProbeFailure::new(FailureKind::Abandoned, text));
        }
        let mut command = Command::new(question.program);
        command.arg0("doctor-node").arg(DRIVER_ARGUMENT).arg(std::process::id().to_string());
        command.arg(question.root).arg(question.library);
        command.env_clear().envs(env::vars_os().filter(|(name, _)| is_for_driver(name)));
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        Self::spawn(&mut command, question).map_err(|error| {
            ProbeFailure::new(super::kind_of(&error), format!("{ASK}: its helper process does not start: {error}"))
        })
    }

    fn spawn(command: &mut Command, question: &DriverQuestion<'_>) -> io::Result<Self> {
        let mut child = command.spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("a process without pipes"));
        };
        ioctl_fionbio(&input, true)?;
        ioctl_fionbio(&output, true)?;
        Ok(Self {
            child,
            input,
            output,
            program: question.program.to_owned(),
            root: question.root.to_owned(),
            library: question.library.to_owned(),
            started: Instant::now(),
            answered: false,
            pending: None,
            unsent: Vec::new(),
            incoming: Incoming::default(),
            asked: None,
        })
    }

    /// Whether it can be asked this, or was.
    fn is_for(&self, question: &DriverQuestion<'_>) -> bool {
        let is_same =
            self.program == question.program && self.root == question.root && self.library == question.library;
        let is_its = |pending: &Pending| (pending.runner, &*pending.fields) == (question.runner, question.fields);
        let is_free = self.pending.as_ref().is_none_or(is_its);
        is_same && is_free && matches!(child::has_exited(&self.child), Ok(false))
    }

    /// Writes as much of the question as the pipe takes.
    fn send(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            match self.input.write(&self.unsent) {
                Ok(count) => drop(self.unsent.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.unsent = Vec::new();
        Ok(())
    }

    /// Waits for the answer.
    fn hear(&mut self, question: &DriverQuestion<'_>) -> Result<GpuAnswer, Silence> {
        let deadline = Instant::now() + question.limit;
        loop {
            let is_closed = self.receive().map_err(Silence::Io)?;
            while let Some(message) = self.incoming.next().map_err(Silence::Io)? {
                match message {
                    Message::Asking(asked) => self.asked = Some(asked),
                    Message::Answer(answer) => {
                        (self.pending, self.asked, self.answered) = (None, None, true);
                        // Nothing follows an answer, and a buffer of this length is not kept until the next.
                        self.incoming = Incoming::default();
                        return Ok(answer);
                    }
                }
            }
            if is_closed {
                return Err(Silence::Ended);
            }
            match self.send() {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Err(Silence::Ended),
                other => other.map_err(Silence::Io)?,
            }
            if let Some(why) = question.stop.told() {
                return Err(Silence::Stopped(why));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Silence::TimedOut);
            }
            self.wait(question.stop, left).map_err(Silence::Io)?;
        }
    }

    /// Takes in what the helper has written. True if it writes no more.
    fn receive(&mut self) -> io::Result<bool> {
        let (mut buffer, mut all) = ([0; 16 << 10], 0);
        loop {
            match self.output.read(&mut buffer) {
                Ok(0) => return Ok(true),
                Ok(count) => {
                    self.incoming.add(&buffer[..count]);
                    all += count;
                    if all > MOST_ANSWER {
                        return Ok(false);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn wait(&self, stop: &Stop, left: Duration) -> io::Result<()> {
        let wake = stop.wake();
        let mut fds = vec![PollFd::new(&self.output, PollFlags::IN)];
        if !self.unsent.is_empty() {
            fds.push(PollFd::new(&self.input, PollFlags::OUT));
        }
        fds.extend(wake.as_ref().map(|wake| PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN)));
        let wait = Timespec::try_from(stop.at_most(left)).map_err(io::Error::other)?;
        match poll(&mut fds, Some(&wait)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Kills a helper that did not answer, and says why there is no answer.
    fn give_up(mut self, silence: &Silence, question: &DriverQuestion<'_>) -> ProbeFailure {
        let asked = self.asked.take();
        if matches!(silence, Silence::Ended) {
            // It is about to exit by itself, with a status that may tell more.
            child::exits_within(&self.child, KILL_GRACE);
        }
        if let Some(pid) = child::end(&mut self.child, Duration::ZERO, KILL_GRACE) {
            let since = self.pending.map_or_else(now, |pending| pending.since);
            let stuck = Stuck { pid, since: Some(since), doing: Some(doing(asked.as_ref())) };
            question.abandoned.add_stuck(ASK, stuck, self.child);
            let all = told_stuck(&question.abandoned.all_hanging(ASK));
            let text = format!("{ASK}: {}; {all}", why(silence, question.limit, asked.as_ref()));
            return ProbeFailure::new(FailureKind::Abandoned, text);
        }
        let kind = match silence {
            Silence::TimedOut => FailureKind::TimedOut,
            Silence::Stopped(_) => FailureKind::Killed,
            Silence::Io(error) => match error.kind() {
                io::ErrorKind::FileTooLarge => FailureKind::TooLong,
                io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => FailureKind::Unparseable,
                _ => FailureKind::Failed,
            },
            Silence::Ended => FailureKind::Failed,
        };
        let how = match (silence, self.child.wait()) {
            (Silence::Ended, Ok(status)) => format!("helper process {} ended with {status}", self.child.id()),
            _ => format!("helper process {} was killed", self.child.id()),
        };
        ProbeFailure::new(kind, format!("{ASK}: {}; {how}", why(silence, question.limit, asked.as_ref())))
    }
}

fn stopped(why: StopWhy) -> ProbeFailure {
    ProbeFailure::new(FailureKind::Killed, format!("{ASK}: {}", words_of(why)))
}

const fn words_of(why: StopWhy) -> &'static str {
    match why {
        StopWhy::Signal => "told to stop",
        StopWhy::TimeLimit => "the job's time limit was reached",
    }
}

/// Why there is no answer, and where the driver was then.
fn why(silence: &Silence, limit: Duration, asked: Option<&Asked>) -> String {
    let doing = doing(asked);
    match silence {
        Silence::TimedOut => {
            let limit = Span::from_millis(i64::try_from(limit.as_millis()).unwrap_or(i64::MAX));
            format!("no answer within {limit} {doing}")
        }
        Silence::Stopped(why) => format!("{} {doing}", words_of(*why)),
        Silence::Ended => format!("its helper ended {doing}"),
        Silence::Io(error) if error.kind() == io::ErrorKind::FileTooLarge => {
            format!("its answer is longer than {MOST_ANSWER} bytes")
        }
        Silence::Io(error) => format!("its answer cannot be read: {error}"),
    }
}

/// What the driver was asked for when it was last heard of.
fn doing(asked: Option<&Asked>) -> String {
    match asked {
        None => "while the driver was opened".to_owned(),
        Some(Asked { index, bus }) if bus.is_empty() => format!("while the driver was asked about GPU {index}"),
        Some(Asked { index, bus }) => format!("while the driver was asked about GPU {index} ({bus})"),
    }
}

/// `2 helper processes are stuck in the kernel and cannot be killed: process 71 since … while the driver was …`
fn told_stuck(stuck: &[Stuck]) -> String {
    let one = |stuck: &Stuck| {
        let since = stuck.since.map_or_else(String::new, |since| format!(" since {since}"));
        let doing = stuck.doing.as_ref().map_or_else(String::new, |doing| format!(" {doing}"));
        format!("process {}{since}{doing}", stuck.pid)
    };
    let all = stuck.iter().map(one).collect::<Vec<_>>().join(", ");
    match stuck.len() {
        1 => format!("1 helper process is stuck in the kernel and cannot be killed: {all}"),
        count => format!("{count} helper processes are stuck in the kernel and cannot be killed: {all}"),
    }
}

fn is_for_driver(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    VARIABLES.contains(&&*name) || VARIABLE_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_gpu_and_every_process_that_is_stuck() {
        let asked = Asked { index: 3, bus: "0000:48:00.0".to_owned() };
        let words = why(&Silence::TimedOut, Duration::from_secs(30), Some(&asked));
        assert_eq!(words, "no answer within 30s while the driver was asked about GPU 3 (0000:48:00.0)");
        assert_eq!(doing(None), "while the driver was opened");
        let stuck = |pid| Stuck { pid, since: Some(Timestamp::from_secs(0)), doing: Some(doing(Some(&asked))) };
        assert_eq!(
            told_stuck(&[stuck(7), stuck(9)]),
            "2 helper processes are stuck in the kernel and cannot be killed: process 7 since 1970-01-01T00:00:00Z while the \
             driver was asked about GPU 3 (0000:48:00.0), process 9 since 1970-01-01T00:00:00Z while the driver was asked \
             about GPU 3 (0000:48:00.0)"
        );
    }

    #[test]
    fn the_helper_gets_what_libraries_read_and_no_secret() {
        for name in ["LD_LIBRARY_PATH", "PATH", "NVIDIA_VISIBLE_DEVICES", "DOCTOR_STANDIN"] {
            assert!(is_for_driver(OsStr::new(name)), "{name}");
        }
        for name in [super::super::KEY_VARIABLE, "DOCTOR_RENDEZVOUS_SECRET", "AWS_SECRET_ACCESS_KEY"] {
            assert!(!is_for_driver(OsStr::new(name)), "{name}");
        }
    }
}
