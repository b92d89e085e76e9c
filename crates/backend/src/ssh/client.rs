//! Runs an arbitrary command on a host. Returns its output and exit code, or why these are unknown.
//!
//! The SSH backend itself queries hosts through `doctor-node`; this client is for manual work on hosts, where the result is a
//! command's output. [`FramedOutput`] separates that output from other text on the connection.

use std::{
    fs::{self, File},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use crate::process::{self, Group, Limits, ProcessEnd};
use doctor_checks::proc_stat::ProcStat;
use doctor_host::{
    occupancy,
    process::boot_id,
    protocol::{HostRequest, HostResponse, StatusQuery},
};

use super::{
    config::SshConfig,
    framed_output::{FramedOutput, ParsedOutput, START_WORD},
    hosts::Host,
    remote_program::HostRequester,
    session::SshConnector,
};

/// The host enforces the time limit. If it does not, the client stops waiting after this much longer.
const MARGIN: Duration = Duration::from_secs(5);
/// Seconds between SIGTERM and SIGKILL on the host.
const KILL_AFTER: u64 = 2;

/// Runs commands on hosts.
#[derive(Debug)]
pub struct SshClient {
    connector: SshConnector,
    as_root: Vec<String>,
    config: SshConfig,
    sockets: Option<PathBuf>,
    installer: std::sync::OnceLock<Result<HostRequester, String>>,
}

/// A command to run on a host.
#[derive(Debug, Clone)]
pub struct RemoteCommand<'a> {
    /// For a POSIX shell on the host.
    pub script: &'a str,
    /// Its standard input.
    pub input: &'a [u8],
    /// Counted from the connection on.
    pub limit: Duration,
    /// How many bytes of each stream are kept.
    pub max_output: usize,
    pub root: RootAccess,
}

/// Whether a command runs as root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RootAccess {
    No,
    /// With the prefix `as_root`, if it is set.
    IfConfigured,
    /// With the prefix `as_root`. If it is empty, the login user must be root; otherwise nothing is run.
    Yes,
}

impl RootAccess {
    /// Translates an operator's choice.
    pub const fn from_flag(root: bool) -> Self {
        if root { Self::Yes } else { Self::No }
    }
}

/// The exit code on a host where the command requires root and cannot get it.
const NOT_ROOT: i32 = 126;
const NOT_ROOT_MESSAGE: &str =
    "the login user is not root, and `as_root` under [backend.ssh] is empty: set it, for example to [\"sudo\", \"-n\"]";

/// The result of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandResult {
    pub status: CommandStatus,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// How many bytes of both streams exceeded the limit and were dropped.
    pub dropped_bytes: u64,
    pub duration: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandStatus {
    /// The command's own exit code, whatever `ssh` returned. A signal is 128 plus its number, as in shells.
    Exited(i32),
    /// It exceeded its time. `ended`: the host ended it; otherwise it may still run.
    TimedOut { ended: bool },
    /// It was not started: the host waits for a start word, which was not sent.
    NotStarted(String),
    /// It may have started, and the connection broke before the exit code arrived.
    ConnectionLost(String),
}

impl SshClient {
    /// Creates a client that opens one connection per command.
    pub fn new(config: &SshConfig) -> Self {
        Self::with(config, None)
    }

    /// Creates a client that shares the service's connections, if it may write to their folder. An operator without access gets
    /// one connection per command.
    pub fn with_shared_connections(config: &SshConfig) -> Self {
        let folder = config.state.join("c");
        let created = fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        let sockets = created.is_ok().then_some(folder).filter(|folder| may_write(folder));
        Self::with(config, sockets)
    }

    fn with(config: &SshConfig, sockets: Option<PathBuf>) -> Self {
        Self {
            connector: SshConnector::new(config, sockets.as_deref()),
            as_root: config.as_root.clone(),
            config: config.clone(),
            sockets,
            installer: std::sync::OnceLock::new(),
        }
    }

    /// Runs a command on one host.
    pub fn run(&self, host: &Host, command: &RemoteCommand<'_>) -> CommandResult {
        self.run_with_listener(host, command, |word| FramedOutput::new(word, command.max_output)).0
    }

    /// Runs a command on one host and writes its output to `file`. Also returns the number of bytes written.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn fetch(
        &self,
        host: &Host,
        command: &RemoteCommand<'_>,
        file: &File,
    ) -> std::io::Result<(CommandResult, usize)> {
        let file = file.try_clone()?;
        let (result, out) =
            self.run_with_listener(host, command, |word| FramedOutput::into_file(word, command.max_output, file));
        match out.write_error {
            Some(why) => Err(std::io::Error::other(why)),
            None => Ok((result, out.output_bytes)),
        }
    }

    /// Runs the command. The text of standard output is moved into the answer.
    fn run_with_listener(
        &self,
        host: &Host,
        command: &RemoteCommand<'_>,
        listener: impl FnOnce(&str) -> FramedOutput,
    ) -> (CommandResult, ParsedOutput) {
        let began = Instant::now();
        let failed = |how| {
            let elapsed = began.elapsed();
            (
                CommandResult {
                    status: how,
                    stdout: Vec::new(),
                    stderr: Vec::new(),
                    dropped_bytes: 0,
                    duration: elapsed,
                },
                ParsedOutput::default(),
            )
        };
        let word = match random_marker() {
            Ok(word) => word,
            Err(error) => return failed(CommandStatus::NotStarted(format!("reading random bytes failed: {error}"))),
        };
        let mut ssh =
            self.connector.command(host, &format!("exec sh -c {}", shell_quote(&self.script(&word, command))));
        let limits =
            Limits { group: Group::Shared, ..Limits::new(self.connector.connect_timeout() + command.limit + MARGIN) };
        let listeners = (listener(&word), FramedOutput::new(&word, command.max_output));
        let input = [START_WORD.as_bytes(), b"\n", command.input].concat();
        let (ended, out, err) = match process::run(&mut ssh, input, limits, listeners) {
            Ok(ran) => ran,
            Err(error) => return failed(CommandStatus::NotStarted(format!("ssh cannot be started: {error}"))),
        };
        let (mut out, err) = (out.into_parsed(), err.into_parsed());
        let elapsed = began.elapsed();
        let how = match (out.code, ended) {
            // `timeout` exits with these codes; before the limit, they are the command's own.
            (Some(124 | 137), _) if elapsed >= command.limit => CommandStatus::TimedOut { ended: true },
            (Some(code), _) => CommandStatus::Exited(code),
            (None, ProcessEnd::TimedOut | ProcessEnd::OutputLimit) if out.started => {
                CommandStatus::TimedOut { ended: false }
            }
            (None, ProcessEnd::TimedOut | ProcessEnd::OutputLimit) => {
                CommandStatus::NotStarted("it does not answer".to_owned())
            }
            (None, ProcessEnd::Exited(_)) if out.started => CommandStatus::ConnectionLost(last_error_line(&err.text)),
            (None, ProcessEnd::Exited(_)) => CommandStatus::NotStarted(last_error_line(&err.preamble)),
        };
        let (stdout, left_out) = (std::mem::take(&mut out.text), out.dropped_bytes + err.dropped_bytes);
        (CommandResult { status: how, stdout, stderr: err.text, dropped_bytes: left_out, duration: elapsed }, out)
    }

    fn script(&self, marker: &str, command: &RemoteCommand<'_>) -> String {
        let secs = command.limit.as_secs().max(1);
        let root = if command.root == RootAccess::No { String::new() } else { self.as_root.join(" ") };
        let input = if command.input.is_empty() { "</dev/null" } else { "" };
        // `timeout` is part of coreutils and busybox; on other hosts only the client enforces the limit.
        let run = format!(
            "T=; if command -v timeout >/dev/null 2>&1; then T=\"timeout -k {KILL_AFTER} {secs}\"; fi; {root} $T sh -c {} {input}",
            shell_quote(command.script)
        );
        if command.root == RootAccess::Yes && self.as_root.is_empty() {
            let why = shell_quote(NOT_ROOT_MESSAGE);
            let run =
                format!("if [ \"$(id -u)\" = 0 ]; then {run}; else printf \"%s\\n\" {why} >&2; (exit {NOT_ROOT}); fi");
            return FramedOutput::wrap_command(marker, &run);
        }
        FramedOutput::wrap_command(marker, &run)
    }

    /// Returns the address that OpenSSH's configuration gives for a host. Makes no connection.
    pub fn address(&self, host: &Host) -> Option<String> {
        self.connector.address(host).ok()
    }

    fn installer(&self) -> Result<&HostRequester, String> {
        let carrier = self.installer.get_or_init(|| HostRequester::new(&self.config, self.sockets.as_deref()));
        carrier.as_ref().map_err(Clone::clone)
    }

    /// Returns the path of `doctor-node` on a host, after installing it if it is missing.
    ///
    /// # Errors
    /// If there is no such program here, or it cannot be copied there.
    pub fn install_program(&self, host: &Host) -> Result<String, String> {
        self.installer()?.ensure_installed(host)
    }

    /// Returns why no work may run on a host, by the rule with which the service determines whether it is free: it is or may be
    /// in use, or is marked. If that cannot be determined, no work may run there either.
    pub fn busy_reason(&self, host: &Host) -> Option<String> {
        let carrier = match self.installer() {
            Ok(carrier) => carrier,
            Err(why) => return Some(why),
        };
        let (locks, bystanders) = (self.config.locks.clone(), self.config.bystanders.clone());
        let request = HostRequest::Status(StatusQuery { runs: Vec::new(), locks, ignored_programs: bystanders });
        let mut status = match carrier.request(host, &request, Duration::ZERO) {
            Ok(HostResponse::Status(status)) => *status,
            Ok(HostResponse::Failed { text }) => return Some(text),
            Ok(_) => return Some("unexpected answer".to_owned()),
            Err(why) => return Some(why.text().to_owned()),
        };
        if status.boot_id == boot_id()
            && let Ok(terminals) = &mut status.terminal_users
        {
            // The host is this machine: the caller's own session is not a user of it.
            terminals.retain(|process| !is_of_our_session(process.pid));
        }
        let of_ours = || status.active_runs.first().map(|run| format!("run {run} of the controller is on it"));
        occupancy::blocked_reason(&status, self.config.max_load_per_core).or_else(of_ours)
    }
}

/// Quotes any text as one word for a POSIX shell.
pub fn shell_quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// Returns a random word that no command or file on a host can contain.
///
/// # Errors
/// If the system provides no random bits.
pub fn random_marker() -> Result<String, getrandom::Error> {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits)?;
    Ok(format!("doctor-{:032x}", u128::from_le_bytes(bits)))
}

fn is_of_our_session(pid: u32) -> bool {
    let session = |process: &str| {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        ProcStat::parse(&stat).map(|stat| stat.session)
    };
    session("self").is_some_and(|own_session| session(&pid.to_string()) == Some(own_session))
}

fn last_error_line(noise: &[u8]) -> String {
    let text = String::from_utf8_lossy(noise);
    let last = text.lines().rev().map(str::trim).find(|line| !line.is_empty());
    last.unwrap_or("the connection closed without a message").chars().take(300).collect()
}

fn may_write(folder: &Path) -> bool {
    use rustix::fs::{Access, access};
    access(folder, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quoted_argument_reaches_the_shell_unchanged() {
        for text in ["plain", "it's", "$(id) `id` \"x\" \\ ! * ;", "'", "a\nb", ""] {
            let output =
                std::process::Command::new("sh").args(["-c", &format!("printf %s {}", shell_quote(text))]).output();
            assert_eq!(String::from_utf8(output.unwrap().stdout).unwrap(), text);
        }
    }

    #[test]
    fn the_last_line_of_stderr_is_reported() {
        assert_eq!(last_error_line(b"Welcome\n\nssh: Connection refused\r\n\n"), "ssh: Connection refused");
        assert_eq!(last_error_line(b""), "the connection closed without a message");
    }

    #[test]
    fn markers_are_unique() {
        assert_ne!(random_marker().unwrap(), random_marker().unwrap());
    }
}
