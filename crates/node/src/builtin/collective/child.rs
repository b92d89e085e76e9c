//! The worker's process as its node sees it: started with NCCL's variables, listened to, and killed if need be.

use std::{
    io::{self, BufRead as _, BufReader, Read, Write as _},
    os::unix::process::ExitStatusExt as _,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::Sender,
    thread,
    time::{Duration, Instant},
};

use doctor_checks::collective_order::CollectiveOrder;

use super::{
    environment,
    events::News,
    told::{Said, Told},
    worker::WORK,
};
use crate::{builtin::OURSELVES, runner::BUILTIN_ARGUMENT};

/// What of NCCL's log goes into the log of the run. All of it is read; a large job's would be too long to keep.
const KEPT_LOG: usize = 256 << 10;

/// Between the last word of a process and its end.
const TO_BE_OVER: Duration = Duration::from_secs(1);

/// A line longer than this is none that anybody needs.
const MOST_LINE: u64 = 16 << 20;

#[derive(Debug)]
pub(super) struct Worker {
    child: Child,
    input: ChildStdin,
    /// By this node itself.
    killed: bool,
}

impl Worker {
    pub(super) fn start(order: &CollectiveOrder, queue: &Sender<News>) -> io::Result<Self> {
        let written = serde_json::to_string(order).map_err(io::Error::other)?;
        let mut command = Command::new(OURSELVES);
        command.args([BUILTIN_ARGUMENT, WORK, &written]);
        environment::set(&mut command, order);
        // A secret of the job is none of NCCL's plugins' business.
        command.env_remove("DOCTOR_RENDEZVOUS_SECRET").env_remove("DOCTOR_RENDEZVOUS_SECRET_FILE");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(input), Some(words), Some(log)) = pipes else {
            return Err(io::Error::other("a process without pipes"));
        };
        let (said, logged, last) = (queue.clone(), queue.clone(), queue.clone());
        // Both have to be read to their end before the worker counts as ended: its log is judged then.
        thread::spawn(move || {
            let listener = thread::spawn(move || lines(log, |line| logged.send(News::Log(line.to_owned())).is_ok()));
            lines(words, |line| match serde_json::from_str::<Said>(line) {
                Ok(word) => said.send(News::Worker(word)).is_ok(),
                // NCCL's, where it cannot open its log.
                Err(_) => said.send(News::Log(line.to_owned())).is_ok(),
            });
            let _listened = listener.join();
            let _told = last.send(News::WorkerEnded);
        });
        Ok(Self { child, input, killed: false })
    }

    /// An end that is not there any more tells of itself.
    pub(super) fn tell(&mut self, told: &Told) {
        let line = serde_json::to_string(told).unwrap_or_default();
        let _told = writeln!(self.input, "{line}");
    }

    pub(super) fn kill(&mut self) {
        self.killed = true;
        let _killed = self.child.kill();
    }

    /// The signal that ended it, where that was not this node's. It has said its last word: it is over, or nearly.
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
        // One that hangs in the kernel is the runner's to remember: it is of its group.
        let _reaped = self.child.try_wait();
    }
}

fn lines(stream: impl Read, mut hear: impl FnMut(&str) -> bool) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        match reader.by_ref().take(MOST_LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                if !hear(String::from_utf8_lossy(&line).trim_end()) {
                    return;
                }
            }
        }
    }
}

/// What people see of a log.
#[derive(Debug, Default)]
pub(super) struct Shown {
    bytes: usize,
}

impl Shown {
    pub(super) fn show(&mut self, line: &str) {
        if self.bytes > KEPT_LOG {
            return;
        }
        self.bytes += line.len() + 1;
        eprintln!("{line}");
        if self.bytes > KEPT_LOG {
            eprintln!("the rest of NCCL's log is not kept");
        }
    }
}
