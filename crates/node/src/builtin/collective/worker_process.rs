//! The worker process from the node's side: started with NCCL's variables, its output read, and killed if necessary.

use std::{
    io::{self, BufRead as _, BufReader, Read, Write as _},
    os::unix::process::ExitStatusExt as _,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::Sender,
    thread,
    time::{Duration, Instant},
};

use doctor_checks::collective_params::CollectiveParams;

use super::{
    environment,
    events::CoordinatorEvent,
    messages::{WorkerCommand, WorkerMessage},
    worker::SUBTASK,
};
use crate::{builtin::SELF_EXE, runner::BUILTIN_ARGUMENT};

/// Bytes of NCCL's log that go into the log of the run. All of it is read; that of a large job would be too long to
/// keep.
const MAX_LOG_BYTES: usize = 256 << 10;

/// Time between the end of a process's output and its exit.
const TO_BE_OVER: Duration = Duration::from_secs(1);

/// Longer lines are split.
const MAX_LINE_BYTES: u64 = 16 << 20;

#[derive(Debug)]
pub(super) struct Worker {
    child: Child,
    input: ChildStdin,
    /// Killed by this node.
    killed: bool,
}

impl Worker {
    pub(super) fn start(params: &CollectiveParams, queue: &Sender<CoordinatorEvent>) -> io::Result<Self> {
        let written = serde_json::to_string(params).map_err(io::Error::other)?;
        let mut command = Command::new(SELF_EXE);
        command.args([BUILTIN_ARGUMENT, SUBTASK, &written]);
        environment::set(&mut command, params);
        // NCCL's plugins must not see the job's secret.
        command.env_remove("DOCTOR_RENDEZVOUS_SECRET").env_remove("DOCTOR_RENDEZVOUS_SECRET_FILE");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(input), Some(output), Some(log)) = pipes else {
            return Err(io::Error::other("the child process has no pipes"));
        };
        let (messages, logged, last) = (queue.clone(), queue.clone(), queue.clone());
        // Both pipes must be read to their end before the worker counts as ended: its log is judged then.
        thread::spawn(move || {
            let listener = thread::spawn(move || {
                for_each_line(log, |line| logged.send(CoordinatorEvent::Log(line.to_owned())).is_ok());
            });
            for_each_line(output, |line| match serde_json::from_str::<WorkerMessage>(line) {
                Ok(message) => messages.send(CoordinatorEvent::Worker(message)).is_ok(),
                // NCCL logs here if it cannot open its log file.
                Err(_) => messages.send(CoordinatorEvent::Log(line.to_owned())).is_ok(),
            });
            let _listened = listener.join();
            let _sent = last.send(CoordinatorEvent::WorkerEnded);
        });
        Ok(Self { child, input, killed: false })
    }

    /// Sends a message. A worker that is gone is detected by its pipes.
    pub(super) fn send(&mut self, command: &WorkerCommand) {
        let line = serde_json::to_string(command).unwrap_or_default();
        let _sent = writeln!(self.input, "{line}");
    }

    pub(super) fn kill(&mut self) {
        self.killed = true;
        let _killed = self.child.kill();
    }

    /// Returns the signal that ended the worker, unless this node sent it. Call it after the end of the output, when
    /// the worker has exited or is about to.
    pub(super) fn crashed(&mut self) -> Option<String> {
        let deadline = Instant::now() + TO_BE_OVER;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => {
                    return status.signal().filter(|_| !self.killed).map(|number| format!("signal {number}"));
                }
                Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(2)),
                Ok(None) | Err(_) => return None,
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
        // The runner records one that hangs in the kernel: it is in the runner's process group.
        let _reaped = self.child.try_wait();
    }
}

fn for_each_line(stream: impl Read, mut handle_line: impl FnMut(&str) -> bool) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        match reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                if !handle_line(String::from_utf8_lossy(&line).trim_end()) {
                    return;
                }
            }
        }
    }
}

/// Prints the start of a log.
#[derive(Debug, Default)]
pub(super) struct LogPrinter {
    bytes: usize,
}

impl LogPrinter {
    pub(super) fn show(&mut self, line: &str) {
        if self.bytes > MAX_LOG_BYTES {
            return;
        }
        self.bytes += line.len() + 1;
        eprintln!("{line}");
        if self.bytes > MAX_LOG_BYTES {
            eprintln!("NCCL's log is truncated here");
        }
    }
}
