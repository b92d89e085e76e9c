//! From suspicion to a case: modes, permissions, confirmation, worsening.

use super::cluster::{Cluster, NOW, Spans, acting, bad, busy, cluster, free, unconfirmed, with_remedy};
use crate::{
    case::{RepairStep, StepKind},
    finding::{Remedy, Severity},
    policy::{Allow, Mode},
    snapshot::Capabilities,
};

fn found(mode: Mode, severity: Severity) -> Cluster {
    acting().policy(|policy| policy.mode = mode).fillers(20).node(free("a").fresh().found(bad("dl", severity)))
}

#[test]
fn observe_mode_records_a_suspect_and_changes_nothing_in_the_cluster() {
    for severity in Severity::ALL {
        assert_eq!(found(Mode::Observe, *severity).lines(), ["move a suspect: watched"], "{severity}");
    }
}

#[test]
fn what_is_only_worth_watching_is_never_marked() {
    for mode in Mode::ALL {
        assert_eq!(found(*mode, Severity::Monitor).lines(), ["move a suspect: watched"], "{mode}");
    }
}

#[test]
fn recommend_mode_marks_and_proposes_other_steps() {
    for (severity, repair_step, proposes) in [
        (Severity::Reset, RepairStep::Reset, StepKind::Reset),
        (Severity::Reboot, RepairStep::Reboot, StepKind::Reboot),
    ] {
        let mut cluster = found(Mode::Recommend, severity);
        let taken_out = [
            format!("open a {repair_step}: confirmed"),
            "step a mark: confirmed".into(),
            "move a quarantined: confirmed".into(),
        ];
        assert_eq!(cluster.cycle(), taken_out);
        assert_eq!(cluster.cycle(), ["step a keep-evidence: case"]);
        assert_eq!(cluster.cycle(), [format!("propose a {proposes}: not-allowed")]);
        assert!(cluster.cycle().is_empty(), "proposed once");
    }
    let mut cluster = found(Mode::Recommend, Severity::Isolate);
    cluster.cycle();
    assert_eq!(cluster.cycle(), ["step a hand-over: handed-over", "move a out: handed-over"]);
    assert!(cluster.cycle().is_empty());
}

#[test]
fn the_default_policy_only_marks_automatically() {
    let mut cluster = cluster().fillers(20).node(free("a").fresh().found(bad("dl", Severity::Reboot)));
    let mut steps: Vec<String> = Vec::new();
    for _ in 0..50 {
        steps.extend(cluster.cycle().into_iter().filter(|line| line.starts_with("step")));
        cluster.wait(1.hours());
    }
    assert_eq!(steps, ["step a mark: confirmed", "step a keep-evidence: case"]);
}

#[test]
fn act_mode_takes_only_allowed_steps() {
    let off = Allow { mark: true, drain: false, evict: false, reset: false, reboot: false, replace: false };
    for (severity, allow, does) in [
        (Severity::Reset, Allow { reset: true, ..off.clone() }, StepKind::Reset),
        (Severity::Reboot, Allow { reboot: true, ..off.clone() }, StepKind::Reboot),
        (Severity::Isolate, Allow { replace: true, ..off.clone() }, StepKind::Replace),
    ] {
        let mut allowed = found(Mode::Act, severity).policy(|policy| policy.allow = allow);
        let mut forbidden = found(Mode::Act, severity).policy(|policy| policy.allow = off.clone());
        let (mut did, mut did_not) = (Vec::new(), Vec::new());
        for _ in 0..4 {
            did.extend(allowed.cycle());
            did_not.extend(forbidden.cycle());
        }
        let step = format!("step a {does}: case");
        assert!(did.contains(&step), "{did:?}");
        assert!(!did_not.contains(&step), "{did_not:?}");
        assert!(did.iter().chain(&did_not).all(|line| !line.contains("drain")), "{did:?}");
    }
}

#[test]
fn steps_that_the_backend_does_not_support_are_left_to_an_operator() {
    let mut cluster = found(Mode::Act, Severity::Reset).caps(Capabilities { reset: false, ..Capabilities::ALL });
    let lines: Vec<String> = (0..4).flat_map(|_| cluster.cycle()).collect();
    assert!(lines.contains(&"propose a reset: not-allowed".to_owned()), "{lines:?}");
    assert!(!lines.contains(&"step a reset: case".to_owned()), "{lines:?}");
}

#[test]
fn without_permission_to_mark_the_node_stays_in_service_with_a_proposal() {
    let mut cluster = found(Mode::Act, Severity::Reset).policy(|policy| policy.allow.mark = false);
    let proposal = ["open a reset: confirmed", "propose a mark: not-allowed", "move a suspect: confirmed"];
    assert_eq!(cluster.cycle(), proposal);
    assert!(cluster.cycle().is_empty(), "proposed once");
    let mut allowed = cluster.clone().policy(|policy| policy.allow.mark = true);
    assert_eq!(allowed.cycle(), ["step a mark: now-allowed", "move a quarantined: now-allowed"]);
    cluster.record("a").findings.clear();
    assert_eq!(cluster.cycle(), ["close a withdrawn: cleared", "move a in-service: cleared"]);
}

#[test]
fn a_proposed_case_continues_when_its_node_is_marked() {
    let mut cluster = found(Mode::Act, Severity::Reset).policy(|policy| policy.allow.mark = false);
    cluster.cycle();
    cluster.record("a").node_mut().marks.ours.push(super::cluster::unhealthy_mark());
    assert_eq!(cluster.cycle(), ["move a quarantined: marked"]);
}

#[test]
fn observe_mode_sets_no_mark_for_an_open_case() {
    let mut cluster = found(Mode::Act, Severity::Reset);
    cluster.cycle();
    // The mark was never set.
    cluster.record("a").node_mut().marks.ours.clear();
    let case = &mut cluster.snapshot.cases[0];
    case.steps[0].state = crate::case::StepState::Intended;
    assert_eq!(cluster.lines(), ["step a mark: case"]);
    let observing = cluster.policy(|policy| policy.mode = Mode::Observe);
    assert_eq!(observing.lines(), ["propose a mark: not-allowed"]);
}

#[test]
fn an_operators_quarantine_is_not_marked_in_observe_mode() {
    let mut cluster = found(Mode::Observe, Severity::Monitor)
        .asks(crate::snapshot::CommandKind::Quarantine { node: super::cluster::name("a"), evict: false });
    for _ in 0..5 {
        let lines = cluster.cycle();
        assert!(lines.iter().all(|line| !line.starts_with("step a mark")), "{lines:?}");
    }
}

#[test]
fn a_failure_is_confirmed_when_seen_often_enough() {
    let mut cluster = acting().fillers(20).node(busy("a").fresh().found(unconfirmed("dl", Severity::Isolate)));
    assert_eq!(cluster.cycle(), ["move a suspect: unconfirmed"]);
    assert!(cluster.cycle().is_empty());
    cluster.record("a").findings[0].sightings = 2;
    assert_eq!(cluster.lines()[0], "open a replace: confirmed");
}

#[test]
fn a_suspicion_ends_when_its_cause_is_gone_or_nothing_new_supports_it() {
    let mut cluster = found(Mode::Act, Severity::Monitor);
    cluster.cycle();
    let mut cleared = cluster.clone();
    cleared.record("a").findings.clear();
    assert_eq!(cleared.lines(), ["move a in-service: cleared"]);
    cluster.wait(6.days());
    assert!(!cluster.lines().contains(&"move a in-service: cleared".to_owned()));
    cluster.wait(2.days());
    assert!(cluster.lines().contains(&"move a in-service: cleared".to_owned()));
}

#[test]
fn the_worst_confirmed_finding_sets_the_rung() {
    let node = free("a")
        .fresh()
        .found(bad("dl", Severity::Reset))
        .found(bad("nccl", Severity::Reboot))
        .found(unconfirmed("storage", Severity::Isolate));
    let cluster = acting().fillers(20).node(node);
    assert_eq!(cluster.lines()[0], "open a reboot: confirmed");
    let super::super::Action::OpenCase(case) = &cluster.plan().actions[0].value else { panic!() };
    assert_eq!(case.findings.len(), 3, "all are kept");
    assert_eq!((case.severity, case.opened), (Severity::Reboot, NOW));
}

#[test]
fn severity_and_not_the_remedy_of_the_rule_decides() {
    let node = free("a").fresh().found(with_remedy(bad("dl", Severity::Monitor), Remedy::Replace));
    assert_eq!(acting().fillers(20).node(node).lines(), ["move a suspect: watched"]);
}

#[test]
fn a_new_worse_finding_raises_the_repair_step_of_a_case() {
    let node = free("a").fresh().found(bad("dl", Severity::Reset)).out(Severity::Reset, RepairStep::Reset);
    let mut cluster = acting().fillers(20).node(node);
    cluster.record("a").findings.push(bad("nccl", Severity::Isolate));
    assert_eq!(cluster.cycle(), ["worsen a: worsened", "escalate replace: worsened"]);
    assert!(!cluster.lines().iter().any(|line| line.starts_with("worsen")), "said once");
}

#[test]
fn a_finding_not_worse_or_not_confirmed_does_not_raise_a_case() {
    for more in [bad("nccl", Severity::Reset), bad("nccl", Severity::Monitor), unconfirmed("nccl", Severity::Isolate)] {
        let node = free("a").fresh().found(more.clone()).out(Severity::Reset, RepairStep::Reset);
        let cluster = acting().fillers(20).node(node);
        assert_eq!(cluster.lines(), ["step a keep-evidence: case"], "{more:?}");
    }
}
