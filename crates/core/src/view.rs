//! Views for people and programs: the data behind tables, JSON and reports.
//!
//! A view is a pure function of [`Facts`]: the cluster as last observed, combined with the store, at one moment. A
//! missing result never counts as healthy: never tested, inconclusive, not applicable and stale are different values
//! ([`TestStatus`]) in every view.

mod advice;
mod attention;
mod budget;
mod capacity;
mod coverage;
mod distribution;
mod due;
mod explain_node;
mod findings;
mod formatting;
mod map;
mod node_explanation;
mod nodes;
mod period;
mod plan;
mod report;
mod runs;
mod service_state;
mod status;
mod suites;
mod text;
mod time_slots;
mod timeline;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

pub use self::{
    attention::{AttentionItem, AttentionKind, OverallState, Urgency},
    budget::{BudgetDay, BudgetView, CaseSpan, budget},
    capacity::fleet_capacity,
    coverage::{CoverageRow, coverage, is_overdue},
    distribution::{Distribution, Outlier},
    due::{Due, LatestResult},
    explain_node::{StoredNodeData, why},
    findings::{FindingRow, findings},
    formatting::{format_hours, format_percent, format_time, plural, short_duration},
    map::{FleetMap, MapFinding, MapRow, fleet_map},
    node_explanation::{AuditLine, CaseView, FindingView, StepView, TestLine, WhyView},
    nodes::{NodeRow, OccupancyKind, TestCell, node_row, node_rows},
    period::{Period, RunFacts, TestResult},
    plan::{ActionRow, PlanView, SkippedRow, action_row, plan_view},
    report::{Count, FaultRow, ReportView, ResultsRow, report},
    runs::{OutcomeView, RunView, RunWithoutResult, outcomes, run_view},
    service_state::{CycleView, EndedRun, LeaderView, RunFailure, SilentAgentsView, StoredStatus},
    status::{BreakerState, BreakerView, NodeCounts, RunCounts, StatusView, status},
    suites::{SuiteCoverage, coverage_by_suite, suite_label},
    text::{CodeMeaning, SKIP_REASONS, evidence, run_end, skip_code, skip_text},
    time_slots::Slot,
    timeline::{BootFacts, ResultFacts, TimelineEntry, TimelineKind, timeline},
};
pub use crate::test_status::TestStatus;
use crate::{
    hostlist::Selector,
    ids::{NodeName, RunId, TestId},
    plan::SkipReason,
    policy::TestPolicy,
    run::Run,
    snapshot::{NodeRecord, Snapshot, TestRecord},
    time::Timestamp,
};

/// The input of all views.
#[derive(Debug, Clone)]
pub struct Facts {
    pub now: Timestamp,
    /// The backend's name. `None`: no cycle has observed the cluster.
    pub backend: Option<String>,
    /// When the cluster last answered a cycle. `None`: it never has, and the occupancy of all nodes is unknown.
    pub observed_at: Option<Timestamp>,
    /// When a controller last ran a cycle, whether the cluster answered or not. Never before `observed_at`.
    pub cycle_at: Option<Timestamp>,
    /// The cluster as it was then, combined with the present contents of the store.
    pub snapshot: Snapshot,
    /// Nodes that the store knows but the cluster no longer lists. Their pool is unknown.
    pub gone: Vec<NodeRecord>,
    /// Why nodes were not chosen, and since when.
    pub skip_reasons: BTreeMap<NodeName, SkippedSince>,
}

/// Why a node was not chosen, and since when this has been the reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SkippedSince {
    pub since: Timestamp,
    pub reason: SkipReason,
}

impl Facts {
    /// Returns every node sorted by name, and whether the cluster still lists it.
    pub fn nodes(&self) -> impl Iterator<Item = (&NodeRecord, bool)> {
        // Both lists are sorted by name: sorting ten thousand nodes again would take longer than most views.
        let (mut here, mut gone) = (self.snapshot.nodes.iter().peekable(), self.gone.iter().peekable());
        std::iter::from_fn(move || {
            let gone_is_next = match (here.peek(), gone.peek()) {
                (Some(here), Some(gone)) => gone.node.name < here.node.name,
                (None, Some(_)) => true,
                (_, None) => false,
            };
            if gone_is_next {
                gone.next().map(|record| (record, false))
            } else {
                here.next().map(|record| (record, true))
            }
        })
    }

    /// Returns one node, and whether the cluster still lists it.
    pub fn node(&self, name: &NodeName) -> Option<(&NodeRecord, bool)> {
        // Both lists are sorted by name: this is called for many names.
        let find = |all: &[NodeRecord]| all.binary_search_by(|record| record.node.name.cmp(name)).ok();
        let here = find(&self.snapshot.nodes).map(|index| (&self.snapshot.nodes[index], true));
        here.or_else(|| find(&self.gone).map(|index| (&self.gone[index], false)))
    }

    /// Returns the nodes that match any of these selectors; all nodes if there are none.
    pub fn select(&self, selectors: &[Selector]) -> Vec<NodeName> {
        let is_selected = |record: &NodeRecord| {
            let matches =
                |selector: &Selector| selector.matches(&record.node.name, &record.node.pool, record.state.as_str());
            selectors.is_empty() || selectors.iter().any(matches)
        };
        self.nodes().filter(|(record, _)| is_selected(record)).map(|(record, _)| record.node.name.clone()).collect()
    }

    /// Returns the routine tests of this node's pool and others that have run on the node, with their records.
    fn tests_of<'a>(&'a self, record: &'a NodeRecord) -> impl Iterator<Item = (&'a TestPolicy, &'a TestRecord)> {
        let applies = |test: &TestPolicy| test.pools.as_ref().is_none_or(|pools| pools.contains(&record.node.pool));
        let known = self.snapshot.tests.iter().zip(&record.test_records);
        known.filter(move |(test, known)| applies(test) && (test.routine || known.attempt().is_some()))
    }

    /// Returns the routine tests with their records and when they are due.
    fn due_of<'a>(&'a self, record: &'a NodeRecord) -> impl Iterator<Item = (&'a TestPolicy, &'a TestRecord, Due)> {
        let known = self.snapshot.tests.iter().zip(&record.test_records);
        let applies = |test: &TestPolicy| test.pools.as_ref().is_none_or(|pools| pools.contains(&record.node.pool));
        known
            .filter(move |(test, _)| applies(test) && test.routine)
            .map(|(test, known)| (test, known, Due::of(&self.snapshot, record, test, known, self.now)))
    }

    /// Returns the nodes that runs occupy. For views of all nodes; [`Self::run_on`] looks at each run.
    fn nodes_with_runs(&self) -> BTreeSet<&NodeName> {
        self.snapshot.runs.iter().flat_map(|active| active.run.nodes.iter()).collect()
    }

    /// Returns the run that occupies a node, if any.
    pub fn run_on(&self, name: &NodeName) -> Option<&Run> {
        self.snapshot.runs.iter().map(|active| &active.run).find(|run| run.nodes.contains(name))
    }
}

/// A run that occupies a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ActiveView {
    pub run: RunId,
    pub tests: Vec<TestId>,
    pub state: &'static str,
    pub since: Timestamp,
    pub because: String,
}

impl ActiveView {
    fn of(run: &Run) -> Self {
        let (state, since) = text::run_state(run);
        Self { run: run.id, tests: run.tests.to_vec(), state, since, because: run.purpose.text.clone() }
    }
}

#[cfg(test)]
mod tests;
