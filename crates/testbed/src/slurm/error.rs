//! Errors of the Slurm test bed. A missing prerequisite excuses a test; any other failure does not.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::skip;

/// Why no Slurm is available, or why it failed.
#[derive(Debug, thiserror::Error)]
pub enum SlurmTestbedError {
    /// This machine lacks a prerequisite.
    #[error("no Slurm on this machine: {why}")]
    Unsupported { why: String },
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
    Supervisor { said: String },
    #[error("{daemon} failed to start: {said}")]
    NotStarted { daemon: String, said: String },
    #[error("slurmctld runs and has not answered for {} s: {said}", within.as_secs())]
    NoResponse { within: Duration, said: String },
    #[error("stopping {daemon}")]
    Stop {
        daemon: String,
        #[source]
        source: rustix::io::Errno,
    },
    #[error("there is no node {node} in this Slurm")]
    NoNode { node: String },
    #[error("this Slurm has no slurmrestd: set `rest` of its layout")]
    NoRest,
    #[error("`{command}` was rejected: {said}")]
    CommandFailed { command: String, said: String },
    #[error("{what}: timed out after {} s; last state: {last}", within.as_secs())]
    Timeout { what: String, within: Duration, last: String },
}

impl SlurmTestbedError {
    /// Reports that these tests could not run.
    ///
    /// # Panics
    /// Panics in CI, where a skipped test is a failure, and everywhere if Slurm is installed but fails.
    pub fn skip_tests(&self, what: &str) {
        skip::skip_tests(what, self, matches!(self, Self::Unsupported { .. }));
    }
}

pub(super) fn file_error(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> SlurmTestbedError {
    move |source| SlurmTestbedError::File { operation, path: path.to_owned(), source }
}
