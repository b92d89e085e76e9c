//! The capacity plan of a cluster as it was last observed.

use std::collections::BTreeMap;

use super::Facts;
use crate::{
    capacity_plan::{CapacityPlan, PoolSize, capacity_plan},
    ids::{PoolName, TestId},
    snapshot::NodeRecord,
    time::Span,
};

/// Computes whether the limits can hold the periods in this cluster, with the measured durations of its tests.
pub fn fleet_capacity(facts: &Facts, durations: &BTreeMap<TestId, Span>) -> CapacityPlan {
    let snapshot = &facts.snapshot;
    capacity_plan(&snapshot.policy, &snapshot.tests, &pool_sizes(&snapshot.nodes), durations)
}

fn pool_sizes(nodes: &[NodeRecord]) -> Vec<PoolSize> {
    let mut pools: BTreeMap<&PoolName, (u32, u32)> = BTreeMap::new();
    for record in nodes {
        let (count, with_agents) = pools.entry(&record.node.pool).or_default();
        *count += 1;
        *with_agents += u32::from(record.last_report.is_some());
    }
    let size = |(pool, (nodes, with_agents)): (&PoolName, _)| PoolSize { pool: pool.clone(), nodes, with_agents };
    pools.into_iter().map(size).collect()
}
