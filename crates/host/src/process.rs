//! Processes of this machine: liveness by process id and start time, and ending a job with all its descendants.

use std::{
    fs,
    time::{Duration, Instant},
};

use doctor_checks::{job_file::JobProcess, proc_stat::ProcStat};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned()).unwrap_or_default()
}

fn stat_of(pid: u32) -> Option<ProcStat> {
    ProcStat::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn processes() -> impl Iterator<Item = ProcStat> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| stat_of(entry.file_name().to_str()?.parse().ok()?))
}

pub fn is_alive(process: &JobProcess) -> bool {
    process.boot_id == boot_id()
        && stat_of(process.pid).is_some_and(|stat| stat.start_ticks == process.start_ticks && !stat.has_exited())
}

/// Sends SIGTERM to the job, unless its process id now belongs to a process with another start time.
pub fn terminate(process: &JobProcess) {
    // The pidfd pins the process: its id cannot be reused between the liveness check and the signal.
    let held = pid(process.pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    if is_alive(process) {
        // An error means that the process has ended in the meantime.
        let _ended = match (held, pid(process.pid)) {
            (Some(held), _) => pidfd_send_signal(held, Signal::TERM),
            (None, Some(pid)) => kill_process(pid, Signal::TERM),
            (None, None) => Ok(()),
        };
    }
}

/// Kills the job and every process of its session. Returns whether all are gone within the limit.
pub fn kill_session(process: &JobProcess, within: Duration) -> bool {
    let deadline = Instant::now() + within;
    loop {
        let members = session(process);
        if members.is_empty() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        for member in members {
            let _gone = pid(member.pid).map(|pid| kill_process(pid, Signal::KILL));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns whether the job's process id still belongs to the job or to the rest of its session.
///
/// The kernel does not reuse an id while a session has it. If another process has the id now, nothing of the job is
/// left, and the session with that id is foreign.
pub fn is_our_session(process: &JobProcess) -> bool {
    process.boot_id == boot_id() && stat_of(process.pid).is_none_or(|stat| stat.start_ticks == process.start_ticks)
}

/// Returns the live processes of the job's session, whose id is the job's process id.
fn session(process: &JobProcess) -> Vec<ProcStat> {
    if !is_our_session(process) {
        return Vec::new();
    }
    processes().filter(|stat| (stat.session == process.pid || stat.pid == process.pid) && !stat.has_exited()).collect()
}

pub fn wait_gone(process: &JobProcess, within: Duration) -> bool {
    let deadline = Instant::now() + within;
    while is_alive(process) {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// Counts the threads of the job's session that run or wait for a disk: its share of the load.
pub fn running_threads(process: &JobProcess) -> usize {
    let threads = |pid: u32| {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let states = tasks.filter_map(|task| ProcStat::parse(&fs::read_to_string(task.path().join("stat")).ok()?));
        states.filter(|stat| matches!(stat.state, 'R' | 'D')).count()
    };
    session(process).iter().map(|stat| threads(stat.pid)).sum()
}

fn pid(number: u32) -> Option<Pid> {
    i32::try_from(number).ok().and_then(Pid::from_raw)
}
