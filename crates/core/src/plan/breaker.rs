//! The circuit breaker: how many nodes may be taken out before a person must look.

use crate::{
    snapshot::{Breaker, Snapshot},
    time::Span,
};

use super::index::PoolCount;

/// The breaker during one plan: what is out already, and what this plan adds.
#[derive(Debug)]
pub(super) struct Gate {
    state: GateState,
    per_hour: u32,
    percent: f64,
    taken_lately: u32,
    added: Vec<u32>,
}

#[derive(Debug, PartialEq, Eq)]
enum GateState {
    Closed,
    /// It opened in an earlier cycle and has been spoken of.
    WasOpen,
    OpensNow(String),
}

impl Gate {
    pub(super) fn new(snapshot: &Snapshot, pools: usize) -> Self {
        let hour_ago = snapshot.at.minus(Span::hours(1));
        let (state, since) = match &snapshot.breaker {
            Breaker::Open { .. } => (GateState::WasOpen, hour_ago),
            Breaker::Closed { since } => (GateState::Closed, since.map_or(hour_ago, |since| since.max(hour_ago))),
        };
        let mut lately: Vec<_> =
            snapshot.recent.taken_out.iter().filter(|(_, at)| *at > since).map(|(node, _)| node).collect();
        lately.sort();
        lately.dedup();
        Self {
            state,
            per_hour: snapshot.policy.breaker.nodes_per_hour,
            percent: snapshot.policy.breaker.percent_of_pool,
            taken_lately: u32::try_from(lately.len()).unwrap_or(u32::MAX),
            added: vec![0; pools],
        }
    }

    /// Whether one more node of this pool may be taken out. A refusal opens the breaker.
    pub(super) fn take_out(&mut self, pool: u16, name: &str, count: &PoolCount) -> bool {
        if self.state != GateState::Closed {
            return false;
        }
        let added_here = self.added[pool as usize];
        let added: u32 = self.added.iter().sum();
        if self.taken_lately + added >= self.per_hour {
            self.state = GateState::OpensNow(format!(
                "{} nodes were taken out within the last hour and {} is the limit",
                self.taken_lately + added,
                self.per_hour
            ));
            return false;
        }
        let most = most_out(count.total, self.percent);
        if count.out + added_here >= most {
            self.state = GateState::OpensNow(format!(
                "{} of {} nodes of pool {name} are out already and {most} is the limit ({} %)",
                count.out + added_here,
                count.total,
                self.percent
            ));
            return false;
        }
        self.added[pool as usize] += 1;
        true
    }

    /// Why it opened in this plan, if it did: said once.
    pub(super) fn opens_now(&self) -> Option<&str> {
        match &self.state {
            GateState::OpensNow(why) => Some(why),
            GateState::Closed | GateState::WasOpen => None,
        }
    }
}

/// One node always may be out, or a pool of five could never lose one.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a count is a small count")]
fn most_out(total: u32, percent: f64) -> u32 {
    ((f64::from(total) * percent / 100.0).floor().max(0.0) as u32).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_node_of_a_small_pool_may_be_out_and_a_tenth_of_a_large_one() {
        for (total, most) in [(1, 1), (5, 1), (10, 1), (19, 1), (20, 2), (1000, 100)] {
            assert_eq!(most_out(total, 10.0), most, "{total}");
        }
        assert_eq!(most_out(100, 0.0), 1);
    }
}
