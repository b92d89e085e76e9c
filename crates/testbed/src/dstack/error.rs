//! Errors of the dstack test bed. A missing prerequisite excuses a test; any other failure does not.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::skip;

/// Why no dstack is available, or why it failed.
#[derive(Debug, thiserror::Error)]
pub enum DstackTestbedError {
    /// This machine lacks a prerequisite.
    #[error("no dstack on this machine: {why}")]
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
        program: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("{program} failed: {said}")]
    ProgramFailed { program: &'static str, said: String },
    #[error("creating the socket that the server listens on")]
    Socket(#[source] io::Error),
    #[error("the namespaces exited at startup: {said}")]
    Supervisor { said: String },
    #[error("requesting {path} from the server")]
    Request {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("the server answered {path} with {status}: {text}")]
    ErrorStatus { path: String, status: u16, text: String },
    #[error("{what}: timed out after {} s; last state: {last}", within.as_secs())]
    Timeout { what: String, within: Duration, last: String },
}

impl DstackTestbedError {
    /// Reports that these tests could not run.
    ///
    /// # Panics
    /// Panics in CI, where a skipped test is a failure, and everywhere if dstack is installed but fails.
    pub fn skip_tests(&self, what: &str) {
        skip::skip_tests(what, self, matches!(self, Self::Unsupported { .. }));
    }
}

pub(super) fn file_error(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> DstackTestbedError {
    move |source| DstackTestbedError::File { operation, path: path.to_owned(), source }
}
