//! Requalification runs before a return: pass, fail, no result; release by an operator.

use super::cluster::{
    Cluster, Spans, acting, agent_test, bad, cluster, done, free, name, pool, test, unconfirmed, unknown,
};
use crate::{
    case::{RepairStep, StepKind},
    finding::{OpenFinding, Severity, Verdict},
    lifecycle::NodeState,
    policy::Mode,
    snapshot::CommandKind,
};

/// A node that was reset and has a requalification run.
fn requalifying() -> Cluster {
    let mut cluster = acting().fillers(20).node(free("a").fresh().found(bad("dl", Severity::Reset)));
    for _ in 0..4 {
        cluster.cycle();
    }
    assert_eq!(cluster.record("a").state.as_str(), "requalifying");
    cluster
}

#[test]
fn a_requalified_node_loses_our_marks_and_then_returns() {
    let mut cluster = requalifying();
    assert!(cluster.lines().is_empty(), "the run decides");
    cluster.ends("a", Verdict::Pass);
    assert_eq!(cluster.cycle(), ["step a unmark: case"]);
    assert_eq!(cluster.cycle(), ["close a returned: proved", "move a in-service: proved"]);
    assert!(cluster.cycle().is_empty());
}

#[test]
fn our_cordon_is_removed_before_the_mark() {
    let mut cluster = acting().fillers(20).node(free("a").fresh().found(bad("dl", Severity::Reboot)));
    for _ in 0..8 {
        cluster.cycle();
    }
    cluster.ends("a", Verdict::Pass);
    let lines: Vec<String> = (0..3).flat_map(|_| cluster.cycle()).collect();
    let expected =
        ["step a undrain: case", "step a unmark: case", "close a returned: proved", "move a in-service: proved"];
    assert_eq!(lines, expected);
}

#[test]
fn a_node_that_fails_requalification_is_escalated() {
    let mut cluster = requalifying();
    cluster.ends("a", Verdict::Fail);
    assert_eq!(cluster.cycle(), ["escalate reboot: did-not-help", "move a quarantined: did-not-help"]);
}

#[test]
fn inconclusive_requalification_is_retried_and_then_handed_over() {
    let mut cluster = requalifying();
    let mut waits = Vec::new();
    for proof in 1..=6 {
        cluster.ends("a", Verdict::Inconclusive);
        assert_eq!(cluster.cycle(), ["move a quarantined: proof-empty"], "proof {proof}");
        let from = cluster.snapshot.at;
        let lines = loop {
            let lines = cluster.cycle();
            if !lines.is_empty() {
                break lines;
            }
            cluster.wait(9.minutes());
        };
        if proof == 6 {
            assert_eq!(lines, ["step a hand-over: handed-over", "move a out: handed-over"]);
        } else {
            assert_eq!(lines[1], "submit a dl: proof");
            waits.push(cluster.snapshot.at.since(from).millis() / 600_000);
        }
    }
    assert!(waits.is_sorted() && waits[4] > 4 * waits[1], "{waits:?}");
}

#[test]
fn requalification_needs_at_least_one_pass_and_every_required_test() {
    let mut cluster = acting().fillers(20).tests(vec![test("dl"), test("nccl"), test("storage")]);
    cluster = cluster.node(free("a").fresh().found(bad("dl", Severity::Reset)));
    for _ in 0..4 {
        cluster.cycle();
    }
    let run = cluster.snapshot.runs[0].run.clone();
    assert_eq!(run.tests.len(), 3, "every test that applies");
    use Verdict::{Fail, Inconclusive, NotApplicable, Pass};
    for (verdicts, line) in [
        ([Pass, Pass, Pass], "step a unmark: case"),
        ([Pass, Pass, NotApplicable], "step a unmark: case"),
        ([NotApplicable, Pass, Pass], "move a quarantined: proof-empty"),
        ([Pass, Inconclusive, Pass], "move a quarantined: proof-empty"),
        ([Inconclusive, Pass, Pass], "move a quarantined: proof-empty"),
        ([NotApplicable, NotApplicable, NotApplicable], "move a quarantined: proof-empty"),
        ([Pass, Pass, Fail], "escalate reboot: did-not-help"),
        ([Fail, Inconclusive, Pass], "escalate reboot: did-not-help"),
    ] {
        let mut cluster = cluster.clone();
        super::model::finish(&mut cluster.snapshot, &name("a"), |index| verdicts[index]);
        assert_eq!(cluster.lines()[0], line, "{verdicts:?}");
    }
}

#[test]
fn results_from_before_requalification_do_not_count() {
    let mut cluster = requalifying();
    // The run ended without a row; the pass of an hour ago is still on record.
    cluster.snapshot.runs.clear();
    cluster.record("a").findings.clear();
    assert_eq!(cluster.lines(), ["move a quarantined: proof-empty"]);
}

#[test]
fn requalification_counts_although_the_clock_went_back_before_it() {
    let mut cluster = acting().fillers(20).node(free("a").fresh().found(bad("dl", Severity::Reset)));
    cluster.ids.set_time(cluster.snapshot.at.plus(2.hours()));
    cluster.ids.op();
    for _ in 0..4 {
        cluster.cycle();
    }
    assert!(cluster.snapshot.runs[0].run.id.born() > cluster.snapshot.at);
    cluster.ends("a", Verdict::Pass);
    assert_eq!(cluster.lines(), ["step a unmark: case"]);
}

fn seen_by_agent(cluster: &mut Cluster, severity: Severity, after: bool) {
    let at = if after { cluster.snapshot.at } else { super::cluster::NOW.minus(1.minutes()) };
    let open = OpenFinding { last_seen: at, ..bad("gpu-health", severity) };
    cluster.record("a").findings.push(open);
}

#[test]
fn a_finding_seen_after_the_repair_fails_requalification() {
    let mut cluster = requalifying();
    cluster.ends("a", Verdict::Pass);
    seen_by_agent(&mut cluster, Severity::Reset, true);
    assert_eq!(cluster.lines()[0], "escalate reboot: did-not-help");
}

#[test]
fn a_finding_seen_only_before_the_repair_makes_requalification_inconclusive() {
    let mut cluster = requalifying();
    cluster.ends("a", Verdict::Pass);
    seen_by_agent(&mut cluster, Severity::Reset, false);
    assert_eq!(cluster.lines(), ["move a quarantined: proof-empty"]);
}

#[test]
fn a_monitor_finding_does_not_keep_a_node_from_returning() {
    let mut cluster = requalifying();
    cluster.ends("a", Verdict::Pass);
    seen_by_agent(&mut cluster, Severity::Monitor, true);
    assert_eq!(cluster.lines(), ["step a unmark: case"]);
}

#[test]
fn the_policy_sets_requalification_tests_and_failed_tests_are_always_included() {
    let node = |more: Option<OpenFinding>| {
        let node = free("a").fresh().found(bad("nccl", Severity::Reset));
        let node = more.into_iter().fold(node, super::cluster::NodeFixture::found);
        let node = node.out(Severity::Reset, RepairStep::Quarantine);
        acting()
            .fillers(20)
            .tests(vec![test("dl"), test("nccl"), test("storage")])
            .policy(|policy| {
                policy.allow.drain = false;
                policy.repair.requalification = vec![super::cluster::test_id("dl")];
            })
            .node(node)
    };
    assert_eq!(node(None).chosen(), ["a dl+nccl"]);
    assert_eq!(node(Some(unconfirmed("storage", Severity::Reset))).chosen(), ["a dl+nccl+storage"]);
}

#[test]
fn requalification_waits_for_node_slot_pool_mounts_and_pause() {
    let mut storage = test("storage");
    storage.shares = vec!["/data".to_owned()];
    let with = |node: super::cluster::NodeFixture| {
        acting()
            .fillers(20)
            .tests(vec![test("dl"), storage.clone()])
            .policy(|policy| policy.allow.drain = false)
            .node(node.fresh().out(Severity::Reset, RepairStep::Quarantine))
    };
    assert_eq!(with(free("a")).chosen(), ["a dl+storage"]);
    assert!(with(unknown("a")).chosen().is_empty());
    assert!(with(free("a")).policy(|policy| policy.limits.jobs = 0.into()).chosen().is_empty());
    assert!(with(free("a")).policy(|policy| policy.limits.pools = [(pool("gpu"), 0)].into()).chosen().is_empty());
    let run = super::cluster::run("z0001", &["storage"], super::cluster::running(1.minutes()));
    assert!(with(free("a")).run(run).chosen().is_empty());
    assert!(with(free("a")).paused(None, None).chosen().is_empty());
}

#[test]
fn requalification_ignores_the_daily_budget() {
    let cluster = acting()
        .fillers(20)
        .policy(|policy| {
            policy.allow.drain = false;
            policy.limits.node_hours_per_day = Some(0.0);
        })
        .node(free("a").fresh().out(Severity::Reset, RepairStep::Quarantine));
    assert_eq!(cluster.chosen(), ["a dl"]);
}

#[test]
fn requalification_that_cannot_start_for_a_day_is_handed_over() {
    let out = |since| {
        acting()
            .fillers(20)
            .policy(|policy| policy.allow.drain = false)
            .node(unknown("a").fresh().out(Severity::Reset, RepairStep::Quarantine).since(since))
    };
    assert!(out(23.hours()).lines().is_empty());
    assert_eq!(out(25.hours()).lines(), ["step a hand-over: handed-over", "move a out: handed-over"]);
    assert!(out(25.hours()).paused(None, None).lines().is_empty(), "a pause is no reason to hand over");
}

#[test]
fn without_applicable_tests_requalification_is_handed_over() {
    let mut elsewhere = test("dl");
    elsewhere.pools = Some(vec![pool("other")]);
    let cluster = acting()
        .fillers(20)
        .tests(vec![elsewhere])
        .policy(|policy| policy.allow.drain = false)
        .node(free("a").out(Severity::Reset, RepairStep::Quarantine));
    assert_eq!(cluster.lines(), ["step a hand-over: handed-over", "move a out: handed-over"]);
}

#[test]
fn in_observe_mode_the_mark_of_a_requalified_node_is_left_to_an_operator() {
    let mut cluster = requalifying();
    cluster.ends("a", Verdict::Pass);
    let mut cluster = cluster.policy(|policy| policy.mode = Mode::Observe);
    assert_eq!(cluster.cycle(), ["propose a unmark: not-allowed"]);
    assert!(cluster.cycle().is_empty());
    cluster.record("a").node_mut().marks.ours.clear();
    assert_eq!(cluster.cycle(), ["close a returned: proved", "move a in-service: proved"]);
}

#[test]
fn our_mark_is_removed_even_if_marking_is_no_longer_allowed() {
    let mut cluster = requalifying();
    cluster.ends("a", Verdict::Pass);
    let cluster = cluster.policy(|policy| policy.allow.mark = false);
    assert_eq!(cluster.lines(), ["step a unmark: case"]);
}

/// Handed over to an operator, who releases it.
fn released() -> Cluster {
    let node = free("a").fresh().out(Severity::Isolate, RepairStep::Replace).state(NodeState::Out);
    acting()
        .fillers(20)
        .node(node.step(done(StepKind::HandOver, RepairStep::Replace, 1.hours())))
        .asks(CommandKind::Release { node: name("a") })
}

#[test]
fn a_released_node_is_proved_before_it_returns() {
    let mut cluster = released();
    let expected = [
        "escalate quarantine: released",
        "step a release: released",
        "move a quarantined: released",
        "answer 1: operator",
    ];
    assert_eq!(cluster.cycle(), expected);
    assert_eq!(cluster.cycle(), ["step a requalify: proof", "submit a dl: proof", "move a requalifying: proof"]);
    cluster.ends("a", Verdict::Pass);
    let lines: Vec<String> = (0..2).flat_map(|_| cluster.cycle()).collect();
    assert_eq!(lines, ["step a unmark: case", "close a returned: proved", "move a in-service: proved"]);
}

#[test]
fn a_released_node_that_fails_requalification_returns_to_the_operator() {
    let mut cluster = released().policy(|policy| policy.allow.replace = false);
    cluster.cycle();
    cluster.cycle();
    cluster.ends("a", Verdict::Fail);
    cluster.record("a").findings[0].finding.severity = Severity::Reset;
    let lines: Vec<String> = (0..4).flat_map(|_| cluster.cycle()).collect();
    let expected = [
        "escalate replace: did-not-help",
        "move a quarantined: did-not-help",
        "step a drain: case",
        "step a hand-over: handed-over",
        "move a out: handed-over",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn releasing_a_node_in_service_or_in_requalification_changes_nothing() {
    let ask = || CommandKind::Release { node: name("a") };
    assert_eq!(cluster().node(free("a").fresh()).asks(ask()).lines(), ["answer 1: operator"]);
    assert_eq!(requalifying().asks(ask()).lines(), ["answer 1: operator"]);
}

#[test]
fn releasing_a_node_that_is_held_by_its_marks_cause_lets_it_go() {
    let node = free("a").fresh().out(Severity::Reset, RepairStep::Reset).state(NodeState::Held { by: "ann".into() });
    let mut cluster = acting().fillers(20).node(node).asks(CommandKind::Release { node: name("a") });
    cluster.record("a").node_mut().marks.ours.clear();
    assert_eq!(cluster.cycle()[2], "move a quarantined: released");
    assert_eq!(cluster.cycle()[1], "submit a dl: proof");
}

/// A node with an agent that was reset and has a requalification run.
fn requalifying_with_agent() -> Cluster {
    let mut cluster = acting().fillers(20).tests(vec![test("dl"), agent_test("gpu-count"), agent_test("memory")]);
    cluster = cluster.node(free("a").fresh().reported(1.minutes()).found(bad("dl", Severity::Reset)));
    for _ in 0..4 {
        cluster.cycle();
        cluster.agent_reports("a", Verdict::Pass);
    }
    assert_eq!(cluster.record("a").state.as_str(), "requalifying");
    cluster
}

#[test]
fn the_run_has_only_the_tests_that_no_agent_runs() {
    let cluster = requalifying_with_agent();
    assert_eq!(cluster.snapshot.runs[0].run.tests.len(), 1, "dl");
    let without = acting().fillers(20).tests(vec![test("dl"), agent_test("gpu-count")]).policy(|policy| {
        policy.allow.drain = false;
    });
    let without = without.node(free("a").fresh().out(Severity::Reset, RepairStep::Quarantine));
    assert_eq!(without.chosen(), ["a gpu-count+dl"], "without an agent the job runs everything");
}

#[test]
fn agent_and_run_together_return_a_node() {
    let mut cluster = requalifying_with_agent();
    cluster.ends("a", Verdict::Pass);
    assert_eq!(cluster.cycle(), ["step a unmark: case"]);
    assert_eq!(cluster.cycle(), ["close a returned: proved", "move a in-service: proved"]);
}

#[test]
fn requalification_waits_for_the_agent_and_does_not_repeat_the_run() {
    let mut cluster = requalifying_with_agent();
    for known in &mut cluster.record("a").test_records[1..] {
        *known = crate::snapshot::TestRecord::NEVER;
        known.add(Verdict::Pass, super::cluster::NOW.minus(1.hours()));
    }
    cluster.ends("a", Verdict::Pass);
    for _ in 0..30 {
        assert!(cluster.cycle().is_empty(), "the agent's results are older than the repair");
        cluster.wait(30.minutes());
    }
    cluster.agent_reports("a", Verdict::Inconclusive);
    assert!(cluster.cycle().is_empty(), "an inconclusive check proves nothing");
    cluster.agent_reports("a", Verdict::Pass);
    assert_eq!(cluster.cycle(), ["step a unmark: case"]);
}

#[test]
fn an_agent_that_stays_silent_leaves_the_node_to_an_operator_after_a_day() {
    let mut cluster = requalifying_with_agent();
    let tests = cluster.snapshot.tests.len();
    cluster.record("a").test_records = crate::snapshot::TestRecords::untested(tests);
    cluster.ends("a", Verdict::Pass);
    cluster.wait(23.hours());
    assert!(cluster.cycle().is_empty());
    cluster.wait(2.hours());
    assert_eq!(cluster.cycle(), ["step a hand-over: handed-over", "move a out: handed-over"]);
}

#[test]
fn a_check_that_fails_after_the_repair_fails_requalification_whoever_ran_it() {
    let mut cluster = requalifying_with_agent();
    cluster.ends("a", Verdict::Pass);
    cluster.agent_reports("a", Verdict::Fail);
    assert_eq!(cluster.lines()[0], "escalate reboot: did-not-help");
}

#[test]
fn an_agent_that_confirms_an_old_failure_is_waited_for_until_it_reports_it_again() {
    let mut cluster = requalifying_with_agent();
    cluster.agent_reports("a", Verdict::Fail);
    cluster.ends("a", Verdict::Pass);
    for open in &mut cluster.record("a").findings {
        open.last_seen = super::cluster::NOW.minus(1.minutes());
    }
    assert!(cluster.lines().is_empty(), "the failure may be an acknowledged event");
    cluster.agent_reports("a", Verdict::Fail);
    assert_eq!(cluster.lines()[0], "escalate reboot: did-not-help");
}

#[test]
fn a_check_that_does_not_apply_blocks_only_if_it_had_failed() {
    let mut cluster = requalifying_with_agent();
    cluster.ends("a", Verdict::Pass);
    cluster.agent_reports("a", Verdict::NotApplicable);
    assert_eq!(cluster.lines(), ["step a unmark: case"]);
    cluster.snapshot.cases[0].findings.push(bad("memory", Severity::Reset).finding);
    assert!(cluster.lines().is_empty(), "it waits for a result that can be compared");
}

#[test]
fn a_finding_of_the_agent_is_cleared_by_its_pass_since_the_repair() {
    let mut cluster = requalifying_with_agent();
    cluster.ends("a", Verdict::Pass);
    let open = OpenFinding { last_seen: super::cluster::NOW.minus(1.minutes()), ..bad("memory", Severity::Reset) };
    cluster.record("a").findings.push(open);
    assert_eq!(cluster.lines(), ["step a unmark: case"]);
}

#[test]
fn a_failure_that_only_needs_watching_keeps_no_node_out() {
    let mut cluster = acting().fillers(20).tests(vec![test("dl"), agent_test("disk-space")]);
    cluster = cluster.node(free("a").fresh().reported(1.minutes()).found(bad("dl", Severity::Reset)));
    for _ in 0..4 {
        cluster.cycle();
        cluster.agent_reports("a", Verdict::Pass);
    }
    cluster.ends("a", Verdict::Pass);
    cluster.agent_reports("a", Verdict::Fail);
    cluster.record("a").findings[0].finding.severity = Severity::Monitor;
    assert_eq!(cluster.lines(), ["step a unmark: case"]);
    cluster.record("a").findings[0].finding.severity = Severity::Reset;
    assert_eq!(cluster.lines()[0], "escalate reboot: did-not-help");
}

#[test]
fn the_agent_alone_decides_where_no_test_runs_in_a_job() {
    let mut cluster = acting().fillers(20).tests(vec![agent_test("memory")]).policy(|policy| {
        policy.allow.drain = false;
    });
    cluster = cluster.node(free("a").fresh().reported(1.minutes()).out(Severity::Reset, RepairStep::Quarantine));
    assert_eq!(cluster.cycle(), ["step a requalify: proof", "move a requalifying: proof"]);
    assert!(cluster.cycle().is_empty());
    cluster.agent_reports("a", Verdict::Pass);
    assert_eq!(cluster.cycle(), ["step a unmark: case"]);
}

#[test]
fn an_agent_that_is_removed_meanwhile_leaves_its_checks_to_the_next_run() {
    let mut cluster = requalifying_with_agent();
    let tests = cluster.snapshot.tests.len();
    cluster.record("a").test_records = crate::snapshot::TestRecords::untested(tests);
    cluster.ends("a", Verdict::Pass);
    cluster.record("a").last_report = None;
    assert_eq!(cluster.cycle(), ["move a quarantined: proof-empty"]);
    cluster.wait(1.hours());
    assert_eq!(cluster.chosen(), ["a gpu-count+memory+dl"]);
}
