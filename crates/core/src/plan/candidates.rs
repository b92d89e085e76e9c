//! Chooses which due nodes get a run now: suspects first, then nodes on which user work failed, then nodes with short
//! tests, then the stalest, as long as slots, mounts and budget are available. While more nodes are due than slots are
//! free, runs are short. Slots that are left renew results before they become stale.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap},
    ops::Bound,
};

use super::{
    builder::{PlanBuilder, coarse, format_age, purpose_with_reason},
    capacity::Capacity,
    priority::{Group, Rank, SHORT_RUN},
    test_set::{TestSet, tests_of},
};
use crate::{
    ids::TestId,
    job_failures::{NodeJobFailures, Weight},
    run::{NonEmpty, Purpose},
    snapshot::Snapshot,
    time::Span,
};

/// Chooses nodes and returns the remaining capacity, which explains why the other due nodes wait.
///
/// Capacity only shrinks while nodes are chosen. So the best node of each group enters the queue once, and a group
/// without capacity at its turn is not considered again.
pub(super) fn plan(builder: &mut PlanBuilder<'_>) -> Capacity {
    let mut capacity = Capacity::new(builder);
    let (snapshot, index) = (builder.snapshot, builder.index);
    let mut heads: BinaryHeap<Reverse<(Rank, &Group)>> = BinaryHeap::new();
    if capacity.has_slots() {
        let open = index.groups.iter().filter(|(group, _)| capacity.obstacle(snapshot, group).is_none());
        heads.extend(open.filter_map(|(group, ranks)| Some(Reverse((first(builder, ranks, None)?, group)))));
    }
    let is_contended = due_nodes(builder) > builder.free_slots();
    while let Some(Reverse((rank, group))) = heads.pop() {
        if capacity.obstacle(snapshot, group).is_some() {
            continue;
        }
        let runnable = index.runnable_tests(snapshot, rank.node);
        let renewed = if is_contended && !group.is_early { &TestSet::default() } else { &runnable.early };
        let mut tests = capacity.startable(&runnable.tests.union(renewed));
        if is_contended && rank.is_healthy {
            tests = shortest_tests(snapshot, tests);
        }
        choose(builder, rank, &tests);
        capacity = Capacity::new(builder);
        if !capacity.has_slots() {
            break;
        }
        let next = index.groups.get(group).and_then(|ranks| first(builder, ranks, Some(rank)));
        heads.extend(next.map(|next| Reverse((next, group))));
    }
    capacity
}

/// Returns the shortest of these tests that fit into a short run together; all of them if none does. Nodes are often free
/// for a few minutes only: while one of them gets a test of ten minutes, a slot serves several others with short tests.
/// The rest of the tests comes with a later run.
fn shortest_tests(snapshot: &Snapshot, tests: TestSet) -> TestSet {
    let chosen = snapshot.tests.iter().enumerate().filter(|(index, _)| tests.contains(*index));
    let mut by_duration: Vec<(Span, usize)> = chosen.map(|(index, test)| (test.typical_duration, index)).collect();
    by_duration.sort_unstable();
    let mut total = Span::ZERO;
    let fitting = by_duration.iter().take_while(|(duration, _)| {
        total = total + *duration;
        total <= SHORT_RUN
    });
    let fitting: TestSet = fitting.map(|(_, index)| *index).collect();
    if fitting.is_empty() { tests } else { fitting }
}

/// Returns how many nodes have due tests and could be chosen. While they are more than the free slots, a run has only
/// due tests: one that also renews other results would keep its slot from them for longer.
fn due_nodes(builder: &PlanBuilder<'_>) -> usize {
    let due = builder.index.groups.iter().filter(|(group, _)| !group.is_early);
    due.map(|(_, ranks)| ranks.len()).sum()
}

/// Returns the first node of a group after `last` that may be chosen. It skips only nodes that a run occupies or that
/// this plan has already handled.
fn first(builder: &PlanBuilder<'_>, ranks: &BTreeSet<Rank>, last: Option<Rank>) -> Option<Rank> {
    let after = last.map_or(Bound::Unbounded, Bound::Excluded);
    ranks.range((after, Bound::Unbounded)).find(|rank| is_choosable(builder, rank.node)).copied()
}

fn is_choosable(builder: &PlanBuilder<'_>, node: u32) -> bool {
    !builder.active.contains(&node) && !builder.finished.contains(&node)
}

fn choose(builder: &mut PlanBuilder<'_>, rank: Rank, tests: &TestSet) {
    let record = &builder.snapshot.nodes[rank.node as usize];
    let tests: Vec<TestId> = tests_of(builder.snapshot, tests).map(|test| test.id.clone()).collect();
    let confirming = record.findings.iter().any(|open| !open.is_confirmed() && tests.contains(&open.finding.check));
    let Some(tests) = NonEmpty::new(tests) else { return };
    let missed = record.test_records.iter().any(|known| known.misses() > 0 && known.age_key() == rank.age);
    let age = if missed {
        format!("tried {} ago without a result", coarse(builder.snapshot.at.since(rank.age)))
    } else {
        format_age(builder.snapshot.at, rank.age)
    };
    let purpose = if confirming {
        purpose_with_reason(Purpose::Confirmation, "unconfirmed", "a failed test is repeated to confirm it".into())
    } else if !rank.is_healthy {
        purpose_with_reason(Purpose::Validation, "suspect", format!("suspect; {age}"))
    } else if rank.is_early {
        let text = format!("{age}; renewed while the node is free");
        purpose_with_reason(Purpose::Validation, "renewal", text)
    } else if let Some(failed) = record.job_failures.as_ref().filter(|failed| failed.weight > Weight::NONE) {
        purpose_with_reason(
            Purpose::Validation,
            "user-work-failed",
            format!("{}; {age}", describe_job_failures(failed)),
        )
    } else {
        purpose_with_reason(Purpose::Validation, "stale", age)
    };
    builder.submit(rank.node, tests, purpose, None);
}

fn describe_job_failures(failed: &NodeJobFailures) -> String {
    let works = if failed.count == 1 { "user work" } else { "pieces of user work" };
    let count = if failed.count == 1 { String::new() } else { format!("{} ", failed.count) };
    let owners = if failed.owners == 1 { String::new() } else { format!(" of {} owners", failed.owners) };
    format!("{count}{works}{owners} failed here recently")
}
