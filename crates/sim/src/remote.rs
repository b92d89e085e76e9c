//! The client of a simulated cluster in another process: a backend and a clock that may lose their connection at any
//! time and reconnect, and that report an unknown effect for a call whose answer was lost.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use doctor_backend::{
    Backend, BackendError, Effect as After, JobRequest, NodeOp, PolledJob, SeenFailure, SeenNode, clock::Clock,
};
use doctor_checks::document::RunKey;
use doctor_core::{
    ids::{JobId, NodeName, RunId},
    snapshot::Caps,
    time::{Span, Timestamp},
};

use crate::{
    hostile::Incident,
    machine::scaled,
    truth::Truth,
    wire::{Answer, Ask, MAX_LINE, WireChange},
    world::{OperatorRequest, QueuedReport},
};

/// The timeout of an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// The pause between two attempts to connect.
const TRY_AGAIN: Duration = Duration::from_millis(20);

/// A simulated cluster in another process.
#[derive(Debug)]
pub struct RemoteSim {
    socket: PathBuf,
    line: Mutex<Option<BufReader<UnixStream>>>,
    caps: Caps,
    speed: f64,
    /// The last reading of the remote clock, and when it was taken.
    last: Mutex<(Timestamp, Instant)>,
}

#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    #[error("connecting to the simulated cluster on `{path}`: no answer within {within:?}")]
    Nobody { path: PathBuf, within: Duration, source: std::io::Error },
    #[error("asking the simulated cluster on `{path}`: {text}")]
    Asked { path: PathBuf, text: String },
}

/// How a request failed.
#[derive(Debug)]
enum Lost {
    /// Before anything was sent.
    Unsaid(std::io::Error),
    /// After the request may have arrived.
    Unheard(std::io::Error),
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
                Err(_) if began.elapsed() < within => thread::sleep(TRY_AGAIN),
                Err(source) => return Err(RemoteError::Nobody { path: socket.to_owned(), within, source }),
            }
        };
        let asked = |text: String| RemoteError::Asked { path: socket.to_owned(), text };
        let mut line = prepared(stream).map_err(|error| asked(error.to_string()))?;
        match exchange(&mut line, &Ask::Hello) {
            Ok(Answer::Hello { caps, speed, now }) => Ok(Self {
                socket: socket.to_owned(),
                line: Mutex::new(Some(line)),
                caps,
                speed,
                last: Mutex::new((now, Instant::now())),
            }),
            Ok(other) => Err(asked(format!("it answered a greeting with {other:?}"))),
            Err(error) => Err(asked(error.to_string())),
        }
    }

    /// Sends one request and returns its answer. A connection that failed is not used again.
    fn ask(&self, ask: &Ask) -> Result<Answer, Lost> {
        let mut line = held(&self.line);
        if line.is_none() {
            *line = Some(UnixStream::connect(&self.socket).and_then(prepared).map_err(Lost::Unsaid)?);
        }
        let Some(open) = line.as_mut() else { return Err(Lost::Unsaid(std::io::ErrorKind::NotConnected.into())) };
        exchange(open, ask).map_err(|error| {
            *line = None;
            Lost::Unheard(error)
        })
    }

    /// Sends a read-only request, which may be repeated.
    fn look(&self, operation: &'static str, ask: &Ask) -> Result<Answer, BackendError> {
        let answer = match self.ask(ask) {
            Err(_) => self.ask(ask),
            answered => answered,
        };
        match answer {
            Ok(answer) => understood(operation, answer),
            Err(Lost::Unsaid(error) | Lost::Unheard(error)) => {
                Err(BackendError { operation, text: error.to_string(), effect: After::NoneTryAgain })
            }
        }
    }

    /// Sends a changing request once. If it may have arrived, its effect is unknown.
    fn change(&self, operation: &'static str, ask: &Ask) -> Result<Answer, BackendError> {
        match self.ask(ask) {
            Ok(answer) => understood(operation, answer),
            Err(Lost::Unsaid(error)) => {
                Err(BackendError { operation, text: error.to_string(), effect: After::NoneTryAgain })
            }
            Err(Lost::Unheard(error)) => {
                Err(BackendError { operation, text: error.to_string(), effect: After::Unknown })
            }
        }
    }

    /// Returns the agent reports that were not acknowledged yet.
    ///
    /// # Errors If the cluster cannot be reached.
    pub fn agent_reports(&self) -> Result<Vec<QueuedReport>, BackendError> {
        const REPORTS: &str = "agent reports";
        match self.look(REPORTS, &Ask::Reports)? {
            Answer::Reports(reports) => {
                let reports = reports.into_iter().map(crate::wire::WireReport::into_report).collect::<Option<_>>();
                reports.ok_or_else(|| strange(REPORTS, "a report that is not bytes"))
            }
            other => Err(strange(REPORTS, &format!("{other:?}"))),
        }
    }

    /// Acknowledges reports that were stored.
    ///
    /// # Errors If the cluster cannot be reached. A repetition is harmless.
    pub fn acknowledge_reports(&self, numbers: &[u64]) -> Result<(), BackendError> {
        self.change("acknowledge reports", &Ask::Acknowledge(numbers.to_vec())).map(drop)
    }

    /// Returns the key that this node's agent was enrolled with.
    ///
    /// # Errors If the cluster cannot be reached.
    pub fn agent_key(&self, node: &NodeName) -> Result<RunKey, BackendError> {
        const KEY: &str = "agent key";
        match self.look(KEY, &Ask::AgentKey(node.clone()))? {
            Answer::Key(text) => RunKey::from_hex(&text).ok_or_else(|| strange(KEY, "a key that is not valid")),
            other => Err(strange(KEY, &format!("{other:?}"))),
        }
    }

    /// Returns the operators' requests since the last call. Requests lost on the way are not repeated.
    ///
    /// # Errors If the cluster cannot be reached.
    pub fn take_operator_requests(&self) -> Result<Vec<OperatorRequest>, BackendError> {
        const REQUESTS: &str = "operator requests";
        match self.change(REQUESTS, &Ask::OperatorRequests)? {
            Answer::Requests(requests) => Ok(requests.into_iter().map(Into::into).collect()),
            other => Err(strange(REQUESTS, &format!("{other:?}"))),
        }
    }

    /// Injects an incident into the remote world. See [`crate::World::inject`].
    ///
    /// # Errors If the cluster cannot be reached.
    pub fn inject(&self, incident: &Incident) -> Result<bool, BackendError> {
        const INJECT: &str = "inject";
        match self.change(INJECT, &Ask::Inject(incident.clone()))? {
            Answer::Injected(done) => Ok(done),
            other => Err(strange(INJECT, &format!("{other:?}"))),
        }
    }

    /// Returns the truth, for scoring.
    ///
    /// # Errors If the cluster cannot be reached.
    pub fn truth(&self) -> Result<Truth, BackendError> {
        match self.look("truth", &Ask::Truth)? {
            Answer::Truth(truth) => Ok(truth),
            other => Err(strange("truth", &format!("{other:?}"))),
        }
    }

    /// Returns the simulated seconds per real second.
    pub const fn speed(&self) -> f64 {
        self.speed
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A poisoned lock is safe: a failed connection is dropped, and a clock reading is complete.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn prepared(stream: UnixStream) -> std::io::Result<BufReader<UnixStream>> {
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    stream.set_write_timeout(Some(ANSWER_WITHIN))?;
    Ok(BufReader::new(stream))
}

fn exchange(line: &mut BufReader<UnixStream>, ask: &Ask) -> std::io::Result<Answer> {
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

fn understood(operation: &'static str, answer: Answer) -> Result<Answer, BackendError> {
    match answer {
        Answer::Failed { text, effect } => Err(BackendError { operation, text, effect: effect.into() }),
        Answer::Refused(text) => Err(BackendError { operation, text, effect: After::NoneGiveUp }),
        other => Ok(other),
    }
}

/// Reports an answer to another request. The remote state may have changed.
fn strange(operation: &'static str, answer: &str) -> BackendError {
    let short: String = answer.chars().take(200).collect();
    BackendError { operation, text: format!("the cluster answered with {short}"), effect: After::Unknown }
}

impl Backend for RemoteSim {
    fn name(&self) -> &str {
        "sim"
    }

    fn caps(&self) -> Caps {
        self.caps
    }

    fn snapshot(&self) -> Result<Vec<SeenNode>, BackendError> {
        match self.look("snapshot", &Ask::Snapshot)? {
            Answer::Nodes(nodes) => Ok(nodes.into_iter().map(Into::into).collect()),
            other => Err(strange("snapshot", &format!("{other:?}"))),
        }
    }

    fn failed_work(&self, since: Timestamp) -> Result<Vec<SeenFailure>, BackendError> {
        match self.look("asking for failed user work", &Ask::FailedWork(since))? {
            Answer::Failures(failed) => Ok(failed.into_iter().map(Into::into).collect()),
            other => Err(strange("asking for failed user work", &format!("{other:?}"))),
        }
    }

    fn submit(&self, job: &JobRequest) -> Result<JobId, BackendError> {
        match self.change("submit", &Ask::Submit(job.into()))? {
            Answer::Job(job) => Ok(job),
            other => Err(strange("submit", &format!("{other:?}"))),
        }
    }

    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        match self.look("poll", &Ask::Poll(runs.to_vec()))? {
            Answer::Polled(jobs) if jobs.len() == runs.len() => {
                let jobs = jobs.into_iter().map(crate::wire::WirePolled::into_polled).collect::<Option<_>>();
                jobs.ok_or_else(|| strange("poll", "a document that is not bytes"))
            }
            other => Err(strange("poll", &format!("{other:?}"))),
        }
    }

    fn cancel(&self, run: RunId) -> Result<(), BackendError> {
        self.change("cancel", &Ask::Cancel(run)).map(drop)
    }

    fn apply(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        let ask = Ask::Apply { node: node.clone(), op: change.op, what: WireChange::from(&change.what) };
        self.change("change node", &ask).map(drop)
    }
}

impl Clock for RemoteSim {
    /// Returns the remote time. While the cluster cannot be reached, its clock is extrapolated.
    fn now(&self) -> Timestamp {
        if let Ok(Answer::Now(now)) = self.ask(&Ask::Now) {
            *held(&self.last) = (now, Instant::now());
            return now;
        }
        let (seen, at) = *held(&self.last);
        seen.plus(scaled(Span::from_secs(1), at.elapsed().as_secs_f64() * self.speed))
    }

    fn sleep_until(&self, moment: Timestamp) {
        let left = moment.since(self.now()).to_std();
        thread::sleep(left.div_f64(self.speed));
    }
}
