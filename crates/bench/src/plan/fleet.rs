//! A generated fleet in the proportions of a large site: four of five nodes are in use, and half of the rest are due.

use std::sync::Arc;

use doctor_core::{
    access::Place,
    finding::{Evidence, Finding, OpenFinding, Severity, Verdict},
    ids::{HardwareId, IdSource, JobId, NodeName, PoolName, RuleId, TestId},
    lifecycle::NodeState,
    node::{ForeignMark, Hardware, Hold, Marks, Node, Occupancy},
    observation::Entity,
    policy::{Policy, TestPolicy},
    reason::{ReasonCode, WithReason},
    run::{NonEmpty, ObservedJobState, Purpose, Run, RunState},
    snapshot::{ActiveRun, Breaker, Capabilities, NodeRecord, RecentActions, Snapshot, TestRecord},
    time::{Span, Timestamp},
};

use crate::random::Random;

pub(crate) const POOLS: usize = 4;
pub(crate) const BUSY_PERCENT: u64 = 80;
/// Validation runs under way, and how many more may start.
pub(crate) const RUNNING: usize = 3;
pub(crate) const OPEN_SLOTS: u32 = 2;

/// 2026-11-15, a Sunday, at eight in the morning.
const NOW: Timestamp = Timestamp::from_secs(1_794_729_600);
const RACK: usize = 64;
/// How often a test of a node is due, in ten-thousandths: with ten tests, every other node has one that is.
const TEST_DUE: u64 = 670;

pub(crate) fn busy(nodes: usize, tests: usize) -> Snapshot {
    let mut policy = Policy::built_in();
    policy.limits.jobs = (OPEN_SLOTS + u32::try_from(RUNNING).expect("a few runs")).into();
    let tests: Arc<[TestPolicy]> = (0..tests).map(test).collect();
    let mut random = Random::new(1);
    let nodes: Vec<NodeRecord> = (0..nodes).map(|index| record(index, &tests, &mut random)).collect();
    let runs = under_way(&nodes, &tests);
    Snapshot {
        at: NOW,
        planned_at: None,
        nodes,
        runs,
        cases: Vec::new(),
        recent: RecentActions::default(),
        spent: Span::hours(3),
        breaker: Breaker::Closed { since: None },
        pauses: Vec::new(),
        commands: Vec::new(),
        trials: Vec::new(),
        silence_reported: false,
        capabilities: Capabilities::ALL,
        policy: Arc::new(policy),
        tests,
    }
}

/// Returns the same fleet with no limit except the number of jobs.
pub(crate) fn unhindered(mut snapshot: Snapshot, jobs: u32) -> Snapshot {
    snapshot.runs.clear();
    let mut policy = Policy::clone(&snapshot.policy);
    policy.limits.jobs = jobs.into();
    policy.limits.node_hours_per_day = None;
    snapshot.policy = Arc::new(policy);
    let tests: Vec<TestPolicy> = snapshot
        .tests
        .iter()
        .map(|test| TestPolicy { shares: Vec::new(), max_concurrent: None, ..test.clone() })
        .collect();
    snapshot.tests = tests.into();
    snapshot
}

/// Returns a test; two of the tests load a shared mount.
fn test(index: usize) -> TestPolicy {
    TestPolicy {
        id: TestId::new(&format!("test-{index:02}")).expect("a plain name"),
        suite: None,
        cutoff: Span::days(7),
        limit: Span::minutes(30),
        typical_duration: Span::minutes(10),
        exclusive: true,
        place: Place::Job,
        routine: true,
        maintenance: false,
        multi_node: false,
        max_concurrent: None,
        shares: if index < 2 { vec!["scratch".to_owned()] } else { Vec::new() },
        pools: None,
    }
}

fn record(index: usize, tests: &[TestPolicy], random: &mut Random) -> NodeRecord {
    let serial = format!("J{index:07}");
    let occupancy = match random.below(100) {
        free if free >= BUSY_PERCENT => Occupancy::Free,
        _ if random.chance(30) => Occupancy::Unknown { why: "the node does not answer".into() },
        _ => Occupancy::Busy { by: format!("user job {}", random.below(5_000)).into() },
    };
    let node = Node {
        name: NodeName::new(&format!("node{index:06}")).expect("a plain name"),
        pool: PoolName::new(&format!("pool-{}", index / RACK % POOLS)).expect("a plain name"),
        occupancy,
        marks: marks(random),
        hardware: Some(Arc::new(Hardware { board_serial: Some(serial.clone()), ..Hardware::default() })),
        sku: None,
        declared: None,
        overrides: None,
    };
    let suspect = random.chance(20);
    let findings = if suspect { vec![unconfirmed(&tests[0])] } else { Vec::new() };
    NodeRecord {
        node: node.into(),
        state: if suspect { NodeState::Suspect } else { NodeState::InService },
        since: NOW.minus(Span::days(30)),
        test_records: tests.iter().map(|_| past(random)).collect(),
        findings,
        backoff: None,
        hold: random.chance(10).then(hold),
        hardware: HardwareId::new(&format!("board-{serial}")).ok(),
        case: None,
        last_report: Some(NOW.minus(Span::from_millis(random.below(60_000).cast_signed()))),
        job_failures: None,
        remembered_gpus: 0,
    }
}

/// Generates marks: a few nodes are drained by an operator.
fn marks(random: &mut Random) -> Marks {
    let drained = ForeignMark { by: "root".to_owned(), text: "fan replaced".to_owned(), blocks: true };
    Marks { ours: Vec::new(), foreign: if random.chance(10) { vec![drained] } else { Vec::new() } }
}

fn hold() -> Hold {
    Hold { by: "alice".to_owned(), why: "debugging".to_owned(), since: NOW.minus(Span::hours(5)), until: None }
}

/// Generates a test record: a result of the last week, an older one, or rarely none that settles anything.
fn past(random: &mut Random) -> TestRecord {
    let mut known = TestRecord::NEVER;
    let week = Span::days(7).millis().unsigned_abs();
    let due = random.chance(TEST_DUE);
    let age = if due { week + random.below(week) } else { random.below(week - 60_000) };
    if !(due && random.chance(500)) {
        known.add(Verdict::Pass, NOW.minus(Span::from_millis(age.cast_signed())));
    }
    if random.chance(50) {
        let later = NOW.minus(Span::from_millis(random.below(age + 1).cast_signed()));
        known.add(Verdict::Inconclusive, later);
    }
    known
}

/// Returns a finding that failed once and needs a second failure to be confirmed.
fn unconfirmed(test: &TestPolicy) -> OpenFinding {
    let finding = Finding {
        check: test.id.clone(),
        entity: Entity::node(),
        verdict: Verdict::Fail,
        severity: Severity::Monitor,
        remedy: Severity::Monitor.default_remedy(),
        reason: ReasonCode::fixed("too-slow"),
        text: "1.9 GB/s, 2.0 GB/s is the least".to_owned(),
        rule: RuleId::new("bandwidth").expect("a plain name"),
        evidence: Evidence::Measured { metric: "bandwidth".to_owned(), value: 1.9, limit: 2.0 },
        confirm: 2,
    };
    let seen = NOW.minus(Span::hours(1));
    OpenFinding { finding, run: None, first_seen: seen, last_seen: seen, sightings: 1 }
}

fn under_way(nodes: &[NodeRecord], tests: &[TestPolicy]) -> Vec<ActiveRun> {
    let mut ids = IdSource::new(9);
    let began = NOW.minus(Span::minutes(3));
    ids.set_time(began);
    let free = nodes.iter().filter(|record| record.node.occupancy.is_free() && record.state == NodeState::InService);
    free.take(RUNNING)
        .map(|record| {
            let id = ids.run();
            let job = JobId(id.to_string());
            let run = Run {
                id,
                nodes: NonEmpty::one(record.node.name.clone()),
                tests: NonEmpty::one(tests[tests.len() - 1].id.clone()),
                state: RunState::Running { job: job.clone(), since: began },
                purpose: WithReason::new(Purpose::Validation, "stale", "last result 8d ago"),
                case: None,
                planned: began,
                limit: Span::minutes(30),
            };
            let seen = ObservedJobState::Running { job, since: began };
            ActiveRun { run, job: seen, started: Some(began), cancelling: None, absent_since: None }
        })
        .collect()
}
