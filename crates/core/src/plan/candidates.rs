//! Which of the due nodes get a run now: suspects, then the stalest, while slots, mounts and budget last.

use std::collections::BTreeMap;

use super::{
    PassedOver,
    draft::{Draft, ago, because, coarse, named},
    index::{Group, Rank, TestMask},
};
use crate::{
    policy::WindowKind,
    run::{NonEmpty, Purpose},
    time::Span,
};

/// Why the nodes of a group that were not chosen were not.
pub(super) type Fates = BTreeMap<Group, PassedOver>;

/// Chooses, and says of each group what kept the rest of it waiting.
pub(super) fn plan(draft: &mut Draft<'_>) -> Fates {
    let mut fates = Fates::new();
    let closed: Vec<Option<PassedOver>> = (0..draft.index.pools.len()).map(|pool| closed_pool(draft, pool)).collect();
    loop {
        let mut best: Option<(Rank, Group, TestMask)> = None;
        for (group, ranks) in &draft.index.groups {
            if fates.contains_key(group) {
                continue;
            }
            match room(draft, *group, &closed) {
                Err(why) => {
                    fates.insert(*group, why);
                }
                Ok(mask) => {
                    // Only nodes that are in use by us or were just named stand before the first free one.
                    let head = ranks.iter().find(|rank| is_choosable(draft, rank.node));
                    if let Some(rank) = head
                        && best.is_none_or(|(other, _, _)| *rank < other)
                    {
                        best = Some((*rank, *group, mask));
                    }
                }
            }
        }
        let Some((rank, _, mask)) = best else { break };
        choose(draft, rank, mask);
    }
    // What is left without a fate had no choosable node; the few in it are in use or spoken for.
    for group in draft.index.groups.keys() {
        fates.entry(*group).or_insert(PassedOver::WaitingForSlot);
    }
    fates
}

fn is_choosable(draft: &Draft<'_>, node: u32) -> bool {
    !draft.active.contains(&node) && !draft.left_alone.contains(&node)
}

fn choose(draft: &mut Draft<'_>, rank: Rank, mask: TestMask) {
    let record = &draft.snapshot.nodes[rank.node as usize];
    let tests = named(draft.snapshot, mask);
    let confirming = record.findings.iter().any(|open| !open.is_confirmed() && tests.contains(&open.finding.check));
    let Some(tests) = NonEmpty::new(tests) else { return };
    let missed = record.records.iter().any(|known| known.misses() > 0 && known.age_key() == rank.age);
    let age = if missed {
        format!("tried {} ago without a result", coarse(draft.snapshot.at.since(rank.age)))
    } else {
        ago(draft.snapshot.at, rank.age)
    };
    let asked = if confirming {
        because(Purpose::Confirmation, "unconfirmed", "a failing test is repeated before it is believed".into())
    } else if !rank.calm {
        because(Purpose::Validation, "suspect", format!("suspect; {age}"))
    } else {
        because(Purpose::Validation, "stale", age)
    };
    draft.submit(rank.node, tests, asked, None);
}

/// What keeps a whole pool from being validated now.
pub(super) fn closed_pool(draft: &Draft<'_>, pool: usize) -> Option<PassedOver> {
    let snapshot = draft.snapshot;
    let name = &draft.index.pools[pool];
    let paused = snapshot.pauses.iter().find(|pause| {
        pause.until.is_none_or(|until| until > snapshot.at) && pause.pool.as_ref().is_none_or(|paused| paused == name)
    });
    if let Some(pause) = paused {
        return Some(PassedOver::Paused { by: pause.by.clone() });
    }
    let quiet = snapshot
        .policy
        .windows
        .iter()
        .any(|window| window.kind == WindowKind::Quiet && window.applies_to(name) && window.contains(snapshot.at));
    quiet.then_some(PassedOver::QuietWindow)
}

/// The tests of this group that could start now, or what is in the way.
fn room(draft: &Draft<'_>, group: Group, closed: &[Option<PassedOver>]) -> Result<TestMask, PassedOver> {
    let snapshot = draft.snapshot;
    let pool = group.pool as usize;
    if let Some(why) = &closed[pool] {
        return Err(why.clone());
    }
    let name = &draft.index.pools[pool];
    if draft.usage.is_pool_full(snapshot, name, group.pool) {
        return Err(PassedOver::PoolFull { pool: name.clone() });
    }
    let mut mask = 0;
    let mut usual = Span::ZERO;
    let mut blocked = None;
    for (place, test) in snapshot.tests.iter().enumerate().filter(|(place, _)| group.due & (1 << place) != 0) {
        if draft.usage.has_room(snapshot, place) {
            mask |= 1 << place;
            usual = usual + test.usual;
        } else {
            blocked.get_or_insert_with(|| test.id.clone());
        }
    }
    match blocked {
        Some(test) if mask == 0 => return Err(PassedOver::ShareBusy { test }),
        _ => {}
    }
    if draft.usage.jobs >= snapshot.policy.limits.jobs {
        return Err(PassedOver::WaitingForSlot);
    }
    if draft.usage.affords(snapshot, usual) { Ok(mask) } else { Err(PassedOver::BudgetSpent) }
}
