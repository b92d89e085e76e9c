//! Table tests of the list of what needs an operator.

use super::*;
use crate::{
    case::{Advice, Case, CaseState, Repair, RepairStep, Step, StepKind, StepState},
    classify::disturbed_repeatedly,
    finding::{Severity, Verdict},
    ids::{HardwareId, OpId, RunId, TestId},
    lifecycle::NodeState,
    node::{ForeignMark, Hold, Occupancy},
    observation::{Entity, Event},
    plan::SkipReason,
    policy::Policy,
    snapshot::{Breaker, CommandKind, Pause, PendingCommand},
    software::Software,
    time::Span,
    view::{
        CycleView, EndedRun, RunFailure, SkippedSince, StatusView, status,
        tests::{NOW, cluster, days, finding, name, test_id},
    },
};

fn leads() -> StoredStatus {
    StoredStatus { leader: Some(("ctl".into(), NOW.plus(Span::minutes(1)))), ..StoredStatus::default() }
}

fn hours(hours: i64) -> Timestamp {
    NOW.minus(Span::hours(hours))
}

/// Returns the only item.
#[track_caller]
fn only(view: &StatusView) -> &AttentionItem {
    let [item] = &view.attention[..] else { panic!("{:#?}", view.attention) };
    item
}

fn kinds(view: &StatusView) -> Vec<AttentionKind> {
    view.attention.iter().map(|item| item.kind).collect()
}

fn names(nodes: &[NodeName]) -> Vec<&str> {
    nodes.iter().map(NodeName::as_str).collect()
}

fn step(what: StepKind, state: StepState, at: Timestamp) -> Step {
    let op = OpId::from_number(u64::try_from(at.millis()).unwrap());
    Step { op, what, repair_step: RepairStep::Reboot, state, at, attempts: 1, text: "gpu:5 fell off the bus".into() }
}

/// A node out of service with an open case of these steps.
fn with_case(mut facts: Facts, node: &str, steps: Vec<Step>) -> Facts {
    let id = CaseId::from_number(1 + facts.snapshot.cases.len() as u64);
    facts.snapshot.cases.push(Case {
        id,
        hardware: HardwareId::new("board-1").unwrap(),
        node: name(node),
        opened: hours(48),
        severity: Severity::Reboot,
        findings: vec![finding("storage", Severity::Reboot, 1, 1).finding],
        repair_step: RepairStep::Reboot,
        steps,
        state: CaseState::Open,
        boot_id: None,
        advice: None,
        job_failures: Vec::new(),
        request: None,
    });
    facts.with(node).change(|record| {
        record.state = NodeState::Quarantined;
        record.since = hours(48);
        record.case = Some(id);
    })
}

/// Nodes enough that two out of service are not many.
fn fleet() -> Facts {
    (0..30).fold(cluster(), |facts, number| facts.with(&format!("a{number:02}")))
}

#[test]
fn every_code_reads_back_and_has_a_meaning() {
    for kind in AttentionKind::ALL {
        assert_eq!(AttentionKind::from_code(kind.code()), Some(*kind));
        assert!(!kind.meaning().is_empty());
    }
    for urgency in Urgency::ALL {
        assert_eq!(Urgency::from_code(urgency.code()), Some(*urgency));
    }
    for state in OverallState::ALL {
        assert_eq!(OverallState::from_code(state.code()), Some(*state));
    }
}

#[test]
fn an_item_has_exactly_the_documented_fields() {
    let view = status(&with_case(fleet(), "n1", vec![step(StepKind::HandOver, StepState::Done, hours(37))]), &leads());
    let json = serde_json::to_value(only(&view)).unwrap();
    let expected = serde_json::json!({
        "kind": "case-waiting",
        "urgency": "critical",
        "nodes": ["n1"],
        "since": hours(37),
        "text": "n1: waiting for an operator for 37h: storage is slow",
        "next": "doctor release n1 --why …",
        "case": CaseId::from_number(1),
    });
    assert_eq!(json, expected);
    assert_eq!(serde_json::from_value::<AttentionItem>(json).unwrap(), *only(&view));
}

#[test]
fn a_service_that_leads_and_observes_has_nothing_to_report() {
    let view = status(&cluster().with("a"), &leads());
    assert_eq!((view.state, kinds(&view)), (OverallState::Ok, vec![]));
}

#[test]
fn a_missing_leader_is_critical_and_one_that_stopped_is_a_notice_then_a_warning_then_critical() {
    let stored = |leader| StoredStatus { leader, ..StoredStatus::default() };
    let view = status(&cluster(), &stored(Some(("ctl".into(), hours(1)))));
    assert_eq!((only(&view).urgency, only(&view).since), (Urgency::Critical, Some(hours(1))));
    assert!(only(&view).text.contains("the lease of ctl expired 1h ago"));

    let stopped = |ago| {
        let (mut facts, at) = (cluster(), Some(NOW.minus(ago)));
        (facts.observed_at, facts.cycle_at) = (at, at);
        let view = status(&facts, &stored(None));
        assert!(only(&view).text.contains("the last one stopped after its cycle of"), "{:?}", only(&view));
        view.state
    };
    assert_eq!(stopped(Span::minutes(10)), OverallState::Ok);
    assert_eq!(stopped(Span::minutes(20)), OverallState::Warning);
    assert_eq!(stopped(Span::hours(2)), OverallState::Critical);
}

#[test]
fn a_cluster_that_answered_none_of_a_timer_s_controllers_is_critical_although_none_leads() {
    let observed = |minutes| {
        let mut facts = cluster();
        facts.observed_at = Some(NOW.minus(Span::minutes(minutes)));
        let problem = Some("connection refused".to_owned());
        let cycle = CycleView { at: NOW, duration: None, actions: 0, submitted: 0, problem };
        kinds(&status(&facts, &StoredStatus { last_cycle: Some(cycle), ..StoredStatus::default() }))
    };
    assert_eq!(observed(600), [AttentionKind::ObservationOld, AttentionKind::NoController]);
    assert_eq!(observed(0), [AttentionKind::CycleProblem, AttentionKind::NoController]);
}

#[test]
fn a_cluster_that_was_never_observed_is_unknown_and_not_ok() {
    let mut facts = cluster();
    (facts.observed_at, facts.cycle_at) = (None, None);
    let view = status(&facts, &StoredStatus::default());
    assert_eq!((view.state, only(&view).urgency), (OverallState::Unknown, Urgency::Critical));
    assert!(only(&view).text.contains("none has run a cycle yet"));
    let cycle = CycleView { at: NOW, duration: None, actions: 0, submitted: 0, problem: Some("no route".into()) };
    let view = status(&facts, &StoredStatus { last_cycle: Some(cycle), ..leads() });
    assert_eq!((view.state, only(&view).kind), (OverallState::Unknown, AttentionKind::ObservationOld));
    assert!(only(&view).text.ends_with("never observed; the last cycle: no route"));
}

#[test]
fn the_clock_is_that_of_the_last_answer_of_the_cluster() {
    let observed = |minutes, problem: Option<&str>| {
        let mut facts = cluster().with("a");
        facts.observed_at = Some(NOW.minus(Span::minutes(minutes)));
        let problem = problem.map(str::to_owned);
        let cycle = CycleView { at: NOW, duration: None, actions: 0, submitted: 0, problem };
        // While the cluster does not answer, no occupancy is known: that is no second item.
        if minutes > 0 {
            facts.snapshot.nodes[0].node_mut().occupancy = Occupancy::Unknown { why: "refused".into() };
        }
        let view = status(&facts, &StoredStatus { last_cycle: Some(cycle), ..leads() });
        view.attention.into_iter().map(|item| (item.kind, item.urgency, item.text)).collect::<Vec<_>>()
    };
    assert_eq!(observed(0, None), []);
    let [(AttentionKind::CycleProblem, Urgency::Warning, text)] = &observed(0, Some("no share"))[..] else { panic!() };
    assert_eq!(text, "problem in the last cycle: no share");
    let [(AttentionKind::ObservationOld, Urgency::Warning, text)] = &observed(5, Some("refused"))[..] else { panic!() };
    assert!(text.starts_with("the cluster was last observed 5m ago (") && text.ends_with("; the last cycle: refused"));
    let [(AttentionKind::ObservationOld, Urgency::Critical, _)] = &observed(16, None)[..] else { panic!() };
}

#[test]
fn items_are_ordered_by_urgency_and_the_worst_decides() {
    let mut facts = fleet();
    facts.snapshot.nodes[0].node_mut().occupancy = Occupancy::Unknown { why: "no answer".into() };
    for record in &mut facts.snapshot.nodes {
        record.last_report = Some(hours(1));
    }
    facts.snapshot.breaker = Breaker::Open { since: days(0), why: "3 nodes within the hour".into() };
    facts.snapshot.pauses =
        vec![Pause { pool: None, by: "ann".into(), why: "upgrade".into(), since: days(1), until: None }];
    facts.snapshot.nodes[1].hold = Some(Hold { by: "bob".into(), why: "fan".into(), since: days(2), until: None });
    let view = status(&facts, &leads());
    use AttentionKind::{AgentsSilent, BreakerOpen, Held, OccupancyUnknown, Paused};
    assert_eq!(kinds(&view), [BreakerOpen, AgentsSilent, OccupancyUnknown, Paused, Held]);
    assert_eq!(view.state, OverallState::Critical);
    assert!(view.attention.is_sorted_by_key(|item| item.urgency));
    for (kind, text, next) in [
        (BreakerOpen, "breaker is open: 3 nodes within the hour", "doctor breaker close --why …"),
        (AgentsSilent, "30 of 30 agents are silent, up to 1h: check the network first", "doctor agent list"),
        (OccupancyUnknown, "a00: occupancy unknown, not tested: no answer", "doctor why a00"),
        (Paused, "paused everywhere by ann until resumed: upgrade", "doctor resume --why …"),
        (Held, "a01: held by bob for 2d: fan", "doctor release a01 --why …"),
    ] {
        let item = view.attention.iter().find(|item| item.kind == kind).unwrap();
        assert!(item.text.contains(text), "{text}: {}", item.text);
        assert_eq!(item.next.as_deref(), Some(next));
    }
}

#[test]
fn a_pause_with_an_end_and_another_partys_mark_are_notices() {
    let mut facts = cluster().with("a").change(|record| {
        let mark = ForeignMark { by: "slurm".into(), text: "kernel update".into(), blocks: true };
        record.node_mut().marks.foreign.push(mark);
    });
    let until = Some(NOW.plus(Span::hours(1)));
    let pool = facts.snapshot.nodes[0].node.pool.clone();
    facts.snapshot.pauses =
        vec![Pause { pool: Some(pool), by: "ann".into(), why: "upgrade".into(), since: NOW, until }];
    let view = status(&facts, &leads());
    assert_eq!(kinds(&view), [AttentionKind::Paused, AttentionKind::ForeignMark]);
    assert_eq!(view.state, OverallState::Ok);
    assert_eq!(view.attention[0].next.as_deref(), Some("doctor resume --pool gpu --why …"));
    assert_eq!(view.attention[1].text, "a: kept out of service by slurm, not tested: kernel update");
}

#[test]
fn a_case_that_waits_is_critical_after_a_day_and_a_notice_once_acknowledged() {
    let handed_over = |ago| vec![step(StepKind::HandOver, StepState::Done, hours(ago))];
    for (ago, acknowledged, urgency) in
        [(2, false, Urgency::Warning), (37, false, Urgency::Critical), (37, true, Urgency::Notice)]
    {
        let mut stored = leads();
        if acknowledged {
            stored.acknowledged = [(CaseId::from_number(1), "ann".to_owned())].into();
        }
        let view = status(&with_case(fleet(), "n1", handed_over(ago)), &stored);
        let item = only(&view);
        assert_eq!((item.urgency, item.case), (urgency, Some(CaseId::from_number(1))));
        assert_eq!(item.text.contains("acknowledged by ann"), acknowledged, "{}", item.text);
    }
    let released =
        vec![step(StepKind::HandOver, StepState::Done, hours(37)), step(StepKind::Release, StepState::Done, hours(1))];
    let view = status(&with_case(fleet(), "n1", released), &leads());
    assert_eq!(only(&view).kind, AttentionKind::OutOfService, "the controller works on it again");
}

#[test]
fn the_next_command_of_a_case_follows_from_its_proposals_and_its_advice() {
    let hand_over = || step(StepKind::HandOver, StepState::Done, hours(2));
    let next = |steps: Vec<Step>, advice: Option<Advice>| {
        let mut facts = with_case(fleet(), "n1", steps);
        facts.snapshot.cases[0].advice = advice;
        only(&status(&facts, &leads())).next.clone().unwrap()
    };
    let proposed = |what| step(what, StepState::Proposed, hours(2));
    for (steps, advice, command) in [
        (vec![hand_over()], None, "doctor release n1 --why …"),
        (vec![hand_over()], Some(Advice::Return), "doctor release n1 --why …"),
        (vec![hand_over()], Some(Advice::Replace), "doctor repair n1 --step replace --why …"),
        (vec![hand_over()], Some(Advice::Reboot), "doctor repair n1 --step reboot --why …"),
        (vec![proposed(StepKind::Replace), hand_over()], None, "doctor repair n1 --step replace --why …"),
        (vec![proposed(StepKind::Reboot)], None, "doctor repair n1 --step reboot --why …"),
        (vec![proposed(StepKind::Mark)], None, "doctor quarantine n1 --why …"),
        (vec![proposed(StepKind::Unmark)], None, "doctor why n1"),
    ] {
        assert_eq!(next(steps, advice), command);
    }
}

#[test]
fn a_proposal_names_the_step_that_the_policy_leaves_to_an_operator() {
    let view = status(&with_case(fleet(), "n1", vec![step(StepKind::Reboot, StepState::Proposed, hours(3))]), &leads());
    let item = only(&view);
    assert_eq!((item.kind, item.urgency), (AttentionKind::Proposal, Urgency::Warning));
    assert_eq!(item.text, "n1: waiting for an operator to reboot for 3h: storage is slow");
    // It has been done since.
    let done =
        vec![step(StepKind::Reboot, StepState::Proposed, hours(3)), step(StepKind::Reboot, StepState::Done, hours(1))];
    assert_eq!(only(&status(&with_case(fleet(), "n1", done), &leads())).kind, AttentionKind::OutOfService);
}

#[test]
fn a_held_node_is_in_an_operators_hands_whatever_its_case_says() {
    let waiting = vec![step(StepKind::HandOver, StepState::Done, hours(37))];
    let facts = with_case(fleet(), "n1", waiting).change(|record| {
        record.hold = Some(Hold { by: "ann".into(), why: "new board".into(), since: hours(1), until: None });
        record.state = NodeState::Held { by: "ann".into() };
    });
    let view = status(&facts, &leads());
    assert_eq!((only(&view).kind, view.state), (AttentionKind::Held, OverallState::Ok));
}

#[test]
fn a_command_that_took_most_of_the_fleet_out_is_two_lines_and_critical() {
    let mut facts = cluster();
    for number in 1..=39 {
        let steps = vec![step(StepKind::HandOver, StepState::Done, hours(1))];
        facts = with_case(facts, &format!("n{number:02}"), steps);
    }
    let view = status(&facts.with("n40"), &leads());
    let [many, waiting] = &view.attention[..] else { panic!("{:#?}", view.attention) };
    assert_eq!(
        (many.kind, many.text.as_str()),
        (AttentionKind::ManyNodesOut, "39 of 40 nodes are out of service: n[01-39]")
    );
    assert_eq!((waiting.kind, waiting.nodes.len(), waiting.case), (AttentionKind::CaseWaiting, 39, None));
    assert!(waiting.text.starts_with("39 nodes (n[01-39]): waiting for an operator for "), "{}", waiting.text);
    assert_eq!(waiting.next.as_deref(), Some("doctor release n[01-39] --why …"));
    assert_eq!(view.state, OverallState::Critical);
}

#[test]
fn a_node_that_the_controller_repairs_is_a_notice_for_a_day() {
    let repairing = |opened: Timestamp| {
        let mut facts = with_case(fleet(), "n1", vec![step(StepKind::Reboot, StepState::Intended, opened)]);
        facts.snapshot.cases[0].opened = opened;
        facts = facts.change(|record| record.state = NodeState::Repairing { step: StepKind::Reboot, tries: 1 });
        let view = status(&facts, &leads());
        (only(&view).urgency, only(&view).text.clone())
    };
    let (urgency, text) = repairing(hours(3));
    assert_eq!(
        (urgency, text.as_str()),
        (Urgency::Notice, "n1: out of service, being repaired (reboot, try 1) for 3h: storage is slow")
    );
    assert_eq!(repairing(hours(30)).0, Urgency::Warning);
}

#[test]
fn a_node_under_repair_that_does_not_answer_has_no_second_item() {
    let mut facts = fleet();
    facts.snapshot.nodes[0].node_mut().occupancy = Occupancy::Unknown { why: "it is rebooting".into() };
    assert_eq!(only(&status(&facts, &leads())).kind, AttentionKind::OccupancyUnknown);
    facts.snapshot.nodes[0].state = NodeState::Out;
    assert_eq!(only(&status(&facts, &leads())).kind, AttentionKind::OutOfService);
}

#[test]
fn silent_agents_are_an_incident_as_the_planner_counts_them() {
    let silent = |silent: usize, agents: usize| {
        let mut facts = cluster();
        for number in 0..agents {
            let last_report = if number < silent { hours(1) } else { NOW };
            facts = facts.with(&format!("n{number:02}")).change(|record| record.last_report = Some(last_report));
        }
        let view = status(&facts, &leads());
        assert_eq!(view.silent.incident, view.state == OverallState::Critical);
        (only(&view).kind, only(&view).urgency, only(&view).nodes.len())
    };
    assert_eq!(silent(1, 10), (AttentionKind::AgentSilent, Urgency::Warning, 1));
    assert_eq!(silent(2, 4), (AttentionKind::AgentSilent, Urgency::Warning, 2), "two are too few to blame the network");
    assert_eq!(silent(3, 20), (AttentionKind::AgentSilent, Urgency::Warning, 3), "15 % are below the limit");
    assert_eq!(silent(3, 10), (AttentionKind::AgentsSilent, Urgency::Critical, 3));
}

fn ended(number: i64, node: &str, failure: Option<(&'static str, Option<&str>)>) -> EndedRun {
    let failure = failure.map(|(code, text)| RunFailure { code, text: text.map(str::to_owned) });
    let run = RunId::from_number(u64::try_from(number).unwrap());
    EndedRun { run, nodes: vec![name(node)], at: NOW.minus(Span::minutes(100 - number)), failure }
}

#[test]
fn jobs_that_fail_in_a_row_on_several_nodes_are_critical_with_their_common_reason() {
    let missing = || Some(("no-result", Some("exec: \"doctor-node\": executable file not found in $PATH")));
    let runs = vec![
        ended(9, "n3", missing()),
        ended(8, "n2", missing()),
        ended(7, "n3", Some(("crashed", None))),
        ended(6, "n1", missing()),
        ended(5, "n1", None),
    ];
    let view = status(&fleet(), &StoredStatus { recent_runs: runs, ..leads() });
    let item = only(&view);
    assert_eq!((item.kind, item.urgency), (AttentionKind::ValidationFailing, Urgency::Critical));
    assert_eq!(names(&item.nodes), ["n1", "n2", "n3"]);
    assert_eq!(
        item.text,
        "the last 4 validation jobs gave no result, on 3 nodes (n[1-3]): no-result (3 of 4): exec: \"doctor-node\": \
         executable file not found in $PATH"
    );
    assert_eq!(item.next, Some(format!("doctor log {}", RunId::from_number(9))));
    assert_eq!(item.since, Some(NOW.minus(Span::minutes(94))));
}

#[test]
fn jobs_that_fail_in_a_row_on_one_node_only_are_a_warning_about_the_node() {
    let crashed = || Some(("crashed", Some("the job ended (failed) without a complete result")));
    let runs =
        vec![ended(9, "n1", None), ended(8, "n7", crashed()), ended(7, "n7", crashed()), ended(6, "n7", crashed())];
    let view = status(&fleet(), &StoredStatus { recent_runs: runs.clone(), ..leads() });
    let item = only(&view);
    assert_eq!((item.urgency, names(&item.nodes)), (Urgency::Warning, vec!["n7"]));
    assert!(
        item.text.starts_with("n7: the last validation jobs gave no result: crashed: the job ended"),
        "{}",
        item.text
    );
    // Two failures, or failures before a result, are no item.
    let view = status(&fleet(), &StoredStatus { recent_runs: runs[..3].to_vec(), ..leads() });
    assert_eq!(kinds(&view), []);
    let mut recovered = runs;
    recovered.insert(0, ended(10, "n7", None));
    assert_eq!(kinds(&status(&fleet(), &StoredStatus { recent_runs: recovered, ..leads() })), []);
}

#[test]
fn a_part_of_a_large_fleet_whose_jobs_fail_for_one_reason_is_reported_although_none_has_failed_three_times() {
    let failing = |failed: i64| {
        let of_node = |number: i64| {
            let failure = (number % 2 == 1 && number < 2 * failed).then_some(("no-result", Some("not found")));
            ended(99 - number, &format!("n{number:02}"), failure)
        };
        status(&fleet(), &StoredStatus { recent_runs: (0..40).map(of_node).collect(), ..leads() })
    };
    assert_eq!(kinds(&failing(3)), [], "3 of 40 nodes may be a coincidence");
    let view = failing(4);
    assert_eq!((only(&view).urgency, only(&view).nodes.len()), (Urgency::Warning, 4));
    let text = "4 nodes (n[01,03,05,07]): the last validation jobs gave no result: no-result: not found";
    assert_eq!(only(&view).text, text);
    assert_eq!(only(&failing(10)).urgency, Urgency::Critical);
}

#[test]
fn overdue_tests_of_free_nodes_are_reported_with_the_reason_and_those_of_busy_nodes_are_a_notice() {
    let overdue = |reason: SkipReason, is_busy: bool, stale_days: i64| {
        let mut facts = cluster().with("a").result("storage", Verdict::Pass, days(stale_days));
        facts = facts.result("dl", Verdict::Pass, NOW);
        if is_busy {
            facts.snapshot.nodes[0].node_mut().occupancy = Occupancy::Busy { by: "job 7".into() };
        }
        facts.skip_reasons.insert(name("a"), SkippedSince { since: hours(1), reason });
        let view = status(&facts, &leads());
        view.attention.into_iter().map(|item| (item.urgency, item.kind, item.text)).collect::<Vec<_>>()
    };
    let expected =
        "a: free, and overdue for more than a day: storage (coverage 0.0 %): today's validation node-hours are spent";
    let warning = (Urgency::Warning, AttentionKind::CoverageLow, expected.to_owned());
    assert_eq!(overdue(SkipReason::BudgetSpent, false, 20), [warning]);
    let in_use = "a: in use, and overdue for more than a day: storage (coverage 0.0 %): tested when users release them";
    let notice = (Urgency::Notice, AttentionKind::CoverageLow, in_use.to_owned());
    assert_eq!(overdue(SkipReason::Busy { by: "job 7".into() }, true, 20), [notice]);
    assert_eq!(overdue(SkipReason::Busy { by: "job 7".into() }, true, 7), [], "it became overdue just now");
    assert_eq!(overdue(SkipReason::BudgetSpent, false, 7), [], "it became overdue just now");
    assert_eq!(overdue(SkipReason::QuietWindow, false, 20), [], "the policy wants it so");
    assert_eq!(overdue(SkipReason::Paused { by: "ann".into() }, false, 20), [], "the pause is an item of its own");
}

#[test]
fn a_test_without_a_result_three_times_in_a_row_is_reported() {
    let mut facts = cluster().with("a").result("storage", Verdict::Pass, days(3)).result("dl", Verdict::Pass, NOW);
    for ago in [2, 1] {
        facts = facts.result("storage", Verdict::Inconclusive, days(ago));
    }
    assert_eq!(kinds(&status(&facts, &leads())), []);
    let view = status(&facts.result("storage", Verdict::Inconclusive, days(0)), &leads());
    assert!(only(&view).text.starts_with("a: no conclusive result of storage (coverage"), "{}", only(&view).text);
    assert_eq!(only(&view).next.as_deref(), Some("doctor history a"));
}

#[test]
fn a_node_on_which_no_test_has_run_is_a_notice_even_if_users_have_it() {
    let mut facts = cluster().with("a").with("b").with("c").result("dl", Verdict::Pass, NOW);
    for node in ["a", "b", "c"] {
        let skipped = SkippedSince { since: hours(1), reason: SkipReason::Busy { by: "job 7".into() } };
        facts.skip_reasons.insert(name(node), skipped);
    }
    let view = status(&facts, &leads());
    assert_eq!((only(&view).kind, view.state), (AttentionKind::NeverTested, OverallState::Ok));
    assert_eq!(only(&view).text, "2 nodes (a,b): no test has run yet: 2 busy");
}

#[test]
fn a_limit_that_cannot_hold_a_period_is_reported() {
    let mut facts = (0..20).fold(cluster(), |facts, n| facts.with(&format!("n{n:02}")));
    let mut policy = Policy::built_in();
    policy.limits.jobs = 1.into();
    facts.snapshot.policy = policy.into();
    assert_eq!(kinds(&status(&facts, &leads())), []);
    let test = facts.snapshot.tests.iter().find(|test| test.routine && test.exclusive).unwrap().id.clone();
    let view = status(&facts, &StoredStatus { durations: [(test, Span::hours(10))].into(), ..leads() });
    assert!(view.attention[0].text.contains("raise `limits.jobs` to"), "{:?}", view.attention);
    let texts: Vec<&String> = view.attention.iter().map(|item| &item.text).collect();
    assert_eq!(texts, view.capacity.shortfalls.iter().collect::<Vec<_>>());
}

#[test]
fn missing_software_is_one_notice_for_the_fleet_with_the_remedy() {
    let facts = cluster().with("n1").with("n2").with("n3");
    let missing = |software, tests: &[&str], nodes: &[&str]| {
        let nodes: Vec<NodeName> = nodes.iter().map(|node| name(node)).collect();
        tests.iter().map(|test| (software, TestId::new(test).unwrap(), nodes.clone())).collect::<Vec<_>>()
    };
    let mut stored = leads();
    stored.missing_software = missing(Software::Fio, &["storage"], &["n1", "n2", "left"]);
    stored.missing_software.extend(missing(Software::Dcgm, &["dcgm", "dcgm-level-4"], &["n1", "n2", "n3"]));
    let view = status(&facts, &stored);
    let [fio, dcgm] = &view.attention[..] else { panic!("{:?}", view.attention) };
    assert!(
        dcgm.text
            .starts_with("DCGM is not installed on any of the 3 nodes: dcgm, dcgm-level-4 not applicable; install")
    );
    assert!(
        fio.text.starts_with("fio is not installed on 2 nodes (n[1-2]): storage not applicable; install the package")
    );
    assert_eq!(names(&fio.nodes), ["n1", "n2"]);
    assert_eq!(view.state, OverallState::Ok, "nothing is wrong with the nodes");
}

#[test]
fn tests_that_one_program_disturbs_repeatedly_are_one_item() {
    let mut facts = cluster();
    for node in ["a", "b", "c", "d", "e"] {
        let mut open = finding("dl", Severity::Monitor, 1, 1);
        let event = Event::disturbed(Entity::node(), "python3 of uid 1000", "used by python3 (pid 7, user ann)");
        if node != "e" {
            open.finding = disturbed_repeatedly(&test_id("dl"), &event);
        }
        facts = facts.with(node).change(|record| record.findings.push(open));
    }
    let view = status(&facts, &leads());
    assert_eq!(names(&only(&view).nodes), ["a", "b", "c", "d"]);
    for part in
        ["4 nodes:", "a: dl disturbed 3 times in a row by python3 of uid 1000", "(pid 7, user ann)", "; 1 more)"]
    {
        assert!(only(&view).text.contains(part), "{part}: {}", only(&view).text);
    }
}

#[test]
fn rejected_results_are_shown_for_a_day_and_lost_messages_while_they_count() {
    let rejected = |ago| status(&fleet(), &StoredStatus { rejected: 7, rejected_at: Some(hours(ago)), ..leads() });
    assert!(only(&rejected(2)).text.starts_with("results or reports rejected so far: 7, the last 2h ago"));
    assert_eq!(kinds(&rejected(25)), []);
    let view = status(&fleet(), &StoredStatus { alerts_lost: 2, ..leads() });
    assert_eq!((only(&view).kind, view.state), (AttentionKind::AlertsLost, OverallState::Warning));
}

#[test]
fn coverage_is_summed_by_suite_with_the_names_of_tests_that_are_not_pass() {
    let mut facts = cluster();
    let mut tests = facts.snapshot.tests.to_vec();
    tests[1].suite = Some(test_id("standard"));
    facts.snapshot.tests = tests.into();
    let facts = facts.with("a").result("dl", Verdict::Pass, NOW).with("b").result("dl", Verdict::Pass, NOW);
    let suites = crate::view::coverage_by_suite(&status(&facts, &leads()).coverage);
    let [other, standard] = &suites[..] else { panic!("{suites:?}") };
    assert_eq!((other.suite.as_str(), other.percent, other.not_pass.len()), ("other", Some(100.0), 0));
    assert_eq!((standard.suite.as_str(), standard.percent), ("standard", Some(0.0)));
    assert_eq!(
        (standard.not_pass.clone(), standard.lowest.clone()),
        (vec![test_id("storage")], Some((test_id("storage"), 0.0)))
    );
}

#[test]
fn a_requested_repair_that_waits_is_listed_and_one_that_begins_next_is_not() {
    let asked = |mut facts: Facts, node: &str| {
        let kind = CommandKind::Repair { node: name(node), step: Repair::Reboot, evict: false };
        let id = 1 + facts.snapshot.commands.len() as u64;
        facts.snapshot.commands.push(PendingCommand { id, by: "ann".into(), why: "hangs".into(), at: hours(3), kind });
        facts
    };
    let paused = |mut facts: Facts| {
        let (by, why, since) = ("bob".to_owned(), "upgrade".to_owned(), hours(4));
        facts.snapshot.pauses.push(Pause { pool: None, by, why, since, until: Some(NOW.plus(Span::hours(1))) });
        facts
    };
    let view = status(&asked(fleet(), "a01"), &leads());
    assert!(view.attention.is_empty(), "it begins in the next cycle: {:#?}", view.attention);
    let view = status(&paused(asked(asked(fleet(), "a01"), "a02")), &leads());
    let item = view.attention.iter().find(|item| item.kind == AttentionKind::RepairWaiting).unwrap();
    assert_eq!((item.urgency, item.since, names(&item.nodes)), (Urgency::Notice, Some(hours(3)), vec!["a01", "a02"]));
    assert!(
        item.text.starts_with("2 nodes (a[01-02]): reboot requested by ann waits for 3h: everything is paused by bob")
    );
    assert_eq!(item.next.as_deref(), Some("doctor why a01"));
}
