//! Collects the state of this machine: its users, its marks, and our runs.

use std::{fs, io, io::Read as _, path::Path};

use doctor_core::{
    ids::{NodeName, RunId},
    last_output,
    run::{JobEnd, ObservedJobState},
};
use doctor_host::{
    files,
    jobs::{JobRemains, Jobs},
    marks::MarkFiles,
    parse_load_average, process,
    protocol::{HostStatus, MAX_DOCUMENT_BYTES, MAX_LOG_BYTES, MAX_RESPONSE_BYTES, RunStatus, StatusQuery},
};

use super::{
    foreign_processes,
    state_files::{self, DOCUMENT, LOG, NODES},
};
use crate::{clock::now, job::output::tail};

/// Limits of documents and logs in one reply; the rest is small. A document that does not fit comes with a later reply,
/// a log does not.
const REPLY_LIMITS: ReplyLimits = ReplyLimits { documents: MAX_RESPONSE_BYTES / 2, logs: MAX_RESPONSE_BYTES / 8 };
/// Limit of the program's output besides its log.
const MAX_OUTPUT_BYTES: u64 = 4 * 1024;

/// Limit of the program's output of a run without a result.
const MAX_REMAINS_BYTES: u64 = last_output::MAX_BYTES as u64;

struct ReplyLimits {
    documents: u64,
    logs: u64,
}

pub(super) fn collect_status(state: &Path, jobs: &Jobs, query: &StatusQuery) -> io::Result<HostStatus> {
    // First, so that jobs that end meanwhile still count as ours.
    let mut own_jobs = jobs.running()?;
    own_jobs.extend(state_files::repairs(state)?.running()?);
    own_jobs.extend(state_files::reports(state)?.running()?);
    let own_pids: Vec<u32> = own_jobs.iter().map(|job| job.pid).collect();
    let loadavg = fs::read_to_string("/proc/loadavg").map_err(|error| format!("/proc/loadavg: {error}"));
    let load = loadavg.and_then(|text| {
        parse_load_average(&text).ok_or_else(|| "/proc/loadavg does not start with a load average".to_owned())
    });
    let mut limits = REPLY_LIMITS;
    let runs = query.runs.iter().map(|run| run_status(jobs, *run, &mut limits)).collect();
    Ok(HostStatus {
        at: now(),
        boot_id: process::boot_id(),
        cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        load,
        gpu_users: foreign_processes::gpu_users(&own_pids, &query.ignored_programs),
        terminal_users: foreign_processes::terminal_users(&own_pids),
        locks: query.locks.iter().filter(|path| !matches!(path.try_exists(), Ok(false))).cloned().collect(),
        unkillable_pid: jobs.unkillable_job()?.map(|process| process.pid),
        marks: MarkFiles::new(state).read()?,
        active_runs: jobs.active_runs(now())?,
        runs,
    })
}

/// Collects one run. An unreadable run is unknown; the others are still reported.
fn run_status(jobs: &Jobs, run: RunId, limits: &mut ReplyLimits) -> RunStatus {
    let observed = jobs.state(run, now()).unwrap_or_else(|error| ObservedJobState::Unknown { why: error.to_string() });
    let directory = jobs.run_directory(run);
    let nodes = files::read::<Vec<NodeName>>(&directory.join(NODES));
    let nodes = nodes.ok().flatten().unwrap_or_default();
    let ObservedJobState::Ended { started, .. } = &observed else {
        return RunStatus { nodes, ..RunStatus::without_result(run, observed) };
    };
    let log = log(&directory, started.is_none(), limits.logs);
    limits.logs -= log.as_ref().map_or(0, |text| text.len() as u64).min(limits.logs);
    match document(&directory.join(DOCUMENT), limits.documents) {
        Ok(document) => {
            limits.documents -= document.as_ref().map_or(0, |text| text.len() as u64);
            let is_complete =
                document.is_some() && matches!(observed, ObservedJobState::Ended { how: JobEnd::Exited, .. });
            let remains = if is_complete { None } else { remains(jobs, run) };
            RunStatus { run, job: observed, document, log, remains, nodes }
        }
        // It has ended and left a document: without that the run must not be reported as complete.
        Err(reason) => RunStatus { nodes, ..RunStatus::without_result(run, ObservedJobState::Unknown { why: reason }) },
    }
}

/// Returns the end of the run's log, if that is not on the shared directory, and the program's own output. A run that
/// never started has no log, only that output. An unreadable log is left out: no decision depends on it.
fn log(directory: &Path, never_began: bool, max_bytes: u64) -> Option<String> {
    let log = tail(&directory.join(LOG), MAX_LOG_BYTES.min(max_bytes / 2)).ok().flatten();
    if log.is_none() && !never_began {
        return None;
    }
    let output =
        tail(&directory.join("output.txt"), MAX_OUTPUT_BYTES.min(max_bytes / 4)).ok().flatten().unwrap_or_default();
    let text = log.unwrap_or_default() + &output;
    (!text.is_empty()).then_some(text)
}

/// Returns what is left of a job that may have no result: a document on the shared directory is not seen by this program. What
/// cannot be read is left out: no decision depends on it.
fn remains(jobs: &Jobs, run: RunId) -> Option<JobRemains> {
    jobs.remains(run, MAX_REMAINS_BYTES).ok().flatten()
}

fn document(path: &Path, max_bytes: u64) -> Result<Option<String>, String> {
    let failed = |error: io::Error| format!("{}: {error}", path.display());
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let length = file.metadata().map_err(failed)?.len();
    if length > MAX_DOCUMENT_BYTES {
        // It would not be accepted later either.
        return Ok(None);
    }
    if length > max_bytes {
        return Err("the result did not fit into this response".to_owned());
    }
    let mut text = String::new();
    match file.take(MAX_DOCUMENT_BYTES).read_to_string(&mut text) {
        Ok(_) => Ok(Some(text)),
        // Not one of our documents: those are text.
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(None),
        Err(error) => Err(failed(error)),
    }
}
