//! A plan in the making: what the phases of planning share.

use std::collections::{BTreeMap, BTreeSet};

use super::{Action, breaker::Gate, index::Index, test_set::TestSet};
use crate::{
    case::Case,
    ids::{CaseId, IdSource, NodeName, PoolName, RunId, TestId},
    lifecycle::{Life, LifeEvent},
    node::Occupancy,
    policy::{TestPolicy, WindowKind},
    reason::{Because, ReasonCode},
    run::{JobSeen, NonEmpty, Purpose, Run, RunState},
    snapshot::{NodeRecord, Snapshot},
    time::{Span, Timestamp},
};

/// A job that cannot be cancelled for this long no longer counts against the number of jobs; its node stays taken.
const STUCK_AFTER: Span = Span::minutes(15);

pub(super) struct Draft<'a> {
    pub snapshot: &'a Snapshot,
    pub index: &'a Index,
    pub ids: &'a mut IdSource,
    pub actions: Vec<Because<Action>>,
    /// Nodes that some action names.
    pub touched: BTreeSet<u32>,
    /// Nodes whose affairs are settled for this cycle: no further remedy, no new run.
    pub left_alone: BTreeSet<u32>,
    /// Nodes whose life this plan changes. A second change would be one of a life that is no more.
    pub moved: BTreeSet<u32>,
    /// Nodes with a run that has not ended.
    pub active: BTreeSet<u32>,
    pub gate: Gate,
    pub usage: Usage,
    cases: BTreeMap<CaseId, usize>,
}

impl<'a> Draft<'a> {
    pub(super) fn new(snapshot: &'a Snapshot, index: &'a Index, ids: &'a mut IdSource) -> Self {
        ids.at(snapshot.at);
        let mut draft = Self {
            snapshot,
            index,
            ids,
            actions: Vec::new(),
            touched: BTreeSet::new(),
            left_alone: BTreeSet::new(),
            moved: BTreeSet::new(),
            active: BTreeSet::new(),
            gate: Gate::new(snapshot, index.pools.len()),
            usage: Usage::new(snapshot, index.pools.len()),
            cases: snapshot.cases.iter().enumerate().map(|(place, case)| (case.id, place)).collect(),
        };
        for active in &snapshot.runs {
            let stuck = active.cancelling.is_some_and(|cancelling| snapshot.at.since(cancelling.since) >= STUCK_AFTER);
            let nodes: Vec<u32> = active.run.nodes.iter().filter_map(|name| find(snapshot, name)).collect();
            if !stuck {
                let pools: Vec<u16> = nodes.iter().map(|node| index.pool(*node)).collect();
                draft.usage.count(snapshot, &active.run.tests, &pools);
                let elapsed = match &active.seen {
                    JobSeen::Running { since, .. } => snapshot.at.since(*since),
                    _ => Span::ZERO,
                };
                let usual = usual(snapshot, &active.run.tests);
                draft.usage.charge(usual.max(elapsed).times(active.run.nodes.len() as i64));
            }
            draft.active.extend(nodes);
        }
        draft
    }

    pub(super) fn act(&mut self, action: Action, code: &'static str, text: impl Into<String>) {
        self.actions.push(Because::new(action, code, text));
    }

    pub(super) fn find(&self, name: &NodeName) -> Option<u32> {
        find(self.snapshot, name)
    }

    pub(super) fn record(&self, name: &NodeName) -> Option<&'a NodeRecord> {
        self.find(name).map(|node| &self.snapshot.nodes[node as usize])
    }

    pub(super) fn touch_name(&mut self, name: &NodeName) {
        if let Some(node) = self.find(name) {
            self.touched.insert(node);
        }
    }

    pub(super) fn case(&self, id: CaseId) -> Option<&'a Case> {
        self.cases.get(&id).map(|place| &self.snapshot.cases[*place])
    }

    /// The open case of this node. A case that followed its machine is another name's by now.
    pub(super) fn open_case(&self, record: &NodeRecord) -> Option<&'a Case> {
        record.case.and_then(|id| self.case(id)).filter(|case| case.is_open() && case.node == record.node.name)
    }

    /// Whether a run may start on this node at all: it is free, nobody else has his hand on it, nothing of ours is.
    pub(super) fn is_open_to_runs(&self, node: u32) -> bool {
        let record = &self.snapshot.nodes[node as usize];
        is_free_to_us(record, self.snapshot.at) && !self.active.contains(&node) && !self.left_alone.contains(&node)
    }

    /// Whether a proof may: as any other run, or past a cluster that starts nothing there.
    pub(super) fn is_open_to_proofs(&self, node: u32) -> bool {
        let (record, at) = (&self.snapshot.nodes[node as usize], self.snapshot.at);
        let open = is_free_to_us(record, at) || takes_proofs(record, at);
        open && !self.active.contains(&node) && !self.left_alone.contains(&node)
    }

    /// Moves a node along its life, if that event has a place in its present state.
    pub(super) fn advance(
        &mut self,
        node: u32,
        event: &LifeEvent,
        case: Option<CaseId>,
        code: &'static str,
        text: impl Into<String>,
    ) -> bool {
        let record = &self.snapshot.nodes[node as usize];
        let Some(to) = record.life.after(event) else { return false };
        self.move_to(node, to, case, code, text);
        true
    }

    /// Writes down where a node stands, which may be where it stood, with another case.
    pub(super) fn move_to(
        &mut self,
        node: u32,
        to: Life,
        case: Option<CaseId>,
        code: &'static str,
        text: impl Into<String>,
    ) {
        let name = self.snapshot.nodes[node as usize].node.name.clone();
        self.touched.insert(node);
        self.moved.insert(node);
        self.act(Action::Move { node: name, to, case }, code, text);
    }

    /// Whether `kind` of window is open for this pool now; `None` if the pool has no such window.
    pub(super) fn window(&self, node: &NodeRecord, kind: WindowKind) -> Option<bool> {
        let mut windows =
            self.snapshot.policy.windows.iter().filter(|w| w.kind == kind && w.applies_to(&node.node.pool)).peekable();
        windows.peek()?;
        Some(windows.any(|window| window.contains(self.snapshot.at)))
    }

    /// Decides on a run of these tests on this node and reserves what it takes.
    pub(super) fn submit(
        &mut self,
        node: u32,
        tests: NonEmpty<TestId>,
        asked: Because<Purpose>,
        case: Option<CaseId>,
    ) -> RunId {
        self.submit_on(&NonEmpty::one(node), tests, asked, case)
    }

    /// The same for a run on several nodes at once.
    pub(super) fn submit_on(
        &mut self,
        nodes: &NonEmpty<u32>,
        tests: NonEmpty<TestId>,
        asked: Because<Purpose>,
        case: Option<CaseId>,
    ) -> RunId {
        let id = self.ids.run();
        let pools: Vec<u16> = nodes.iter().map(|node| self.index.pool(*node)).collect();
        self.usage.count(self.snapshot, &tests, &pools);
        self.usage.charge(usual(self.snapshot, &tests).times(nodes.len() as i64));
        let limit = tests.iter().filter_map(|id| policy_of(self.snapshot, id)).map(|test| test.limit).sum();
        let (code, text) = (asked.code.clone(), asked.text.clone());
        let run = Run {
            id,
            nodes: nodes.map(|node| self.snapshot.nodes[*node as usize].node.name.clone()),
            tests,
            state: RunState::Planned,
            asked,
            case,
            planned: self.snapshot.at,
            limit,
        };
        self.actions.push(Because { what: Action::Submit(run), code, text });
        self.touched.extend(nodes.iter());
        self.active.extend(nodes.iter());
        id
    }
}

pub(super) fn find(snapshot: &Snapshot, name: &NodeName) -> Option<u32> {
    let place = snapshot.nodes.binary_search_by(|record| record.node.name.cmp(name)).ok()?;
    u32::try_from(place).ok()
}

fn policy_of<'a>(snapshot: &'a Snapshot, id: &TestId) -> Option<&'a TestPolicy> {
    snapshot.tests.iter().find(|test| test.id == *id)
}

/// Whether a test is run by itself when it is stale.
pub(super) fn is_routine(snapshot: &Snapshot, id: &TestId) -> bool {
    policy_of(snapshot, id).is_some_and(|policy| policy.routine)
}

/// Free, and no operator and nobody else's mark keeps us off it.
pub(super) fn is_free_to_us(record: &NodeRecord, at: Timestamp) -> bool {
    record.node.occupancy.is_free()
        && record.hold_at(at).is_none()
        && !matches!(record.life, Life::Held { .. })
        && record.node.marks.foreign_block().is_none()
}

/// Out of service by us, and of no use to its cluster: what we want to know of it is learnt past the cluster.
pub(super) fn takes_proofs(record: &NodeRecord, at: Timestamp) -> bool {
    let ours = record.life.is_out() && record.case.is_some() && record.hold_at(at).is_none();
    let nobodys = matches!(record.node.occupancy, Occupancy::Unknown { .. }) && record.node.takes_proofs();
    ours && nobodys && record.node.marks.foreign_block().is_none()
}

fn usual(snapshot: &Snapshot, tests: &[TestId]) -> Span {
    tests.iter().filter_map(|id| policy_of(snapshot, id)).map(|test| test.usual).sum()
}

/// What running and planned work takes of the limits.
#[derive(Debug)]
pub(super) struct Usage {
    pub jobs: u32,
    per_pool: Vec<u32>,
    /// By place in `Snapshot::tests`.
    per_test: Vec<u32>,
    per_share: BTreeMap<String, u32>,
    /// Node-time: spent today, running and planned.
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

    fn count(&mut self, snapshot: &Snapshot, tests: &[TestId], pools: &[u16]) {
        self.jobs += 1;
        for pool in pools {
            self.per_pool[*pool as usize] += 1;
        }
        // Two tests of one job that load the same mount load it one after the other: that is one user of it.
        let mut shares = BTreeSet::new();
        for id in tests {
            if let Some(place) = snapshot.tests.iter().position(|test| test.id == *id) {
                self.per_test[place] += 1;
                shares.extend(&snapshot.tests[place].shares);
            }
        }
        for share in shares {
            *self.per_share.entry(share.clone()).or_default() += 1;
        }
    }

    fn charge(&mut self, span: Span) {
        self.spent = self.spent + span;
    }

    /// Whether a run of all these tests may start in this pool: what binds every run, whoever wants it. The daily
    /// budget is not asked: it binds what we would like to do, and not a proof or an operator's wish.
    pub(super) fn admits(&self, draft: &Draft<'_>, node: u32, tests: &[TestId]) -> bool {
        let snapshot = draft.snapshot;
        let pool = draft.index.pool(node);
        self.jobs < snapshot.policy.limits.jobs
            && !self.is_pool_full(snapshot, &draft.index.pools[pool as usize], pool)
            && tests.iter().all(|id| {
                let place = snapshot.tests.iter().position(|test| test.id == *id);
                place.is_some_and(|place| self.has_room(snapshot, place))
            })
    }

    pub(super) fn is_pool_full(&self, snapshot: &Snapshot, name: &PoolName, pool: u16) -> bool {
        snapshot.policy.limits.pools.get(name).is_some_and(|most| self.per_pool[pool as usize] >= *most)
    }

    /// Whether one more run of this test is within its own and its shares' limits.
    pub(super) fn has_room(&self, snapshot: &Snapshot, place: usize) -> bool {
        let test = &snapshot.tests[place];
        let own = test.at_once.is_none_or(|most| self.per_test[place] < most);
        own && test
            .shares
            .iter()
            .all(|share| self.per_share.get(share).is_none_or(|used| *used < snapshot.policy.limits.per_share))
    }
}

/// The tests of a set, in their order.
pub(super) fn named(snapshot: &Snapshot, tests: &TestSet) -> Vec<TestId> {
    snapshot
        .tests
        .iter()
        .enumerate()
        .filter(|(place, _)| tests.contains(*place))
        .map(|(_, test)| test.id.clone())
        .collect()
}

/// How long ago, for people.
pub(super) fn ago(now: Timestamp, then: Timestamp) -> String {
    if then == Timestamp::MIN {
        "never tested".to_owned()
    } else {
        format!("last settled {} ago", coarse(now.since(then)))
    }
}

/// Without the digits nobody reads.
pub(super) fn coarse(span: Span) -> Span {
    let unit = if span >= Span::days(1) { 3_600_000 } else { 60_000 };
    if span.millis() < unit { span } else { Span::from_millis(span.millis() / unit * unit) }
}

/// A reason code of a run's purpose.
pub(super) fn because(purpose: Purpose, code: &'static str, text: String) -> Because<Purpose> {
    Because { what: purpose, code: ReasonCode::fixed(code), text }
}

impl std::fmt::Debug for Draft<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Draft").field("actions", &self.actions).finish_non_exhaustive()
    }
}

/// Whether a node is out, judging by what this plan knows.
pub(super) fn is_touchable(life: &Life) -> bool {
    matches!(life, Life::InService | Life::Suspect)
}
