//! Why there is no Slurm to stand on: this machine lacks something, which excuses a test, or something failed, which does not.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::excuse;

/// Why there is no Slurm, or why it did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum BedError {
    /// What this machine lacks.
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
    #[error("the namespace of this Slurm has ended before it began: {said}")]
    Keeper { said: String },
    #[error("{daemon} does not start: {said}")]
    NotStarted { daemon: String, said: String },
    #[error("slurmctld runs and has not answered for {} s: {said}", within.as_secs())]
    Silent { within: Duration, said: String },
    #[error("ending {daemon}")]
    Ending {
        daemon: String,
        #[source]
        source: rustix::io::Errno,
    },
    #[error("there is no node {node} in this Slurm")]
    NoNode { node: String },
    #[error("this Slurm has no slurmrestd: `rest` of its layout says whether it has")]
    NoRest,
    #[error("`{command}` was refused: {said}")]
    Refused { command: String, said: String },
    #[error("{what} was not reached within {} s; it was {last}", within.as_secs())]
    Late { what: String, within: Duration, last: String },
}

impl BedError {
    /// Says that these tests could not run.
    ///
    /// # Panics
    /// In CI, where that is a failure; and anywhere if there is a Slurm that does not do what it should.
    pub fn not_run(&self, what: &str) {
        excuse::not_run(what, self, matches!(self, Self::NotThere { .. }));
    }
}

pub(super) fn at(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> BedError {
    move |source| BedError::File { operation, path: path.to_owned(), source }
}
