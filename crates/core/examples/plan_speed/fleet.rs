//! A synthetic fleet for measuring planning: deterministic, and like a busy cluster in what costs time (four in five
//! nodes busy, half of the free ones due, a few suspect).

use std::sync::Arc;

use doctor_core::{
    finding::Verdict,
    ids::{NodeName, PoolName, TestId},
    lifecycle::NodeState,
    node::{Hardware, Marks, Node, Occupancy},
    policy::{Policy, TestPolicy},
    snapshot::{Breaker, Capabilities, NodeRecord, RecentActions, Snapshot, TestRecord},
    time::{Span, Timestamp},
};

/// The time of the snapshot.
pub(crate) const AT: Timestamp = Timestamp::from_secs(1_794_729_600);

const POOLS: usize = 4;

/// A snapshot of `nodes` nodes with `tests` tests each.
pub(crate) fn snapshot(nodes: usize, tests: usize) -> Snapshot {
    let policies: Arc<[TestPolicy]> = (0..tests).map(test).collect();
    let mut dice = Dice(nodes as u64);
    let records = (0..nodes).map(|n| record(n, nodes, tests, &mut dice)).collect();
    Snapshot {
        at: AT,
        nodes: records,
        runs: Vec::new(),
        cases: Vec::new(),
        recent: RecentActions::default(),
        spent: Span::ZERO,
        breaker: Breaker::Closed { since: None },
        pauses: Vec::new(),
        commands: Vec::new(),
        trials: Vec::new(),
        silence_reported: false,
        capabilities: Capabilities::ALL,
        policy: Arc::new(Policy::built_in()),
        tests: policies,
    }
}

fn test(n: usize) -> TestPolicy {
    TestPolicy {
        id: TestId::new(&format!("test-{n}")).expect("letters and digits"),
        cutoff: Span::days(7),
        limit: Span::minutes(20),
        typical_duration: Span::minutes(10),
        exclusive: true,
        routine: true,
        maintenance: false,
        multi_node: false,
        max_concurrent: None,
        shares: if n == 0 { vec!["/data".to_owned()] } else { Vec::new() },
        pools: None,
    }
}

/// Every name is its own allocation, as in a backend's response: reading them is what takes time.
fn record(n: usize, of: usize, tests: usize, dice: &mut Dice) -> NodeRecord {
    let hardware = Hardware { board_serial: Some(format!("J{n:06}")), ..Hardware::default() };
    let free = dice.below(5) == 0;
    let overdue = dice.below(2) == 0;
    let records = (0..tests).map(|_| {
        // An overdue node is overdue in some of its tests, which differ from node to node.
        let age = if overdue && dice.below(4) == 0 { 7 * 24 + dice.below(72) } else { dice.below(6 * 24) };
        let mut known = TestRecord::NEVER;
        known.add(Verdict::Pass, AT.minus(Span::hours(i64::try_from(age).unwrap_or(0))));
        known
    });
    NodeRecord {
        test_records: records.collect(),
        state: if dice.below(500) == 0 { NodeState::Suspect } else { NodeState::InService },
        since: AT.minus(Span::days(30)),
        findings: Vec::new(),
        backoff: None,
        hold: None,
        hardware: hardware.id(),
        case: None,
        last_report: Some(AT.minus(Span::minutes(1))),
        job_failures: None,
        node: Node {
            name: NodeName::new(&format!("node-{n:06}")).expect("letters and digits"),
            pool: PoolName::new(&format!("pool-{}", n * POOLS / of.max(1))).expect("letters and digits"),
            occupancy: if free { Occupancy::Free } else { Occupancy::Busy { by: format!("user job {n}").into() } },
            marks: Marks::default(),
            hardware: Some(hardware.into()),
            sku: None,
            overrides: None,
        },
    }
}

/// A deterministic pseudo-random number generator.
#[derive(Debug)]
struct Dice(u64);

impl Dice {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % most
    }
}
