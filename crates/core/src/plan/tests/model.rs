//! A model of store and backend: applies a plan to a snapshot as the store records it and a well-behaved backend
//! executes it. Deliberately simple, so that a wrong plan shows as a wrong state.

use super::super::{Action, Conclusion, Notice};
use crate::{
    access::Place,
    case::{CaseOutcome, CaseState, SentRepair, Step, StepKind, StepState},
    finding::{Severity, Verdict},
    ids::{CaseId, HardwareId, JobId, NodeName, OpId, RunId, TestId},
    lifecycle::NodeState,
    node::{MarkKind, Occupancy, OurMark},
    reason::WithReason,
    run::{JobEnd, NotStartedReason, ObservedJobState, RunState},
    snapshot::{ActiveRun, Backoff, Breaker, Cancelling, CommandKind, NodeRecord, Snapshot, TestRecord},
    time::Timestamp,
};

use super::cluster::{bad, unconfirmed};

pub(super) fn carry_out(snapshot: &mut Snapshot, actions: &[WithReason<Action>]) {
    for action in actions {
        one(snapshot, action);
    }
    snapshot.planned_at = Some(snapshot.at);
}

fn one(snapshot: &mut Snapshot, action: &WithReason<Action>) {
    let at = snapshot.at;
    match &action.value {
        Action::Submit(run) => {
            let (seen, started) = (ObservedJobState::Absent, None);
            snapshot.runs.push(ActiveRun {
                run: run.clone(),
                job: seen,
                started,
                cancelling: None,
                absent_since: None,
            });
            accept(snapshot, run.id);
        }
        Action::Resubmit { run } => accept(snapshot, *run),
        Action::Cancel { run, why } => {
            let active = active(snapshot, *run);
            active.cancelling = Some(Cancelling { why: *why, since: at });
            let job = JobId(run.to_string());
            active.job = ObservedJobState::Ended { job, started: active.started, at, how: JobEnd::Killed };
        }
        Action::Conclude { run, end } => conclude(snapshot, *run, *end),
        Action::OpenCase(case) => {
            record(snapshot, &case.node).case = Some(case.id);
            snapshot.cases.push(case.clone());
        }
        Action::Escalate { case, to } => case_of(snapshot, *case).repair_step = *to,
        Action::RaiseSeverity { case, node } => worsen(snapshot, *case, node),
        Action::Advise { case, advice, .. } => case_of(snapshot, *case).advice = Some(*advice),
        Action::Step { case, node, step, op, attempts: tries } => {
            let hardware = record(snapshot, node).node.hardware.clone();
            let boot_id = hardware.and_then(|hardware| hardware.boot_id.clone());
            if let Some(repair) = case_of(snapshot, *case).repair_with_op_mut(*op) {
                repair.sent.get_or_insert(SentRepair { at, boot_id });
            }
            effect(record(snapshot, node), *step, *case);
            add_step(snapshot, *case, *op, *step, StepState::Done, *tries);
        }
        Action::RequestRepair { case, op, request, .. } => case_of(snapshot, *case).request_repair(request, *op, at),
        Action::Propose { case, step, op, .. } => add_step(snapshot, *case, *op, *step, StepState::Proposed, 1),
        Action::CompleteStep { case, op, done } => {
            let step = case_of(snapshot, *case).steps.iter_mut().find(|step| step.op == *op).unwrap();
            step.state = if *done { StepState::Done } else { StepState::Failed };
            step.at = at;
        }
        Action::WithdrawStep { case, op, .. } => case_of(snapshot, *case).withdraw_step(*op),
        Action::WithdrawCommand { command, .. } => snapshot.commands.retain(|known| known.id != *command),
        Action::SetState { node, to, case } => {
            let automatic = ["confirmed", "now-allowed"].contains(&action.code.as_str());
            if automatic && *to == NodeState::Quarantined {
                snapshot.recent.taken_out.push((node.clone(), at));
            }
            let record = record(snapshot, node);
            (record.state, record.since, record.case) = (to.clone(), at, case.or(record.case));
        }
        Action::CloseCase { case, node, how } => close(snapshot, *case, node, *how),
        Action::RebindCase { case, node } => follow(snapshot, *case, node),
        Action::OpenBreaker => snapshot.breaker = Breaker::Open { since: at, why: action.text.clone() },
        Action::Notice(notice) => snapshot.silence_reported = matches!(notice, Notice::AgentsSilent { .. }),
        Action::CompleteCommand { command: request } => snapshot.commands.retain(|known| known.id != *request),
        Action::HardwareIdentified { node, hardware } => record(snapshot, node).hardware = Some(hardware.clone()),
        Action::StartTrial { command: request, run } => {
            let request = snapshot.commands.iter_mut().find(|known| known.id == *request).unwrap();
            match &mut request.kind {
                CommandKind::Test { run: last, .. } => *last = Some(*run),
                CommandKind::MultiNodeTest { trials, .. } => trials.push(*run),
                other => panic!("{other:?} has no runs"),
            }
        }
        // The store keeps such findings; the model has none.
        Action::AttributeFault { .. } => {}
        Action::RemoveMaintenanceMark { node, .. } => {
            record(snapshot, node).node_mut().marks.ours.retain(|mark| mark.kind != MarkKind::Maintenance);
        }
        Action::HardwareReplaced { node, hardware } => begin_anew(snapshot, node, hardware),
    }
}

/// The backend accepts the job.
fn accept(snapshot: &mut Snapshot, run: RunId) {
    let at = snapshot.at;
    let active = active(snapshot, run);
    let job = JobId(run.to_string());
    active.run.state = RunState::Submitted { job: job.clone(), at };
    active.job = ObservedJobState::Pending { job, since: at };
}

fn worsen(snapshot: &mut Snapshot, case: CaseId, node: &NodeName) {
    let findings: Vec<_> = record(snapshot, node).findings.iter().map(|open| open.finding.clone()).collect();
    let case = case_of(snapshot, case);
    case.severity = findings.iter().map(|finding| finding.severity).fold(case.severity, Severity::max);
    case.findings = findings;
}

fn close(snapshot: &mut Snapshot, case: CaseId, node: &NodeName, how: CaseOutcome) {
    let at = snapshot.at;
    case_of(snapshot, case).state = CaseState::Closed { at, how };
    let record = record(snapshot, node);
    if record.case == Some(case) {
        record.case = None;
        record.findings.clear();
    }
}

fn follow(snapshot: &mut Snapshot, case: CaseId, node: &NodeName) {
    for record in snapshot.nodes.iter_mut().filter(|record| record.case == Some(case)) {
        record.case = None;
    }
    case_of(snapshot, case).node = node.clone();
    record(snapshot, node).case = Some(case);
}

fn begin_anew(snapshot: &mut Snapshot, node: &NodeName, hardware: &HardwareId) {
    let at = snapshot.at;
    let record = record(snapshot, node);
    record.hardware = Some(hardware.clone());
    (record.state, record.since) = (NodeState::InService, at);
    record.test_records.fill(TestRecord::NEVER);
    record.findings.clear();
    record.backoff = None;
    record.case = None;
}

pub(super) fn record<'a>(snapshot: &'a mut Snapshot, name: &NodeName) -> &'a mut NodeRecord {
    snapshot.nodes.iter_mut().find(|record| record.node.name == *name).unwrap()
}

fn active(snapshot: &mut Snapshot, run: RunId) -> &mut ActiveRun {
    snapshot.runs.iter_mut().find(|active| active.run.id == run).unwrap()
}

fn case_of(snapshot: &mut Snapshot, id: CaseId) -> &mut crate::case::Case {
    snapshot.cases.iter_mut().find(|case| case.id == id).unwrap()
}

fn add_step(snapshot: &mut Snapshot, case: CaseId, op: OpId, what: StepKind, state: StepState, tries: u32) {
    let at = snapshot.at;
    let case = case_of(snapshot, case);
    let step = Step { op, what, repair_step: case.repair_step, state, at, attempts: tries, text: String::new() };
    match case.steps.iter_mut().find(|known| known.op == op) {
        Some(known) => *known = step,
        None => case.steps.push(step),
    }
}

fn effect(record: &mut NodeRecord, step: StepKind, case: CaseId) {
    let ours = &mut record.node_mut().marks.ours;
    let mark = |kind| OurMark { kind, case: Some(case) };
    match step {
        StepKind::Mark if ours.iter().all(|known| known.kind != MarkKind::Unhealthy) => {
            ours.push(mark(MarkKind::Unhealthy));
        }
        StepKind::Drain if ours.iter().all(|known| known.kind != MarkKind::Cordon) => ours.push(mark(MarkKind::Cordon)),
        StepKind::Evict => record.node_mut().occupancy = Occupancy::Free,
        StepKind::Unmark => ours.retain(|known| known.kind == MarkKind::Cordon),
        StepKind::Undrain => ours.retain(|known| known.kind != MarkKind::Cordon),
        StepKind::Reboot => {
            if let Some(boot) = record
                .node_mut()
                .hardware
                .as_mut()
                .and_then(|hardware| std::sync::Arc::make_mut(hardware).boot_id.as_mut())
            {
                boot.push('+');
            }
        }
        _ => {}
    }
}

/// The run ends without its result.
fn conclude(snapshot: &mut Snapshot, run: RunId, end: Conclusion) {
    let (at, retry) = (snapshot.at, snapshot.policy.retry.clone());
    let index = snapshot.runs.iter().position(|active| active.run.id == run).unwrap();
    let active = snapshot.runs.remove(index);
    for name in active.run.nodes.iter() {
        let Some(node) = snapshot.nodes.iter().position(|record| record.node.name == *name) else { continue };
        match end {
            Conclusion::Incomplete(_) => {
                for test in active.run.tests.iter() {
                    let index = snapshot.tests.iter().position(|policy| policy.id == *test).unwrap();
                    snapshot.nodes[node].test_records[index].add(Verdict::Inconclusive, at);
                }
            }
            Conclusion::NotStarted(NotStartedReason::PendingTooLong | NotStartedReason::Rejected) => {
                let times = snapshot.nodes[node].backoff.map_or(0, |backoff| backoff.sightings);
                let until = at.plus(retry.not_started.doubled(times, retry.not_started_cap));
                snapshot.nodes[node].backoff = Some(Backoff { until, sightings: times + 1 });
            }
            Conclusion::NotStarted(NotStartedReason::NodeTaken | NotStartedReason::Withdrawn) => {}
        }
    }
}

/// The run on this node ends with its results, which open and clear findings.
pub(super) fn finish(snapshot: &mut Snapshot, name: &NodeName, verdict: impl Fn(usize) -> Verdict) {
    let at = snapshot.at;
    let index = snapshot.runs.iter().position(|active| active.run.nodes.contains(name)).unwrap();
    let active = snapshot.runs.remove(index);
    let tests = snapshot.tests.clone();
    let record = record(snapshot, name);
    record.backoff = None;
    for id in active.run.tests.iter() {
        let index = tests.iter().position(|policy| policy.id == *id).unwrap();
        add_result(record, (index, id), verdict(index), at);
    }
}

/// The agent of this node reports one result for all tests that it runs.
pub(super) fn agent_reports(snapshot: &mut Snapshot, name: &NodeName, verdict: Verdict) {
    let (at, tests) = (snapshot.at, snapshot.tests.clone());
    let record = record(snapshot, name);
    record.last_report = Some(at);
    for (index, test) in tests.iter().enumerate().filter(|(_, test)| test.place == Place::Agent) {
        add_result(record, (index, &test.id), verdict, at);
    }
}

/// A result opens or clears the test's finding.
fn add_result(record: &mut NodeRecord, (index, id): (usize, &TestId), verdict: Verdict, at: Timestamp) {
    record.test_records[index].add(verdict, at);
    let known = record.findings.iter().position(|open| open.finding.check == *id);
    match (verdict, known) {
        (Verdict::Pass, Some(known)) => {
            record.findings.remove(known);
        }
        (Verdict::Fail, Some(known)) => {
            let open = &mut record.findings[known];
            open.sightings += 1;
            open.last_seen = at;
        }
        (Verdict::Fail, None) => {
            let severity = Severity::ALL[index % Severity::ALL.len()];
            let make = if index % 2 == 0 { unconfirmed } else { bad };
            let mut open = make(id.as_str(), severity);
            (open.first_seen, open.last_seen) = (at, at);
            record.findings.push(open);
        }
        _ => {}
    }
}

/// The job of this run is seen executing.
pub(super) fn start(snapshot: &mut Snapshot, run: RunId) {
    let at = snapshot.at;
    let active = active(snapshot, run);
    let job = JobId(run.to_string());
    active.run.state = RunState::Running { job: job.clone(), since: at };
    active.job = ObservedJobState::Running { job, since: at };
    active.started = Some(at);
}
