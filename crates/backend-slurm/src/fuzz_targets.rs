//! Entry points for the fuzzer: the output of Slurm's commands, parts of which users, operators and nodes wrote.

use doctor_core::{node::Occupancy, time::Timestamp};

use super::{SlurmConfig, cluster::ClusterConfig, cluster_config, json, marks, nodes, queue, reservations, view::View};

/// Returns the names of the free nodes of a cluster with this output: nodes, jobs (lines begin with `token`), reservations,
/// partitions and configuration.
pub fn free(texts: [&str; 5], token: &str) -> Vec<String> {
    let [nodes, jobs, reservations, partitions, config] = texts;
    let nodes = nodes::parse(nodes).unwrap_or_default();
    let (jobs, reservations) = (queue::parse(jobs, token), reservations::parse(reservations));
    let cluster_config = ClusterConfig {
        partitions: cluster_config::partitions(partitions),
        power_saving: cluster_config::power_saving(config),
    };
    let view =
        View { nodes: &nodes, jobs: &jobs, reservations: &reservations, cluster_config: &cluster_config, user: 0 };
    let settings = SlurmConfig { gpus_only: false, ..SlurmConfig::default() };
    let (seen, _) = view.seen_nodes(Timestamp::from_secs(1_794_703_000), &settings);
    let free = seen.iter().filter(|seen| seen.node.occupancy == Occupancy::Free);
    free.map(|seen| seen.node.name.to_string()).collect()
}

/// Counts the marks of the nodes in a response of slurmrestd; `None`: it is not one.
pub fn marks_in(bytes: &[u8]) -> Option<usize> {
    let nodes = json::parse(bytes).ok()?;
    let config = SlurmConfig::default();
    let marks = |node| marks::marks(node, marks::ReservationKind::None, &config);
    Some(nodes.iter().map(marks).map(|marks| marks.ours.len() + marks.foreign.len()).sum())
}
