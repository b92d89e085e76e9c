//! Escalation: reset, reboot, quarantine, replacement, hand-over; evidence is saved first; earlier remedies are
//! remembered.

use super::cluster::{Cluster, NOW, Spans, acting, bad, board, busy, case_of, done, free, returned, step, unknown};
use crate::{
    case::{RepairStep, StepKind, StepState},
    finding::{Severity, Verdict},
    lifecycle::NodeState,
    node::Occupancy,
    plan::Action,
    policy::{Day, TimeOfDay, Window, WindowKind},
    time::Span,
};

fn lone(node: super::cluster::NodeFixture) -> Cluster {
    acting().fillers(20).node(node)
}

/// Cycles until the requalification run starts, then ends it with this verdict.
fn requalify(cluster: &mut Cluster, verdict: Verdict) -> Vec<String> {
    let mut lines = Vec::new();
    for _ in 0..8 {
        lines.extend(cluster.cycle());
        if !cluster.snapshot.runs.is_empty() {
            cluster.ends("a", verdict);
            return lines;
        }
    }
    panic!("no proof began: {lines:?}");
}

const PROOF: [&str; 3] = ["step a requalify: proof", "submit a dl: proof", "move a requalifying: proof"];
const HELPED_NOT: &str = "move a quarantined: did-not-help";

#[test]
fn a_case_escalates_from_reset_to_replacement_with_evidence_saved_before_each_step() {
    let mut cluster = lone(free("a").fresh().found(bad("dl", Severity::Reset)).machine("J1"));
    let mut lines = requalify(&mut cluster, Verdict::Fail);
    for _ in 0..2 {
        lines.extend(requalify(&mut cluster, Verdict::Fail));
    }
    for _ in 0..6 {
        lines.extend(cluster.cycle());
    }
    let mut expected = vec!["open a reset: confirmed", "step a mark: confirmed", "move a quarantined: confirmed"];
    expected.extend(["step a keep-evidence: case", "step a reset: case", "move a repairing: case"]);
    expected.extend(PROOF);
    expected.extend(["escalate reboot: did-not-help", HELPED_NOT, "step a drain: case"]);
    expected.extend(["step a keep-evidence: case", "step a reboot: case", "move a repairing: case"]);
    expected.extend(PROOF);
    expected.extend(["escalate quarantine: did-not-help", HELPED_NOT]);
    expected.extend(PROOF);
    expected.extend(["escalate replace: did-not-help", HELPED_NOT]);
    expected.extend(["step a keep-evidence: case", "step a replace: case", "move a repairing: case"]);
    expected.push("move a out: replacing");
    assert_eq!(lines, expected);
}

#[test]
fn a_fault_without_restart_remedy_is_handed_over_if_replacing_is_not_allowed() {
    let mut cluster = lone(free("a").fresh().found(bad("dl", Severity::Isolate)));
    cluster = cluster.policy(|policy| policy.allow.replace = false);
    let lines: Vec<String> = (0..6).flat_map(|_| cluster.cycle()).collect();
    let expected = [
        "open a replace: confirmed",
        "step a mark: confirmed",
        "move a quarantined: confirmed",
        "step a drain: case",
        "step a hand-over: handed-over",
        "move a out: handed-over",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn a_case_that_waits_for_an_operator_takes_no_step() {
    let node = free("a").fresh().out(Severity::Isolate, RepairStep::Replace).state(NodeState::Out);
    let mut cluster = lone(node.step(done(StepKind::HandOver, RepairStep::Replace, 1.hours())));
    for _ in 0..10 {
        assert!(cluster.cycle().is_empty());
        cluster.wait(10.days());
    }
}

#[test]
fn a_failing_step_is_retried_with_fresh_evidence_and_then_escalated() {
    let node = free("a").fresh().out(Severity::Reset, RepairStep::Reset).step(done(
        StepKind::SaveEvidence,
        RepairStep::Reset,
        9.minutes(),
    ));
    let mut failed = step(StepKind::Reset, RepairStep::Reset, StepState::Failed, 8.minutes());
    let mut cluster = lone(node.clone().step(failed.clone()));
    assert_eq!(cluster.cycle(), ["step a keep-evidence: case"]);
    assert_eq!(cluster.lines(), ["step a reset try 2: case", "move a repairing: case"]);
    failed.attempts = 2;
    assert_eq!(lone(node.step(failed)).lines(), ["escalate reboot: did-not-help"]);
}

#[test]
fn an_interrupted_step_is_retried_with_the_same_operation_id() {
    let node = free("a")
        .fresh()
        .out(Severity::Reset, RepairStep::Reset)
        .state(NodeState::Repairing { step: StepKind::Reset, tries: 1 });
    let intended = step(StepKind::Reset, RepairStep::Reset, StepState::Intended, 1.minutes());
    let cluster = lone(node.step(done(StepKind::SaveEvidence, RepairStep::Reset, 2.minutes())).step(intended.clone()));
    let plan = cluster.plan();
    let again = plan.actions.iter().find_map(|action| match action.value {
        Action::Step { step: StepKind::Reset, op, attempts: tries, .. } => Some((op, tries)),
        _ => None,
    });
    assert_eq!(again, Some((intended.op, 1)));
}

fn rebooting(node: super::cluster::NodeFixture, ago: i64) -> Cluster {
    let node = node
        .emptied(Severity::Reboot, RepairStep::Reboot)
        .state(NodeState::Repairing { step: StepKind::Reboot, tries: 1 });
    lone(node.step(done(StepKind::Reboot, RepairStep::Reboot, ago.minutes())))
}

#[test]
fn a_reboot_is_done_when_the_node_is_free_with_another_boot_id() {
    let cluster = rebooting(free("a").fresh().machine("J1").boot("one"), 5);
    assert!(cluster.lines().is_empty(), "still the old boot");
    let mut cluster = cluster;
    std::sync::Arc::make_mut(cluster.record("a").node_mut().hardware.as_mut().unwrap()).boot_id = Some("two".into());
    assert_eq!(cluster.lines(), PROOF);
}

#[test]
fn a_reboot_that_does_not_come_back_in_time_has_failed() {
    assert!(rebooting(unknown("a").fresh(), 44).lines().is_empty());
    let mut cluster = rebooting(unknown("a").fresh(), 46);
    assert_eq!(cluster.cycle(), ["settle failed: deadline"]);
    assert_eq!(cluster.cycle(), ["step a keep-evidence: case"]);
    assert_eq!(cluster.cycle(), ["step a reboot try 2: case", "move a repairing: case"]);
    cluster.wait(46.minutes());
    assert_eq!(cluster.cycle(), ["settle failed: deadline"]);
    assert_eq!(cluster.cycle(), ["escalate quarantine: did-not-help", "move a quarantined: did-not-help"]);
}

/// The machine's last report may arrive while it restarts.
#[test]
fn a_node_that_is_restarting_is_not_replaced_before_it_is_back() {
    let worsened = |mut cluster: Cluster| {
        cluster.record("a").findings.push(bad("nccl", Severity::Isolate));
        assert_eq!(cluster.cycle(), ["worsen a: worsened", "escalate replace: worsened"]);
        assert_eq!(cluster.cycle(), [""; 0], "the reboot is in progress");
        cluster
    };
    let mut back = worsened(rebooting(unknown("a").fresh().machine("J1").boot("one"), 5));
    back.record("a").node_mut().occupancy = Occupancy::Free;
    std::sync::Arc::make_mut(back.record("a").node_mut().hardware.as_mut().unwrap()).boot_id = Some("two".into());
    assert_eq!(back.cycle(), ["step a keep-evidence: case"]);
    assert_eq!(back.cycle(), ["step a replace: case", "move a repairing: case"]);

    let mut gone = worsened(rebooting(unknown("a").fresh(), 5));
    gone.wait(41.minutes());
    assert_eq!(gone.cycle(), ["settle failed: deadline"]);
    assert_eq!(gone.cycle(), ["step a keep-evidence: case"]);

    let node = unknown("a").fresh().machine("J1").boot("one").emptied(Severity::Reboot, RepairStep::Reboot);
    let node = node.state(NodeState::Repairing { step: StepKind::Reboot, tries: 1 });
    let sent = step(StepKind::Reboot, RepairStep::Reboot, StepState::Intended, 5.minutes());
    let mut unconfirmed = worsened(lone(node.step(sent)));
    let mut rebooted = unconfirmed.clone();
    unconfirmed.wait(41.minutes());
    assert_eq!(unconfirmed.cycle(), ["settle failed: deadline"]);
    assert_eq!(unconfirmed.cycle(), ["step a keep-evidence: case"]);
    std::sync::Arc::make_mut(rebooted.record("a").node_mut().hardware.as_mut().unwrap()).boot_id = Some("two".into());
    assert_eq!(rebooted.cycle(), ["settle done: rebooted"]);
    assert_eq!(rebooted.cycle(), [""; 0], "it does not answer yet");
    rebooted.record("a").node_mut().occupancy = Occupancy::Free;
    assert_eq!(rebooted.cycle(), ["step a keep-evidence: case"]);
}

#[test]
fn an_outage_long_after_a_reset_does_not_make_the_reset_fail() {
    let mut cluster = lone(free("a").fresh().found(bad("dl", Severity::Reset)));
    requalify(&mut cluster, Verdict::Inconclusive);
    cluster.cycle();
    cluster.wait(20.minutes());
    cluster.record("a").node_mut().occupancy = Occupancy::Unknown { why: "outage".into() };
    assert!(cluster.lines().is_empty());
}

#[test]
fn a_node_that_waits_for_requalification_is_no_longer_repairing() {
    let mut cluster =
        lone(free("a").fresh().found(bad("dl", Severity::Reset))).policy(|policy| policy.limits.jobs = 0.into());
    let lines: Vec<String> = (0..4).flat_map(|_| cluster.cycle()).collect();
    assert_eq!(lines.last().unwrap(), "move a quarantined: repaired");
}

#[test]
fn a_node_is_not_reset_or_replaced_under_user_work_or_under_a_run() {
    for (severity, repair_step) in [
        (Severity::Reset, RepairStep::Reset),
        (Severity::Reboot, RepairStep::Reboot),
        (Severity::Isolate, RepairStep::Replace),
    ] {
        let out = |node: super::cluster::NodeFixture| {
            node.fresh().out(severity, repair_step).step(done(StepKind::SaveEvidence, repair_step, 1.minutes()))
        };
        let no_drain = |policy: &mut crate::policy::Policy| {
            policy.allow.drain = false;
            for steps in policy.repair.steps.values_mut() {
                steps.retain(|step| *step != StepKind::Drain);
            }
        };
        assert!(lone(out(busy("a"))).policy(no_drain).lines().is_empty(), "{repair_step}");
        let run = super::cluster::run("a", &["dl"], super::cluster::running(1.minutes()));
        assert!(lone(out(free("a"))).policy(no_drain).run(run).lines().is_empty(), "{repair_step}");
        assert_eq!(lone(out(free("a"))).policy(no_drain).lines().len(), 2, "{repair_step}");
    }
}

#[test]
fn an_unreachable_node_can_be_rebooted_but_not_reset() {
    let out = |severity, repair_step| lone(unknown("a").fresh().emptied(severity, repair_step));
    assert!(out(Severity::Reset, RepairStep::Reset).lines().is_empty());
    assert_eq!(out(Severity::Reboot, RepairStep::Reboot).lines(), ["step a reboot: case", "move a repairing: case"]);
}

/// Found by the kill test: an unreachable node was drained and immediately rebooted while a user's job was on it.
#[test]
fn an_unreachable_node_never_seen_empty_is_not_disrupted() {
    for (severity, repair_step) in [(Severity::Reboot, RepairStep::Reboot), (Severity::Isolate, RepairStep::Replace)] {
        let mut cluster = lone(unknown("a").fresh().out(severity, repair_step));
        assert_eq!(cluster.cycle(), ["step a drain: case"], "{repair_step}");
        assert!(cluster.cycle().is_empty(), "{repair_step}");
        cluster.wait(25.hours());
        assert_eq!(cluster.cycle(), ["propose a drain: not-allowed"], "{repair_step}");
        assert!(cluster.cycle().is_empty(), "{repair_step}");
        cluster.record("a").node_mut().occupancy = Occupancy::Free;
        assert_eq!(cluster.cycle(), ["step a keep-evidence: case"], "{repair_step}");
        cluster.record("a").node_mut().occupancy = Occupancy::Unknown { why: "outage".into() };
        assert_eq!(cluster.cycle().len(), 2, "{repair_step}: once seen empty, it may be rebooted or replaced");
    }
}

#[test]
fn disruptive_steps_wait_for_the_maintenance_window() {
    let window = |from: u16| Window {
        kind: WindowKind::Maintenance,
        pool: None,
        days: Day::ALL.to_vec(),
        from: TimeOfDay(from * 60),
        to: TimeOfDay((from + 1) * 60),
        utc_offset_minutes: 0,
    };
    for (severity, repair_step, first) in [
        (Severity::Reset, RepairStep::Reset, "step a reset: case"),
        (Severity::Reboot, RepairStep::Reboot, "step a drain: case"),
        (Severity::Isolate, RepairStep::Replace, "step a drain: case"),
    ] {
        let node =
            free("a").fresh().out(severity, repair_step).step(done(StepKind::SaveEvidence, repair_step, 1.minutes()));
        let at = |from: u16| lone(node.clone()).policy(|policy| policy.windows = vec![window(from)]).lines();
        assert!(at(9).is_empty(), "{repair_step}");
        assert_eq!(at(8)[0], first, "{repair_step}");
        let drained = |from: u16| {
            let policy = |policy: &mut crate::policy::Policy| {
                policy.windows = vec![window(from)];
                policy.allow.drain = false;
            };
            lone(node.clone()).policy(policy).lines()
        };
        assert!(drained(9).is_empty(), "{repair_step}");
        assert_eq!(drained(8).len(), 2, "{repair_step}");
    }
}

#[test]
fn marking_does_not_wait_for_a_maintenance_window() {
    let window = Window {
        kind: WindowKind::Maintenance,
        pool: None,
        days: vec![Day::Monday],
        from: TimeOfDay(0),
        to: TimeOfDay(60),
        utc_offset_minutes: 0,
    };
    let cluster =
        lone(free("a").fresh().found(bad("dl", Severity::Reset))).policy(|policy| policy.windows = vec![window]);
    assert_eq!(cluster.lines()[1], "step a mark: confirmed");
}

#[test]
fn user_work_that_does_not_end_is_proposed_to_an_operator_once() {
    let out = || busy("a").fresh().out(Severity::Reboot, RepairStep::Reboot).since(25.hours());
    let mut undrained = lone(out()).policy(|policy| policy.allow.drain = false);
    assert_eq!(undrained.cycle(), ["propose a drain: not-allowed"]);
    assert!(undrained.cycle().is_empty());
    let mut cluster = lone(out());
    assert_eq!(cluster.cycle(), ["step a drain: case"]);
    assert!(cluster.cycle().is_empty());
    cluster.wait(25.hours());
    assert_eq!(cluster.cycle(), ["propose a drain: not-allowed"]);
    assert!(cluster.cycle().is_empty());
}

#[test]
fn a_proposed_reboot_is_detected_by_the_boot_id() {
    let node = free("a").fresh().machine("J1").boot("one").found(bad("dl", Severity::Reboot));
    let mut cluster = lone(node).policy(|policy| policy.allow.reboot = false);
    let lines: Vec<String> = (0..4).flat_map(|_| cluster.cycle()).collect();
    assert_eq!(lines.last().unwrap(), "propose a reboot: not-allowed");
    assert!(cluster.cycle().is_empty());
    std::sync::Arc::make_mut(cluster.record("a").node_mut().hardware.as_mut().unwrap()).boot_id = Some("two".into());
    assert_eq!(cluster.cycle(), ["settle done: rebooted"]);
    assert_eq!(cluster.cycle(), PROOF);
}

#[test]
fn a_proposed_step_is_taken_once_the_policy_allows_it() {
    let node = free("a").fresh().out(Severity::Reset, RepairStep::Reset).step(done(
        StepKind::SaveEvidence,
        RepairStep::Reset,
        1.minutes(),
    ));
    let proposed = node.step(step(StepKind::Reset, RepairStep::Reset, StepState::Proposed, 1.minutes()));
    assert_eq!(lone(proposed).lines(), ["step a reset: case", "move a repairing: case"]);
}

#[test]
fn a_policy_that_lists_no_way_back_hands_the_node_to_a_person() {
    let mut cluster = lone(free("a").fresh().found(bad("dl", Severity::Reset)))
        .policy(|policy| drop(policy.repair.steps.insert(Severity::Reset, vec![StepKind::Mark])));
    cluster.cycle();
    assert_eq!(cluster.cycle(), ["step a hand-over: handed-over", "move a out: handed-over"]);
}

#[test]
fn a_failed_replacement_is_handed_over() {
    let mut failed = step(StepKind::Replace, RepairStep::Replace, StepState::Failed, 1.minutes());
    failed.attempts = 2;
    let node = free("a").fresh().out(Severity::Isolate, RepairStep::Replace).step(failed);
    let node = node.step(done(StepKind::SaveEvidence, RepairStep::Replace, Span::ZERO));
    let cluster = lone(node).policy(|policy| policy.allow.drain = false);
    assert_eq!(cluster.lines(), ["step a hand-over: handed-over", "move a out: handed-over"]);
}

/// A leader that stopped between the replacement and its record left the step intended, perhaps for hours.
#[test]
fn a_replacement_that_an_earlier_leader_requested_is_repeated_under_its_id_and_never_sent_under_another() {
    let intended = step(StepKind::Replace, RepairStep::Replace, StepState::Intended, 3.hours());
    let op = intended.op;
    let node = free("a").fresh().out(Severity::Isolate, RepairStep::Replace).step(intended);
    let node = node.step(done(StepKind::SaveEvidence, RepairStep::Replace, Span::ZERO));
    let mut cluster = lone(node).policy(|policy| policy.allow.drain = false);
    let actions = cluster.plan().actions;
    let repeated =
        |action: &Action| matches!(action, Action::Step { step: StepKind::Replace, op: sent, .. } if *sent == op);
    assert_eq!(actions.iter().filter(|action| repeated(&action.value)).count(), 1, "{actions:?}");
    // It was repeated a minute ago, and the backend confirmed nothing.
    cluster.snapshot.planned_at = Some(NOW.minus(1.minutes()));
    let lines = cluster.lines();
    assert!(lines.contains(&"step a hand-over: handed-over".to_owned()), "{lines:?}");
    assert!(!lines.iter().any(|line| line.starts_with("step a replace")), "{lines:?}");
}

#[test]
fn escalation_continues_from_earlier_cases_of_the_same_hardware() {
    for (past, repair_step) in [
        (vec![], RepairStep::Reset),
        (vec![returned("J1", RepairStep::Reset, StepKind::Reset, 5.days())], RepairStep::Reboot),
        (vec![returned("J1", RepairStep::Reboot, StepKind::Reboot, 5.days())], RepairStep::Quarantine),
        (vec![returned("J1", RepairStep::Quarantine, StepKind::Reboot, 5.days())], RepairStep::Replace),
        (vec![returned("J1", RepairStep::Reset, StepKind::Reset, 31.days())], RepairStep::Reset),
        (vec![returned("J2", RepairStep::Reset, StepKind::Reset, 5.days())], RepairStep::Reset),
        (vec![returned("J1", RepairStep::Reset, StepKind::Requalify, 5.days())], RepairStep::Reset),
    ] {
        let mut cluster = lone(free("a").fresh().machine("J1").found(bad("dl", Severity::Reset)));
        for case in past.clone() {
            cluster = cluster.case(case);
        }
        assert_eq!(cluster.lines()[0], format!("open a {repair_step}: confirmed"), "{past:?}");
    }
}

#[test]
fn memory_lifts_a_case_and_never_lowers_it() {
    let cluster = lone(free("a").fresh().machine("J1").found(bad("dl", Severity::Isolate))).case(returned(
        "J1",
        RepairStep::Reset,
        StepKind::Reset,
        5.days(),
    ));
    assert_eq!(cluster.lines()[0], "open a replace: confirmed");
}

#[test]
fn a_case_belongs_to_the_hardware_or_without_an_id_to_the_name() {
    let hardware = |node: super::cluster::NodeFixture| {
        let plan = lone(node.fresh().found(bad("dl", Severity::Reset))).plan();
        let Action::OpenCase(case) = &plan.actions[0].value else { panic!("{plan:?}") };
        case.hardware.clone()
    };
    assert_eq!(hardware(free("a").machine("J1")), board("J1"));
    assert_eq!(hardware(free("a").was_machine("J1")), board("J1"));
    assert_eq!(hardware(free("a")).as_str(), "a");
}

#[test]
fn a_failed_mark_is_retried_with_exponential_backoff() {
    let mut failed = step(StepKind::Mark, RepairStep::Reset, StepState::Failed, 3.minutes());
    for (tries, due) in [(1, true), (2, false)] {
        failed.attempts = tries;
        let mut cluster = lone(free("a").fresh().out(Severity::Reset, RepairStep::Reset));
        cluster.record("a").node_mut().marks.ours.clear();
        cluster.snapshot.cases[0].steps = vec![failed.clone()];
        assert_eq!(!cluster.lines().is_empty(), due, "try {tries}");
    }
}

#[test]
fn a_case_of_another_node_is_not_touched() {
    let mut stranger = case_of(&lone(free("b").fresh()).record("b").clone(), Severity::Reset, RepairStep::Reset);
    stranger.opened = NOW.minus(3.days());
    let cluster = lone(free("a").fresh()).case(stranger);
    assert!(cluster.lines().is_empty());
}
