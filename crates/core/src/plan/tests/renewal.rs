//! Renewal: slots that no due test needs are used to test free nodes before their results become stale.

use super::{
    super::SkipReason,
    cluster::{Cluster, NOW, Spans, bad, busy, cluster, free, test},
};
use crate::finding::{Severity, Verdict};

/// A test that is due after six hours, and one that is due after a week; results are renewed a day ahead.
fn ahead() -> Cluster {
    let mut sweep = test("sweep");
    sweep.cutoff = 6.hours();
    cluster().tests(vec![sweep, test("weekly")]).policy(|policy| policy.limits.renew_ahead = 1.days())
}

fn tested(name: &str, sweep: i64, weekly: i64) -> super::cluster::NodeFixture {
    free(name).result("sweep", Verdict::Pass, sweep.minutes()).result("weekly", Verdict::Pass, weekly.hours())
}

#[test]
fn a_free_node_is_tested_a_day_ahead_but_not_in_the_first_sixth_of_a_period() {
    for (sweep, weekly, chosen) in [
        (59, 24, vec![]),
        (60, 24, vec!["a sweep"]),
        (10, 143, vec![]),
        (10, 144, vec!["a weekly"]),
        (60, 144, vec!["a sweep+weekly"]),
        // Along with a due test, the others are renewed in the same job.
        (10, 168, vec!["a weekly"]),
        (60, 168, vec!["a sweep+weekly"]),
    ] {
        assert_eq!(ahead().node(tested("a", sweep, weekly)).chosen(), chosen, "{sweep} minutes, {weekly} hours");
    }
    assert!(ahead().node(busy("a").stale(3.hours())).chosen().is_empty(), "free nodes only");
}

#[test]
fn due_nodes_come_first_and_a_node_that_is_not_renewed_is_fresh() {
    let cluster = ahead()
        .policy(|policy| policy.limits.jobs = 2.into())
        .node(tested("a", 120, 24))
        .node(tested("b", 180, 24))
        .node(tested("c", 361, 24));
    assert_eq!(cluster.chosen(), ["c sweep", "b sweep"]);
    let reasons: Vec<_> =
        cluster.plan().actions.into_iter().map(|action| (action.code.to_string(), action.text)).collect();
    assert_eq!(reasons[0], ("stale".to_owned(), "last result 6h 1m ago".to_owned()));
    assert_eq!(reasons[1], ("renewal".to_owned(), "last result 3h ago; renewed while the node is free".to_owned()));
    assert_eq!(cluster.passed_over("a"), Some(SkipReason::Fresh { until: NOW.plus(4.hours()) }));
}

#[test]
fn nothing_is_renewed_within_a_daily_budget_or_with_the_setting_zero() {
    let node = || tested("a", 120, 160);
    assert_eq!(ahead().node(node()).chosen(), ["a sweep+weekly"]);
    assert!(ahead().policy(|policy| policy.limits.node_hours_per_day = Some(48.0)).node(node()).chosen().is_empty());
    assert!(ahead().policy(|policy| policy.limits.renew_ahead = 0.days()).node(node()).chosen().is_empty());
}

#[test]
fn only_a_pass_or_fail_is_renewed() {
    for (verdict, chosen) in
        [(Verdict::Pass, vec!["a sweep"]), (Verdict::Fail, vec!["a sweep"]), (Verdict::NotApplicable, vec![])]
    {
        let node = free("a").result("sweep", verdict, 3.hours()).result("weekly", Verdict::Pass, 1.days());
        assert_eq!(ahead().node(node).chosen(), chosen, "{verdict}");
    }
}

#[test]
fn where_a_fault_is_suspected_only_the_due_tests_run() {
    let suspect = tested("a", 120, 200).suspect().found(bad("weekly", Severity::Monitor));
    assert_eq!(ahead().node(suspect).chosen(), ["a weekly"]);
    let failed = tested("a", 120, 200).user_work_failed(1, 1.hours());
    assert_eq!(ahead().node(failed).chosen(), ["a weekly"]);
    let fresh = tested("a", 120, 24).user_work_failed(1, 1.hours());
    assert_eq!(ahead().node(fresh).chosen(), ["a sweep"], "nothing is due that would have to wait");
}

#[test]
fn while_nodes_wait_for_slots_runs_are_short_and_long_tests_come_last() {
    let [mut sweep, mut weekly, mut long] = ["sweep", "weekly", "long"].map(test);
    sweep.typical_duration = 1.minutes();
    weekly.typical_duration = 2.minutes();
    long.typical_duration = 10.minutes();
    let with_slots = |slots: u32| {
        cluster()
            .tests(vec![long.clone(), sweep.clone(), weekly.clone()])
            .policy(|policy| policy.limits.jobs = slots.into())
            .node(free("a").result("sweep", Verdict::Pass, 1.hours()).result("weekly", Verdict::Pass, 1.hours()))
            .node(free("b"))
            .node(free("c"))
    };
    assert_eq!(with_slots(3).chosen(), ["b sweep+weekly+long", "c sweep+weekly+long", "a long"]);
    assert_eq!(with_slots(2).chosen(), ["b sweep+weekly", "c sweep+weekly"]);
    let suspect = with_slots(2).node(free("d").suspect().found(bad("long", Severity::Monitor)));
    assert_eq!(suspect.chosen()[0], "d sweep+weekly+long", "a suspect gets all its tests");
}
