//! What the fabric test is told to do: on which devices, how long, with which programs.
//!
//! The check writes the order, the test on the node reads it; it stands in the evidence as the probe's argument.

use doctor_core::time::Span;
use serde::{Deserialize, Serialize};

/// One test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FabricOrder {
    /// By name, such as `mlx5_0`. Empty: all of them.
    pub devices: Vec<String>,
    /// Of the load on each InfiniBand or RoCE port.
    pub duration: Span,
    /// How long the test of a port may take beyond that before it counts as stalled.
    pub stall: Span,
    /// For RoCE, where the adapter's own choice is not the right one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid_index: Option<u32>,
    /// `ib_write_bw` and `fi_pingpong`, by name or path.
    pub ib_write_bw: String,
    pub fi_pingpong: String,
    /// No further port is begun after this long.
    pub timeout: Span,
}

/// Bytes of a message of `ib_write_bw`, as others use who publish limits for it.
pub const WRITE_BYTES: u64 = 8 << 20;
/// Bytes of a message of `fi_pingpong`, and how often it goes forth and back.
pub const PINGPONG_BYTES: u64 = 1 << 20;
pub const PINGPONGS: u32 = 1000;
