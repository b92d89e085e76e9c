//! The report formats of a collective test: one report per node, with one report for each of its GPUs.

use serde::{Deserialize, Serialize};

use crate::disturbance::Disturbance;

/// The report of one GPU of the job, in rank order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuReport {
    pub rank: u32,
    /// The PCI address of the GPU.
    pub gpu: String,
    /// The sizes that completed.
    pub sizes: Vec<SizeReport>,
    /// The message sent to the next rank while receiving from the previous one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exchange: Option<SizeReport>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<RankFailure>,
}

/// The result of one message size on one GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SizeReport {
    pub bytes: u64,
    /// The time of one repeat.
    pub seconds: f64,
    /// The number of elements that differ from the expected sum.
    pub wrong: u64,
    /// The first wrong elements.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wrong_elements: Vec<WrongElement>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WrongElement {
    pub index: u64,
    /// The bits of an `f32`.
    pub expected: u32,
    pub got: u32,
    /// The rank whose share equals exactly the missing amount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing_rank: Option<u32>,
}

/// Why a GPU did not finish the test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "how", content = "text")]
pub enum RankFailure {
    /// A message did not complete in time.
    Hung(String),
    /// The driver lost the GPU.
    GpuLost(String),
    /// A library call failed.
    Failed(String),
    /// The connection to another rank was lost; that rank's own report is more specific.
    PeerLost(String),
    /// The comparison missed planted errors.
    ControlFailed(String),
    /// The coordinator stopped the rank because of a failure elsewhere.
    Stopped,
}

impl RankFailure {
    pub fn text(&self) -> &str {
        match self {
            Self::Hung(text)
            | Self::GpuLost(text)
            | Self::Failed(text)
            | Self::PeerLost(text)
            | Self::ControlFailed(text) => text,
            Self::Stopped => "stopped by the coordinator",
        }
    }
}

/// The report of one node of the job, in rank order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeReport {
    pub node: String,
    pub gpus: Vec<GpuReport>,
    /// Why its values are not those of the requested path, according to NCCL's log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_mismatch: Option<String>,
    /// What other processes did on its GPUs and its processors meanwhile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disturbances: Vec<Disturbance>,
}
