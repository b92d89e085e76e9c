//! The rates of the links between the ranks of a collective test, measured in a ring: each GPU sends to the next and
//! receives from the previous one.
//!
//! An all-reduce is as slow as its slowest link but does not show which link that is. The ring exchange does, if there
//! are other links to compare with.

use doctor_core::observation::{Entity, EntityKind, Metric, Unit};

use crate::collective_rank_reports::{GpuReport, NodeReport};

/// One direction of a link in the ring: the sending rank, the receiving rank, and the rate in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link<'a> {
    pub from: LinkEnd<'a>,
    pub to: LinkEnd<'a>,
    pub rate: f64,
}

/// One end of a link: a GPU and its node.
pub type LinkEnd<'a> = (&'a NodeReport, &'a GpuReport);

/// Returns the links of the ring, in the order of the sending ranks; none for fewer than three. A slow link delays both
/// of its ends, but each end is also delayed by its other link, so the time of the faster end is an upper bound of the
/// link's time.
pub fn ring_links(nodes: &[NodeReport]) -> Vec<Link<'_>> {
    let all: Vec<_> = nodes.iter().flat_map(|node| node.gpus.iter().map(move |gpu| (node, gpu))).collect();
    let pairs = all.iter().enumerate().map(|(index, from)| (*from, all[(index + 1) % all.len()]));
    let links: Option<Vec<_>> = pairs.map(|(from, to)| Link::between(from, to)).collect();
    // In a ring of two, both ends share the same two links.
    links.filter(|links| links.len() > 2).unwrap_or_default()
}

impl<'a> Link<'a> {
    fn between(from: LinkEnd<'a>, to: LinkEnd<'a>) -> Option<Self> {
        let (sent, received) = (from.1.exchange.as_ref()?, to.1.exchange.as_ref()?);
        let seconds = sent.seconds.min(received.seconds);
        (seconds > 0.0).then(|| Self { from, to, rate: sent.bytes as f64 / seconds })
    }

    fn is_intra_node(&self) -> bool {
        std::ptr::eq(self.from.0, self.to.0)
    }

    fn entity(&self) -> Entity {
        let to =
            if self.is_intra_node() { self.to.1.gpu.clone() } else { format!("{}:{}", self.to.0.node, self.to.1.gpu) };
        Entity::new(EntityKind::Link, format!("{}-{to}", self.from.1.gpu))
    }
}

/// Returns the rate of each link on which this node sends, and its percentage of the median of the links of the same
/// kind (inside a node, or between nodes).
pub(crate) fn link_metrics(nodes: &[NodeReport], own: usize) -> Vec<Metric> {
    let links = ring_links(nodes);
    let median = |inside: bool| {
        let mut rates: Vec<_> =
            links.iter().filter(|link| link.is_intra_node() == inside).map(|link| link.rate).collect();
        rates.sort_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied()
    };
    let (inside, between) = (median(true), median(false));
    let mine = links.iter().filter(|link| std::ptr::eq(link.from.0, &raw const nodes[own]));
    let metrics = mine.filter_map(|link| {
        let usual = if link.is_intra_node() { inside } else { between }?;
        Some([
            Metric::new("nccl_link_bytes_per_s", link.entity(), link.rate, Unit::BytesPerSecond),
            Metric::new("nccl_link_percent_of_median", link.entity(), 100.0 * link.rate / usual, Unit::Percent),
        ])
    });
    metrics.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective_rank_reports::SizeReport;

    const MIB: u64 = 1 << 20;

    fn job(nodes: u32, gpus: u32) -> Vec<NodeReport> {
        let exchange = SizeReport { bytes: 64 * MIB, seconds: 1e-3, wrong: 0, wrong_elements: Vec::new() };
        let gpu = |rank: u32| GpuReport {
            rank,
            gpu: format!("0000:{:02x}:00.0", 0x18 + rank),
            sizes: Vec::new(),
            exchange: Some(exchange.clone()),
            failure: None,
        };
        let node = |node: u32| NodeReport {
            node: format!("n{node}"),
            gpus: (node * gpus..(node + 1) * gpus).map(gpu).collect(),
            path_mismatch: None,
            disturbances: Vec::new(),
        };
        (0..nodes).map(node).collect()
    }

    #[test]
    fn a_slow_link_is_reported_by_both_ends() {
        let mut nodes = job(2, 4);
        // The link from rank 1 to rank 2 delays both.
        for rank in [1, 2] {
            nodes[0].gpus[rank].exchange.as_mut().unwrap().seconds = 4e-3;
        }
        let slow = |own: usize| {
            let metrics = link_metrics(&nodes, own);
            let all = metrics.iter().filter(|metric| metric.name == "nccl_link_percent_of_median");
            assert_eq!(all.clone().count(), 4, "{metrics:?}");
            all.filter(|metric| metric.value < 70.0).map(|metric| metric.entity.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(slow(0), ["link:0000:19:00.0-0000:1a:00.0"]);
        assert!(slow(1).is_empty());
        assert!(ring_links(&job(1, 2)).is_empty(), "with two nodes the slow one cannot be determined");
    }
}
