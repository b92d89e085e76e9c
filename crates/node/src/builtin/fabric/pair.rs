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

use doctor_checks::sockets::{TABLES, listens};
use rustix::io::ioctl_fionbio;

use crate::{
    builtin::program::{AtTheEnd, Program},
    runner::child::{self, Echo, Ended, Limits},
    stop::Stop,
};

/// Limit of each stream.
const MOST_BYTES: usize = 256 << 10;
/// Time for a server to listen. Loading libfabric and its providers takes seconds on a busy machine.
const OPENS: Duration = Duration::from_secs(20);
const LOOK_AGAIN: Duration = Duration::from_millis(5);
/// Time for a server to print why its client failed.
const LAST_WORDS: Duration = Duration::from_millis(300);
const KILL_GRACE: Duration = Duration::from_secs(2);

/// The command lines of both sides.
#[derive(Debug, Clone)]
pub(super) struct Sides {
    pub(super) server: Vec<OsString>,
    pub(super) client: Vec<OsString>,
    /// The server's port for its client.
    pub(super) listen: u16,
    pub(super) environment: Option<(&'static str, &'static str)>,
}

/// The output and the client's exit code, or the server's if no client was started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Said {
    /// `None`: ended by a signal.
    pub(super) exit: Option<i32>,
    pub(super) stdout: String,
    pub(super) stderr: String,
    /// Both streams of the server.
    pub(super) server: String,
}

/// The outcome of a run.
#[derive(Debug)]
pub(super) enum Ran {
    Ended(Said),
    /// It did not end within this time and was killed.
    Stalled(Duration),
    /// This process cannot be killed.
    LeftBehind {
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
pub(super) fn run(program: &Program, sides: &Sides, limit: Duration, stop: &Stop) -> io::Result<Ran> {
    let command = |arguments: &[OsString]| {
        let mut command = program.command(AtTheEnd::Kill);
        command.args(arguments).envs(sides.environment);
        command
    };
    let mut server = Server::start(command(&sides.server))?;
    let opened = server.wait_until_it_listens(sides.listen, stop)?;
    let mut ran = match opened {
        Opened::Listens => with_client(&mut server, command(&sides.client), limit, stop)?,
        Opened::Ended => Ran::Ended(Said { server: server.said(), ..Said::default() }),
        Opened::NotInTime => Ran::Stalled(OPENS),
        Opened::Stopped => Ran::Stopped,
    };
    if let Some(pid) = child::end(&mut server.child, Duration::ZERO, KILL_GRACE) {
        return Ok(Ran::LeftBehind { pid, child: server.child });
    }
    if let (Opened::Ended, Ran::Ended(said)) = (opened, &mut ran) {
        said.exit = server.child.wait()?.code();
    }
    Ok(ran)
}

fn with_client(server: &mut Server, mut client: Command, limit: Duration, stop: &Stop) -> io::Result<Ran> {
    let limits = Limits { timeout: limit, stream: MOST_BYTES, grace: Duration::ZERO, kill_grace: KILL_GRACE };
    Ok(match child::run(&mut client, &limits, stop, Echo::default())? {
        Ended::Exited { status, stdout, stderr } => {
            if !status.success() {
                server.wait(LAST_WORDS)?;
            }
            Ran::Ended(Said {
                exit: status.code(),
                stdout: String::from_utf8_lossy(&stdout).into_owned(),
                stderr: String::from_utf8_lossy(&stderr).into_owned(),
                server: server.said(),
            })
        }
        Ended::TimedOut => Ran::Stalled(limit),
        Ended::TooLong => Ran::TooLong,
        Ended::Stopped(_) => Ran::Stopped,
        Ended::Unkillable { pid, child } => Ran::LeftBehind { pid, child },
    })
}

struct Server {
    child: Child,
}

#[derive(Clone, Copy)]
enum Opened {
    Listens,
    Ended,
    NotInTime,
    Stopped,
}

impl Server {
    /// Starts the server. It prints less than a pipe holds; one that prints more blocks, and is ended at the limit.
    fn start(mut command: Command) -> io::Result<Self> {
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(Self { child: command.spawn()? })
    }

    fn wait_until_it_listens(&self, port: u16, stop: &Stop) -> io::Result<Opened> {
        let begun = Instant::now();
        loop {
            if TABLES.iter().any(|table| fs::read_to_string(table).is_ok_and(|text| listens(&text, port))) {
                return Ok(Opened::Listens);
            }
            if child::has_exited(&self.child)? {
                return Ok(Opened::Ended);
            }
            if stop.told().is_some() {
                return Ok(Opened::Stopped);
            }
            if begun.elapsed() > OPENS {
                return Ok(Opened::NotInTime);
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn wait(&self, patience: Duration) -> io::Result<()> {
        let begun = Instant::now();
        while !child::has_exited(&self.child)? && begun.elapsed() < patience {
            std::thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }

    /// Returns its output so far.
    fn said(&mut self) -> String {
        let mut bytes = Vec::new();
        if let Some(pipe) = self.child.stdout.as_mut() {
            read_what_is_there(pipe, &mut bytes);
        }
        if let Some(pipe) = self.child.stderr.as_mut() {
            read_what_is_there(pipe, &mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn read_what_is_there(pipe: &mut (impl Read + AsFd), bytes: &mut Vec<u8>) {
    if ioctl_fionbio(&pipe, true).is_ok() {
        // The read ends with an error when the pipe is empty.
        let _all = pipe.take(MOST_BYTES as u64).read_to_end(bytes);
    }
}
