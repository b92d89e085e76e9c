//! Jobs of this machine, stored in files so that they survive a restart of the controller.
//!
//! Each run has a directory. `intent.json` is written before the job is started; `job.json` is the claim that the job
//! itself creates and completes when it ends ([`JobFile`]); `cancel.json` is written before the job is ended;
//! `output.txt` holds the program's output. A controller that was killed at any instant finds either no claim, and may
//! start the job again because only one of the two obtains the claim, or the claim of the only job.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use doctor_checks::job_file::{JobEnded, JobFile, JobProcess, exit};
use doctor_core::{
    ids::{JobId, RunId},
    run::{JobEnd, ObservedJobState},
    time::{Span, Timestamp},
};
use serde::{Deserialize, Serialize};

use crate::{files, output_file, process};

/// How long a killed process may take to disappear. One that is stuck in the kernel takes longer and is abandoned.
const KILL_GRACE: Duration = Duration::from_secs(2);

/// The directory of all runs, in the state directory.
pub const RUNS: &str = "runs";

/// The program's output, in the directory of its run.
const OUTPUT: &str = "output.txt";

/// The age, counted from the creation of the run, at which an ended run is removed.
const RETENTION: Span = Span::days(30);

#[derive(Debug)]
pub struct Jobs {
    directory: PathBuf,
    /// The prefix of this store's job ids.
    kind: &'static str,
    start_limit: Span,
    /// Children of this process, kept so that they are reaped.
    children: Mutex<Vec<(RunId, Child)>>,
}

/// The time of a decision.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecisionTime {
    at: Timestamp,
}

/// What is left of a job that ended or is stuck.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRemains {
    /// `None`: it has not ended.
    pub ending: Option<String>,
    /// The end of what the program printed.
    pub text: String,
}

/// The state of a child of this process.
enum ChildState {
    NotOurs,
    Running,
    Ended(Option<i32>),
}

impl Jobs {
    pub fn open(state: &Path, kind: &'static str, start_limit: Span) -> io::Result<Self> {
        let directory = state.join(RUNS);
        fs::create_dir_all(&directory)?;
        Ok(Self { directory, kind, start_limit, children: Mutex::default() })
    }

    pub fn id(&self, run: RunId) -> JobId {
        JobId(format!("{}-{run}", self.kind))
    }

    pub fn job_file(&self, run: RunId) -> PathBuf {
        self.run_directory(run).join("job.json")
    }

    /// Returns the directory of a run.
    pub fn run_directory(&self, run: RunId) -> PathBuf {
        self.directory.join(run.to_string())
    }

    fn children(&self) -> MutexGuard<'_, Vec<(RunId, Child)>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the job unless it was started before.
    pub fn start(&self, run: RunId, mut command: Command, now: Timestamp) -> io::Result<()> {
        // Serialises callers: two threads with the same run must not both conclude that it has not been started.
        let mut children = self.children();
        let directory = self.run_directory(run);
        fs::create_dir_all(&directory)?;
        files::create(&directory.join("intent.json"), &DecisionTime { at: now })?;
        if files::read::<JobFile>(&self.job_file(run))?.is_some()
            || matches!(child_state(&mut children, run)?, ChildState::Running)
        {
            return Ok(());
        }
        let output = File::options().append(true).create(true).open(directory.join(OUTPUT))?;
        let child = command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).spawn()?;
        children.retain(|(started, _)| *started != run);
        children.push((run, child));
        Ok(())
    }

    /// Returns the state of a job.
    pub fn state(&self, run: RunId, now: Timestamp) -> io::Result<ObservedJobState> {
        let directory = self.run_directory(run);
        let Some(intent) = files::read::<DecisionTime>(&directory.join("intent.json"))? else {
            return Ok(ObservedJobState::Absent);
        };
        // Read before the claim: a child that has ended by now has written everything it will ever write.
        let child = child_state(&mut self.children(), run)?;
        let file = match files::read::<JobFile>(&self.job_file(run))? {
            Some(file) => file,
            None => match child {
                ChildState::Ended(code) => self.claim_unstarted(
                    run,
                    now,
                    Some(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)),
                )?,
                ChildState::NotOurs if now.since(intent.at) > self.start_limit => {
                    self.claim_unstarted(run, now, None)?
                }
                ChildState::NotOurs | ChildState::Running => {
                    return Ok(ObservedJobState::Pending { job: self.id(run), since: intent.at });
                }
            },
        };
        self.read_claim(run, file, now)
    }

    fn read_claim(&self, run: RunId, file: JobFile, now: Timestamp) -> io::Result<ObservedJobState> {
        let job = self.id(run);
        let started = file.process.as_ref().map(|process| process.started);
        let ended = match (file.ended, &file.process) {
            (Some(ended), _) => ended,
            (None, Some(process)) if process::is_alive(process) && !self.is_unkillable(run) => {
                return Ok(ObservedJobState::Running { job, since: process.started });
            }
            (None, process) => self.record_end(run, process.as_ref(), now)?,
        };
        let cancelled = self.run_directory(run).join("cancel.json").exists();
        let how = match (ended.exit, started) {
            (Some(exit::DONE), Some(_)) => JobEnd::Exited,
            (Some(exit::STOPPED | exit::OVER_LIMIT), _) => JobEnd::Killed,
            (Some(_), _) => JobEnd::Failed,
            (None, _) if cancelled => JobEnd::Killed,
            (None, _) => JobEnd::Lost,
        };
        Ok(ObservedJobState::Ended { job, started, at: ended.at, how })
    }

    /// Returns the end of what the job's program printed, at most `max_bytes` bytes, and how it ended. `None`: there is no job.
    pub fn remains(&self, run: RunId, max_bytes: u64) -> io::Result<Option<JobRemains>> {
        let directory = self.run_directory(run);
        let ended = files::read::<JobFile>(&self.job_file(run))?.and_then(|file| file.ended);
        let cancelled = directory.join("cancel.json").exists();
        let ending = ended.map(|ended| match ended.exit {
            Some(code) => format!("exit code {code}"),
            None if cancelled => "cancelled".to_owned(),
            None => "ended without an exit code: it was killed, or the machine restarted".to_owned(),
        });
        let text = match output_file::tail(&directory, Path::new(OUTPUT), max_bytes) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            other => other?,
        };
        let found = ending.is_some() || text.is_some();
        Ok(found.then(|| JobRemains { ending, text: text.unwrap_or_default() }))
    }

    /// Records the end of a job that vanished without reporting one, or that cannot be killed.
    ///
    /// The time of discovery is written to the claim, so that every later query returns the same. Processes that the
    /// job left running are killed.
    fn record_end(&self, run: RunId, process: Option<&JobProcess>, now: Timestamp) -> io::Result<JobEnded> {
        let path = self.job_file(run);
        // The job may have recorded its end between the read of the claim and the check of its process.
        let recorded = files::read::<JobFile>(&path)?.and_then(|file| file.ended);
        if let Some(ended) = recorded {
            return Ok(ended);
        }
        if let Some(process) = process.filter(|_| !self.is_unkillable(run)) {
            self.kill(run, process)?;
        }
        let ended = JobEnded { at: now, exit: None };
        files::write(&path, &JobFile { run, process: process.cloned(), ended: Some(ended.clone()) })?;
        Ok(ended)
    }

    /// Claims a run that no job has claimed in time, so that a job that starts later finds its claim taken and exits.
    fn claim_unstarted(&self, run: RunId, now: Timestamp, exit: Option<u8>) -> io::Result<JobFile> {
        let file = JobFile { run, process: None, ended: Some(JobEnded { at: now, exit }) };
        if files::create(&self.job_file(run), &file)? {
            return Ok(file);
        }
        files::read(&self.job_file(run))?.ok_or_else(|| io::Error::other("the claim disappeared while it was read"))
    }

    /// Ends the job of a run, if there is one, and waits for it for a bounded time.
    ///
    /// A start request that arrives later, for example one that was delayed on the network, finds the run claimed.
    pub fn cancel(&self, run: RunId, grace: Span, now: Timestamp) -> io::Result<()> {
        let directory = self.run_directory(run);
        fs::create_dir_all(&directory)?;
        files::create(&directory.join("cancel.json"), &DecisionTime { at: now })?;
        let Some(process) = self.claim_unstarted(run, now, None)?.process else { return Ok(()) };
        process::terminate(&process);
        if !process::wait_gone(&process, grace.to_std()) {
            self.kill(run, &process)?;
        }
        Ok(())
    }

    fn kill(&self, run: RunId, process: &JobProcess) -> io::Result<()> {
        if process::kill_session(process, KILL_GRACE) {
            return Ok(());
        }
        files::create(&self.run_directory(run).join("abandoned.json"), process).map(drop)
    }

    fn is_unkillable(&self, run: RunId) -> bool {
        self.run_directory(run).join("abandoned.json").exists()
    }

    /// Returns a job that could not be killed and still hangs.
    pub fn unkillable_job(&self) -> io::Result<Option<JobProcess>> {
        for run in self.runs()? {
            let left = files::read::<JobProcess>(&self.run_directory(run).join("abandoned.json"))?;
            if let Some(process) = left.filter(process::is_alive) {
                return Ok(Some(process));
            }
        }
        Ok(None)
    }

    /// Returns the processes of running jobs. A process id that the kernel has since reused is left out.
    pub fn running(&self) -> io::Result<Vec<JobProcess>> {
        let mut running = Vec::new();
        for run in self.runs()? {
            let file = files::read::<JobFile>(&self.job_file(run))?;
            let process = file.filter(|file| file.ended.is_none()).and_then(|file| file.process);
            running.extend(process.filter(process::is_our_session));
        }
        Ok(running)
    }

    /// Returns the runs whose jobs are pending or running.
    pub fn active_runs(&self, now: Timestamp) -> io::Result<Vec<RunId>> {
        let mut under_way = Vec::new();
        for run in self.runs()? {
            if matches!(self.state(run, now)?, ObservedJobState::Pending { .. } | ObservedJobState::Running { .. }) {
                under_way.push(run);
            }
        }
        Ok(under_way)
    }

    fn runs(&self) -> io::Result<Vec<RunId>> {
        let names = fs::read_dir(&self.directory)?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        Ok(names.filter_map(|name| name.parse().ok()).collect())
    }

    /// Removes old runs that have ended.
    pub fn prune(&self, now: Timestamp) -> io::Result<()> {
        for run in self.runs()?.into_iter().filter(|run| now.since(run.born()) > RETENTION) {
            if matches!(self.state(run, now)?, ObservedJobState::Ended { .. } | ObservedJobState::Absent) {
                fs::remove_dir_all(self.run_directory(run))?;
            }
        }
        Ok(())
    }
}

fn child_state(children: &mut [(RunId, Child)], run: RunId) -> io::Result<ChildState> {
    // Polls all children, so that none stays a zombie until its own run is queried.
    let mut found = ChildState::NotOurs;
    for (id, child) in children {
        let state = match child.try_wait()? {
            None => ChildState::Running,
            Some(status) => ChildState::Ended(status.code()),
        };
        if *id == run {
            found = state;
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_a_program_that_cannot_run_remains_with_its_exit_code() {
        let folder = tempfile::tempdir().unwrap();
        let jobs = Jobs::open(folder.path(), "x", Span::from_secs(30)).unwrap();
        let (run, now) = (RunId::from_number(1), Timestamp::from_secs(1));
        assert_eq!(jobs.remains(run, 100).unwrap(), None);
        let mut command = Command::new("sh");
        command.args(["-c", "exec /usr/bin/no-such-program"]);
        jobs.start(run, command, now).unwrap();
        let until = std::time::Instant::now() + Duration::from_secs(120);
        while !matches!(jobs.state(run, now).unwrap(), ObservedJobState::Ended { .. }) {
            assert!(std::time::Instant::now() < until, "it ends");
            std::thread::sleep(Duration::from_millis(5));
        }
        let left = jobs.remains(run, 100).unwrap().unwrap();
        assert_eq!(left.ending.as_deref(), Some("exit code 127"));
        assert!(left.text.contains("no-such-program: not found"), "{left:?}");
    }

    #[test]
    fn a_start_after_its_cancel_starts_no_process() {
        let folder = tempfile::tempdir().unwrap();
        let jobs = Jobs::open(folder.path(), "x", Span::from_secs(30)).unwrap();
        let (run, now) = (RunId::from_number(1), Timestamp::from_secs(1));
        jobs.cancel(run, Span::ZERO, now).unwrap();
        assert_eq!(jobs.state(run, now).unwrap(), ObservedJobState::Absent, "the run never existed");
        jobs.start(run, Command::new("true"), now).unwrap();
        assert!(matches!(
            jobs.state(run, now).unwrap(),
            ObservedJobState::Ended { started: None, how: JobEnd::Killed, .. }
        ));
        assert!(!jobs.run_directory(run).join("output.txt").exists(), "nothing was started");
    }
}
