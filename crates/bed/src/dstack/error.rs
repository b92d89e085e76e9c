//! Errors of the dstack test bed. A missing prerequisite excuses a test; any other failure does not.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::excuse;

/// Why no dstack is available, or why it failed.
#[derive(Debug, thiserror::Error)]
pub enum BedError {
    /// This machine lacks a prerequisite.
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
    #[error("creating the socket that the server listens on")]
    Socket(#[source] io::Error),
    #[error("the namespaces exited at startup: {said}")]
    Keeper { said: String },
    #[error("requesting {path} from the server")]
    Ask {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("the server answered {path} with {status}: {text}")]
    Answer { path: String, status: u16, text: String },
    #[error("{what}: timed out after {} s; last state: {last}", within.as_secs())]
    Late { what: String, within: Duration, last: String },
}

impl BedError {
    /// Reports that these tests could not run.
    ///
    /// # Panics
    /// Panics in CI, where a skipped test is a failure, and everywhere if dstack is installed but fails.
    pub fn not_run(&self, what: &str) {
        excuse::not_run(what, self, matches!(self, Self::NotThere { .. }));
    }
}

pub(super) fn at(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> BedError {
    move |source| BedError::File { operation, path: path.to_owned(), source }
}
