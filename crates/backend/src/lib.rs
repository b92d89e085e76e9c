//! What a cluster must be able to do for us, and what the crates of the backends share. One crate per kind of cluster.
//!
//! The calls block. A backend whose client is asynchronous owns its runtime and blocks on it: the cycle stays one
//! straight line, and a simulated month costs no scheduler. Every call may be made from several threads at once.
//!
//! Rules that every backend keeps, and the shared contract suite checks:
//! a node nobody vouches for is `Unknown`, never `Free`; submitting twice with one run id gives one job; cancelling a
//! job that is not there is fine; a lost job says so; every operation in `caps` is idempotent, shows in the next
//! snapshot and leaves foreign marks alone; every error says whether to try again.

pub mod clock;
pub mod contract;
pub mod hook;
pub mod http;
pub mod inspection;
pub mod local;
pub mod process;
pub mod program;
pub mod registration;
pub mod ssh;
pub mod vouch;

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use doctor_checks::document::RunKey;
use doctor_core::{
    case::StepKind,
    failed_work::FailedWork,
    fnv::fnv1a,
    ids::{CaseId, JobId, NodeName, OpId, RunId, TestId},
    node::{MarkKind, Node, OurMark},
    run::{JobSeen, NonEmpty},
    shown::Shown,
    snapshot::Caps,
    time::{Span, Timestamp},
};
use doctor_host::marks::MarkChange;
pub use doctor_host::reports::Reported;

pub trait Backend: Send + Sync {
    /// A short name for messages: `sim`, `local`, `kubernetes`.
    fn name(&self) -> &str;

    fn caps(&self) -> Caps;

    /// Every node of the cluster as it is now. A node of which something could not be learnt is in the answer, with
    /// `Occupancy::Unknown`; if the cluster could not be asked at all, this is an error.
    fn snapshot(&self) -> Result<Vec<SeenNode>, BackendError>;

    /// Nodes of the last snapshot that have not told their marks since this backend was opened: what the snapshot says of these is
    /// no answer, and who has seen them before knows better.
    fn unread(&self) -> Vec<NodeName> {
        Vec::new()
    }

    /// Starts a job for this run. Asked again with the same run id, it answers with the same job.
    fn submit(&self, job: &JobRequest) -> Result<JobId, BackendError>;

    /// What became of these runs' jobs, in the same order.
    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError>;

    /// What the job of a run wrote on each node, as far as it came with an answer of [`Self::poll`]: where logs are not on the
    /// shared directory.
    fn logs(&self, _run: RunId) -> Vec<(NodeName, String)> {
        Vec::new()
    }

    /// Ends the job of a run. A job that is not there, or has ended, is fine.
    fn cancel(&self, run: RunId) -> Result<(), BackendError>;

    /// Changes a node. Asked again with the same operation id, nothing more happens.
    fn apply(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError>;

    /// The same, with the words for it, where the cluster has a place for words.
    fn apply_for(&self, node: &NodeName, change: &NodeOp, _ground: &Ground) -> Result<(), BackendError> {
        self.apply(node, change)
    }

    /// User work that failed since then, as far as the cluster tells. What was told before may be told again, and need not
    /// be. Work that somebody cancelled, that was preempted, evicted, or ran into its own time limit has not failed.
    fn failed_work(&self, _since: Timestamp) -> Result<Vec<SeenFailure>, BackendError> {
        Ok(Vec::new())
    }

    /// What the node and its vendor's tool say of it, before a step destroys that. It is begun by the first who asks under an
    /// operation's name, and asked for again until it has ended.
    fn report(&self, _node: &NodeName, _op: OpId) -> Reported {
        Reported::Failed { text: format!("the backend {} has no way to run it on the node", self.name()) }
    }

    /// Where results can be read on the node itself: who puts them there.
    fn board(&self) -> Option<&dyn Board> {
        None
    }
}

/// A place on each node where everybody can read how it is.
pub trait Board: Sync {
    /// The number of what is written there; `None`: nothing of ours, or nobody knows.
    fn number(&self, node: &NodeName) -> Option<u64>;

    /// Writes it there, in place of what was.
    fn write(&self, node: &NodeName, what: &ToShow) -> Result<(), BackendError>;

    /// The same for several, by as many workers. Back come those on which it could not be written.
    fn write_all(&self, work: &[(NodeName, Arc<ToShow>)], workers: usize) -> Vec<(NodeName, BackendError)> {
        one_by_one(work, workers, |node, what| self.write(node, what))
    }
}

/// Writes each alone, several at a time.
pub fn one_by_one(
    work: &[(NodeName, Arc<ToShow>)],
    workers: usize,
    write: impl Fn(&NodeName, &ToShow) -> Result<(), BackendError> + Sync,
) -> Vec<(NodeName, BackendError)> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let each = || {
        while let Some((node, what)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = write(node, what) {
                failed.lock().unwrap_or_else(PoisonError::into_inner).push((node.clone(), error));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..workers.clamp(1, work.len().max(1)) {
            scope.spawn(each);
        }
        each();
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// What is written on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToShow {
    pub shown: Shown,
    /// `shown` as JSON.
    pub text: String,
    /// The same for the same, but for the sentences of findings.
    pub number: u64,
}

impl ToShow {
    pub fn of(shown: Shown) -> Self {
        // A value of names and numbers is always text.
        let text = serde_json::to_string(&shown).unwrap_or_default();
        // A measured value in a sentence is another one each time, and nothing new.
        let mut plain = shown.clone();
        plain.findings.iter_mut().for_each(|finding| finding.text.clear());
        let counted = serde_json::to_string(&plain).unwrap_or_default();
        // The same in every version: what another one wrote is recognised.
        let number = fnv1a(counted.as_bytes());
        Self { shown, text, number }
    }
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

/// User work that failed, and where it ran. Over many nodes it says little about each; see [`doctor_core::failed_work`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenFailure {
    pub work: FailedWork,
    /// Where it failed; where nobody tells that, where it ran.
    pub nodes: Vec<NodeName>,
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

/// Why a node is changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ground {
    pub case: Option<CaseId>,
    /// The reason code of the worst finding, and its words.
    pub code: String,
    pub text: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    Mark(OurMark),
    Unmark(OurMark),
    Drain,
    /// Asks user work to leave. It is done when none is left; until then, asking again is right.
    Evict,
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
            Self::Evict => StepKind::Evict,
            Self::Undrain => StepKind::Undrain,
            Self::Reset => StepKind::Reset,
            Self::Reboot => StepKind::Reboot,
            Self::Replace => StepKind::Replace,
        }
    }

    /// As a mark of ours, where the cluster has nothing but marks: a drain is the mark that nothing new may start.
    pub fn as_mark(&self) -> Option<MarkChange> {
        match self {
            Self::Mark(mark) => Some(MarkChange::Mark(mark.clone())),
            Self::Unmark(mark) => Some(MarkChange::Unmark(mark.kind)),
            Self::Drain => Some(MarkChange::Mark(OurMark { kind: MarkKind::Cordon, case: None })),
            Self::Undrain => Some(MarkChange::Unmark(MarkKind::Cordon)),
            Self::Evict | Self::Reset | Self::Reboot | Self::Replace => None,
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
