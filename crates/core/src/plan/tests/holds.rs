//! Holds, foreign marks, removed marks of ours, and marks that this store does not know.

use super::{
    super::SkipReason,
    cluster::{Cluster, NOW, NodeFixture, Spans, acting, bad, busy, cordon_of, done, free, unhealthy_mark, unknown},
};
use crate::{
    case::{RepairStep, StepKind, StepState},
    finding::{Severity, Verdict},
    lifecycle::NodeState,
    node::{MarkKind, OurMark},
};

fn lone(node: NodeFixture) -> Cluster {
    acting().fillers(20).node(node)
}

fn held() -> NodeState {
    NodeState::Held { by: "ann".into() }
}

#[test]
fn a_hold_applies_in_every_state_and_stops_all_other_actions() {
    for state in [NodeState::InService, NodeState::Suspect, NodeState::Quarantined, NodeState::Out] {
        let out = state.is_out_of_service();
        let mut node = free("a").found(bad("dl", Severity::Isolate));
        if out {
            node = node.out(Severity::Isolate, RepairStep::Replace);
        }
        let mut cluster = lone(node.state(state.clone()).held("ann", None));
        assert_eq!(cluster.cycle(), ["move a held by ann: held"], "{state:?}");
        assert_eq!(cluster.passed_over("a"), Some(SkipReason::Held { by: "ann".into() }));
        for _ in 0..5 {
            assert!(cluster.cycle().is_empty(), "{state:?}");
            cluster.wait(3.days());
        }
    }
}

#[test]
fn an_expired_hold_ends_and_the_case_continues() {
    let until = Some(NOW.plus(1.hours()));
    let mut cluster = lone(free("a").fresh().state(held()).held("ann", until));
    assert!(cluster.lines().is_empty());
    cluster.wait(1.hours());
    assert_eq!(cluster.cycle(), ["move a in-service: hold-over"]);
    assert!(cluster.cycle().is_empty());
    let node = free("a").fresh().out(Severity::Reset, RepairStep::Reset).state(held()).held("ann", until);
    let mut cluster = lone(node);
    cluster.wait(1.hours());
    assert_eq!(cluster.cycle(), ["move a quarantined: hold-over"]);
    assert_eq!(cluster.cycle(), ["step a keep-evidence: case"]);
}

#[test]
fn a_removed_hold_ends() {
    assert_eq!(lone(free("a").fresh().state(held())).lines(), ["move a in-service: hold-over"]);
}

#[test]
fn a_hold_on_a_proposed_case_does_not_take_the_node_out() {
    let mut cluster =
        lone(free("a").fresh().found(bad("dl", Severity::Reset))).policy(|policy| policy.allow.mark = false);
    cluster.cycle();
    let hold = free("a").held("ann", Some(NOW.plus(10.minutes())));
    cluster.record("a").hold = lone(hold).record("a").hold.clone();
    assert_eq!(cluster.cycle(), ["move a held by ann: held"]);
    cluster.wait(10.minutes());
    assert_eq!(cluster.cycle(), ["move a in-service: hold-over"]);
    assert_eq!(cluster.cycle(), ["move a suspect: confirmed"]);
    assert!(cluster.cycle().is_empty());
}

#[test]
fn a_foreign_mark_on_a_node_of_ours_makes_it_theirs_until_the_mark_is_gone() {
    let mut cluster = lone(free("a").fresh().out(Severity::Reset, RepairStep::Reset).cordoned_by("bob"));
    assert_eq!(cluster.cycle(), ["move a held by bob: foreign-mark"]);
    for _ in 0..5 {
        assert!(cluster.cycle().is_empty());
        cluster.wait(1.days());
    }
    assert_eq!(cluster.record("a").node.marks.foreign, [cordon_of("bob")], "never touched");
    cluster.record("a").node_mut().marks.foreign.clear();
    assert_eq!(cluster.cycle(), ["move a quarantined: hold-over"]);
}

#[test]
fn an_expired_hold_does_not_conflict_with_a_foreign_mark() {
    let node = free("a").fresh().out(Severity::Reset, RepairStep::Reset).cordoned_by("bob").held("ann", Some(NOW));
    let mut cluster = lone(node);
    assert_eq!(cluster.cycle(), ["move a held by bob: foreign-mark"]);
    assert!(cluster.cycle().is_empty());
    assert!(cluster.cycle().is_empty());
}

#[test]
fn a_bad_node_that_another_party_keeps_out_is_recorded_and_not_marked() {
    let mut cluster = lone(free("a").fresh().found(bad("dl", Severity::Isolate)).cordoned_by("bob"));
    assert_eq!(cluster.cycle(), ["move a suspect: foreign-mark"]);
    assert!(cluster.cycle().is_empty());
}

#[test]
fn a_foreign_mark_that_does_not_block_work_is_not_a_hold() {
    let mut cluster = lone(free("a").fresh().out(Severity::Reset, RepairStep::Reset).cordoned_by("bob"));
    cluster.record("a").node_mut().marks.foreign[0].blocks = false;
    assert_eq!(cluster.lines(), ["step a keep-evidence: case"]);
}

#[test]
fn our_mark_removed_by_another_party_is_not_set_again() {
    let mut cluster = lone(free("a").fresh().out(Severity::Reset, RepairStep::Reset));
    cluster.record("a").node_mut().marks.ours.clear();
    assert_eq!(cluster.cycle(), ["move a held by another party, which removed our mark: mark-removed"]);
    for _ in 0..5 {
        assert!(cluster.cycle().is_empty());
        cluster.wait(1.days());
    }
    cluster.record("a").node_mut().marks.ours.push(unhealthy_mark());
    assert_eq!(cluster.cycle(), ["move a quarantined: hold-over"], "they changed their mind");
}

#[test]
fn our_cordon_removed_by_another_party_is_not_set_again() {
    let node = free("a").fresh().out(Severity::Reboot, RepairStep::Reboot);
    let mut cluster = lone(node.step(done(StepKind::Drain, RepairStep::Reboot, 30.minutes())));
    assert_eq!(cluster.cycle(), ["move a held by another party, which removed our mark: mark-removed"]);
    assert!(cluster.cycle().is_empty());
}

#[test]
fn a_mark_set_by_a_crashed_controller_counts_once_it_is_observed() {
    let mut cluster = lone(busy("a").fresh().out(Severity::Reboot, RepairStep::Reboot));
    cluster.snapshot.cases[0].steps[0].state = StepState::Intended;
    assert_eq!(cluster.cycle(), ["settle done: seen-done", "step a drain: case"]);
    cluster.wait(5.minutes());
    cluster.record("a").node_mut().marks.ours.clear();
    assert_eq!(cluster.cycle(), ["move a held by another party, which removed our mark: mark-removed"]);
}

#[test]
fn a_mark_that_is_not_visible_yet_was_not_removed() {
    let mut cluster = lone(free("a").fresh().found(bad("dl", Severity::Reset)));
    cluster.cycle();
    cluster.record("a").node_mut().marks.ours.clear();
    assert!(cluster.cycle().is_empty());
    cluster.wait(2.minutes());
    assert_eq!(cluster.lines(), ["move a held by another party, which removed our mark: mark-removed"]);
}

#[test]
fn a_mark_that_we_removed_was_not_removed_by_another_party() {
    let node =
        free("a").out(Severity::Reset, RepairStep::Reset).step(done(StepKind::Unmark, RepairStep::Reset, 10.minutes()));
    let node = node.state(NodeState::Requalifying { run: Some(crate::ids::RunId::from_number(1)) }).result(
        "dl",
        Verdict::Pass,
        5.minutes(),
    );
    let mut cluster = lone(node);
    cluster.record("a").node_mut().marks.ours.clear();
    assert_eq!(cluster.lines(), ["close a returned: proved", "move a in-service: proved"]);
}

#[test]
fn unknown_marks_of_ours_are_adopted_and_not_removed() {
    let mut cluster = lone(free("a").fresh().marked());
    assert_eq!(cluster.passed_over("a"), None);
    assert_eq!(cluster.cycle(), ["open a replace: mark-adopted", "move a quarantined: mark-adopted"]);
    for _ in 0..10 {
        assert!(cluster.cycle().is_empty());
        cluster.wait(5.days());
    }
    assert_eq!(cluster.record("a").node.marks.ours, [unhealthy_mark()]);
}

#[test]
fn adopting_a_mark_bypasses_the_breaker_and_does_not_open_it() {
    let mut cluster = acting();
    for n in 0..10 {
        cluster = cluster.node(free(&format!("n{n}")).fresh().marked());
    }
    let lines = cluster.cycle();
    assert_eq!(lines.iter().filter(|line| line.starts_with("open n")).count(), 10);
    assert!(!lines.contains(&"open breaker: breaker-opened".to_owned()));
}

#[test]
fn an_adopted_mark_that_another_party_removes_is_not_set_again() {
    for kind in [MarkKind::Unhealthy, MarkKind::Cordon] {
        let mut cluster = lone(free("a").fresh());
        cluster.record("a").node_mut().marks.ours =
            vec![unhealthy_mark(), OurMark { kind: MarkKind::Cordon, case: None }];
        cluster.cycle();
        cluster.wait(10.minutes());
        cluster.record("a").node_mut().marks.ours.retain(|mark| mark.kind != kind);
        assert_eq!(cluster.cycle(), ["move a held by another party, which removed our mark: mark-removed"], "{kind}");
        assert!(cluster.cycle().is_empty(), "{kind}");
    }
}

#[test]
fn a_node_out_of_service_without_a_case_gets_one_for_an_operator() {
    for state in [NodeState::Quarantined, NodeState::Out, NodeState::Repairing { step: StepKind::Reset, tries: 1 }] {
        let mut cluster = lone(free("a").fresh().state(state.clone()));
        let lines = cluster.cycle();
        assert_eq!(lines[0], "open a replace: case-missing", "{state:?}");
        assert!(cluster.record("a").state.is_out_of_service(), "{state:?}");
        assert!(cluster.cycle().is_empty(), "{state:?}");
    }
    assert!(lone(unknown("a").fresh().state(NodeState::Out)).lines().is_empty(), "the machine of that name is unknown");
}
