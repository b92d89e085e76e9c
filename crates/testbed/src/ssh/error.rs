//! Errors of the SSH test bed. A missing prerequisite excuses a test; any other failure does not.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::skip;

/// Why no hosts are available, or why one failed.
#[derive(Debug, thiserror::Error)]
pub enum SshTestbedError {
    /// This machine lacks a prerequisite.
    #[error("no SSH hosts on this machine: {why}")]
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
    #[error("looking for a free port on {address}")]
    Port {
        address: String,
        #[source]
        source: io::Error,
    },
    #[error("the namespace of {host} exited at startup: {said}")]
    Supervisor { host: String, said: String },
    #[error("there is no host {host} in this testbed")]
    NoHost { host: String },
    #[error("{what}: timed out after {} s", within.as_secs())]
    Timeout { what: String, within: Duration },
}

impl SshTestbedError {
    /// Reports that these tests could not run.
    ///
    /// # Panics
    /// Panics in CI, where a skipped test is a failure, and everywhere if sshd is installed but fails.
    pub fn skip_tests(&self, what: &str) {
        skip::skip_tests(what, self, matches!(self, Self::Unsupported { .. }));
    }
}

pub(super) fn file_error(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> SshTestbedError {
    move |source| SshTestbedError::File { operation, path: path.to_owned(), source }
}
