//! Silent agents: a few make their nodes suspect, many are one incident of Cluster Doctor.

use super::cluster::{
    Cluster, NOW, Spans, acting, agent_test, bad, busy, cluster, free, name, test, unconfirmed, unhealthy_mark,
};
use crate::{case::RepairStep, finding::Severity, lifecycle::NodeState, snapshot::CommandKind};

/// `silent` of `of` agents have not reported for twenty minutes.
fn agents(silent: usize, of: usize) -> Cluster {
    (0..of).fold(cluster(), |cluster, n| {
        let ago = if n < silent { 20.minutes() } else { 1.minutes() };
        cluster.node(busy(&format!("n{n:02}")).fresh().reported(ago))
    })
}

#[test]
fn a_few_silent_agents_make_their_nodes_suspect_once() {
    let mut cluster = agents(1, 10);
    assert_eq!(cluster.cycle(), ["move n00 suspect: agent-silent"]);
    assert!(cluster.cycle().is_empty());
    cluster.record("n00").last_report = Some(cluster.snapshot.at);
    assert_eq!(cluster.cycle(), ["move n00 in-service: cleared"]);
}

#[test]
fn two_silent_agents_of_two_are_no_incident() {
    assert_eq!(agents(2, 2).lines(), ["move n00 suspect: agent-silent", "move n01 suspect: agent-silent"]);
}

#[test]
fn many_silent_agents_are_one_incident_and_make_no_node_suspect() {
    let mut cluster = agents(4, 20);
    assert_eq!(cluster.cycle(), ["notice 4 of 20 silent: agents-silent"]);
    for _ in 0..5 {
        assert!(cluster.cycle().is_empty(), "said once");
    }
    for n in 0..20 {
        cluster.record(&format!("n{n:02}")).last_report = Some(cluster.snapshot.at);
    }
    assert_eq!(cluster.cycle(), ["notice agents back: agents-back"]);
    assert!(cluster.cycle().is_empty());
}

#[test]
fn the_policy_sets_the_share_of_silent_agents_that_is_an_incident() {
    assert_eq!(agents(3, 20).lines().len(), 3);
    assert_eq!(agents(3, 20).policy(|policy| policy.agents.incident_percent = 15.0).lines().len(), 1);
}

#[test]
fn silence_begins_after_its_limit_and_only_where_an_agent_is_expected() {
    for (ago, suspect) in [(15.minutes(), false), (16.minutes(), true)] {
        let cluster = cluster().node(busy("a").fresh().reported(ago)).node(busy("b").fresh());
        assert_eq!(!cluster.lines().is_empty(), suspect, "{ago}");
    }
}

#[test]
fn a_node_that_is_out_may_be_silent() {
    let out = free("a").fresh().reported(1.hours()).out(Severity::Isolate, RepairStep::Replace).state(NodeState::Out);
    let out = out.step(super::cluster::done(crate::case::StepKind::HandOver, RepairStep::Replace, 1.hours()));
    let theirs = free("b").fresh().reported(1.hours()).cordoned_by("bob");
    assert!(acting().node(out).node(theirs).lines().is_empty());
}

#[test]
fn a_silent_node_moves_only_once_in_a_plan() {
    let mut adopted = acting().fillers(20).node(free("a").fresh().reported(1.hours()));
    adopted.record("a").node_mut().marks.ours.push(unhealthy_mark());
    let quarantined = acting()
        .fillers(20)
        .node(free("a").fresh().reported(1.hours()))
        .asks(CommandKind::Quarantine { node: name("a"), evict: false });
    let known = acting().fillers(20).node(free("a").fresh().reported(1.hours()).shows_machine("J1"));
    let held = acting().fillers(20).node(free("a").fresh().reported(1.hours()).held("ann", Some(NOW.plus(1.hours()))));
    for cluster in [adopted, quarantined, known, held] {
        let moves = cluster.lines().iter().filter(|line| line.starts_with("move a")).count();
        assert!(moves <= 1, "{:?}", cluster.lines());
    }
}

#[test]
fn a_silent_node_with_an_old_finding_is_suspect() {
    let mut open = bad("dl", Severity::Monitor);
    open.last_seen = NOW.minus(30.days());
    let cluster = cluster().node(busy("a").fresh().reported(1.hours()).found(open));
    assert_eq!(cluster.lines(), ["move a suspect: agent-silent"]);
}

/// Two tests that no node ever had, one of which agents run.
fn new_node(node: super::cluster::NodeFixture) -> Cluster {
    cluster().tests(vec![test("dl"), agent_test("memory")]).node(node)
}

#[test]
fn a_job_runs_what_no_live_agent_runs() {
    assert_eq!(new_node(free("a")).chosen(), ["a memory+dl"], "no agent");
    assert_eq!(new_node(free("a").reported(1.minutes())).chosen(), ["a dl"], "an agent");
    let stale = || free("a").stale(2.days());
    assert_eq!(new_node(stale().reported(1.minutes())).chosen(), Vec::<String>::new());
    assert_eq!(new_node(stale().reported(1.hours())).chosen(), ["a memory"], "the agent is silent");
    let found = || free("a").fresh().found(unconfirmed("memory", Severity::Reset)).suspect();
    assert_eq!(new_node(found().reported(1.minutes())).chosen(), Vec::<String>::new(), "the agent repeats it");
}

#[test]
fn an_operators_test_leaves_out_what_the_agent_runs_unless_it_is_named() {
    let ask = |tests: &[&str]| CommandKind::Test {
        node: name("a"),
        tests: tests.iter().map(|test| super::cluster::test_id(test)).collect(),
        run: None,
    };
    let node = || free("a").fresh().reported(1.minutes());
    assert_eq!(new_node(node()).asks(ask(&[])).chosen(), ["a dl"]);
    assert_eq!(new_node(node()).asks(ask(&["memory"])).chosen(), ["a memory"]);
    let only = cluster().tests(vec![agent_test("memory")]).node(node()).asks(ask(&[]));
    assert_eq!(only.chosen(), ["a memory"], "nothing else could be tested");
}

#[test]
fn the_incremental_planner_notices_that_an_agent_fell_silent_and_came_back() {
    let cluster = new_node(free("a").stale(2.days()).reported(1.minutes()));
    let mut planner = super::super::Planner::new(cluster.snapshot.clone());
    let tests_at = |planner: &mut super::super::Planner, minutes: i64| {
        let plan = planner.plan(NOW.plus(minutes.minutes()), &mut cluster.ids.clone());
        super::lines::submitted(&plan)
    };
    assert!(tests_at(&mut planner, 0).is_empty());
    assert_eq!(tests_at(&mut planner, 20), ["a memory"]);
    planner.set_last_report(0, Some(NOW.plus(20.minutes())));
    assert!(tests_at(&mut planner, 21).is_empty());
}
