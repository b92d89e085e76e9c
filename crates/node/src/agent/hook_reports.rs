//! Evidence that the scheduler's hooks submit for the agent to report.
//!
//! Report numbers only grow, so one process assigns them: the agent, or a hook that holds the lock while no agent runs.
//! A hook writes its evidence into a directory beside the spool and rings the bell; the lock holder picks it up.

use std::{
    fs::{self, File},
    io,
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use doctor_checks::document::{AgentReport, TestEvidence};
use doctor_core::{node::Hardware, time::Span};
use rustix::{fs::FlockOperation, io::Errno};
use serde::{Deserialize, Serialize};

use super::{
    AgentError,
    config::Config,
    drain_permit,
    exchange::{SendOutcome, attempt},
    spool::Spool,
};
use crate::{clock::now, job::output::write_atomically};

const FOLDER: &str = "hook-reports";
const SOCKET_FILE: &str = "bell";

/// Locks the state directory. Only the holder may assign report numbers.
pub(super) fn lock_state(state: &Path) -> Result<File, AgentError> {
    let path = state.join("lock");
    let failed = |source| AgentError::State { path: path.clone(), source };
    let file = File::options().create(true).append(true).open(&path).map_err(failed)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => Err(AgentError::Taken(state.to_owned())),
        Err(error) => Err(failed(error.into())),
    }
}

/// The evidence of one hook run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HookReport {
    pub hardware: Hardware,
    pub uptime: Option<Span>,
    pub checks: Vec<TestEvidence>,
}

/// How submitted evidence was delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubmitOutcome {
    /// The running agent sends it.
    ByAgent,
    /// The controller has accepted it.
    Sent,
    /// It is spooled on disk.
    Spooled,
}

impl HookReport {
    /// Writes the evidence where the agent of this state directory finds it.
    pub fn submit(&self, state: &Path) -> io::Result<()> {
        let name = format!("{}-{}.json", now().millis(), std::process::id());
        write_atomically(&state.join(FOLDER).join(name), &serde_json::to_vec(self).map_err(io::Error::from)?)
    }
}

/// Returns all submitted evidence, the oldest first. Unreadable files are removed.
pub(super) fn pending(state: &Path) -> Vec<(PathBuf, HookReport)> {
    let entries = fs::read_dir(state.join(FOLDER)).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|kind| kind == "json"));
    paths.sort();
    let read = |path: PathBuf| {
        let hook_report = fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        if hook_report.is_none() {
            let _unreadable = fs::remove_file(&path);
        }
        hook_report.map(|hook_report| (path, hook_report))
    };
    paths.into_iter().filter_map(read).collect()
}

/// Builds the report for submitted evidence.
pub(super) fn report(hook_report: HookReport, config: &Config, number: u64) -> AgentReport {
    AgentReport {
        hardware: hook_report.hardware,
        uptime: hook_report.uptime,
        checks: hook_report.checks,
        machine: super::machine::stored_facts(&config.state),
        ..AgentReport::heartbeat(config.route.node.clone(), number, now(), config.route.versions.clone())
    }
}

/// A datagram socket that wakes the running agent when evidence is submitted.
#[derive(Debug)]
pub(super) struct HookSocket(UnixDatagram);

impl HookSocket {
    pub(super) fn bind(state: &Path) -> io::Result<Self> {
        let path = state.join(SOCKET_FILE);
        // Left by an earlier agent: the lock rules out another running one.
        let _removed = fs::remove_file(&path);
        let socket = UnixDatagram::bind(path)?;
        socket.set_nonblocking(true)?;
        Ok(Self(socket))
    }

    pub(super) const fn socket(&self) -> &UnixDatagram {
        &self.0
    }

    /// Returns whether the agent was woken since the last call.
    pub(super) fn take_wakeup(&self) -> bool {
        let mut woken = false;
        while self.0.recv(&mut [0]).is_ok() {
            woken = true;
        }
        woken
    }
}

/// Wakes the agent. Returns whether one is running; a full queue means that it has been woken already.
pub fn wake_agent(state: &Path) -> bool {
    let send = || {
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        socket.send_to(&[1], state.join(SOCKET_FILE))
    };
    match send() {
        Ok(_) => true,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

/// Delivers submitted evidence if no agent runs: numbers it and sends the spool until `limit` has passed.
///
/// # Errors
/// If the state directory cannot be used. An agent that has started meanwhile is no error: it picks the evidence up.
pub fn deliver(config: &Config, limit: Duration) -> io::Result<SubmitOutcome> {
    let deadline = Instant::now() + limit;
    fs::create_dir_all(&config.state)?;
    let _lock = match lock_state(&config.state) {
        Ok(lock) => lock,
        Err(AgentError::Taken(_)) => return Ok(SubmitOutcome::ByAgent),
        Err(error) => return Err(io::Error::other(super::chain(&error))),
    };
    let mut spool = Spool::open(&config.state.join("spool"), config.spool_limits)?;
    for (path, hook_report) in pending(&config.state) {
        let number = spool.number();
        spool.add(&report(hook_report, config, number));
        fs::remove_file(path)?;
    }
    while let Some(next) = spool.next_message() {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            spool.mark_retry();
            return Ok(SubmitOutcome::Spooled);
        }
        let tried = attempt(&config.route, next.message(&config.route), remaining);
        match tried.outcome {
            SendOutcome::Accepted => spool.mark_accepted(&next),
            SendOutcome::Rejected => spool.mark_rejected(&next),
            SendOutcome::Retry(_) => {
                spool.mark_retry();
                return Ok(SubmitOutcome::Spooled);
            }
        }
        // A lost permit is issued again; only a prolog waits for it.
        let _stored = drain_permit::store(&config.state, tried.permit, tried.sent_at);
    }
    Ok(SubmitOutcome::Sent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hook_report() -> HookReport {
        HookReport { hardware: Hardware::default(), uptime: None, checks: Vec::new() }
    }

    #[test]
    fn submitted_reports_wait_until_taken_and_a_truncated_file_is_removed() {
        let state = tempfile::tempdir().unwrap();
        assert!(pending(state.path()).is_empty());
        hook_report().submit(state.path()).unwrap();
        fs::write(state.path().join(FOLDER).join("0-1.json"), "{\"hardware\"").unwrap();
        let submitted = pending(state.path());
        assert_eq!(submitted.iter().map(|(_, report)| report.clone()).collect::<Vec<_>>(), [hook_report()]);
        assert_eq!(fs::read_dir(state.path().join(FOLDER)).unwrap().count(), 1);
    }

    #[test]
    fn only_a_running_agent_is_woken_and_many_wake_ups_are_merged() {
        let state = tempfile::tempdir().unwrap();
        assert!(!wake_agent(state.path()));
        let socket = HookSocket::bind(state.path()).unwrap();
        assert!(!socket.take_wakeup());
        for _ in 0..2000 {
            assert!(wake_agent(state.path()));
        }
        assert!(socket.take_wakeup() && !socket.take_wakeup());
        drop(socket);
        assert!(!wake_agent(state.path()), "its old socket does not answer");
        HookSocket::bind(state.path()).unwrap();
    }
}
