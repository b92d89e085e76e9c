//! Errors of the Slurm test bed. A missing prerequisite excuses a test; any other failure does not.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::excuse;

/// Why no Slurm is available, or why it failed.
#[derive(Debug, thiserror::Error)]
pub enum BedError {
    /// This machine lacks a prerequisite.
    #[error("no Slurm on this machine: {why}")]
    NotThere { why: String },
    #[error("{operation} {path}")]
    File {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("running {program}")]
    Program {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("looking for free ports on loopback")]
    Ports(#[source] io::Error),
    #[error("the namespace of this Slurm exited at startup: {said}")]
    Keeper { said: String },
    #[error("{daemon} failed to start: {said}")]
    NotStarted { daemon: String, said: String },
    #[error("slurmctld runs and has not answered for {} s: {said}", within.as_secs())]
    Silent { within: Duration, said: String },
    #[error("stopping {daemon}")]
    Ending {
        daemon: String,
        #[source]
        source: rustix::io::Errno,
    },
    #[error("there is no node {node} in this Slurm")]
    NoNode { node: String },
    #[error("this Slurm has no slurmrestd: set `rest` of its layout")]
    NoRest,
    #[error("`{command}` was rejected: {said}")]
    Refused { command: String, said: String },
    #[error("{what}: timed out after {} s; last state: {last}", within.as_secs())]
    Late { what: String, within: Duration, last: String },
}

impl BedError {
    /// Reports that these tests could not run.
    ///
    /// # Panics
    /// Panics in CI, where a skipped test is a failure, and everywhere if Slurm is installed but fails.
    pub fn not_run(&self, what: &str) {
        excuse::not_run(what, self, matches!(self, Self::NotThere { .. }));
    }
}

pub(super) fn at(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> BedError {
    move |source| BedError::File { operation, path: path.to_owned(), source }
}
