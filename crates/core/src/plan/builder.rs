//! The plan under construction, shared by the phases of planning.

use std::collections::{BTreeMap, BTreeSet};

use super::{Action, breaker::BreakerGuard, priority::Index};
use crate::{
    case::Case,
    ids::{CaseId, IdSource, NodeName, PoolName, RunId, TestId},
    lifecycle::{NodeEvent, NodeState},
    node::Occupancy,
    policy::{TestPolicy, WindowKind},
    reason::{ReasonCode, WithReason},
    run::{NonEmpty, ObservedJobState, Purpose, Run, RunState},
    snapshot::{NodeRecord, Snapshot},
    time::{Span, Timestamp},
};

/// A job that could not be cancelled for this long, for example because its host does not answer, no longer counts against the
/// limits; its node stays occupied.
pub(super) const STUCK_AFTER: Span = Span::minutes(15);

pub(super) struct PlanBuilder<'a> {
    pub snapshot: &'a Snapshot,
    pub index: &'a Index,
    pub ids: &'a mut IdSource,
    pub actions: Vec<WithReason<Action>>,
    /// Nodes that an action names.
    pub touched: BTreeSet<u32>,
    /// Nodes that are done for this cycle: no further remedy, no new run.
    pub finished: BTreeSet<u32>,
    /// Nodes whose state this plan changes. A second change would start from a state that is no longer current.
    pub state_changed: BTreeSet<u32>,
    /// Nodes with a run that has not ended.
    pub active: BTreeSet<u32>,
    pub breaker: BreakerGuard,
    pub usage: Usage,
    cases: BTreeMap<CaseId, usize>,
}

impl<'a> PlanBuilder<'a> {
    pub(super) fn new(snapshot: &'a Snapshot, index: &'a Index, ids: &'a mut IdSource) -> Self {
        ids.set_time(snapshot.at);
        let mut builder = Self {
            snapshot,
            index,
            ids,
            actions: Vec::new(),
            touched: BTreeSet::new(),
            finished: BTreeSet::new(),
            state_changed: BTreeSet::new(),
            active: BTreeSet::new(),
            breaker: BreakerGuard::new(snapshot, index.pools.len()),
            usage: Usage::new(snapshot, index.pools.len()),
            cases: snapshot.cases.iter().enumerate().map(|(position, case)| (case.id, position)).collect(),
        };
        for active in &snapshot.runs {
            let stuck = active.cancelling.is_some_and(|cancelling| snapshot.at.since(cancelling.since) >= STUCK_AFTER);
            let nodes: Vec<u32> = active.run.nodes.iter().filter_map(|name| find(snapshot, name)).collect();
            if !stuck {
                let pools: Vec<u16> = nodes.iter().map(|node| index.pool(*node)).collect();
                builder.usage.add_run(snapshot, &active.run.tests, &pools);
                let elapsed = match &active.job {
                    ObservedJobState::Running { since, .. } => snapshot.at.since(*since),
                    _ => Span::ZERO,
                };
                let usual = usual_duration(snapshot, &active.run.tests);
                builder.usage.add_node_time(usual.max(elapsed).times(active.run.nodes.len() as i64));
            }
            builder.active.extend(nodes);
        }
        builder
    }

    pub(super) fn push_action(&mut self, action: Action, code: &'static str, text: impl Into<String>) {
        self.actions.push(WithReason::new(action, code, text));
    }

    pub(super) fn find(&self, name: &NodeName) -> Option<u32> {
        find(self.snapshot, name)
    }

    pub(super) fn record(&self, name: &NodeName) -> Option<&'a NodeRecord> {
        self.find(name).map(|node| &self.snapshot.nodes[node as usize])
    }

    pub(super) fn touch(&mut self, name: &NodeName) {
        if let Some(node) = self.find(name) {
            self.touched.insert(node);
        }
    }

    pub(super) fn case(&self, id: CaseId) -> Option<&'a Case> {
        self.cases.get(&id).map(|index| &self.snapshot.cases[*index])
    }

    /// Returns the open case of this node. A case that moved with its machine belongs to another node name.
    pub(super) fn open_case(&self, record: &NodeRecord) -> Option<&'a Case> {
        record.case.and_then(|id| self.case(id)).filter(|case| case.is_open() && case.node == record.node.name)
    }

    /// Returns whether a run may start on this node: it is free, not held or marked by another party, and not in use by
    /// us.
    pub(super) fn accepts_run(&self, node: u32) -> bool {
        let record = &self.snapshot.nodes[node as usize];
        is_available(record, self.snapshot.at) && !self.active.contains(&node) && !self.finished.contains(&node)
    }

    /// Returns whether a requalification run may start: as any other run, or past a cluster that starts nothing on the node.
    pub(super) fn accepts_requalification(&self, node: u32) -> bool {
        let (record, at) = (&self.snapshot.nodes[node as usize], self.snapshot.at);
        let open = is_available(record, at) || is_reachable_out_of_band(record, at);
        open && !self.active.contains(&node) && !self.finished.contains(&node)
    }

    /// Applies an event to a node's state. Returns whether the event is allowed in the present state.
    pub(super) fn apply_event(
        &mut self,
        node: u32,
        event: &NodeEvent,
        case: Option<CaseId>,
        code: &'static str,
        text: impl Into<String>,
    ) -> bool {
        let record = &self.snapshot.nodes[node as usize];
        let Some(to) = record.state.apply(event) else { return false };
        self.set_state(node, to, case, code, text);
        true
    }

    /// Records the state of a node, which may be the present one with another case.
    pub(super) fn set_state(
        &mut self,
        node: u32,
        to: NodeState,
        case: Option<CaseId>,
        code: &'static str,
        text: impl Into<String>,
    ) {
        let name = self.snapshot.nodes[node as usize].node.name.clone();
        self.touched.insert(node);
        self.state_changed.insert(node);
        self.push_action(Action::SetState { node: name, to, case }, code, text);
    }

    /// Returns whether `kind` of window is open for this pool now; `None` if the pool has no such window.
    pub(super) fn window(&self, node: &NodeRecord, kind: WindowKind) -> Option<bool> {
        let mut windows =
            self.snapshot.policy.windows.iter().filter(|w| w.kind == kind && w.applies_to(&node.node.pool)).peekable();
        windows.peek()?;
        Some(windows.any(|window| window.contains(self.snapshot.at)))
    }

    /// Returns how many more runs may start.
    pub(super) fn free_slots(&self) -> usize {
        max_jobs(self.snapshot).saturating_sub(self.usage.jobs) as usize
    }

    /// Plans a run of these tests on this node and reserves its capacity.
    pub(super) fn submit(
        &mut self,
        node: u32,
        tests: NonEmpty<TestId>,
        purpose: WithReason<Purpose>,
        case: Option<CaseId>,
    ) -> RunId {
        self.submit_multi_node(&NonEmpty::one(node), tests, purpose, case)
    }

    /// Plans a run on several nodes together.
    pub(super) fn submit_multi_node(
        &mut self,
        nodes: &NonEmpty<u32>,
        tests: NonEmpty<TestId>,
        purpose: WithReason<Purpose>,
        case: Option<CaseId>,
    ) -> RunId {
        let id = self.ids.run();
        let tests = shortest_first(self.snapshot, tests);
        let pools: Vec<u16> = nodes.iter().map(|node| self.index.pool(*node)).collect();
        self.usage.add_run(self.snapshot, &tests, &pools);
        self.usage.add_node_time(usual_duration(self.snapshot, &tests).times(nodes.len() as i64));
        let limit = tests.iter().filter_map(|id| policy_of(self.snapshot, id)).map(|test| test.limit).sum();
        let (code, text) = (purpose.code.clone(), purpose.text.clone());
        let run = Run {
            id,
            nodes: nodes.map(|node| self.snapshot.nodes[*node as usize].node.name.clone()),
            tests,
            state: RunState::Planned,
            purpose,
            case,
            planned: self.snapshot.at,
            limit,
        };
        self.actions.push(WithReason { value: Action::Submit(run), code, text });
        self.touched.extend(nodes.iter());
        self.active.extend(nodes.iter());
        id
    }
}

pub(super) fn find(snapshot: &Snapshot, name: &NodeName) -> Option<u32> {
    let index = snapshot.nodes.binary_search_by(|record| record.node.name.cmp(name)).ok()?;
    u32::try_from(index).ok()
}

/// Puts the short tests of a run first: when a user takes the node meanwhile, these have results.
fn shortest_first(snapshot: &Snapshot, tests: NonEmpty<TestId>) -> NonEmpty<TestId> {
    let mut ordered: Vec<TestId> = tests.iter().cloned().collect();
    ordered.sort_by_key(|id| policy_of(snapshot, id).map(|test| test.typical_duration));
    NonEmpty::new(ordered).unwrap_or(tests)
}

fn policy_of<'a>(snapshot: &'a Snapshot, id: &TestId) -> Option<&'a TestPolicy> {
    snapshot.tests.iter().find(|test| test.id == *id)
}

/// Returns whether the node is free and neither a hold nor a foreign mark keeps us off it.
pub(super) fn is_available(record: &NodeRecord, at: Timestamp) -> bool {
    record.node.occupancy.is_free()
        && record.hold_at(at).is_none()
        && !matches!(record.state, NodeState::Held { .. })
        && record.node.marks.blocking_foreign_mark().is_none()
}

/// Returns whether requalification runs can reach the node past its cluster: we took it out, and the cluster cannot use it.
pub(super) fn is_reachable_out_of_band(record: &NodeRecord, at: Timestamp) -> bool {
    let ours = record.state.is_out_of_service() && record.case.is_some() && record.hold_at(at).is_none();
    let unused = matches!(record.node.occupancy, Occupancy::Unknown { .. }) && record.node.is_reachable_out_of_band();
    ours && unused && record.node.marks.blocking_foreign_mark().is_none()
}

/// Returns how many validation jobs may run at the same time in this cluster.
pub(super) fn max_jobs(snapshot: &Snapshot) -> u32 {
    snapshot.policy.limits.jobs.for_nodes(snapshot.nodes.len())
}

fn usual_duration(snapshot: &Snapshot, tests: &[TestId]) -> Span {
    tests.iter().filter_map(|id| policy_of(snapshot, id)).map(|test| test.typical_duration).sum()
}

/// What running and planned work uses of the limits.
#[derive(Debug)]
pub(super) struct Usage {
    pub jobs: u32,
    per_pool: Vec<u32>,
    /// By index in `Snapshot::tests`.
    per_test: Vec<u32>,
    per_share: BTreeMap<String, u32>,
    /// Node time: spent today, running and planned.
    pub spent: Span,
}

impl Usage {
    fn new(snapshot: &Snapshot, pools: usize) -> Self {
        Self {
            jobs: 0,
            per_pool: vec![0; pools],
            per_test: vec![0; snapshot.tests.len()],
            per_share: BTreeMap::new(),
            spent: snapshot.spent,
        }
    }

    fn add_run(&mut self, snapshot: &Snapshot, tests: &[TestId], pools: &[u16]) {
        self.jobs += 1;
        for pool in pools {
            self.per_pool[*pool as usize] += 1;
        }
        // Two tests of one job that load the same mount run one after the other: they count as one user of it.
        let mut shares = BTreeSet::new();
        for id in tests {
            if let Some(index) = snapshot.tests.iter().position(|test| test.id == *id) {
                self.per_test[index] += 1;
                shares.extend(&snapshot.tests[index].shares);
            }
        }
        for share in shares {
            *self.per_share.entry(share.clone()).or_default() += 1;
        }
    }

    fn add_node_time(&mut self, span: Span) {
        self.spent = self.spent + span;
    }

    /// Returns whether a run of all these tests may start in this pool, by the limits that apply to every run. The
    /// daily budget is not one of them: it limits routine validation, not requalification runs or operators' requests.
    pub(super) fn allows_run(&self, builder: &PlanBuilder<'_>, node: u32, tests: &[TestId]) -> bool {
        let snapshot = builder.snapshot;
        let pool = builder.index.pool(node);
        self.jobs < max_jobs(snapshot)
            && !self.is_pool_full(snapshot, &builder.index.pools[pool as usize], pool)
            && tests.iter().all(|id| {
                let index = snapshot.tests.iter().position(|test| test.id == *id);
                index.is_some_and(|index| self.has_room(snapshot, index))
            })
    }

    pub(super) fn is_pool_full(&self, snapshot: &Snapshot, name: &PoolName, pool: u16) -> bool {
        snapshot.policy.limits.pools.get(name).is_some_and(|most| self.per_pool[pool as usize] >= *most)
    }

    /// Returns whether one more run of this test is within its own limit and those of its shares.
    pub(super) fn has_room(&self, snapshot: &Snapshot, index: usize) -> bool {
        let test = &snapshot.tests[index];
        let own = test.max_concurrent.is_none_or(|most| self.per_test[index] < most);
        own && test
            .shares
            .iter()
            .all(|share| self.per_share.get(share).is_none_or(|used| *used < snapshot.policy.limits.per_share))
    }
}

/// Formats the age of a result for people.
pub(super) fn format_age(now: Timestamp, then: Timestamp) -> String {
    if then == Timestamp::MIN {
        "never tested".to_owned()
    } else {
        format!("last result {} ago", coarse(now.since(then)))
    }
}

/// Rounds a duration down for display: to hours from one day on, else to minutes.
pub(super) fn coarse(span: Span) -> Span {
    let unit = if span >= Span::days(1) { 3_600_000 } else { 60_000 };
    if span.millis() < unit { span } else { Span::from_millis(span.millis() / unit * unit) }
}

/// Attaches a reason to the purpose of a run.
pub(super) fn purpose_with_reason(purpose: Purpose, code: &'static str, text: String) -> WithReason<Purpose> {
    WithReason { value: purpose, code: ReasonCode::fixed(code), text }
}

impl std::fmt::Debug for PlanBuilder<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlanBuilder").field("actions", &self.actions).finish_non_exhaustive()
    }
}

/// Returns whether a node with this state is still available to users: in service or suspect.
pub(super) fn is_in_service(state: &NodeState) -> bool {
    matches!(state, NodeState::InService | NodeState::Suspect)
}
