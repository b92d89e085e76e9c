//! Which nodes are tested, in which order, and the reasons of those that are not.

use super::{
    super::SkipReason,
    cluster::{NOW, Spans, acting, bad, busy, cluster, free, name, test, unconfirmed, unknown},
};
use crate::{
    finding::{Severity, Verdict},
    ids::PoolName,
    lifecycle::NodeState,
    run::{Purpose, RunState},
    time::Span,
};

#[test]
fn only_free_nodes_are_chosen_and_every_other_says_why_not() {
    let cluster = cluster()
        .node(free("a"))
        .node(busy("b"))
        .node(unknown("c"))
        .node(free("d").cordoned_by("bob"))
        .node(free("e").backing_off(5.minutes()))
        .node(free("f").held("ann", None).state(NodeState::Held { by: "ann".into() }))
        .node(free("g").out(Severity::Isolate, crate::case::RepairStep::Reset));
    let plan = cluster.plan();
    assert_eq!(cluster.chosen(), ["a dl"]);
    let why = |node: &str| cluster.passed_over(node).unwrap();
    assert_eq!(why("b"), SkipReason::Busy { by: "user job 7".into() });
    assert_eq!(why("c"), SkipReason::OccupancyUnknown { why: "no answer".into() });
    assert_eq!(why("d"), SkipReason::ForeignMark { by: "bob".into(), text: "moving racks".into() });
    assert_eq!(why("e"), SkipReason::BackingOff { until: NOW.plus(5.minutes()) });
    assert_eq!(why("f"), SkipReason::Held { by: "ann".into() });
    assert!(plan.skipped.iter().all(|(node, _)| *node != name("a")));
}

#[test]
fn a_chosen_node_gets_a_planned_run_with_its_reason() {
    let plan = cluster().node(free("a").stale(8.days())).plan();
    let [action] = &plan.actions[..] else { panic!("{plan:?}") };
    assert_eq!(action.code.as_str(), "stale");
    assert_eq!(action.text, "last result 8d ago");
    let super::super::Action::Submit(run) = &action.value else { panic!("{action:?}") };
    assert_eq!((run.state.clone(), run.planned, run.limit), (RunState::Planned, NOW, 20.minutes()));
    assert_eq!(run.purpose.value, Purpose::Validation);
}

#[test]
fn staleness_is_counted_per_test_with_a_cut_off_of_its_own() {
    let mut short = test("storage");
    short.cutoff = 1.days();
    let cluster = cluster().tests(vec![test("dl"), short, test("nccl")]);
    for (past, chosen) in [
        (vec![("dl", 6), ("storage", 0), ("nccl", 6)], vec![]),
        (vec![("dl", 6), ("storage", 2), ("nccl", 6)], vec!["a storage"]),
        (vec![("dl", 8), ("storage", 0), ("nccl", 6)], vec!["a dl"]),
        (vec![("dl", 8), ("storage", 2), ("nccl", 6)], vec!["a dl+storage"]),
        (vec![("dl", 1), ("storage", 0)], vec!["a nccl"]),
        (vec![], vec!["a dl+storage+nccl"]),
    ] {
        let node = past.iter().fold(free("a"), |node, (test, days)| node.result(test, Verdict::Pass, days.days()));
        assert_eq!(cluster.clone().node(node).chosen(), chosen, "{past:?}");
    }
}

#[test]
fn a_fresh_node_says_until_when_it_is() {
    let cluster = cluster().node(free("a").stale(3.days()));
    assert_eq!(cluster.passed_over("a"), Some(SkipReason::Fresh { until: NOW.plus(4.days()) }));
    let just = super::cluster::cluster().node(free("a").stale(7.days()));
    assert_eq!(just.chosen(), ["a dl"]);
}

#[test]
fn a_failing_result_is_as_fresh_as_a_passing_one() {
    let cluster = cluster().node(free("a").result("dl", Verdict::Fail, 1.days()));
    assert!(cluster.chosen().is_empty());
}

#[test]
fn nodes_with_job_failures_are_tested_first_among_equally_stale_ones_by_owners() {
    let cluster = cluster()
        .policy(|policy| policy.limits.jobs = 2.into())
        .node(free("a").stale(9.days()))
        .node(free("b").stale(8.days()).user_work_failed(1, 2.hours()))
        .node(free("c").stale(8.days()).user_work_failed(3, 3.hours()))
        .node(free("d"));
    let plan = cluster.plan();
    assert_eq!(cluster.chosen(), ["c dl", "b dl"]);
    let reasons: Vec<_> = plan.actions.iter().map(|action| (action.code.as_str(), action.text.as_str())).collect();
    let three = "3 pieces of user work of 3 owners failed here recently; last result 8d ago";
    let one = "user work failed here recently; last result 8d ago";
    assert_eq!(reasons, [("user-work-failed", three), ("user-work-failed", one)]);
}

#[test]
fn a_fresh_node_is_retested_only_after_job_failures_of_several_owners() {
    let tested = |owners, failed: Span, past: Span| {
        let node = free("a").result("dl", Verdict::Pass, past).user_work_failed(owners, failed);
        !cluster().node(node).chosen().is_empty()
    };
    assert!(tested(2, 1.hours(), 2.days()));
    assert!(!tested(1, 1.hours(), 2.days()), "one owner's work may fail by its own fault");
    assert!(!tested(2, 2.hours(), 1.hours()), "it was tested since");
    let never = cluster().policy(|policy| policy.user_work.retest = 0.0);
    let node = free("a").result("dl", Verdict::Pass, 2.days()).user_work_failed(9, 1.hours());
    assert!(never.node(node).chosen().is_empty());
}

#[test]
fn a_case_keeps_the_user_work_that_had_failed() {
    let node = free("a").fresh().found(bad("dl", Severity::Isolate)).user_work_failed(2, 1.hours());
    let plan = acting().node(node).plan();
    let opened = plan.actions.iter().find_map(|action| match &action.value {
        super::super::Action::OpenCase(case) => Some(case.job_failures.len()),
        _ => None,
    });
    assert_eq!(opened, Some(2), "{plan:?}");
}

#[test]
fn suspects_come_first_then_the_stalest_and_never_tested_is_oldest() {
    let nodes = [
        free("a").stale(8.days()),
        free("b").stale(30.days()),
        free("c"),
        free("d").stale(9.days()).suspect().found(bad("dl", Severity::Monitor)),
        free("e").stale(20.days()).suspect().found(bad("dl", Severity::Monitor)),
    ];
    let mut cluster = cluster().policy(|policy| policy.limits.jobs = 1.into());
    for node in nodes {
        cluster = cluster.node(node);
    }
    let mut order = Vec::new();
    for _ in 0..5 {
        let chosen = cluster.chosen();
        let node = chosen[0].split(' ').next().unwrap().to_owned();
        cluster.cycle();
        cluster.ends(&node, Verdict::Pass);
        order.push(node);
    }
    assert_eq!(order, ["e", "d", "c", "b", "a"]);
}

#[test]
fn equally_ranked_nodes_are_chosen_by_name() {
    let mut cluster = cluster().policy(|policy| policy.limits.jobs = 2.into());
    for node in ["d", "b", "a", "c"] {
        cluster = cluster.node(free(node).stale(8.days()));
    }
    assert_eq!(cluster.chosen(), ["a dl", "b dl"]);
    assert_eq!(cluster.passed_over("c"), Some(SkipReason::WaitingForSlot));
}

#[test]
fn an_inconclusive_test_is_retried_with_exponential_backoff() {
    for (misses, wait) in [(1, 30.minutes()), (2, 1.hours()), (3, 2.hours()), (9, 1.days())] {
        for (ago, due) in [(Span::from_millis(wait.millis() - 1), false), (wait, true)] {
            let mut node = free("a").stale(8.days());
            for miss in 0..misses {
                node = node.result("dl", Verdict::Inconclusive, Span::from_millis(ago.millis() + miss));
            }
            let cluster = cluster().node(node);
            assert_eq!(!cluster.chosen().is_empty(), due, "{misses} misses, {ago} ago");
        }
    }
}

#[test]
fn a_test_that_stays_inconclusive_does_not_starve_the_others() {
    let mut cluster = cluster()
        .policy(|policy| policy.limits.jobs = 1.into())
        .node(free("never-says-anything"))
        .node(free("old").stale(8.days()))
        .node(free("older").stale(9.days()));
    let mut order = Vec::new();
    for _ in 0..4 {
        // A day passes, in which every back-off ends.
        cluster.wait(1.days());
        let node = cluster.chosen()[0].split(' ').next().unwrap().to_owned();
        cluster.cycle();
        cluster.ends(&node, if node == "never-says-anything" { Verdict::Inconclusive } else { Verdict::Pass });
        order.push(node);
    }
    assert_eq!(order, ["never-says-anything", "older", "old", "never-says-anything"]);
}

#[test]
fn an_inconclusive_result_changes_no_freshness() {
    let stale = free("a").stale(8.days()).result("dl", Verdict::Inconclusive, 1.hours());
    assert_eq!(cluster().node(stale).chosen(), ["a dl"]);
    let fresh = free("a").stale(2.days()).result("dl", Verdict::Inconclusive, 1.hours());
    assert!(cluster().node(fresh).chosen().is_empty());
}

#[test]
fn not_applicable_is_valid_until_the_cutoff() {
    for (ago, chosen) in [(6.days(), 0), (8.days(), 1)] {
        let cluster = cluster().node(free("a").result("dl", Verdict::NotApplicable, ago));
        assert_eq!(cluster.chosen().len(), chosen, "{ago}");
    }
}

#[test]
fn an_unconfirmed_failure_is_repeated_soon_as_a_confirmation() {
    let node = |ago| free("a").suspect().result("dl", Verdict::Fail, ago).found(unconfirmed("dl", Severity::Reset));
    assert!(cluster().node(node(9.minutes())).chosen().is_empty());
    assert_eq!(cluster().node(node(10.minutes())).lines(), ["submit a dl: unconfirmed"]);
}

#[test]
fn an_inconclusive_confirmation_is_retried_soon() {
    let node = |ago: Span| {
        free("a")
            .suspect()
            .result("dl", Verdict::Fail, 2.hours())
            .result("dl", Verdict::Inconclusive, ago)
            .found(unconfirmed("dl", Severity::Reset))
    };
    assert!(cluster().node(node(29.minutes())).chosen().is_empty());
    assert_eq!(cluster().node(node(30.minutes())).chosen(), ["a dl"]);
}

#[test]
fn a_monitored_finding_is_tested_again_every_day() {
    let node = |ago| free("a").suspect().result("dl", Verdict::Fail, ago).found(bad("dl", Severity::Monitor));
    assert!(cluster().node(node(23.hours())).chosen().is_empty());
    assert_eq!(cluster().node(node(24.hours())).lines(), ["submit a dl: suspect"]);
}

#[test]
fn a_node_to_which_no_test_applies_is_skipped_with_that_reason() {
    let mut only = test("dl");
    only.pools = Some(vec![PoolName::new("other").unwrap()]);
    let cluster = cluster().tests(vec![only]).node(free("a")).node(free("b").pool("other"));
    assert_eq!(cluster.chosen(), ["b dl"]);
    assert_eq!(cluster.passed_over("a"), Some(SkipReason::NothingApplies));
}

#[test]
fn a_node_that_backed_off_long_enough_is_chosen() {
    let cluster = cluster().node(free("a").backing_off(Span::ZERO));
    assert_eq!(cluster.chosen(), ["a dl"]);
}

#[test]
fn no_validation_is_planned_on_a_node_that_is_taken_out_in_the_same_plan() {
    let lines = acting().fillers(20).node(free("a").found(bad("dl", Severity::Reset))).lines();
    assert_eq!(lines, ["open a reset: confirmed", "step a mark: confirmed", "move a quarantined: confirmed"]);
}
