//! Messages between the parts of a collective test: the worker that drives the GPUs, its node, and the first node,
//! which synchronises all nodes.
//!
//! Node and worker exchange lines of JSON; authenticated frames between nodes contain JSON too.

use doctor_checks::collective_report::{GpuReport, NodeReport};
use doctor_core::observation::ProbeFailure;
use serde::{Deserialize, Serialize};

/// From the worker to its node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum WorkerMessage {
    /// The libraries are loaded, and these are the GPUs.
    Opened(OpenedGpus),
    /// NCCL's unique id, in hexadecimal.
    Id(String),
    /// All ranks of this node wait before this step.
    AtStep(usize),
    /// One GPU is done.
    Report(GpuReport),
    Failed(ProbeFailure),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct OpenedGpus {
    /// PCI addresses.
    pub(super) gpus: Vec<String>,
    /// The largest message that fits into GPU memory, in bytes.
    pub(super) free_bytes: u64,
    pub(super) nccl: u32,
}

/// From the node to its worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum WorkerCommand {
    MakeId,
    Begin(StartParams),
    GoToStep(usize),
    Stop,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StartParams {
    pub(super) id: String,
    pub(super) first_rank: u32,
    pub(super) ranks: u32,
    /// The largest message that fits into every GPU of the job.
    pub(super) free_bytes: u64,
}

/// From a node to the first one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum ToFirst {
    Opened {
        gpus: u32,
        free_bytes: u64,
    },
    Id(String),
    AtStep(usize),
    /// The node cannot continue and must not be waited for.
    Failed(String),
    Report(NodeReport),
}

/// From the first node to another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum FromFirst {
    MakeId,
    Begin(StartParams),
    GoToStep(usize),
    Stop(String),
    /// The end: the reports of all nodes, and why the test ended early, if it did.
    Finished {
        reports: Vec<NodeReport>,
        why: Option<String>,
    },
}

/// The first message of a node that connects to the first one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct JoinRequest {
    pub(super) rank: u32,
    pub(super) nodes: u32,
    pub(super) name: String,
}

/// The reply to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum JoinReply {
    Accepted,
    Rejected(String),
}
