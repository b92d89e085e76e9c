//! The circuit breaker: enforces how many nodes may be taken out ([`BreakerLimits`]) before an operator must intervene.

use crate::{
    policy::BreakerLimits,
    snapshot::{Breaker, Snapshot},
    time::{Span, Timestamp},
};

use super::priority::PoolCount;

/// The breaker during one plan: the nodes already out, and those that this plan adds.
#[derive(Debug)]
pub(super) struct BreakerGuard {
    state: BreakerGuardState,
    limits: BreakerLimits,
    /// Nodes taken out after this moment count against the hourly limit.
    since: Timestamp,
    taken_out_last_hour: u32,
    added: Vec<u32>,
}

#[derive(Debug, PartialEq, Eq)]
enum BreakerGuardState {
    Closed,
    /// It opened in an earlier cycle and was reported then.
    AlreadyOpen,
    OpensNow(String),
}

impl BreakerGuard {
    pub(super) fn new(snapshot: &Snapshot, pools: usize) -> Self {
        let hour_ago = snapshot.at.minus(Span::hours(1));
        let (state, since) = match &snapshot.breaker {
            Breaker::Open { .. } => (BreakerGuardState::AlreadyOpen, hour_ago),
            Breaker::Closed { since } => {
                (BreakerGuardState::Closed, since.map_or(hour_ago, |since| since.max(hour_ago)))
            }
        };
        let mut lately: Vec<_> =
            snapshot.recent.taken_out.iter().filter(|(_, at)| *at > since).map(|(node, _)| node).collect();
        lately.sort();
        lately.dedup();
        Self {
            state,
            limits: snapshot.policy.breaker.clone(),
            since,
            taken_out_last_hour: u32::try_from(lately.len()).unwrap_or(u32::MAX),
            added: vec![0; pools],
        }
    }

    /// Returns the moment after which nodes taken out count against the hourly limit.
    pub(super) const fn since(&self) -> Timestamp {
        self.since
    }

    /// Counts nodes against the hourly limit that are out already and were not taken out by the controller.
    pub(super) fn count_in_hour(&mut self, nodes: usize) {
        self.taken_out_last_hour = self.taken_out_last_hour.saturating_add(u32::try_from(nodes).unwrap_or(u32::MAX));
    }

    /// Counts one more node of this pool as out, whether that is allowed or not.
    pub(super) fn count_taken_out(&mut self, pool: u16) {
        self.added[pool as usize] += 1;
    }

    /// Takes one more node of this pool out and returns whether that is allowed. A refusal opens the breaker.
    pub(super) fn try_take_out(&mut self, pool: u16, name: &str, count: &PoolCount) -> bool {
        if self.state != BreakerGuardState::Closed {
            return false;
        }
        if let Some(why) = self.limit_reached(pool, name, count) {
            self.state = BreakerGuardState::OpensNow(why);
            return false;
        }
        self.added[pool as usize] += 1;
        true
    }

    /// Returns whether [`Self::try_take_out`] would allow one more node, without taking it.
    pub(super) fn has_room(&self, pool: u16, name: &str, count: &PoolCount) -> bool {
        self.state == BreakerGuardState::Closed && self.limit_reached(pool, name, count).is_none()
    }

    /// As [`Self::try_take_out`], but a refusal opens nothing: other pools may still lose nodes.
    pub(super) fn take_if_room(&mut self, pool: u16, name: &str, count: &PoolCount) -> bool {
        let room = self.has_room(pool, name, count);
        self.added[pool as usize] += u32::from(room);
        room
    }

    fn limit_reached(&self, pool: u16, name: &str, count: &PoolCount) -> Option<String> {
        let added_here = self.added[pool as usize];
        let lately = self.taken_out_last_hour.saturating_add(self.added.iter().sum::<u32>());
        if lately >= self.limits.nodes_per_hour {
            let most = self.limits.nodes_per_hour;
            return Some(format!("hourly limit reached: {lately} nodes taken out, {most} allowed"));
        }
        let (out, most) = (count.out + added_here, self.limits.max_out(count.total));
        let over = || {
            let (total, percent) = (count.total, self.limits.percent_of_pool);
            format!("{out} of {total} nodes of pool {name} are out already and {most} is the limit ({percent} %)")
        };
        (out >= most).then(over)
    }

    /// Returns why the breaker opened in this plan, if it did.
    pub(super) fn opens_now(&self) -> Option<&str> {
        match &self.state {
            BreakerGuardState::OpensNow(why) => Some(why),
            BreakerGuardState::Closed | BreakerGuardState::AlreadyOpen => None,
        }
    }
}
