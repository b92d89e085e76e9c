//! A repair that an operator requests: marked, drained, performed once, requalified; blocked by mode, pause and hold; and
//! handed over if it fails.

use std::collections::BTreeMap;

use super::cluster::{
    Cluster, NodeFixture, Spans, acting, bad, busy, cluster, done, free, name, pool, run, running, unknown,
};
use crate::{
    alert,
    case::{Repair, RepairStep, StepKind, StepState},
    finding::{Severity, Verdict},
    lifecycle::NodeState,
    node::Occupancy,
    node_status::NodeStatus,
    plan::{breaker_allowance, unfinished_repair},
    policy::{Allow, Mode},
    snapshot::{Breaker, Capabilities, CommandKind},
};

/// No step is allowed.
const NOTHING: Allow = Allow { mark: false, drain: false, evict: false, reset: false, reboot: false, replace: false };

fn repair(step: Repair, evict: bool) -> CommandKind {
    CommandKind::Repair { node: name("a"), step, evict }
}

/// A cluster whose policy allows no step, in which an operator wants `a` repaired.
fn asked(node: NodeFixture, step: Repair, evict: bool) -> Cluster {
    let cluster = cluster().fillers(20).node(node).asks(repair(step, evict));
    cluster.policy(|policy| policy.allow = NOTHING)
}

fn cycles(cluster: &mut Cluster, count: usize) -> Vec<String> {
    (0..count).flat_map(|_| cluster.cycle()).collect()
}

/// The step of this kind is recorded as intended, as if the controller had been killed before its outcome was recorded.
fn undone(cluster: &mut Cluster, kind: StepKind) {
    for case in &mut cluster.snapshot.cases {
        for step in case.steps.iter_mut().filter(|step| step.what == kind) {
            step.state = StepState::Intended;
        }
    }
}

/// As [`undone`], before the requested repair was sent: the node's report was not complete, or the cluster refused it.
fn unsent(cluster: &mut Cluster, kind: StepKind) {
    undone(cluster, kind);
    for case in &mut cluster.snapshot.cases {
        case.request.as_mut().unwrap().repair.as_mut().unwrap().sent = None;
    }
}

fn set_boot(cluster: &mut Cluster, id: &str) {
    let hardware = cluster.record("a").node_mut().hardware.as_mut().unwrap();
    std::sync::Arc::make_mut(hardware).boot_id = Some(id.to_owned());
}

const BEGUN: [&str; 4] =
    ["open a reboot: operator", "request a reboot: operator", "move a quarantined: operator", "answer 1: operator"];

#[test]
fn a_requested_reboot_marks_drains_saves_reboots_once_and_requalifies() {
    let mut cluster = asked(free("a").fresh().boot("one"), Repair::Reboot, false);
    let opened = cluster.cycle();
    assert_eq!(opened[0][..7], BEGUN[0][..7], "{opened:?}");
    assert_eq!(opened[1..], BEGUN[1..]);
    assert_eq!(cluster.cycle(), ["step a mark: case"]);
    assert_eq!(cluster.cycle(), ["step a drain: case"]);
    assert_eq!(cluster.cycle(), ["step a keep-evidence: case"]);
    assert_eq!(cluster.cycle(), ["step a reboot: operator", "move a repairing: operator"]);
    let expected = ["step a requalify: proof", "submit a dl: proof", "move a requalifying: proof"];
    assert_eq!(cluster.cycle(), expected);
    assert!(cluster.cycle().is_empty(), "the run decides");
    cluster.ends("a", Verdict::Pass);
    let back = cycles(&mut cluster, 3);
    assert_eq!(back.last().map(String::as_str), Some("move a in-service: proved"), "{back:?}");
    assert!(cycles(&mut cluster, 5).is_empty());
}

#[test]
fn user_work_ends_by_itself_unless_the_operator_asks_for_its_eviction() {
    let mut waits = asked(busy("a").fresh(), Repair::Reset, false);
    let lines = cycles(&mut waits, 8);
    assert!(lines.contains(&"step a drain: case".to_owned()), "{lines:?}");
    assert!(!lines.iter().any(|line| line.contains("evict") || line.contains("step a reset")), "{lines:?}");
    waits.record("a").node_mut().occupancy = Occupancy::Free;
    assert_eq!(cycles(&mut waits, 2)[1..], ["step a reset: operator", "move a repairing: operator"]);

    let mut leaves = asked(busy("a").fresh(), Repair::Reset, true);
    let lines = cycles(&mut leaves, 6);
    assert_eq!(
        lines[4..8],
        ["step a mark: case", "step a drain: case", "step a evict: case", "step a keep-evidence: case"]
    );
}

#[test]
fn a_node_that_does_not_answer_is_rebooted_only_if_its_work_is_given_up_and_never_reset() {
    for (step, evict, expected) in [
        (Repair::Reboot, false, false),
        (Repair::Reboot, true, true),
        (Repair::Replace, true, true),
        (Repair::Reset, true, false),
    ] {
        let mut cluster = asked(unknown("a").fresh(), step, evict);
        cluster.cycle();
        let mut lines = Vec::new();
        for _ in 0..5 {
            lines.extend(cluster.cycle());
            // The model empties an evicted node.
            cluster.record("a").node_mut().occupancy = Occupancy::Unknown { why: "no answer".into() };
        }
        let performed = lines.iter().any(|line| *line == format!("step a {step}: operator"));
        assert_eq!(performed, expected, "{step} {evict}: {lines:?}");
    }
}

#[test]
fn an_open_case_is_taken_over_with_its_findings_and_history() {
    let handed_over = || {
        let node = free("a").fresh().boot("one").found(bad("dl", Severity::Reboot));
        let node = node.emptied(Severity::Reboot, RepairStep::Reboot).state(NodeState::Out);
        node.step(done(StepKind::Reboot, RepairStep::Reboot, 40.minutes())).step(done(
            StepKind::HandOver,
            RepairStep::Reboot,
            30.minutes(),
        ))
    };
    let mut cluster = asked(handed_over(), Repair::Reboot, false);
    assert_eq!(cluster.cycle(), ["request a reboot: operator", "move a quarantined: operator", "answer 1: operator"]);
    let case = &cluster.snapshot.cases[0];
    assert!(!case.waits_for_operator() && case.findings.len() == 1, "{case:#?}");
    let again = ["step a keep-evidence: case", "step a reboot: operator", "move a repairing: operator"];
    assert_eq!(cycles(&mut cluster, 2), again, "the earlier reboot does not count");
}

#[test]
fn the_repair_ends_an_examination_and_a_requalification_run() {
    let mut cluster = cluster().fillers(20).node(free("a").fresh());
    cluster.ask(CommandKind::Quarantine { node: name("a"), evict: false });
    cycles(&mut cluster, 3);
    assert_eq!(cluster.record("a").state.as_str(), "requalifying");
    cluster.ask(repair(Repair::Replace, false));
    let lines = cluster.cycle();
    assert_eq!(
        lines,
        [
            "settle failed: operator",
            "cancel: withdrawn",
            "request a replace: operator",
            "move a quarantined: operator",
            "answer 1: operator"
        ]
    );
    assert!(!cluster.snapshot.cases[0].is_under_examination());
}

#[test]
fn nothing_begins_in_observe_mode_during_a_pause_or_under_a_hold() {
    let blocked: [fn(Cluster) -> Cluster; 5] = [
        |cluster| cluster.policy(|policy| policy.mode = Mode::Observe),
        |cluster| cluster.paused(None, None),
        |cluster| cluster.paused(Some(pool("gpu")), None),
        |mut cluster| {
            let hold = crate::node::Hold {
                by: "bob".to_owned(),
                why: "mine".to_owned(),
                since: cluster.snapshot.at,
                until: None,
            };
            cluster.record("a").hold = Some(hold);
            cluster
        },
        |mut cluster| {
            cluster.record("a").node_mut().marks.foreign.push(super::cluster::cordon_of("the vendor"));
            cluster
        },
    ];
    for block in blocked {
        let mut cluster = block(asked(free("a").fresh(), Repair::Reboot, true));
        let lines = cycles(&mut cluster, 4);
        assert!(!lines.iter().any(|line| line.contains("a reboot") || line.starts_with("step")), "{lines:?}");
        assert_eq!(cluster.snapshot.commands.len(), 1, "it waits");
    }
    let mut elsewhere = asked(free("a").fresh(), Repair::Reboot, false).paused(Some(pool("other")), None);
    assert_eq!(elsewhere.cycle().len(), BEGUN.len(), "another pool is paused");
}

#[test]
fn a_pause_in_the_middle_lets_a_mark_and_a_sent_step_be_completed_and_nothing_else_begin() {
    // Before the reboot: it waits until the pause ends.
    let mut cluster = asked(free("a").fresh(), Repair::Reboot, false);
    cycles(&mut cluster, 3);
    let paused = cluster.clone().paused(None, None);
    let mut waiting = paused.clone();
    assert!(cycles(&mut waiting, 5).is_empty(), "drained, and nothing more");
    waiting.snapshot.pauses.clear();
    assert!(cycles(&mut waiting, 2).contains(&"step a reboot: operator".to_owned()));

    // The drain was recorded and may have begun: it is completed.
    let mut drains = paused;
    undone(&mut drains, StepKind::Drain);
    drains.record("a").node_mut().marks.ours.retain(|mark| mark.kind != crate::node::MarkKind::Cordon);
    assert_eq!(drains.cycle(), ["step a drain: case"]);
    assert!(cycles(&mut drains, 3).is_empty());

    // The reboot was sent: it is completed in any mode.
    cycles(&mut cluster, 2);
    undone(&mut cluster, StepKind::Reboot);
    let mut cluster = cluster.paused(None, None).policy(|policy| policy.mode = Mode::Observe);
    assert_eq!(cluster.cycle()[0], "step a reboot: operator");
}

#[test]
fn a_step_that_was_intended_and_not_sent_is_withdrawn_by_a_pause_and_by_observe_mode() {
    let blocked: [fn(Cluster) -> Cluster; 3] = [
        |cluster| cluster.paused(None, None),
        |cluster| cluster.paused(Some(pool("gpu")), None),
        |cluster| cluster.policy(|policy| policy.mode = Mode::Observe),
    ];
    for block in blocked {
        let mut cluster = asked(free("a").fresh().boot("one"), Repair::Reboot, false);
        cycles(&mut cluster, 5);
        unsent(&mut cluster, StepKind::Reboot);
        assert_eq!(cluster.clone().cycle()[0], "step a reboot: operator", "it is sent in the next cycle");
        let op = cluster.snapshot.cases[0].requested_repair().unwrap().1.op;

        let mut cluster = block(cluster);
        let withdrawn = cluster.cycle();
        assert_eq!(withdrawn, ["withdraw step of a: withdrawn", "move a quarantined: withdrawn"]);
        assert!(cycles(&mut cluster, 5).is_empty(), "nothing more until the pause ends");
        // Longer than the deadline of a reboot.
        cluster.wait(2.hours());
        assert!(cluster.cycle().is_empty());

        cluster.snapshot.pauses.clear();
        let mut cluster = cluster.policy(|policy| policy.mode = Mode::Recommend);
        assert_eq!(cycles(&mut cluster, 1), ["step a reboot: operator", "move a repairing: operator"]);
        assert_eq!(cluster.snapshot.cases[0].steps.iter().filter(|step| step.op == op).count(), 1);
        let back = cluster.cycle();
        assert!(back.contains(&"step a requalify: proof".to_owned()), "{back:?}");
    }
}

#[test]
fn a_step_that_was_not_sent_before_a_hold_is_prepared_again_after_it() {
    let mut cluster = asked(free("a").fresh(), Repair::Reboot, false);
    cycles(&mut cluster, 5);
    unsent(&mut cluster, StepKind::Reboot);
    let hold = crate::node::Hold { by: "bob".into(), why: "mine".into(), since: cluster.snapshot.at, until: None };
    cluster.record("a").hold = Some(hold);
    cycles(&mut cluster, 2);
    cluster.wait(3.hours());
    cluster.record("a").hold = None;
    let lines = cycles(&mut cluster, 4);
    assert!(lines.contains(&"step a reboot: operator".to_owned()), "{lines:?}");
    assert!(!lines.iter().any(|line| line.contains("hand-over")), "{lines:?}");
}

#[test]
fn a_pause_stops_the_eviction_of_user_work_that_is_left() {
    let mut cluster = asked(busy("a").fresh(), Repair::Reboot, true);
    let lines = cycles(&mut cluster, 4);
    assert_eq!(lines.last().map(String::as_str), Some("step a evict: case"));
    // A disruption budget refused a part of it.
    undone(&mut cluster, StepKind::Evict);
    cluster.record("a").node_mut().occupancy = Occupancy::Busy { by: "user job 8".into() };
    let mut paused = cluster.clone().paused(None, None);
    assert!(cycles(&mut paused, 5).is_empty());
    paused.snapshot.pauses.clear();
    assert_eq!(paused.cycle(), ["step a evict: case"]);
}

#[test]
fn a_reboot_by_another_party_while_the_node_is_drained_is_not_taken_for_the_requested_one() {
    let mut cluster = asked(busy("a").fresh().boot("one"), Repair::Reboot, false);
    cycles(&mut cluster, 5);
    set_boot(&mut cluster, "two");
    cluster.record("a").node_mut().occupancy = Occupancy::Free;
    let lines = cycles(&mut cluster, 2);
    assert!(lines.contains(&"step a reboot: operator".to_owned()), "{lines:?}");
    let sent = cluster.snapshot.cases[0].requested_repair().unwrap().1.sent.clone().unwrap();
    assert_eq!(sent.boot_id.as_deref(), Some("two"));

    // The node is free and has not rebooted yet.
    set_boot(&mut cluster, "two");
    assert!(cluster.cycle().is_empty(), "it has not come back");
    set_boot(&mut cluster, "three");
    assert!(cluster.cycle().contains(&"step a requalify: proof".to_owned()));

    // Without an answer of the cluster, only a boot after it was sent proves that it happened.
    let mut lost = asked(busy("a").fresh().boot("one"), Repair::Reboot, false);
    cycles(&mut lost, 5);
    set_boot(&mut lost, "two");
    lost.record("a").node_mut().occupancy = Occupancy::Free;
    cycles(&mut lost, 2);
    set_boot(&mut lost, "two");
    undone(&mut lost, StepKind::Reboot);
    lost.wait(1.days());
    assert_eq!(lost.cycle(), ["settle failed: deadline"]);
}

#[test]
fn a_request_that_cannot_begin_within_a_day_is_withdrawn_or_handed_over() {
    // Not accepted yet: a vendor's mark, which is removed ten days later.
    let mut cordoned = asked(free("a").fresh().cordoned_by("the vendor"), Repair::Reboot, false);
    assert!(cycles(&mut cordoned, 3).is_empty());
    cordoned.wait(24.hours());
    assert_eq!(cordoned.cycle(), ["withdraw 1 on a: withdrawn"]);
    cordoned.record("a").node_mut().marks.foreign.clear();
    assert!(cycles(&mut cordoned, 5).is_empty(), "the healthy node is left alone");
    // Nor after a day without a controller.
    let mut late = asked(free("a").fresh(), Repair::Reboot, false);
    late.wait(25.hours());
    assert_eq!(late.cycle(), ["withdraw 1 on a: withdrawn"]);

    // Accepted, then held by another party's mark or paused for too long.
    let drained = || {
        let mut cluster = asked(free("a").fresh(), Repair::Reboot, false);
        cycles(&mut cluster, 3);
        cluster
    };
    let mut marked = drained();
    marked.record("a").node_mut().marks.foreign.push(super::cluster::cordon_of("the vendor"));
    cycles(&mut marked, 2);
    marked.wait(10.days());
    marked.record("a").node_mut().marks.foreign.clear();
    let lines = cycles(&mut marked, 4);
    assert!(lines.contains(&"step a hand-over: handed-over".to_owned()), "{lines:?}");
    assert!(!lines.iter().any(|line| line.contains("reboot")), "{lines:?}");
    let mut paused = drained().paused(None, None);
    assert!(cycles(&mut paused, 3).is_empty());
    paused.wait(1.days());
    assert_eq!(paused.cycle(), ["step a hand-over: handed-over", "move a out: handed-over"]);

    // User work that ends in its own time is no obstacle.
    let mut used = asked(busy("a").fresh(), Repair::Reboot, false);
    cycles(&mut used, 4);
    used.wait(3.days());
    cycles(&mut used, 2);
    used.record("a").node_mut().occupancy = Occupancy::Free;
    let lines = cycles(&mut used, 2);
    assert!(lines.contains(&"step a reboot: operator".to_owned()), "{lines:?}");
}

#[test]
fn the_drain_deadline_of_a_request_begins_with_the_request() {
    let long_ago = 5.days();
    let node = busy("a").out(Severity::Reboot, RepairStep::Quarantine).since(long_ago);
    let mut node = node.step(done(StepKind::Drain, RepairStep::Quarantine, long_ago));
    node = node.step(done(StepKind::HandOver, RepairStep::Quarantine, long_ago));
    let mut cluster = asked(node, Repair::Reset, false);
    let mark = crate::node::OurMark { kind: crate::node::MarkKind::Cordon, case: None };
    cluster.record("a").node_mut().marks.ours.push(mark);
    let lines = cycles(&mut cluster, 3);
    assert!(!lines.iter().any(|line| line.starts_with("propose")), "{lines:?}");
    let deadline = cluster.snapshot.policy.repair.drain_deadline;
    cluster.wait(deadline);
    assert_eq!(cluster.cycle(), ["propose a drain: not-allowed"]);
}

#[test]
fn a_crash_between_intent_and_record_repeats_the_same_operation() {
    let mut cluster = asked(free("a").fresh(), Repair::Reboot, false);
    cycles(&mut cluster, 5);
    let op = cluster.snapshot.cases[0].requested_repair().unwrap().1.op;
    for _ in 0..3 {
        undone(&mut cluster, StepKind::Reboot);
        assert_eq!(cluster.cycle(), ["step a reboot: operator", "move a repairing: operator"]);
    }
    let reboots: Vec<_> = cluster.snapshot.cases[0].steps.iter().filter(|step| step.what == StepKind::Reboot).collect();
    assert_eq!(reboots.len(), 1, "{reboots:#?}");
    assert_eq!(reboots[0].op, op);
}

#[test]
fn a_failed_step_and_a_failed_requalification_go_to_the_operator_and_no_harsher_step_follows() {
    let everything = |cluster: Cluster| cluster.policy(|policy| policy.allow = acting().snapshot.policy.allow.clone());
    let mut failed =
        everything(asked(free("a").fresh(), Repair::Reset, false)).policy(|policy| policy.mode = Mode::Act);
    cycles(&mut failed, 5);
    for step in failed.snapshot.cases[0].steps.iter_mut().filter(|step| step.what == StepKind::Reset) {
        (step.state, step.text) = (StepState::Failed, "no such GPU".to_owned());
    }
    assert_eq!(failed.cycle(), ["step a hand-over: handed-over", "move a out: handed-over"]);
    let reason = &failed.plan();
    assert!(reason.actions.is_empty(), "{reason:?}");
    assert!(cycles(&mut failed, 5).is_empty());

    let mut unproved = everything(asked(free("a").fresh().found(bad("dl", Severity::Reset)), Repair::Reset, false))
        .policy(|policy| policy.mode = Mode::Act);
    cycles(&mut unproved, 6);
    unproved.ends("a", Verdict::Fail);
    let lines = cycles(&mut unproved, 6);
    assert!(lines.iter().any(|line| line.starts_with("step a hand-over")), "{lines:?}");
    assert!(!lines.iter().any(|line| line.contains("escalate") || line.contains("step a reboot")), "{lines:?}");

    let mut lost = asked(free("a").fresh(), Repair::Reboot, false);
    cycles(&mut lost, 5);
    undone(&mut lost, StepKind::Reboot);
    lost.record("a").node_mut().occupancy = Occupancy::Unknown { why: "no answer".into() };
    lost.wait(3.days());
    let lines = cycles(&mut lost, 3);
    assert!(lines.contains(&"step a hand-over: handed-over".to_owned()), "{lines:?}");
}

#[test]
fn a_new_severe_finding_does_not_escalate_the_case() {
    let mut cluster = asked(free("a").fresh(), Repair::Reset, false).policy(|policy| policy.mode = Mode::Act);
    cycles(&mut cluster, 2);
    cluster.snapshot.cases[0].severity = Severity::Monitor;
    cluster.record("a").findings.push(bad("dl", Severity::Isolate));
    assert_eq!(cluster.cycle(), ["worsen a: worsened"]);
    assert_eq!(cluster.snapshot.cases[0].repair_step, RepairStep::Reset);
}

#[test]
fn a_release_withdraws_a_repair_that_has_not_begun_and_a_newer_repair_replaces_it() {
    let mut waiting = asked(free("a").fresh(), Repair::Reboot, false).paused(None, None);
    waiting.ask(CommandKind::Release { node: name("a") });
    assert_eq!(
        waiting.plan().actions[0].text,
        "reboot requested by ann (I say so) is withdrawn: ann released the node (I say so)"
    );
    assert_eq!(waiting.cycle(), ["withdraw 1 on a: withdrawn", "answer 2: operator"]);

    let mut begun = asked(busy("a").fresh(), Repair::Reboot, false);
    cycles(&mut begun, 4);
    begun.ask(CommandKind::Release { node: name("a") });
    let lines = cycles(&mut begun, 3);
    assert!(lines.contains(&"step a release: released".to_owned()), "{lines:?}");
    assert!(!lines.iter().any(|line| line.contains("reboot")), "{lines:?}");

    let mut twice = asked(free("a").fresh(), Repair::Reboot, false);
    twice.ask(repair(Repair::Reset, false));
    let lines = cycles(&mut twice, 6);
    assert!(lines.contains(&"step a reset: operator".to_owned()), "{lines:?}");
    assert!(!lines.iter().any(|line| line.contains("step a reboot")), "{lines:?}");
}

#[test]
fn a_step_in_progress_ends_before_the_next_one_begins() {
    let node = free("a").emptied(Severity::Reset, RepairStep::Reset);
    let node = node.state(NodeState::Repairing { step: StepKind::Reset, tries: 1 });
    let step = super::cluster::step(StepKind::Reset, RepairStep::Reset, StepState::Intended, 1.minutes());
    let mut cluster = asked(node.step(step), Repair::Reboot, false).policy(|policy| policy.mode = Mode::Act);
    let lines = cluster.cycle();
    assert!(!lines.iter().any(|line| line.contains("reboot")), "{lines:?}");
    cluster.wait(2.hours());
    let lines = cycles(&mut cluster, 2);
    assert!(lines.contains(&"request a reboot: operator".to_owned()), "{lines:?}");
}

#[test]
fn a_test_of_ours_ends_before_the_step() {
    let mut cluster = asked(free("a").fresh(), Repair::Reboot, false).run(run("a", &["dl"], running(1.minutes())));
    let lines = cycles(&mut cluster, 6);
    assert!(!lines.contains(&"step a reboot: operator".to_owned()), "{lines:?}");
    cluster.ends("a", Verdict::Pass);
    assert!(cycles(&mut cluster, 2).contains(&"step a reboot: operator".to_owned()));
}

#[test]
fn a_cluster_that_cannot_do_it_hands_the_case_over() {
    let caps = Capabilities { reboot: false, ..Capabilities::ALL };
    let mut cluster = asked(free("a").fresh(), Repair::Reboot, false).caps(caps);
    let lines = cycles(&mut cluster, 2);
    assert!(lines.contains(&"step a hand-over: handed-over".to_owned()), "{lines:?}");
}

#[test]
fn a_request_for_an_unknown_node_is_completed() {
    let mut cluster = cluster().node(free("b").fresh()).asks(repair(Repair::Reboot, false));
    assert_eq!(cluster.cycle(), ["answer 1: operator"]);
}

#[test]
fn the_breakers_allowance_counts_nodes_in_service_by_pool_and_hour() {
    let nodes = |count: usize| (0..count).map(|n| name(&format!("z{n:04}"))).collect::<Vec<_>>();
    let limits = |hour, percent| {
        acting().fillers(20).policy(|policy| {
            (policy.breaker.nodes_per_hour, policy.breaker.percent_of_pool) = (hour, percent);
        })
    };
    for (hour, percent, allowed) in [(100, 10.0, 2), (3, 100.0, 3), (100, 100.0, 20), (100, 1.0, 1)] {
        let found = breaker_allowance(&limits(hour, percent).snapshot, &nodes(20));
        assert_eq!((found.in_service, found.allowed), (20, allowed), "{hour} {percent}");
    }
    // Several small commands count together.
    let mut series = limits(3, 100.0);
    series.ask(CommandKind::Quarantine { node: name("z0000"), evict: false });
    series.ask(CommandKind::Quarantine { node: name("z0000"), evict: false });
    series.ask(CommandKind::Repair { node: name("z0001"), step: Repair::Reset, evict: false });
    let found = breaker_allowance(&series.snapshot, &nodes(5)[2..]);
    assert_eq!((found.in_service, found.allowed, found.by_operators), (3, 1, 2));
    let found = breaker_allowance(&series.snapshot, &nodes(2));
    assert_eq!((found.allowed, found.by_operators), (2, 0), "the same nodes again");
    cycles(&mut series, 2);
    let found = breaker_allowance(&series.snapshot, &nodes(5)[2..]);
    assert_eq!((found.in_service, found.allowed, found.by_operators), (3, 1, 2), "by now they are out");
    series.wait(1.hours());
    assert_eq!(breaker_allowance(&series.snapshot, &nodes(5)[2..]).allowed, 3, "an hour later");

    let mut open = limits(100, 100.0);
    open.snapshot.breaker = Breaker::Open { since: open.snapshot.at, why: "enough".to_owned() };
    let found = breaker_allowance(&open.snapshot, &nodes(3));
    assert_eq!((found.in_service, found.allowed, found.limit.as_str()), (3, 0, "it is open: enough"));
    let mut out = limits(100, 10.0);
    out.record("z0000").state = NodeState::Quarantined;
    let found = breaker_allowance(&out.snapshot, &nodes(3));
    assert_eq!((found.in_service, found.allowed), (2, 1), "one is out already");
}

#[test]
fn the_operators_words_are_in_the_published_status_and_in_the_alert() {
    for (command, request) in [
        (repair(Repair::Reboot, false), "reboot"),
        (CommandKind::Quarantine { node: name("a"), evict: false }, "quarantine"),
    ] {
        let mut cluster = cluster().fillers(20).node(free("a").fresh()).asks(command);
        let notes = alert::case_notifications(&cluster.snapshot, &cluster.plan().actions, &BTreeMap::new());
        let text = alert::paragraphs(&notes).join("\n");
        assert!(text.contains("by ann: I say so"), "{text}");
        cycles(&mut cluster, 2);
        let record = cluster.record("a").clone();
        let note = NodeStatus::of(&cluster.snapshot, &record).operator.unwrap();
        assert_eq!((note.request, note.by.as_str(), note.why.as_str()), (request, "ann", "I say so"));
        assert_eq!(note.text(), format!("{request} requested by ann: I say so"));
    }
    let mut held = cluster().node(free("a").fresh().held("bob", None));
    let record = held.record("a").clone();
    let note = NodeStatus::of(&held.snapshot, &record).operator.unwrap();
    assert_eq!((note.request, note.by.as_str(), note.why.as_str()), ("hold", "bob", "my turn"));
}

#[test]
fn what_a_repair_waits_for_is_named_with_what_ends_it() {
    let waiting = |cluster: &mut Cluster| {
        let record = cluster.record("a").clone();
        let case = cluster.snapshot.cases.iter().find(|case| Some(case.id) == record.case);
        crate::plan::waiting_repair(&cluster.snapshot, &record, case).map(|waiting| waiting.text())
    };
    let mut paused = asked(free("a").fresh(), Repair::Reboot, false).paused(Some(pool("gpu")), None);
    let text = waiting(&mut paused).unwrap();
    assert_eq!(
        text,
        "reboot requested by ann (I say so) waits for this: pool gpu is paused by ann (storage work): `doctor resume \
         --pool gpu --why …`"
    );
    let mut used = asked(busy("a").fresh(), Repair::Reboot, false);
    cycles(&mut used, 5);
    let text = waiting(&mut used).unwrap();
    assert!(text.contains("has to end: `doctor repair a --step reboot --drain --why …` evicts it"), "{text}");
    let mut cordoned = asked(free("a").fresh().cordoned_by("the vendor"), Repair::Reboot, false);
    assert!(waiting(&mut cordoned).unwrap().contains("the vendor keeps the node out of service"));
    let mut observing = asked(free("a").fresh(), Repair::Reset, false).policy(|policy| policy.mode = Mode::Observe);
    assert!(waiting(&mut observing).unwrap().contains("mode = \"act\""));
    let mut begun = asked(free("a").fresh(), Repair::Reboot, false);
    cycles(&mut begun, 5);
    assert_eq!(waiting(&mut begun), None, "it is in progress");
}

#[test]
fn a_requested_repair_is_unfinished_until_it_is_released_or_handed_over() {
    let unfinished = |cluster: &mut Cluster| {
        let record = cluster.record("a").clone();
        unfinished_repair(&cluster.snapshot, &record).map(|repair| (repair.what, repair.by.to_owned(), repair.sent))
    };
    let mut cluster = asked(free("a").fresh(), Repair::Reboot, false);
    assert_eq!(unfinished(&mut cluster), Some((Repair::Reboot, "ann".to_owned(), false)), "a pending command");
    cycles(&mut cluster, 4);
    assert_eq!(unfinished(&mut cluster), Some((Repair::Reboot, "ann".to_owned(), false)), "drained");
    cluster.cycle();
    assert_eq!(unfinished(&mut cluster), Some((Repair::Reboot, "ann".to_owned(), true)));
    cluster.ask(CommandKind::Release { node: name("a") });
    cycles(&mut cluster, 1);
    assert_eq!(unfinished(&mut cluster), None);
}
