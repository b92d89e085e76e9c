//! Properties of every plan, over random clusters and random sequences of events.

use std::collections::{BTreeMap, BTreeSet};

use proptest::{collection::vec, prelude::*};

use super::{
    super::{Action, Plan, SkipReason, plan},
    cluster::{Cluster, Spans},
    model,
    random::{ClusterEvent, a_cluster, a_young_cluster, an_event, apply_event, long_after, occupancy},
};
use crate::{
    access::Place,
    case::{Case, Step, StepKind, StepState},
    finding::{Severity, Verdict},
    ids::{CaseId, NodeName, OpId, RunId},
    lifecycle::{NodeEvent, NodeState},
    policy::{Mode, TestPolicy},
    run::{ObservedJobState, Purpose, Run},
    snapshot::{ActiveRun, Breaker, NodeRecord, Snapshot, TestRecord},
    time::{Span, Timestamp},
};

/// Checks all properties of a plan on a snapshot.
fn check(snapshot: &Snapshot, plan: &Plan) {
    every_node_is_accounted_for_once(snapshot, plan);
    runs_go_only_where_they_may(snapshot, plan);
    no_limit_is_exceeded(snapshot, plan);
    the_breaker_holds(snapshot, plan);
    the_stalest_come_first(snapshot, plan);
    moves_are_legal(snapshot, plan);
    only_confirmed_trouble_takes_out(snapshot, plan);
    only_a_proof_brings_back(snapshot, plan);
    steps_are_allowed_and_careful(snapshot, plan);
}

fn submits(plan: &Plan) -> Vec<&Run> {
    plan.actions
        .iter()
        .filter_map(|action| if let Action::Submit(run) = &action.value { Some(run) } else { None })
        .collect()
}

fn find<'a>(snapshot: &'a Snapshot, name: &NodeName) -> &'a NodeRecord {
    snapshot.nodes.iter().find(|record| record.node.name == *name).expect("plans name nodes of the snapshot")
}

/// Returns the nodes that an action is about. A case belongs to its node, or to the node that this plan moves it to.
fn named(snapshot: &Snapshot, plan: &Plan, action: &Action) -> Vec<NodeName> {
    let of_case = |id: &CaseId| {
        let followed = plan.actions.iter().find_map(|action| match &action.value {
            Action::RebindCase { case, node } if case == id => Some(node.clone()),
            _ => None,
        });
        let case = snapshot.cases.iter().find(|case| case.id == *id).expect("a case of the snapshot");
        vec![followed.unwrap_or_else(|| case.node.clone())]
    };
    let of_run = |id: &RunId| {
        let active = snapshot.runs.iter().find(|active| active.run.id == *id).expect("a run of the snapshot");
        active.run.nodes.to_vec()
    };
    match action {
        Action::Submit(run) => run.nodes.to_vec(),
        Action::Resubmit { run } | Action::Cancel { run, .. } | Action::Conclude { run, .. } => of_run(run),
        Action::OpenCase(case) => vec![case.node.clone()],
        Action::RaiseSeverity { node, .. }
        | Action::Advise { node, .. }
        | Action::Step { node, .. }
        | Action::RequestRepair { node, .. }
        | Action::Propose { node, .. }
        | Action::WithdrawStep { node, .. }
        | Action::SetState { node, .. }
        | Action::CloseCase { node, .. }
        | Action::RebindCase { node, .. }
        | Action::HardwareIdentified { node, .. }
        | Action::RemoveMaintenanceMark { node, .. }
        | Action::AttributeFault { node, .. }
        | Action::HardwareReplaced { node, .. } => vec![node.clone()],
        Action::Escalate { case, .. } | Action::CompleteStep { case, .. } => of_case(case),
        Action::OpenBreaker
        | Action::Notice(_)
        | Action::CompleteCommand { .. }
        | Action::WithdrawCommand { .. }
        | Action::StartTrial { .. } => Vec::new(),
    }
}

fn every_node_is_accounted_for_once(snapshot: &Snapshot, plan: &Plan) {
    let mut spoken_for: BTreeSet<NodeName> =
        plan.actions.iter().flat_map(|action| named(snapshot, plan, &action.value)).collect();
    spoken_for.extend(snapshot.runs.iter().flat_map(|active| active.run.nodes.iter().cloned()));
    let passed: Vec<&NodeName> = plan.skipped.iter().map(|(node, _)| node).collect();
    assert!(passed.is_sorted() && passed.windows(2).all(|pair| pair[0] != pair[1]), "each once: {passed:?}");
    for record in &snapshot.nodes {
        let name = &record.node.name;
        assert_ne!(spoken_for.contains(name), passed.contains(&name), "{name} {plan:#?}");
    }
    assert!(passed.iter().all(|name| snapshot.nodes.iter().any(|record| record.node.name == **name)));
}

fn runs_go_only_where_they_may(snapshot: &Snapshot, plan: &Plan) {
    let mut taken: BTreeSet<NodeName> =
        snapshot.runs.iter().flat_map(|active| active.run.nodes.iter().cloned()).collect();
    for run in submits(plan) {
        for node in run.nodes.iter() {
            assert!(taken.insert(node.clone()), "{node} would have two runs");
            let record = find(snapshot, node);
            assert!(record.node.occupancy.is_free(), "{node} is not free");
            assert!(
                !matches!(record.state, NodeState::Held { .. }) && record.hold_at(snapshot.at).is_none(),
                "{node} is held"
            );
            assert!(record.node.marks.blocking_foreign_mark().is_none(), "another party marked {node}");
            let has_agent = match run.purpose.value {
                Purpose::Validation | Purpose::Confirmation => agent_reports(snapshot, record),
                Purpose::Requalification => record.last_report.is_some(),
                Purpose::Requested => false,
            };
            let doubled = run.tests.iter().find(|id| has_agent && policy_of(snapshot, id).place == Place::Agent);
            assert_eq!(doubled, None, "the agent of {node} runs it");
            if matches!(run.purpose.value, Purpose::Validation | Purpose::Confirmation) {
                assert!(!record.state.is_out_of_service() && record.node.marks.ours.is_empty(), "{node} is out");
                assert!(record.backoff.is_none_or(|backoff| backoff.until <= snapshot.at), "{node} backs off");
            }
        }
    }
    for action in &plan.actions {
        if let Action::Resubmit { run } = action.value {
            let active = snapshot.runs.iter().find(|active| active.run.id == run).unwrap();
            assert!(active.run.nodes.iter().all(|node| find(snapshot, node).node.occupancy.is_free()));
        }
    }
}

/// Runs that count against the limits: all but those that could not be cancelled for a quarter of an hour.
fn counted(snapshot: &Snapshot) -> impl Iterator<Item = &ActiveRun> {
    snapshot
        .runs
        .iter()
        .filter(|active| active.cancelling.is_none_or(|cancelling| snapshot.at.since(cancelling.since) < 15.minutes()))
}

fn no_limit_is_exceeded(snapshot: &Snapshot, plan: &Plan) {
    let new = submits(plan);
    let limits = &snapshot.policy.limits;
    let all: Vec<&Run> = counted(snapshot).map(|active| &active.run).chain(new.iter().copied()).collect();
    let count_of = |matches: &dyn Fn(&Run) -> bool| {
        let any_new = new.iter().any(|run| matches(run));
        let count = all.iter().filter(|run| matches(run)).count();
        if any_new { u32::try_from(count).unwrap() } else { 0 }
    };
    assert!(count_of(&|_| true) <= limits.jobs.for_nodes(snapshot.nodes.len()));
    for (pool, most) in &limits.pools {
        assert!(
            count_of(&|run| run.nodes.iter().any(|node| find(snapshot, node).node.pool == *pool)) <= *most,
            "{pool}"
        );
    }
    for test in snapshot.tests.iter() {
        if let Some(most) = test.max_concurrent {
            assert!(count_of(&|run| run.tests.contains(&test.id)) <= most, "{}", test.id);
        }
        for share in &test.shares {
            let loads = |run: &Run| run.tests.iter().any(|id| policy_of(snapshot, id).shares.contains(share));
            assert!(count_of(&loads) <= limits.per_share, "{share}");
        }
    }
    budget_is_kept(snapshot, &new);
}

fn policy_of<'a>(snapshot: &'a Snapshot, id: &crate::ids::TestId) -> &'a TestPolicy {
    snapshot.tests.iter().find(|test| test.id == *id).unwrap()
}

fn budget_is_kept(snapshot: &Snapshot, new: &[&Run]) {
    let validates = new.iter().any(|run| matches!(run.purpose.value, Purpose::Validation | Purpose::Confirmation));
    let Some(hours) = snapshot.policy.limits.node_hours_per_day.filter(|_| validates) else { return };
    let usual = |run: &Run| run.tests.iter().map(|id| policy_of(snapshot, id).typical_duration).sum::<Span>();
    let running = counted(snapshot).map(|active| match active.job {
        ObservedJobState::Running { since, .. } => usual(&active.run).max(snapshot.at.since(since)),
        _ => usual(&active.run),
    });
    let spent = snapshot.spent + running.sum() + new.iter().map(|run| usual(run)).sum();
    assert!(spent.as_hours() <= hours, "{spent} of {hours} h");
}

fn is_automatic(code: &str) -> bool {
    matches!(code, "confirmed" | "now-allowed")
}

/// Nodes that the plan takes out automatically.
fn taken_out<'a>(snapshot: &'a Snapshot, plan: &'a Plan) -> Vec<&'a NodeRecord> {
    let moves = plan.actions.iter().filter_map(|action| match &action.value {
        Action::SetState { node, to: NodeState::Quarantined, .. } if is_automatic(action.code.as_str()) => Some(node),
        _ => None,
    });
    moves.map(|node| find(snapshot, node)).collect()
}

fn is_out(record: &NodeRecord) -> bool {
    record.state.is_out_of_service()
        || !record.node.marks.ours.is_empty()
        || record.node.marks.blocking_foreign_mark().is_some()
}

fn the_breaker_holds(snapshot: &Snapshot, plan: &Plan) {
    let taken = taken_out(snapshot, plan);
    let opens = plan.actions.iter().filter(|action| action.value == Action::OpenBreaker).count();
    let since = match &snapshot.breaker {
        Breaker::Open { .. } => {
            assert!(taken.is_empty() && opens == 0, "an open breaker takes no node out and is reported once");
            return;
        }
        Breaker::Closed { since } => since.unwrap_or(Timestamp::MIN),
    };
    assert!(opens <= 1);
    if taken.is_empty() {
        return;
    }
    let hour_ago = snapshot.at.minus(1.hours());
    let lately = snapshot.recent.taken_out.iter().filter(|(_, at)| *at > hour_ago && *at > since);
    let lately: BTreeSet<&NodeName> = lately.map(|(node, _)| node).collect();
    assert!(lately.len() + taken.len() <= snapshot.policy.breaker.nodes_per_hour as usize);
    for record in &taken {
        let pool: Vec<_> = snapshot.nodes.iter().filter(|other| other.node.pool == record.node.pool).collect();
        let added = taken.iter().filter(|other| other.node.pool == record.node.pool && !is_out(other)).count();
        let out = pool.iter().filter(|other| is_out(other)).count() + added;
        #[expect(clippy::cast_precision_loss, reason = "a handful of nodes")]
        let share = out as f64 * 100.0 / pool.len() as f64;
        assert!(out == 1 || share <= snapshot.policy.breaker.percent_of_pool, "{out} of {}", pool.len());
    }
}

fn agent_reports(snapshot: &Snapshot, record: &NodeRecord) -> bool {
    record.last_report.is_some_and(|last| snapshot.at.since(last) <= snapshot.policy.agents.silent_after)
}

/// Computes the queue position of a node independently: suspects, then nodes with due tests, then nodes on which user
/// work failed, then the stalest, then by name.
fn rank(snapshot: &Snapshot, record: &NodeRecord) -> (bool, bool, i32, Timestamp, NodeName) {
    let (retry, limits) = (&snapshot.policy.retry, &snapshot.policy.limits);
    let (mut age, mut early_age) = (Timestamp::MAX, Timestamp::MAX);
    for (test, known) in snapshot.tests.iter().zip(&record.test_records) {
        let by_agent = test.place == Place::Agent && agent_reports(snapshot, record);
        let applies = !by_agent && test.pools.as_ref().is_none_or(|pools| pools.contains(&record.node.pool));
        let mut due = known.settled().map_or(Timestamp::MIN, |at| at.plus(test.cutoff));
        let pause = known.backoff(retry.inconclusive, retry.inconclusive_cap);
        if known.misses() > 0 {
            due = due.max(known.attempt().unwrap().plus(pause));
        }
        if let Some(failed) = &record.job_failures
            && f64::from(failed.weight.0) >= 1000.0 * snapshot.policy.user_work.retest
            && known.attempt().is_none_or(|attempt| attempt < failed.failures[0].at)
        {
            due = due.min(failed.failures[0].at);
        }
        for open in record.findings.iter().filter(|open| open.finding.check == test.id) {
            let wait = if open.is_confirmed() { 1.days() } else { retry.confirm };
            if let Some(attempt) = known.attempt() {
                due = due.min(attempt.plus(wait.max(pause)));
            }
        }
        if applies && due <= snapshot.at {
            let last = if known.misses() > 0 { known.attempt() } else { known.settled() };
            age = age.min(last.unwrap_or(Timestamp::MIN));
        } else if let Some(at) = known.judged().filter(|_| applies && known.misses() == 0) {
            let ahead = limits.renew_ahead.min(Span::from_millis(test.cutoff.millis() - test.cutoff.millis() / 6));
            let allowed = limits.node_hours_per_day.is_none() && ahead > Span::ZERO;
            if allowed && at.plus(test.cutoff).minus(ahead) <= snapshot.at {
                early_age = early_age.min(at);
            }
        }
    }
    let is_early = age == Timestamp::MAX;
    let age = if is_early { early_age } else { age };
    let risk = record.job_failures.as_ref().map_or(0, |failed| i32::from(failed.weight.0));
    (record.state != NodeState::Suspect && record.findings.is_empty(), is_early, -risk, age, record.node.name.clone())
}

fn the_stalest_come_first(snapshot: &Snapshot, plan: &Plan) {
    let ours = submits(plan)
        .into_iter()
        .filter(|run| matches!(run.purpose.value, Purpose::Validation | Purpose::Confirmation));
    let chosen: Vec<_> = ours.map(|run| rank(snapshot, find(snapshot, run.nodes.first()))).collect();
    assert!(chosen.is_sorted(), "{chosen:?}");
    let Some(last) = chosen.last() else { return };
    for (node, why) in &plan.skipped {
        if *why == SkipReason::WaitingForSlot {
            assert!(rank(snapshot, find(snapshot, node)) > *last, "{node} was before {last:?}");
        }
    }
}

fn events(to: &NodeState) -> Vec<NodeEvent> {
    use NodeEvent as E;
    let mut events =
        vec![E::Suspected, E::Cleared, E::TakenOut, E::StepEnded, E::RequalificationEnded, E::HandedOver, E::Returned];
    events.extend([E::HoldEnded { out: true }, E::HoldEnded { out: false }]);
    match to {
        NodeState::Repairing { step, tries } => events.push(E::StepStarted { step: *step, attempts: *tries }),
        NodeState::Requalifying { run } => events.push(E::RequalificationStarted { run: *run }),
        NodeState::Held { by } => events.push(E::Held { by: by.clone() }),
        _ => {}
    }
    events
}

fn moves_are_legal(snapshot: &Snapshot, plan: &Plan) {
    let mut renamed = BTreeSet::new();
    let mut moved = BTreeSet::new();
    for action in &plan.actions {
        match &action.value {
            Action::HardwareReplaced { node, .. } => drop(renamed.insert(node.clone())),
            Action::SetState { node, to, case } => {
                assert!(moved.insert(node.clone()), "{node} moves twice: {:#?}", plan.actions);
                let record = find(snapshot, node);
                let from = if renamed.contains(node) { &NodeState::InService } else { &record.state };
                let legal = events(to).iter().any(|event| from.apply(event).as_ref() == Some(to));
                let only_the_case = from == to && *case != record.case;
                assert!(legal || only_the_case, "{node}: {from:?} to {to:?}");
            }
            _ => {}
        }
    }
}

/// Inconclusive results, silence and suspicion open no case; only a confirmed failure does.
fn only_confirmed_trouble_takes_out(snapshot: &Snapshot, plan: &Plan) {
    for record in taken_out(snapshot, plan) {
        let sure = record.findings.iter().any(|open| {
            open.finding.verdict == Verdict::Fail
                && open.sightings >= open.finding.confirm
                && open.finding.severity > Severity::Monitor
        });
        assert!(sure, "{} was taken out for {:?}", record.node.name, record.findings);
    }
}

fn only_a_proof_brings_back(snapshot: &Snapshot, plan: &Plan) {
    for action in &plan.actions {
        let Action::SetState { node, to: NodeState::InService | NodeState::Suspect, .. } = &action.value else {
            continue;
        };
        let record = find(snapshot, node);
        if !record.state.is_out_of_service() {
            continue;
        }
        let NodeState::Requalifying { run } = record.state else { panic!("{node} came back from {:?}", record.state) };
        assert_eq!(action.code.as_str(), "proved");
        let case = snapshot.cases.iter().find(|case| Some(case.id) == record.case).unwrap();
        let of = |what: &[StepKind]| {
            let is_of = |step: &&Step| what.contains(&step.what) && step.state == StepState::Done;
            case.steps.iter().filter(is_of).map(|step| step.op).next_back()
        };
        let position = |op| case.steps.iter().position(|step| Some(step.op) == op);
        let repaired = position(of(&[StepKind::Reset, StepKind::Reboot]));
        let requalified = position(of(&[StepKind::Requalify]));
        assert!(repaired <= requalified, "{node} came back on tests from before its repair");
        let began = requalified.map(|index| case.steps[index].at).into_iter().chain(run.map(RunId::born)).min();
        required_tests_passed(snapshot, record, case, began.unwrap_or(record.since));
        assert!(record.node.marks.ours.is_empty() && record.node.marks.blocking_foreign_mark().is_none());
    }
}

/// Every required test has a conclusive result since then, from the agent or from the run, and none of them fails.
fn required_tests_passed(snapshot: &Snapshot, record: &NodeRecord, case: &Case, since: Timestamp) {
    let node = &record.node.name;
    let mut passed = 0;
    for (test, known) in snapshot.tests.iter().zip(&record.test_records) {
        let had_failed = case.findings.iter().any(|finding| finding.check == test.id);
        let open: Vec<_> = record.findings.iter().filter(|open| open.finding.check == test.id).collect();
        let applies = test.pools.as_ref().is_none_or(|pools| pools.contains(&record.node.pool));
        if !applies || !(test.routine || had_failed || !open.is_empty()) {
            continue;
        }
        assert!(known.attempt().is_some_and(|at| at >= since), "{node}: {} is older than {since}: {known:?}", test.id);
        let only_watched = !open.is_empty() && open.iter().all(|open| open.finding.severity == Severity::Monitor);
        match known.verdict().unwrap() {
            Verdict::Pass => passed += 1,
            Verdict::NotApplicable => assert!(!had_failed, "{node}: {} had failed", test.id),
            Verdict::Fail => assert!(only_watched && !had_failed, "{node}: {} fails", test.id),
            Verdict::Inconclusive => panic!("{node}: {} is inconclusive", test.id),
        }
    }
    assert!(passed > 0, "{node} came back without a pass");
}

fn steps_are_allowed_and_careful(snapshot: &Snapshot, plan: &Plan) {
    use StepKind as S;
    let (policy, caps) = (&snapshot.policy, &snapshot.capabilities);
    let (acting, observing) = (policy.mode == Mode::Act, policy.mode == Mode::Observe);
    for action in &plan.actions {
        let Action::Step { case, node, step, op, .. } = &action.value else { continue };
        let record = find(snapshot, node);
        let opened = plan.actions.iter().find_map(|action| match &action.value {
            Action::OpenCase(new) if new.id == *case => Some(new),
            _ => None,
        });
        let of = snapshot.cases.iter().find(|known| known.id == *case).or(opened);
        let ordered = !observing && of.is_some_and(|case| case.is_under_examination() && case.step(*step).is_some());
        let asked = of.is_some_and(|case| requested_step_is_in_order(snapshot, record, case, (*step, *op)));
        let allowed = match step {
            S::Mark => (ordered || asked || !observing && policy.allow.mark) && caps.mark,
            S::Drain => (ordered || asked || acting && policy.allow.drain) && caps.drain,
            S::Evict => (ordered || asked || acting && policy.allow.evict) && caps.evict,
            S::Reset => (asked || acting && policy.allow.reset) && caps.reset,
            S::Reboot => (asked || acting && policy.allow.reboot) && caps.reboot,
            S::Replace => (asked || acting && policy.allow.replace) && caps.replace,
            S::Unmark | S::Undrain => !observing,
            S::SaveEvidence | S::Requalify | S::Examine | S::HandOver | S::Release | S::RequestRepair => true,
        };
        assert!(allowed, "{step} on {node} is not allowed");
        if matches!(step, S::Mark | S::Drain | S::Evict | S::Reset | S::Reboot | S::Replace | S::Unmark | S::Undrain) {
            assert!(
                record.node.marks.blocking_foreign_mark().is_none(),
                "{step} on {node}, which another party marked"
            );
            assert!(record.hold_at(snapshot.at).is_none(), "{step} on {node}, which is held");
        }
        if step.destroys_evidence() {
            assert!(!matches!(record.node.occupancy, crate::node::Occupancy::Busy { .. }), "{step} under user work");
            let case = snapshot.cases.iter().find(|known| known.id == *case).unwrap();
            let ended = case.steps.iter().filter(|step| matches!(step.state, StepState::Done | StepState::Failed));
            let last = ended.rev().find(|step| step.what == S::SaveEvidence || step.what.destroys_evidence());
            let saved = last.is_some_and(|step| step.what == S::SaveEvidence && step.state == StepState::Done);
            assert!(saved || case.steps.iter().any(|step| step.op == *op), "{step} on {node} without saved evidence");
        }
    }
}

/// Checks a step of a case with a repair that an operator requested: it is that repair, by its one operation, and nothing
/// begins in mode `observe` or during a pause. The repair has begun once it was sent, not when it was intended. Returns
/// whether there is such a repair.
fn requested_step_is_in_order(
    snapshot: &Snapshot,
    record: &NodeRecord,
    case: &Case,
    (step, op): (StepKind, OpId),
) -> bool {
    let Some((_, repair)) = case.requested_repair() else { return false };
    let name = &record.node.name;
    if step.destroys_evidence() {
        assert_eq!((step, op), (repair.what.step(), repair.op), "{name}: not the step that was requested");
    }
    assert!(step != StepKind::Evict || repair.evict, "{name}: eviction was not requested");
    let begins = match step {
        StepKind::Evict => true,
        _ if step.destroys_evidence() => repair.sent.is_none(),
        _ => !case.steps.iter().any(|known| known.op == op && known.state == StepState::Intended),
    };
    let blocked = super::super::repair_block(snapshot, &record.node.pool).is_some();
    let changes = step.destroys_evidence() || matches!(step, StepKind::Mark | StepKind::Drain | StepKind::Evict);
    assert!(!(begins && changes && blocked), "{step} on {name} begins although repairs are blocked");
    true
}

/// Plans, checks, and executes the plan.
fn cycle(cluster: &mut Cluster) -> Plan {
    let plan = plan(&cluster.snapshot, &mut cluster.ids);
    check(&cluster.snapshot, &plan);
    model::carry_out(&mut cluster.snapshot, &plan.actions);
    plan
}

/// After a plan was executed: no node has two runs, and every node that is out has a reason.
fn check_world(snapshot: &Snapshot) {
    let mut busy = BTreeSet::new();
    for active in &snapshot.runs {
        for node in active.run.nodes.iter() {
            assert!(busy.insert(node.clone()), "{node} has two runs");
        }
    }
    let mut by_case: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for record in &snapshot.nodes {
        by_case.entry(record.case).or_default().push(record.node.name.clone());
    }
    for (case, nodes) in by_case {
        assert!(case.is_none() || nodes.len() == 1, "{case:?} is claimed by {nodes:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_plan_of_a_random_cluster_obeys_the_rules(cluster in a_cluster()) {
        check(&cluster.snapshot, &cluster.plan());
    }

    #[test]
    fn the_same_snapshot_gives_the_same_plan(cluster in a_cluster()) {
        prop_assert_eq!(cluster.plan(), cluster.plan());
    }

    #[test]
    fn planning_again_after_submitting_submits_nothing_new(mut cluster in a_cluster()) {
        let plan = cluster.plan();
        let submits: Vec<_> =
            plan.actions.iter().filter(|action| matches!(action.value, Action::Submit(_))).cloned().collect();
        model::carry_out(&mut cluster.snapshot, &submits);
        prop_assert_eq!(cluster.chosen(), Vec::<String>::new());
    }

    #[test]
    fn repeated_planning_without_events_converges(mut cluster in a_cluster()) {
        let mut seen = BTreeSet::new();
        for round in 0..30 {
            let plan = cycle(&mut cluster);
            check_world(&cluster.snapshot);
            for run in submits(&plan) {
                prop_assert!(seen.insert(run.nodes.first().clone()), "{} twice", run.nodes.first());
            }
            let quiet = plan.actions.iter().all(|action| matches!(action.value, Action::Cancel { .. }));
            if quiet && round > 0 {
                return Ok(());
            }
        }
        prop_assert!(false, "the plan never becomes empty: {:#?}", cluster.lines());
    }

    #[test]
    fn every_plan_obeys_the_rules_after_any_events(
        mut cluster in a_young_cluster(),
        story in vec(vec(an_event(), 0..4), 1..40),
    ) {
        for events in &story {
            for event in events {
                apply_event(&mut cluster, event);
            }
            cycle(&mut cluster);
            check_world(&cluster.snapshot);
        }
    }

    #[test]
    fn inconclusive_results_neither_isolate_nor_return_a_node(
        mut cluster in a_cluster(),
        story in vec((0_usize..9, 0_u8..5), 1..30),
    ) {
        for record in &mut cluster.snapshot.nodes {
            record.findings.clear();
            for known in record.test_records.iter_mut() {
                let last = known.attempt().map(|at| (Verdict::Inconclusive, at));
                *known = TestRecord::restore(None, None, last, u32::from(last.is_some()));
            }
        }
        cluster.snapshot.commands.clear();
        for (n, how) in story {
            apply_event(&mut cluster, &ClusterEvent::JobStarts(n));
            apply_event(&mut cluster, &ClusterEvent::Result(n, Verdict::Inconclusive));
            if how > 2 {
                apply_event(&mut cluster, &ClusterEvent::AgentResult(n, Verdict::Inconclusive));
            }
            if let Some(record) = cluster.snapshot.nodes.get_mut(n) {
                record.node_mut().occupancy = occupancy(how);
            }
            let plan = cycle(&mut cluster);
            for action in &plan.actions {
                prop_assert!(!is_automatic(action.code.as_str()), "{action:?}");
                prop_assert!(action.code.as_str() != "proved", "{action:?}");
            }
            cluster.wait(45.minutes());
        }
    }

    #[test]
    fn after_all_faults_clear_every_node_is_in_service_or_waits_for_an_operator(
        mut cluster in a_young_cluster(),
        story in vec(an_event(), 1..30),
        with_agents: bool,
    ) {
        for event in &story {
            apply_event(&mut cluster, event);
            cycle(&mut cluster);
        }
        heal(&mut cluster);
        for _ in 0..120 {
            for n in 0..cluster.snapshot.nodes.len() * usize::from(with_agents) {
                apply_event(&mut cluster, &ClusterEvent::AgentResult(n, Verdict::Pass));
            }
            for n in (0..cluster.snapshot.runs.len()).rev() {
                apply_event(&mut cluster, &ClusterEvent::JobStarts(n));
                apply_event(&mut cluster, &ClusterEvent::Result(n, Verdict::Pass));
            }
            cycle(&mut cluster);
            check_world(&cluster.snapshot);
            cluster.wait(20.minutes());
        }
        for record in &cluster.snapshot.nodes {
            let case = cluster.snapshot.cases.iter().find(|case| Some(case.id) == record.case);
            let explained = match record.state {
                NodeState::InService | NodeState::Suspect => true,
                // Handed over, waiting for another machine, or its mark was changed by another party.
                _ => case.is_some_and(|case| {
                    case.waits_for_operator() || case.ever_done(StepKind::Replace) || matches!(record.state, NodeState::Held { .. })
                }),
            };
            prop_assert!(explained, "{} is {:?} with {case:#?}", record.node.name, record.state);
        }
    }
}

/// From here on there are no faults and no interventions.
fn heal(cluster: &mut Cluster) {
    let snapshot = &mut cluster.snapshot;
    snapshot.at = long_after(snapshot.at);
    snapshot.pauses.clear();
    snapshot.commands.clear();
    snapshot.breaker = Breaker::Closed { since: Some(snapshot.at) };
    for record in &mut snapshot.nodes {
        record.node_mut().occupancy = crate::node::Occupancy::Free;
        record.node_mut().marks.foreign.clear();
        record.hold = None;
        record.findings.clear();
        record.last_report = None;
    }
    for active in &mut snapshot.runs {
        if matches!(active.job, ObservedJobState::Unknown { .. }) {
            active.job = ObservedJobState::Absent;
            active.absent_since = Some(snapshot.at);
        }
    }
}
