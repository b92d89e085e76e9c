//! Operators' requests: tests, quarantine, withdrawal.

use super::cluster::{
    Cluster, NOW, NodeFixture, Spans, acting, bad, busy, cluster, free, job, name, pending, pool, run, run_of, running,
    test, test_id, unknown,
};
use crate::{
    case::{RepairStep, StepKind},
    finding::Severity,
    lifecycle::NodeState,
    policy::TestPolicy,
    run::{
        CancelReason, IncompleteReason, JobEnd, NotStartedReason, ObservedJobState, Purpose, Report, Run, RunEnd,
        RunState,
    },
    snapshot::{CommandKind, Trial},
    time::Span,
};

fn with_test_command(node: NodeFixture) -> Cluster {
    cluster().node(node.fresh()).asks(CommandKind::Test { node: name("a"), tests: Vec::new(), run: None })
}

#[test]
fn a_requested_test_runs_although_the_node_is_fresh() {
    let cluster = with_test_command(free("a"));
    assert_eq!(cluster.lines(), ["submit a dl: operator", "try 1: operator"]);
    let super::super::Action::Submit(run) = &cluster.plan().actions[0].value else { panic!() };
    assert_eq!(run.purpose.value, Purpose::Requested);
    assert_eq!(run.purpose.text, "requested by ann: I say so");
}

#[test]
fn only_requested_tests_that_apply_run() {
    let ask = |tests: &[&str]| {
        let tests = tests.iter().map(|id| test_id(id)).collect();
        let cluster = cluster().tests(vec![test("dl"), test("nccl")]).node(free("a").fresh());
        cluster.asks(CommandKind::Test { node: name("a"), tests, run: None }).lines()
    };
    assert_eq!(ask(&["nccl"]), ["submit a nccl: operator", "try 1: operator"]);
    assert_eq!(ask(&["nccl", "spoon"]), ["submit a nccl: operator", "try 1: operator"]);
    assert_eq!(ask(&["spoon"]), ["answer 1: operator"]);
    assert_eq!(ask(&[]), ["submit a dl+nccl: operator", "try 1: operator"]);
}

#[test]
fn a_requested_test_waits_until_the_node_is_available() {
    let waiting = [
        busy("a"),
        unknown("a"),
        free("a").cordoned_by("bob"),
        free("a").held("bob", None).state(NodeState::Held { by: "bob".into() }),
        free("a")
            .out(Severity::Reset, RepairStep::Reset)
            .state(NodeState::Repairing { step: StepKind::Reset, tries: 1 }),
    ];
    for node in waiting {
        let lines = with_test_command(node.clone()).lines();
        assert!(
            !lines.iter().any(|line| line.starts_with("submit") || line.starts_with("answer")),
            "{node:?} {lines:?}"
        );
    }
    assert_eq!(with_test_command(free("a").held("bob", Some(NOW))).chosen(), ["a dl"], "that hold is over");
    assert!(with_test_command(free("a")).run(run("a", &["dl"], running(1.minutes()))).lines().is_empty());
}

#[test]
fn a_node_that_is_out_may_be_tested_for_its_operator() {
    let node = free("a").out(Severity::Isolate, RepairStep::Replace).state(NodeState::Out);
    let node = node.step(super::cluster::done(StepKind::HandOver, RepairStep::Replace, 1.hours()));
    assert_eq!(with_test_command(node).chosen(), ["a dl"]);
}

#[test]
fn a_requested_test_obeys_limits_but_not_budget_pause_or_backoff() {
    let mut storage = test("storage");
    storage.shares = vec!["/data".to_owned()];
    let cluster = || with_test_command(free("a")).tests(vec![storage.clone()]).node(busy("b").fresh());
    assert_eq!(cluster().chosen(), ["a storage"]);
    assert!(cluster().policy(|policy| policy.limits.jobs = 0.into()).lines().is_empty());
    assert!(cluster().policy(|policy| policy.limits.pools = [(pool("gpu"), 0)].into()).lines().is_empty());
    let taken = run("b", &["storage"], ObservedJobState::Unknown { why: "timeout".into() });
    assert!(cluster().run(taken).chosen().is_empty(), "the mount is in use");
    assert_eq!(cluster().policy(|policy| policy.limits.node_hours_per_day = Some(0.0)).chosen(), ["a storage"]);
    assert_eq!(cluster().paused(None, None).chosen(), ["a storage"]);
    assert_eq!(with_test_command(free("a").backing_off(1.hours())).chosen(), ["a dl"]);
}

#[test]
fn a_requested_test_is_repeated_until_it_has_run() {
    let with_earlier_run = |node: NodeFixture, end: RunEnd| {
        let earlier = CommandKind::Test { node: name("a"), tests: Vec::new(), run: Some(run_of("a")) };
        let mut cluster = cluster().node(node.fresh()).asks(earlier);
        let ended = Run { state: RunState::Ended(end), ..run("a", &["dl"], running(1.minutes())).run };
        cluster.snapshot.trials.push(Trial::of(&ended));
        cluster
    };
    let incomplete = |why| RunEnd::Incomplete { why, partial: None };
    let repeated = [
        RunEnd::NotStarted(NotStartedReason::Rejected),
        RunEnd::NotStarted(NotStartedReason::PendingTooLong),
        RunEnd::NotStarted(NotStartedReason::NodeTaken),
        incomplete(IncompleteReason::NodeTaken),
    ];
    for end in repeated {
        assert_eq!(with_earlier_run(free("a"), end.clone()).lines(), ["submit a dl: operator", "try 1: operator"]);
        let waits = with_earlier_run(free("a").backing_off(1.hours()), end.clone());
        assert!(waits.lines().is_empty(), "{end:?}: a cluster that rejects every job is not asked in every cycle");
    }
    let final_ends = [
        RunEnd::Completed(Report::default()),
        RunEnd::NotStarted(NotStartedReason::Withdrawn),
        incomplete(IncompleteReason::Withdrawn),
        incomplete(IncompleteReason::Crashed),
        incomplete(IncompleteReason::NodeDied),
    ];
    for end in final_ends {
        assert_eq!(with_earlier_run(free("a"), end.clone()).lines(), ["answer 1: operator"], "{end:?}");
    }
}

#[test]
fn two_requests_for_one_node_give_one_run_at_a_time() {
    let mut cluster =
        with_test_command(free("a")).asks(CommandKind::Test { node: name("a"), tests: Vec::new(), run: None });
    assert_eq!(cluster.cycle(), ["submit a dl: operator", "try 1: operator"]);
    assert!(cluster.cycle().is_empty());
}

#[test]
fn a_request_for_an_unknown_node_is_completed() {
    for what in [
        CommandKind::Test { node: name("x"), tests: Vec::new(), run: None },
        CommandKind::Release { node: name("x") },
        CommandKind::Quarantine { node: name("x"), evict: false },
        CommandKind::CancelRun { run: run_of("x") },
    ] {
        assert_eq!(cluster().node(free("a").fresh()).asks(what).lines(), ["answer 1: operator"]);
    }
}

#[test]
fn quarantining_a_node_whose_mark_was_only_proposed_takes_it_out() {
    let mut cluster = acting().fillers(20).node(free("a").fresh().found(bad("dl", Severity::Reset)));
    cluster = cluster.policy(|policy| policy.allow.mark = false);
    cluster.cycle();
    cluster.ask(CommandKind::Quarantine { node: name("a"), evict: false });
    let expected = [
        "close a withdrawn: operator",
        "open a quarantine: operator",
        "step a mark: operator",
        "move a quarantined: operator",
        "answer 1: operator",
    ];
    assert_eq!(cluster.cycle(), expected);
}

#[test]
fn quarantining_a_held_node_waits_and_one_already_out_is_completed() {
    let ask = || CommandKind::Quarantine { node: name("a"), evict: false };
    let held = free("a").fresh().held("bob", None).state(NodeState::Held { by: "bob".into() });
    assert!(acting().fillers(20).node(held).asks(ask()).lines().is_empty());
    let out = free("a").fresh().out(Severity::Reset, RepairStep::Reset);
    assert_eq!(
        acting().fillers(20).node(out).asks(ask()).lines(),
        ["answer 1: operator", "step a keep-evidence: case"]
    );
}

#[test]
fn releasing_a_node_that_an_operator_holds_waits_for_the_hold() {
    let held = free("a").fresh().held("bob", None).state(NodeState::Held { by: "bob".into() });
    let mut cluster = acting().fillers(20).node(held).asks(CommandKind::Release { node: name("a") });
    assert!(cluster.cycle().is_empty());
    cluster.record("a").hold = None;
    assert_eq!(cluster.cycle(), ["move a in-service: released", "answer 1: operator"]);
}

#[test]
fn a_withdrawn_run_is_cancelled_once_in_any_state() {
    let ask = || CommandKind::CancelRun { run: run_of("a") };
    let never_submitted = run("a", &["dl"], ObservedJobState::Absent);
    let not_asked = run("a", &["dl"], ObservedJobState::Unknown { why: "timeout".into() });
    for active in [
        never_submitted,
        not_asked,
        run("a", &["dl"], pending(9.minutes())),
        run("a", &["dl"], running(1.minutes())),
        run("a", &["dl"], running(9.hours())),
    ] {
        let cluster = cluster().node(busy("a").fresh()).run(active.clone()).asks(ask());
        assert_eq!(cluster.lines(), ["cancel: withdrawn", "answer 1: operator"], "{active:?}");
    }
}

#[test]
fn withdrawing_a_run_that_is_ending_changes_nothing() {
    let ask = || CommandKind::CancelRun { run: run_of("a") };
    let going = cluster().node(free("a").fresh()).run(run("a", &["dl"], running(9.hours())));
    let going = going.cancelling(CancelReason::OverTimeLimit, Span::ZERO).asks(ask());
    assert_eq!(going.lines(), ["answer 1: operator"]);
    let ended =
        ObservedJobState::Ended { job: job(), started: Some(NOW.minus(9.minutes())), at: NOW, how: JobEnd::Exited };
    let over = cluster().node(free("a").fresh()).run(run("a", &["dl"], ended)).asks(ask());
    assert_eq!(over.lines(), ["answer 1: operator"], "its result may be on its way");
}

#[test]
fn withdrawing_a_run_that_was_never_submitted_ends_it_without_a_row() {
    let mut cluster = cluster()
        .node(free("a").fresh())
        .run(run("a", &["dl"], ObservedJobState::Absent))
        .asks(CommandKind::CancelRun { run: run_of("a") });
    cluster.cycle();
    assert_eq!(cluster.cycle(), ["conclude not-started: withdrawn"]);
    assert!(cluster.snapshot.runs.is_empty() && cluster.record("a").backoff.is_none());
}

#[test]
fn a_non_routine_test_runs_on_request_and_for_requalification() {
    let long = TestPolicy { routine: false, ..test("dl-long") };
    let tests = || vec![test("dl"), long.clone()];
    assert_eq!(cluster().tests(tests()).node(free("a")).lines(), ["submit a dl: stale"], "never tested, and not due");
    let ask = |requested: &[&str]| {
        let requested = requested.iter().map(|id| test_id(id)).collect();
        cluster()
            .tests(tests())
            .node(free("a").fresh())
            .asks(CommandKind::Test { node: name("a"), tests: requested, run: None })
            .lines()
    };
    assert_eq!(ask(&["dl-long"])[0], "submit a dl-long: operator");
    assert_eq!(ask(&[])[0], "submit a dl: operator");
    let proof = |names: &[&str]| {
        let node = free("a").fresh().out(Severity::Isolate, RepairStep::Quarantine);
        let required = names.iter().map(|id| test_id(id)).collect();
        let cluster = acting().fillers(20).tests(tests()).node(node).policy(|policy| {
            policy.repair.requalification = required;
            policy.allow.drain = false;
        });
        cluster.lines().into_iter().find(|line| line.starts_with("submit a")).unwrap()
    };
    assert_eq!(proof(&[]), "submit a dl: proof");
    assert_eq!(proof(&["dl-long"]), "submit a dl-long: proof");
}
