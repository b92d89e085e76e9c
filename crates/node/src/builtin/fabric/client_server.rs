//! Runs a server and a client on this machine: starts the server, waits until it listens, runs the client to its end,
//! and ends both.

use std::{
    ffi::OsString,
    fs,
    io::{self, Read},
    net::{Ipv4Addr, TcpListener},
    os::{fd::AsFd, unix::process::CommandExt as _},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use doctor_checks::sockets::{TABLES, is_listening};
use rustix::io::ioctl_fionbio;

use crate::{
    builtin::program::{EndSignal, Program},
    runner::child::{self, ChildOutcome, Echo, Limits},
    stop::Stop,
};

/// Limit of each stream.
const MAX_BYTES: usize = 256 << 10;
/// Time for a server to listen. Loading libfabric and its providers takes seconds on a busy machine.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time for a server to print why its client failed.
const SERVER_OUTPUT_GRACE: Duration = Duration::from_millis(300);
const KILL_GRACE: Duration = Duration::from_secs(2);

/// The command lines of both sides.
#[derive(Debug, Clone)]
pub(super) struct CommandLines {
    pub(super) server: Vec<OsString>,
    pub(super) client: Vec<OsString>,
    /// The server's port for its client.
    pub(super) listen: u16,
    pub(super) environment: Option<(&'static str, &'static str)>,
}

/// The output and the client's exit code, or the server's if no client was started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PairOutput {
    /// `None`: ended by a signal.
    pub(super) exit: Option<i32>,
    pub(super) stdout: String,
    pub(super) stderr: String,
    /// Both streams of the server.
    pub(super) server: String,
}

/// The outcome of a run.
#[derive(Debug)]
pub(super) enum PairOutcome {
    Finished(PairOutput),
    /// It did not end within this time and was killed.
    Stalled(Duration),
    /// This process cannot be killed.
    Unkillable {
        pid: u32,
        child: Child,
    },
    /// It printed more than the limit.
    TooLong,
    Stopped,
}

/// Returns a free port. If another process takes it first, the server reports that.
pub(super) fn free_port() -> io::Result<u16> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr()).map(|address| address.port())
}

/// Runs both to the client's end, within `limit` from when the server listens.
///
/// # Errors
/// If one of them cannot be started.
pub(super) fn run(program: &Program, sides: &CommandLines, limit: Duration, stop: &Stop) -> io::Result<PairOutcome> {
    let command = |arguments: &[OsString]| {
        let mut command = program.command(EndSignal::Kill);
        command.args(arguments).envs(sides.environment);
        command
    };
    let mut server = Server::start(command(&sides.server))?;
    let opened = server.wait_until_listening(sides.listen, stop)?;
    let mut ran = match opened {
        ServerState::Listening => with_client(&mut server, command(&sides.client), limit, stop)?,
        ServerState::Ended => PairOutcome::Finished(PairOutput { server: server.output(), ..PairOutput::default() }),
        ServerState::TimedOut => PairOutcome::Stalled(LISTEN_TIMEOUT),
        ServerState::Stopped => PairOutcome::Stopped,
    };
    if let Some(pid) = child::end(&mut server.child, Duration::ZERO, KILL_GRACE) {
        return Ok(PairOutcome::Unkillable { pid, child: server.child });
    }
    if let (ServerState::Ended, PairOutcome::Finished(output)) = (opened, &mut ran) {
        output.exit = server.child.wait()?.code();
    }
    Ok(ran)
}

fn with_client(server: &mut Server, mut client: Command, limit: Duration, stop: &Stop) -> io::Result<PairOutcome> {
    let limits = Limits { timeout: limit, max_stream_bytes: MAX_BYTES, grace: Duration::ZERO, kill_grace: KILL_GRACE };
    Ok(match child::run(&mut client, &limits, stop, Echo::default())? {
        ChildOutcome::Exited { status, stdout, stderr } => {
            if !status.success() {
                server.wait(SERVER_OUTPUT_GRACE)?;
            }
            PairOutcome::Finished(PairOutput {
                exit: status.code(),
                stdout: String::from_utf8_lossy(&stdout).into_owned(),
                stderr: String::from_utf8_lossy(&stderr).into_owned(),
                server: server.output(),
            })
        }
        ChildOutcome::TimedOut => PairOutcome::Stalled(limit),
        ChildOutcome::TooLong => PairOutcome::TooLong,
        ChildOutcome::Stopped(_) => PairOutcome::Stopped,
        ChildOutcome::Unkillable { pid, child } => PairOutcome::Unkillable { pid, child },
    })
}

struct Server {
    child: Child,
}

#[derive(Clone, Copy)]
enum ServerState {
    Listening,
    Ended,
    TimedOut,
    Stopped,
}

impl Server {
    /// Starts the server. It prints less than a pipe holds; one that prints more blocks, and is ended at the limit.
    fn start(mut command: Command) -> io::Result<Self> {
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(Self { child: command.spawn()? })
    }

    fn wait_until_listening(&self, port: u16, stop: &Stop) -> io::Result<ServerState> {
        let started = Instant::now();
        loop {
            if TABLES.iter().any(|table| fs::read_to_string(table).is_ok_and(|text| is_listening(&text, port))) {
                return Ok(ServerState::Listening);
            }
            if child::has_exited(&self.child)? {
                return Ok(ServerState::Ended);
            }
            if stop.requested().is_some() {
                return Ok(ServerState::Stopped);
            }
            if started.elapsed() > LISTEN_TIMEOUT {
                return Ok(ServerState::TimedOut);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn wait(&self, timeout: Duration) -> io::Result<()> {
        let started = Instant::now();
        while !child::has_exited(&self.child)? && started.elapsed() < timeout {
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns its output so far.
    fn output(&mut self) -> String {
        let mut bytes = Vec::new();
        if let Some(pipe) = self.child.stdout.as_mut() {
            read_available(pipe, &mut bytes);
        }
        if let Some(pipe) = self.child.stderr.as_mut() {
            read_available(pipe, &mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn read_available(pipe: &mut (impl Read + AsFd), bytes: &mut Vec<u8>) {
    if ioctl_fionbio(&pipe, true).is_ok() {
        // The read ends with an error when the pipe is empty.
        let _all = pipe.take(MAX_BYTES as u64).read_to_end(bytes);
    }
}
