//! Why a result document or an agent's report is rejected.

use doctor_checks::document::BadDocument;
use doctor_core::ids::{NodeName, RunId, TestId};

/// Why a document was rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    #[error(transparent)]
    Document(#[from] BadDocument),
    #[error("it is for run {0}, not for the run that delivered it")]
    OtherRun(RunId),
    #[error("it is for another node: {0}")]
    OtherNode(NodeName),
    #[error("it contains test {0}, which its run does not include")]
    UnaskedTest(TestId),
    #[error("it contains test {0} twice")]
    TestTwice(TestId),
    #[error("this run and node already have a result")]
    Duplicate,
    #[error("unknown run")]
    UnknownRun,
    #[error("not a regular file")]
    NotAFile,
    #[error("unknown node {0}")]
    UnknownNode(NodeName),
}
