//! Entry points for the fuzzer: the output of Slurm's commands, parts of which users, operators and nodes wrote.

use doctor_core::{node::Occupancy, time::Timestamp};

use super::{SlurmConfig, cluster::Site, json, marks, nodes, queue, reservations, site, view::View};

/// Returns the names of the free nodes of a cluster with this output: nodes, jobs (lines begin with `token`), reservations,
/// partitions and configuration.
pub fn free(texts: [&str; 5], token: &str) -> Vec<String> {
    let [nodes, jobs, reservations, partitions, config] = texts;
    let nodes = nodes::parse(nodes).unwrap_or_default();
    let (jobs, reservations) = (queue::parse(jobs, token), reservations::parse(reservations));
    let site = Site { partitions: site::partitions(partitions), saving: site::power_saving(config) };
    let view = View { nodes: &nodes, jobs: &jobs, reservations: &reservations, site: &site, user: 0 };
    let settings = SlurmConfig { gpus_only: false, ..SlurmConfig::default() };
    let (seen, _) = view.seen(Timestamp::from_secs(1_794_703_000), &settings);
    let free = seen.iter().filter(|seen| seen.node.occupancy == Occupancy::Free);
    free.map(|seen| seen.node.name.to_string()).collect()
}

/// Counts the marks of the nodes in a response of slurmrestd; `None`: it is not one.
pub fn marks_in(bytes: &[u8]) -> Option<usize> {
    let nodes = json::parse(bytes).ok()?;
    let config = SlurmConfig::default();
    let marks = |node| marks::marks(node, marks::Shelter::None, &config);
    Some(nodes.iter().map(marks).map(|marks| marks.ours.len() + marks.foreign.len()).sum())
}
