//! How large an operator's command is, measured by the circuit breaker. The breaker blocks no operator, but a command on
//! more nodes than it would allow is confirmed by their number.

use super::{
    breaker::BreakerGuard,
    builder::find,
    priority::{Index, is_out},
};
use crate::{
    ids::NodeName,
    policy::BreakerLimits,
    snapshot::{Breaker, Snapshot},
};

/// How many nodes of a set the breaker would let the controller take out of service now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BreakerAllowance {
    /// Nodes of the set that are in service.
    pub in_service: usize,
    pub allowed: usize,
    /// What limits them.
    pub limit: String,
}

/// Returns how many of these nodes the breaker would let the controller take out now.
pub fn breaker_allowance(snapshot: &Snapshot, nodes: &[NodeName]) -> BreakerAllowance {
    let index = Index::build(snapshot, |_, _, _| {});
    let mut guard = BreakerGuard::new(snapshot, index.pools.len());
    let known = nodes.iter().filter_map(|name| find(snapshot, name));
    let in_service: Vec<u32> = known.filter(|node| !is_out(&snapshot.nodes[*node as usize])).collect();
    let may = |node: &&u32| {
        let pool = index.pool(**node);
        guard.take_if_room(pool, index.pools[pool as usize].as_str(), &index.counts[pool as usize])
    };
    let allowed = in_service.iter().filter(may).count();
    let limit = match &snapshot.breaker {
        Breaker::Open { why, .. } => format!("it is open: {why}"),
        Breaker::Closed { .. } => {
            let BreakerLimits { percent_of_pool, nodes_per_hour } = &snapshot.policy.breaker;
            format!("nodes_per_hour = {nodes_per_hour}, percent_of_pool = {percent_of_pool}")
        }
    };
    BreakerAllowance { in_service: in_service.len(), allowed, limit }
}
