//! Why a result document or an agent's report is rejected.

use doctor_checks::document::BadDocument;
use doctor_core::ids::{NodeName, RunId, TestId};

/// Why a document was rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    #[error(transparent)]
    Document(#[from] BadDocument),
    #[error("it is of run {0}, which is not the run it was found for")]
    OtherRun(RunId),
    #[error("it speaks for node {0}, which is not a node of its run")]
    OtherNode(NodeName),
    #[error("it answers test {0}, which its run was not asked for")]
    UnaskedTest(TestId),
    #[error("it answers test {0} twice")]
    TestTwice(TestId),
    #[error("this run and node have a result already")]
    Duplicate,
    #[error("no run of that id is known")]
    UnknownRun,
    #[error("it is not a plain file")]
    NotAFile,
    #[error("its node {0} is not known here")]
    UnknownNode(NodeName),
}
