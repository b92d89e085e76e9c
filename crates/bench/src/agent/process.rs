//! The agent's process: what it uses and holds, from /proc.

use std::{
    fs,
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

/// Quiet for so long, it sleeps.
const QUIET: Duration = Duration::from_millis(200);

pub(super) struct Running(Child);

impl Running {
    pub(super) fn start(command: &mut Command) -> Result<Self> {
        Ok(Self(command.spawn().context("starting the agent")?))
    }

    pub(super) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Makes it read its configuration again, and look.
    pub(super) fn hang_up(&self) -> Result<()> {
        let pid = Pid::from_raw(self.pid().cast_signed()).context("a process has a number")?;
        kill_process(pid, Signal::HUP).context("sending SIGHUP")
    }

    /// Waits until it uses CPU time again.
    pub(super) fn wake(&self, within: Duration) -> Result<()> {
        let (began, before) = (Instant::now(), self.threads_used()?);
        while self.threads_used()? == before {
            ensure!(began.elapsed() < within, "the agent does nothing");
            thread::sleep(QUIET / 4);
        }
        Ok(())
    }

    /// Waits until it uses no CPU time any more.
    pub(super) fn settle(&self, within: Duration) -> Result<()> {
        let began = Instant::now();
        let mut before = self.threads_used()?;
        loop {
            thread::sleep(QUIET);
            let now = self.threads_used()?;
            if now == before {
                return Ok(());
            }
            ensure!(began.elapsed() < within, "the agent does not come to rest");
            before = now;
        }
    }

    /// CPU time of the threads that it has now, to the nanosecond.
    pub(super) fn threads_used(&self) -> Result<Duration> {
        let folder = format!("/proc/{}/task", self.pid());
        let mut used = 0;
        for thread in fs::read_dir(&folder).with_context(|| format!("reading {folder}"))? {
            // One that has ended meanwhile uses nothing.
            let stat = fs::read_to_string(thread?.path().join("schedstat")).unwrap_or_default();
            used += stat.split(' ').next().and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
        }
        Ok(Duration::from_nanos(used))
    }

    /// Bytes of memory that it holds.
    pub(super) fn resident(&self) -> Result<u64> {
        let path = format!("/proc/{}/status", self.pid());
        let status = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kibibytes: u64 = line.trim().trim_end_matches(" kB").parse().context("VmRSS is no number")?;
        Ok(kibibytes * 1024)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Nobody measures it any more.
        let _ended = self.0.kill().and_then(|()| self.0.wait());
    }
}
