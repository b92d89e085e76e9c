//! The reports that the ranks of a collective test bring home: one for each node, with one for each of its GPUs.

use serde::{Deserialize, Serialize};

/// One GPU of the job, in the order of ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuReport {
    pub rank: u32,
    /// Its address on the bus.
    pub gpu: String,
    /// As far as it came.
    pub sizes: Vec<SizeReport>,
    /// What it sent to the next rank, while it received from the one before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exchange: Option<SizeReport>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub broken: Option<Broken>,
}

/// One size on one GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SizeReport {
    pub bytes: u64,
    /// One of them.
    pub seconds: f64,
    /// Elements that are not the sum.
    pub wrong: u64,
    /// The first of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub listed: Vec<WrongElement>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WrongElement {
    pub place: u64,
    /// As the bits of a float.
    pub expected: u32,
    pub got: u32,
    /// The rank whose share is exactly what is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<u32>,
}

/// Why a GPU did not come to the end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "how", content = "text")]
pub enum Broken {
    /// A message was not through in time.
    Hung(String),
    /// The driver gave the GPU up.
    Gpu(String),
    /// A library refused.
    Failed(String),
    /// It lost another rank, whose own word says more.
    Lost(String),
    /// Planted errors were not found.
    Blind(String),
    /// Somebody else's trouble ended it.
    Stopped,
}

impl Broken {
    pub fn text(&self) -> &str {
        match self {
            Self::Hung(text) | Self::Gpu(text) | Self::Failed(text) | Self::Lost(text) | Self::Blind(text) => text,
            Self::Stopped => "told to stop",
        }
    }
}

/// One node of the job, in the order of ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeReport {
    pub node: String,
    pub gpus: Vec<GpuReport>,
    /// Why its figures are not of what was asked, by its NCCL's log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_way: Option<String>,
}
