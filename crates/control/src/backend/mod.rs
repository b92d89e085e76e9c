//! What a cluster must be able to do for us. One folder per kind of cluster.
//!
//! The calls block. A backend whose client is asynchronous owns its runtime and blocks on it: the cycle stays one
//! straight line, and a simulated month costs no scheduler. Every call may be made from several threads at once.
//!
//! Rules that every backend keeps, and the shared contract suite checks:
//! a node nobody vouches for is `Unknown`, never `Free`; submitting twice with one run id gives one job; cancelling a
//! job that is not there is fine; a lost job says so; every operation in `caps` is idempotent, shows in the next
//! snapshot and leaves foreign marks alone; every error says whether to try again.

pub mod contract;
pub mod kubernetes;
pub mod local;

use std::{path::PathBuf, sync::Arc};

use doctor_checks::document::RunKey;
use doctor_core::{
    case::StepKind,
    ids::{JobId, NodeName, OpId, RunId, TestId},
    node::{Node, OurMark},
    run::{JobSeen, NonEmpty},
    snapshot::Caps,
    time::{Span, Timestamp},
};

pub trait Backend: Send + Sync {
    /// A short name for messages: `sim`, `local`, `kubernetes`.
    fn name(&self) -> &str;

    fn caps(&self) -> Caps;

    /// Every node of the cluster as it is now. A node of which something could not be learnt is in the answer, with
    /// `Occupancy::Unknown`; if the cluster could not be asked at all, this is an error.
    fn snapshot(&self) -> Result<Vec<SeenNode>, BackendError>;

    /// Starts a job for this run. Asked again with the same run id, it answers with the same job.
    fn submit(&self, job: &JobRequest) -> Result<JobId, BackendError>;

    /// What became of these runs' jobs, in the same order.
    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError>;

    /// Ends the job of a run. A job that is not there, or has ended, is fine.
    fn cancel(&self, run: RunId) -> Result<(), BackendError>;

    /// Changes a node. Asked again with the same operation id, nothing more happens.
    fn apply(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError>;
}

/// A node (shared with the backend that keeps it: most do not change from one look to the next), when its agent last spoke through this backend (if agents do), and the jobs of ours on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenNode {
    pub node: Arc<Node>,
    pub heard: Option<Timestamp>,
    /// Runs whose jobs are pending or running here, whoever submitted them: a controller with an empty store must see
    /// that the node is in use.
    pub jobs: Vec<RunId>,
}

/// What a job is told.
#[derive(Debug, Clone)]
pub struct JobRequest {
    pub run: RunId,
    pub nodes: NonEmpty<NodeName>,
    pub tests: NonEmpty<TestId>,
    pub limit: Span,
    /// With this the job signs its result document.
    pub key: RunKey,
    /// Where log and result document belong.
    pub outputs: Vec<JobOutput>,
}

/// Where a job leaves its logs and its result, relative to the shared directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobOutput {
    pub node: NodeName,
    /// One for each test, in their order.
    pub logs: Vec<PathBuf>,
    pub document: PathBuf,
}

/// What became of a job, and the result documents that came along with the answer, if the backend carries them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolledJob {
    pub seen: JobSeen,
    pub documents: Vec<Vec<u8>>,
}

/// A change to a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeOp {
    /// The same id is the same change.
    pub op: OpId,
    pub what: Change,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    Mark(OurMark),
    Unmark(OurMark),
    Drain,
    Undrain,
    Reset,
    Reboot,
    Replace,
}

impl Change {
    /// The step of a case that this carries out.
    pub const fn step(&self) -> StepKind {
        match self {
            Self::Mark(_) => StepKind::Mark,
            Self::Unmark(_) => StepKind::Unmark,
            Self::Drain => StepKind::Drain,
            Self::Undrain => StepKind::Undrain,
            Self::Reset => StepKind::Reset,
            Self::Reboot => StepKind::Reboot,
            Self::Replace => StepKind::Replace,
        }
    }
}

/// A backend's failure. It is never a verdict on a node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {text}")]
pub struct BackendError {
    pub operation: &'static str,
    pub text: String,
    pub effect: Effect,
}

/// What may have happened although the call failed.
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Nothing changed; trying again may help.
    NoneTryAgain,
    /// Nothing changed; trying again will not help.
    NoneGiveUp,
    /// It may have taken effect; ask again with the same id.
    Unknown,
}
