//! The limits of the circuit breaker, and how many nodes of a pool may be out of service under them.

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BreakerLimits {
    /// The largest share of a pool's nodes that may be out; one node always may.
    pub percent_of_pool: f64,
    /// Nodes that the controller may take out within an hour, in the whole cluster.
    pub nodes_per_hour: u32,
}

impl BreakerLimits {
    /// Returns how many of `total` nodes may be out. At least one, or a pool of five could never lose a node.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a u32 fits in a u32")]
    pub fn max_out(&self, total: u32) -> u32 {
        ((f64::from(total) * self.percent_of_pool / 100.0).floor().max(0.0) as u32).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_node_of_a_small_pool_may_be_out_and_a_tenth_of_a_large_one() {
        let limits = |percent_of_pool| BreakerLimits { percent_of_pool, nodes_per_hour: 3 };
        for (total, most) in [(1, 1), (5, 1), (10, 1), (19, 1), (20, 2), (1000, 100)] {
            assert_eq!(limits(10.0).max_out(total), most, "{total}");
        }
        assert_eq!(limits(0.0).max_out(100), 1);
    }
}
