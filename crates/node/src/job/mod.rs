//! `doctor-node job`: the command that a validation job runs.
//!
//! It runs the tests in order, writes a log that can be followed meanwhile, and ends with one signed document of raw
//! evidence. The document is posted to the controller if its URL is known, and renamed into place or printed to the
//! container's output. On a stop request or at its time limit the job ends the running probe and signs what has finished.
//! It classifies nothing: the controller does.

mod claim;
mod log;
pub mod node_paths;
pub(crate) mod output;
mod post;
pub(crate) mod shared_file;

use std::{
    error::Error,
    ffi::OsString,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use doctor_checks::{
    Catalogue,
    document::{Document, MAX_DOCUMENT_BYTES, RunKey, TestEvidence},
    job_file::exit,
    probe::ProbeOutput,
    result_transport::{PackedDocument, ResultTransportError},
};
use doctor_core::{
    access::Access,
    ids::{NodeName, RunId, TestId},
    observation::{FailureKind, Observation},
    policy::Policy,
};

use crate::{
    check,
    clock::now,
    hardware,
    profile::{self, MachineArgs},
    runner::{DriverHelper, LocalRunner, ProbeRunner, describe, failed},
    stop::{Stop, StopReason},
};
use claim::Claim;
use log::Log;
use post::PostOutcome;
use shared_file::SharedFile;

pub use claim::ClaimError;
pub use post::{PostReply, ResultPost, SendDocument};

/// The parameters of a job.
#[derive(Debug)]
pub struct JobParams {
    pub run: RunId,
    pub node: NodeName,
    pub tests: Vec<TestId>,
    pub key: RunKey,
    /// One log for all tests, or one per test.
    pub logs: Vec<PathBuf>,
    pub result_target: ResultTarget,
    /// Where the document is posted as well.
    pub post: Option<ResultPost>,
    pub policy: Policy,
    pub root: PathBuf,
    /// NVML, by name or path.
    pub library: OsString,
    pub state: Option<PathBuf>,
    /// The access to the machine that the job was given. A probe that needs more is not run.
    pub access: Vec<Access>,
    /// Claimed before any work starts; shows other processes the state of the job.
    pub job_file: Option<PathBuf>,
}

/// The destination of the signed document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResultTarget {
    /// This file, which appears atomically.
    File(PathBuf),
    /// Packed on standard output, together with the log, and in this file if it fits: see `doctor_checks::carried`.
    Output { message: PathBuf },
}

#[derive(Debug, thiserror::Error)]
pub enum JobError {
    #[error("cannot claim the run")]
    Claim(#[source] ClaimError),
    #[error("cannot sign the result document")]
    Sign(#[source] serde_json::Error),
    #[error("cannot write the result document {}", .path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot write the result document to standard output")]
    Print(#[source] io::Error),
    #[error("cannot pack the result document")]
    Pack(#[source] ResultTransportError),
}

impl JobError {
    /// Whether the tests ran but their result is lost.
    pub const fn is_result_lost(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Print(_) | Self::Pack(_))
    }
}

/// Runs the job and returns its exit code (`doctor_checks::job_file::exit`).
pub fn run(job: &JobParams, stop: &Stop) -> Result<u8, JobError> {
    match &job.job_file {
        Some(path) => with_claim(path, job.run, || work(job, stop)).map_err(JobError::Claim)?,
        None => work(job, stop),
    }
}

/// Runs `work` as the only process that owns this run, and records its exit code in the claim file. If another process
/// owns the run, returns `NOT_WANTED` without calling `work`.
///
/// # Errors
/// If the claim cannot be made or its outcome cannot be written.
pub fn with_claim<E>(
    path: &Path,
    run: RunId,
    work: impl FnOnce() -> Result<u8, E>,
) -> Result<Result<u8, E>, ClaimError> {
    let Some(claim) = Claim::take(path, run)? else { return Ok(Ok(exit::NOT_WANTED)) };
    let result = work();
    claim.ended(*result.as_ref().unwrap_or(&exit::NO_DOCUMENT))?;
    Ok(result)
}

fn work(job: &JobParams, stop: &Stop) -> Result<u8, JobError> {
    let log = match job.result_target {
        ResultTarget::File(_) => Log::open(&job.logs, &job.tests),
        ResultTarget::Output { .. } => Log::to_output(),
    };
    let started = now();
    let names = job.tests.iter().map(TestId::as_str).collect::<Vec<_>>().join(", ");
    log.line("job", &format!("run {} on {}: {names}", job.run, job.node));
    // One driver helper process serves all tests of the job.
    let driver = Arc::default();
    let quiet = runner(job, stop, &driver);
    // First, because probes fail once the job is stopped.
    let hardware = hardware::collect(&quiet);
    let up = check::uptime(&quiet);
    let machine = profile::gather(&MachineArgs::detect_all(), job.state.as_deref(), &quiet).machine.bounded();
    let (tests, stop_reason) = run_tests(job, stop, &driver, &log);
    let (run, node, ended) = (job.run, job.node.clone(), now());
    let document = Document { run, node, hardware, started, ended, tests, uptime: up, machine: Some(machine) };
    let bytes = document.sign(&job.key).map_err(JobError::Sign)?;
    let (code, text) = match stop_reason {
        None => (exit::DONE, "done"),
        Some(StopReason::Signal) => (exit::STOPPED, "stopped by a signal; the result has the tests that finished"),
        Some(StopReason::TimeLimit) => {
            (exit::OVER_LIMIT, "time limit exceeded; the result has the tests that finished")
        }
    };
    log.line("job", text);
    deliver_result(job.post.as_ref(), &job.result_target, &bytes, stop, &log)?;
    Ok(code)
}

/// Posts the document and writes it to its target. One of them is enough; where only the post is left, it is repeated
/// until the job's time limit.
fn deliver_result(
    post: Option<&ResultPost>,
    target: &ResultTarget,
    bytes: &[u8],
    stop: &Stop,
    log: &Log,
) -> Result<(), JobError> {
    // At the same time: a job that was asked to stop is killed soon, and neither a controller that does not answer nor a file
    // server that hangs may cost it the other way.
    let (mut posted, written) = thread::scope(|scope| {
        let writer = thread::Builder::new().spawn_scoped(scope, || write_result(target, bytes));
        let post = || post.map(|post| post.send_soon(bytes, stop, log));
        match writer {
            Ok(writer) => {
                let posted = post();
                (posted, writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            }
            // There is no room for a thread.
            Err(_) => {
                let written = write_result(target, bytes);
                (post(), written)
            }
        }
    });
    let Err(error) = written else { return Ok(()) };
    let cause = error.source().map_or_else(String::new, |source| format!(": {source}"));
    log.line("job", &format!("the result could not be written{cause}"));
    if let (Some(post), Some(PostOutcome::Unanswered)) = (post, &posted) {
        posted = Some(post.send_until_stopped(bytes, stop, log));
    }
    if posted == Some(PostOutcome::Accepted) { Ok(()) } else { Err(error) }
}

fn write_result(to: &ResultTarget, bytes: &[u8]) -> Result<(), JobError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        |source| JobError::Write { path, source }
    };
    match to {
        ResultTarget::File(path) => SharedFile::of_test(path).and_then(|file| file.write(bytes)).map_err(failed(path)),
        ResultTarget::Output { message } => {
            let packed = PackedDocument::pack(bytes).map_err(JobError::Pack)?;
            let mut out = io::stdout().lock();
            out.write_all(packed.to_log_lines().as_bytes()).and_then(|()| out.flush()).map_err(JobError::Print)?;
            // The container runtime created this file and reads this inode: do not replace it.
            std::fs::write(message, packed.to_termination_message()).map_err(failed(message))
        }
    }
}

/// Returns the evidence of every test that finished, and what cut the rest short.
fn run_tests(
    job: &JobParams,
    stop: &Stop,
    driver: &Arc<DriverHelper>,
    log: &Log,
) -> (Vec<TestEvidence>, Option<StopReason>) {
    let catalogue = Catalogue::with_site_checks(&job.policy);
    let mut finished = Vec::new();
    let mut bytes_left = MAX_EVIDENCE_BYTES;
    for test in &job.tests {
        if let Some(reason) = stop.requested() {
            return (finished, Some(reason));
        }
        let mut evidence = run_test(job, &catalogue, test, stop, driver, log);
        let stop_reason =
            if was_killed(&evidence) { stop.requested_within(SIGNAL_DELIVERY_GRACE) } else { stop.requested() };
        if let Some(reason) = stop_reason {
            log.line(test.as_str(), "interrupted");
            return (finished, Some(reason));
        }
        bytes_left = truncate_evidence(bytes_left, &mut evidence);
        finished.push(evidence);
    }
    (finished, None)
}

/// Cancelling a job signals all its processes, and the test's process may end before our own handler runs.
const SIGNAL_DELIVERY_GRACE: Duration = Duration::from_secs(1);

/// Whether a process of the test was killed by a signal, or failed as if it had been.
fn was_killed(evidence: &TestEvidence) -> bool {
    let killed = |output: &ProbeOutput| match output {
        ProbeOutput::Ran { exit, .. } => exit.is_none(),
        ProbeOutput::Failed(failure) => matches!(failure.kind, FailureKind::Killed | FailureKind::Failed),
        _ => false,
    };
    evidence.probes.iter().any(|(_, output)| killed(output))
}

fn runner<'a>(job: &JobParams, stop: &'a Stop, driver: &Arc<DriverHelper>) -> LocalRunner<'a> {
    let runner = LocalRunner::new(&job.root, stop).state(job.state.as_deref()).library(job.library.clone());
    runner.driver_helper(driver)
}

fn run_test(
    job: &JobParams,
    catalogue: &Catalogue,
    test: &TestId,
    stop: &Stop,
    driver: &Arc<DriverHelper>,
    log: &Log,
) -> TestEvidence {
    let started = now();
    let log_line = |line: &str| log.line(test.as_str(), line);
    let echo = |line: &str| log_line(&format!("| {line}"));
    let runner = runner(job, stop, driver).echo(&echo);
    let mut probes = Vec::new();
    match catalogue.get(test) {
        // A test without probes is no evidence; the controller reports it as such.
        None => log_line("unknown test; this doctor-node may be older than the controller"),
        Some(check) => {
            let params = catalogue.params(&job.policy, test);
            for probe in (check.probes)(&params) {
                log_line(&describe(&probe));
                let denied = check.denied(&probe, &job.access);
                let output = denied.map_or_else(|| runner.run(&probe), ProbeOutput::Failed);
                if let ProbeOutput::Failed(failure) = &output {
                    log_line(&format!("{}: {}", failure.kind, failure.text));
                }
                probes.push((probe, output));
            }
            let outputs: Vec<_> = probes.iter().map(|(_, output)| output.clone()).collect();
            log_observation(&(check.interpret)(&params, &outputs), &log_line);
        }
    }
    TestEvidence { test: test.clone(), started, ended: now(), probes }
}

/// Logs metrics and events for readers of the log, without a verdict.
fn log_observation(observation: &Observation, log_line: &dyn Fn(&str)) {
    match observation {
        Observation::Measured { metrics, events, .. } => {
            for metric in metrics {
                log_line(&format!("{} of {}: {} {}", metric.name, metric.entity, metric.value, metric.unit));
            }
            for event in events {
                log_line(&format!("{} at {}: {}", event.code, event.entity, event.text));
            }
        }
        Observation::NotApplicable(reason) => log_line(&format!("not applicable: {}", reason.text)),
        Observation::Failed(failure) => log_line(&format!("no measurement: {}: {}", failure.kind, failure.text)),
    }
}

/// Bytes of evidence per document: the controller rejects longer documents. The rest is for names, times and hardware.
pub(crate) const MAX_EVIDENCE_BYTES: usize = MAX_DOCUMENT_BYTES as usize - (1 << 20);

/// Replaces the evidence's outputs by a "too long" failure if it exceeds `max_bytes`. Returns the bytes that are left.
pub(crate) fn truncate_evidence(max_bytes: usize, evidence: &mut TestEvidence) -> usize {
    let length = |evidence: &TestEvidence| serde_json::to_vec(evidence).map_or(usize::MAX, |bytes| bytes.len());
    if length(evidence) > max_bytes {
        for (probe, output) in &mut evidence.probes {
            *output = failed(FailureKind::TooLong, format!("{}: the result document is full", describe(probe)));
        }
    }
    max_bytes.saturating_sub(length(evidence))
}

/// Returns the directory that contains `path`.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_checks::probe::Probe;
    use doctor_core::time::Timestamp;
    use std::time::Instant;

    #[test]
    fn the_document_is_written_while_the_controller_does_not_answer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory.json");
        let written = path.clone();
        // It answers once the file is there.
        let send: SendDocument = Box::new(move |_, _| {
            let until = Instant::now() + Duration::from_secs(60);
            while !written.exists() && Instant::now() < until {
                thread::sleep(Duration::from_millis(10));
            }
            let status = if written.exists() { 202 } else { 404 };
            Ok(PostReply { status, retry_after: None, text: String::new() })
        });
        let post = ResultPost { address: "http://ctl".to_owned(), send };
        let posts_of =
            |target: &ResultTarget| deliver_result(Some(&post), target, b"DOCUMENT", &Stop::never(), &Log::to_output());
        posts_of(&ResultTarget::File(path.clone())).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"DOCUMENT");
        // Below a file nothing can be written: the post alone is enough.
        posts_of(&ResultTarget::File(path.join("memory.json"))).unwrap();
    }

    #[test]
    fn evidence_that_does_not_fit_is_replaced_by_a_failure() {
        let at = Timestamp::from_secs(1);
        let mut evidence = TestEvidence {
            test: TestId::new("memory").unwrap(),
            started: at,
            ended: at,
            probes: vec![(Probe::Kmsg, ProbeOutput::Text("x".repeat(5000)))],
        };
        assert!(truncate_evidence(10_000, &mut evidence) < 5000);
        assert!(matches!(evidence.probes[0].1, ProbeOutput::Text(_)));
        truncate_evidence(4000, &mut evidence);
        assert!(matches!(&evidence.probes[0].1, ProbeOutput::Failed(failure) if failure.kind == FailureKind::TooLong));
    }
}
