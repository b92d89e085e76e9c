//! Property test: no sequence of calls makes a world inconsistent or violates the `Backend` trait.

use doctor_sim::{Tolerances, check_effects, invariants::Invariant};
use proptest::prelude::*;

use super::*;

/// One step of an arbitrary sequence.
#[derive(Debug, Clone)]
enum Step {
    Submit(u8),
    SubmitAgain(u8),
    Cancel(u8),
    Change(u8, u8),
    ChangeAgain(u8),
    Befall(u8, u8),
    Pass(u16),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => any::<u8>().prop_map(Step::Submit),
        1 => any::<u8>().prop_map(Step::SubmitAgain),
        1 => any::<u8>().prop_map(Step::Cancel),
        2 => (any::<u8>(), any::<u8>()).prop_map(|(node, what)| Step::Change(node, what)),
        1 => any::<u8>().prop_map(Step::ChangeAgain),
        3 => (any::<u8>(), any::<u8>()).prop_map(|(node, what)| Step::Befall(node, what)),
        4 => (0..2000_u16).prop_map(Step::Pass),
    ]
}

fn change(what: u8) -> Change {
    let mark = OurMark { kind: MarkKind::Unhealthy, case: None };
    match what % 7 {
        0 => Change::Mark(mark),
        1 => Change::Unmark(mark),
        2 => Change::Drain,
        3 => Change::Undrain,
        4 => Change::Reset,
        5 => Change::Reboot,
        _ => Change::Replace,
    }
}

fn incident(name: NodeName, what: u8) -> Incident {
    let length = Span::minutes(i64::from(what) * 3);
    let mark = ForeignMark { by: "ops".into(), text: "cordon".into(), blocks: true };
    match what % 14 {
        0 => Incident::Fault { node: name, kind: FaultKind::ALL[usize::from(what) % FaultKind::ALL.len()] },
        1 => Incident::Heal { node: name },
        2 => Incident::UserJob { nodes: vec![name], length },
        3 => Incident::Jobs { trouble: JobFault::ALL[usize::from(what) % JobFault::ALL.len()], times: 1 },
        4 => Incident::Calls { call: Call::Submit, trouble: CallFailure::Unanswered, times: 1 },
        5 => Incident::Outage { length },
        6 => Incident::Unreachable { node: name, length },
        7 => Incident::Vanish { node: name },
        8 => Incident::Return { called: node(&format!("{name}x")), node: name },
        9 => Incident::AgentsSilent { percent: 50.0, length },
        10 => Incident::ForeignMark { node: name, mark },
        11 => Incident::ForeignUnmark { node: name, by: "ops".into() },
        12 => Incident::OurMarksRemoved { node: name },
        _ => Incident::ForeignReboot { node: name },
    }
}

fn play(steps: &[Step], seed: u64) -> SimBackend {
    let mut config = WorldConfig::of(6).with_seed(seed);
    config.assumptions.gray_per_node_day = 0.5;
    let mut bench = Bench::new(config);
    let (mut runs, mut ops) = (Vec::new(), Vec::new());
    let name = |number: u8| format!("node{:03}", number % 6 + 1);
    let at = |list: usize, number: u8| usize::from(number) % list.max(1);
    for step in steps {
        bench.ids.set_time(bench.sim.clock().now());
        match step {
            Step::Submit(number) => {
                let request = job(bench.ids.run(), &name(*number), &["dl", "storage"]);
                let _ = bench.sim.submit(&request);
                runs.push(request);
            }
            Step::SubmitAgain(number) => {
                if let Some(request) = runs.get(at(runs.len(), *number)) {
                    let _ = bench.sim.submit(request);
                }
            }
            Step::Cancel(number) => {
                if let Some(request) = runs.get(at(runs.len(), *number)) {
                    let _ = bench.sim.cancel(request.run);
                }
            }
            Step::Change(number, what) => {
                let op = (node(&name(*number)), NodeOp { op: bench.ids.op(), what: change(*what) });
                let _ = bench.sim.apply(&op.0, &op.1);
                ops.push(op);
            }
            Step::ChangeAgain(number) => {
                if let Some((node, op)) = ops.get(at(ops.len(), *number)) {
                    let _ = bench.sim.apply(node, op);
                }
            }
            Step::Befall(number, what) => {
                bench.sim.world().inject(&incident(node(&name(*number)), *what));
            }
            Step::Pass(minutes) => bench.pass(Span::minutes(i64::from(*minutes))),
        }
    }
    bench.pass(Span::hours(1));
    bench.sim
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// No sequence of calls makes a world inconsistent.
    #[test]
    fn random_operations_violate_no_invariant(steps in proptest::collection::vec(step(), 1..60), seed in 0..50_u64) {
        let sim = play(&steps, seed);
        sim.world().inject(&Incident::ForeignUnmark { node: node("node001"), by: "ops".into() });
        let world = sim.world();
        for violation in check_effects(world.effects().entries(), Tolerances::default()) {
            let asked_for = matches!(
                violation.what,
                Invariant::TwoRuns { .. }
                    | Invariant::SubmittedToTaken { .. }
                    | Invariant::SlowToLeave { .. }
                    | Invariant::DisturbedUser { .. }
                    | Invariant::DisturbedTwice { .. }
            );
            prop_assert!(asked_for, "only the caller can cause {violation}");
        }
        let truth = world.truth();
        prop_assert!(truth.users.utilisation <= 1.000_001, "{}", truth.users.utilisation);
        let again = play(&steps, seed);
        again.world().inject(&Incident::ForeignUnmark { node: node("node001"), by: "ops".into() });
        prop_assert_eq!(world.effects().digest(), again.world().effects().digest());
    }
}
