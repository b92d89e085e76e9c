//! What the store knows about the service itself: its leader, its last cycle, its agents and its latest jobs.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Facts;
use crate::{
    ids::{CaseId, NodeName, RunId, TestId},
    plan::MIN_SILENT_AGENTS,
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
    /// When the last of them was rejected.
    pub rejected_at: Option<Timestamp>,
    /// Messages about alerts that were not delivered within the last day.
    pub alerts_lost: u64,
    /// Validation node time since midnight UTC.
    pub spent_today: Span,
    /// The measured duration of tests.
    pub durations: BTreeMap<TestId, Span>,
    /// Tests that do not apply because their software is not installed, and the nodes without it.
    pub missing_software: Vec<(Software, TestId, Vec<NodeName>)>,
    /// The latest validation runs that ended, newest first. Runs that a user or an operator ended are not among them.
    pub recent_runs: Vec<EndedRun>,
    /// Cases that an operator acknowledged or snoozed, and the operator.
    pub acknowledged: BTreeMap<CaseId, String>,
}

/// A validation run that ended by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndedRun {
    pub run: RunId,
    pub nodes: Vec<NodeName>,
    pub at: Timestamp,
    /// `None`: it gave a result.
    pub failure: Option<RunFailure>,
}

/// Why a run gave no result.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RunFailure {
    /// The code of the run's end: `crashed`, `no-result`, `rejected`.
    pub code: &'static str,
    /// What the job or its cluster said, such as `exec: "doctor-node": not found`.
    pub text: Option<String>,
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
    /// No controller has led yet, or the last one released its lease.
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
pub struct SilentAgentsView {
    /// Nodes from which an agent is expected to report.
    pub agents: u32,
    pub silent: Vec<NodeName>,
    /// So many are silent that the fault is Cluster Doctor's.
    pub incident: bool,
}

pub(super) fn leader(facts: &Facts, stored: &StoredStatus) -> LeaderView {
    match &stored.leader {
        Some((by, until)) if *until > facts.now => LeaderView::Leads { by: by.clone(), until: *until },
        Some((by, until)) => LeaderView::Lost { by: by.clone(), since: *until },
        None => LeaderView::NoLeader,
    }
}

/// Returns the nodes with a silent agent, and whether so many are silent that the planner blames none of them.
pub(super) fn silent_agents(facts: &Facts) -> SilentAgentsView {
    let policy = &facts.snapshot.policy.agents;
    // Silence is evaluated at the time of the last cycle: a controller that stops makes no agent silent.
    let cycle_at = facts.cycle_at.unwrap_or(facts.now);
    let mut view = SilentAgentsView::default();
    for record in &facts.snapshot.nodes {
        let Some(last_report) = record.last_report else { continue };
        view.agents += 1;
        if cycle_at.since(last_report) > policy.silent_after {
            view.silent.push(record.node.name.clone());
        }
    }
    let silent = u32::try_from(view.silent.len()).unwrap_or(u32::MAX);
    let share = 100.0 * f64::from(silent);
    view.incident = silent >= MIN_SILENT_AGENTS && share >= policy.incident_percent * f64::from(view.agents);
    view
}
