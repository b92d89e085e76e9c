//! Queries NVIDIA's driver through a helper process.
//!
//! A call into a hung driver does not return, and a thread stuck in the kernel keeps its whole process from exiting.
//! This process therefore never calls the driver. It starts a helper, the same program with [`DRIVER_ARGUMENT`], and
//! sends it queries; the helper loads NVML, calls it, and sends the answer back. One helper serves all queries of a
//! process, the agent's for the agent's lifetime.
//!
//! The helper announces each GPU before it queries it, so that a timeout names the GPU on which the driver hangs. The
//! helper is then killed, and the next query starts another one. A helper that is stuck in the kernel survives SIGKILL.
//! It is recorded like an abandoned probe ([`super::hung_probes`]), and one further helper may be tried. If that one is
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
mod helper_main;

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

use doctor_checks::gpu::GpuQueryResult;
use doctor_core::{
    observation::{FailureKind, ProbeFailure},
    time::{Span, Timestamp},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::ioctl_fionbio,
};

use super::{
    child,
    hung_probes::{HungProbes, StuckProcess},
};
use crate::{
    clock::now,
    stop::{Stop, StopReason},
};
use frame::{HelperMessage, Incoming, MAX_ANSWER_BYTES, QueriedGpu};

pub use helper_main::serve_driver_queries;

/// The hidden argument that makes this program a driver helper.
pub const DRIVER_ARGUMENT: &str = "__driver";

/// The description of every driver query.
pub(super) const QUERY_LABEL: &str = "query the driver";

/// Number of stuck helpers at which no further one is started.
const MAX_STUCK_HELPERS: usize = 2;

/// A killed helper, which holds next to nothing, is gone within a millisecond unless it is stuck in the kernel.
const KILL_GRACE: Duration = Duration::from_millis(500);

/// An error from a helper of at least this age is verified with a new one: the driver may have been upgraded meanwhile,
/// and a library that cannot be unloaded would still be the old one.
const MAX_HELPER_AGE: Duration = Duration::from_secs(60);

/// Environment variables that the driver's libraries, the loader and the fake NVML read.
const VARIABLES: [&str; 5] = ["PATH", "LANG", "LC_ALL", "TMPDIR", "LLVM_PROFILE_FILE"];
const VARIABLE_PREFIXES: [&str; 6] = ["LD_", "NVIDIA_", "NVML_", "__NV", "CUDA_", "DOCTOR_FAKE_NVIDIA"];

/// The driver helper process, shared by runners.
#[derive(Debug, Default)]
pub struct DriverHelper {
    running: Mutex<Option<HelperProcess>>,
}

/// A query and its limits.
pub(super) struct DriverRequest<'a> {
    /// The runner that queries. A query begun by another runner does not count as this one.
    pub(super) runner: u64,
    pub(super) program: &'a Path,
    pub(super) root: &'a Path,
    pub(super) library: &'a OsStr,
    pub(super) fields: &'a [String],
    pub(super) limit: Duration,
    pub(super) stop: &'a Stop,
    pub(super) abandoned: &'a HungProbes,
}

/// Why a helper did not answer.
#[derive(Debug)]
enum NoReply {
    TimedOut,
    Stopped(StopReason),
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
struct HelperProcess {
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
    current_gpu: Option<QueriedGpu>,
}

impl DriverHelper {
    fn lock(&self) -> MutexGuard<'_, Option<HelperProcess>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a helper if there is none and sends the query. [`Self::query`] with the same query waits for the answer.
    pub(super) fn begin(&self, request: &DriverRequest<'_>) -> Result<(), ProbeFailure> {
        begin(&mut self.lock(), request).map(|_| ())
    }

    /// Sends the query, unless it was begun already, and waits for the answer.
    pub(super) fn query(&self, request: &DriverRequest<'_>) -> Result<GpuQueryResult, ProbeFailure> {
        let mut slot = self.lock();
        loop {
            let running = begin(&mut slot, request)?;
            let is_old = running.started.elapsed() >= MAX_HELPER_AGE;
            let was_used = running.answered;
            match running.wait_for_answer(request) {
                Ok(result) if result.driver.is_err() && is_old => end(&mut slot),
                Ok(result) => return Ok(result),
                // The idle helper was killed from outside; that is no fault of the driver.
                Err(NoReply::Ended) if was_used => end(&mut slot),
                Err(no_reply) => {
                    let failure = slot.take().map(|running| running.kill_and_explain(&no_reply, request));
                    return Err(failure.unwrap_or_else(|| ProbeFailure::new(FailureKind::Failed, QUERY_LABEL)));
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
fn begin<'a>(
    slot: &'a mut Option<HelperProcess>,
    request: &DriverRequest<'_>,
) -> Result<&'a mut HelperProcess, ProbeFailure> {
    if let Some(reason) = request.stop.requested() {
        return Err(stopped(reason));
    }
    if slot.as_ref().is_some_and(|running| !running.can_serve(request)) {
        end(slot);
    }
    let running = match slot.take() {
        Some(running) => running,
        None => HelperProcess::start(request)?,
    };
    let running = slot.insert(running);
    if running.pending.is_none() {
        running.pending = Some(Pending { runner: request.runner, fields: request.fields.to_vec(), since: now() });
        let query = frame::DriverQuery { fields: request.fields.to_vec() };
        running.unsent = frame::frame(&query).map_err(|error| {
            ProbeFailure::new(FailureKind::Failed, format!("{QUERY_LABEL}: cannot encode it: {error}"))
        })?;
        // An error here recurs where the answer is awaited.
        let _sent_now = running.send();
    }
    Ok(running)
}

/// Ends a helper that is no longer needed.
fn end(slot: &mut Option<HelperProcess>) {
    let Some(HelperProcess { mut child, input, output, pending, current_gpu: queried_gpu, .. }) = slot.take() else {
        return;
    };
    drop((input, output));
    // It may have exited already.
    let _killed = child.kill();
    if child::exits_within(&child, KILL_GRACE) {
        let _status = child.wait();
        return;
    }
    let pid = child.id();
    let since = pending.map_or_else(now, |pending| pending.since);
    let stuck = StuckProcess { pid, since: Some(since), doing: Some(operation_text(queried_gpu.as_ref())) };
    HungProbes::in_memory().add_stuck(QUERY_LABEL, stuck, child);
}

impl HelperProcess {
    fn start(request: &DriverRequest<'_>) -> Result<Self, ProbeFailure> {
        let stuck = request.abandoned.all_hanging(QUERY_LABEL);
        if stuck.len() >= MAX_STUCK_HELPERS {
            let text = format!(
                "{QUERY_LABEL}: not queried: {}; the next helper starts when one of them exits",
                stuck_text(&stuck)
            );
            return Err(ProbeFailure::new(FailureKind::Abandoned, text));
        }
        let mut command = Command::new(request.program);
        command.arg0("doctor-node").arg(DRIVER_ARGUMENT).arg(std::process::id().to_string());
        command.arg(request.root).arg(request.library);
        command.env_clear().envs(env::vars_os().filter(|(name, _)| is_driver_variable(name)));
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        Self::spawn(&mut command, request).map_err(|error| {
            ProbeFailure::new(
                super::kind_of(&error),
                format!("{QUERY_LABEL}: cannot start the helper process: {error}"),
            )
        })
    }

    fn spawn(command: &mut Command, request: &DriverRequest<'_>) -> io::Result<Self> {
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
            program: request.program.to_owned(),
            root: request.root.to_owned(),
            library: request.library.to_owned(),
            started: Instant::now(),
            answered: false,
            pending: None,
            unsent: Vec::new(),
            incoming: Incoming::default(),
            current_gpu: None,
        })
    }

    /// Whether this helper can take the query or has it already.
    fn can_serve(&self, request: &DriverRequest<'_>) -> bool {
        let is_same = self.program == request.program && self.root == request.root && self.library == request.library;
        let is_its = |pending: &Pending| (pending.runner, &*pending.fields) == (request.runner, request.fields);
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
    fn wait_for_answer(&mut self, request: &DriverRequest<'_>) -> Result<GpuQueryResult, NoReply> {
        let deadline = Instant::now() + request.limit;
        loop {
            let is_closed = self.receive().map_err(NoReply::Io)?;
            while let Some(message) = self.incoming.next().map_err(NoReply::Io)? {
                match message {
                    HelperMessage::Querying(gpu) => self.current_gpu = Some(gpu),
                    HelperMessage::Answer(result) => {
                        (self.pending, self.current_gpu, self.answered) = (None, None, true);
                        // Nothing follows an answer; do not keep a buffer of this size until the next one.
                        self.incoming = Incoming::default();
                        return Ok(result);
                    }
                }
            }
            if is_closed {
                return Err(NoReply::Ended);
            }
            match self.send() {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Err(NoReply::Ended),
                other => other.map_err(NoReply::Io)?,
            }
            if let Some(reason) = request.stop.requested() {
                return Err(NoReply::Stopped(reason));
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Err(NoReply::TimedOut);
            }
            self.wait(request.stop, remaining).map_err(NoReply::Io)?;
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
                    if all > MAX_ANSWER_BYTES {
                        return Ok(false);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn wait(&self, stop: &Stop, timeout: Duration) -> io::Result<()> {
        let wake = stop.wake();
        let mut fds = vec![PollFd::new(&self.output, PollFlags::IN)];
        if !self.unsent.is_empty() {
            fds.push(PollFd::new(&self.input, PollFlags::OUT));
        }
        fds.extend(wake.as_ref().map(|wake| PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN)));
        let wait = Timespec::try_from(stop.cap_wait(timeout)).map_err(io::Error::other)?;
        match poll(&mut fds, Some(&wait)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Kills a helper that did not answer, and returns the reason.
    fn kill_and_explain(mut self, no_reply: &NoReply, request: &DriverRequest<'_>) -> ProbeFailure {
        let queried_gpu = self.current_gpu.take();
        if matches!(no_reply, NoReply::Ended) {
            // It is about to exit with a status that may show the cause.
            child::exits_within(&self.child, KILL_GRACE);
        }
        if let Some(pid) = child::end(&mut self.child, Duration::ZERO, KILL_GRACE) {
            let since = self.pending.map_or_else(now, |pending| pending.since);
            let stuck = StuckProcess { pid, since: Some(since), doing: Some(operation_text(queried_gpu.as_ref())) };
            request.abandoned.add_stuck(QUERY_LABEL, stuck, self.child);
            let all = stuck_text(&request.abandoned.all_hanging(QUERY_LABEL));
            let text =
                format!("{QUERY_LABEL}: {}; {all}", no_reply_text(no_reply, request.limit, queried_gpu.as_ref()));
            return ProbeFailure::new(FailureKind::Abandoned, text);
        }
        let kind = match no_reply {
            NoReply::TimedOut => FailureKind::TimedOut,
            NoReply::Stopped(_) => FailureKind::Killed,
            NoReply::Io(error) => match error.kind() {
                io::ErrorKind::FileTooLarge => FailureKind::TooLong,
                io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => FailureKind::Unparseable,
                _ => FailureKind::Failed,
            },
            NoReply::Ended => FailureKind::Failed,
        };
        let how = match (no_reply, self.child.wait()) {
            (NoReply::Ended, Ok(status)) => format!("helper process {} ended with {status}", self.child.id()),
            _ => format!("helper process {} was killed", self.child.id()),
        };
        ProbeFailure::new(
            kind,
            format!("{QUERY_LABEL}: {}; {how}", no_reply_text(no_reply, request.limit, queried_gpu.as_ref())),
        )
    }
}

fn stopped(reason: StopReason) -> ProbeFailure {
    ProbeFailure::new(FailureKind::Killed, format!("{QUERY_LABEL}: {}", stop_reason_text(reason)))
}

const fn stop_reason_text(reason: StopReason) -> &'static str {
    match reason {
        StopReason::Signal => "stopped by a signal",
        StopReason::TimeLimit => "the job's time limit was reached",
    }
}

/// Describes why there is no answer, and what the driver was doing then.
fn no_reply_text(no_reply: &NoReply, limit: Duration, queried_gpu: Option<&QueriedGpu>) -> String {
    let operation = operation_text(queried_gpu);
    match no_reply {
        NoReply::TimedOut => {
            let limit = Span::from_millis(i64::try_from(limit.as_millis()).unwrap_or(i64::MAX));
            format!("no answer within {limit} {operation}")
        }
        NoReply::Stopped(reason) => format!("{} {operation}", stop_reason_text(*reason)),
        NoReply::Ended => format!("the helper process exited {operation}"),
        NoReply::Io(error) if error.kind() == io::ErrorKind::FileTooLarge => {
            format!("its answer is longer than {MAX_ANSWER_BYTES} bytes")
        }
        NoReply::Io(error) => format!("its answer cannot be read: {error}"),
    }
}

/// Describes the driver call that was announced last.
fn operation_text(queried_gpu: Option<&QueriedGpu>) -> String {
    match queried_gpu {
        None => "while opening the driver".to_owned(),
        Some(QueriedGpu { index, bus }) if bus.is_empty() => format!("while querying GPU {index}"),
        Some(QueriedGpu { index, bus }) => format!("while querying GPU {index} ({bus})"),
    }
}

/// Formats `2 helper processes are stuck in the kernel and cannot be killed: process 71 since … while querying …`.
fn stuck_text(stuck: &[StuckProcess]) -> String {
    let one = |stuck: &StuckProcess| {
        let since = stuck.since.map_or_else(String::new, |since| format!(" since {since}"));
        let operation = stuck.doing.as_ref().map_or_else(String::new, |operation| format!(" {operation}"));
        format!("process {}{since}{operation}", stuck.pid)
    };
    let all = stuck.iter().map(one).collect::<Vec<_>>().join(", ");
    match stuck.len() {
        1 => format!("1 helper process is stuck in the kernel and cannot be killed: {all}"),
        count => format!("{count} helper processes are stuck in the kernel and cannot be killed: {all}"),
    }
}

fn is_driver_variable(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    VARIABLES.contains(&&*name) || VARIABLE_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_gpu_and_every_stuck_process() {
        let queried_gpu = QueriedGpu { index: 3, bus: "0000:48:00.0".to_owned() };
        let text = no_reply_text(&NoReply::TimedOut, Duration::from_secs(30), Some(&queried_gpu));
        assert_eq!(text, "no answer within 30s while querying GPU 3 (0000:48:00.0)");
        assert_eq!(operation_text(None), "while opening the driver");
        let stuck = |pid| StuckProcess {
            pid,
            since: Some(Timestamp::from_secs(0)),
            doing: Some(operation_text(Some(&queried_gpu))),
        };
        assert_eq!(
            stuck_text(&[stuck(7), stuck(9)]),
            "2 helper processes are stuck in the kernel and cannot be killed: process 7 since 1970-01-01T00:00:00Z \
             while querying GPU 3 (0000:48:00.0), process 9 since 1970-01-01T00:00:00Z while querying GPU 3 (0000:48:00.0)"
        );
    }

    #[test]
    fn the_helper_gets_what_libraries_read_and_no_secret() {
        for name in ["LD_LIBRARY_PATH", "PATH", "NVIDIA_VISIBLE_DEVICES", "DOCTOR_FAKE_NVIDIA"] {
            assert!(is_driver_variable(OsStr::new(name)), "{name}");
        }
        for name in [super::super::KEY_VARIABLE, "DOCTOR_RENDEZVOUS_SECRET", "AWS_SECRET_ACCESS_KEY"] {
            assert!(!is_driver_variable(OsStr::new(name)), "{name}");
        }
    }
}
