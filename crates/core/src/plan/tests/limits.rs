//! Concurrent jobs in total, per pool, per test and per mount; the daily budget; windows and pauses.

use super::{
    super::SkipReason,
    cluster::{Cluster, NOW, Spans, cluster, free, pending, pool, run, running, test, test_id, unknown},
};
use crate::{
    finding::Verdict,
    policy::{Day, TimeOfDay, Window, WindowKind},
    run::{CancelReason, ObservedJobState},
};

fn many(cluster: Cluster, pool: &str, count: usize) -> Cluster {
    (0..count).fold(cluster, |cluster, n| cluster.node(free(&format!("{pool}{n}")).pool(pool)))
}

#[test]
fn no_more_than_five_jobs_at_a_time_by_default_and_running_ones_count() {
    let cluster = many(cluster(), "a", 8);
    assert_eq!(cluster.chosen().len(), 5);
    assert_eq!(cluster.passed_over("a7"), Some(SkipReason::WaitingForSlot));
    let cluster = cluster.run(run("a0", &["dl"], running(1.minutes()))).run(run("a1", &["dl"], pending(1.minutes())));
    assert_eq!(cluster.chosen(), ["a2 dl", "a3 dl", "a4 dl"]);
}

#[test]
fn a_job_that_cannot_be_cancelled_frees_its_slot_eventually() {
    let stuck = |ago: i64| {
        many(cluster().policy(|policy| policy.limits.jobs = 1.into()), "a", 2)
            .run(run("a0", &["dl"], running(2.hours())))
            .cancelling(CancelReason::OverTimeLimit, ago.minutes())
    };
    assert!(stuck(14).chosen().is_empty());
    assert_eq!(stuck(15).chosen(), ["a1 dl"]);
}

#[test]
fn runs_on_hosts_that_do_not_answer_free_their_slots_eventually() {
    let cluster = |cancelled: Option<i64>| {
        let nodes = (0..5).fold(cluster(), |cluster, n| cluster.node(unknown(&format!("a{n}"))));
        (0..5).fold(nodes.node(free("b")), |cluster, n| {
            let mut active = run(&format!("a{n}"), &["dl"], ObservedJobState::Unknown { why: "no answer".into() });
            (active.run.planned, active.started) = (NOW.minus(1.hours()), Some(NOW.minus(1.hours())));
            let cluster = cluster.run(active);
            match cancelled {
                Some(ago) => cluster.cancelling(CancelReason::OverTimeLimit, ago.minutes()),
                None => cluster,
            }
        })
    };
    assert_eq!(cluster(None).lines(), ["cancel: over-time-limit"; 5]);
    assert!(cluster(Some(14)).lines().is_empty());
    assert_eq!(cluster(Some(15)).chosen(), ["b dl"]);
}

#[test]
fn a_pool_has_its_own_limit() {
    let cluster = cluster().policy(|policy| policy.limits.pools = [(pool("a"), 2)].into());
    let cluster = many(many(cluster, "a", 4), "b", 4);
    assert_eq!(cluster.chosen(), ["a0 dl", "a1 dl", "b0 dl", "b1 dl", "b2 dl"]);
    assert_eq!(cluster.passed_over("a2"), Some(SkipReason::PoolFull { pool: pool("a") }));
    assert_eq!(cluster.passed_over("b3"), Some(SkipReason::WaitingForSlot));
}

#[test]
fn a_test_at_its_concurrency_limit_does_not_block_other_tests_of_the_node() {
    let mut rare = test("nccl");
    rare.max_concurrent = Some(2);
    let cluster = many(cluster().tests(vec![test("dl"), rare]), "a", 4);
    assert_eq!(cluster.chosen(), ["a0 dl+nccl", "a1 dl+nccl", "a2 dl", "a3 dl"]);
}

#[test]
fn two_hundred_tests_are_planned_like_two() {
    let ids: Vec<String> = (0..200).map(|n| format!("t{n:03}")).collect();
    let mut tests: Vec<_> = ids.iter().map(|id| test(id)).collect();
    tests[190].shares = vec!["/data".to_owned()];
    let fresh = |node: &str, but: &[usize]| {
        let others = ids.iter().enumerate().filter(|(n, _)| !but.contains(n));
        others.fold(free(node), |node, (_, id)| node.result(id, Verdict::Pass, 1.days()))
    };
    let cluster = cluster()
        .tests(tests)
        .node(fresh("a", &[3, 127, 128, 199]))
        .node(fresh("b", &[190]))
        .node(fresh("c", &[190]))
        .node(fresh("d", &[5, 190]))
        .node(fresh("e", &[]))
        .node(free("f"));
    let all: Vec<&str> = ids.iter().map(String::as_str).collect();
    let all_but_one: Vec<&str> = all.iter().copied().filter(|id| *id != "t190").collect();
    let chosen = cluster.chosen();
    assert_eq!(chosen, ["a t003+t127+t128+t199", "b t190", "d t005", &format!("f {}", all_but_one.join("+"))]);
    assert_eq!(cluster.passed_over("c"), Some(SkipReason::ShareBusy { test: test_id("t190") }));
    assert_eq!(cluster.passed_over("e"), Some(SkipReason::Fresh { until: NOW.plus(6.days()) }));
}

#[test]
fn one_job_at_a_time_loads_a_shared_mount() {
    let mut storage = test("storage");
    storage.shares = vec!["/data".to_owned()];
    let mut scratch = test("scratch");
    scratch.shares = vec!["/scratch".to_owned()];
    let cluster = many(many(cluster().tests(vec![storage, scratch]), "a", 2), "b", 1);
    assert_eq!(cluster.chosen(), ["a0 storage+scratch"]);
    assert_eq!(cluster.passed_over("b0"), Some(SkipReason::ShareBusy { test: test_id("storage") }));
    let cluster = cluster.run(run("a1", &["storage"], running(1.minutes())));
    assert_eq!(cluster.chosen(), ["a0 scratch"]);
}

#[test]
fn two_tests_of_one_job_on_the_same_mount_are_one_user_of_it() {
    let [mut read, mut write] = [test("read"), test("write")];
    read.shares = vec!["/data".to_owned()];
    write.shares = vec!["/data".to_owned()];
    let cluster = many(cluster().tests(vec![read, write]).policy(|policy| policy.limits.per_share = 2), "a", 3);
    assert_eq!(cluster.chosen(), ["a0 read+write", "a1 read+write"]);
}

#[test]
fn the_daily_budget_counts_spent_running_and_planned_time() {
    // An hour is six usual runs.
    let cluster = many(cluster().policy(|policy| policy.limits.node_hours_per_day = Some(1.0)), "a", 8);
    assert_eq!(cluster.clone().with(|snapshot| snapshot.spent = 30.minutes()).chosen().len(), 3);
    let spent = cluster.clone().with(|snapshot| snapshot.spent = 51.minutes());
    assert!(spent.chosen().is_empty());
    assert_eq!(spent.passed_over("a0"), Some(SkipReason::BudgetSpent));
    // A run that started 40 minutes ago counts with those, a pending run with its usual ten.
    let cluster = cluster.run(run("a0", &["dl"], running(40.minutes()))).run(run("a1", &["dl"], pending(1.minutes())));
    assert_eq!(cluster.chosen(), ["a2 dl"]);
}

#[test]
fn a_node_over_the_budget_is_skipped_with_that_reason_even_if_slots_are_full() {
    let mut long = test("long");
    long.typical_duration = 2.hours();
    long.pools = Some(vec![pool("a")]);
    let cluster = cluster().tests(vec![test("dl"), long]).policy(|policy| {
        policy.limits.node_hours_per_day = Some(1.0);
        policy.limits.jobs = 1.into();
    });
    let cluster = cluster
        .node(free("a").pool("a"))
        .node(free("b").pool("b").stale(8.days()))
        .node(free("c").pool("b").stale(8.days()));
    assert_eq!(cluster.chosen(), ["b dl"]);
    assert_eq!(cluster.passed_over("a"), Some(SkipReason::BudgetSpent));
    assert_eq!(cluster.passed_over("c"), Some(SkipReason::WaitingForSlot));
}

fn window(kind: WindowKind, from: u16, to: u16) -> Window {
    let days = vec![Day::Sunday];
    Window { kind, pool: None, days, from: TimeOfDay(from * 60), to: TimeOfDay(to * 60), utc_offset_minutes: 0 }
}

#[test]
fn nothing_starts_inside_a_quiet_window() {
    for (from, to, quiet) in [(7, 9, true), (8, 9, true), (7, 8, false), (9, 12, false), (22, 7, false)] {
        let cluster =
            cluster().policy(|policy| policy.windows = vec![window(WindowKind::Quiet, from, to)]).node(free("a"));
        let expected = quiet.then_some(SkipReason::QuietWindow);
        assert_eq!(cluster.passed_over("a"), expected, "{from} to {to}");
        assert_eq!(cluster.chosen().is_empty(), quiet, "{from} to {to}");
    }
}

#[test]
fn a_quiet_window_of_one_pool_does_not_affect_others() {
    let mut quiet = window(WindowKind::Quiet, 7, 9);
    quiet.pool = Some(pool("a"));
    let cluster = many(many(cluster().policy(|policy| policy.windows = vec![quiet]), "a", 1), "b", 1);
    assert_eq!(cluster.chosen(), ["b0 dl"]);
}

#[test]
fn a_maintenance_window_does_not_keep_validation_from_starting() {
    let cluster =
        cluster().policy(|policy| policy.windows = vec![window(WindowKind::Maintenance, 22, 23)]).node(free("a"));
    assert_eq!(cluster.chosen(), ["a dl"]);
}

#[test]
fn nothing_starts_during_a_pause_and_a_pause_expires() {
    let cluster = many(many(cluster(), "a", 1), "b", 1);
    let all = cluster.clone().paused(None, None);
    assert!(all.chosen().is_empty());
    assert_eq!(all.passed_over("a0"), Some(SkipReason::Paused { by: "ann".into() }));
    assert_eq!(cluster.clone().paused(Some(pool("a")), None).chosen(), ["b0 dl"]);
    assert_eq!(cluster.clone().paused(None, Some(NOW.plus(1.minutes()))).chosen().len(), 0);
    assert_eq!(cluster.paused(None, Some(NOW)).chosen().len(), 2);
}
