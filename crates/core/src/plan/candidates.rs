//! Chooses which due nodes get a run now: suspects first, then nodes on which user work failed, then the stalest, as
//! long as slots, mounts and budget are available. Slots that are left renew results before they become stale.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap},
    ops::Bound,
};

use super::{
    builder::{PlanBuilder, coarse, format_age, purpose_with_reason, tests_in},
    capacity::Capacity,
    priority::{Group, Rank},
    test_set::TestSet,
};
use crate::{
    job_failures::{NodeJobFailures, Weight},
    run::{NonEmpty, Purpose},
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
        let open = index.groups.iter().filter(|(group, _)| capacity.startable_tests(snapshot, group).is_ok());
        heads.extend(open.filter_map(|(group, ranks)| Some(Reverse((first(builder, ranks, None)?, group)))));
    }
    while let Some(Reverse((rank, group))) = heads.pop() {
        let Ok(tests) = capacity.startable_tests(snapshot, group) else { continue };
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
    let tests = tests_in(builder.snapshot, tests);
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
