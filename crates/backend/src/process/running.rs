//! A started process that can be killed with its group, reaped, or abandoned if it survives SIGKILL.

use std::{
    io,
    os::unix::process::CommandExt as _,
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};

use super::PAUSE;

/// How long a killed process may take to disappear before it is abandoned.
const KILLED: Duration = Duration::from_secs(2);

/// Killed processes that have not disappeared.
static ABANDONED: Mutex<Vec<Child>> = Mutex::new(Vec::new());

/// The process group of a child, which decides what is killed with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// It leads its own process group. Everything it started in that group is killed with it.
    Own,
    /// It stays in the caller's group, so that Ctrl-C ends both. Only the process itself is killed.
    Shared,
}

/// A started process. Dropping it kills the process unless it has ended.
#[derive(Debug)]
pub(crate) struct ChildProcess {
    /// `None` once it was reaped or abandoned.
    child: Option<Child>,
    group: Group,
}

impl ChildProcess {
    /// Starts the process. The caller ends it in time; outside this crate, [`super::run`] and [`super::output`] do.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(crate) fn start(command: &mut Command, group: Group) -> io::Result<Self> {
        reap_abandoned();
        if group == Group::Own {
            command.process_group(0);
        }
        Ok(Self { child: Some(command.spawn()?), group })
    }

    pub(crate) fn take_stdin(&mut self) -> Option<ChildStdin> {
        self.child.as_mut()?.stdin.take()
    }

    pub(crate) fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.child.as_mut()?.stdout.take()
    }

    pub(crate) fn take_stderr(&mut self) -> Option<ChildStderr> {
        self.child.as_mut()?.stderr.take()
    }

    /// Returns whether the process has ended. Does not reap it, so that its process group id cannot be reused.
    ///
    /// # Errors
    /// If the kernel cannot report its state.
    pub(crate) fn has_ended(&self) -> io::Result<bool> {
        let Some(pid) = self.pid() else { return Ok(true) };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        Ok(waitid(WaitId::Pid(pid), options)?.is_some())
    }

    /// Waits for the end of the process. Returns `false` if it has not ended within the limit or its state is unknown.
    pub(crate) fn wait_up_to(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        loop {
            match self.has_ended() {
                Ok(false) if Instant::now() < until => std::thread::sleep(PAUSE),
                Ok(ended) => return ended,
                Err(_) => return false,
            }
        }
    }

    /// Sends SIGTERM, and SIGKILL after `grace`. A zero grace sends SIGKILL only.
    pub(crate) fn terminate(&mut self, grace: Duration) {
        let Some(pid) = self.pid() else { return };
        if !grace.is_zero() {
            // Only to the process itself, which ends its children in its own way. It may have just ended.
            let _already_exited = kill_process(pid, Signal::TERM);
            self.wait_up_to(grace);
        }
        let _already_exited = match self.group {
            Group::Own => kill_process_group(pid, Signal::KILL),
            Group::Shared => kill_process(pid, Signal::KILL),
        };
        self.wait_up_to(KILLED);
        self.reap();
    }

    /// Returns the status of a process that has ended, or abandons it.
    pub(super) fn reap(&mut self) -> Option<ExitStatus> {
        let mut child = self.child.take()?;
        match child.try_wait() {
            Ok(Some(status)) => Some(status),
            Ok(None) | Err(_) => {
                ABANDONED.lock().unwrap_or_else(PoisonError::into_inner).push(child);
                None
            }
        }
    }

    /// Returns `None` if it was reaped or abandoned.
    fn pid(&self) -> Option<Pid> {
        i32::try_from(self.child.as_ref()?.id()).ok().and_then(Pid::from_raw)
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        match self.has_ended() {
            Ok(true) => drop(self.reap()),
            Ok(false) | Err(_) => self.terminate(Duration::ZERO),
        }
    }
}

fn reap_abandoned() {
    let mut abandoned = ABANDONED.lock().unwrap_or_else(PoisonError::into_inner);
    abandoned.retain_mut(|child| !matches!(child.try_wait(), Ok(Some(_))));
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    /// The kernel reports the end of a traced process to its parent only when the tracer detaches. Until then it looks like one
    /// that survives SIGKILL. The tracer has its own session and is not killed with it.
    const HELD: &str = r#"
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
PR_SET_PTRACER, ANY, PTRACE_SEIZE = 0x59616d61, ctypes.c_ulong(-1), 0x4206
libc.prctl(PR_SET_PTRACER, ANY, 0, 0, 0)
parent = os.getpid()
if os.fork() == 0:
    os.setsid()
    seized = libc.ptrace(PTRACE_SEIZE, parent, None, None)
    print(os.getpid() if seized == 0 else 0, flush=True)
time.sleep(600)
"#;

    #[test]
    fn a_process_that_survives_its_kill_is_abandoned_and_reaped_later() {
        use std::io::{BufRead as _, BufReader};
        let mut command = Command::new("python3");
        command.args(["-c", HELD]).stdout(Stdio::piped());
        let mut running = ChildProcess::start(&mut command, Group::Own).unwrap();
        let mut line = String::new();
        BufReader::new(running.take_stdout().unwrap()).read_line(&mut line).unwrap();
        let tracer = Pid::from_raw(line.trim().parse().unwrap()).expect("this system lets a process trace its parent");
        let child = running.pid().unwrap().as_raw_nonzero().get().cast_unsigned();
        let is_abandoned = || ABANDONED.lock().unwrap().iter().any(|one| one.id() == child);
        let began = Instant::now();
        running.terminate(Duration::ZERO);
        assert!(began.elapsed() < KILLED + Duration::from_secs(20), "it is not waited for");
        assert!(is_abandoned());
        kill_process(tracer, Signal::KILL).unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        while is_abandoned() {
            assert!(Instant::now() < until, "it is reaped by the next call");
            reap_abandoned();
            std::thread::sleep(PAUSE);
        }
    }
}
