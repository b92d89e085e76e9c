//! Measured counts and sizes of a node (GPUs, disks, ports), and which of them is accepted as the node's normal state.
//!
//! Where no profile has a number and the cluster declares none, a count is compared with that of the node's peers and
//! with the node's own past. Hardware that disappears must stay visible until it is back or an operator agrees, so a
//! lower value replaces the accepted one only after `repair.watch`, or when an operator releases the node. A higher
//! value is accepted at once.
//!
//! Zero is not accepted on its own: it is also what a dead driver, a failed bus and a missing library look like. A node
//! is thus remembered to have had GPUs until a profile says that it has none.

use crate::time::{Span, Timestamp};

/// The metric that counts GPUs.
pub const GPU_COUNT: &str = "gpu_count";

/// One count or size of one node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredCount {
    /// The newest value.
    pub value: f64,
    /// Since when it has had this value.
    pub since: Timestamp,
    /// The value with which new ones are compared.
    pub accepted: f64,
    pub accepted_at: Timestamp,
}

impl MeasuredCount {
    /// Returns the first value of a node. `None` for zero and for what is not a number.
    pub fn first(value: f64, at: Timestamp) -> Option<Self> {
        (value.is_finite() && value > 0.0).then_some(Self { value, since: at, accepted: value, accepted_at: at })
    }

    /// Adds a value. `watch` is how long a lower value has to last before it is accepted.
    #[must_use]
    pub fn with(self, value: f64, at: Timestamp, watch: Span) -> Self {
        if !value.is_finite() || value < 0.0 {
            return self;
        }
        let settled = self.settled(at, watch);
        let (value, since) = if is_same(value, settled.value) { (settled.value, settled.since) } else { (value, at) };
        let (accepted, accepted_at) = if value > settled.accepted && !is_same(value, settled.accepted) {
            (value, at)
        } else {
            (settled.accepted, settled.accepted_at)
        };
        Self { value, since, accepted, accepted_at }
    }

    /// Accepts a lower value that has lasted for `watch`.
    #[must_use]
    pub fn settled(self, now: Timestamp, watch: Span) -> Self {
        let lasted = now.since(self.since) >= watch && now >= self.since;
        if self.value > 0.0 && self.value < self.accepted && lasted {
            return Self { accepted: self.value, accepted_at: self.since.plus(watch), ..self };
        }
        self
    }

    /// Accepts the newest value because an operator has released the node. Missing GPUs are not accepted: only a
    /// profile can say that a machine has none.
    #[must_use]
    pub fn released(self, metric: &str, at: Timestamp) -> Self {
        if is_same(self.value, self.accepted) || (metric == GPU_COUNT && self.value <= 0.0) {
            return self;
        }
        Self { accepted: self.value, accepted_at: at, ..self }
    }
}

/// As in comparisons with a profile: two results of one computation may differ in their last digits.
fn is_same(value: f64, other: f64) -> bool {
    (value - other).abs() <= other.abs() * 1e-9
}

/// Nodes that must agree on a value.
const PEERS: u32 = 5;
/// Their share of the nodes whose value is known, in percent.
const PEERS_PERCENT: u64 = 80;

/// The accepted values of one metric on all nodes of one machine type.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PeerCounts(Vec<(f64, u32)>);

impl PeerCounts {
    /// Adds the value of one node. Zero is no agreement: see the module's page.
    pub fn add(&mut self, value: f64) {
        if value <= 0.0 || !value.is_finite() {
            return;
        }
        match self.0.iter_mut().find(|(known, _)| is_same(*known, value)) {
            Some((_, nodes)) => *nodes += 1,
            None => self.0.push((value, 1)),
        }
    }

    /// Returns the value on which at least five nodes agree, and four in five of all, without the node that has `own`
    /// as its value in this list.
    pub fn agreed(&self, own: Option<f64>) -> Option<f64> {
        let others = |(value, nodes): &(f64, u32)| {
            let is_own = own.is_some_and(|own| is_same(*value, own));
            (*value, nodes.saturating_sub(u32::from(is_own)))
        };
        let (value, nodes) = self.0.iter().map(others).max_by_key(|(_, nodes)| *nodes)?;
        let all: u64 = self.0.iter().map(|one| u64::from(others(one).1)).sum();
        (nodes >= PEERS && u64::from(nodes) * 100 >= all * PEERS_PERCENT).then_some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WATCH: Span = Span::days(7);

    fn at(hours: i64) -> Timestamp {
        Timestamp::from_secs(1_794_700_800).plus(Span::hours(hours))
    }

    /// Returns the count after these values, each with its hour.
    fn after(values: &[(f64, i64)]) -> Option<MeasuredCount> {
        values.iter().fold(None, |known: Option<MeasuredCount>, (value, hours)| match known {
            Some(known) => Some(known.with(*value, at(*hours), WATCH)),
            None => MeasuredCount::first(*value, at(*hours)),
        })
    }

    #[test]
    fn a_higher_value_is_accepted_at_once_and_a_lower_one_after_seven_days() {
        const WEEK: i64 = 7 * 24;
        for (values, value, since, accepted, accepted_at) in [
            (vec![(8.0, 0)], 8.0, 0, 8.0, 0),
            (vec![(8.0, 0), (8.0, 5)], 8.0, 0, 8.0, 0),
            (vec![(8.0, 0), (7.0, 5)], 7.0, 5, 8.0, 0),
            (vec![(8.0, 0), (9.0, 5)], 9.0, 5, 9.0, 5),
            (vec![(8.0, 0), (7.0, 5), (8.0, 6)], 8.0, 6, 8.0, 0),
            // Stable for seven days, and for less.
            (vec![(8.0, 0), (7.0, 5), (7.0, 5 + WEEK - 1)], 7.0, 5, 8.0, 0),
            (vec![(8.0, 0), (7.0, 5), (7.0, 5 + WEEK)], 7.0, 5, 7.0, 5 + WEEK),
            // Each change starts anew: 7, then 6, then 7 again.
            (vec![(8.0, 0), (7.0, 5), (6.0, 100), (7.0, 101), (7.0, 5 + WEEK)], 7.0, 101, 8.0, 0),
            // It was accepted before the next loss.
            (vec![(8.0, 0), (7.0, 5), (6.0, 6 + WEEK)], 6.0, 6 + WEEK, 7.0, 5 + WEEK),
            // Zero is never accepted, however long it lasts; the first value is the first that is not zero.
            (vec![(8.0, 0), (0.0, 5), (0.0, 5 + 9 * WEEK)], 0.0, 5, 8.0, 0),
            (vec![(0.0, 0), (4.0, 5)], 4.0, 5, 4.0, 5),
            // What is not a number is ignored.
            (vec![(8.0, 0), (f64::NAN, 5), (-1.0, 6)], 8.0, 0, 8.0, 0),
            // Sizes.
            (vec![(85_899_345_920.0, 0), (85_899_345_921.0, 5)], 85_899_345_920.0, 0, 85_899_345_920.0, 0),
        ] {
            let count = after(&values).unwrap();
            assert_eq!((count.value, count.since), (value, at(since)), "{values:?}");
            assert_eq!((count.accepted, count.accepted_at), (accepted, at(accepted_at)), "{values:?}");
        }
        for nothing in [vec![], vec![(0.0, 0)], vec![(0.0, 0), (0.0, 10_000)], vec![(f64::INFINITY, 0)]] {
            assert_eq!(after(&nothing), None, "{nothing:?}");
        }
        // The controller's clock went back.
        let count = after(&[(8.0, 10), (7.0, 20)]).unwrap();
        assert_eq!(count.settled(at(-5_000), WATCH).accepted, 8.0);
    }

    #[test]
    fn an_operator_accepts_the_present_state_but_not_that_all_gpus_are_gone() {
        for (metric, values, accepted) in [
            ("gpu_count", vec![(8.0, 0), (7.0, 5)], 7.0),
            ("gpu_count", vec![(8.0, 0)], 8.0),
            ("gpu_count", vec![(8.0, 0), (0.0, 5)], 8.0),
            ("nvme_disks", vec![(8.0, 0), (6.0, 5)], 6.0),
            ("nvme_disks", vec![(8.0, 0), (0.0, 5)], 0.0),
        ] {
            let released = after(&values).unwrap().released(metric, at(9));
            assert_eq!(released.accepted, accepted, "{metric} {values:?}");
            let changed = after(&values).unwrap().accepted != accepted;
            assert_eq!(released.accepted_at, if changed { at(9) } else { at(0) }, "{metric} {values:?}");
        }
        // After that, the lower value is normal and a higher one still counts.
        let released = after(&[(8.0, 0), (6.0, 5)]).unwrap().released("nvme_disks", at(9));
        assert_eq!(released.with(6.0, at(10), WATCH).accepted, 6.0);
        assert_eq!(released.with(8.0, at(10), WATCH).accepted, 8.0);
    }

    #[test]
    fn peers_agree_if_five_others_and_four_in_five_have_the_value() {
        let agreed = |values: &[(f64, u32)], own: Option<f64>| {
            let mut peers = PeerCounts::default();
            for (value, nodes) in values {
                (0..*nodes).for_each(|_| peers.add(*value));
            }
            peers.agreed(own)
        };
        for (values, own, expected) in [
            (vec![], None, None),
            (vec![(8.0, 4)], None, None),
            (vec![(8.0, 5)], None, Some(8.0)),
            // The node itself is not its own peer.
            (vec![(8.0, 5)], Some(8.0), None),
            (vec![(8.0, 6)], Some(8.0), Some(8.0)),
            (vec![(8.0, 5), (7.0, 1)], Some(7.0), Some(8.0)),
            // A clear majority: 8 of 10 are enough, 7 of 10 are not.
            (vec![(8.0, 8), (4.0, 2)], None, Some(8.0)),
            (vec![(8.0, 7), (4.0, 3)], None, None),
            (vec![(8.0, 8), (4.0, 3)], Some(4.0), Some(8.0)),
            (vec![(8.0, 8), (4.0, 3)], Some(8.0), None),
            // Nodes without any are unknown, not votes.
            (vec![(8.0, 5), (0.0, 90)], None, Some(8.0)),
            (vec![(0.0, 90)], None, None),
            // A value that is not in the list leaves it unchanged.
            (vec![(8.0, 5)], Some(3.0), Some(8.0)),
        ] {
            assert_eq!(agreed(&values, own), expected, "{values:?} without {own:?}");
        }
    }
}
