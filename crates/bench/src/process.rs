//! A child process under measurement: its CPU time and memory, from /proc.

use std::{
    fs,
    process::{Child, Command},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

/// A process without CPU time for this long counts as idle.
const QUIET: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(crate) struct Running(Child);

impl Running {
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        let child = command.spawn();
        Ok(Self(child.with_context(|| format!("starting {}", command.get_program().display()))?))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Sends SIGHUP, which makes the agent reload its configuration and run its checks.
    pub(crate) fn hang_up(&self) -> Result<()> {
        self.signal(Signal::HUP)
    }

    /// Sends SIGTERM and waits for the process.
    #[cfg(feature = "kubernetes")]
    pub(crate) fn stop(mut self) -> Result<std::process::ExitStatus> {
        self.signal(Signal::TERM)?;
        self.0.wait().context("waiting for the process")
    }

    /// Fails if the process has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        let ended = self.0.try_wait().context("checking the process")?;
        ensure!(ended.is_none(), "the process has ended: {ended:?}");
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.pid().cast_signed()).context("a process has an id")?;
        kill_process(pid, signal).with_context(|| format!("sending {signal:?}"))
    }

    /// Waits until the process uses CPU time again.
    pub(crate) fn wait_until_active(&self, within: Duration) -> Result<()> {
        let (began, before) = (Instant::now(), self.threads_used()?);
        while self.threads_used()? == before {
            ensure!(began.elapsed() < within, "the process uses no CPU time");
            thread::sleep(QUIET / 4);
        }
        Ok(())
    }

    /// Waits until the process uses no more CPU time.
    pub(crate) fn wait_until_idle(&self, within: Duration) -> Result<()> {
        let began = Instant::now();
        let mut before = self.threads_used()?;
        loop {
            thread::sleep(QUIET);
            let now = self.threads_used()?;
            if now == before {
                return Ok(());
            }
            ensure!(began.elapsed() < within, "the process does not become idle");
            before = now;
        }
    }

    /// Returns the CPU time of the live threads of the process and its children, in nanosecond resolution.
    pub(crate) fn threads_used(&self) -> Result<Duration> {
        let folder = format!("/proc/{}/task", self.pid());
        let mut used = threads_used(&folder).with_context(|| format!("reading {folder}"))?;
        for child in self.children() {
            // A child that has ended in the meantime counts as zero.
            used += threads_used(&format!("/proc/{child}/task")).unwrap_or_default();
        }
        Ok(used)
    }

    /// Returns the live children of the process.
    pub(crate) fn children(&self) -> Vec<u32> {
        children(self.pid())
    }

    /// Samples the peak of a status line, such as `RssAnon`, of this process and its children together.
    pub(crate) fn watch_memory(&self, what: &'static str) -> MemoryWatch {
        let (pid, most, over) = (self.pid(), Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (seen, ends) = (Arc::clone(&most), Arc::clone(&over));
        thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                // A child that has not called exec yet shares its parent's memory, which is counted already.
                let command_line = |pid: u32| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                let own = command_line(pid);
                let all = children(pid).into_iter().filter(|child| command_line(*child) != own).chain([pid]);
                seen.fetch_max(all.filter_map(|pid| memory_of(pid, what).ok()).sum(), Ordering::Relaxed);
                thread::sleep(Duration::from_millis(1));
            }
        });
        MemoryWatch { peak: most, over }
    }

    /// Returns the peak resident memory in bytes.
    pub(crate) fn peak_rss(&self) -> Result<u64> {
        self.memory("VmHWM")
    }

    /// Returns a line of the process status in bytes: `VmRSS`, `VmHWM`, `RssAnon`.
    pub(crate) fn memory(&self, what: &str) -> Result<u64> {
        memory_of(self.pid(), what)
    }
}

/// Samples memory until it is dropped.
#[derive(Debug)]
pub(crate) struct MemoryWatch {
    peak: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
}

impl MemoryWatch {
    /// Returns the peak so far, in bytes.
    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }
}

impl Drop for MemoryWatch {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

/// Returns the live children of a process. Empty if the process has ended.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>()).collect()
}

fn threads_used(folder: &str) -> Result<Duration> {
    let mut used = 0;
    for thread in fs::read_dir(folder)? {
        // A thread that has ended in the meantime counts as zero.
        let stat = fs::read_to_string(thread?.path().join("schedstat")).unwrap_or_default();
        used += stat.split(' ').next().and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(Duration::from_nanos(used))
}

fn memory_of(pid: u32, what: &str) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(':'));
    let line = line.with_context(|| format!("{path} has no {what}"))?;
    let kibibytes: u64 =
        line.trim().trim_end_matches(" kB").parse().with_context(|| format!("{what}: not a number"))?;
    Ok(kibibytes * 1024)
}

impl Drop for Running {
    fn drop(&mut self) {
        // The measurement is over.
        let _ended = self.0.kill().and_then(|()| self.0.wait());
    }
}
