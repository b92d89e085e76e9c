//! Collects the state of this machine: its users, its marks, and our runs.

use std::{fs, io, io::Read as _, path::Path};

use doctor_core::{
    ids::{NodeName, RunId},
    run::JobSeen,
};
use doctor_host::{
    files,
    jobs::Jobs,
    marks::MarkFiles,
    one_minute, process,
    protocol::{Look, MOST_ANSWER, MOST_DOCUMENT, MOST_LOG, SeenRun, Wanted},
};

use super::{
    state_files::{self, DOCUMENT, LOG, NODES},
    users,
};
use crate::{clock::now, job::output::tail};

/// Limits of documents and logs in one reply; the rest is small. A document that does not fit comes with a later reply,
/// a log does not.
const ROOM: Room = Room { documents: MOST_ANSWER / 2, logs: MOST_ANSWER / 8 };
/// Limit of the program's output besides its log.
const MOST_OUTPUT: u64 = 4 * 1024;

struct Room {
    documents: u64,
    logs: u64,
}

pub(super) fn look(state: &Path, jobs: &Jobs, wanted: &Wanted) -> io::Result<Look> {
    // First, so that jobs that end meanwhile still count as ours.
    let mut ours = jobs.running()?;
    ours.extend(state_files::repairs(state)?.running()?);
    ours.extend(state_files::reports(state)?.running()?);
    let ours: Vec<u32> = ours.iter().map(|job| job.pid).collect();
    let loadavg = fs::read_to_string("/proc/loadavg").map_err(|error| format!("/proc/loadavg: {error}"));
    let load = loadavg.and_then(|text| {
        one_minute(&text).ok_or_else(|| "/proc/loadavg does not start with a load average".to_owned())
    });
    let mut room = ROOM;
    let runs = wanted.runs.iter().map(|run| seen(jobs, *run, &mut room)).collect();
    Ok(Look {
        at: now(),
        boot_id: process::boot_id(),
        cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        load,
        gpus: users::of_gpus(&ours, &wanted.bystanders),
        terminals: users::of_terminals(&ours),
        locks: wanted.locks.iter().filter(|path| !matches!(path.try_exists(), Ok(false))).cloned().collect(),
        abandoned: jobs.abandoned()?.map(|process| process.pid),
        marks: MarkFiles::new(state).read()?,
        under_way: jobs.under_way(now())?,
        runs,
    })
}

/// Collects one run. An unreadable run is unknown; the others are still reported.
fn seen(jobs: &Jobs, run: RunId, room: &mut Room) -> SeenRun {
    let seen = jobs.look(run, now()).unwrap_or_else(|error| JobSeen::Unknown { why: error.to_string() });
    let place = jobs.place(run);
    let nodes = files::read::<Vec<NodeName>>(&place.join(NODES));
    let nodes = nodes.ok().flatten().unwrap_or_default();
    let JobSeen::Ended { started, .. } = &seen else { return SeenRun { nodes, ..SeenRun::bare(run, seen) } };
    let log = log(&place, started.is_none(), room.logs);
    room.logs -= log.as_ref().map_or(0, |text| text.len() as u64).min(room.logs);
    match document(&place.join(DOCUMENT), room.documents) {
        Ok(document) => {
            room.documents -= document.as_ref().map_or(0, |text| text.len() as u64);
            SeenRun { run, seen, document, log, nodes }
        }
        // It has ended and left a document: without that the run must not be reported as complete.
        Err(why) => SeenRun { nodes, ..SeenRun::bare(run, JobSeen::Unknown { why }) },
    }
}

/// Returns the end of the run's log, if that is not on the shared directory, and the program's own output. A run that
/// never started has no log, only that output. An unreadable log is left out: no decision depends on it.
fn log(place: &Path, never_began: bool, room: u64) -> Option<String> {
    let log = tail(&place.join(LOG), MOST_LOG.min(room / 2)).ok().flatten();
    if log.is_none() && !never_began {
        return None;
    }
    let output = tail(&place.join("output.txt"), MOST_OUTPUT.min(room / 4)).ok().flatten().unwrap_or_default();
    let text = log.unwrap_or_default() + &output;
    (!text.is_empty()).then_some(text)
}

fn document(path: &Path, room: u64) -> Result<Option<String>, String> {
    let failed = |error: io::Error| format!("{}: {error}", path.display());
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let length = file.metadata().map_err(failed)?.len();
    if length > MOST_DOCUMENT {
        // It would not be accepted later either.
        return Ok(None);
    }
    if length > room {
        return Err("the result did not fit into this response".to_owned());
    }
    let mut text = String::new();
    match file.take(MOST_DOCUMENT).read_to_string(&mut text) {
        Ok(_) => Ok(Some(text)),
        // Not one of our documents: those are text.
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(None),
        Err(error) => Err(failed(error)),
    }
}
