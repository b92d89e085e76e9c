//! The keeper: the only process besides fio that touches the mount.
//!
//! It creates the test's directory, reports that, and removes it when its standard input ends, whether the test is done
//! or was killed. Any of this may hang forever on a sick mount. The keeper is therefore a separate process that
//! exchanges lines with the test, which waits for it only as long as necessary.

use std::{
    ffi::OsString,
    io::{self, Read as _, Write as _},
    os::fd::{AsFd, AsRawFd as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio},
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::os::unix::process::CommandExt as _;

use super::{
    SELF_EXE,
    directory::{Directory, IoFailure, Owner},
};
use crate::{
    runner::{BUILTIN_ARGUMENT, hung_probes::HungProbes},
    stop::{Stop, StopReason},
};

/// The subtask name of the keeper.
pub(in crate::builtin) const SUBTASK: &str = "storage-keep";

/// A message of the keeper.
#[derive(Debug, Serialize, Deserialize)]
enum KeeperMessage {
    Ready(Ready),
    Removed,
    Failed(IoFailure),
}

/// The directory exists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ready {
    /// The keeper's descriptor of the directory. It stays valid whatever happens to the path.
    descriptor: i32,
    pub(super) direct: bool,
    pub(super) free: Option<u64>,
    pub(super) removed_stale: usize,
}

/// Entry point of the keeper's process.
pub(in crate::builtin) fn run_keeper(args: &[OsString]) -> ExitCode {
    // Signals reach it together with the test, which it must outlive: only the end of its input ends it.
    let signalled = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        if signal_hook::flag::register(signal, Arc::clone(&signalled)).is_err() {
            return ExitCode::FAILURE;
        }
    }
    let (Some(mount), Some(owner)) = (args.first(), Owner::this_process()) else {
        eprintln!("{SUBTASK} is internal to doctor-node");
        return ExitCode::FAILURE;
    };
    match Directory::make(Path::new(mount), &owner) {
        Ok(directory) => {
            let Directory { direct, free, removed_stale: swept, .. } = directory;
            send_message(&KeeperMessage::Ready(Ready {
                descriptor: directory.fd.as_raw_fd(),
                direct,
                free,
                removed_stale: swept,
            }));
            let _until_it_ends = io::stdin().lock().read_to_end(&mut Vec::new());
            send_message(&directory.remove().map_or_else(KeeperMessage::Failed, |()| KeeperMessage::Removed));
        }
        Err(failure) => send_message(&KeeperMessage::Failed(failure)),
    }
    ExitCode::SUCCESS
}

fn send_message(message: &KeeperMessage) {
    let line = serde_json::to_string(message).unwrap_or_default();
    // Continue even if the test is gone.
    let _sent = writeln!(io::stdout(), "{line}");
}

/// Why the keeper failed.
#[derive(Debug)]
pub(super) enum KeeperError {
    Io(IoFailure),
    /// No message within this time. It was killed.
    Stalled(Duration),
    /// This process was left behind: it cannot be killed, or still has files to remove.
    Unkillable(u32),
    /// It ended without a message, or could not be started.
    Gone(String),
    Stopped(StopReason),
}

/// The keeper from the test's side.
#[derive(Debug)]
pub(super) struct Keeper {
    child: Child,
    /// Dropped to end the keeper.
    input: Option<ChildStdin>,
    output: ChildStdout,
    buffer: Vec<u8>,
}

/// A killed process is gone within this time unless it hangs in the kernel.
const KILL_GRACE: Duration = Duration::from_millis(500);

impl Keeper {
    /// Starts a keeper and waits for the directory.
    pub(super) fn start(
        mount: &Path,
        timeout: Duration,
        stop: &Stop,
        hung_on_mount: &HungOnMount<'_>,
    ) -> Result<(Self, Ready), KeeperError> {
        let start_error = |error: io::Error| KeeperError::Gone(format!("cannot start the keeper process: {error}"));
        let mut command = Command::new(SELF_EXE);
        command.args([BUILTIN_ARGUMENT, SUBTASK]).arg(mount).process_group(0);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(start_error)?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(KeeperError::Gone("the keeper process has no pipes".to_owned()));
        };
        let mut keeper = Self { child, input: Some(input), output, buffer: Vec::new() };
        match keeper.next_message(timeout, Some(stop)) {
            Ok(KeeperMessage::Ready(ready)) => Ok((keeper, ready)),
            Ok(KeeperMessage::Failed(failure)) => Err(KeeperError::Io(failure)),
            Ok(KeeperMessage::Removed) => Err(KeeperError::Gone("unexpected message of the keeper process".to_owned())),
            Err(error @ (KeeperError::Stalled(_) | KeeperError::Stopped(_))) => Err(keeper.kill(error, hung_on_mount)),
            Err(error) => Err(error),
        }
    }

    /// Returns a path by which a process can enter the directory.
    pub(super) fn directory(&self, ready: &Ready) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", self.child.id(), ready.descriptor))
    }

    /// Lets the keeper remove the directory. If that takes longer, it continues on its own once the mount responds.
    pub(super) fn finish(mut self, timeout: Duration, hung_on_mount: &HungOnMount<'_>) -> Result<(), KeeperError> {
        drop(self.input.take());
        match self.next_message(timeout, None) {
            Ok(KeeperMessage::Removed) => {
                self.wait_for_exit();
                Ok(())
            }
            Ok(KeeperMessage::Failed(failure)) => Err(KeeperError::Io(failure)),
            Ok(KeeperMessage::Ready(_)) => {
                Err(KeeperError::Gone("unexpected message of the keeper process".to_owned()))
            }
            Err(KeeperError::Stalled(_)) => {
                let pid = self.child.id();
                hung_on_mount.record(pid, self.child);
                Err(KeeperError::Unkillable(pid))
            }
            Err(error) => Err(error),
        }
    }

    /// Returns its next message.
    fn next_message(&mut self, timeout: Duration, stop: Option<&Stop>) -> Result<KeeperMessage, KeeperError> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return serde_json::from_slice(&line)
                    .map_err(|error| KeeperError::Gone(format!("cannot read from the keeper process: {error}")));
            }
            if let Some(reason) = stop.and_then(Stop::requested) {
                return Err(KeeperError::Stopped(reason));
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Err(KeeperError::Stalled(timeout));
            }
            let wait = stop.map_or(remaining, |stop| stop.cap_wait(remaining));
            if !self.wait_for_message(wait, stop).map_err(|error| KeeperError::Gone(error.to_string()))? {
                continue;
            }
            let mut buffer = [0; 4096];
            match self.output.read(&mut buffer) {
                Ok(0) => return Err(KeeperError::Gone("the keeper process exited without a message".to_owned())),
                Ok(count) => self.buffer.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(KeeperError::Gone(format!("cannot read from the keeper process: {error}"))),
            }
        }
    }

    fn wait_for_message(&self, wait: Duration, stop: Option<&Stop>) -> io::Result<bool> {
        let wake = stop.and_then(Stop::wake);
        let mut fds = vec![PollFd::new(&self.output, PollFlags::IN)];
        fds.extend(wake.as_ref().map(|wake| PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN)));
        let timeout = Timespec::try_from(wait).map_err(io::Error::other)?;
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) => Ok(!fds[0].revents().is_empty()),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Kills it, or records it if that fails.
    fn kill(mut self, error: KeeperError, hung_on_mount: &HungOnMount<'_>) -> KeeperError {
        let _killed = self.child.kill();
        if self.wait_for_exit() {
            return error;
        }
        let pid = self.child.id();
        hung_on_mount.record(pid, self.child);
        KeeperError::Unkillable(pid)
    }

    /// Waits briefly for its exit and reaps it.
    fn wait_for_exit(&mut self) -> bool {
        let deadline = Instant::now() + KILL_GRACE;
        while !matches!(self.child.try_wait(), Ok(Some(_))) {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }
}

/// Records abandoned processes of one mount.
#[derive(Debug)]
pub(super) struct HungOnMount<'a> {
    pub(super) probes: &'a HungProbes,
    pub(super) what: String,
}

impl HungOnMount<'_> {
    pub(super) fn record(&self, pid: u32, child: Child) {
        self.probes.add(&self.what, pid, child);
    }

    /// Returns a process of an earlier test that still hangs.
    pub(super) fn hanging(&self) -> Option<u32> {
        self.probes.hanging(&self.what)
    }
}
