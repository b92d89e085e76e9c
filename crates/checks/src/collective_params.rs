//! Parameters of one collective test: the path of the data, the message sizes, the nodes of the job and the time
//! limits.
//!
//! The check writes them and the test on the node reads them; the evidence records them as the probe's argument. Values
//! that differ from node to node (the rank, the address of the first node) are optional: the launcher's environment
//! supplies those that are missing. A secret is never part of the parameters.

use doctor_core::time::Span;
use serde::{Deserialize, Serialize};

/// The parameters of one test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectiveParams {
    pub mode: Mode,
    /// Bytes of the smallest and of the largest message.
    pub least: u64,
    pub most: u64,
    /// NCCL's name of the network that the data must use, in the modes that use one.
    pub net: String,
    /// Which devices of the network to use, in the format of `NCCL_IB_HCA`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hca: Option<String>,
    /// Whether data may go through host memory inside a node without peer access.
    #[serde(default)]
    pub shared_memory: bool,
    /// The path of libnccl, if the loader does not find it by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub library: Option<String>,
    /// The command line of `all_reduce_perf` including its launcher, if it replaces our own ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nccl_tests: Vec<String>,
    #[serde(default, skip_serializing_if = "Job::is_empty")]
    pub job: Job,
    /// How long the nodes of a job wait for each other.
    pub gather: Span,
    /// How long all repeats of one message size may take; a collective that takes longer counts as hung.
    pub stall: Span,
    /// How long the whole test may take.
    pub timeout: Span,
}

/// A job of several nodes, as far as the policy describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// The rank of this node, counted from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<u32>,
    /// The address at which the first node listens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The names of the nodes as a host list, in the order of their ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names: Option<String>,
    /// A file with the secret that the nodes of the job share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_file: Option<String>,
}

impl Job {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The path that the data must take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Between the GPUs of one node, over NVLink or the interconnect it has instead.
    Nvlink,
    /// Between the GPUs of one node, out through its network adapters and back in.
    Loopback,
    /// Between the GPUs of several nodes.
    Nodes,
}

impl Mode {
    pub const ALL: &'static [Self] = &[Self::Nvlink, Self::Loopback, Self::Nodes];

    pub const fn code(self) -> &'static str {
        match self {
            Self::Nvlink => "nvlink",
            Self::Loopback => "loopback",
            Self::Nodes => "nodes",
        }
    }

    pub fn from_code(code: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|mode| mode.code() == code)
    }

    /// Returns the name of the bus bandwidth metric, which is also its name in profiles.
    pub const fn metric(self) -> &'static str {
        match self {
            Self::Nvlink => "nccl_busbw_bytes_per_s",
            Self::Loopback => "nccl_ib_loopback_busbw_bytes_per_s",
            Self::Nodes => "nccl_nodes_busbw_bytes_per_s",
        }
    }
}

/// The metric that counts the participating GPUs of all nodes.
pub const GPU_COUNT_METRIC: &str = "collective_gpus";

/// The ratio of consecutive message sizes.
const SIZE_RATIO: u64 = 4;
/// The bytes that all repeats of one size move together, within the limits on the number of repeats.
const BYTES_PER_SIZE: u64 = 64 << 30;
const REPEATS: std::ops::RangeInclusive<u64> = 4..=50;

impl CollectiveParams {
    /// Returns the message sizes in bytes, ascending. The largest is `most`, or `room` if the smallest GPU memory has
    /// no more.
    pub fn sizes(&self, room: u64) -> Vec<u64> {
        // Sizes are whole vectors of 16 bytes.
        let most = self.most.min(room) / 16 * 16;
        let mut sizes = Vec::new();
        let mut size = most;
        while size >= self.least.max(16) {
            sizes.push(size);
            size = size / SIZE_RATIO / 16 * 16;
        }
        sizes.reverse();
        sizes
    }

    /// Returns how often a message of this size is sent in the timed run. The number is the same on every node.
    pub fn repeats(bytes: u64) -> u32 {
        (BYTES_PER_SIZE / bytes.max(1)).clamp(*REPEATS.start(), *REPEATS.end()) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order() -> CollectiveParams {
        CollectiveParams {
            mode: Mode::Loopback,
            least: 1 << 20,
            most: 1 << 30,
            net: "IB".to_owned(),
            hca: None,
            shared_memory: false,
            library: None,
            nccl_tests: Vec::new(),
            job: Job::default(),
            gather: Span::minutes(2),
            stall: Span::from_secs(60),
            timeout: Span::minutes(10),
        }
    }

    #[test]
    fn sizes_end_at_the_largest_that_fits_in_memory() {
        let mib = |sizes: Vec<u64>| sizes.into_iter().map(|size| size >> 20).collect::<Vec<_>>();
        assert_eq!(mib(order().sizes(u64::MAX)), [1, 4, 16, 64, 256, 1024]);
        assert_eq!(mib(order().sizes(100 << 20)), [1, 6, 25, 100]);
        assert!(order().sizes(1 << 10).is_empty(), "no size fits into the memory");
        assert_eq!((CollectiveParams::repeats(8), CollectiveParams::repeats(16 << 30)), (50, 4));
    }

    #[test]
    fn parameters_and_modes_survive_a_round_trip() {
        let text = serde_json::to_string(&order()).unwrap();
        assert!(text.starts_with(r#"{"mode":"loopback""#) && !text.contains("job"), "{text}");
        assert_eq!(serde_json::from_str::<CollectiveParams>(&text).unwrap(), order());
        for mode in Mode::ALL {
            assert_eq!(Mode::from_code(mode.code()), Some(*mode));
        }
    }
}
