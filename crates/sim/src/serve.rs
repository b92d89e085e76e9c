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
    wire::{Answer, Ask, MAX_LINE},
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
const GLANCE: Duration = Duration::from_millis(100);

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
    let served = Served {
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
            if let Some(trouble) = served.world().effects().trouble() {
                break Err(ServeError::Effects(trouble.to_string()));
            }
            match listener.accept() {
                Ok((stream, _)) => {
                    scope.spawn(|| converse(stream, &served, stop));
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

struct Served {
    world: Mutex<World>,
    start: Timestamp,
    began: Instant,
    speed: f64,
}

impl Served {
    /// Returns the world, advanced to the current time.
    fn world(&self) -> MutexGuard<'_, World> {
        let mut world = self.world.lock().unwrap_or_else(PoisonError::into_inner);
        let elapsed = self.began.elapsed().as_secs_f64() * self.speed;
        world.advance_to(self.start.plus(scaled(Span::from_secs(1), elapsed)));
        world
    }
}

/// Answers the requests of one controller until it disconnects.
fn converse(stream: UnixStream, served: &Served, stop: &AtomicBool) {
    let Ok(mut out) = stream.try_clone() else { return };
    // A read without timeout would keep the process from ending.
    if stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(GLANCE))).is_err() {
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
            Ok(ask) => answer(served, ask),
            Err(error) => Answer::Refused(error.to_string()),
        };
        line.clear();
        let Ok(mut bytes) = serde_json::to_vec(&answer) else { return };
        bytes.push(b'\n');
        if out.write_all(&bytes).is_err() {
            return;
        }
    }
}

fn answer(served: &Served, ask: Ask) -> Answer {
    let mut world = served.world();
    let said = match ask {
        Ask::Hello => {
            let caps = world.config().caps;
            Ok(Answer::Hello { caps, speed: served.speed, now: world.controller_now() })
        }
        Ask::Now => Ok(Answer::Now(world.controller_now())),
        Ask::Snapshot => world.snapshot().map(|nodes| Answer::Nodes(nodes.into_iter().map(Into::into).collect())),
        Ask::Submit(job) => match job.into_request() {
            Some(request) => world.submit(&request).map(Answer::Job),
            None => Ok(Answer::Failed {
                text: "the run's key is not 64 hexadecimal digits".to_owned(),
                effect: crate::wire::WireEffect::NoneGiveUp,
            }),
        },
        Ask::FailedWork(since) => {
            world.failed_work(since).map(|failed| Answer::Failures(failed.into_iter().map(Into::into).collect()))
        }
        Ask::Poll(runs) => world.poll(&runs).map(|jobs| Answer::Polled(jobs.into_iter().map(Into::into).collect())),
        Ask::Cancel(run) => world.cancel(run).map(|()| Answer::Done),
        Ask::Apply { node, op, what } => world.apply(&node, &what.into_op(op)).map(|()| Answer::Done),
        Ask::Reports => Ok(Answer::Reports(world.agent_reports().into_iter().map(Into::into).collect())),
        Ask::Acknowledge(numbers) => {
            world.acknowledge_reports(&numbers);
            Ok(Answer::Done)
        }
        Ask::AgentKey(node) => Ok(Answer::Key(world.agent_key(&node).to_hex())),
        Ask::OperatorRequests => {
            Ok(Answer::Requests(world.take_operator_requests().into_iter().map(Into::into).collect()))
        }
        Ask::Inject(incident) => Ok(Answer::Injected(world.inject(&incident))),
        Ask::Truth => Ok(Answer::Truth(world.truth())),
    };
    said.unwrap_or_else(Into::into)
}
