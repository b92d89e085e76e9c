//! What is said between the parts of a collective test: the worker that drives the GPUs, its node, and the first node of a
//! job, which keeps all of them in step.
//!
//! A line between node and worker is JSON; so is what a sealed message between nodes holds.

use doctor_checks::collective_report::{GpuReport, NodeReport};
use doctor_core::observation::ProbeFailure;
use serde::{Deserialize, Serialize};

/// The worker to its node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Said {
    /// The libraries are loaded, and these are the GPUs.
    Opened(Opened),
    /// NCCL's word for where the ranks meet, in hexadecimal.
    Id(String),
    /// All ranks of this node wait before this step.
    At(usize),
    /// One GPU is done.
    Report(GpuReport),
    Cannot(ProbeFailure),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Opened {
    /// Addresses on the bus.
    pub(super) gpus: Vec<String>,
    /// The largest message that they have room for, in bytes.
    pub(super) room: u64,
    pub(super) nccl: u32,
}

/// The node to its worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Told {
    MakeId,
    Begin(Begin),
    Go(usize),
    Stop,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Begin {
    pub(super) id: String,
    pub(super) first_rank: u32,
    pub(super) ranks: u32,
    /// The largest message that every GPU of the job has room for.
    pub(super) room: u64,
}

/// A node to the first one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Up {
    Opened {
        gpus: u32,
        room: u64,
    },
    Id(String),
    At(usize),
    /// It cannot go on; nobody should wait for it.
    Broken(String),
    Report(NodeReport),
}

/// The first node to another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Down {
    MakeId,
    Begin(Begin),
    Go(usize),
    Stop(String),
    /// The end: what all nodes have seen, and why it ended early, if it did.
    All {
        reports: Vec<NodeReport>,
        why: Option<String>,
    },
}

/// The first words of a node that comes to the first one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) rank: u32,
    pub(super) nodes: u32,
    pub(super) name: String,
}

/// The answer to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Welcome {
    In,
    Refused(String),
}
