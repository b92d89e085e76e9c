//! The [`Backend`] trait that each kind of cluster implements, and the code that backends share. Each kind of cluster is a crate.
//!
//! Calls block. A backend with an asynchronous client owns its runtime and blocks on it: the control loop stays sequential, and
//! simulating a month needs no scheduler. Any method may be called from several threads concurrently.
//!
//! Rules that every backend keeps, checked by the shared contract suite: a node without positive evidence that it is free is
//! `Unknown`, never `Free`; submitting twice with one run id gives one job; cancelling a missing job succeeds; a lost job is
//! reported as lost; every operation in `caps` is idempotent, is visible in the next snapshot and leaves foreign marks alone;
//! every error states whether to retry.
//!
//! The controller calls a backend through [`bounded::BoundedBackend`], which gives each call a [`deadline`].

pub mod bounded;
pub mod clock;
pub mod contract_tests;
pub mod deadline;
pub mod http;
pub mod inspection;
pub mod local;
pub mod process;
pub mod program;
pub mod progress;
pub mod registration;
pub mod secret;
pub mod share_worker;
pub mod site_command;
pub mod ssh;
pub mod state_directory;
pub mod token_review;

pub use doctor_host::{open_files, trusted_file};

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use deadline::Deadline;
use doctor_checks::document::RunKey;
use doctor_core::{
    access::Access,
    case::StepKind,
    fnv::fnv1a,
    ids::{CaseId, JobId, NodeName, OpId, RunId, TestId},
    job_failures::JobFailure,
    last_output::LastOutput,
    node::{MarkKind, Node, OurMark},
    node_status::NodeStatus,
    run::{NonEmpty, ObservedJobState, Run},
    snapshot::Capabilities,
    time::{Span, Timestamp},
};
use doctor_host::marks::MarkChange;
pub use doctor_host::{
    output_file, shared_directory,
    vendor_reports::{self, ReportProgress, VendorReport},
};

/// The most bytes of output that a backend reads for one node: more than is kept, so that a secret at its start is recognised.
pub const MAX_REMAINING_OUTPUT: u64 = 32 << 10;

/// A cluster as the controller observes and changes it.
pub trait Backend: Send + Sync {
    /// Returns a short name for messages: `sim`, `local`, `kubernetes`.
    fn name(&self) -> &str;

    /// Returns the operations that this cluster supports.
    fn caps(&self) -> Capabilities;

    /// Returns every node of the cluster in its current state. A node that could not be fully read is included with
    /// `Occupancy::Unknown`. If the cluster could not be queried at all, this is an error.
    fn snapshot(&self) -> Result<Vec<ObservedNode>, BackendError>;

    /// Returns the nodes of the last snapshot whose marks this backend has not read since it was opened. The snapshot's marks of
    /// these nodes are not authoritative; the caller uses the marks it recorded earlier.
    fn nodes_with_unread_marks(&self) -> Vec<NodeName> {
        Vec::new()
    }

    /// Tells the backend which runs the caller has recorded, with their nodes, before it polls or cancels them. A run is recorded
    /// before it is submitted: where its submission was interrupted, a backend that has no list of jobs asks these nodes and no
    /// others. Called once per cycle; each call replaces the last.
    fn set_recorded_runs(&self, _runs: &[&Run]) {}

    /// Starts a job for this run. Idempotent: a repeated call with the same run id returns the same job.
    fn submit(&self, job: &JobRequest) -> Result<JobId, BackendError>;

    /// Returns the state of these runs' jobs, in the same order.
    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError>;

    /// Returns the output of a run's job on each node, as far as [`Self::poll`] has received it. For clusters whose logs are not
    /// on the shared directory.
    fn logs(&self, _run: RunId) -> Vec<(NodeName, String)> {
        Vec::new()
    }

    /// Returns what is left of a run's job that ended, or is about to be cancelled, without a complete result: the end of what it
    /// printed on each node, and how it ended in the cluster's words. Nodes of which nothing is known are left out. The caller
    /// treats the text as untrusted; this returns at most [`MAX_REMAINING_OUTPUT`] bytes for each node, within the limits of
    /// the backend's other calls.
    fn remaining_output(&self, _run: &Run) -> Result<Vec<LastOutput>, BackendError> {
        Ok(Vec::new())
    }

    /// Ends a run's job. Succeeds if the job is missing or has ended.
    fn cancel(&self, run: RunId) -> Result<(), BackendError>;

    /// Changes a node. Idempotent: a repeated call with the same operation id has no further effect.
    fn apply(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError>;

    /// Like [`Self::apply`], and records the reason where the cluster has a field for it.
    fn apply_with_reason(&self, node: &NodeName, change: &NodeOp, _ground: &ChangeReason) -> Result<(), BackendError> {
        self.apply(node, change)
    }

    /// Returns user work that failed since then, as far as the cluster reports it. Failures already returned may be returned
    /// again or omitted. Work that was cancelled, preempted, evicted, or that exceeded its own time limit has not failed.
    fn job_failures(&self, _since: Timestamp) -> Result<Vec<ObservedJobFailure>, BackendError> {
        Ok(Vec::new())
    }

    /// Collects what the node and its vendor's tool report, before a repair step destroys that evidence. The first call with an
    /// operation id starts the collection; the caller repeats the call until it has ended.
    fn collect_report(&self, _node: &NodeName, _op: OpId) -> ReportProgress {
        ReportProgress::Failed { text: format!("the backend {} cannot run it on a node", self.name()) }
    }

    /// Passes the handle by which long calls report that they advance, and that says how long one call may take
    /// ([`Progress::call_deadline`]). The engine calls it once, before all others. A backend that keeps it may change the
    /// handle it had before; one whose calls are short ignores it.
    ///
    /// [`Progress::call_deadline`]: progress::Progress::call_deadline
    fn set_progress(&self, _progress: &progress::Progress) {}

    /// Returns the writer of status on the nodes themselves, if the cluster has a place for it.
    fn status_writer(&self) -> Option<&dyn StatusWriter> {
        None
    }
}

/// Writes each node's status where every user of the node can read it.
pub trait StatusWriter: Sync {
    /// Returns the [`RenderedStatus::hash`] of the status on the node. `None`: there is none of ours, or it could not be read.
    fn status_hash(&self, node: &NodeName) -> Option<u64>;

    /// Replaces the status on the node.
    fn write(&self, node: &NodeName, what: &RenderedStatus) -> Result<(), BackendError>;

    /// Writes several statuses with up to `workers` threads. Returns the nodes whose write failed.
    fn write_all(&self, work: &[(NodeName, Arc<RenderedStatus>)], workers: usize) -> Vec<(NodeName, BackendError)> {
        write_each(work, workers, |node, what| self.write(node, what))
    }
}

/// Writes one status per call, on up to `workers` threads, and returns the failures.
pub fn write_each(
    work: &[(NodeName, Arc<RenderedStatus>)],
    workers: usize,
    write: impl Fn(&NodeName, &RenderedStatus) -> Result<(), BackendError> + Sync,
) -> Vec<(NodeName, BackendError)> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let write_in_time = |node: &NodeName, what: &RenderedStatus| {
        if deadline::is_over() {
            let (operation, text) = ("write the status to the node", deadline::TIME_IS_UP.to_owned());
            return Err(BackendError { operation, text, effect: Effect::NotAppliedRetry });
        }
        write(node, what)
    };
    let each = || {
        while let Some((node, what)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = write_in_time(node, what) {
                failed.lock().unwrap_or_else(PoisonError::into_inner).push((node.clone(), error));
            }
        }
    };
    let call = Deadline::current();
    std::thread::scope(|scope| {
        for _ in 1..workers.clamp(1, work.len().max(1)) {
            scope.spawn(|| deadline::enter(call.clone(), each));
        }
        each();
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// The status of a node, ready to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedStatus {
    pub status: NodeStatus,
    /// `status` as JSON.
    pub text: String,
    /// A hash of `status` without the findings' sentences. Equal statuses have equal numbers.
    pub hash: u64,
}

impl RenderedStatus {
    pub fn new(status: NodeStatus) -> Self {
        // Serialising names and numbers cannot fail.
        let text = serde_json::to_string(&status).unwrap_or_default();
        // A measured value in a sentence differs each time without being news.
        let mut without_texts = status.clone();
        without_texts.findings.iter_mut().for_each(|finding| finding.text.clear());
        let counted = serde_json::to_string(&without_texts).unwrap_or_default();
        // FNV-1a is the same in every version, so a status written by another version is recognised.
        let number = fnv1a(counted.as_bytes());
        Self { status, text, hash: number }
    }
}

/// A node of a snapshot. `node` is shared with the backend that caches it: most nodes do not change between snapshots. `agent_last_seen` is
/// when its agent last reported through this backend, if agents do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedNode {
    pub node: Arc<Node>,
    pub agent_last_seen: Option<Timestamp>,
    /// Runs whose jobs are pending or running here, including those of other controllers: a controller with an empty store must
    /// see that the node is in use.
    pub jobs: Vec<RunId>,
}

/// Failed user work and its nodes. A failure over many nodes says little about each; see [`doctor_core::job_failures`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedJobFailure {
    pub job: JobFailure,
    /// The nodes on which it failed or, if the cluster does not report those, on which it ran.
    pub nodes: Vec<NodeName>,
}

/// The parameters of a job.
#[derive(Debug, Clone)]
pub struct JobRequest {
    pub run: RunId,
    pub nodes: NonEmpty<NodeName>,
    pub tests: NonEmpty<TestId>,
    /// The access to the node that the tests need. A backend whose jobs run in containers grants it, and no more.
    pub access: Vec<Access>,
    pub limit: Span,
    /// The job signs its result document with this key.
    pub key: RunKey,
    /// The URL of the agent endpoint to which the job also posts its result document, for its environment
    /// (`doctor_checks::result_transport::URL_VARIABLE`).
    pub results: Option<String>,
    /// Where the logs and the result document are written.
    pub outputs: Vec<JobOutput>,
}

/// Where a job writes its logs and its result, relative to the shared directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobOutput {
    pub node: NodeName,
    /// One per test, in the order of the tests.
    pub logs: Vec<PathBuf>,
    pub document: PathBuf,
}

/// The state of a job, and the result documents that the poll returned, if the backend transports them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolledJob {
    pub state: ObservedJobState,
    pub documents: Vec<Vec<u8>>,
}

/// A change to a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeOp {
    /// Operations with the same id are the same change.
    pub op: OpId,
    pub what: Change,
}

/// Why a node is changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangeReason {
    pub case: Option<CaseId>,
    /// The reason code of the worst finding, or `operator`. `text` is its sentence, or the operator's words.
    pub code: String,
    pub text: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    Mark(OurMark),
    Unmark(OurMark),
    Drain,
    /// Evicts user work. It succeeds when none is left; until then, the caller repeats it.
    Evict,
    Undrain,
    Reset,
    Reboot,
    Replace,
}

impl Change {
    /// Returns the step of a case that this carries out.
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

    /// Returns this change as a change of our marks, for clusters that have only marks: a drain is a cordon mark.
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

/// A failed backend call. It is never a verdict on a node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {text}")]
pub struct BackendError {
    pub operation: &'static str,
    pub text: String,
    pub effect: Effect,
}

/// What a failed call may have changed.
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Nothing changed; a retry may succeed.
    NotAppliedRetry,
    /// Nothing changed; a retry will not succeed.
    NotAppliedPermanent,
    /// It may have taken effect; repeat the call with the same id.
    Unknown,
}
