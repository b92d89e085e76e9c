//! Ways in for the fuzzer to what hooks read of others: Slurm's list of nodes, in which people write what they like.

use super::nodes;

/// Of every node in such a list: its name, and whether it counts as drained by us.
pub fn slurm_says(list: &str) -> Option<Vec<(String, bool)>> {
    let all = nodes::parse(list)?;
    Some(all.into_iter().map(|node| (node.name.clone(), node.is_ours())).collect())
}
