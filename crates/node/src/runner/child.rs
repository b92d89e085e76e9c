//! Runs one child process in its own process group, captures its output, and ends it with all its descendants in the
//! group.

use std::{
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::process::CommandExt,
    },
    process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::ioctl_fionbio,
    process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, pidfd_open, waitid},
};

use super::hung_probes::processes;
use crate::stop::{Stop, StopReason};

pub(crate) struct Limits {
    pub(crate) timeout: Duration,
    /// Bytes on each of stdout and stderr.
    pub(crate) max_stream_bytes: usize,
    /// Time for cleanup between SIGTERM and SIGKILL.
    pub(crate) grace: Duration,
    /// Time for a killed process to be gone.
    pub(crate) kill_grace: Duration,
}

/// Receivers of each line of a stream, as it is printed.
#[derive(Clone, Copy, Default)]
pub(crate) struct Echo<'a> {
    pub(crate) stdout: Option<&'a dyn Fn(&str)>,
    pub(crate) stderr: Option<&'a dyn Fn(&str)>,
}

/// The outcome of a run.
pub(crate) enum ChildOutcome {
    Exited {
        status: ExitStatus,
        stdout: Vec<u8>,
        stderr: Vec<u8>,
    },
    TimedOut,
    TooLong,
    Stopped(StopReason),
    /// A process of the group survives SIGKILL, which only one stuck in the kernel does.
    Unkillable {
        pid: u32,
        child: Child,
    },
}

/// Polling interval on kernels before 5.3, which cannot signal a child's exit. End-of-file on its pipes does not show
/// the exit: its descendants may hold them open.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Longer than any machine's uptime.
const MAX_TIMEOUT: Duration = Duration::from_secs(10 * 365 * 86_400);

/// Runs a command to its end or to a limit.
pub(crate) fn run(command: &mut Command, limits: &Limits, stop: &Stop, echo: Echo<'_>) -> io::Result<ChildOutcome> {
    run_with_stop_grace(command, limits, limits.grace, stop, echo)
}

/// Like [`run`], with another grace after a stop request: then we have little time ourselves.
pub(crate) fn run_with_stop_grace(
    command: &mut Command,
    limits: &Limits,
    stop_grace: Duration,
    stop: &Stop,
    echo: Echo<'_>,
) -> io::Result<ChildOutcome> {
    if let Some(reason) = stop.requested() {
        return Ok(ChildOutcome::Stopped(reason));
    }
    let mut child =
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut stdout = Stream::new(child.stdout.take(), limits.max_stream_bytes, echo.stdout);
    let mut stderr = Stream::new(child.stderr.take(), limits.max_stream_bytes, echo.stderr);
    let listen_result = listen(&child, &mut stdout, &mut stderr, limits.timeout, stop);
    let grace = match listen_result {
        Ok(Some(ChildOutcome::Stopped(_))) => stop_grace,
        Ok(Some(_)) => limits.grace,
        Ok(None) | Err(_) => Duration::ZERO,
    };
    if !grace.is_zero() {
        send_sigterm(&child, grace);
    }
    // Also after a normal exit: descendants in the group must not outlive the program. The group id cannot have been
    // reused, because the child has not been reaped yet.
    kill_group(&child);
    if let Some(result) = listen_result.transpose() {
        return match survivor(&child, limits.kill_grace) {
            Some(pid) => Ok(ChildOutcome::Unkillable { pid, child }),
            None => child.wait().and(result),
        };
    }
    let status = child.wait()?;
    // Output may have arrived between the last read and the exit.
    stdout.read_available()?;
    stderr.read_available()?;
    if stdout.exceeds_limit() || stderr.exceeds_limit() {
        return Ok(ChildOutcome::TooLong);
    }
    stdout.echo_rest();
    stderr.echo_rest();
    Ok(ChildOutcome::Exited { status, stdout: stdout.bytes, stderr: stderr.bytes })
}

/// Ends a child that leads its own group and has not been reaped, with that group: SIGTERM, then SIGKILL. Returns the
/// pid of a process that survives.
pub(crate) fn end(child: &mut Child, grace: Duration, kill_grace: Duration) -> Option<u32> {
    if !grace.is_zero() {
        send_sigterm(child, grace);
    }
    kill_group(child);
    let survivor = survivor(child, kill_grace);
    if survivor.is_none() {
        // It has exited; its status is irrelevant.
        let _status = child.wait();
    }
    survivor
}

/// Reads the child's output until it exits (`None`) or a limit is reached. Does not reap it.
fn listen(
    child: &Child,
    stdout: &mut Stream<'_, ChildStdout>,
    stderr: &mut Stream<'_, ChildStderr>,
    timeout: Duration,
    stop: &Stop,
) -> io::Result<Option<ChildOutcome>> {
    let deadline = Instant::now() + timeout.min(MAX_TIMEOUT);
    let exit = pidfd_open(pid(child)?, PidfdFlags::empty()).ok();
    for fd in [stdout.fd(), stderr.fd()].into_iter().flatten() {
        ioctl_fionbio(fd, true)?;
    }
    loop {
        stdout.read_available()?;
        stderr.read_available()?;
        if stdout.exceeds_limit() || stderr.exceeds_limit() {
            return Ok(Some(ChildOutcome::TooLong));
        }
        if has_exited(child)? {
            return Ok(None);
        }
        if let Some(reason) = stop.requested() {
            return Ok(Some(ChildOutcome::Stopped(reason)));
        }
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Ok(Some(ChildOutcome::TimedOut));
        }
        let wait = stop.cap_wait(if exit.is_some() { remaining } else { remaining.min(POLL_INTERVAL) });
        wait_for_events(&[stdout.fd(), stderr.fd(), exit.as_ref().map(AsFd::as_fd)], stop, wait)?;
    }
}

fn pid(child: &Child) -> io::Result<Pid> {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or_else(|| io::Error::other("the child has no valid pid"))
}

/// Whether the child has exited. Does not reap it, so that its pid is not reused.
pub(crate) fn has_exited(child: &Child) -> io::Result<bool> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(waitid(WaitId::Pid(pid(child)?), options)?.is_some())
}

/// Waits up to `grace` for the child's exit, without reaping it. Returns false if it is still running.
pub(crate) fn exits_within(child: &Child, grace: Duration) -> bool {
    let deadline = Instant::now() + grace.min(MAX_TIMEOUT);
    let exit = pid(child).ok().and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    loop {
        if !matches!(has_exited(child), Ok(false)) {
            return true;
        }
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return false;
        }
        let wait = if exit.is_some() { remaining } else { remaining.min(POLL_INTERVAL) };
        if wait_for_events(&[exit.as_ref().map(AsFd::as_fd)], &Stop::never(), wait).is_err() {
            return false;
        }
    }
}

/// Sends SIGTERM to the child only: it must end its own descendants.
fn send_sigterm(child: &Child, grace: Duration) {
    let Ok(pid) = pid(child) else { return };
    // An error means that the child is gone.
    let _asked = kill_process(pid, Signal::TERM);
    let deadline = Instant::now() + grace;
    while Instant::now() < deadline && matches!(has_exited(child), Ok(false)) {
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn kill_group(child: &Child) {
    // An error means that the group is empty.
    if let Ok(pid) = pid(child) {
        let _gone = kill_process_group(pid, Signal::KILL);
    }
}

/// Returns a process of the killed group that still exists after `grace`: the child or a descendant.
fn survivor(child: &Child, grace: Duration) -> Option<u32> {
    let deadline = Instant::now() + grace;
    loop {
        let alive = processes().find(|stat| stat.group == child.id() && !stat.has_exited())?;
        if Instant::now() >= deadline {
            return Some(alive.pid);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn wait_for_events(sources: &[Option<BorrowedFd<'_>>], stop: &Stop, wait: Duration) -> io::Result<()> {
    let wake = stop.wake();
    let fds = sources.iter().flatten().copied().chain(wake.as_ref().map(AsFd::as_fd));
    let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    let timeout = Timespec::try_from(wait).map_err(io::Error::other)?;
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// One of the child's two output streams.
struct Stream<'a, P> {
    /// `None` if the other end is closed.
    pipe: Option<P>,
    bytes: Vec<u8>,
    max_bytes: usize,
    echo: Option<&'a dyn Fn(&str)>,
    /// Length of the prefix that has been passed to `echo`.
    echoed: usize,
}

impl<'a, P: Read + AsFd> Stream<'a, P> {
    const fn new(pipe: Option<P>, max_bytes: usize, echo: Option<&'a dyn Fn(&str)>) -> Self {
        Self { pipe, bytes: Vec::new(), max_bytes, echo, echoed: 0 }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    fn exceeds_limit(&self) -> bool {
        self.bytes.len() > self.max_bytes
    }

    fn read_available(&mut self) -> io::Result<()> {
        let mut buffer = [0; 16 << 10];
        while let Some(pipe) = self.pipe.as_mut().filter(|_| self.bytes.len() <= self.max_bytes) {
            match pipe.read(&mut buffer) {
                Ok(0) => self.pipe = None,
                Ok(count) => self.bytes.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.echo_lines();
        Ok(())
    }

    fn echo_lines(&mut self) {
        let Some(echo) = self.echo else { return };
        while let Some(end) = self.bytes[self.echoed..].iter().position(|byte| *byte == b'\n') {
            echo(&String::from_utf8_lossy(&self.bytes[self.echoed..self.echoed + end]));
            self.echoed += end + 1;
        }
    }

    fn echo_rest(&mut self) {
        self.echo_lines();
        if let Some(echo) = self.echo.filter(|_| self.echoed < self.bytes.len()) {
            echo(&String::from_utf8_lossy(&self.bytes[self.echoed..]));
            self.echoed = self.bytes.len();
        }
    }
}
