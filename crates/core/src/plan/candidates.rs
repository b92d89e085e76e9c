//! Chooses which due nodes get a run now: suspects first, then nodes on which user work failed, then the stalest, as
//! long as slots, mounts and budget are available.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap},
    ops::Bound,
};

use super::{
    draft::{Draft, ago, because, coarse, named},
    index::{Group, Rank},
    rooms::Rooms,
    test_set::TestSet,
};
use crate::{
    failed_work::{FailedHere, Weight},
    run::{NonEmpty, Purpose},
};

/// Chooses nodes and returns the remaining capacity, which explains why the other due nodes wait.
///
/// Capacity only shrinks while nodes are chosen. So the best node of each group enters the queue once, and a group
/// without capacity at its turn is not considered again.
pub(super) fn plan(draft: &mut Draft<'_>) -> Rooms {
    let mut rooms = Rooms::new(draft);
    let (snapshot, index) = (draft.snapshot, draft.index);
    let mut heads: BinaryHeap<Reverse<(Rank, &Group)>> = BinaryHeap::new();
    if rooms.has_slots() {
        let open = index.groups.iter().filter(|(group, _)| rooms.ask(snapshot, group).is_ok());
        heads.extend(open.filter_map(|(group, ranks)| Some(Reverse((first(draft, ranks, None)?, group)))));
    }
    while let Some(Reverse((rank, group))) = heads.pop() {
        let Ok(tests) = rooms.ask(snapshot, group) else { continue };
        choose(draft, rank, &tests);
        rooms = Rooms::new(draft);
        if !rooms.has_slots() {
            break;
        }
        let next = index.groups.get(group).and_then(|ranks| first(draft, ranks, Some(rank)));
        heads.extend(next.map(|next| Reverse((next, group))));
    }
    rooms
}

/// Returns the first node of a group after `last` that may be chosen. It skips only nodes that a run occupies or that
/// this plan has already handled.
fn first(draft: &Draft<'_>, ranks: &BTreeSet<Rank>, last: Option<Rank>) -> Option<Rank> {
    let after = last.map_or(Bound::Unbounded, Bound::Excluded);
    ranks.range((after, Bound::Unbounded)).find(|rank| is_choosable(draft, rank.node)).copied()
}

fn is_choosable(draft: &Draft<'_>, node: u32) -> bool {
    !draft.active.contains(&node) && !draft.left_alone.contains(&node)
}

fn choose(draft: &mut Draft<'_>, rank: Rank, tests: &TestSet) {
    let record = &draft.snapshot.nodes[rank.node as usize];
    let tests = named(draft.snapshot, tests);
    let confirming = record.findings.iter().any(|open| !open.is_confirmed() && tests.contains(&open.finding.check));
    let Some(tests) = NonEmpty::new(tests) else { return };
    let missed = record.records.iter().any(|known| known.misses() > 0 && known.age_key() == rank.age);
    let age = if missed {
        format!("tried {} ago without a result", coarse(draft.snapshot.at.since(rank.age)))
    } else {
        ago(draft.snapshot.at, rank.age)
    };
    let asked = if confirming {
        because(Purpose::Confirmation, "unconfirmed", "a failed test is repeated to confirm it".into())
    } else if !rank.calm {
        because(Purpose::Validation, "suspect", format!("suspect; {age}"))
    } else if let Some(failed) = record.failed.as_ref().filter(|failed| failed.weight > Weight::NONE) {
        because(Purpose::Validation, "user-work-failed", format!("{}; {age}", lately(failed)))
    } else {
        because(Purpose::Validation, "stale", age)
    };
    draft.submit(rank.node, tests, asked, None);
}

fn lately(failed: &FailedHere) -> String {
    let works = if failed.count == 1 { "user work" } else { "pieces of user work" };
    let count = if failed.count == 1 { String::new() } else { format!("{} ", failed.count) };
    let owners = if failed.owners == 1 { String::new() } else { format!(" of {} owners", failed.owners) };
    format!("{count}{works}{owners} failed here recently")
}
