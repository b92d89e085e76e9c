//! The capacity left for validation at one point of a plan: slots, pools, tests, mounts, budget.
//!
//! All due nodes of one pool with the same tests due get the same answer. So a thousand waiting nodes cost nothing
//! until their reason is queried, and two plans that leave the same capacity leave the same reasons.

use super::{PassedOver, draft::Draft, index::Group, test_set::TestSet};
use crate::{policy::WindowKind, snapshot::Snapshot, time::Span};

#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Rooms {
    /// By pool: what keeps the whole pool from starting anything.
    closed: Vec<Option<PassedOver>>,
    /// Tests of which one more run may start.
    tests: TestSet,
    slots: bool,
    /// Spent part of today's budget; zero if there is no budget.
    spent: Span,
}

impl Rooms {
    pub(super) fn new(draft: &Draft<'_>) -> Self {
        let snapshot = draft.snapshot;
        let pools = 0..u16::try_from(draft.index.pools.len()).unwrap_or(u16::MAX);
        let closed = pools.map(|pool| closed_pool(draft, pool).or_else(|| full_pool(draft, pool))).collect();
        let tests = (0..snapshot.tests.len()).filter(|place| draft.usage.has_room(snapshot, *place)).collect();
        let limited = snapshot.policy.limits.node_hours_per_day.is_some();
        let spent = if limited { draft.usage.spent } else { Span::ZERO };
        Self { closed, tests, slots: draft.usage.jobs < snapshot.policy.limits.jobs, spent }
    }

    pub(super) const fn has_slots(&self) -> bool {
        self.slots
    }

    /// Returns the tests of this group that could start now, or what prevents them.
    pub(super) fn ask(&self, snapshot: &Snapshot, group: &Group) -> Result<TestSet, PassedOver> {
        if let Some(Some(why)) = self.closed.get(group.pool as usize) {
            return Err(why.clone());
        }
        let tests = group.due.and(&self.tests);
        if tests.is_empty()
            && let Some(blocked) = group.due.first().and_then(|place| snapshot.tests.get(place))
        {
            return Err(PassedOver::ShareBusy { test: blocked.id.clone() });
        }
        // Checked before the slots: a node that did not fit into the budget was skipped while slots were free.
        if !self.affords(snapshot, &tests) {
            return Err(PassedOver::BudgetSpent);
        }
        if self.slots { Ok(tests) } else { Err(PassedOver::WaitingForSlot) }
    }

    /// Returns why a node of this group was not chosen.
    pub(super) fn why_not(&self, snapshot: &Snapshot, group: &Group) -> PassedOver {
        // There is capacity left and the node was still not chosen, so it comes after nodes that are in use.
        self.ask(snapshot, group).err().unwrap_or(PassedOver::WaitingForSlot)
    }

    /// Returns whether these tests still fit into today's budget.
    fn affords(&self, snapshot: &Snapshot, tests: &TestSet) -> bool {
        snapshot.policy.limits.node_hours_per_day.is_none_or(|hours| {
            let due = snapshot.tests.iter().enumerate().filter(|(place, _)| tests.contains(*place));
            let usual: Span = due.map(|(_, test)| test.usual).sum();
            (self.spent + usual).as_hours() <= hours
        })
    }
}

/// Returns what keeps a whole pool from being validated now.
pub(super) fn closed_pool(draft: &Draft<'_>, pool: u16) -> Option<PassedOver> {
    let snapshot = draft.snapshot;
    let name = &draft.index.pools[pool as usize];
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

fn full_pool(draft: &Draft<'_>, pool: u16) -> Option<PassedOver> {
    let name = &draft.index.pools[pool as usize];
    draft.usage.is_pool_full(draft.snapshot, name, pool).then(|| PassedOver::PoolFull { pool: name.clone() })
}
