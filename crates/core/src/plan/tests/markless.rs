//! Clusters that cannot keep users off a node: the node is excluded from what we offer, proved past the cluster if
//! there is a path, and replaced, by the controller or by hand.

use super::cluster::{Cluster, NodeFixture, Spans, acting, bad, busy, free, running, unknown};
use crate::{
    case::RepairStep,
    finding::{Severity, Verdict},
    node::{NodeOverrides, Occupancy},
    snapshot::Capabilities,
};

const REPLACES: Capabilities = Capabilities { replace: true, ..Capabilities::NONE };

fn lone(node: NodeFixture) -> Cluster {
    acting().fillers(20).node(node).caps(REPLACES)
}

fn aside() -> NodeOverrides {
    NodeOverrides { out_of_band: true, ..NodeOverrides::default() }
}

fn cycles(cluster: &mut Cluster, count: usize) -> Vec<String> {
    (0..count).flat_map(|_| cluster.cycle()).collect()
}

#[test]
fn a_bad_node_is_excluded_without_a_mark_and_replaced() {
    let mut cluster = lone(free("a").fresh().found(bad("dl", Severity::Isolate)));
    let expected = [
        "open a replace: confirmed",
        "move a quarantined: confirmed",
        "step a keep-evidence: case",
        "step a replace: case",
        "move a repairing: case",
        "move a out: replacing",
    ];
    assert_eq!(cycles(&mut cluster, 5), expected);
}

#[test]
fn unsupported_repair_steps_are_skipped() {
    let mut cluster = lone(free("a").fresh().found(bad("dl", Severity::Reset)));
    let lines = cycles(&mut cluster, 6);
    let climbed: Vec<&String> = lines.iter().filter(|line| line.starts_with("escalate")).collect();
    assert_eq!(climbed, ["escalate reboot: did-not-help", "escalate quarantine: did-not-help"]);
    assert!(lines.contains(&"submit a dl: proof".to_owned()), "requalification comes before replacement: {lines:?}");
    assert!(!lines.iter().any(|line| line.starts_with("propose")), "{lines:?}");
}

#[test]
fn a_node_with_user_work_waits_until_it_ends() {
    let mut cluster = lone(busy("a").fresh().found(bad("dl", Severity::Isolate)));
    assert_eq!(cycles(&mut cluster, 4), ["open a replace: confirmed", "move a quarantined: confirmed"]);
    // It does not answer: users may still be on it.
    cluster.record("a").node_mut().occupancy = Occupancy::Unknown { why: "no answer".into() };
    assert_eq!(cycles(&mut cluster, 3), [""; 0]);
    cluster.record("a").node_mut().overrides = Some(NodeOverrides { vacant: true, ..NodeOverrides::default() }.into());
    assert!(
        cycles(&mut cluster, 2).contains(&"step a replace: case".to_owned()),
        "the cluster reports that it runs no work"
    );
}

#[test]
fn manual_replacement_is_handed_over_with_instructions() {
    let by_hand =
        NodeOverrides { manual_replacement: Some("take it out of `hosts`".to_owned()), ..NodeOverrides::default() };
    let mut cluster = lone(free("a").fresh().found(bad("dl", Severity::Isolate)).apart(by_hand.clone()));
    assert_eq!(cluster.cycle(), ["open a replace: confirmed", "move a quarantined: confirmed"]);
    assert_eq!(cluster.lines(), ["step a hand-over: handed-over", "move a out: handed-over"]);
    assert!(cluster.plan().actions.iter().all(|action| action.text == "take it out of `hosts`"));
    // The reset is left to an operator too: the case does not escalate to a replacement that the controller cannot do.
    let mut cluster = lone(free("a").fresh().found(bad("dl", Severity::Reset)).apart(by_hand));
    assert_eq!(cycles(&mut cluster, 4).last().unwrap(), "propose a reset: not-allowed");
}

#[test]
fn without_permission_to_mark_the_step_is_proposed() {
    let mut cluster = lone(free("a").fresh().found(bad("dl", Severity::Isolate)));
    cluster = cluster.policy(|policy| policy.allow.mark = false);
    assert!(cluster.cycle().contains(&"propose a mark: not-allowed".to_owned()));
    cluster = cluster.policy(|policy| policy.allow.mark = true);
    assert_eq!(cluster.cycle(), ["move a quarantined: now-allowed"]);
}

#[test]
fn only_nodes_with_a_case_are_requalified_out_of_band() {
    let out = || unknown("a").fresh().excluded(Severity::Isolate, RepairStep::Quarantine);
    assert!(!lone(out()).lines().contains(&"submit a dl: proof".to_owned()), "there is no way to it");
    assert!(lone(out().apart(aside())).lines().contains(&"submit a dl: proof".to_owned()));
    let held = out().apart(aside()).held("ann", None);
    assert!(!lone(held).lines().contains(&"submit a dl: proof".to_owned()));
    // These have no case: they are never tested past the cluster, however stale.
    for stale in [unknown("a").stale(30.days()), unknown("a").suspect().found(bad("dl", Severity::Monitor))] {
        assert!(!lone(stale.apart(aside())).lines().iter().any(|line| line.starts_with("submit")));
    }
}

#[test]
fn requalification_past_the_cluster_ends_when_a_user_arrives_and_returns_a_healthy_node() {
    let node = unknown("a").fresh().excluded(Severity::Isolate, RepairStep::Quarantine).apart(aside());
    let mut cluster = lone(node.clone());
    cluster.cycle();
    cluster.ends("a", Verdict::Pass);
    assert_eq!(cluster.cycle(), ["close a returned: proved", "move a in-service: proved"]);
    let mut taken = lone(node);
    taken.cycle();
    taken.snapshot.runs[0].job = running(1.minutes());
    assert_eq!(taken.lines(), [""; 0], "unknown occupancy is no reason to stop");
    taken.record("a").node_mut().occupancy = Occupancy::Busy { by: "process 7 (train) holds a GPU".into() };
    assert!(taken.lines()[0].starts_with("cancel"), "{:?}", taken.lines());
}
