//! Derives a node's measurements from the reports of all ranks of a collective test.
//!
//! Every node of a job receives the reports of all nodes and evaluates its own part: a rank that computes wrong results
//! is a fault of its node, and the other nodes must not be blamed for summing up its data.

use doctor_core::observation::{Entity, EntityKind, Event, FailureKind, Metric, ProbeFailure, Unit};

pub use crate::collective_rank_reports::{GpuReport, NodeReport, RankFailure, SizeReport, WrongElement};
use crate::{
    collective_links,
    collective_params::{GPU_COUNT_METRIC, Mode},
    disturbance::{self, RatesOf},
    document::Measurements,
    nccl_log::PathCounts,
};

/// Returns the bus bandwidth of an all-reduce in bytes per second: the rate per link, independent of the number of
/// ranks.
pub fn bus_bandwidth(bytes: u64, seconds: f64, ranks: usize) -> f64 {
    let ranks = ranks as f64;
    bytes as f64 / seconds * 2.0 * (ranks - 1.0) / ranks
}

/// Returns the rows of the table of sizes: bytes, seconds of the slowest rank, bus bandwidth, wrong elements.
pub fn bandwidth_table(nodes: &[NodeReport]) -> Vec<(u64, f64, f64, u64)> {
    let gpus: Vec<_> = nodes.iter().flat_map(|node| &node.gpus).collect();
    let complete = gpus.iter().map(|gpu| gpu.sizes.len()).min().unwrap_or_default();
    (0..complete)
        .map(|size| {
            let all = gpus.iter().map(|gpu| &gpu.sizes[size]);
            let bytes = gpus[0].sizes[size].bytes;
            let seconds = all.clone().map(|size| size.seconds).fold(0.0, f64::max);
            (bytes, seconds, bus_bandwidth(bytes, seconds, gpus.len()), all.map(|size| size.wrong).sum())
        })
        .collect()
}

/// Returns the measurements of the node at index `own`, from the reports of all nodes.
pub fn measurements(
    mode: Mode,
    nodes: &[NodeReport],
    own: usize,
    paths: Option<PathCounts>,
    nccl: u32,
) -> Measurements {
    let mut result = Measurements::default();
    let node = Entity::node;
    let gpus = nodes.iter().map(|node| node.gpus.len()).sum::<usize>();
    result.metrics.push(Metric::count(GPU_COUNT_METRIC, node(), gpus as f64));
    result.metrics.push(Metric::count("nccl_version", node(), f64::from(nccl)));
    WrongSums { nodes, own }.report(&mut result);
    for finding in rank_failures(nodes, own) {
        match finding {
            RankFinding::Event(event) => result.events.push(event),
            RankFinding::Failure(failure) => result.failures.push(failure),
        }
    }
    for report in nodes {
        if let Some(why) = &report.path_mismatch {
            result.failures.push(ProbeFailure::new(FailureKind::Failed, with_node_name(nodes, report, why)));
        }
    }
    // A bandwidth over another path, or of an unfinished all-reduce, does not count.
    if let (Some(paths), Some((bytes, seconds, bandwidth, _)), true) =
        (paths, bandwidth_table(nodes).last().copied(), result.failures.is_empty())
        && seconds > 0.0
    {
        result.metrics.push(Metric::new(mode.metric(), node(), bandwidth, Unit::BytesPerSecond));
        result.metrics.push(Metric::new("collective_bytes", node(), bytes as f64, Unit::Bytes));
        result.metrics.push(Metric::count("nccl_connections", node(), paths.all as f64));
        if paths.network > 0 {
            result.metrics.push(Metric::count("nccl_without_gpu_direct", node(), paths.without_gpu_direct as f64));
        }
        result.metrics.extend(collective_links::link_metrics(nodes, own));
        if let Some((_, seconds, ..)) = bandwidth_table(nodes).first() {
            result.metrics.push(Metric::new("nccl_latency", node(), *seconds, Unit::Seconds));
        }
    }
    if gpus > 1 {
        apply_disturbances(&mut result, nodes, own);
    }
    result
}

/// All nodes wait for the slowest: a disturbance of one withholds the rates of all.
fn apply_disturbances(result: &mut Measurements, nodes: &[NodeReport], own: usize) {
    for (_, other) in nodes.iter().enumerate().filter(|(index, _)| *index != own) {
        disturbance::apply_from_other_node(result, &other.node, &other.disturbances);
    }
    if let Some(report) = nodes.get(own) {
        disturbance::apply(result, &report.disturbances, RatesOf::AllGpus);
    }
}

enum RankFinding {
    Event(Event),
    Failure(ProbeFailure),
}

/// Returns why ranks did not finish. Ranks that were only stopped because of another rank's failure are left out.
fn rank_failures(nodes: &[NodeReport], own: usize) -> Vec<RankFinding> {
    let mut findings = Vec::new();
    let mut hung: Option<(&NodeReport, &String)> = None;
    let mut lost = None;
    for (index, report) in nodes.iter().enumerate() {
        for gpu in &report.gpus {
            let entity = Entity::new(EntityKind::Gpu, &gpu.gpu);
            let unread = |kind, text: &str| {
                RankFinding::Failure(ProbeFailure::new(
                    kind,
                    with_node_name(nodes, report, &format!("GPU {}: {text}", gpu.gpu)),
                ))
            };
            match &gpu.failure {
                None | Some(RankFailure::Stopped) => {}
                Some(RankFailure::GpuLost(text)) if index == own => {
                    findings.push(RankFinding::Event(Event::seen("gpu-failed", entity, text)));
                }
                Some(RankFailure::GpuLost(text) | RankFailure::Failed(text)) => {
                    findings.push(unread(FailureKind::Failed, text));
                }
                Some(RankFailure::ControlFailed(text)) => findings.push(unread(FailureKind::Failed, text)),
                Some(RankFailure::Hung(text)) => drop(hung.get_or_insert((report, text))),
                Some(RankFailure::PeerLost(text)) => {
                    lost.get_or_insert_with(|| unread(FailureKind::Failed, text));
                }
            }
        }
    }
    // All ranks hang together, so the origin is known only if a rank reports another failure. Traffic on another path
    // may only have been slow, and the other ranks lose one that is stopped for that.
    let other_transport = nodes.iter().any(|node| node.path_mismatch.is_some());
    if let Some((report, text)) = hung.filter(|_| findings.is_empty() && !other_transport) {
        findings.push(RankFinding::Event(Event::seen(
            "collective-hung",
            Entity::node(),
            with_node_name(nodes, report, text),
        )));
    }
    if findings.is_empty() && !other_transport {
        findings.extend(lost);
    }
    findings
}

fn with_node_name(nodes: &[NodeReport], report: &NodeReport, text: &str) -> String {
    if nodes.len() == 1 { text.to_owned() } else { format!("node {}: {text}", report.node) }
}

/// Attributes wrong sums to a rank.
struct WrongSums<'a> {
    nodes: &'a [NodeReport],
    own: usize,
}

impl WrongSums<'_> {
    fn report(&self, measurements: &mut Measurements) {
        let gpus: Vec<_> = self.nodes.iter().flat_map(|node| &node.gpus).collect();
        let bad: Vec<_> = gpus.iter().copied().filter(|gpu| wrong_count(gpu) > 0).collect();
        let own = &self.nodes[self.own].gpus;
        let count = own.iter().map(wrong_count).sum::<u64>();
        measurements.metrics.push(Metric::count("collective_wrong_elements", Entity::node(), count as f64));
        if bad.is_empty() {
            return;
        }
        // If every rank got wrong sums, they were wrong before they were distributed.
        if bad.len() < gpus.len() {
            let here = bad.iter().filter(|gpu| own.iter().any(|mine| mine.rank == gpu.rank));
            measurements.events.extend(here.map(|gpu| {
                let text = format!("{}; {} of {} GPUs got wrong sums", describe_wrong_sums(gpu), bad.len(), gpus.len());
                Event::seen("collective-wrong", Entity::new(EntityKind::Gpu, &gpu.gpu), text)
            }));
            return;
        }
        match missing_rank(&gpus) {
            Some(rank) => self.report_missing_rank(rank, bad[0], measurements),
            None if self.nodes.len() == 1 => {
                let text = format!("{}; on every GPU", describe_wrong_sums(bad[0]));
                measurements.events.push(Event::seen("collective-wrong", Entity::node(), text));
            }
            None => {
                let text = format!(
                    "{}; every GPU of every node got wrong sums, so the faulty node is unknown",
                    describe_wrong_sums(bad[0])
                );
                measurements.failures.push(ProbeFailure::new(FailureKind::Failed, text));
            }
        }
    }

    fn report_missing_rank(&self, rank: u32, seen: &GpuReport, measurements: &mut Measurements) {
        let text = format!("{}; the contribution of rank {rank} is missing", describe_wrong_sums(seen));
        let owner = self.nodes.iter().find(|node| node.gpus.iter().any(|gpu| gpu.rank == rank));
        let mine = self.nodes[self.own].gpus.iter().find(|gpu| gpu.rank == rank);
        match (mine, owner) {
            (Some(gpu), _) => {
                measurements.events.push(Event::seen("collective-wrong", Entity::new(EntityKind::Gpu, &gpu.gpu), text));
            }
            (None, owner) => {
                let name = owner.map_or("another node", |node| node.node.as_str());
                measurements.failures.push(ProbeFailure::new(FailureKind::Failed, format!("{text}, on node {name}")));
            }
        }
    }
}

fn wrong_count(gpu: &GpuReport) -> u64 {
    gpu.sizes.iter().chain(&gpu.exchange).map(|size| size.wrong).sum()
}

/// Returns the rank whose share is missing in all listed elements.
fn missing_rank(gpus: &[&GpuReport]) -> Option<u32> {
    let listed = || gpus.iter().flat_map(|gpu| &gpu.sizes).flat_map(|size| &size.wrong_elements);
    let rank = listed().next()?.missing_rank?;
    listed().all(|element| element.missing_rank == Some(rank)).then_some(rank)
}

fn describe_wrong_sums(gpu: &GpuReport) -> String {
    let all = wrong_count(gpu);
    let first = gpu.sizes.iter().find_map(|size| Some((size.bytes, size.wrong_elements.first()?)));
    match first {
        Some((bytes, element)) => format!(
            "{all} wrong elements, the first at index {} of a message of {bytes} bytes: got {}, expected {}",
            element.index,
            f32::from_bits(element.got),
            f32::from_bits(element.expected)
        ),
        None => format!("{all} wrong elements"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disturbance::Disturbance;

    const MIB: u64 = 1 << 20;

    fn gpu(rank: u32) -> GpuReport {
        let size = |bytes: u64, seconds| SizeReport { bytes, seconds, wrong: 0, wrong_elements: Vec::new() };
        let sizes = vec![size(MIB, 1e-5), size(1024 * MIB, 4e-3 + f64::from(rank) * 1e-4)];
        let exchange = Some(size(64 * MIB, 1e-3));
        GpuReport { rank, gpu: format!("0000:{:02x}:00.0", 0x18 + rank), sizes, exchange, failure: None }
    }

    fn job(nodes: u32, gpus: u32) -> Vec<NodeReport> {
        let node = |node: u32| NodeReport {
            node: format!("n{node}"),
            gpus: (node * gpus..(node + 1) * gpus).map(gpu).collect(),
            path_mismatch: None,
            disturbances: Vec::new(),
        };
        (0..nodes).map(node).collect()
    }

    fn spoil(gpu: &mut GpuReport, lost: Option<u32>) {
        let element = WrongElement { index: 7, expected: 3.0f32.to_bits(), got: 0, missing_rank: lost };
        gpu.sizes[0].wrong = 1;
        gpu.sizes[0].wrong_elements.push(element);
    }

    const PATHS: PathCounts = PathCounts { all: 16, network: 0, without_gpu_direct: 0 };

    fn measured(nodes: &[NodeReport], own: usize) -> Measurements {
        measurements(Mode::Nvlink, nodes, own, Some(PATHS), 22_809)
    }

    fn figure(measured: &Measurements) -> Option<f64> {
        measured.metrics.iter().find(|metric| metric.name == Mode::Nvlink.metric()).map(|metric| metric.value)
    }

    #[test]
    fn the_bandwidth_is_that_of_the_largest_size_on_the_slowest_gpu() {
        let all = measured(&job(1, 8), 0);
        let expected = (1024 * MIB) as f64 / 4.7e-3 * 14.0 / 8.0;
        assert!((figure(&all).unwrap() - expected).abs() < 1.0, "{all:?}");
        assert!(all.events.is_empty() && all.failures.is_empty());
        assert_eq!(bandwidth_table(&job(1, 8)).len(), 2);
        assert_eq!(figure(&measurements(Mode::Nvlink, &job(1, 8), 0, None, 1)), None, "the path is unknown");
    }

    #[test]
    fn a_gpu_with_wrong_sums_is_reported_only_by_its_own_node() {
        let mut nodes = job(2, 4);
        spoil(&mut nodes[1].gpus[2], None);
        assert!(measured(&nodes, 0).events.is_empty() && measured(&nodes, 0).failures.is_empty());
        let own = measured(&nodes, 1);
        assert_eq!(own.events[0].entity.to_string(), "gpu:0000:1e:00.0");
        assert!(own.events[0].text.contains("got 0, expected 3; 1 of 8 GPUs"), "{}", own.events[0].text);
    }

    #[test]
    fn sums_wrong_on_every_gpu_are_attributed_to_the_rank_whose_contribution_is_missing() {
        let mut nodes = job(2, 4);
        nodes.iter_mut().flat_map(|node| &mut node.gpus).for_each(|gpu| spoil(gpu, Some(5)));
        let theirs = measured(&nodes, 0);
        assert!(
            theirs.events.is_empty() && theirs.failures[0].text.contains("rank 5 is missing, on node n1"),
            "{theirs:?}"
        );
        assert_eq!(figure(&theirs), None);
        assert_eq!(measured(&nodes, 1).events[0].entity.to_string(), "gpu:0000:1d:00.0");
    }

    #[test]
    fn unattributed_wrong_sums_blame_a_single_node_but_none_of_several() {
        let mut one = job(1, 4);
        one[0].gpus.iter_mut().for_each(|gpu| spoil(gpu, None));
        assert_eq!(measured(&one, 0).events[0].entity, Entity::node());
        let mut nodes = job(2, 2);
        nodes.iter_mut().flat_map(|node| &mut node.gpus).for_each(|gpu| spoil(gpu, None));
        assert!(measured(&nodes, 0).events.is_empty() && measured(&nodes, 0).failures.len() == 1);
    }

    #[test]
    fn a_hang_is_reported_unless_another_rank_reports_its_cause() {
        let hang = |nodes: &mut Vec<NodeReport>| {
            for gpu in nodes.iter_mut().flat_map(|node| &mut node.gpus) {
                gpu.sizes.pop();
                gpu.failure = Some(RankFailure::Hung("a message of 8 bytes did not complete within 60s".to_owned()));
            }
        };
        let (mut one, mut two) = (job(1, 2), job(2, 2));
        hang(&mut one);
        hang(&mut two);
        assert_eq!(measured(&one, 0).events[0].code.as_str(), "collective-hung");
        assert_eq!(measured(&two, 0).events[0].code.as_str(), "collective-hung");
        two[1].gpus[0].failure = Some(RankFailure::GpuLost("CUDA_ERROR_ECC_UNCORRECTABLE".to_owned()));
        assert!(measured(&two, 0).failures[0].text.starts_with("node n1: GPU 0000:1a:00.0: CUDA_ERROR"), "{two:?}");
        assert_eq!(measured(&two, 1).events[0].code.as_str(), "gpu-failed");
    }

    #[test]
    fn a_lost_peer_is_reported_only_if_the_peer_reports_no_failure() {
        let mut nodes = job(2, 1);
        nodes[0].gpus[0].failure = Some(RankFailure::PeerLost("remote process exited".to_owned()));
        nodes[1].gpus[0].failure = Some(RankFailure::Stopped);
        assert!(measured(&nodes, 0).failures[0].text.contains("remote process exited"));
        nodes[1].gpus[0].failure = Some(RankFailure::Failed("its worker was killed by signal 6".to_owned()));
        let all = measured(&nodes, 0);
        assert!(all.failures.len() == 1 && all.failures[0].text.contains("signal 6"), "{all:?}");
    }

    #[test]
    fn a_disturbed_gpu_of_any_node_withholds_the_bandwidth_of_all_and_hides_no_wrong_sum() {
        let mut nodes = job(2, 2);
        let entity = Entity::new(EntityKind::Gpu, &nodes[1].gpus[0].gpu);
        nodes[1].disturbances.push(Disturbance {
            entity,
            disturber: "python3 of uid 1000".to_owned(),
            by: "python3 (pid 7, user ann)".to_owned(),
            text: "used by python3 (pid 7, user ann)".to_owned(),
        });
        for (own, start) in [(0, "node n1: python3 (pid 7, user ann) used"), (1, "python3 (pid 7, user ann) used")] {
            let all = measured(&nodes, own);
            assert_eq!((figure(&all), all.failures[0].kind), (None, FailureKind::Disturbed));
            assert!(all.failures[0].text.starts_with(start), "{all:?}");
            assert_eq!(all.events.len(), own, "the event is that of the disturbed node: {all:?}");
        }
        spoil(&mut nodes[1].gpus[0], None);
        assert!(measured(&nodes, 1).events.iter().any(|event| event.code.as_str() == "collective-wrong"));
    }

    #[test]
    fn another_transport_on_any_node_invalidates_the_bandwidth_of_all_nodes() {
        let mut nodes = job(2, 2);
        nodes[1].path_mismatch = Some("4 through sockets (NET/Socket)".to_owned());
        let first = measured(&nodes, 0);
        assert_eq!(figure(&first), None);
        assert_eq!(first.failures[0].text, "node n1: 4 through sockets (NET/Socket)");
        let mut slow = job(1, 2);
        slow[0].gpus[0].failure =
            Some(RankFailure::Hung("a message of 8 bytes did not complete within 60s".to_owned()));
        slow[0].path_mismatch = Some("4 through sockets (NET/Socket)".to_owned());
        assert!(measured(&slow, 0).events.is_empty(), "slow over another path is no finding");
        assert_eq!(measured(&slow, 0).failures[0].text, "4 through sockets (NET/Socket)");
        slow[0].gpus[1].failure = Some(RankFailure::PeerLost("remote process exited".to_owned()));
        assert_eq!(
            measured(&slow, 0).failures[0].text,
            "4 through sockets (NET/Socket)",
            "the loss is its consequence"
        );
    }
}
