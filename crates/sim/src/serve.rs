//! Serves the simulated cluster as a separate process on a Unix socket. Its time is a multiple of real time and passes
//! also without requests, as in a cluster whose controller was killed.

use std::{
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use doctor_core::time::{Span, Timestamp};
use serde::{Deserialize, Serialize};

use crate::{
    config::{BadWorld, WorldConfig},
    machine::scaled,
    wire::{Call, MAX_LINE, Response},
    world::World,
};

/// A world and its speed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServeConfig {
    /// Simulated seconds per real second.
    pub speed: f64,
    pub world: WorldConfig,
}

impl Default for ServeConfig {
    fn default() -> Self {
        Self { speed: 600.0, world: WorldConfig::default() }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("serving the simulated cluster: the world is invalid")]
    World(#[from] BadWorld),
    #[error("serving the simulated cluster: a speed of {0} is not between 0.001 and 1000000")]
    Speed(f64),
    #[error("serving the simulated cluster: another process is already listening on `{0}`")]
    InUse(PathBuf),
    #[error("serving the simulated cluster on `{path}`")]
    Socket { path: PathBuf, source: std::io::Error },
    #[error("serving the simulated cluster: cannot write its record of effects")]
    Effects(String),
}

/// The interval at which the world advances without requests.
const STEP: Duration = Duration::from_millis(5);
/// The interval at which a connection checks the stop flag.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Serves a world until `stop` is set.
///
/// # Errors If the configuration is invalid, the socket cannot be bound, or the record of effects cannot be written: an
/// incomplete record would lead to wrong conclusions.
pub fn serve(config: &ServeConfig, socket: &Path, stop: &AtomicBool) -> Result<(), ServeError> {
    if !(0.001..=1.0e6).contains(&config.speed) {
        return Err(ServeError::Speed(config.speed));
    }
    let at_socket = |source| ServeError::Socket { path: socket.to_owned(), source };
    let listener = listen(socket)?;
    listener.set_nonblocking(true).map_err(at_socket)?;
    let served = SimServer {
        world: Mutex::new(World::new(config.world.clone())?),
        start: config.world.start,
        began: Instant::now(),
        speed: config.speed,
    };
    thread::scope(|scope| {
        let outcome = loop {
            if stop.load(Ordering::Relaxed) {
                break Ok(());
            }
            if let Some(problem) = served.world().effects().trouble() {
                break Err(ServeError::Effects(problem.to_string()));
            }
            match listener.accept() {
                Ok((stream, _)) => {
                    scope.spawn(|| handle_connection(stream, &served, stop));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(STEP),
                Err(source) => break Err(at_socket(source)),
            }
        };
        // End all connections, whatever the outcome.
        stop.store(true, Ordering::Relaxed);
        outcome
    })?;
    std::fs::remove_file(socket).map_err(at_socket)
}

/// Binds the socket, and replaces that of a predecessor that was killed.
fn listen(socket: &Path) -> Result<UnixListener, ServeError> {
    let at_socket = |source| ServeError::Socket { path: socket.to_owned(), source };
    match UnixListener::bind(socket) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            if UnixStream::connect(socket).is_ok() {
                return Err(ServeError::InUse(socket.to_owned()));
            }
            std::fs::remove_file(socket).map_err(at_socket)?;
            UnixListener::bind(socket).map_err(at_socket)
        }
        bound => bound.map_err(at_socket),
    }
}

struct SimServer {
    world: Mutex<World>,
    start: Timestamp,
    began: Instant,
    speed: f64,
}

impl SimServer {
    /// Returns the world, advanced to the current time.
    fn world(&self) -> MutexGuard<'_, World> {
        let mut world = self.world.lock().unwrap_or_else(PoisonError::into_inner);
        let elapsed = self.began.elapsed().as_secs_f64() * self.speed;
        world.advance_to(self.start.plus(scaled(Span::from_secs(1), elapsed)));
        world
    }
}

/// Answers the requests of one controller until it disconnects.
fn handle_connection(stream: UnixStream, served: &SimServer, stop: &AtomicBool) {
    let Ok(mut out) = stream.try_clone() else { return };
    // A read without timeout would keep the process from ending.
    if stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(POLL_INTERVAL))).is_err() {
        return;
    }
    let mut reader = BufReader::new(stream.take(u64::MAX));
    let mut line = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        reader.get_mut().set_limit(MAX_LINE);
        match reader.read_until(b'\n', &mut line) {
            // An incomplete line is from a client that was killed: it is no request.
            Ok(_) if line.last() != Some(&b'\n') => return,
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
            Err(_) => return,
        }
        let answer = match serde_json::from_slice(&line) {
            Ok(call) => respond(served, call),
            Err(error) => Response::Refused(error.to_string()),
        };
        line.clear();
        let Ok(mut bytes) = serde_json::to_vec(&answer) else { return };
        bytes.push(b'\n');
        if out.write_all(&bytes).is_err() {
            return;
        }
    }
}

fn respond(served: &SimServer, call: Call) -> Response {
    let mut world = served.world();
    let response = match call {
        Call::Hello => {
            let caps = world.config().caps;
            Ok(Response::Hello { caps, speed: served.speed, now: world.controller_now() })
        }
        Call::Now => Ok(Response::Now(world.controller_now())),
        Call::Snapshot => world.snapshot().map(|nodes| Response::Nodes(nodes.into_iter().map(Into::into).collect())),
        Call::Submit(job) => match job.into_request() {
            Some(request) => world.submit(&request).map(Response::Job),
            None => Ok(Response::Failed {
                text: "the run's key is not 64 hexadecimal digits".to_owned(),
                effect: crate::wire::WireEffect::NoneGiveUp,
            }),
        },
        Call::FailedWork(since) => {
            world.failed_work(since).map(|failed| Response::Failures(failed.into_iter().map(Into::into).collect()))
        }
        Call::Poll(runs) => world.poll(&runs).map(|jobs| Response::Polled(jobs.into_iter().map(Into::into).collect())),
        Call::RemainingOutput(run) => world.remaining_output(run).map(Response::Output),
        Call::Cancel(run) => world.cancel(run).map(|()| Response::Done),
        Call::Apply { node, op, what } => world.apply(&node, &what.into_op(op)).map(|()| Response::Done),
        Call::Reports => Ok(Response::Reports(world.agent_reports().into_iter().map(Into::into).collect())),
        Call::Acknowledge(numbers) => {
            world.acknowledge_reports(&numbers);
            Ok(Response::Done)
        }
        Call::AgentKey(node) => Ok(Response::Key(world.agent_key(&node).to_hex())),
        Call::OperatorRequests => {
            Ok(Response::Requests(world.take_operator_requests().into_iter().map(Into::into).collect()))
        }
        Call::Inject(incident) => Ok(Response::Injected(world.inject(&incident))),
        Call::Truth => Ok(Response::Truth(world.truth())),
    };
    response.unwrap_or_else(Into::into)
}
