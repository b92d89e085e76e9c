//! Why there is no dstack to test on: this machine lacks something, which excuses a test, or something failed, which does not.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::excuse;

/// Why there is no dstack, or why it did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum BedError {
    /// What this machine lacks.
    #[error("no dstack on this machine: {why}")]
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
        program: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("{program} failed: {said}")]
    Refused { program: &'static str, said: String },
    #[error("making the socket that the server listens on")]
    Socket(#[source] io::Error),
    #[error("the world has ended before it began: {said}")]
    Keeper { said: String },
    #[error("asking the server for {path}")]
    Ask {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("the server answered {path} with {status}: {text}")]
    Answer { path: String, status: u16, text: String },
    #[error("{what} was not reached within {} s; the last was {last}", within.as_secs())]
    Late { what: String, within: Duration, last: String },
}

impl BedError {
    /// Says that these tests could not run.
    ///
    /// # Panics
    /// In CI, where that is a failure; and anywhere if there is a dstack that does not do what it should.
    pub fn not_run(&self, what: &str) {
        excuse::not_run(what, self, matches!(self, Self::NotThere { .. }));
    }
}

pub(super) fn at(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> BedError {
    move |source| BedError::File { operation, path: path.to_owned(), source }
}
