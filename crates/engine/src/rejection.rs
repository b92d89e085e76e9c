//! Why a result document or an agent's report is rejected.

use doctor_checks::document::DocumentError;
use doctor_core::ids::{NodeName, RunId, TestId};

/// Why a document was rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("it is for run {0}, not for the run that delivered it")]
    WrongRun(RunId),
    #[error("it is for another node: {0}")]
    WrongNode(NodeName),
    #[error("it contains test {0}, which its run does not include")]
    UnexpectedTest(TestId),
    #[error("it contains test {0} twice")]
    DuplicateTest(TestId),
    #[error("this run and node already have a result")]
    Duplicate,
    #[error("unknown run")]
    UnknownRun,
    #[error("not a regular file")]
    NotRegularFile,
    #[error("unknown node {0}")]
    UnknownNode(NodeName),
}
