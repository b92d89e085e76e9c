//! Errors of the Kubernetes test bed. A missing prerequisite excuses a test; any other failure does not.

use std::{
    io,
    path::{Path, PathBuf},
};

use super::{Component, PATIENCE};
use crate::skip;

/// Why no control plane is available, or why it failed.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesTestbedError {
    /// This machine lacks a prerequisite, as reported by scripts/kubernetes.sh.
    #[error("no control plane on this machine: {why}")]
    Unsupported { why: String },
    /// This machine lacks a prerequisite for a node with a kubelet and containers.
    #[error("no real node on this machine: {why}")]
    NodeUnsupported { why: String },
    #[error("{folder} has no {program}: use the folder that scripts/kubernetes.sh prints")]
    Missing { folder: PathBuf, program: &'static str },
    #[error("{operation} {path}")]
    File {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("running {program}")]
    Program {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("openssl created no certificate (3.0 or newer is needed): {said}")]
    Certificate { said: String },
    #[error("looking for free ports on loopback")]
    Ports(#[source] io::Error),
    #[error("stopping {part}")]
    Stop {
        part: Component,
        #[source]
        source: io::Error,
    },
    #[error("{part} is not running: it was killed and not restarted")]
    NotRunning { part: Component },
    #[error("{part} exited; last output:\n{said}")]
    Exited { part: Component, said: String },
    #[error("{what} within {} s; last output of {part}:\n{said}", PATIENCE.as_secs())]
    Timeout { what: &'static str, part: Component, said: String },
    #[error("node {node}: {what} within {} s; last output:\n{said}", PATIENCE.as_secs())]
    NodeTimeout { node: String, what: &'static str, said: String },
    #[error("node {node} exited; last output:\n{said}")]
    NodeExited { node: String, said: String },
    #[error("importing the image `{kind}`: {said}")]
    Image { kind: &'static str, said: String },
    #[error("{asked} got no response: {said}")]
    NoResponse { asked: String, said: String },
    #[error("{asked} was rejected with {status}: {said}")]
    ErrorStatus { asked: String, status: u16, said: String },
}

impl KubernetesTestbedError {
    /// Reports that these tests could not run.
    ///
    /// # Panics
    /// Panics in CI, where a skipped test is a failure, and everywhere if the control plane or node is available but fails.
    pub fn skip_tests(&self, what: &str) {
        skip::skip_tests(what, self, matches!(self, Self::Unsupported { .. } | Self::NodeUnsupported { .. }));
    }
}

pub(super) fn file_error(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> KubernetesTestbedError {
    move |source| KubernetesTestbedError::File { operation, path: path.to_owned(), source }
}
