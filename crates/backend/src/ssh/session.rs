//! One connection to a host: a remote command of the system's `ssh`, with lines of text in both directions and a deadline.
//!
//! Connections are kept open and shared (ControlMaster), so that only the first request to a host needs a handshake. One to a host
//! that no longer answers ends by itself after 15 seconds; a new one that hangs is killed at the session's deadline. The exit
//! code of `ssh` is ignored: 255 may mean that it could not connect, be the remote command's own code, or be a shell's code for a
//! signal. Only the received lines count.

use std::{
    cell::Cell,
    ffi::OsString,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    path::Path,
    process::{Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use doctor_host::protocol::MAX_RESPONSE_BYTES;

use super::{config::SshConfig, hosts::Host};
use crate::{
    deadline::{self, Deadline, TIME_IS_UP},
    process::{ChildProcess, Group},
};

/// How much of the error output of `ssh` is kept, in bytes.
const MAX_STDERR: u64 = 16 * 1024;
/// The environment variables that `ssh` needs.
const PASSED_ENVIRONMENT: [&str; 5] = ["PATH", "HOME", "USER", "LOGNAME", "SSH_AUTH_SOCK"];
/// `ssh` asks a silent host for an answer at this interval, and ends the connection after so many questions without one.
/// It does so without a message, also while the host is silent in the exchange of keys.
const ALIVE_INTERVAL: Duration = Duration::from_secs(5);
const ALIVE_QUESTIONS: u32 = 3;
/// How often a session checks whether the call that it works for was cancelled.
const CANCEL_CHECK: Duration = Duration::from_millis(100);
/// How long to wait for the end of `ssh` after the last line.
const EXIT_WAIT: Duration = Duration::from_secs(2);

/// Opens connections to hosts.
#[derive(Debug)]
pub struct SshConnector {
    options: Vec<OsString>,
    connect_timeout: Duration,
}

impl SshConnector {
    /// Keeps connections as sockets in the folder `sockets`, which only this user may enter: access to a socket is access to the
    /// host. `None`: connections are not kept.
    pub fn new(config: &SshConfig, sockets: Option<&Path>) -> Self {
        let mut options: Vec<OsString> = Vec::new();
        if let Some(file) = &config.ssh_config {
            options.extend(["-F".into(), file.into()]);
        }
        let mut set = |name: &str, value: OsString| {
            let mut word = OsString::from(format!("{name}="));
            word.push(value);
            options.extend(["-o".into(), word]);
        };
        set("BatchMode", "yes".into());
        set("StrictHostKeyChecking", config.host_keys.word().into());
        if let Some(file) = &config.known_hosts {
            set("UserKnownHostsFile", file.into());
        }
        set("ConnectTimeout", config.connect.to_std().as_secs().max(1).to_string().into());
        set("ConnectionAttempts", "1".into());
        match sockets {
            Some(folder) => {
                set("ControlMaster", "auto".into());
                set("ControlPath", folder.join("%C").into());
                set("ControlPersist", "120".into());
            }
            None => set("ControlPath", "none".into()),
        }
        set("ServerAliveInterval", ALIVE_INTERVAL.as_secs().to_string().into());
        set("ServerAliveCountMax", ALIVE_QUESTIONS.to_string().into());
        set("ClearAllForwardings", "yes".into());
        set("PermitLocalCommand", "no".into());
        set("RemoteCommand", "none".into());
        set("RequestTTY", "no".into());
        set("LogLevel", "ERROR".into());
        options.extend(["-a", "-x"].map(OsString::from));
        Self { options, connect_timeout: config.connect.to_std() }
    }

    /// Runs a script in a POSIX shell on a host. It must not contain a single quote. The session ends after the connect timeout
    /// and `limit`, or with the call that it works for.
    pub fn open_session(&self, host: &Host, script: &str, limit: Duration) -> Result<SshSession, String> {
        let mut ssh = self.ssh(host, &[]);
        ssh.arg(format!("exec sh -c '{script}'"));
        start_session(&mut ssh, self.connect_timeout + limit)
    }

    /// Returns the address that OpenSSH's configuration gives for a host. Makes no connection.
    pub fn address(&self, host: &Host) -> Result<String, String> {
        let session = start_session(&mut self.ssh(host, &["-G"]), self.connect_timeout)?;
        loop {
            let output = session.read_line().map_err(|why| format!("`ssh -G` printed no address: {why}"))?;
            if let Some(address) = String::from_utf8_lossy(&output).strip_prefix("hostname ") {
                return Ok(address.trim().to_owned());
            }
        }
    }

    /// Returns an `ssh` command that runs one line in the host's shell.
    pub fn command(&self, host: &Host, line: &str) -> Command {
        let mut ssh = self.plain(host, &[]);
        ssh.arg(line);
        ssh
    }

    /// Returns the limit for connecting.
    pub const fn connect_timeout(&self) -> Duration {
        self.connect_timeout
    }

    /// Returns `ssh` with all options and piped streams, for line-by-line use.
    fn ssh(&self, host: &Host, extra_args: &[&str]) -> Command {
        let mut ssh = self.plain(host, extra_args);
        ssh.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        ssh
    }

    fn plain(&self, host: &Host, extra_args: &[&str]) -> Command {
        let mut ssh = Command::new("ssh");
        ssh.args(&self.options).args(host_args(host)).args(extra_args).arg("--").arg(host.name.as_str());
        let environment = PASSED_ENVIRONMENT.iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        ssh.env_clear().envs(environment).env("LC_ALL", "C.UTF-8");
        ssh
    }
}

fn start_session(ssh: &mut Command, limit: Duration) -> Result<SshSession, String> {
    if deadline::is_over() {
        return Err(TIME_IS_UP.to_owned());
    }
    let ssh = ChildProcess::start(ssh, Group::Own).map_err(|error| format!("ssh cannot be started: {error}"))?;
    Ok(SshSession::new(ssh, deadline::time_left(limit)))
}

/// Returns the options of a host file's line.
fn host_args(host: &Host) -> Vec<OsString> {
    let mut args: Vec<OsString> = Vec::new();
    let mut add = |flag: &str, value: Option<OsString>| {
        args.extend(value.into_iter().flat_map(|value| [OsString::from(flag), value]));
    };
    add("-l", host.user.as_ref().map(Into::into));
    add("-p", host.port.map(|port| port.to_string().into()));
    add("-J", host.jump.as_ref().map(Into::into));
    add("-i", host.key.clone().map(Into::into));
    add("-o", host.address.as_ref().map(|address| format!("HostName={address}").into()));
    args
}

/// A connection, until it is dropped or its deadline passes.
#[derive(Debug)]
pub struct SshSession {
    ssh: ChildProcess,
    lines: Receiver<Vec<u8>>,
    stderr: Receiver<Vec<u8>>,
    limit: Duration,
    deadline: Instant,
    /// When the last line was received, or the session was started.
    heard: Cell<Instant>,
    /// The call that it works for, which may be cancelled.
    call: Option<Deadline>,
}

/// Why no line was received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SshSessionError {
    /// The connection has ended.
    Closed(String),
    /// The deadline passed, this long after the session was started.
    TimedOut(Duration),
    /// The call was cancelled, or its lease ended, before the deadline. This says nothing about the host.
    Cancelled,
}

impl std::fmt::Display for SshSessionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Closed(text) => write!(f, "{text}"),
            Self::TimedOut(limit) => write!(f, "it did not answer within {} s", limit.as_secs().max(1)),
            Self::Cancelled => write!(f, "not waited for any longer: the call was cancelled or the lease has ended"),
        }
    }
}

impl SshSession {
    fn new(mut ssh: ChildProcess, limit: Duration) -> Self {
        let (sender, lines) = mpsc::channel();
        if let Some(output) = ssh.take_stdout() {
            std::thread::spawn(move || {
                let mut output = BufReader::new(output.take(MAX_RESPONSE_BYTES));
                loop {
                    let mut line = Vec::new();
                    match output.read_until(b'\n', &mut line) {
                        // A line without a line break was truncated and does not count.
                        Ok(1..) if line.pop() == Some(b'\n') && sender.send(line).is_ok() => {}
                        _ => return,
                    }
                }
            });
        }
        let (stderr_sender, stderr) = mpsc::channel();
        if let Some(errors) = ssh.take_stderr() {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                // If the stream breaks, the bytes read so far are the result; the receiver may be gone.
                let _broken = errors.take(MAX_STDERR).read_to_end(&mut text);
                let _late = stderr_sender.send(text);
            });
        }
        let now = Instant::now();
        let (deadline, heard) = (now + limit, Cell::new(now));
        Self { ssh, lines, stderr, limit, deadline, heard, call: Deadline::current() }
    }

    /// Returns the time until the deadline; zero also if the call was cancelled.
    fn left(&self) -> Duration {
        let left = self.deadline.saturating_duration_since(Instant::now());
        self.call.as_ref().map_or(left, |call| left.min(call.left()))
    }

    /// Returns the next line.
    pub fn read_line(&self) -> Result<Vec<u8>, SshSessionError> {
        loop {
            let left = self.left();
            match self.lines.recv_timeout(left.min(CANCEL_CHECK)) {
                Ok(line) => {
                    self.heard.set(Instant::now());
                    return Ok(line);
                }
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Err(self.why_over()),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(SshSessionError::Closed(self.error_summary())),
            }
        }
    }

    fn why_over(&self) -> SshSessionError {
        let is_cancelled = self.call.as_ref().is_some_and(Deadline::is_cancelled);
        if is_cancelled && Instant::now() < self.deadline {
            SshSessionError::Cancelled
        } else {
            SshSessionError::TimedOut(self.limit)
        }
    }

    /// Sends these bytes and closes the standard input.
    pub fn send_and_close(&mut self, bytes: Vec<u8>) {
        if let Some(mut input) = self.ssh.take_stdin() {
            // The remote command may end without reading all of its input.
            std::thread::spawn(move || input.write_all(&bytes).and_then(|()| input.flush()));
        }
    }

    fn error_summary(&self) -> String {
        let waited = self.heard.get().elapsed();
        let text = self.stderr.recv_timeout(EXIT_WAIT).unwrap_or_default();
        why_closed(&String::from_utf8_lossy(&text), waited)
    }
}

/// Prefixes of [`SshSessionError::Closed`] for a host whose key is unknown, or differs from the known one.
pub const KEY_UNKNOWN: &str = "its host key is not known";
pub const KEY_CHANGED: &str = "its host key has changed";

/// Returns why a connection closed after this long without a line.
fn why_closed(stderr: &str, waited: Duration) -> String {
    let silence = ALIVE_INTERVAL * ALIVE_QUESTIONS;
    if stderr.trim().is_empty() && waited >= silence {
        // Not how long it was: a text that differs at each attempt would be recorded each time.
        return format!("it did not answer within {} s", silence.as_secs());
    }
    summarize_stderr(stderr)
}

/// Summarises the error output of `ssh` in one line: usually the last one. The reason for a refused key is in an earlier one.
fn summarize_stderr(text: &str) -> String {
    let last = text.lines().rev().map(str::trim).find(|line| !line.is_empty());
    let last = last.unwrap_or("the connection closed without a message");
    let key = if text.contains("IDENTIFICATION HAS CHANGED") {
        Some(KEY_CHANGED)
    } else {
        text.contains("host key is known for").then_some(KEY_UNKNOWN)
    };
    let summary = key.map_or_else(|| last.to_owned(), |key| format!("{key}: {last}"));
    summary.chars().take(300).collect()
}

impl Drop for SshSession {
    fn drop(&mut self) {
        drop(self.ssh.take_stdin());
        let left = self.left();
        // If it has not ended by then, dropping it kills it.
        self.ssh.wait_up_to(left.min(EXIT_WAIT));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a session with a process that prints nothing.
    fn silent_session(call: &Deadline, limit: Duration) -> SshSession {
        let mut command = Command::new("sleep");
        command.arg("600").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        deadline::enter(Some(call.clone()), || start_session(&mut command, limit)).unwrap()
    }

    #[test]
    fn a_cancelled_session_does_not_blame_the_host() {
        const HOUR: Duration = Duration::from_secs(3600);
        let call = Deadline::after(HOUR);
        let session = silent_session(&call, HOUR);
        call.cancel();
        assert_eq!(session.read_line(), Err(SshSessionError::Cancelled));
        let lease = crate::progress::Progress::default();
        let session = silent_session(&Deadline::of_change(HOUR, Some(lease.effects_permit())), HOUR);
        lease.end_effects(0);
        assert_eq!(session.read_line(), Err(SshSessionError::Cancelled));
        // Without an answer until its own deadline, or that of its call, it does.
        let second = Duration::from_secs(1);
        let session = silent_session(&Deadline::after(HOUR), second);
        assert_eq!(session.read_line(), Err(SshSessionError::TimedOut(second)));
        let session = silent_session(&Deadline::after(second * 5), HOUR);
        assert!(matches!(session.read_line(), Err(SshSessionError::TimedOut(limit)) if limit <= second * 5));
    }

    /// OpenSSH 9.2 prints nothing when it ends the connection to a silent host.
    #[test]
    fn a_connection_that_closes_without_a_message_after_a_long_silence_was_to_a_silent_host() {
        let [short, long] = [3, 16].map(Duration::from_secs);
        assert_eq!(why_closed("", short), "the connection closed without a message");
        assert_eq!(why_closed("\r\n", long), "it did not answer within 15 s");
        assert_eq!(why_closed("Connection reset by peer\r\n", long), "Connection reset by peer");
    }

    /// As OpenSSH 9.2 prints it.
    #[test]
    fn the_reason_for_a_rejected_host_key_is_reported() {
        for (text, expected) in [
            ("", "the connection closed without a message"),
            (
                "ssh: connect to host 127.0.1.1 port 22: Connection refused\r\n",
                "ssh: connect to host 127.0.1.1 port 22: Connection refused",
            ),
            (
                "No ED25519 host key is known for [127.0.1.1]:22022 and you have requested strict checking.\r\nHost key verification failed.\r\n",
                "its host key is not known: Host key verification failed.",
            ),
            (
                "@@@@@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n@@@@\nHost key verification failed.\n",
                "its host key has changed: Host key verification failed.",
            ),
        ] {
            assert_eq!(summarize_stderr(text), expected);
        }
    }
}
