//! DCGM's host engine: the running one, or our own for the time of the test.
//!
//! A running engine is a service of the site and stays. Ours is owned by a separate process, the keeper. The keeper
//! starts the engine, waits for the end of its standard input, which is the end of the test in whatever way, and ends
//! the engine with all its descendants. A second engine is never started beside a running one: NVIDIA warns that the
//! two can block each other in the driver.
//!
//! Ours listens at the address of the missing one: DCGM's worker connects to that address by itself.

use std::{
    env,
    ffi::OsString,
    fs::{self, DirBuilder},
    io::{self, Read as _},
    net::{SocketAddr, TcpStream, ToSocketAddrs as _},
    os::{
        fd::AsFd,
        unix::{fs::DirBuilderExt as _, net::UnixStream, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, ExitCode, Stdio},
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use doctor_core::observation::{FailureKind, ProbeFailure};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid},
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::{
    builtin::{
        SELF_EXE,
        program::{EndSignal, Program},
    },
    runner::{BUILTIN_ARGUMENT, child, hung_probes::processes},
    stop::Stop,
};

/// The subtask name of the keeper.
pub(in crate::builtin) const SUBTASK: &str = "dcgm-keep";
/// The engine's program.
pub(super) const ENGINE: &str = "nv-hostengine";

const DEFAULT_PORT: u16 = 5555;
/// A listener on this machine accepts immediately.
const CONNECT: Duration = Duration::from_secs(2);
/// Without persistence mode each GPU is initialised first. The engine's own service allows as long.
const START: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time for the engine to exit by itself, and for the rest to be gone after a kill.
const GRACE: Duration = Duration::from_secs(5);
const KILL_GRACE: Duration = Duration::from_secs(2);
/// How long to wait for the keeper. After that it continues on its own.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
pub(super) const SHORT_KEEPER_TIMEOUT: Duration = Duration::from_millis(300);

/// Where an engine listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl Address {
    /// Parses an address.
    ///
    /// # Errors
    /// If it is not an address; the error shows examples.
    pub(super) fn parse(text: &str) -> Result<Self, ProbeFailure> {
        if let Some(path) = text.strip_prefix("unix://") {
            return Ok(Self::Unix(PathBuf::from(path)));
        }
        let with_port = text.to_socket_addrs().ok().and_then(|mut all| all.next());
        let address = with_port.or_else(|| (text, DEFAULT_PORT).to_socket_addrs().ok()?.next());
        address.map(Self::Tcp).ok_or_else(|| {
            let text = format!("`{text}` is not a host engine address; expected 127.0.0.1:5555 or unix:///PATH");
            ProbeFailure::new(FailureKind::Failed, text)
        })
    }

    fn answers(&self) -> bool {
        match self {
            Self::Tcp(address) => TcpStream::connect_timeout(address, CONNECT).is_ok(),
            Self::Unix(path) => UnixStream::connect(path).is_ok(),
        }
    }

    fn is_local(&self) -> bool {
        match self {
            Self::Tcp(address) => address.ip().is_loopback(),
            Self::Unix(_) => true,
        }
    }

    /// The engine's arguments to listen there.
    fn arguments(&self) -> Vec<OsString> {
        match self {
            Self::Tcp(address) => {
                ["-b".into(), address.ip().to_string().into(), "-p".into(), address.port().to_string().into()].into()
            }
            Self::Unix(path) => ["-d".into(), path.into()].into(),
        }
    }
}

/// The engine that runs the diagnostics.
#[derive(Debug)]
pub(super) enum Engine {
    /// It ran before and stays.
    Running,
    Started(EngineKeeper),
}

/// The keeper of our engine.
#[derive(Debug)]
pub(super) struct EngineKeeper {
    keeper: Child,
    /// Dropped to end the keeper.
    input: Option<ChildStdin>,
}

impl Engine {
    /// Connects to the engine at this address, or starts one. `running` is the pid of an engine elsewhere on this
    /// machine.
    ///
    /// # Errors
    /// If there is none and none can be started.
    pub(super) fn connect_or_start(
        address: &Address,
        running: Option<u32>,
        dcgmi: &Path,
        stop: &Stop,
    ) -> Result<Self, ProbeFailure> {
        if address.answers() {
            eprintln!("using the running host engine");
            return Ok(Self::Running);
        }
        let failed = |text: String| ProbeFailure::new(FailureKind::Failed, text);
        if let Some(pid) = running {
            let text = format!(
                "{ENGINE} runs as process {pid} and does not answer at this address; a second one could block the \
                 driver, so none is started: set `address`"
            );
            return Err(failed(text));
        }
        if !address.is_local() {
            return Err(failed("no host engine answers there; the test starts one only on this machine".to_owned()));
        }
        let directory = dcgmi.parent().unwrap_or_else(|| Path::new("/"));
        let engine =
            Program::find(&directory.join(ENGINE).to_string_lossy(), &[]).or_else(|| Program::find(ENGINE, &[]));
        let missing = || {
            let text = format!("no host engine runs, and {ENGINE} is not installed; it comes with DCGM");
            ProbeFailure::new(FailureKind::NotInstalled, text)
        };
        let mut keeper = EngineKeeper::start(&engine.ok_or_else(missing)?, address)
            .map_err(|error| failed(format!("cannot start the keeper process of {ENGINE}: {error}")))?;
        match keeper.wait_for(address, stop) {
            Ok(()) => {
                eprintln!("started a host engine for this test");
                Ok(Self::Started(keeper))
            }
            Err(failure) => {
                keeper.end(if stop.requested().is_some() { SHORT_KEEPER_TIMEOUT } else { PATIENCE });
                Err(failure)
            }
        }
    }

    /// Ends our engine, and waits for that no longer than `timeout`.
    pub(super) fn end(self, timeout: Duration) {
        if let Self::Started(keeper) = self {
            keeper.end(timeout);
        }
    }
}

impl EngineKeeper {
    fn start(engine: &Program, address: &Address) -> io::Result<Self> {
        let mut command = Command::new(SELF_EXE);
        // In its own process group it can outlive the test.
        command.args([BUILTIN_ARGUMENT, SUBTASK]).arg(&engine.path).args(address.arguments()).process_group(0);
        let mut keeper = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
        let input = keeper.stdin.take();
        Ok(Self { keeper, input })
    }

    fn wait_for(&mut self, address: &Address, stop: &Stop) -> Result<(), ProbeFailure> {
        let started = Instant::now();
        loop {
            if address.answers() {
                return Ok(());
            }
            if stop.requested().is_some() {
                return Err(ProbeFailure::new(FailureKind::Killed, "stopped by a signal"));
            }
            if !matches!(self.keeper.try_wait(), Ok(None)) {
                let text = format!("{ENGINE} ended before it answered; see its output in the log");
                return Err(ProbeFailure::new(FailureKind::Failed, text));
            }
            if started.elapsed() > START {
                let text = format!("{ENGINE} did not answer within {START:?}");
                return Err(ProbeFailure::new(FailureKind::TimedOut, text));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn end(mut self, timeout: Duration) {
        drop(self.input.take());
        let started = Instant::now();
        while matches!(self.keeper.try_wait(), Ok(None)) {
            if started.elapsed() > timeout {
                eprintln!("{ENGINE} is still stopping; its keeper process waits for it");
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Entry point of the keeper's process.
pub(in crate::builtin) fn run_keeper(args: &[OsString]) -> ExitCode {
    // Signals reach it together with the test, which it must outlive: only the end of its input ends it.
    let signalled = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        if signal_hook::flag::register(signal, Arc::clone(&signalled)).is_err() {
            return ExitCode::FAILURE;
        }
    }
    let Some((program, arguments)) = args.split_first() else { return ExitCode::FAILURE };
    let folder = env::temp_dir().join(format!("cluster-doctor-dcgm-{}", std::process::id()));
    // DCGM's worker detaches its children; as subreaper we adopt them.
    let _adopted = set_child_subreaper(Some(getpid()));
    let result = DirBuilder::new().mode(0o700).create(&folder).and_then(|()| {
        let engine = Program { path: PathBuf::from(program) };
        let status = engine_in(&folder, &engine, arguments);
        let _removed = fs::remove_dir_all(&folder);
        status
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{ENGINE}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the engine until the input or the engine ends. Its log and the files of the diagnostics are in `folder`,
/// which is removed.
fn engine_in(folder: &Path, engine: &Program, arguments: &[OsString]) -> io::Result<()> {
    let says = io::stderr().as_fd().try_clone_to_owned()?;
    let mut command = engine.command(EndSignal::Term);
    command.arg("-n").args(arguments).arg("-f").arg(folder.join("log")).current_dir(folder);
    let mut running = command.process_group(0).stdin(Stdio::null()).stdout(says).spawn()?;
    let mut input = io::stdin();
    loop {
        let mut fds = [PollFd::new(&input, PollFlags::IN)];
        let wait = Timespec::try_from(POLL_INTERVAL * 4).map_err(io::Error::other)?;
        if poll(&mut fds, Some(&wait)).is_ok_and(|ready| ready > 0) && !matches!(input.read(&mut [0; 64]), Ok(1..)) {
            break;
        }
        if child::has_exited(&running)? {
            eprintln!("{ENGINE} exited unexpectedly");
            break;
        }
    }
    child::end(&mut running, GRACE, KILL_GRACE);
    kill_adopted();
    Ok(())
}

/// Kills adopted descendants of the engine: DCGM's worker would run for hours.
fn kill_adopted() {
    let own_pid = std::process::id();
    let deadline = Instant::now() + KILL_GRACE;
    while Instant::now() < deadline {
        while matches!(waitpid(None, WaitOptions::NOHANG), Ok(Some(_))) {}
        let remaining: Vec<_> = processes().filter(|stat| stat.parent == own_pid && !stat.has_exited()).collect();
        if remaining.is_empty() {
            return;
        }
        for pid in remaining.iter().filter_map(|stat| Pid::from_raw(i32::try_from(stat.pid).ok()?)) {
            // An error means that the process is gone.
            let _gone = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_with_an_optional_port_or_a_socket() {
        assert_eq!(Address::parse("127.0.0.1:5600").unwrap(), Address::Tcp("127.0.0.1:5600".parse().unwrap()));
        assert_eq!(Address::parse("127.0.0.1").unwrap(), Address::Tcp("127.0.0.1:5555".parse().unwrap()));
        let socket = Address::parse("unix:///run/engine").unwrap();
        assert_eq!((socket.is_local(), socket.arguments()), (true, vec!["-d".into(), "/run/engine".into()]));
        assert!(!Address::parse("192.0.2.1:5555").unwrap().is_local());
        assert!(Address::parse("no such host at all").unwrap_err().text.contains("127.0.0.1:5555"));
    }
}
