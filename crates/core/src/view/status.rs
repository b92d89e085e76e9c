//! The overall status: what needs an operator, leadership, counts and coverage.

use serde::Serialize;

use super::{
    AttentionItem, CoverageRow, Facts, OccupancyKind, OverallState,
    attention::{StatusParts, attention},
    coverage, fleet_capacity, is_overdue,
    nodes::occupancy_of,
    service_state::{CycleView, LeaderView, SilentAgentsView, StoredStatus, leader, silent_agents},
};
use crate::{
    capacity_plan::CapacityPlan,
    hostlist::NODE_STATES,
    ids::NodeName,
    policy::Mode,
    reason::coded,
    snapshot::{Breaker, Pause},
    time::Timestamp,
};

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StatusView {
    pub at: Timestamp,
    /// The state of the service in one word, which follows from `attention`.
    pub state: OverallState,
    /// What needs an operator, most urgent first. Empty: nothing.
    pub attention: Vec<AttentionItem>,
    /// The backend's name; `sim` is a simulated cluster. `None`: no cycle has observed the cluster.
    pub backend: Option<String>,
    pub mode: Mode,
    pub leader: LeaderView,
    pub last_cycle: Option<CycleView>,
    /// When the cluster last answered.
    pub observed_at: Option<Timestamp>,
    pub nodes: NodeCounts,
    pub running: RunCounts,
    pub breaker: BreakerView,
    pub pauses: Vec<Pause>,
    /// Operators' requests that are not completed.
    pub commands: usize,
    pub silent: SilentAgentsView,
    pub coverage: Vec<CoverageRow>,
    pub rejected: u64,
    pub spent_today_hours: f64,
    /// Whether the limits can hold the periods of the tests.
    pub capacity: CapacityPlan,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct NodeCounts {
    pub total: u32,
    pub free: u32,
    pub busy: u32,
    pub unknown: u32,
    /// Known to the store, but no longer listed by the cluster.
    pub gone: u32,
    /// Nodes with a due test.
    pub overdue: u32,
    /// By state; all states are present.
    pub states: Vec<(&'static str, u32)>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct RunCounts {
    pub planned: u32,
    pub pending: u32,
    pub running: u32,
    /// Concurrent runs allowed in the whole cluster.
    pub limit: u32,
}

coded! {
    /// Whether nodes may be taken out automatically.
    pub enum BreakerState {
        Closed => "closed",
        Open => "open",
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BreakerView {
    pub state: BreakerState,
    pub since: Option<Timestamp>,
    pub why: Option<String>,
    /// Taken out by the controller within the last hour.
    pub taken_out: Vec<(NodeName, Timestamp)>,
    pub nodes_per_hour: u32,
    pub percent_of_pool: f64,
}

/// Builds the overall status.
pub fn status(facts: &Facts, stored: &StoredStatus) -> StatusView {
    let snapshot = &facts.snapshot;
    let (leader, silent, coverage) = (leader(facts, stored), silent_agents(facts), coverage(facts));
    let capacity = fleet_capacity(facts, &stored.durations);
    let parts = StatusParts { leader: &leader, silent: &silent, coverage: &coverage, capacity: &capacity };
    let attention = attention(facts, stored, &parts);
    StatusView {
        at: facts.now,
        state: OverallState::of(facts, &attention),
        attention,
        backend: facts.backend.clone(),
        mode: snapshot.policy.mode,
        leader,
        last_cycle: stored.last_cycle.clone(),
        observed_at: facts.observed_at,
        nodes: count_nodes(facts),
        running: count_runs(facts),
        breaker: breaker(facts),
        pauses: snapshot.pauses.clone(),
        commands: snapshot.commands.len(),
        silent,
        coverage,
        rejected: stored.rejected,
        spent_today_hours: stored.spent_today.as_hours(),
        capacity,
    }
}

fn count_nodes(facts: &Facts) -> NodeCounts {
    let mut counts = NodeCounts { states: NODE_STATES.map(|state| (state, 0)).to_vec(), ..NodeCounts::default() };
    for (record, listed) in facts.nodes() {
        match occupancy_of(record, listed).0 {
            OccupancyKind::Free => counts.free += 1,
            OccupancyKind::Busy => counts.busy += 1,
            OccupancyKind::Unknown => counts.unknown += 1,
            OccupancyKind::Gone => {
                counts.gone += 1;
                continue;
            }
        }
        counts.total += 1;
        counts.overdue += u32::from(is_overdue(facts, record));
        if let Some(state) = counts.states.iter_mut().find(|(state, _)| *state == record.state.as_str()) {
            state.1 += 1;
        }
    }
    counts
}

fn count_runs(facts: &Facts) -> RunCounts {
    let mut counts = RunCounts {
        limit: facts.snapshot.policy.limits.jobs.for_nodes(facts.snapshot.nodes.len()),
        ..RunCounts::default()
    };
    for active in &facts.snapshot.runs {
        match super::text::run_state(&active.run).0 {
            "running" => counts.running += 1,
            "pending" => counts.pending += 1,
            _ => counts.planned += 1,
        }
    }
    counts
}

fn breaker(facts: &Facts) -> BreakerView {
    let limits = &facts.snapshot.policy.breaker;
    let (state, since, why) = match &facts.snapshot.breaker {
        Breaker::Closed { since } => (BreakerState::Closed, *since, None),
        Breaker::Open { since, why } => (BreakerState::Open, Some(*since), Some(why.clone())),
    };
    BreakerView {
        state,
        since,
        why,
        taken_out: facts.snapshot.recent.taken_out.clone(),
        nodes_per_hour: limits.nodes_per_hour,
        percent_of_pool: limits.percent_of_pool,
    }
}
