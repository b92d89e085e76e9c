//! The incremental planner gives the same plans as planning from scratch, whatever happened in between.

use std::collections::BTreeMap;

use proptest::{collection::vec, prelude::*};

use super::{
    super::{Planner, SkipReason, plan},
    cluster::{Cluster, NOW, Spans, cluster, free, name},
    model,
    random::{a_cluster, an_event, apply_event},
};
use crate::{ids::NodeName, snapshot::Snapshot};

/// Passes the differences of the snapshot to the planner, as the engine does.
fn update_planner(planner: &mut Planner, snapshot: &Snapshot) {
    for (index, record) in snapshot.nodes.iter().enumerate() {
        let known = &planner.snapshot().nodes[index];
        if known == record {
            continue;
        }
        let mut only_report = known.clone();
        only_report.last_report = record.last_report;
        if only_report == *record {
            planner.set_last_report(index, record.last_report);
        } else {
            assert!(planner.set_node(record.clone()));
        }
    }
    planner.update_cluster(|rest| {
        rest.runs.clone_from(&snapshot.runs);
        rest.cases.clone_from(&snapshot.cases);
        *rest.recent = snapshot.recent.clone();
        *rest.spent = snapshot.spent;
        *rest.breaker = snapshot.breaker.clone();
        rest.pauses.clone_from(&snapshot.pauses);
        rest.requests.clone_from(&snapshot.commands);
        *rest.silence_reported = snapshot.silence_reported;
    });
}

/// Plans both ways, compares, and executes the plan.
fn cycle(planner: &mut Planner, cluster: &mut Cluster, reported: &mut BTreeMap<NodeName, SkipReason>) {
    let mut ids = cluster.ids.clone();
    let fresh = plan(&cluster.snapshot, &mut cluster.ids);
    let incremental = planner.plan(cluster.snapshot.at, &mut ids);
    assert_eq!(incremental.actions, fresh.actions);
    let reasons: BTreeMap<NodeName, SkipReason> = fresh.skipped.iter().cloned().collect();
    for record in &cluster.snapshot.nodes {
        let node = &record.node.name;
        assert_eq!(planner.skip_reason(node).as_ref(), reasons.get(node), "{node}");
    }
    // Accumulated changes give the same reasons.
    reported.extend(incremental.skipped);
    for (node, why) in &reasons {
        assert_eq!(reported.get(node), Some(why), "{node}");
    }
    model::carry_out(&mut cluster.snapshot, &fresh.actions);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn after_any_changes_the_incremental_plan_equals_one_from_scratch(
        mut cluster in a_cluster(),
        story in vec(vec(an_event(), 0..4), 1..25),
    ) {
        let mut planner = Planner::new(cluster.snapshot.clone());
        let mut reported = BTreeMap::new();
        cycle(&mut planner, &mut cluster, &mut reported);
        for chapter in &story {
            for event in chapter {
                apply_event(&mut cluster, event);
            }
            update_planner(&mut planner, &cluster.snapshot);
            cycle(&mut planner, &mut cluster, &mut reported);
        }
    }
}

#[test]
fn only_changed_skip_reasons_are_returned() {
    let cluster = cluster().node(free("a").stale(3.days())).node(free("b").stale(6.days()));
    let mut planner = Planner::new(cluster.snapshot.clone());
    let mut ids = cluster.ids.clone();
    assert_eq!(planner.plan(NOW, &mut ids).skipped.len(), 2);
    assert!(planner.plan(NOW.plus(1.hours()), &mut ids).skipped.is_empty());
    let mut record = cluster.snapshot.nodes[0].clone();
    record.node_mut().occupancy = crate::node::Occupancy::Busy { by: "user job 9".into() };
    planner.set_node(record);
    let changed = planner.plan(NOW.plus(2.hours()), &mut ids).skipped;
    assert_eq!(changed, [(name("a"), SkipReason::Busy { by: "user job 9".into() })]);
}

#[test]
fn time_alone_makes_a_node_due() {
    let cluster = cluster().node(free("a").stale(6.days()));
    let (mut planner, mut ids) = (Planner::new(cluster.snapshot), cluster.ids);
    assert!(planner.plan(NOW, &mut ids).actions.is_empty());
    assert_eq!(planner.plan(NOW.plus(1.days()), &mut ids).actions.len(), 1);
}

#[test]
fn a_clock_that_jumps_back_makes_a_due_node_fresh_again() {
    let cluster = cluster().node(free("a").stale(8.days())).policy(|policy| policy.limits.jobs = 0.into());
    let (mut planner, mut ids) = (Planner::new(cluster.snapshot), cluster.ids);
    planner.plan(NOW, &mut ids);
    assert_eq!(planner.skip_reason(&name("a")), Some(SkipReason::WaitingForSlot));
    planner.plan(NOW.minus(2.days()), &mut ids);
    assert_eq!(planner.skip_reason(&name("a")), Some(SkipReason::Fresh { until: NOW.minus(1.days()) }));
}

#[test]
fn an_unknown_node_or_a_changed_pool_needs_a_new_planner() {
    let cluster = cluster().node(free("a"));
    let mut planner = Planner::new(cluster.snapshot.clone());
    let mut record = cluster.snapshot.nodes[0].clone();
    record.node_mut().pool = super::cluster::pool("other");
    assert!(!planner.set_node(record.clone()));
    record.node_mut().name = name("b");
    assert!(!planner.set_node(record));
}
