//! Parameters of one fabric test: devices, duration and programs.
//!
//! The check writes them and the test on the node reads them; the evidence records them as the probe's argument.

use doctor_core::time::Span;
use serde::{Deserialize, Serialize};

/// The parameters of one test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FabricParams {
    /// Device names, such as `mlx5_0`. Empty: all devices.
    pub devices: Vec<String>,
    /// The duration of the load on each InfiniBand or RoCE port.
    pub duration: Span,
    /// How long the test of a port may take beyond that before it counts as stalled.
    pub stall: Span,
    /// The GID index for RoCE, where the adapter's default is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid_index: Option<u32>,
    /// `ib_write_bw` and `fi_pingpong`, by name or path.
    pub ib_write_bw: String,
    pub fi_pingpong: String,
    /// No further port is started after this long.
    pub timeout: Span,
}

/// Bytes of an `ib_write_bw` message, the size for which other projects publish limits.
pub const WRITE_BYTES: u64 = 8 << 20;
/// Bytes of a `fi_pingpong` message, and the number of round trips.
pub const PINGPONG_BYTES: u64 = 1 << 20;
pub const PINGPONG_ITERATIONS: u32 = 1000;
