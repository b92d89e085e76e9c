//! What the collective test is told to do: which way the data shall go, how much of it, with whom and for how long.
//!
//! The check writes the order, the test on the node reads it; it stands in the evidence as the probe's argument. What is
//! different on each node of a job (its rank, the address of the first one) may be in it, and comes from the launcher's
//! environment where it is not. A secret is never in it.

use doctor_core::time::Span;
use serde::{Deserialize, Serialize};

/// One test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectiveOrder {
    pub mode: Mode,
    /// Bytes of the smallest and of the largest message.
    pub least: u64,
    pub most: u64,
    /// The network that data must take where it takes one, as NCCL calls it.
    pub net: String,
    /// Which of its devices, as `NCCL_IB_HCA` takes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hca: Option<String>,
    /// Whether data may go through the host's memory inside a node that has no peer access.
    #[serde(default)]
    pub shared_memory: bool,
    /// libnccl, where it is not found by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub library: Option<String>,
    /// `all_reduce_perf` and what starts it, where that is to be used instead of our own ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nccl_tests: Vec<String>,
    #[serde(default, skip_serializing_if = "Job::is_empty")]
    pub job: Job,
    /// How long the nodes of a job wait for each other.
    pub gather: Span,
    /// One message may take so long with all its repeats; a collective that takes longer hangs.
    pub stall: Span,
    /// The whole test.
    pub timeout: Span,
}

/// A job of several nodes, as far as the order says it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Which of the nodes this is, counted from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<u32>,
    /// Where the first node listens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// What the nodes are called, in the order of their ranks: a host list.
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

/// Which way the data shall go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Between the GPUs of one node, by NVLink or what it has instead.
    Nvlink,
    /// Between the GPUs of one node, out by its network cards and in again.
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

    /// The metric that its bus bandwidth is kept under; profiles say the same name.
    pub const fn metric(self) -> &'static str {
        match self {
            Self::Nvlink => "nccl_busbw_bytes_per_s",
            Self::Loopback => "nccl_ib_loopback_busbw_bytes_per_s",
            Self::Nodes => "nccl_nodes_busbw_bytes_per_s",
        }
    }
}

/// The metric that says how many GPUs took part, in all nodes together.
pub const GPUS: &str = "collective_gpus";

/// From one size to the next.
const STEP: u64 = 4;
/// What all repeats of one size together move, where that is not too few or too many repeats.
const BYTES_A_SIZE: u64 = 64 << 30;
const REPEATS: std::ops::RangeInclusive<u64> = 4..=50;

impl CollectiveOrder {
    /// The messages in bytes, ascending. The largest is `most`, or what the smallest memory among the GPUs has room for.
    pub fn sizes(&self, room: u64) -> Vec<u64> {
        // Whole vectors of sixteen bytes.
        let most = self.most.min(room) / 16 * 16;
        let mut sizes = Vec::new();
        let mut size = most;
        while size >= self.least.max(16) {
            sizes.push(size);
            size = size / STEP / 16 * 16;
        }
        sizes.reverse();
        sizes
    }

    /// How often a message of this size is sent while time is taken. The same on every node.
    pub fn repeats(bytes: u64) -> u32 {
        (BYTES_A_SIZE / bytes.max(1)).clamp(*REPEATS.start(), *REPEATS.end()) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order() -> CollectiveOrder {
        CollectiveOrder {
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
    fn sizes_end_at_the_largest_that_there_is_room_for() {
        let mib = |sizes: Vec<u64>| sizes.into_iter().map(|size| size >> 20).collect::<Vec<_>>();
        assert_eq!(mib(order().sizes(u64::MAX)), [1, 4, 16, 64, 256, 1024]);
        assert_eq!(mib(order().sizes(100 << 20)), [1, 6, 25, 100]);
        assert!(order().sizes(1 << 10).is_empty(), "no room is no test");
        assert_eq!((CollectiveOrder::repeats(8), CollectiveOrder::repeats(16 << 30)), (50, 4));
    }

    #[test]
    fn an_order_says_the_same_after_a_trip_and_every_mode_reads_back() {
        let text = serde_json::to_string(&order()).unwrap();
        assert!(text.starts_with(r#"{"mode":"loopback""#) && !text.contains("job"), "{text}");
        assert_eq!(serde_json::from_str::<CollectiveOrder>(&text).unwrap(), order());
        for mode in Mode::ALL {
            assert_eq!(Mode::from_code(mode.code()), Some(*mode));
        }
    }
}
