//! Checks whether the limits of a policy can hold its periods, for the cluster that the store knows.

use std::collections::BTreeMap;

use doctor_core::{
    capacity_plan::{CapacityPlan, PoolSize, capacity_plan, largest_fleet},
    ids::{PoolName, TestId},
    time::Span,
};
use doctor_engine::snapshot::{self, ClusterStateRow};
use serde::Serialize;

use crate::{config::LoadedConfig, context::Context, output::plural};

/// The result: for the nodes that were last observed, or else for any number of nodes.
#[derive(Debug, Default, Serialize)]
pub(super) struct CapacityCheck {
    /// `None`: the number of nodes is not known.
    pub(super) plan: Option<CapacityPlan>,
    /// Without a plan: how many nodes the limits suffice for. `None`: any number.
    pub(super) largest_fleet: Option<u32>,
    /// Tests whose duration was measured; that of the others is declared.
    pub(super) measured: Vec<TestId>,
}

pub(super) fn check_capacity(context: &Context, loaded: &LoadedConfig, has_store: bool) -> CapacityCheck {
    let settings = &loaded.settings;
    let (pools, durations) = if has_store { known(context, loaded) } else { Default::default() };
    let plan = (!pools.is_empty()).then(|| capacity_plan(&settings.policy, &settings.tests, &pools, &durations));
    let largest_fleet = match plan {
        Some(_) => None,
        None => largest_fleet(&settings.policy, &settings.tests, &durations),
    };
    CapacityCheck { plan, largest_fleet, measured: durations.into_keys().collect() }
}

/// Returns the nodes that were last observed and the measured durations.
fn known(context: &Context, loaded: &LoadedConfig) -> (Vec<PoolSize>, BTreeMap<TestId, Span>) {
    let Ok(store) = context.store() else { return Default::default() };
    let nodes = snapshot::last_observed(&store).ok().flatten().map_or_else(Vec::new, |(_, cluster)| cluster.nodes);
    let deep = loaded.settings.tests.iter().filter(|test| test.routine && test.exclusive);
    let deep: Vec<TestId> = deep.map(|test| test.id.clone()).collect();
    (pool_sizes(nodes), store.mean_durations(&deep).unwrap_or_default())
}

fn pool_sizes(nodes: Vec<ClusterStateRow>) -> Vec<PoolSize> {
    let mut pools: BTreeMap<PoolName, (u32, u32)> = BTreeMap::new();
    for row in nodes {
        let (count, with_agents) = pools.entry(row.pool).or_default();
        *count += 1;
        *with_agents += u32::from(row.last_report.is_some());
    }
    pools.into_iter().map(|(pool, (nodes, with_agents))| PoolSize { pool, nodes, with_agents }).collect()
}

impl CapacityCheck {
    /// Returns one line on whether the limits can hold the periods.
    pub(super) fn line(&self) -> Option<String> {
        let basis = match self.measured.len() {
            0 => "declared durations",
            _ => "measured durations",
        };
        match (&self.plan, self.largest_fleet) {
            (Some(plan), _) => plan.shortfalls.is_empty().then(|| {
                let nodes = plural(plan.nodes as usize, "node");
                format!("The limits can hold the periods of all tests on {nodes} ({basis}).")
            }),
            (None, Some(nodes)) => {
                let nodes = plural(nodes as usize, "node");
                Some(format!("The limits can hold the periods of all tests on up to {nodes} ({basis})."))
            }
            (None, None) => Some(format!("The limits can hold the periods of all tests ({basis}).")),
        }
    }
}
