//! The client of a simulated cluster in another process: a backend and a clock that may lose their connection at any
//! time and reconnect, and that report an unknown effect for a call whose answer was lost.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError},
    thread,
    time::{Duration, Instant},
};

use doctor_backend::{
    Backend, BackendError, Effect as After, JobRequest, NodeOp, ObservedJobFailure, ObservedNode, PolledJob,
    clock::Clock, progress::Progress,
};
use doctor_checks::document::RunKey;
use doctor_core::{
    ids::{JobId, NodeName, RunId},
    last_output::LastOutput,
    run::Run,
    snapshot::Capabilities,
    time::{Span, Timestamp},
};

use crate::{
    disruptions::Incident,
    machine::scaled,
    truth::Truth,
    wire::{Call, MAX_LINE, Response, WireChange},
    world::{OperatorRequest, QueuedReport},
};

/// How long a reading of the clock waits for other requests. Then the time is computed from the last reading.
const CLOCK_WAIT: Duration = Duration::from_millis(200);
/// The timeout of an answer.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// The pause between two attempts to connect.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// A simulated cluster in another process.
#[derive(Debug)]
pub struct RemoteSim {
    socket: PathBuf,
    connection: Mutex<Option<BufReader<UnixStream>>>,
    caps: Capabilities,
    speed: f64,
    /// The last reading of the remote clock, and when it was taken.
    last: Mutex<(Timestamp, Instant)>,
    progress: OnceLock<Progress>,
}

#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    #[error("connecting to the simulated cluster on `{path}`: no answer within {within:?}")]
    NoAnswer { path: PathBuf, within: Duration, source: std::io::Error },
    #[error("asking the simulated cluster on `{path}`: {text}")]
    Request { path: PathBuf, text: String },
}

/// How a request failed.
#[derive(Debug)]
enum RequestFailure {
    /// Before anything was sent.
    NotSent(std::io::Error),
    /// After the request may have arrived.
    NoAnswer(std::io::Error),
}

impl RemoteSim {
    /// Connects, and waits up to `within` for the cluster to listen.
    ///
    /// # Errors If no process listens, or the answer is not that of a simulated cluster.
    pub fn connect(socket: &Path, within: Duration) -> Result<Self, RemoteError> {
        let began = Instant::now();
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(_) if began.elapsed() < within => thread::sleep(RETRY_DELAY),
                Err(source) => return Err(RemoteError::NoAnswer { path: socket.to_owned(), within, source }),
            }
        };
        let request_error = |text: String| RemoteError::Request { path: socket.to_owned(), text };
        let mut line = with_timeouts(stream).map_err(|error| request_error(error.to_string()))?;
        match exchange(&mut line, &Call::Hello) {
            Ok(Response::Hello { caps, speed, now }) => Ok(Self {
                socket: socket.to_owned(),
                connection: Mutex::new(Some(line)),
                caps,
                speed,
                last: Mutex::new((now, Instant::now())),
                progress: OnceLock::new(),
            }),
            Ok(other) => Err(request_error(format!("it answered a greeting with {other:?}"))),
            Err(error) => Err(request_error(error.to_string())),
        }
    }

    /// Sends one request and returns its answer. A connection that failed is not used again.
    fn request(&self, ask: &Call) -> Result<Response, RequestFailure> {
        let mut line = lock(&self.connection);
        // Only now: other requests may have held the connection for longer than the lease.
        let is_effect = matches!(ask, Call::Submit(_) | Call::Cancel(_) | Call::Apply { .. });
        if is_effect && self.progress.get().is_some_and(|progress| !progress.effects_allowed()) {
            return Err(RequestFailure::NotSent(std::io::Error::other("the lease has ended")));
        }
        if line.is_none() {
            *line = Some(UnixStream::connect(&self.socket).and_then(with_timeouts).map_err(RequestFailure::NotSent)?);
        }
        let Some(open) = line.as_mut() else {
            return Err(RequestFailure::NotSent(std::io::ErrorKind::NotConnected.into()));
        };
        exchange(open, ask).map_err(|error| {
            *line = None;
            RequestFailure::NoAnswer(error)
        })
    }

    /// Whether the connection is free within a moment. A listener that needs the time does not wait for a cluster that hangs.
    fn is_free_soon(&self) -> bool {
        let began = Instant::now();
        loop {
            match self.connection.try_lock() {
                Err(TryLockError::WouldBlock) if began.elapsed() >= CLOCK_WAIT => return false,
                Err(TryLockError::WouldBlock) => thread::sleep(RETRY_DELAY / 4),
                Ok(_) | Err(TryLockError::Poisoned(_)) => return true,
            }
        }
    }

    /// Sends a read-only request, which may be repeated.
    fn query(&self, operation: &'static str, ask: &Call) -> Result<Response, BackendError> {
        let answer = match self.request(ask) {
            Err(_) => self.request(ask),
            answered => answered,
        };
        match answer {
            Ok(answer) => into_result(operation, answer),
            Err(RequestFailure::NotSent(error) | RequestFailure::NoAnswer(error)) => {
                Err(BackendError { operation, text: error.to_string(), effect: After::NotAppliedRetry })
            }
        }
    }

    /// Sends a changing request once. If it may have arrived, its effect is unknown.
    fn command(&self, operation: &'static str, ask: &Call) -> Result<Response, BackendError> {
        match self.request(ask) {
            Ok(answer) => into_result(operation, answer),
            Err(RequestFailure::NotSent(error)) => {
                Err(BackendError { operation, text: error.to_string(), effect: After::NotAppliedRetry })
            }
            Err(RequestFailure::NoAnswer(error)) => {
                Err(BackendError { operation, text: error.to_string(), effect: After::Unknown })
            }
        }
    }

    /// Returns the agent reports that were not acknowledged yet.
    ///
    /// # Errors If the cluster cannot be reached.
    pub fn agent_reports(&self) -> Result<Vec<QueuedReport>, BackendError> {
        const REPORTS: &str = "agent reports";
        match self.query(REPORTS, &Call::Reports)? {
            Response::Reports(reports) => {
                let reports = reports.into_iter().map(crate::wire::WireReport::into_report).collect::<Option<_>>();
                reports.ok_or_else(|| unexpected_response(REPORTS, "a report that is not bytes"))
            }
            other => Err(unexpected_response(REPORTS, &format!("{other:?}"))),
        }
    }

    /// Acknowledges reports that were stored.
    ///
    /// # Errors If the cluster cannot be reached. A repetition is harmless.
    pub fn acknowledge_reports(&self, numbers: &[u64]) -> Result<(), BackendError> {
        self.command("acknowledge reports", &Call::Acknowledge(numbers.to_vec())).map(drop)
    }

    /// Returns the key that this node's agent was enrolled with.
    ///
    /// # Errors If the cluster cannot be reached.
    pub fn agent_key(&self, node: &NodeName) -> Result<RunKey, BackendError> {
        const KEY: &str = "agent key";
        match self.query(KEY, &Call::AgentKey(node.clone()))? {
            Response::Key(text) => {
                RunKey::from_hex(&text).ok_or_else(|| unexpected_response(KEY, "a key that is not valid"))
            }
            other => Err(unexpected_response(KEY, &format!("{other:?}"))),
        }
    }

    /// Returns the operators' requests since the last call. Requests lost on the way are not repeated.
    ///
    /// # Errors If the cluster cannot be reached.
    pub fn take_operator_requests(&self) -> Result<Vec<OperatorRequest>, BackendError> {
        const REQUESTS: &str = "operator requests";
        match self.command(REQUESTS, &Call::OperatorRequests)? {
            Response::Requests(requests) => Ok(requests.into_iter().map(Into::into).collect()),
            other => Err(unexpected_response(REQUESTS, &format!("{other:?}"))),
        }
    }

    /// Injects an incident into the remote world. See [`crate::World::inject`].
    ///
    /// # Errors If the cluster cannot be reached.
    pub fn inject(&self, incident: &Incident) -> Result<bool, BackendError> {
        const INJECT: &str = "inject";
        match self.command(INJECT, &Call::Inject(incident.clone()))? {
            Response::Injected(done) => Ok(done),
            other => Err(unexpected_response(INJECT, &format!("{other:?}"))),
        }
    }

    /// Returns the truth, for scoring.
    ///
    /// # Errors If the cluster cannot be reached.
    pub fn truth(&self) -> Result<Truth, BackendError> {
        match self.query("truth", &Call::Truth)? {
            Response::Truth(truth) => Ok(truth),
            other => Err(unexpected_response("truth", &format!("{other:?}"))),
        }
    }

    /// Returns the simulated seconds per real second.
    pub const fn speed(&self) -> f64 {
        self.speed
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A poisoned lock is safe: a failed connection is dropped, and a clock reading is complete.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with_timeouts(stream: UnixStream) -> std::io::Result<BufReader<UnixStream>> {
    stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    stream.set_write_timeout(Some(RESPONSE_TIMEOUT))?;
    Ok(BufReader::new(stream))
}

fn exchange(line: &mut BufReader<UnixStream>, ask: &Call) -> std::io::Result<Response> {
    let mut bytes = serde_json::to_vec(ask)?;
    bytes.push(b'\n');
    line.get_mut().write_all(&bytes)?;
    bytes.clear();
    line.by_ref().take(MAX_LINE).read_until(b'\n', &mut bytes)?;
    if bytes.last() != Some(&b'\n') {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&bytes)?)
}

fn into_result(operation: &'static str, answer: Response) -> Result<Response, BackendError> {
    match answer {
        Response::Failed { text, effect } => Err(BackendError { operation, text, effect: effect.into() }),
        Response::Refused(text) => Err(BackendError { operation, text, effect: After::NotAppliedPermanent }),
        other => Ok(other),
    }
}

/// Reports an answer to another request. The remote state may have changed.
fn unexpected_response(operation: &'static str, answer: &str) -> BackendError {
    let short: String = answer.chars().take(200).collect();
    BackendError { operation, text: format!("the cluster answered with {short}"), effect: After::Unknown }
}

impl Backend for RemoteSim {
    fn name(&self) -> &str {
        "sim"
    }

    fn caps(&self) -> Capabilities {
        self.caps
    }

    fn snapshot(&self) -> Result<Vec<ObservedNode>, BackendError> {
        match self.query("snapshot", &Call::Snapshot)? {
            Response::Nodes(nodes) => Ok(nodes.into_iter().map(Into::into).collect()),
            other => Err(unexpected_response("snapshot", &format!("{other:?}"))),
        }
    }

    fn job_failures(&self, since: Timestamp) -> Result<Vec<ObservedJobFailure>, BackendError> {
        match self.query("asking for failed user work", &Call::FailedWork(since))? {
            Response::Failures(failed) => Ok(failed.into_iter().map(Into::into).collect()),
            other => Err(unexpected_response("asking for failed user work", &format!("{other:?}"))),
        }
    }

    fn submit(&self, job: &JobRequest) -> Result<JobId, BackendError> {
        match self.command("submit", &Call::Submit(job.into()))? {
            Response::Job(job) => Ok(job),
            other => Err(unexpected_response("submit", &format!("{other:?}"))),
        }
    }

    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        match self.query("poll", &Call::Poll(runs.to_vec()))? {
            Response::Polled(jobs) if jobs.len() == runs.len() => {
                let jobs = jobs.into_iter().map(crate::wire::WirePolled::into_polled).collect::<Option<_>>();
                jobs.ok_or_else(|| unexpected_response("poll", "a document that is not bytes"))
            }
            other => Err(unexpected_response("poll", &format!("{other:?}"))),
        }
    }

    fn remaining_output(&self, run: &Run) -> Result<Vec<LastOutput>, BackendError> {
        match self.query("read the output of a job", &Call::RemainingOutput(run.id))? {
            Response::Output(outputs) => Ok(outputs),
            other => Err(unexpected_response("read the output of a job", &format!("{other:?}"))),
        }
    }

    fn cancel(&self, run: RunId) -> Result<(), BackendError> {
        self.command("cancel", &Call::Cancel(run)).map(drop)
    }

    fn set_progress(&self, progress: &Progress) {
        // A second engine in this process would share the first one's limits.
        let _first = self.progress.set(progress.clone());
    }

    fn apply(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        let ask = Call::Apply { node: node.clone(), op: change.op, what: WireChange::from(&change.what) };
        self.command("change node", &ask).map(drop)
    }
}

impl Clock for RemoteSim {
    /// Returns the remote time. While the cluster cannot be reached, its clock is extrapolated.
    fn now(&self) -> Timestamp {
        if self.is_free_soon()
            && let Ok(Response::Now(now)) = self.request(&Call::Now)
        {
            *lock(&self.last) = (now, Instant::now());
            return now;
        }
        let (seen, at) = *lock(&self.last);
        seen.plus(scaled(Span::from_secs(1), at.elapsed().as_secs_f64() * self.speed))
    }

    fn sleep_until(&self, moment: Timestamp) {
        let left = moment.since(self.now()).to_std();
        thread::sleep(left.div_f64(self.speed));
    }
}
