//! Machines behind node names: identified, exchanged, renamed; a case follows its machine.

use super::cluster::{Cluster, NodeFixture, Spans, acting, bad, board, done, free, name, unknown};
use crate::{
    case::{CaseOutcome, CaseState, RepairStep, StepKind},
    finding::{Severity, Verdict},
    lifecycle::NodeState,
};

fn lone(node: NodeFixture) -> Cluster {
    acting().fillers(20).node(node)
}

/// Out of service, waiting for an operator, as machine J1.
fn out(node: &str) -> NodeFixture {
    free(node)
        .fresh()
        .machine("J1")
        .found(bad("dl", Severity::Isolate))
        .out(Severity::Isolate, RepairStep::Replace)
        .state(NodeState::Out)
        .step(done(StepKind::HandOver, RepairStep::Replace, 1.hours()))
}

#[test]
fn a_hardware_id_is_recorded_once() {
    let mut cluster = lone(free("a").fresh().shows_machine("J1"));
    assert_eq!(cluster.cycle(), ["identify a board-J1: machine-known"]);
    assert!(cluster.cycle().is_empty());
    assert_eq!(cluster.record("a").hardware, Some(board("J1")));
}

#[test]
fn a_node_without_hardware_id_changes_nothing() {
    assert!(lone(free("a").fresh().was_machine("J1")).lines().is_empty());
    let mut silent = lone(free("a").fresh().machine("J1"));
    silent.record("a").node_mut().hardware = Some(crate::node::Hardware::default().into());
    assert!(silent.lines().is_empty());
}

#[test]
fn replaced_hardware_starts_without_results() {
    let mut cluster = lone(free("a").fresh().machine("J1").found(bad("dl", Severity::Monitor)).suspect());
    std::sync::Arc::make_mut(cluster.record("a").node_mut().hardware.as_mut().unwrap()).board_serial =
        Some("J2".into());
    assert_eq!(cluster.cycle(), ["rename a board-J2: machine-exchanged"]);
    assert_eq!(cluster.chosen(), ["a dl"], "never tested");
}

#[test]
fn replaced_hardware_closes_its_case_and_the_new_machine_is_requalified_under_the_old_mark() {
    let mut cluster = lone(out("a").shows_machine("J2"));
    let expected = [
        "close a replaced: machine-exchanged",
        "rename a board-J2: machine-exchanged",
        "open a quarantine: machine-exchanged",
        "move a quarantined: machine-exchanged",
    ];
    assert_eq!(cluster.cycle(), expected);
    let lines: Vec<String> = (0..2).flat_map(|_| cluster.cycle()).collect();
    assert_eq!(
        lines,
        ["step a drain: case", "step a requalify: proof", "submit a dl: proof", "move a requalifying: proof"]
    );
    cluster.ends("a", Verdict::Pass);
    let lines: Vec<String> = (0..3).flat_map(|_| cluster.cycle()).collect();
    assert_eq!(lines.last().unwrap(), "move a in-service: proved");
    assert!(cluster.record("a").node.marks.ours.is_empty());
    let how: Vec<_> = cluster.snapshot.cases.iter().map(|case| case.state.clone()).collect();
    assert!(matches!(how[0], CaseState::Closed { how: CaseOutcome::Replaced, .. }), "{how:?}");
}

#[test]
fn replaced_hardware_without_a_mark_is_in_service_and_tested_soon() {
    let mut cluster = lone(out("a").shows_machine("J2"));
    cluster.record("a").node_mut().marks.ours.clear();
    assert_eq!(cluster.cycle(), ["close a replaced: machine-exchanged", "rename a board-J2: machine-exchanged"]);
    assert_eq!(cluster.chosen(), ["a dl"]);
}

#[test]
fn a_case_is_rebound_when_its_hardware_returns_under_another_name() {
    for known in [None, Some("J9")] {
        let node = known.map_or_else(|| free("b").fresh(), |serial| free("b").fresh().was_machine(serial));
        let mut cluster = lone(node.shows_machine("J1")).case(out("a").case.unwrap());
        let lines = cluster.cycle();
        let first =
            if known.is_some() { "rename b board-J1: machine-exchanged" } else { "identify b board-J1: machine-known" };
        let then =
            ["follow b: machine-followed", "settle failed: machine-followed", "move b quarantined: machine-followed"];
        assert_eq!(lines, [&[first], &then[..]].concat());
        cluster.wait(1.minutes());
        assert_eq!(cluster.cycle(), ["step b mark try 2: case"], "out under the new name too");
        assert!(cluster.cycle().is_empty(), "an operator has it");
        let case = cluster.snapshot.cases[0].id;
        assert_eq!(cluster.record("b").case, Some(case));
    }
}

#[test]
fn a_case_is_rebound_although_both_names_existed_for_a_while() {
    let mut cluster = lone(free("b").fresh().machine("J1")).case(out("a").case.unwrap());
    let lines = cluster.cycle();
    assert_eq!(
        lines,
        ["follow b: machine-followed", "settle failed: machine-followed", "move b quarantined: machine-followed"]
    );
    let case = cluster.snapshot.cases[0].id;
    assert_eq!(cluster.record("b").case, Some(case));
    cluster.wait(1.minutes());
    assert_eq!(cluster.cycle(), ["step b mark try 2: case"], "out under the new name too");
}

#[test]
fn two_machines_that_swap_names_keep_their_cases() {
    for (first, second) in [("a", "b"), ("b", "a")] {
        let mut cluster =
            lone(out(first).shows_machine("J2")).node(free(second).fresh().machine("J2").shows_machine("J1"));
        cluster.cycle();
        let case = cluster.snapshot.cases[0].clone();
        assert!(case.is_open(), "{case:?}");
        assert_eq!(case.node, name(second));
        assert_eq!(cluster.record(second).case, Some(case.id));
        assert!(cluster.record(second).state.is_out_of_service());
        assert_ne!(cluster.record(first).case, Some(case.id));
    }
}

#[test]
fn a_serial_number_shared_by_two_nodes_takes_no_node_out() {
    let cluster = lone(out("a")).node(free("b").fresh().shows_machine("J1"));
    assert_eq!(cluster.lines(), ["identify b board-J1: machine-known"]);
    let many = lone(free("b").fresh().shows_machine("J1"))
        .node(free("c").fresh().shows_machine("J1"))
        .case(out("a").case.unwrap());
    let follows = many.lines().iter().filter(|line| line.starts_with("follow")).count();
    assert_eq!(follows, 1, "{:?}", many.lines());
}

#[test]
fn a_name_of_unknown_occupancy_does_not_keep_the_case_of_its_hardware() {
    let mut old = lone(out("a")).node(free("b").fresh().shows_machine("J1"));
    old.record("a").node_mut().occupancy = unknown_occupancy();
    assert_eq!(old.cycle()[1], "follow b: machine-followed");
    old.wait(1.minutes());
    assert_eq!(old.cycle(), ["step b mark try 2: case"], "and the old name is left as it is");
}

#[test]
fn a_rebound_case_takes_no_step_under_its_old_name() {
    for (old, new) in [("a", "b"), ("b", "a")] {
        let mut cluster = lone(out(old).cordoned_by("bob")).node(free(new).fresh().shows_machine("J1"));
        cluster.record(old).node_mut().occupancy = unknown_occupancy();
        let lines = cluster.cycle();
        assert!(!lines.iter().any(|line| line.starts_with(&format!("move {old}"))), "{lines:?}");
        assert_eq!((cluster.record(old).case, cluster.record(new).case.is_some()), (None, true));
    }
}

fn unknown_occupancy() -> crate::node::Occupancy {
    lone(unknown("x")).record("x").node.occupancy.clone()
}

#[test]
fn a_held_node_gets_the_case_of_its_hardware_and_stays_held() {
    let held = free("b").fresh().state(NodeState::Held { by: "ann".into() }).held("ann", None).shows_machine("J1");
    let mut cluster = lone(held).case(out("a").case.unwrap());
    assert_eq!(cluster.cycle()[1], "follow b: machine-followed");
    assert_eq!(cluster.record("b").state.as_str(), "held");
    cluster.record("b").hold = None;
    assert_eq!(cluster.cycle(), ["move b quarantined: hold-over"]);
}

#[test]
fn a_rebound_case_is_not_closed_when_the_old_name_gets_new_hardware() {
    let mut cluster = lone(out("a")).node(free("b").fresh().machine("J1"));
    let id = cluster.snapshot.cases[0].id;
    cluster.snapshot.cases[0].node = name("b");
    cluster.record("b").case = Some(id);
    cluster.record("b").state = NodeState::Out;
    std::sync::Arc::make_mut(cluster.record("a").node_mut().hardware.as_mut().unwrap()).board_serial =
        Some("J2".into());
    assert!(!cluster.lines().iter().any(|line| line.starts_with("close")), "{:?}", cluster.lines());
}
