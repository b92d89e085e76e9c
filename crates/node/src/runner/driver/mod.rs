//! Queries NVIDIA's driver through a helper process.
//!
//! A call into a hung driver does not return, and a thread stuck in the kernel keeps its whole process from exiting.
//! This process therefore never calls the driver. It starts a helper, the same program with [`DRIVER_ARGUMENT`], and
//! sends it queries; the helper loads NVML, calls it, and sends the answer back. One helper serves all queries of a
//! process, the agent's for the agent's lifetime.
//!
//! The helper announces each GPU before it queries it, so that a timeout names the GPU on which the driver hangs. The
//! helper is then killed, and the next query starts another one. A helper that is stuck in the kernel survives SIGKILL.
//! It is recorded like an abandoned probe ([`super::abandoned`]), and one further helper may be tried. If that one is
//! stuck too, queries fail immediately and report which processes are stuck, since when and on which GPU, until one of
//! them is gone.
//!
//! The helper opens a session with the driver for each query, and closes it and unloads the library before it answers.
//! Between queries it holds no device file and no driver library: while a process has `/dev/nvidia*` open, no GPU can
//! be reset and the driver cannot be upgraded. Opening takes milliseconds with persistence mode; without it, an open
//! session would keep every GPU initialised.
//!
//! The helper inherits two pipes and no other file descriptor, and only the environment variables that driver libraries
//! read, hence no run key. It exits when its pipe is closed, and is killed when this process ends.

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

/// The hidden argument that makes this program a driver helper.
pub const DRIVER_ARGUMENT: &str = "__driver";

/// The description of every driver query.
pub(super) const ASK: &str = "query the driver";

/// Number of stuck helpers at which no further one is started.
const MOST_STUCK: usize = 2;

/// A killed helper, which holds next to nothing, is gone within a millisecond unless it is stuck in the kernel.
const KILL_GRACE: Duration = Duration::from_millis(500);

/// An error from a helper of at least this age is verified with a new one: the driver may have been upgraded meanwhile,
/// and a library that cannot be unloaded would still be the old one.
const OLD: Duration = Duration::from_secs(60);

/// Environment variables that the driver's libraries, the loader and the fake NVML read.
const VARIABLES: [&str; 5] = ["PATH", "LANG", "LC_ALL", "TMPDIR", "LLVM_PROFILE_FILE"];
const VARIABLE_PREFIXES: [&str; 6] = ["LD_", "NVIDIA_", "NVML_", "__NV", "CUDA_", "DOCTOR_STANDIN"];

/// The driver helper process, shared by runners.
#[derive(Debug, Default)]
pub struct DriverHelper {
    running: Mutex<Option<Running>>,
}

/// A query and its limits.
pub(super) struct DriverQuestion<'a> {
    /// The runner that queries. A query begun by another runner does not count as this one.
    pub(super) runner: u64,
    pub(super) program: &'a Path,
    pub(super) root: &'a Path,
    pub(super) library: &'a OsStr,
    pub(super) fields: &'a [String],
    pub(super) limit: Duration,
    pub(super) stop: &'a Stop,
    pub(super) abandoned: &'a AbandonedProbes,
}

/// Why a helper did not answer.
#[derive(Debug)]
enum Silence {
    TimedOut,
    Stopped(StopWhy),
    /// It closed its end of the pipe.
    Ended,
    Io(io::Error),
}

/// A query without an answer yet.
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
    /// The part of the query that did not fit into the pipe yet.
    unsent: Vec<u8>,
    incoming: Incoming,
    asked: Option<Asked>,
}

impl DriverHelper {
    fn lock(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a helper if there is none and sends the query. [`Self::ask`] with the same query waits for the answer.
    pub(super) fn begin(&self, question: &DriverQuestion<'_>) -> Result<(), ProbeFailure> {
        begin(&mut self.lock(), question).map(|_| ())
    }

    /// Sends the query, unless it was begun already, and waits for the answer.
    pub(super) fn ask(&self, question: &DriverQuestion<'_>) -> Result<GpuAnswer, ProbeFailure> {
        let mut slot = self.lock();
        loop {
            let running = begin(&mut slot, question)?;
            let is_old = running.started.elapsed() >= OLD;
            let was_used = running.answered;
            match running.hear(question) {
                Ok(answer) if answer.driver.is_err() && is_old => end(&mut slot),
                Ok(answer) => return Ok(answer),
                // The idle helper was killed from outside; that is no fault of the driver.
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

/// Returns a helper that has received this query. Replaces one that does not fit or has exited.
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
            .map_err(|error| ProbeFailure::new(FailureKind::Failed, format!("{ASK}: cannot encode it: {error}")))?;
        // An error here recurs where the answer is awaited.
        let _sent_now = running.send();
    }
    Ok(running)
}

/// Ends a helper that is no longer needed.
fn end(slot: &mut Option<Running>) {
    let Some(Running { mut child, input, output, pending, asked, .. }) = slot.take() else { return };
    drop((input, output));
    // It may have exited already.
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
            let text =
                format!("{ASK}: not queried: {}; the next helper starts when one of them exits", told_stuck(&stuck));
            return Err(ProbeFailure::new(FailureKind::Abandoned, text));
        }
        let mut command = Command::new(question.program);
        command.arg0("doctor-node").arg(DRIVER_ARGUMENT).arg(std::process::id().to_string());
        command.arg(question.root).arg(question.library);
        command.env_clear().envs(env::vars_os().filter(|(name, _)| is_for_driver(name)));
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        Self::spawn(&mut command, question).map_err(|error| {
            ProbeFailure::new(super::kind_of(&error), format!("{ASK}: cannot start the helper process: {error}"))
        })
    }

    fn spawn(command: &mut Command, question: &DriverQuestion<'_>) -> io::Result<Self> {
        let mut child = command.spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("the child process has no pipes"));
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

    /// Whether this helper can take the query or has it already.
    fn is_for(&self, question: &DriverQuestion<'_>) -> bool {
        let is_same =
            self.program == question.program && self.root == question.root && self.library == question.library;
        let is_its = |pending: &Pending| (pending.runner, &*pending.fields) == (question.runner, question.fields);
        let is_free = self.pending.as_ref().is_none_or(is_its);
        is_same && is_free && matches!(child::has_exited(&self.child), Ok(false))
    }

    /// Writes as much of the query as the pipe accepts.
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
                        // Nothing follows an answer; do not keep a buffer of this size until the next one.
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

    /// Reads what the helper has written. Returns true at the end of the stream.
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

    /// Kills a helper that did not answer, and returns the reason.
    fn give_up(mut self, silence: &Silence, question: &DriverQuestion<'_>) -> ProbeFailure {
        let asked = self.asked.take();
        if matches!(silence, Silence::Ended) {
            // It is about to exit with a status that may show the cause.
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
        StopWhy::Signal => "stopped by a signal",
        StopWhy::TimeLimit => "the job's time limit was reached",
    }
}

/// Describes why there is no answer, and what the driver was doing then.
fn why(silence: &Silence, limit: Duration, asked: Option<&Asked>) -> String {
    let doing = doing(asked);
    match silence {
        Silence::TimedOut => {
            let limit = Span::from_millis(i64::try_from(limit.as_millis()).unwrap_or(i64::MAX));
            format!("no answer within {limit} {doing}")
        }
        Silence::Stopped(why) => format!("{} {doing}", words_of(*why)),
        Silence::Ended => format!("the helper process exited {doing}"),
        Silence::Io(error) if error.kind() == io::ErrorKind::FileTooLarge => {
            format!("its answer is longer than {MOST_ANSWER} bytes")
        }
        Silence::Io(error) => format!("its answer cannot be read: {error}"),
    }
}

/// Describes the driver call that was announced last.
fn doing(asked: Option<&Asked>) -> String {
    match asked {
        None => "while opening the driver".to_owned(),
        Some(Asked { index, bus }) if bus.is_empty() => format!("while querying GPU {index}"),
        Some(Asked { index, bus }) => format!("while querying GPU {index} ({bus})"),
    }
}

/// Formats `2 helper processes are stuck in the kernel and cannot be killed: process 71 since … while querying …`.
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
        assert_eq!(words, "no answer within 30s while querying GPU 3 (0000:48:00.0)");
        assert_eq!(doing(None), "while opening the driver");
        let stuck = |pid| Stuck { pid, since: Some(Timestamp::from_secs(0)), doing: Some(doing(Some(&asked))) };
        assert_eq!(
            told_stuck(&[stuck(7), stuck(9)]),
            "2 helper processes are stuck in the kernel and cannot be killed: process 7 since 1970-01-01T00:00:00Z \
             while querying GPU 3 (0000:48:00.0), process 9 since 1970-01-01T00:00:00Z while querying GPU 3 (0000:48:00.0)"
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
