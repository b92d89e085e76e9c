//! The order in which due nodes are tested ([`Rank`]), in an index that makes planning incremental: the eligibility of
//! every node, the due nodes in order, and the times at which eligibilities change.
//!
//! A node's eligibility depends on its own record, the policy and the time, and on no other node. So a changed record
//! means one recomputed eligibility, and the passage of time means only the nodes whose timer has expired. What depends on
//! other nodes (slots, shared mounts, budgets) is decided for whole groups of nodes in `candidates`: all nodes of one pool
//! whose tests need the same get the same answer, except for the few that are chosen.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use super::{
    SkipReason,
    due::{DueTests, due_tests},
    test_set::{TestSet, tests_of},
};
use crate::{
    ids::PoolName,
    job_failures::Weight,
    lifecycle::NodeState,
    node::Occupancy,
    policy::TestPolicy,
    snapshot::{NodeRecord, Snapshot},
    time::{Span, Timestamp},
};

/// While nodes wait for a slot, a run with short tests takes no longer than this.
pub(super) const SHORT_RUN: Span = Span::minutes(3);

/// What decides, beside its rank, whether a node can be chosen: its pool, and what its tests need. The tests are those that
/// are due, or those that may be renewed if none is due. All nodes of a group get the same answer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Group {
    pub pool: u16,
    /// Nothing is due; results are renewed before they become stale.
    pub is_early: bool,
    /// The tests that only so many nodes may run at the same time.
    pub limited: TestSet,
    /// The usual duration of the other tests, zero if no budget counts it. `None`: there are no others.
    pub unlimited: Option<Span>,
}

/// The order in which nodes are chosen: suspects first, then nodes on which user work failed, then nodes with short tests,
/// then the stalest, then by name. Nodes on which nothing is due come last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub is_healthy: bool,
    /// Nothing is due; results are renewed before they become stale.
    pub is_early: bool,
    pub risk: Reverse<Weight>,
    /// None of the tests is short. While a long test runs, its slot would serve many nodes with short ones.
    pub is_long: bool,
    pub age: Timestamp,
    pub node: u32,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Eligibility {
    Skipped(SkipReason),
    Due(Group, Rank),
    /// Nothing is due before `until`; with a slot to spare, results are renewed.
    Early {
        group: Group,
        rank: Rank,
        until: Timestamp,
    },
}

impl Eligibility {
    /// Returns the place in the queue of a node that may be chosen.
    const fn place(&self) -> Option<(&Group, &Rank)> {
        match self {
            Self::Due(group, rank) | Self::Early { group, rank, .. } => Some((group, rank)),
            Self::Skipped(_) => None,
        }
    }
}

/// Node counts of one pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PoolCount {
    pub total: u32,
    pub out: u32,
}

#[derive(Debug)]
pub(super) struct Index {
    pub eligibilities: Vec<Eligibility>,
    pub groups: BTreeMap<Group, BTreeSet<Rank>>,
    /// When each node's eligibility changes without a new record.
    timers: BTreeSet<(Timestamp, u32)>,
    next: Vec<Timestamp>,
    /// Nodes that the remedies must consider.
    pub needs_attention: BTreeSet<u32>,
    pub pools: Vec<PoolName>,
    pub counts: Vec<PoolCount>,
    /// Tests that apply in each pool.
    applies: Vec<TestSet>,
    /// Tests that fit into a short run.
    short: TestSet,
    /// Tests that only so many nodes may run at the same time.
    limited: TestSet,
    pool_of: Vec<u16>,
    out: Vec<bool>,
    /// When each node's agent last reported, in one array, because every plan scans all of them. `MAX`: no agent is
    /// expected.
    last_reports: Vec<Timestamp>,
    /// Whether each node's eligibility was computed with a live agent.
    live_agents: Vec<bool>,
    pub agents: u32,
}

impl Index {
    /// Builds the index for one plan in one pass over the nodes. `keep` receives each node's eligibility and the time at
    /// which it changes, in order; the index itself does not store them.
    pub(super) fn build(snapshot: &Snapshot, keep: impl FnMut(&NodeRecord, Eligibility, Timestamp)) -> Self {
        let nodes = snapshot.nodes.len();
        let mut index = Self {
            eligibilities: Vec::new(),
            groups: BTreeMap::new(),
            timers: BTreeSet::new(),
            next: Vec::new(),
            needs_attention: BTreeSet::new(),
            counts: Vec::new(),
            pools: Vec::new(),
            applies: Vec::new(),
            short: tests_with(&snapshot.tests, |test| test.typical_duration <= SHORT_RUN),
            limited: tests_with(&snapshot.tests, |test| test.max_concurrent.is_some() || !test.shares.is_empty()),
            pool_of: Vec::with_capacity(nodes),
            out: Vec::with_capacity(nodes),
            last_reports: vec![Timestamp::MAX; nodes],
            live_agents: Vec::with_capacity(nodes),
            agents: 0,
        };
        index.fill(snapshot, keep);
        index
    }

    /// Builds an index that stores every eligibility and can be updated.
    pub(super) fn build_incremental(snapshot: &Snapshot) -> Self {
        let mut eligibilities = Vec::with_capacity(snapshot.nodes.len());
        let mut next_changes = Vec::with_capacity(snapshot.nodes.len());
        let mut index = Self::build(snapshot, |_, eligibility, next| {
            eligibilities.push(eligibility);
            next_changes.push(next);
        });
        let timers = (0_u32..).zip(&next_changes).filter(|(_, next)| **next != Timestamp::MAX);
        let mut timers: Vec<(Timestamp, u32)> = timers.map(|(node, next)| (*next, node)).collect();
        timers.sort_unstable();
        index.timers = timers.into_iter().collect();
        (index.eligibilities, index.next) = (eligibilities, next_changes);
        index
    }

    /// Sets are built from sorted sequences, which is several times faster than single insertions.
    fn fill(&mut self, snapshot: &Snapshot, mut keep: impl FnMut(&NodeRecord, Eligibility, Timestamp)) {
        let mut groups: BTreeMap<Group, Vec<Rank>> = BTreeMap::new();
        let mut pool = 0;
        for (node, record) in (0_u32..).zip(&snapshot.nodes) {
            if (node as usize).is_multiple_of(PREFETCH_BATCH) {
                prefetch(snapshot.nodes[node as usize..].iter().take(PREFETCH_BATCH));
            }
            pool = self.pool_index(snapshot, &record.node.pool, pool);
            self.pool_of.push(pool);
            let (eligibility, next) = self.evaluate(snapshot, node, record);
            if let Some((group, rank)) = eligibility.place() {
                groups.entry(group.clone()).or_default().push(*rank);
            }
            keep(record, eligibility, next);
            self.set_last_report(node, record.last_report);
            self.live_agents.push(record.has_live_agent(snapshot.at, snapshot.policy.agents.silent_after));
            if needs_attention(record) {
                self.needs_attention.insert(node);
            }
            let out = is_out(record);
            self.out.push(out);
            let count = &mut self.counts[pool as usize];
            count.total += 1;
            count.out += u32::from(out);
        }
        self.groups = groups
            .into_iter()
            .map(|(group, mut ranks)| {
                ranks.sort_unstable();
                (group, ranks.into_iter().collect())
            })
            .collect();
    }

    /// Returns the number of a pool, and adds a new pool. Neighbouring nodes mostly share a pool (`last`), and the list
    /// of pools is short.
    fn pool_index(&mut self, snapshot: &Snapshot, pool: &PoolName, last: u16) -> u16 {
        if self.pools.get(last as usize) == Some(pool) {
            return last;
        }
        let known = self.pools.iter().position(|known| known == pool).unwrap_or_else(|| {
            self.pools.push(pool.clone());
            self.applies.push(tests_with(&snapshot.tests, |test| applies_in(test, pool)));
            self.counts.push(PoolCount::default());
            self.pools.len() - 1
        });
        u16::try_from(known).expect("a cluster has fewer than 65,536 pools")
    }

    /// Recomputes one node. Returns whether its eligibility changed.
    pub(super) fn refresh(&mut self, snapshot: &Snapshot, node: u32) -> bool {
        let i = node as usize;
        let record = &snapshot.nodes[i];
        let (eligibility, next) = self.evaluate(snapshot, node, record);
        if next != self.next[i] {
            self.timers.remove(&(self.next[i], node));
            if next != Timestamp::MAX {
                self.timers.insert((next, node));
            }
            self.next[i] = next;
        }
        self.set_last_report(node, record.last_report);
        self.live_agents[i] = record.has_live_agent(snapshot.at, snapshot.policy.agents.silent_after);
        if needs_attention(record) {
            self.needs_attention.insert(node);
        } else {
            self.needs_attention.remove(&node);
        }
        let out = is_out(record);
        if out != self.out[i] {
            self.out[i] = out;
            let count = &mut self.counts[self.pool_of[i] as usize].out;
            *count = if out { *count + 1 } else { count.saturating_sub(1) };
        }
        if eligibility == self.eligibilities[i] {
            return false;
        }
        if let Some((group, rank)) = self.eligibilities[i].place()
            && let Some(ranks) = self.groups.get_mut(group)
        {
            ranks.remove(rank);
            if ranks.is_empty() {
                self.groups.remove(group);
            }
        }
        if let Some((group, rank)) = eligibility.place() {
            self.groups.entry(group.clone()).or_default().insert(*rank);
        }
        self.eligibilities[i] = eligibility;
        true
    }

    /// Returns the nodes whose eligibility changes at or before `at`, and clears their timers.
    pub(super) fn due_timers(&mut self, at: Timestamp) -> Vec<u32> {
        let mut due = Vec::new();
        while let Some(&(moment, node)) = self.timers.first()
            && moment <= at
        {
            self.timers.pop_first();
            self.next[node as usize] = Timestamp::MAX;
            due.push(node);
        }
        due
    }

    pub(super) fn set_last_report(&mut self, node: u32, last_report: Option<Timestamp>) {
        let slot = &mut self.last_reports[node as usize];
        self.agents -= u32::from(*slot != Timestamp::MAX);
        self.agents += u32::from(last_report.is_some());
        *slot = last_report.unwrap_or(Timestamp::MAX);
    }

    /// Returns the nodes whose agent fell silent or came back since their eligibility was computed. An agent that last
    /// reported before `limit` is silent.
    pub(super) fn changed_agents(&self, limit: Timestamp) -> Vec<u32> {
        let is_live = |last_report: Timestamp| last_report != Timestamp::MAX && last_report >= limit;
        let agents = self.last_reports.iter().zip(&self.live_agents);
        (0_u32..).zip(agents).filter(|(_, (last, was))| is_live(**last) != **was).map(|(node, _)| node).collect()
    }

    /// Returns the nodes in use whose agent last reported before `limit`, in order. A node that is out may be switched
    /// off.
    pub(super) fn silent_since(&self, limit: Timestamp) -> Vec<u32> {
        let silent =
            (0_u32..).zip(&self.last_reports).filter(|(_, last_report)| **last_report < limit).map(|(node, _)| node);
        silent.filter(|node| !self.out[*node as usize]).collect()
    }

    pub(super) fn pool(&self, node: u32) -> u16 {
        self.pool_of[node as usize]
    }

    /// Returns the tests that apply to this node.
    pub(super) fn applies(&self, node: u32) -> &TestSet {
        &self.applies[self.pool_of[node as usize] as usize]
    }

    fn evaluate(&self, snapshot: &Snapshot, node: u32, record: &NodeRecord) -> (Eligibility, Timestamp) {
        let at = snapshot.at;
        let skipped = |why, next| (Eligibility::Skipped(why), next);
        if let Some(hold) = record.hold_at(at) {
            let until = hold.until.unwrap_or(Timestamp::MAX);
            return skipped(SkipReason::Held { by: hold.by.clone() }, until);
        }
        if let NodeState::Held { by } = &record.state {
            return skipped(SkipReason::Held { by: by.clone() }, Timestamp::MAX);
        }
        if record.state.is_out_of_service() || record.node.marks.keeps_out_of_service() {
            let state = if record.state.is_out_of_service() { record.state.clone() } else { NodeState::Quarantined };
            return skipped(SkipReason::OutOfService { state }, Timestamp::MAX);
        }
        if let Some(mark) = record.node.marks.blocking_foreign_mark() {
            let why = SkipReason::ForeignMark { by: mark.by.clone(), text: mark.text.clone() };
            return skipped(why, Timestamp::MAX);
        }
        match &record.node.occupancy {
            Occupancy::Busy { by } => return skipped(SkipReason::Busy { by: by.clone() }, Timestamp::MAX),
            Occupancy::Unknown { why } => {
                return skipped(SkipReason::OccupancyUnknown { why: why.clone() }, Timestamp::MAX);
            }
            Occupancy::Free => {}
        }
        if let Some(backoff) = record.backoff
            && backoff.until > at
        {
            return skipped(SkipReason::BackingOff { until: backoff.until }, backoff.until);
        }
        let applies = self.applies(node);
        if applies.is_empty() {
            return skipped(SkipReason::NothingApplies, Timestamp::MAX);
        }
        let due = runnable_tests(snapshot, record, applies);
        let is_early = due.tests.is_empty();
        if is_early && due.early.is_empty() {
            return skipped(SkipReason::Fresh { until: due.next_due }, due.next);
        }
        let tests = if is_early { &due.early } else { &due.tests };
        let rank = Rank {
            is_healthy: is_healthy(record),
            is_early,
            risk: Reverse(record.risk()),
            is_long: tests.intersection(&self.short).is_empty(),
            age: due.age,
            node,
        };
        let group = Group {
            pool: self.pool(node),
            is_early,
            limited: tests.intersection(&self.limited),
            unlimited: self.duration_of_unlimited(snapshot, tests),
        };
        let eligibility = match is_early {
            true => Eligibility::Early { group, rank, until: due.next_due },
            false => Eligibility::Due(group, rank),
        };
        (eligibility, due.next)
    }

    /// Returns the usual duration of those tests that any number of nodes may run; `None` if there are none.
    fn duration_of_unlimited(&self, snapshot: &Snapshot, tests: &TestSet) -> Option<Span> {
        let unlimited = tests.difference(&self.limited);
        let is_counted = snapshot.policy.limits.node_hours_per_day.is_some();
        let usual = || tests_of(snapshot, &unlimited).map(|test| test.typical_duration).sum();
        (!unlimited.is_empty()).then(|| if is_counted { usual() } else { Span::ZERO })
    }

    /// Returns the tests that are due on a node, and those whose result may be renewed along with them.
    pub(super) fn runnable_tests(&self, snapshot: &Snapshot, node: u32) -> DueTests {
        runnable_tests(snapshot, &snapshot.nodes[node as usize], self.applies(node))
    }
}

/// Where trouble is suspected, the due tests answer first, without the others in the same job.
fn runnable_tests(snapshot: &Snapshot, record: &NodeRecord, applies: &TestSet) -> DueTests {
    let due = due_tests(snapshot, record, applies);
    let renews = is_healthy(record) && (due.tests.is_empty() || record.risk() == Weight::NONE);
    DueTests { early: if renews { due.early } else { TestSet::default() }, ..due }
}

fn is_healthy(record: &NodeRecord) -> bool {
    record.state != NodeState::Suspect && record.findings.is_empty()
}

/// Number of nodes whose data is prefetched together.
const PREFETCH_BATCH: usize = 32;

/// Prefetches the data that these nodes' eligibilities need, which is scattered over memory. Independent reads let the
/// processor fetch many cache lines in parallel; updating one reference count after the other waits for each.
fn prefetch<'a>(records: impl Iterator<Item = &'a NodeRecord>) {
    let first = |text: &str| text.as_bytes().first().copied().unwrap_or(0);
    let read = records.fold(0_u8, |read, record| {
        let node = &record.node;
        let used_by = match &node.occupancy {
            Occupancy::Busy { by: text } | Occupancy::Unknown { why: text } => first(text),
            Occupancy::Free => record.test_records.first().map_or(0, |known| u8::from(known.misses() > 0)),
        };
        let machine = node.hardware.as_ref().and_then(|hardware| hardware.board_serial.as_deref()).map_or(0, first);
        let before = record.hardware.as_ref().map_or(0, |id| first(id.as_str()));
        read ^ used_by ^ machine ^ before ^ first(node.name.as_str()) ^ first(node.pool.as_str())
    });
    std::hint::black_box(read);
}

fn tests_with(tests: &[TestPolicy], has: impl Fn(&TestPolicy) -> bool) -> TestSet {
    tests.iter().enumerate().filter(|(_, test)| has(test)).map(|(index, _)| index).collect()
}

/// Returns whether a test applies to the single nodes of a pool. A test over several nodes is not about a single node.
pub(super) fn applies_in(test: &TestPolicy, pool: &PoolName) -> bool {
    !test.multi_node && test.pools.as_ref().is_none_or(|pools| pools.contains(pool))
}

/// Returns whether this node may need a remedy, a state change or the end of one.
fn needs_attention(record: &NodeRecord) -> bool {
    record.state != NodeState::InService
        || !record.findings.is_empty()
        || !record.node.marks.ours.is_empty()
        || record.hold.is_some()
        || record.case.is_some()
        || record.is_new_machine()
}

/// Returns whether users cannot have the node, for whatever reason: this is what the breaker counts.
pub(super) fn is_out(record: &NodeRecord) -> bool {
    record.state.is_out_of_service()
        || record.node.marks.keeps_out_of_service()
        || record.node.marks.blocking_foreign_mark().is_some()
}
