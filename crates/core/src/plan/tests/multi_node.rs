//! A test over several nodes, and fault localisation when it fails.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::{
    cluster::{Cluster, Spans, bad, busy, cluster, free, name, test, test_id},
    lines, model,
};
use crate::{
    finding::{Severity, Verdict},
    ids::NodeName,
    plan::Action,
    policy::TestPolicy,
    run::NonEmpty,
    snapshot::{CommandKind, Trial, TrialResult},
};

const TEST: &str = "ring";

fn ring() -> TestPolicy {
    TestPolicy { multi_node: true, routine: false, ..test(TEST) }
}

fn command(nodes: &[&str]) -> CommandKind {
    let nodes = NonEmpty::new(nodes.iter().map(|node| name(node)).collect()).unwrap();
    CommandKind::MultiNodeTest { nodes, test: test_id(TEST), trials: Vec::new() }
}

/// Nodes `a` to `d`, which are requested, and `g1` to `g4`, which are known to be good.
fn eight() -> Cluster {
    let mut cluster = cluster().tests(vec![test("dl"), ring()]);
    for node in ["a", "b", "c", "d", "g1", "g2", "g3", "g4"] {
        cluster = cluster.node(free(node).result("dl", Verdict::Pass, 1.hours()));
    }
    cluster.asks(command(&["a", "b", "c", "d"]))
}

/// Runs until the request is completed. Returns the attributed faults with the conclusion at the end, and the number of
/// trials.
fn run_until_answered(mut cluster: Cluster, result_of: impl Fn(&[NodeName]) -> TrialResult) -> (Vec<String>, usize) {
    let (mut named, mut trials) = (Vec::new(), 0);
    for _ in 0..50 {
        let plan = cluster.plan();
        model::carry_out(&mut cluster.snapshot, &plan.actions);
        for action in &plan.actions {
            match &action.value {
                Action::AttributeFault { .. } => named.push(format!("{}: {}", lines::line(action), action.text)),
                Action::CompleteCommand { .. } => {
                    named.push(action.text.clone());
                    return (named, trials);
                }
                Action::Submit(run) if run.tests.contains(&test_id(TEST)) => {
                    trials += 1;
                    cluster.snapshot.runs.retain(|active| active.run.id != run.id);
                    let result = result_of(&run.nodes);
                    cluster.snapshot.trials.push(Trial { run: run.id, nodes: run.nodes.clone(), result });
                }
                _ => {}
            }
        }
        cluster.snapshot.at = cluster.snapshot.at.plus(1.minutes());
    }
    panic!("it was never answered: {:?}", cluster.snapshot.trials);
}

fn fails_with(bad: &[&str], over: &[NodeName]) -> TrialResult {
    if over.iter().any(|node| bad.contains(&node.as_str())) { TrialResult::Failed } else { TrialResult::Passed }
}

/// The path between two nodes is bad: every trial with both of them fails.
fn fails_between(one: &str, other: &str, over: &[NodeName]) -> TrialResult {
    let has = |name: &str| over.iter().any(|node| node.as_str() == name);
    if has(one) && has(other) { TrialResult::Failed } else { TrialResult::Passed }
}

#[test]
fn one_run_on_all_nodes_is_enough_if_it_passes() {
    let cluster = eight();
    assert_eq!(cluster.lines(), ["submit a+b+c+d ring: operator", "try 1: operator"]);
    assert_eq!(run_until_answered(cluster, |_| TrialResult::Passed), (vec!["all nodes pass together".to_owned()], 1));
}

#[test]
fn a_node_that_fails_with_two_good_nodes_is_named_and_no_other() {
    let (messages, trials) = run_until_answered(eight(), |over| fails_with(&["c"], over));
    assert_eq!(messages, ["name c: named: fails together with each of a, b, d, g1, g3", "at fault: c"]);
    // All, four pairs, and one more for `c`.
    assert_eq!(trials, 6);
}

#[test]
fn a_bad_path_between_two_nodes_is_named_as_a_pair() {
    let (messages, _) = run_until_answered(eight(), |over| fails_between("b", "c", over));
    assert_eq!(messages.last().unwrap(), "at fault: the path between b and c");
    assert_eq!(messages[0], "name b with c: pair: fails together with c, and passes with others");
    let two = cluster().tests(vec![test("dl"), ring()]);
    let two = ["a", "b", "g1", "g2"].into_iter().fold(two, |cluster, node| cluster.node(free(node).fresh()));
    let (messages, trials) = run_until_answered(two.asks(command(&["a", "b"])), |over| fails_between("a", "b", over));
    assert_eq!((messages.last().unwrap().as_str(), trials), ("at fault: the path between a and b", 3));
}

#[test]
fn a_failure_only_of_all_nodes_together_is_reported_as_such() {
    let (messages, _) =
        run_until_answered(eight(), |over| if over.len() > 2 { TrialResult::Failed } else { TrialResult::Passed });
    assert_eq!(messages, ["the nodes fail only all together: every pair passes"]);
}

#[test]
fn a_supposedly_good_node_at_fault_is_named_itself() {
    // All nodes together fail, and so does every pair with `g1`, which is among the first partners.
    let (messages, _) = run_until_answered(eight(), |over| {
        let has = |name: &str| over.iter().any(|node| node.as_str() == name);
        if over.len() > 2 || has("g1") { TrialResult::Failed } else { TrialResult::Passed }
    });
    let named = messages.last().unwrap();
    assert!(named == "at fault: the path between a and g1" || named == "at fault: g1", "{messages:?}");
}

#[test]
fn a_fault_that_a_node_measured_itself_needs_no_pairs() {
    let (messages, trials) = run_until_answered(eight(), |_| TrialResult::AtFault(vec![name("d")]));
    assert_eq!((messages, trials), (vec!["at fault: d".to_owned()], 1), "its finding is open already");
}

#[test]
fn inconclusive_trials_name_no_node() {
    let (messages, trials) = run_until_answered(eight(), |_| TrialResult::Inconclusive("no-result".to_owned()));
    assert_eq!((messages, trials), (vec!["the fault is not located: no-result".to_owned()], 3));
    let (messages, _) = run_until_answered(eight(), |_| TrialResult::Inconclusive("withdrawn".to_owned()));
    assert_eq!(messages, ["the fault is not located: an operator withdrew it"]);
    let (messages, _) = run_until_answered(eight(), |over| match over.len() {
        2 => TrialResult::Inconclusive("no-result".to_owned()),
        _ => TrialResult::Failed,
    });
    let why = messages[0].strip_prefix("the fault is not located: ");
    assert!(why.is_some_and(|why| why.ends_with("with another: no-result")), "{messages:?}");
}

#[test]
fn without_known_good_nodes_no_node_is_named() {
    let doubtful = [free("g"), free("g").fresh().found(bad("dl", Severity::Monitor))];
    for other in doubtful {
        let two = cluster().tests(vec![test("dl"), ring()]).node(free("a").fresh()).node(free("b").fresh());
        let (messages, trials) =
            run_until_answered(two.node(other.clone()).asks(command(&["a", "b"])), |_| TrialResult::Failed);
        assert_eq!((messages.len(), trials), (1, 1), "{other:?}");
        assert!(messages[0].starts_with("the fault is not located: there is no "), "{messages:?}");
    }
}

#[test]
fn a_failure_in_every_pair_names_no_node() {
    let (messages, _) = run_until_answered(eight(), |_| TrialResult::Failed);
    assert_eq!(messages.len(), 1, "{messages:?}");
    assert!(messages[0].starts_with("the fault is not located: every pair fails, also g1 with g2"), "{messages:?}");
}

#[test]
fn a_node_at_fault_is_named_although_no_partner_is_left_for_another_node() {
    let nodes = ["a", "b", "g1", "g2"].into_iter();
    let few = nodes.fold(cluster().tests(vec![test("dl"), ring()]), |cluster, node| cluster.node(free(node).fresh()));
    // `a` fails with both. `b` fails with `g2`, and with `g1` the fault was attributed to `g1`.
    let (messages, _) = run_until_answered(few.asks(command(&["a", "b"])), |over| {
        let has = |name: &str| over.iter().any(|node| node.as_str() == name);
        if has("b") && has("g1") { TrialResult::AtFault(vec![name("g1")]) } else { TrialResult::Failed }
    });
    assert!(messages.iter().any(|line| line.starts_with("name a: named")), "{messages:?}");
    assert!(!messages.iter().any(|line| line.starts_with("name b")), "{messages:?}");
}

#[test]
fn a_trial_waits_until_all_its_nodes_are_free() {
    let two = |b, g| {
        cluster().tests(vec![test("dl"), ring()]).node(free("a").fresh()).node(b).node(g).asks(command(&["a", "b"]))
    };
    assert!(two(busy("b").fresh(), free("g").fresh()).lines().is_empty());
    let mut cluster = two(free("b").fresh(), busy("g").fresh());
    let plan = cluster.plan();
    model::carry_out(&mut cluster.snapshot, &plan.actions);
    let run = cluster.snapshot.runs.pop().unwrap().run;
    cluster.snapshot.trials.push(Trial { run: run.id, nodes: run.nodes, result: TrialResult::Failed });
    assert!(cluster.lines().is_empty(), "{:?}", cluster.lines());
}

#[test]
fn a_multi_node_test_never_runs_on_one_node() {
    let alone = || cluster().tests(vec![ring()]).node(free("a").stale(40.days()));
    assert!(alone().lines().is_empty());
    let asked_alone = alone().asks(CommandKind::Test { node: name("a"), tests: vec![test_id(TEST)], run: None });
    assert_eq!(asked_alone.lines(), ["answer 1: operator"]);
    let (messages, _) = run_until_answered(
        cluster().node(free("a").fresh()).node(free("b").fresh()).asks(CommandKind::MultiNodeTest {
            nodes: NonEmpty::new(vec![name("a"), name("b")]).unwrap(),
            test: test_id("dl"),
            trials: Vec::new(),
        }),
        |_| TrialResult::Passed,
    );
    assert_eq!(messages, ["dl is not a multi-node test"]);
}

proptest! {
    #[test]
    fn exactly_the_bad_nodes_are_named_with_two_known_good_nodes(bad in proptest::collection::btree_set(0_usize..4, 1..=4)) {
        let names = ["a", "b", "c", "d"];
        let bad: BTreeSet<&str> = bad.into_iter().map(|index| names[index]).collect();
        let list: Vec<&str> = bad.iter().copied().collect();
        let (messages, _) = run_until_answered(eight(), |over| fails_with(&list, over));
        prop_assert_eq!(messages.last().unwrap(), &format!("at fault: {}", list.join(", ")));
        prop_assert_eq!(messages.len(), list.len() + 1);
    }
}
