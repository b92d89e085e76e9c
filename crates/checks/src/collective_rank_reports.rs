//! The report formats of a collective test: one report per node, with one report for each of its GPUs.

use serde::{Deserialize, Serialize};

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
    pub broken: Option<RankFailure>,
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
    pub listed: Vec<WrongElement>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WrongElement {
    pub place: u64,
    /// The bits of an `f32`.
    pub expected: u32,
    pub got: u32,
    /// The rank whose share equals exactly the missing amount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<u32>,
}

/// Why a GPU did not finish the test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "how", content = "text")]
pub enum RankFailure {
    /// A message did not complete in time.
    Hung(String),
    /// The driver lost the GPU.
    Gpu(String),
    /// A library call failed.
    Failed(String),
    /// The connection to another rank was lost; that rank's own report is more specific.
    Lost(String),
    /// The comparison missed planted errors.
    Blind(String),
    /// The coordinator stopped the rank because of a failure elsewhere.
    Stopped,
}

impl RankFailure {
    pub fn text(&self) -> &str {
        match self {
            Self::Hung(text) | Self::Gpu(text) | Self::Failed(text) | Self::Lost(text) | Self::Blind(text) => text,
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
    pub other_way: Option<String>,
}
