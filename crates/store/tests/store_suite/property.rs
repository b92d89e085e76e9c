//! Property test: whatever the order of operations, the store is consistent. `latest_result` matches history, no node
//! has two runs, counts agree, and the same sequence leaves the same store on every database.

use doctor_core::{
    finding::Verdict,
    ids::{HardwareId, RunId},
    plan::{Action, Conclusion},
    reason::WithReason,
    run::{IncompleteReason, NotStartedReason},
    time::Span,
};
use doctor_store::records::{Accepted, HistoryFilter};
use proptest::prelude::*;

use crate::bed::{StoreTestbed, node};

#[derive(Debug, Clone)]
enum StoreOp {
    Plan {
        node: u8,
        tests: u8,
    },
    /// Answers the `which`-th active run; the result may be from an earlier time, partial, or sent twice.
    Answer {
        which: u8,
        verdict: Verdict,
        hours_ago: u8,
        partial: bool,
        twice: bool,
    },
    Conclude {
        which: u8,
        started: bool,
    },
    Rename {
        node: u8,
        machine: u8,
    },
    Wait {
        minutes: u16,
    },
}

fn store_op() -> impl Strategy<Value = StoreOp> {
    let verdict = prop::sample::select(Verdict::ALL.to_vec());
    prop_oneof![
        4 => (0..4_u8, 1..8_u8).prop_map(|(node, tests)| StoreOp::Plan { node, tests }),
        6 => (any::<u8>(), verdict, prop_oneof![4 => Just(0_u8), 1 => 1..72_u8], prop::bool::weighted(0.2), any::<bool>())
            .prop_map(|(which, verdict, hours_ago, partial, twice)| StoreOp::Answer { which, verdict, hours_ago, partial, twice }),
        3 => (any::<u8>(), any::<bool>()).prop_map(|(which, started)| StoreOp::Conclude { which, started }),
        1 => (0..4_u8, any::<u8>()).prop_map(|(node, machine)| StoreOp::Rename { node, machine }),
        3 => (0..600_u16).prop_map(|minutes| StoreOp::Wait { minutes }),
    ]
}

const TESTS: [&str; 3] = ["disk", "gpu", "nccl"];

fn tests_in(tests: u8) -> Vec<&'static str> {
    TESTS.into_iter().enumerate().filter(|(i, _)| tests & (1 << i) != 0).map(|(_, test)| test).collect()
}

/// Active runs: id, node, tests.
type Active = Vec<(RunId, u8, u8)>;

fn apply_op(bed: &mut StoreTestbed, active: &mut Active, op: &StoreOp) {
    match *op {
        StoreOp::Plan { node, tests } => {
            if active.iter().all(|(_, busy, _)| *busy != node) {
                active.push((bed.plan(&format!("n{node}"), &tests_in(tests)), node, tests));
            }
        }
        StoreOp::Answer { which, verdict, hours_ago, partial, twice } => {
            if active.is_empty() {
                return;
            }
            let index = which as usize % active.len();
            let (run, on, tests) = active[index];
            let name = format!("n{on}");
            let mut outcomes: Vec<_> = tests_in(tests).iter().map(|test| bed.outcome(&name, test, verdict)).collect();
            for outcome in &mut outcomes {
                outcome.at = bed.now.minus(Span::hours(hours_ago.into()));
            }
            let partial = partial && outcomes.len() > 1;
            if partial {
                outcomes.pop();
            }
            let mut result = bed.result(run, &name, outcomes);
            result.complete = !partial;
            let first = bed.accept(std::slice::from_ref(&result))[0];
            if twice {
                assert_eq!(bed.accept(&[result]), [Accepted::Duplicate]);
            }
            if first == Accepted::Stored && !partial {
                active.remove(index);
            }
        }
        StoreOp::Conclude { which, started } => {
            if !active.is_empty() {
                let (run, ..) = active.remove(which as usize % active.len());
                let end = if started {
                    Conclusion::Incomplete(IncompleteReason::NoResult)
                } else {
                    Conclusion::NotStarted(NotStartedReason::PendingTooLong)
                };
                bed.conclude(run, end);
            }
        }
        StoreOp::Rename { node: of, machine } => {
            let hardware = HardwareId::new(&format!("board-{machine}")).unwrap();
            let action = Action::HardwareReplaced { node: node(&format!("n{of}")), hardware };
            bed.commit(&[WithReason::new(action, "machine-exchanged", "x")]);
        }
        StoreOp::Wait { minutes } => {
            bed.wait(Span::minutes(minutes.into()));
        }
    }
}

fn apply_ops(mut bed: StoreTestbed, ops: &[StoreOp]) -> StoreTestbed {
    let mut active = Active::new();
    for op in ops {
        apply_op(&mut bed, &mut active, op);
    }
    bed.assert_sound();
    assert_eq!(bed.store.active_runs().unwrap().len(), active.len());
    bed
}

/// The content of a store, without the ids it gave to names.
fn all_of(bed: &StoreTestbed) -> impl PartialEq + std::fmt::Debug {
    let mut latest = bed.store.latest_all().unwrap();
    latest.sort_by(|a, b| (&a.node, &a.test).cmp(&(&b.node, &b.test)));
    let nodes = bed.store.load_nodes().unwrap();
    (latest, nodes, bed.store.history(&HistoryFilter::default()).unwrap(), bed.store.counters().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn latest_results_match_history_after_any_operations(ops in prop::collection::vec(store_op(), 1..60)) {
        apply_ops(StoreTestbed::memory(), &ops);
    }
}

proptest! {
    // Each case has its own database, which PostgreSQL takes a while to create.
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 40, ..ProptestConfig::default() })]

    #[test]
    fn the_same_operations_leave_the_same_store_on_both_databases(ops in prop::collection::vec(store_op(), 20..60)) {
        if let Some(bed) = StoreTestbed::postgres() {
            let on_postgres = apply_ops(bed, &ops);
            let in_memory = apply_ops(StoreTestbed::memory(), &ops);
            prop_assert_eq!(format!("{:?}", all_of(&on_postgres)), format!("{:?}", all_of(&in_memory)));
        }
    }
}
