//! A node that an operator quarantines: out of service immediately, emptied, examined, and then left to the operator's
//! decision; and eviction of user work.

use super::cluster::{Cluster, NodeFixture, Spans, acting, bad, busy, cluster, free, name, test_id};
use crate::{
    case::{Advice, StepKind, StepState},
    finding::{OpenFinding, Severity, Verdict},
    node::Occupancy,
    policy::Mode,
    snapshot::{Capabilities, CommandKind},
};

fn quarantine_command(evict: bool) -> CommandKind {
    CommandKind::Quarantine { node: name("a"), evict }
}

/// A cluster that may only mark automatically, in which an operator wants `a` examined.
fn examined(node: NodeFixture, evict: bool) -> Cluster {
    let cluster = cluster().fillers(20).node(node).asks(quarantine_command(evict));
    cluster.policy(|policy| policy.repair.examine = vec![test_id("dl")])
}

#[test]
fn a_quarantined_node_is_marked_drained_examined_and_stays_with_its_operator() {
    let mut cluster = examined(free("a").fresh(), false);
    let expected =
        ["open a quarantine: operator", "step a mark: operator", "move a quarantined: operator", "answer 1: operator"];
    assert_eq!(cluster.cycle(), expected);
    assert_eq!(cluster.cycle(), ["step a drain: case"]);
    assert_eq!(cluster.cycle(), ["submit a dl: quarantine", "move a requalifying: quarantine"]);
    assert!(cluster.cycle().is_empty(), "the run decides");
    cluster.ends("a", Verdict::Pass);
    let expected = [
        "settle done: examined",
        "advise a return: examined",
        "step a hand-over: handed-over",
        "move a out: handed-over",
    ];
    assert_eq!(cluster.cycle(), expected);
    assert_eq!(cluster.snapshot.cases[0].advice, Some(Advice::Return));
    for _ in 0..5 {
        assert!(cluster.cycle().is_empty());
        cluster.wait(3.days());
    }
    cluster.ask(CommandKind::Release { node: name("a") });
    cluster.cycle();
    cluster.cycle();
    cluster.ends("a", Verdict::Pass);
    let lines: Vec<String> = (0..3).flat_map(|_| cluster.cycle()).collect();
    let expected =
        ["step a undrain: case", "step a unmark: case", "close a returned: proved", "move a in-service: proved"];
    assert_eq!(lines, expected);
}

#[test]
fn a_release_during_the_examination_makes_it_a_requalification() {
    let mut cluster = examined(free("a").fresh(), false);
    for _ in 0..3 {
        cluster.cycle();
    }
    cluster.ask(CommandKind::Release { node: name("a") });
    assert_eq!(cluster.cycle(), ["settle failed: released", "step a release: released", "answer 1: operator"]);
    cluster.ends("a", Verdict::Pass);
    let lines: Vec<String> = (0..3).flat_map(|_| cluster.cycle()).collect();
    assert_eq!(lines.last().map(String::as_str), Some("move a in-service: proved"), "{lines:?}");
}

#[test]
fn the_advice_follows_the_findings_of_the_examination() {
    let found = |severity: Severity| -> Option<OpenFinding> { Some(bad("dl", severity)) };
    for (verdict, finding, expected) in [
        (Verdict::Pass, None, Advice::Return),
        (Verdict::Fail, found(Severity::Monitor), Advice::ReturnFlagged),
        (Verdict::Fail, found(Severity::Reset), Advice::Reboot),
        (Verdict::Fail, found(Severity::Reboot), Advice::Reboot),
        (Verdict::Fail, found(Severity::Isolate), Advice::Replace),
        (Verdict::Inconclusive, None, Advice::ExamineAgain),
        (Verdict::NotApplicable, None, Advice::ExamineAgain),
        // A finding that only needs watching does not replace the missing test.
        (Verdict::Inconclusive, found(Severity::Monitor), Advice::ExamineAgain),
    ] {
        let mut cluster = examined(free("a").fresh(), false);
        for _ in 0..3 {
            cluster.cycle();
        }
        cluster.wait(10.minutes());
        cluster.ends("a", verdict);
        let at = cluster.snapshot.at;
        cluster.record("a").findings.extend(finding.map(|open| OpenFinding { last_seen: at, ..open }));
        cluster.cycle();
        assert_eq!(cluster.snapshot.cases[0].advice, Some(expected), "{verdict:?}");
        assert_eq!(cluster.record("a").state.as_str(), "out", "{verdict:?}");
    }
}

#[test]
fn user_work_is_evicted_only_if_the_operator_or_the_policy_allows_it() {
    let mut waits = examined(busy("a").fresh(), false);
    let lines: Vec<String> = (0..4).flat_map(|_| waits.cycle()).collect();
    assert!(
        lines.contains(&"step a drain: case".to_owned()) && !lines.iter().any(|line| line.contains("evict")),
        "{lines:?}"
    );

    let mut leaves = examined(busy("a").fresh(), true);
    let lines: Vec<String> = (0..4).flat_map(|_| leaves.cycle()).collect();
    assert_eq!(
        lines[4..],
        ["step a drain: case", "step a evict: case", "submit a dl: quarantine", "move a requalifying: quarantine"]
    );

    let bad_and_busy = || busy("a").fresh().found(bad("dl", Severity::Reboot));
    for (allowed, expected) in [(false, false), (true, true)] {
        let mut cluster = acting().policy(|policy| policy.allow.evict = allowed).fillers(20).node(bad_and_busy());
        let lines: Vec<String> = (0..4).flat_map(|_| cluster.cycle()).collect();
        assert_eq!(lines.contains(&"step a evict: case".to_owned()), expected, "{lines:?}");
    }
}

#[test]
fn nothing_is_evicted_before_the_node_is_drained() {
    let mut cluster = examined(busy("a").fresh(), true);
    cluster.cycle();
    let drained = cluster.cycle();
    assert_eq!(drained, ["step a drain: case"]);
    cluster.record("a").node_mut().marks.ours.clear();
    for case in &mut cluster.snapshot.cases {
        for step in case.steps.iter_mut().filter(|step| step.what == StepKind::Drain) {
            step.state = StepState::Intended;
        }
    }
    let lines = cluster.cycle();
    assert!(!lines.iter().any(|line| line.contains("evict")), "{lines:?}");
}

#[test]
fn work_that_does_not_end_is_proposed_to_an_operator_after_the_deadline() {
    let mut cluster = examined(busy("a").fresh(), true);
    cluster.cycle();
    cluster.cycle();
    let stays = |cluster: &mut Cluster| {
        cluster.record("a").node_mut().occupancy = Occupancy::Busy { by: "train".into() };
        for case in &mut cluster.snapshot.cases {
            for step in case.steps.iter_mut().filter(|step| step.what == StepKind::Evict) {
                step.state = StepState::Intended;
            }
        }
    };
    for _ in 0..3 {
        assert_eq!(cluster.cycle(), ["step a evict: case"]);
        stays(&mut cluster);
        cluster.wait(5.minutes());
    }
    cluster.wait(25.hours());
    assert_eq!(cluster.cycle(), ["step a evict: case", "propose a drain: not-allowed"]);
}

#[test]
fn a_cluster_that_cannot_drain_examines_as_soon_as_the_node_is_free_and_one_that_only_observes_marks_nothing() {
    let caps = Capabilities { mark: true, ..Capabilities::NONE };
    let mut cluster = examined(free("a").fresh(), true).caps(caps);
    let lines: Vec<String> = (0..2).flat_map(|_| cluster.cycle()).collect();
    assert_eq!(lines[4..], ["submit a dl: quarantine", "move a requalifying: quarantine"]);
    let mut watching = examined(free("a").fresh(), true).policy(|policy| policy.mode = Mode::Observe);
    let lines: Vec<String> = (0..3).flat_map(|_| watching.cycle()).collect();
    assert!(!lines.iter().any(|line| line.starts_with("step")), "{lines:?}");
}
