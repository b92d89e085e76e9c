//! How large an operator's command is, measured by the circuit breaker. The breaker blocks no operator, but a command on
//! more nodes than it would allow is confirmed by their number.
//!
//! Several small commands are as large as one: the nodes that operators took out within the last hour, and those that
//! their pending commands will take out, use up what the breaker would allow.

use std::collections::BTreeSet;

use super::{
    breaker::BreakerGuard,
    builder::find,
    priority::{Index, is_out},
};
use crate::{
    ids::NodeName,
    policy::BreakerLimits,
    snapshot::{Breaker, CommandKind, Snapshot},
};

/// How many nodes of a set the breaker would let the controller take out of service now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BreakerAllowance {
    /// Nodes of the set that are in service.
    pub in_service: usize,
    pub allowed: usize,
    /// Other nodes that operators took out within the last hour, or requested to be taken out.
    pub by_operators: usize,
    /// What limits them.
    pub limit: String,
}

/// Returns how many of these nodes the breaker would let the controller take out now.
pub fn breaker_allowance(snapshot: &Snapshot, nodes: &[NodeName]) -> BreakerAllowance {
    let index = Index::build(snapshot, |_, _, _| {});
    let mut guard = BreakerGuard::new(snapshot, index.pools.len());
    let asked: BTreeSet<&NodeName> = nodes.iter().collect();
    let in_service_of = |names: &BTreeSet<&NodeName>| -> Vec<u32> {
        let known = names.iter().filter_map(|name| find(snapshot, name));
        known.filter(|node| !is_out(&snapshot.nodes[*node as usize])).collect()
    };
    let taken_out: Vec<&NodeName> =
        taken_out_by_operators(snapshot, &guard).into_iter().filter(|node| !asked.contains(node)).collect();
    guard.count_in_hour(taken_out.len());
    let pending: BTreeSet<&NodeName> = pending_nodes(snapshot).filter(|node| !asked.contains(node)).collect();
    let pending = in_service_of(&pending);
    for node in &pending {
        guard.count_taken_out(index.pool(*node));
    }
    let in_service = in_service_of(&asked);
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
    BreakerAllowance { in_service: in_service.len(), allowed, by_operators: taken_out.len() + pending.len(), limit }
}

/// Returns the nodes that operators took out of service in the time that counts against the hourly limit.
fn taken_out_by_operators<'a>(snapshot: &'a Snapshot, guard: &BreakerGuard) -> BTreeSet<&'a NodeName> {
    let counted = |node: &NodeName| snapshot.recent.taken_out.iter().any(|(known, _)| known == node);
    let by_operators = snapshot.cases.iter().filter(|case| case.request.is_some() && case.opened > guard.since());
    by_operators.map(|case| &case.node).filter(|node| !counted(node)).collect()
}

/// Returns the nodes that operators' pending commands take out of service.
fn pending_nodes(snapshot: &Snapshot) -> impl Iterator<Item = &NodeName> {
    snapshot.commands.iter().filter_map(|command| match &command.kind {
        CommandKind::Quarantine { node, .. } | CommandKind::Repair { node, .. } => Some(node),
        CommandKind::Test { .. }
        | CommandKind::Release { .. }
        | CommandKind::CancelRun { .. }
        | CommandKind::MultiNodeTest { .. } => None,
    })
}
