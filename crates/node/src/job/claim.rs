//! The claim on a run: a job file that only the first process can create.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use doctor_checks::{
    job_file::{JobEnded, JobFile, JobProcess},
    proc_stat::ProcStat,
};
use doctor_core::ids::RunId;

use super::shared_file::SharedFile;
use crate::clock::now;

#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    #[error("cannot read the state of this process from /proc")]
    OwnProcess(#[source] io::Error),
    #[error("cannot write the job file {}", .path.display())]
    Write { path: PathBuf, source: io::Error },
}

pub(super) struct Claim {
    path: PathBuf,
    file: JobFile,
}

impl Claim {
    /// Claims the run. `None` if another process owns it or it was cancelled.
    pub(super) fn take(path: &Path, run: RunId) -> Result<Option<Self>, ClaimError> {
        // Cancelling a job ends its session and everything in it. A process that already leads a group keeps its
        // session.
        let _has_one = rustix::process::setsid();
        let process = Some(own_process().map_err(ClaimError::OwnProcess)?);
        let file = JobFile { run, process, ended: None };
        let failed = |source| ClaimError::Write { path: path.to_owned(), source };
        let created = SharedFile::of_run(path).and_then(|shared| shared.create(&bytes(&file)?)).map_err(failed)?;
        Ok(created.then(|| Self { path: path.to_owned(), file }))
    }

    pub(super) fn ended(mut self, exit: u8) -> Result<(), ClaimError> {
        self.file.ended = Some(JobEnded { at: now(), exit: Some(exit) });
        // Opened again: a handle of the start of a long job may be stale on a network file system.
        let written = SharedFile::of_run(&self.path).and_then(|shared| shared.write(&bytes(&self.file)?));
        written.map_err(|source| ClaimError::Write { path: self.path, source })
    }
}

fn bytes(file: &JobFile) -> io::Result<Vec<u8>> {
    serde_json::to_vec(file).map_err(io::Error::other)
}

fn own_process() -> io::Result<JobProcess> {
    let line = fs::read_to_string("/proc/self/stat")?;
    let stat = ProcStat::parse(&line).ok_or_else(|| io::Error::other("/proc/self/stat has an unexpected format"))?;
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
    Ok(JobProcess { pid: stat.pid, start_ticks: stat.start_ticks, boot_id, started: now() })
}
