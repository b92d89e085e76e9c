//! Why a result document or an agent's report is rejected.

use doctor_checks::document::DocumentError;
use doctor_core::ids::{NodeName, RunId, TestId};
use doctor_store::StoreError;

use crate::cycle_report::chain;

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
    #[error("the store does not take it: {0}")]
    NotStorable(String),
    #[error("not a regular file")]
    NotRegularFile,
    #[error("unknown node {0}")]
    UnknownNode(NodeName),
}

impl Rejection {
    /// The rejection of what the store has refused with this error.
    pub(crate) fn by_store(error: &StoreError) -> Self {
        Self::NotStorable(chain(error))
    }
}
