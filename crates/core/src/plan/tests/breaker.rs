//! The circuit breaker: shares of a pool, nodes per hour, reported once, closed by an operator.

use super::cluster::{Cluster, NOW, NodeFixture, Spans, acting, bad, busy, free, name};
use crate::{
    case::RepairStep,
    finding::Severity,
    plan::Planner,
    snapshot::{Breaker, Capabilities, CommandKind, Snapshot},
    time::Span,
};

fn taken_out(lines: &[String]) -> usize {
    lines.iter().filter(|line| line.contains("mark: confirmed")).count()
}

fn opened(lines: &[String]) -> usize {
    lines.iter().filter(|line| *line == "open breaker: breaker-opened").count()
}

fn broken(n: usize) -> NodeFixture {
    free(&format!("b{n:02}")).fresh().found(bad("dl", Severity::Reset))
}

/// `bad` broken nodes in a pool of `of`.
fn pool_of(of: usize, bad: usize) -> Cluster {
    (0..bad).fold(acting().fillers(of - bad), |cluster, n| cluster.node(broken(n)))
}

#[test]
fn a_tenth_of_a_pool_may_be_out_and_at_least_one_node() {
    for (of, bad, out) in [(1, 1, 1), (5, 2, 1), (19, 3, 1), (20, 3, 2), (29, 3, 2), (30, 3, 3)] {
        let lines = pool_of(of, bad).lines();
        assert_eq!((taken_out(&lines), opened(&lines)), (out, usize::from(out < bad)), "{bad} of {of}");
    }
}

#[test]
fn no_more_than_three_nodes_an_hour_are_taken_out() {
    let lines = pool_of(100, 5).lines();
    assert_eq!((taken_out(&lines), opened(&lines)), (3, 1));
    for (ago, out) in [(10.minutes(), 1), (60.minutes(), 3), (59.minutes(), 1)] {
        let lately = vec![(name("x1"), NOW.minus(ago)), (name("x2"), NOW.minus(ago)), (name("x2"), NOW.minus(ago))];
        let cluster = pool_of(100, 5).with(|snapshot| snapshot.recent.taken_out = lately);
        assert_eq!(taken_out(&cluster.lines()), out, "{ago} ago");
    }
}

#[test]
fn nodes_already_out_count_for_any_reason() {
    let others = [
        busy("c1").fresh().cordoned_by("bob"),
        busy("c1").fresh().out(Severity::Isolate, RepairStep::Replace).state(crate::lifecycle::NodeState::Out),
    ];
    for other in others {
        let cluster = pool_of(19, 2).node(other.clone());
        assert_eq!(taken_out(&cluster.lines()), 1, "{other:?}");
    }
    assert_eq!(taken_out(&pool_of(20, 2).lines()), 2);
}

#[test]
fn take_out_permits_follow_the_breaker() {
    let allowed = |cluster: Cluster, node: &str| Planner::new(cluster.snapshot).take_out_permit().allows(&name(node));
    assert!(allowed(pool_of(20, 1), "b00"));
    let open = |snapshot: &mut Snapshot| snapshot.breaker = Breaker::Open { since: NOW, why: "x".into() };
    assert!(!allowed(pool_of(20, 1).with(open), "b00"), "it is open");
    let lately = |snapshot: &mut Snapshot| {
        snapshot.recent.taken_out = ["x1", "x2", "x3"].map(|node| (name(node), NOW.minus(10.minutes()))).to_vec();
    };
    assert!(!allowed(pool_of(100, 1).with(lately), "b00"), "three within the hour");
    assert!(!allowed(pool_of(20, 1).caps(Capabilities::NONE), "b00"), "a controller that only observes");
    // One pool is at its limit and the other is not.
    let two = pool_of(10, 1).node(busy("y1").fresh().pool("other")).node(busy("c1").fresh().cordoned_by("bob"));
    assert!(!allowed(two.clone(), "b00"));
    assert!(allowed(two, "y1"));
}

#[test]
fn the_breaker_counts_each_pool_separately() {
    let mut cluster = pool_of(10, 2);
    for n in 0..9 {
        cluster = cluster.node(busy(&format!("y{n}")).fresh().pool("other"));
    }
    let cluster = cluster.node(free("y9").fresh().pool("other").found(bad("dl", Severity::Reset)));
    let lines = cluster.lines();
    assert_eq!(taken_out(&lines), 1, "the first refusal opens it for all: {lines:?}");
    assert_eq!(opened(&lines), 1);
}

#[test]
fn an_open_breaker_records_findings_marks_nothing_and_is_reported_once() {
    let mut cluster = pool_of(10, 3);
    let lines = cluster.cycle();
    assert_eq!(lines.last().unwrap(), "open breaker: breaker-opened");
    assert!(lines.contains(&"move b01 suspect: breaker-open".to_owned()), "{lines:?}");
    for _ in 0..20 {
        let lines = cluster.cycle();
        assert_eq!((taken_out(&lines), opened(&lines)), (0, 0));
        cluster.wait(1.hours());
    }
    assert_eq!(cluster.record("b01").findings.len(), 1);
}

#[test]
fn the_breaker_names_the_limit_that_opened_it() {
    let why = |cluster: Cluster| cluster.plan().actions.last().unwrap().text.clone();
    assert_eq!(why(pool_of(10, 3)), "1 of 10 nodes of pool gpu are out already and 1 is the limit (10 %)");
    assert_eq!(why(pool_of(100, 5)), "hourly limit reached: 3 nodes taken out, 3 allowed");
}

#[test]
fn closing_the_breaker_resets_the_hourly_count_but_not_the_pool_share() {
    let closed =
        |cluster: &mut Cluster| cluster.snapshot.breaker = Breaker::Closed { since: Some(cluster.snapshot.at) };
    let mut hourly = pool_of(100, 7);
    hourly.cycle();
    assert_eq!(taken_out(&hourly.cycle()), 0);
    closed(&mut hourly);
    assert_eq!(taken_out(&hourly.cycle()), 3);
    let mut share = pool_of(10, 3);
    share.cycle();
    closed(&mut share);
    let lines = share.cycle();
    assert_eq!((taken_out(&lines), opened(&lines)), (0, 1), "one is still out");
}

#[test]
fn an_operators_quarantine_needs_no_breaker() {
    let cluster = pool_of(10, 0)
        .node(free("a").fresh())
        .with(|snapshot| snapshot.breaker = Breaker::Open { since: NOW, why: "enough".into() })
        .asks(CommandKind::Quarantine { node: name("a"), evict: false });
    assert_eq!(
        cluster.lines(),
        ["open a quarantine: operator", "step a mark: operator", "move a quarantined: operator", "answer 1: operator"]
    );
}

#[test]
fn an_open_breaker_does_not_stop_repairs_in_progress() {
    let cluster = pool_of(10, 0)
        .node(free("a").fresh().out(Severity::Reset, RepairStep::Reset))
        .with(|snapshot| snapshot.breaker = Breaker::Open { since: NOW, why: "enough".into() });
    assert_eq!(cluster.lines(), ["step a keep-evidence: case"]);
}

#[test]
fn marking_a_proposed_node_passes_the_breaker_too() {
    let mut cluster = pool_of(10, 3).policy(|policy| policy.allow.mark = false);
    cluster.cycle();
    let mut cluster = cluster.policy(|policy| policy.allow.mark = true);
    let lines = cluster.cycle();
    assert_eq!(lines.iter().filter(|line| line.ends_with("mark: now-allowed")).count(), 1, "{lines:?}");
    assert_eq!(opened(&lines), 1);
    cluster.wait(Span::ZERO);
}
