//! The overall status: leadership, open problems and coverage.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{
    CoverageRow, Facts, OccupancyKind, coverage, disturbed, fleet_capacity, is_overdue, nodes::occupancy_of,
    not_judged, plural,
};
use crate::{
    capacity_plan::CapacityPlan,
    hostlist::{self, NODE_STATES},
    ids::{NodeName, TestId},
    policy::Mode,
    reason::coded,
    snapshot::{Breaker, NodeRecord, Pause},
    software::Software,
    time::{Span, Timestamp},
};

/// Data from the store that is not about nodes.
#[derive(Debug, Clone, Default)]
pub struct StoredStatus {
    pub last_cycle: Option<CycleView>,
    /// The leading controller and the end of its lease.
    pub leader: Option<(String, Timestamp)>,
    /// Documents rejected so far.
    pub rejected: u64,
    /// Validation node time since midnight UTC.
    pub spent_today: Span,
    /// The measured duration of tests.
    pub durations: BTreeMap<TestId, Span>,
    /// Tests that do not apply because their software is not installed, and the nodes without it.
    pub missing_software: Vec<(Software, TestId, Vec<NodeName>)>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StatusView {
    pub at: Timestamp,
    /// The backend's name; `sim` is a simulated cluster. `None`: no cycle has observed the cluster.
    pub backend: Option<String>,
    pub mode: Mode,
    pub leader: LeaderView,
    pub last_cycle: Option<CycleView>,
    /// When the cluster was last observed.
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
    /// What an operator may want to change, one line each with the remedy. Nothing is wrong because of it.
    pub notes: Vec<String>,
    /// Problems that need attention, one line each with the remedy. Empty: none.
    pub problems: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum LeaderView {
    Leads {
        by: String,
        until: Timestamp,
    },
    /// The controller did not renew its lease.
    Lost {
        by: String,
        since: Timestamp,
    },
    NoLeader,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CycleView {
    pub at: Timestamp,
    pub duration: Option<Span>,
    pub actions: u32,
    pub submitted: u32,
    /// What kept the cycle from observing or doing everything.
    pub problem: Option<String>,
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

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SilentAgentsView {
    /// Nodes from which an agent is expected to report.
    pub agents: u32,
    pub silent: Vec<NodeName>,
    /// So many are silent that the fault is Cluster Doctor's.
    pub incident: bool,
}

/// Builds the overall status.
pub fn status(facts: &Facts, stored: &StoredStatus) -> StatusView {
    let snapshot = &facts.snapshot;
    let mut view = StatusView {
        at: facts.now,
        backend: facts.backend.clone(),
        mode: snapshot.policy.mode,
        leader: leader(facts, stored),
        last_cycle: stored.last_cycle.clone(),
        observed_at: facts.observed_at,
        nodes: count_nodes(facts),
        running: count_runs(facts),
        breaker: breaker(facts),
        pauses: snapshot.pauses.clone(),
        commands: snapshot.commands.len(),
        silent: silent(facts),
        coverage: coverage(facts),
        rejected: stored.rejected,
        spent_today_hours: stored.spent_today.as_hours(),
        capacity: fleet_capacity(facts, &stored.durations),
        notes: missing_software(facts, stored).into_iter().chain(not_judged::notice(facts)).collect(),
        problems: Vec::new(),
    };
    view.problems = problems(&view, unknown_in_service(facts));
    view.problems.extend(disturbed::attention(facts));
    view
}

/// Returns how many nodes in service have an unknown occupancy. A node that is being repaired often does not answer.
fn unknown_in_service(facts: &Facts) -> usize {
    let unknown = |record: &&NodeRecord| occupancy_of(record, true).0 == OccupancyKind::Unknown;
    facts.snapshot.nodes.iter().filter(unknown).filter(|record| !record.state.is_out_of_service()).count()
}

fn leader(facts: &Facts, stored: &StoredStatus) -> LeaderView {
    match &stored.leader {
        Some((by, until)) if *until > facts.now => LeaderView::Leads { by: by.clone(), until: *until },
        Some((by, until)) => LeaderView::Lost { by: by.clone(), since: *until },
        None => LeaderView::NoLeader,
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

fn silent(facts: &Facts) -> SilentAgentsView {
    let policy = &facts.snapshot.policy.agents;
    // Silence is evaluated at the time of the last observation: a controller that stops observing makes no agent
    // silent.
    let observed_at = facts.observed_at.unwrap_or(facts.now);
    let mut view = SilentAgentsView::default();
    for record in &facts.snapshot.nodes {
        let Some(last_report) = record.last_report else { continue };
        view.agents += 1;
        if observed_at.since(last_report) > policy.silent_after {
            view.silent.push(record.node.name.clone());
        }
    }
    let share = 100.0 * f64::from(u32::try_from(view.silent.len()).unwrap_or(u32::MAX));
    view.incident =
        view.agents > 0 && !view.silent.is_empty() && share >= policy.incident_percent * f64::from(view.agents);
    view
}

/// Returns the problems that need attention, most urgent first.
fn problems(view: &StatusView, unknown_in_service: usize) -> Vec<String> {
    let mut lines = Vec::new();
    match &view.leader {
        LeaderView::Leads { .. } => {}
        LeaderView::Lost { by, since } => {
            let ago = view.at.since(*since);
            lines.push(format!("no controller leads: the lease of {by} expired {ago} ago; start `doctor serve`"));
        }
        LeaderView::NoLeader => lines.push("no controller leads; start `doctor serve`".to_owned()),
    }
    if let Some(error) = view.last_cycle.as_ref().and_then(|cycle| cycle.problem.as_ref()) {
        lines.push(format!("problem in the last cycle: {error}"));
    }
    if view.breaker.state == BreakerState::Open {
        let why = view.breaker.why.as_deref().unwrap_or("reason unknown");
        lines.push(format!("the breaker is open: {why}; check the cause, then `doctor breaker close --why …`"));
    }
    for pause in &view.pauses {
        let scope = pause.pool.as_ref().map_or_else(|| "everywhere".to_owned(), |pool| format!("in pool {pool}"));
        let until = pause.until.map_or_else(|| "until resumed".to_owned(), |until| format!("until {until}"));
        lines.push(format!("paused {scope} by {} {until}: {}", pause.by, pause.why));
    }
    if view.silent.incident {
        let (silent, agents) = (view.silent.silent.len(), view.silent.agents);
        lines.push(format!("{silent} of {agents} agents are silent: check the network first"));
    }
    if unknown_in_service > 0 {
        lines.push(format!("{}: occupancy unknown, not tested", plural(unknown_in_service, "node")));
    }
    lines.extend(view.capacity.shortfalls.iter().cloned());
    lines
}

/// Returns one line for each software that tests need and that nodes do not have.
fn missing_software(facts: &Facts, stored: &StoredStatus) -> Vec<String> {
    /// Longer lists of nodes are cut.
    const MAX_LIST: usize = 80;
    let line = |software: &Software| {
        let of_software = stored.missing_software.iter().filter(|(missing, ..)| missing == software);
        let mut nodes: Vec<NodeName> = of_software.clone().flat_map(|(.., nodes)| nodes).cloned().collect();
        nodes.retain(|name| facts.node(name).is_some_and(|(_, is_listed)| is_listed));
        nodes.sort_unstable();
        nodes.dedup();
        let tests: Vec<&str> = of_software.map(|(_, test, _)| test.as_str()).collect();
        let is_everywhere = nodes.len() == facts.snapshot.nodes.len();
        let (count, list) = (plural(nodes.len(), "node"), hostlist::fold(&nodes));
        let location = match (is_everywhere, list.len() <= MAX_LIST) {
            (true, _) => format!("on any of the {count}"),
            (false, true) => format!("on {count} ({list})"),
            (false, false) => format!("on {count}"),
        };
        let (name, tests, remedy) = (software.name(), tests.join(", "), software.remedy());
        (!nodes.is_empty()).then(|| format!("{name} is not installed {location}: {tests} not applicable; {remedy}"))
    };
    Software::ALL.iter().filter_map(line).collect()
}
