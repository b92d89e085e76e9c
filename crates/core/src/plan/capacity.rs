//! The capacity left for validation at one point of a plan: slots, pools, tests, mounts, budget.
//!
//! All nodes of a group get the same answer. So a thousand waiting nodes cost nothing until their reason is queried, and
//! two plans that leave the same capacity leave the same reasons.

use super::{
    SkipReason,
    builder::{PlanBuilder, max_jobs},
    priority::Group,
    test_set::{TestSet, tests_of},
};
use crate::{policy::WindowKind, snapshot::Snapshot, time::Span};

#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Capacity {
    /// By pool: what keeps the whole pool from starting anything.
    blocked_pools: Vec<Option<SkipReason>>,
    /// Tests of which one more run may start.
    tests: TestSet,
    slots: bool,
    /// Spent part of today's budget; zero if there is no budget.
    spent: Span,
}

impl Capacity {
    pub(super) fn new(builder: &PlanBuilder<'_>) -> Self {
        let snapshot = builder.snapshot;
        let pools = 0..u16::try_from(builder.index.pools.len()).unwrap_or(u16::MAX);
        let closed = pools.map(|pool| pool_block(builder, pool).or_else(|| full_pool(builder, pool))).collect();
        let tests = (0..snapshot.tests.len()).filter(|index| builder.usage.has_room(snapshot, *index)).collect();
        let limited = snapshot.policy.limits.node_hours_per_day.is_some();
        let spent = if limited { builder.usage.spent } else { Span::ZERO };
        Self { blocked_pools: closed, tests, slots: builder.usage.jobs < max_jobs(snapshot), spent }
    }

    pub(super) const fn has_slots(&self) -> bool {
        self.slots
    }

    /// Returns what prevents a run on a node of this group.
    pub(super) fn obstacle(&self, snapshot: &Snapshot, group: &Group) -> Option<SkipReason> {
        if let Some(Some(why)) = self.blocked_pools.get(group.pool as usize) {
            return Some(why.clone());
        }
        let limited = group.limited.intersection(&self.tests);
        if group.unlimited.is_none()
            && limited.is_empty()
            && let Some(blocked) = group.limited.first().and_then(|index| snapshot.tests.get(index))
        {
            return Some(SkipReason::ShareBusy { test: blocked.id.clone() });
        }
        // Checked before the slots: a node that did not fit into the budget was skipped while slots were free.
        if !self.fits_budget(snapshot, group.unlimited.unwrap_or(Span::ZERO), &limited) {
            return Some(SkipReason::BudgetSpent);
        }
        (!self.slots).then_some(SkipReason::WaitingForSlot)
    }

    /// Returns those of these tests of which one more run may start.
    pub(super) fn startable(&self, tests: &TestSet) -> TestSet {
        tests.intersection(&self.tests)
    }

    /// Returns why a node of this group was not chosen.
    pub(super) fn skip_reason(&self, snapshot: &Snapshot, group: &Group) -> SkipReason {
        // There is capacity left and the node was still not chosen, so it comes after nodes that are in use.
        self.obstacle(snapshot, group).unwrap_or(SkipReason::WaitingForSlot)
    }

    /// Returns whether these tests, and others of this duration, still fit into today's budget.
    fn fits_budget(&self, snapshot: &Snapshot, others: Span, tests: &TestSet) -> bool {
        snapshot.policy.limits.node_hours_per_day.is_none_or(|hours| {
            let usual: Span = tests_of(snapshot, tests).map(|test| test.typical_duration).sum();
            (self.spent + others + usual).as_hours() <= hours
        })
    }
}

/// Returns what keeps a whole pool from being validated now.
pub(super) fn pool_block(builder: &PlanBuilder<'_>, pool: u16) -> Option<SkipReason> {
    let snapshot = builder.snapshot;
    let name = &builder.index.pools[pool as usize];
    let paused = snapshot.pauses.iter().find(|pause| {
        pause.until.is_none_or(|until| until > snapshot.at) && pause.pool.as_ref().is_none_or(|paused| paused == name)
    });
    if let Some(pause) = paused {
        return Some(SkipReason::Paused { by: pause.by.clone() });
    }
    let quiet = snapshot
        .policy
        .windows
        .iter()
        .any(|window| window.kind == WindowKind::Quiet && window.applies_to(name) && window.contains(snapshot.at));
    quiet.then_some(SkipReason::QuietWindow)
}

fn full_pool(builder: &PlanBuilder<'_>, pool: u16) -> Option<SkipReason> {
    let name = &builder.index.pools[pool as usize];
    builder.usage.is_pool_full(builder.snapshot, name, pool).then(|| SkipReason::PoolFull { pool: name.clone() })
}
