//! memory-fragmentation: can the kernel still allocate large contiguous blocks?
//!
//! What it does: reads from /proc/buddyinfo how much of the free memory of each NUMA node is in blocks of 2 MiB or
//! more; the worst node counts.
//!
//! Why it matters: huge pages, RDMA registrations and driver buffers need large blocks. On a node whose free memory is
//! fragmented, drivers fail to start and the kernel stalls programs while it compacts memory.
//!
//! What to do: `memory-fragmented` is `monitor`, confirmed by three failures: less than one percent.
//! `echo 1 > /proc/sys/vm/compact_memory` compacts memory, more so after `echo 3 > /proc/sys/vm/drop_caches`; a reboot
//! always cures it.

use std::collections::BTreeMap;

use doctor_core::observation::{Entity, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure, Unit};

use crate::{
    files::file_text,
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("memory-fragmentation", "free memory in blocks of 2 MiB or more");

const RULES: &str = r#"
rules = [
  { id = "memory-fragmentation-high", check = "memory-fragmentation", metric = "free_in_large_pieces_percent",
    below = 1.0, reason = "memory-fragmented", severity = "monitor", confirm = 3,
    text = "{value} % of a NUMA node's free memory in blocks of 2 MiB or more, expected at least {limit} %" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("memory_fragmentation.rs")), rules: RULES, probes, interpret };

/// 2^9 pages of 4 KiB are 2 MiB. With larger pages a block of this order is larger still.
const LARGE_BLOCK_ORDER: usize = 9;

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::read("/proc/buddyinfo")]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let table = match file_text(outputs.first()) {
        Ok(table) => table,
        Err(failure) => return Observation::Failed(failure),
    };
    let bad = |text: &str| ProbeFailure::new(FailureKind::Unparseable, format!("/proc/buddyinfo: {text}"));
    let mut builder = ObservationBuilder::default();
    let mut nodes: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for line in table.lines() {
        match zone(line) {
            Some((node, large, all)) => {
                let sums = nodes.entry(node).or_default();
                *sums = (sums.0 + large, sums.1 + all);
            }
            None => builder.unreadable(bad(&line.chars().take(40).collect::<String>())),
        }
    }
    let shares = nodes.into_values().filter(|(_, all)| *all > 0.0).map(|(large, all)| large * 100.0 / all);
    if let Some(least) = shares.reduce(f64::min) {
        builder.metric(Metric::new("free_in_large_pieces_percent", Entity::node(), least, Unit::Percent));
    }
    builder.build_or(Observation::Failed(ProbeFailure::new(FailureKind::Empty, "/proc/buddyinfo shows no free memory")))
}

/// Parses `Node 0, zone   Normal   3997   2576 …`: free blocks of one page, of two, of four, and so on. Returns the
/// node, the pages in large blocks and all free pages.
fn zone(line: &str) -> Option<(&str, f64, f64)> {
    let (node, rest) = line.strip_prefix("Node ")?.split_once(',')?;
    let mut fields = rest.split_ascii_whitespace();
    (fields.next()? == "zone").then_some(())?;
    fields.next()?;
    let pieces: Vec<f64> = fields.map(|field| field.parse::<u32>().ok().map(f64::from)).collect::<Option<_>>()?;
    let pages = |(order, count): (usize, &f64)| *count * 2_f64.powi(i32::try_from(order).unwrap_or(0));
    let large = pieces.iter().enumerate().skip(LARGE_BLOCK_ORDER).map(pages).sum();
    (pieces.len() > LARGE_BLOCK_ORDER).then(|| (node, large, pieces.iter().enumerate().map(pages).sum()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classify_fixture::classify_outputs;
    use proptest::prelude::*;

    // Captured: Linux 6.18, virtual machine, 2026-11-15.
    const HERE: &str = "\
Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3 
Node 0, zone    DMA32  22208  16529  10892   7268   3419   1490    805    407    182     77     54 
Node 0, zone   Normal   3997   2576   2592   1250    358    127    694    418    174     52    146 
";

    fn check(text: &str) -> Vec<String> {
        classify_outputs(&CHECK, &[ProbeOutput::Text(text.to_owned())])
    }

    #[test]
    fn fragmentation_of_one_numa_node_is_not_hidden_by_another() {
        assert_eq!(check(HERE), ["pass within-limits"]);
        let crumbs = format!("{HERE}Node 1, zone   Normal  99999  2576  0  0  0  0  0  0  0  1  0\n");
        assert_eq!(check(&crumbs), ["fail memory-fragmented monitor node"]);
        assert_eq!(check(""), ["inconclusive empty"]);
        assert_eq!(check("Node 0, zone Normal many\n"), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(Node .{0,3},? zone  .{0,6}( [0-9]{0,12}){0,12}\n){0,3}") {
            check(&text);
        }
    }
}
