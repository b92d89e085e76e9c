//! Parses NCCL's log (`NCCL_DEBUG=INFO`) for the transport of each connection.
//!
//! A bandwidth is meaningless without it. NCCL uses whatever works: configured for InfiniBand on a machine where that
//! is broken, many versions continue over sockets, and an all-reduce that should leave the machine may stay in its
//! memory. So the log must name every connection, each with the requested transport; otherwise no value is reported.
//!
//! Known formats range from 2.4 (`Ring 00 : 12[41000] -> 11[2d000] via P2P/IPC`) to 2.32
//! (`Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA`), with and without a time before the host name.

use std::collections::{BTreeMap, BTreeSet};

use crate::collective_params::Mode;

/// The transport of one connection.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Transport {
    /// From GPU to GPU, over NVLink or PCIe.
    Peer,
    /// Through host memory.
    SharedMemory,
    /// Through the network of this name, and whether the adapter accesses GPU memory directly.
    Network { net: String, gpu_direct: bool },
    /// A transport that this program does not know.
    Other(String),
}

impl Transport {
    fn parse(text: &str) -> Self {
        let (kind, rest) = text.split_once('/').unwrap_or((text, ""));
        match kind {
            "P2P" => Self::Peer,
            "SHM" => Self::SharedMemory,
            "NET" | "COLLNET" => {
                let net = rest.split('/').next().unwrap_or_default().to_owned();
                Self::Network { net, gpu_direct: rest.split('/').any(|part| part.trim().starts_with("GDRDMA")) }
            }
            _ => Self::Other(kind.chars().take(32).collect()),
        }
    }

    fn describe(&self) -> String {
        match self {
            Self::Peer => "from GPU to GPU (P2P)".to_owned(),
            Self::SharedMemory => "through the host's memory (SHM)".to_owned(),
            Self::Network { net, .. } if net == "Socket" => "through sockets (NET/Socket)".to_owned(),
            Self::Network { net, .. } => format!("through the network {net}"),
            Self::Other(kind) => format!("by {kind}"),
        }
    }
}

/// The content of a log, read line by line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NcclLog {
    /// The number of connections per transport.
    pub transports: BTreeMap<Transport, u64>,
    /// Ranks that send and that receive through a network.
    senders: BTreeSet<u32>,
    receivers: BTreeSet<u32>,
    /// NCCL's first warnings.
    pub warnings: Vec<String>,
    /// The first connection that could not be parsed, verbatim.
    unparsed: Option<String>,
}

/// A warning is one line; the first ones suffice.
const MAX_WARNINGS: usize = 8;
const MAX_LINE_CHARS: usize = 300;
/// No job has this many ranks; a larger number comes from a truncated line.
const MAX_RANKS: u32 = 1 << 20;

/// A parsed connection.
struct Connection {
    from: u32,
    to: u32,
    sends: bool,
    receives: bool,
    transport: Transport,
}

impl NcclLog {
    pub fn read(text: &str) -> Self {
        let mut log = Self::default();
        text.lines().for_each(|line| log.add_line(line));
        log
    }

    /// Parses the next line. Lines that are not NCCL's are ignored.
    pub fn add_line(&mut self, line: &str) {
        if let Some((_, text)) = line.split_once(" NCCL WARN ") {
            if self.warnings.len() < MAX_WARNINGS && !text.trim().is_empty() {
                self.warnings.push(text.trim().chars().take(MAX_LINE_CHARS).collect());
            }
            return;
        }
        let Some((_, text)) = line.split_once(" NCCL INFO ") else { return };
        let text = text.trim();
        if !["Channel ", "Ring ", "CollNet "].iter().any(|word| text.starts_with(word)) {
            return;
        }
        let Some((ends, transport)) = text.split_once(" via ") else { return };
        match connection(ends, transport) {
            Some(connection) => self.add_connection(connection),
            None => drop(self.unparsed.get_or_insert_with(|| text.chars().take(MAX_LINE_CHARS).collect())),
        }
    }

    fn add_connection(&mut self, connection: Connection) {
        let Connection { from, to, sends, receives, transport: way } = connection;
        if matches!(way, Transport::Network { .. }) {
            self.senders.extend(sends.then_some(from));
            self.receivers.extend(receives.then_some(to));
        }
        *self.transports.entry(way).or_default() += 1;
    }

    /// Checks that the data took the requested path.
    ///
    /// # Errors
    /// Returns why the measurements belong to another path, or to an unknown one.
    pub fn check_path(&self, requested: &RequestedPath<'_>) -> Result<PathCounts, PathError> {
        if let Some(line) = &self.unparsed {
            return Err(PathError::Unparsed { line: line.clone() });
        }
        let all: u64 = self.transports.values().sum();
        if all == 0 {
            return Err(PathError::NoConnection);
        }
        let others: Vec<_> = self.transports.iter().filter(|(transport, _)| !requested.allows(transport)).collect();
        if !others.is_empty() {
            let count = others.iter().map(|(_, count)| **count).sum();
            let transports =
                others.iter().map(|(transport, count)| format!("{count} {}", transport.describe())).collect::<Vec<_>>();
            return Err(PathError::OtherTransport {
                count,
                all,
                asked: requested.describe(),
                ways: transports.join(", "),
            });
        }
        let silent = |ranks: &BTreeSet<u32>| requested.ranks.clone().find(|rank| !ranks.contains(rank));
        let missing = match requested.mode {
            Mode::Nvlink => None,
            Mode::Loopback => silent(&self.senders).or_else(|| silent(&self.receivers)),
            // Only some of a node's ranks communicate with other nodes.
            Mode::Nodes if self.senders.is_empty() || self.receivers.is_empty() => Some(requested.ranks.start),
            Mode::Nodes => None,
        };
        match missing {
            Some(rank) => Err(PathError::RankMissing { rank, net: requested.net.to_owned() }),
            None => Ok(self.paths(all)),
        }
    }

    fn paths(&self, all: u64) -> PathCounts {
        let of = |matches_transport: fn(&Transport) -> bool| {
            self.transports.iter().filter(|(way, _)| matches_transport(way)).map(|(_, n)| *n).sum()
        };
        PathCounts {
            all,
            network: of(|way| matches!(way, Transport::Network { .. })),
            without_gpu_direct: of(|way| matches!(way, Transport::Network { gpu_direct: false, .. })),
        }
    }
}

fn connection(ends: &str, way: &str) -> Option<Connection> {
    let (_, ends) = ends.split_once(" : ")?;
    let (sends, receives) = (ends.contains("[send]"), ends.contains("[receive]"));
    let rank = |text: &str| {
        let digits = text.trim().split(|character: char| !character.is_ascii_digit()).next()?;
        digits.parse::<u32>().ok().filter(|rank| *rank < MAX_RANKS)
    };
    let (from, to) = match ends.split_once("->") {
        Some((from, to)) => (rank(from)?, rank(to)?),
        // A connection of a collective network has one end here and the other in a switch.
        None => (rank(ends)?, rank(ends)?),
    };
    Some(Connection { from, to, sends, receives, transport: Transport::parse(way.trim()) })
}

/// The expected content of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestedPath<'a> {
    pub mode: Mode,
    /// As in [`crate::collective_params::CollectiveParams::net`].
    pub net: &'a str,
    pub shared_memory: bool,
    /// The ranks whose log it is.
    pub ranks: std::ops::Range<u32>,
}

impl RequestedPath<'_> {
    fn allows(&self, way: &Transport) -> bool {
        match way {
            Transport::Peer => self.mode != Mode::Loopback,
            Transport::SharedMemory => self.mode != Mode::Loopback && self.shared_memory,
            Transport::Network { net, .. } => self.mode != Mode::Nvlink && self.is_net(net),
            Transport::Other(_) => false,
        }
    }

    /// InfiniBand plugins use names such as IBext, followed by a version.
    fn is_net(&self, net: &str) -> bool {
        net.eq_ignore_ascii_case(self.net) || self.net.eq_ignore_ascii_case("IB") && net.starts_with("IB")
    }

    fn describe(&self) -> String {
        match self.mode {
            Mode::Nvlink => "from GPU to GPU".to_owned(),
            Mode::Loopback | Mode::Nodes => format!("through the network {}", self.net),
        }
    }
}

/// The connections of a run that took the requested path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathCounts {
    pub all: u64,
    pub network: u64,
    /// Of those, the ones that go through host memory.
    pub without_gpu_direct: u64,
}

/// Why a measurement would not be of the requested path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    #[error("NCCL's log lists no connection, so the data path is unknown")]
    NoConnection,
    #[error("{count} of {all} connections did not go {asked}: {ways}")]
    OtherTransport { count: u64, all: u64, asked: String, ways: String },
    #[error("NCCL's log does not show that rank {rank} sends and receives through the network {net}")]
    RankMissing { rank: u32, net: String },
    #[error("a connection in NCCL's log cannot be parsed: {line}")]
    Unparsed { line: String },
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fixture(name: &str) -> NcclLog {
        let text = match name {
            "2.11-ib" => include_str!("../fixtures/nccl-log/2.11-ib.log"),
            "2.21-peer" => include_str!("../fixtures/nccl-log/2.21-peer.log"),
            "2.22-nodes" => include_str!("../fixtures/nccl-log/2.22-nodes.log"),
            "2.19-shm" => include_str!("../fixtures/nccl-log/2.19-shm.log"),
            "2.28-loopback" => include_str!("../fixtures/nccl-log/2.28-loopback.log"),
            "2.28-socket" => include_str!("../fixtures/nccl-log/2.28-socket.log"),
            "2.28.3-h200-two-ranks" => include_str!("../fixtures/nccl-log/2.28.3-h200-two-ranks.log"),
            other => panic!("{other}"),
        };
        NcclLog::read(text)
    }

    fn judge(name: &str, mode: Mode, ranks: std::ops::Range<u32>) -> Result<PathCounts, PathError> {
        fixture(name).check_path(&RequestedPath { mode, net: "IB", shared_memory: false, ranks })
    }

    #[test]
    fn a_loopback_requires_every_connection_to_use_the_network() {
        let paths = judge("2.28-loopback", Mode::Loopback, 0..2).unwrap();
        assert_eq!(paths, PathCounts { all: 8, network: 8, without_gpu_direct: 0 });
        assert_eq!(judge("2.11-ib", Mode::Loopback, 0..4).unwrap().without_gpu_direct, 0);
    }

    #[test]
    fn a_captured_log_of_two_nodes_over_sockets_is_parsed() {
        let log = fixture("2.28.3-h200-two-ranks");
        let requested = RequestedPath { mode: Mode::Nodes, net: "Socket", shared_memory: false, ranks: 0..1 };
        assert_eq!(log.check_path(&requested).unwrap(), PathCounts { all: 8, network: 8, without_gpu_direct: 8 });
        let fabric = judge("2.28.3-h200-two-ranks", Mode::Nodes, 0..1).unwrap_err().to_string();
        assert!(fabric.contains("8 through sockets (NET/Socket)"), "{fabric}");
    }

    #[test]
    fn a_fallback_is_reported_with_its_transport() {
        for (name, expected) in [
            ("2.28-socket", "8 of 8 connections did not go through the network IB: 8 through sockets (NET/Socket)"),
            ("2.21-peer", "from GPU to GPU (P2P)"),
            ("2.19-shm", "through the host's memory (SHM)"),
        ] {
            let error = judge(name, Mode::Loopback, 0..2).unwrap_err().to_string();
            assert!(error.contains(expected), "{name}: {error}");
        }
        assert!(judge("2.28-loopback", Mode::Nvlink, 0..2).unwrap_err().to_string().contains("network IB"));
        assert!(judge("2.19-shm", Mode::Nvlink, 0..2).is_err());
        let allowed = RequestedPath { mode: Mode::Nvlink, net: "IB", shared_memory: true, ranks: 0..2 };
        assert!(fixture("2.19-shm").check_path(&allowed).is_ok());
    }

    #[test]
    fn inside_a_node_data_goes_from_gpu_to_gpu_and_between_nodes_through_the_network() {
        assert_eq!(judge("2.21-peer", Mode::Nvlink, 0..8).unwrap().network, 0);
        let nodes = judge("2.22-nodes", Mode::Nodes, 32..40).unwrap();
        assert!(
            nodes.network > 0 && nodes.all > nodes.network && nodes.without_gpu_direct == nodes.network,
            "{nodes:?}"
        );
        let inside = judge("2.21-peer", Mode::Nodes, 0..8).unwrap_err();
        assert!(matches!(inside, PathError::RankMissing { .. }), "no connection leaves the node: {inside}");
    }

    #[test]
    fn a_rank_missing_in_the_log_and_a_truncated_line_make_the_path_unknown() {
        let missing = judge("2.28-loopback", Mode::Loopback, 0..3).unwrap_err();
        assert_eq!(missing, PathError::RankMissing { rank: 2, net: "IB".to_owned() });
        let silent = NcclLog::read("host:1:2 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\n");
        let requested = RequestedPath { mode: Mode::Nvlink, net: "IB", shared_memory: false, ranks: 0..2 };
        assert_eq!(silent.check_path(&requested), Err(PathError::NoConnection));
        let mut cut = fixture("2.21-peer");
        cut.add_line("host:1:2 [0] NCCL INFO Channel 00/0 : 0[0 via P2P/CUMEM");
        assert!(cut.check_path(&requested).is_ok(), "the rank is listed; the path is not checked");
        cut.add_line("host:1:2 [0] NCCL INFO Channel 00/0 : [0] -> via P2P/CUMEM");
        assert!(matches!(cut.check_path(&requested), Err(PathError::Unparsed { .. })));
    }

    #[test]
    fn the_number_of_warnings_is_limited_and_unknown_transports_are_rejected() {
        let mut log = NcclLog::default();
        for n in 0..100 {
            log.add_line(&format!("host:1:2 [0] misc/socket.cc:{n} NCCL WARN no socket interface found"));
        }
        log.add_line("host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via TUNNEL/9");
        assert_eq!(log.warnings.len(), MAX_WARNINGS);
        let requested = RequestedPath { mode: Mode::Nvlink, net: "IB", shared_memory: true, ranks: 0..2 };
        assert!(log.check_path(&requested).unwrap_err().to_string().contains("by TUNNEL"));
    }

    proptest! {
        #[test]
        fn no_line_makes_it_panic_and_no_single_line_is_a_complete_loopback(line in ".{0,200}") {
            let mut log = NcclLog::default();
            log.add_line(&line);
            log.add_line(&format!("host:1:2 [0] NCCL INFO Channel {line}"));
            let requested = RequestedPath { mode: Mode::Loopback, net: "IB", shared_memory: false, ranks: 0..8 };
            prop_assert!(log.check_path(&requested).is_err());
        }
    }
}
