//! Failed jobs of users and their nodes: from the queue, which keeps them for some minutes, and from accounting if a site has it
//! (`sacct`, or the job completion list that `sacct --completion` reads). The names of users' jobs are not requested: users
//! choose them freely, and these commands print them unescaped.

use std::{
    collections::{BTreeMap, HashSet},
    sync::PoisonError,
    time::Instant,
};

use doctor_backend::{BackendError, ObservedJobFailure, deadline};
use doctor_core::{
    hostlist,
    job_failures::{JobFailure, JobFailureKind, Label, MAX_JOB_NODES},
    time::Timestamp,
};

use super::{SlurmBackend, config::JOB_PREFIX, scontrol_text::time, states::JobState};

const OPERATION: &str = "list failed jobs";
/// Separates the fields of `sacct`; no requested field can contain it.
const FIELD_SEPARATOR: char = '|';
/// States of work that failed by itself.
const FAILED_STATES: &str = "BOOT_FAIL,FAILED,NODE_FAIL,OUT_OF_MEMORY";

/// A failed job.
#[derive(Debug, Clone, PartialEq, Eq)]
struct AccountedFailure {
    number: String,
    user: String,
    how: JobFailureKind,
    at: Timestamp,
    nodes: String,
}

impl SlurmBackend {
    pub(super) fn failures(&self, since: Timestamp) -> Result<Vec<ObservedJobFailure>, BackendError> {
        let states = format!("--states={FAILED_STATES}");
        let fields = "--Format=JobID:|,UserName:|,State:|,EndTime:|,NodeList:|,exit_code:|";
        let listed = self.programs.read(OPERATION, "squeue", &["--noheader", "--all", &states, fields])?;
        let ours = self.our_job_ids()?;
        let mut failures: BTreeMap<String, AccountedFailure> = BTreeMap::new();
        let from_queue = parse(&listed).into_iter().filter(|failure| failure.at >= since);
        for failure in from_queue.chain(self.failures_from_accounting(since)) {
            if !ours.contains(&failure.number) {
                failures.insert(failure.number.clone(), failure);
            }
        }
        Ok(failures.values().filter_map(seen_failure).collect())
    }

    /// Returns the numbers of our own jobs, which are not user work.
    fn our_job_ids(&self) -> Result<HashSet<String>, BackendError> {
        let user = format!("--user={}", self.user);
        let jobs = self.jobs(OPERATION, &["--states=all", &user])?;
        let ours = jobs.iter().filter(|job| job.name.starts_with(JOB_PREFIX));
        Ok(ours.map(|job| job.number.to_string()).collect())
    }

    /// Returns the failures in accounting since the last query. A site without accounting has none; that is not an error.
    fn failures_from_accounting(&self, since: Timestamp) -> Vec<AccountedFailure> {
        let mut accounting = self.accounting.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(from) = accounting.due(since, Instant::now()) else { return Vec::new() };
        let answer = self.query_accounting(from);
        accounting.queried(answer.is_ok(), Instant::now());
        match answer {
            Ok(found) => found.into_iter().filter(|failure| failure.at >= from).collect(),
            Err(error) => {
                tracing::debug!(%error, "accounting not available");
                Vec::new()
            }
        }
    }

    fn query_accounting(&self, from: Timestamp) -> Result<Vec<AccountedFailure>, BackendError> {
        let moment = from.to_string();
        let start = format!("--starttime={}", moment.trim_end_matches('Z').split('.').next().unwrap_or_default());
        let (common, states) = (["--noheader", "--parsable2", &start], format!("--state={FAILED_STATES}"));
        let full = [&common[..], &["--allocations", "--endtime=now", &states]].concat();
        let short = [&common[..], &["--completion"]].concat();
        let query = |args: &[&str], who: &str, format: &str| {
            self.programs.read(OPERATION, "sacct", &[args, &[who, format]].concat())
        };
        let begun = Instant::now();
        let failed = |number: &str| format!("--format={number},User,State,End,NodeList,ExitCode");
        let (args, number, listed) = match query(&full, "--allusers", &failed("JobIDRaw")) {
            // If it hung, the other query would hang too.
            Err(error) if deadline::is_over() || begun.elapsed() >= self.config.deadline.to_std() => return Err(error),
            Err(_) => (&short, "JobID", query(&short, "--allusers", &failed("JobID"))?),
            Ok(listed) => (&full, "JobIDRaw", listed),
        };
        let found = parse(&listed);
        if found.is_empty() {
            return Ok(found);
        }
        // For our own user only: names chosen by other users could look like lines of this table.
        let ours =
            parse_our_jobs(&query(args, &format!("--user={}", self.user), &format!("--format={number},JobName"))?);
        Ok(found.into_iter().filter(|failure| !ours.contains(&failure.number)).collect())
    }
}

/// Parses the numbers of our jobs from lines of number and name.
fn parse_our_jobs(text: &str) -> HashSet<String> {
    let pairs = text.lines().filter_map(|line| line.split_once(FIELD_SEPARATOR));
    pairs.filter(|(_, name)| name.starts_with(JOB_PREFIX)).map(|(number, _)| number.trim().to_owned()).collect()
}

/// Returns `None` if the job ran on so many nodes that its failure implicates none.
fn seen_failure(failure: &AccountedFailure) -> Option<ObservedJobFailure> {
    Some(ObservedJobFailure {
        nodes: hostlist::parse_up_to(&failure.nodes, MAX_JOB_NODES).ok()?,
        job: JobFailure {
            id: Label::new(&format!("slurm/{}", failure.number)),
            name: Label::new(&format!("job {}", failure.number)),
            owner: Label::new(&failure.user),
            at: failure.at,
            how: failure.how,
        },
    })
}

/// Parses lines of number, user, state, end, nodes and, if present, exit code. Skips other lines.
fn parse(text: &str) -> Vec<AccountedFailure> {
    let line = |line: &str| {
        let mut fields = line.split(FIELD_SEPARATOR).map(str::trim);
        let mut next = || fields.next().filter(|field| !field.is_empty());
        let number = next().filter(|number| number.bytes().all(|byte| byte.is_ascii_digit()))?.to_owned();
        // The completion list appends the user's number to the name.
        let user = next()?.split('(').next()?.to_owned();
        let state = JobState::from_word(next()?.split(' ').next()?)?;
        let (at, nodes) = (time(next()?)?, next()?.to_owned());
        let how = match state {
            JobState::OutOfMemory => JobFailureKind::OutOfMemory,
            JobState::NodeFail | JobState::BootFail => JobFailureKind::NodeFailed,
            JobState::Failed => next().and_then(failure_kind).unwrap_or(JobFailureKind::Unknown),
            _ => return None,
        };
        Some(AccountedFailure { number, user, how, at, nodes })
    };
    text.lines().filter_map(line).collect()
}

/// Parses `CODE:SIGNAL` or, from the queue of older versions, a wait status: the signal in the low byte, the exit code above it.
fn failure_kind(text: &str) -> Option<JobFailureKind> {
    let (code, number) = match text.split_once(':') {
        Some((code, signal)) => (code.parse().ok()?, signal.parse().ok()?),
        None => {
            let status: i32 = text.parse().ok()?;
            ((status >> 8) & 0xff, status & 0x7f)
        }
    };
    match (code, number) {
        (0, 0) => None,
        (code, 0) => Some(JobFailureKind::Exit { code }),
        (_, number) => Some(JobFailureKind::Signal { number }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_jobs_are_recognized_by_their_names() {
        let ours = parse_our_jobs("7|doctor-R1\n8|train|doctor-\n9|doctor-O2\nnonsense\n");
        assert_eq!(ours, HashSet::from(["7".to_owned(), "9".to_owned()]));
    }

    #[test]
    fn failed_jobs_are_reported_with_kind_and_nodes_and_cancelled_jobs_are_not() {
        let text = "3|alice|FAILED|2026-11-15T23:15:41|node3|768|\n\
                    4|bob|FAILED|2026-11-15T23:15:41|node[3-4]|11|\n\
                    5|bob|NODE_FAIL|2026-11-15T23:15:41|node4|0|\n\
                    6|bob|CANCELLED by 0|2026-11-15T23:15:41|node4|0|\n\
                    7|bob|FAILED|Unknown|node4|0|\n\
                    8.batch|bob|FAILED|2026-11-15T23:15:41|node4|1|\n\
                    nonsense\n";
        let found = parse(text);
        assert_eq!(found.iter().map(|one| &*one.number).collect::<Vec<_>>(), ["3", "4", "5"]);
        assert_eq!(found[0].how, JobFailureKind::Exit { code: 3 });
        assert_eq!(found[1].how, JobFailureKind::Signal { number: 11 });
        assert_eq!(found[2].how, JobFailureKind::NodeFailed);
        let seen = seen_failure(&found[1]).unwrap();
        assert_eq!((seen.nodes.len(), seen.job.owner.as_str()), (2, "bob"));
        assert_eq!(seen_failure(&AccountedFailure { nodes: "node[1-33]".to_owned(), ..found[1].clone() }), None);
        let accounted = parse(
            "9|eve(1001)|OUT_OF_MEMORY|2026-11-15T23:15:41|node1|0:125\n10|eve|FAILED|2026-11-15T23:15:41|node1|2:0\n",
        );
        assert_eq!(accounted[0].user, "eve");
        assert_eq!(
            accounted.iter().map(|one| one.how).collect::<Vec<_>>(),
            [JobFailureKind::OutOfMemory, JobFailureKind::Exit { code: 2 }]
        );
        assert_eq!(parse("11|eve|FAILED|2026-11-15T23:15:41|node1\n")[0].how, JobFailureKind::Unknown);
    }
}
