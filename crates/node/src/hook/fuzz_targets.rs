//! Fuzzing entry point for Slurm's list of nodes, which contains free text written by operators.

use super::nodes;

/// Returns the name of every node in the list, and whether it counts as drained by us.
pub fn parse_slurm_nodes(list: &str) -> Option<Vec<(String, bool)>> {
    let all = nodes::parse(list)?;
    Some(all.into_iter().map(|node| (node.name.clone(), node.is_ours())).collect())
}
