//! Executes a plan, and decides nothing.
//!
//! Every effect was recorded before. Right before each one the lease is read again: a controller that was suspended for
//! an hour finds out here that another one leads, or that its lease has expired and its plan is old. An effect that may or may not have happened is left as it is; the
//! next cycle queries the backend and repeats the request with the same id.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicUsize, Ordering},
};

use doctor_backend::{
    Backend, BackendError, Change, ChangeReason, Effect, JobOutput, JobRequest, NodeOp, clock::Clock,
    progress::Progress,
};
use doctor_checks::document::RunKey;
use doctor_core::{
    case::{OperatorRequest, RepairStep, SentRepair, StepKind},
    finding::{OpenFinding, Verdict},
    ids::{CaseId, NodeName, OpId, PoolName, RunId},
    node::{MarkKind, OurMark},
    plan::{Action, unhealthy_mark},
    policy::Mode,
    reason::WithReason,
    run::Run,
    snapshot::Snapshot,
    time::{Span, Timestamp},
};
use doctor_host::vendor_reports::ReportProgress;
use doctor_store::{Earlier, Lease, SendPermit, Store, StoreError};
use tracing::field::Empty;

use crate::{
    fence, job_outputs,
    settings::Settings,
    share::Share,
    spans::{in_span, span},
    support_bundle::{self, BundleError},
};

/// The dependencies of executing a plan.
#[derive(Clone, Copy)]
pub struct Executor<'a> {
    pub backend: &'a dyn Backend,
    pub store: &'a Store,
    pub clock: &'a dyn Clock,
    pub lease: &'a Lease,
    pub progress: &'a Progress,
    pub settings: &'a Settings,
    /// Where the support bundle of a case is kept before a step that destroys evidence.
    pub share: Option<&'a Share>,
    /// The URL to which jobs post their results.
    pub results: Option<&'a str>,
    /// Number of concurrent effects. With one, a simulation stays deterministic.
    pub workers: usize,
}

impl std::fmt::Debug for Executor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("workers", &self.workers).finish_non_exhaustive()
    }
}

/// Longest wait for a node's own report before a destructive step, which then proceeds without it. At most a third of
/// the step's deadline is spent on it.
const REPORT_TIMEOUT: Span = Span::minutes(6);

/// Belongs to a run, and to no case.
const MAINTENANCE_MARK: OurMark = OurMark { kind: MarkKind::Maintenance, case: None };

/// Names the evidence of a case that is saved before a step: once for each escalation level, and for each repair that an
/// operator requests.
#[derive(Debug)]
struct EvidenceLabel {
    repair_step: RepairStep,
    name: String,
    /// When the step was first intended. The node's report is waited for from then on.
    since: Timestamp,
    /// What is recorded before a repair that an operator requested is sent; none for a step of the controller's own.
    requested: Option<RequestedStep>,
}

/// A repair that an operator requested, on the node as it was observed.
#[derive(Debug)]
struct RequestedStep {
    pool: PoolName,
    boot_id: Option<String>,
}

/// One effect on the cluster, with everything it needs.
#[derive(Debug)]
enum PlannedEffect<'a> {
    /// The request is built when it is sent: one for a run of many tests has kilobytes, and hundreds may be planned.
    Submit(&'a Run, &'a RunKey),
    Cancel(RunId),
    /// Removes the maintenance mark of a run that is over.
    RemoveMaintenanceMark(OpId, NodeName),
    Change {
        case: CaseId,
        op: OpId,
        node: NodeName,
        changes: Vec<Change>,
        reason: ChangeReason,
        /// What is saved before, if the change destroys evidence on the node.
        destroys: Option<EvidenceLabel>,
    },
}

impl Executor<'_> {
    /// Executes all actions. Each may fail on its own; failures are returned as one line each.
    ///
    /// Workers take actions in plan order and may finish out of order. That is safe: a plan has at most one step per
    /// node, and each worker performs lease check, effect and record in sequence. All intents were recorded before the
    /// first worker starts.
    ///
    /// # Errors
    /// Only if the store fails or the lease is lost: nothing more may be done then.
    pub fn execute(
        &self,
        actions: &[WithReason<Action>],
        runs: &BTreeMap<RunId, (Run, RunKey)>,
        snapshot: &Snapshot,
    ) -> Result<Vec<String>, StoreError> {
        let work: Vec<PlannedEffect<'_>> =
            actions.iter().filter_map(|action| Self::effect_of(&action.value, actions, runs, snapshot)).collect();
        let workers = self.workers.clamp(1, work.len().max(1));
        if workers == 1 {
            return work.iter().filter_map(|work| self.perform(work).transpose()).collect();
        }
        let (next, span) = (AtomicUsize::new(0), tracing::Span::current());
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..workers)
                .map(|_| {
                    scope.spawn(|| {
                        let _within = span.enter();
                        let mut problems = Vec::new();
                        while let Some(work) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                            // The changes of the other workers end at once, too.
                            let lost = |error: &StoreError| {
                                fence::end_effects_if_lost(error, self.lease, self.progress);
                            };
                            problems.extend(self.perform(work).inspect_err(lost)?);
                        }
                        Ok::<_, StoreError>(problems)
                    })
                })
                .collect();
            let mut problems = Vec::new();
            for thread in threads {
                match thread.join() {
                    Ok(outcome) => problems.extend(outcome?),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            Ok(problems)
        })
    }

    fn effect_of<'a>(
        action: &Action,
        actions: &[WithReason<Action>],
        runs: &'a BTreeMap<RunId, (Run, RunKey)>,
        snapshot: &Snapshot,
    ) -> Option<PlannedEffect<'a>> {
        match action {
            Action::Submit(Run { id, .. }) | Action::Resubmit { run: id } => {
                runs.get(id).map(|(run, key)| PlannedEffect::Submit(run, key))
            }
            Action::Cancel { run, .. } => Some(PlannedEffect::Cancel(*run)),
            Action::RemoveMaintenanceMark { node, op } => Some(PlannedEffect::RemoveMaintenanceMark(*op, node.clone())),
            Action::Step { case, node, step, op, .. } => {
                let (case, op, node) = (*case, *op, node.clone());
                let changes = match step {
                    StepKind::Mark => vec![Change::Mark(unhealthy_mark(case))],
                    StepKind::Unmark => our_marks(snapshot, &node).into_iter().map(Change::Unmark).collect(),
                    StepKind::Drain => vec![Change::Drain],
                    StepKind::Evict => vec![Change::Evict],
                    StepKind::Undrain => vec![Change::Undrain],
                    StepKind::Reset => vec![Change::Reset],
                    StepKind::Reboot => vec![Change::Reboot],
                    StepKind::Replace => vec![Change::Replace],
                    // Completed when it was recorded, or by the run that belongs to it.
                    StepKind::SaveEvidence
                    | StepKind::Requalify
                    | StepKind::Examine
                    | StepKind::HandOver
                    | StepKind::Release
                    | StepKind::RequestRepair => return None,
                };
                let reason = change_reason(snapshot, &node, case, request_of(snapshot, actions, case));
                let destroys = step.destroys_evidence().then(|| evidence_label(snapshot, case, op, &node)).flatten();
                Some(PlannedEffect::Change { case, op, node, changes, reason, destroys })
            }
            // The rest is bookkeeping that the commit has done.
            Action::Conclude { .. }
            | Action::OpenCase(_)
            | Action::Escalate { .. }
            | Action::RaiseSeverity { .. }
            | Action::Advise { .. }
            | Action::Propose { .. }
            | Action::RequestRepair { .. }
            | Action::CompleteStep { .. }
            | Action::WithdrawStep { .. }
            | Action::SetState { .. }
            | Action::CloseCase { .. }
            | Action::RebindCase { .. }
            | Action::OpenBreaker
            | Action::Notice(_)
            | Action::CompleteCommand { .. }
            | Action::WithdrawCommand { .. }
            | Action::StartTrial { .. }
            | Action::AttributeFault { .. }
            | Action::HardwareIdentified { .. }
            | Action::HardwareReplaced { .. } => None,
        }
    }

    /// Performs one effect. Returns a line if it failed.
    fn perform(&self, work: &PlannedEffect<'_>) -> Result<Option<String>, StoreError> {
        match work {
            PlannedEffect::Submit(run, key) => self.submit(&job_request(run, (*key).clone(), self)),
            PlannedEffect::RemoveMaintenanceMark(op, node) => {
                let change = NodeOp { op: *op, what: Change::Unmark(MAINTENANCE_MARK) };
                let done = self.effect(&self.change_span(node, &change), || self.backend.apply(node, &change))?;
                Ok(done.err().map(|error| format!("{node}: {error}")))
            }
            PlannedEffect::Cancel(run) => {
                let span = span!(
                    "backend.cancel",
                    otel.kind = "client",
                    backend = self.backend.name(),
                    run = %run,
                    failed = Empty
                );
                let cancelled = self.effect(&span, || self.backend.cancel(*run))?;
                Ok(cancelled.err().map(|error| format!("{run}: {error}")))
            }
            PlannedEffect::Change { case, op, node, changes, reason, destroys } => {
                let saved = match destroys {
                    // Collecting starts a job on the node, so it is an effect as well.
                    Some(label) => {
                        fence::check(self.store, self.clock, self.lease, self.progress)?;
                        let saved = self.save_evidence(*case, label, *op, node)?;
                        self.progress.tick();
                        saved
                    }
                    None => Ok(true),
                };
                match saved {
                    Ok(true) => {}
                    Ok(false) => return Ok(None),
                    Err(problem) => return Ok(Some(format!("{node}: {problem}"))),
                }
                let requested = destroys.as_ref().and_then(|label| label.requested.as_ref());
                let permit = requested.map(|step| self.send_permit(*case, *op, step)).transpose()?;
                if permit == Some(SendPermit::Paused) {
                    // The next plan withdraws the step.
                    return Ok(None);
                }
                self.change((*case, *op), node, changes, reason, permit)
            }
        }
    }

    /// Asks the store whether the repair may be sent, and records that it is. The last moment at which a pause stops it.
    fn send_permit(&self, case: CaseId, op: OpId, step: &RequestedStep) -> Result<SendPermit, StoreError> {
        let sent = SentRepair { at: self.clock.now(), boot_id: step.boot_id.clone() };
        self.store.record_sent(self.lease, (case, op), &step.pool, &sent)
    }

    /// Performs one call that changes the cluster. The lease is checked right before it.
    fn effect<T>(
        &self,
        span: &tracing::Span,
        call: impl FnOnce() -> Result<T, BackendError>,
    ) -> Result<Result<T, BackendError>, StoreError> {
        fence::check(self.store, self.clock, self.lease, self.progress)?;
        let outcome = in_span(span, call);
        self.progress.tick();
        Ok(outcome)
    }

    /// Saves the evidence that the step would destroy, including the node's own report. Returns `false` while the node
    /// is still working on the report. On an inner error the step waits and is requested again in the next cycle.
    ///
    /// # Errors
    /// If the store fails or the lease is lost.
    fn save_evidence(
        &self,
        case: CaseId,
        label: &EvidenceLabel,
        op: OpId,
        node: &NodeName,
    ) -> Result<Result<bool, String>, StoreError> {
        let EvidenceLabel { repair_step, name, since, .. } = label;
        let failed = |error: BundleError| Err(format!("saving the evidence before {repair_step} failed: {error}"));
        let Some(share) = self.share else { return Ok(Ok(true)) };
        match support_bundle::is_saved(share, case, name) {
            Ok(false) => {}
            Ok(true) => return Ok(Ok(true)),
            Err(error) => return Ok(failed(error.into())),
        }
        self.progress.tick();
        let span = span!(
            "backend.report",
            otel.kind = "client",
            backend = self.backend.name(),
            node = %node,
            failed = Empty
        );
        let repair = &self.settings.policy.repair;
        let deadline = if *repair_step == RepairStep::Reset { repair.reset_deadline } else { repair.reboot_deadline };
        let limit = REPORT_TIMEOUT.min(Span::from_millis(deadline.millis() / 3));
        let from_node = match span.in_scope(|| self.backend.collect_report(node, op)) {
            ReportProgress::InProgress if self.clock.now().since(*since) < limit => return Ok(Ok(false)),
            ReportProgress::InProgress => Err(format!("the node did not finish its report within {limit}")),
            ReportProgress::Done(report) => Ok(*report),
            ReportProgress::Failed { text } => Err(text),
        };
        // The share may take as long again.
        self.progress.tick();
        // A bundle is written once. A controller that has lost its lease meanwhile may have been refused the report.
        fence::check(self.store, self.clock, self.lease, self.progress)?;
        Ok(support_bundle::save(self.store, share, case, name, from_node).map_or_else(failed, |_| Ok(true)))
    }

    fn submit(&self, job: &JobRequest) -> Result<Option<String>, StoreError> {
        let span = span!(
            "backend.submit",
            otel.kind = "client",
            backend = self.backend.name(),
            run = %job.run,
            node = %job.nodes.first(),
            nodes = job.nodes.iter().count() as u64,
            failed = Empty
        );
        let submitted = match self.set_maintenance_marks(job)? {
            Ok(()) => self.effect(&span, || self.backend.submit(job))?,
            Err(error) => Err(error),
        };
        match submitted {
            Ok(id) => {
                self.store.record_submitted(self.lease, job.run, &id, self.clock.now())?;
                Ok(None)
            }
            Err(error) => {
                // Kept for `doctor log`: there is no job that could say why.
                let why = job_outputs::of_refused_submission(job.nodes.first(), &error);
                let now = self.clock.now();
                self.store.record_job_output(self.lease, job.run, &[why], Earlier::Replace, now)?;
                if error.effect == Effect::NotAppliedPermanent {
                    let retry = &self.settings.policy.retry;
                    self.store.record_rejected(self.lease, job.run, &error.text, self.clock.now(), retry)?;
                }
                Ok(Some(format!("{}: {error}", job.run)))
            }
        }
    }

    /// Sets the maintenance mark on the nodes of a run whose tests need it, before anything starts there. The planner
    /// removes it, also if this process is gone.
    fn set_maintenance_marks(&self, job: &JobRequest) -> Result<Result<(), BackendError>, StoreError> {
        let (policy, tests) = (&self.settings.policy, &self.settings.tests);
        let allowed = policy.mode != Mode::Observe && policy.allow.mark && self.backend.caps().mark;
        let needed = || tests.iter().any(|test| test.maintenance && job.tests.contains(&test.id));
        if allowed && needed() {
            for node in job.nodes.iter() {
                // A run is submitted once, and so is the mark: both share the number.
                let op = OpId::from_number(job.run.number());
                let change = NodeOp { op, what: Change::Mark(MAINTENANCE_MARK) };
                let marked = self.effect(&self.change_span(node, &change), || self.backend.apply(node, &change))?;
                if marked.is_err() {
                    return Ok(marked);
                }
            }
        }
        Ok(Ok(()))
    }

    fn change_span(&self, node: &NodeName, change: &NodeOp) -> tracing::Span {
        span!(
            "backend.apply",
            otel.kind = "client",
            backend = self.backend.name(),
            node = %node,
            change = change.what.step().code(),
            failed = Empty
        )
    }

    fn change(
        &self,
        (case, op): (CaseId, OpId),
        node: &NodeName,
        changes: &[Change],
        reason: &ChangeReason,
        permit: Option<SendPermit>,
    ) -> Result<Option<String>, StoreError> {
        let mut outcome = Ok(());
        for what in changes {
            let change = NodeOp { op, what: what.clone() };
            let span = self.change_span(node, &change);
            outcome = self.effect(&span, || self.backend.apply_with_reason(node, &change, reason))?;
            if outcome.is_err() {
                break;
            }
        }
        match outcome {
            Ok(()) => {
                self.store.record_step(self.lease, case, op, Ok(()), self.clock.now())?;
                Ok(None)
            }
            Err(error) => {
                // An effect that may have happened, or may succeed later, stays intended and is requested again with
                // the same id.
                match error.effect {
                    Effect::NotAppliedPermanent => {
                        self.store.record_step(self.lease, case, op, Err(&error.text), self.clock.now())?;
                    }
                    // The cluster refused the only attempt: a pause still stops the repair.
                    Effect::NotAppliedRetry if permit == Some(SendPermit::First) => {
                        self.store.record_not_sent(self.lease, case, op)?;
                    }
                    Effect::NotAppliedRetry | Effect::Unknown => {}
                }
                Ok(Some(format!("{node}: {error}")))
            }
        }
    }
}

fn evidence_label(snapshot: &Snapshot, case: CaseId, op: OpId, node: &NodeName) -> Option<EvidenceLabel> {
    let case = snapshot.cases.iter().find(|known| known.id == case)?;
    let repair_step = case.repair_step;
    let is_requested = case.requested_repair().is_some_and(|(_, repair)| repair.op == op);
    let name = if is_requested { format!("{repair_step}-{op}") } else { repair_step.to_string() };
    let since = case.steps.iter().find(|step| step.op == op).map_or(snapshot.at, |step| step.at);
    let record = snapshot.nodes.binary_search_by(|record| record.node.name.cmp(node)).ok();
    let requested = record.filter(|_| is_requested).map(|index| {
        let node = &snapshot.nodes[index].node;
        let boot_id = node.hardware.as_ref().and_then(|hardware| hardware.boot_id.clone());
        RequestedStep { pool: node.pool.clone(), boot_id }
    });
    Some(EvidenceLabel { repair_step, name, since, requested })
}

/// Returns what an operator requested for the case, in this plan or before.
fn request_of<'a>(
    snapshot: &'a Snapshot,
    actions: &'a [WithReason<Action>],
    id: CaseId,
) -> Option<&'a OperatorRequest> {
    let new = actions.iter().find_map(|action| match &action.value {
        Action::OpenCase(case) if case.id == id => case.request.as_ref(),
        Action::RequestRepair { case, request, .. } if *case == id => Some(request),
        _ => None,
    });
    new.or_else(|| snapshot.cases.iter().find(|known| known.id == id)?.request.as_ref())
}

/// Returns the reason for people: the words of the operator who requested the change, and the worst finding.
fn change_reason(
    snapshot: &Snapshot,
    node: &NodeName,
    case: CaseId,
    request: Option<&OperatorRequest>,
) -> ChangeReason {
    let record = snapshot.nodes.binary_search_by(|record| record.node.name.cmp(node)).ok();
    let findings = record.map_or(&[][..], |index| &snapshot.nodes[index].findings);
    let worst = findings
        .iter()
        .filter(|one| one.finding.verdict == Verdict::Fail)
        .max_by_key(|one: &&OpenFinding| (one.is_confirmed(), one.finding.severity))
        .map(|one| &one.finding);
    if let Some(request) = request {
        let finding = worst.map_or_else(String::new, |finding| format!("; {} {}", finding.reason, finding.text));
        let text = format!("{}{finding}", request.text());
        return ChangeReason { case: Some(case), code: "operator".to_owned(), text };
    }
    ChangeReason {
        case: Some(case),
        code: worst.map_or_else(|| "unhealthy".to_owned(), |finding| finding.reason.to_string()),
        text: worst.map_or_else(String::new, |finding| finding.text.clone()),
    }
}

/// Returns our `unhealthy` and `maintenance` marks; a cordon is removed by undraining.
fn our_marks(snapshot: &Snapshot, node: &NodeName) -> Vec<OurMark> {
    let record = snapshot.nodes.binary_search_by(|record| record.node.name.cmp(node)).ok();
    let marks = record.map(|index| &snapshot.nodes[index].node.marks.ours);
    marks.into_iter().flatten().filter(|mark| mark.kind != MarkKind::Cordon).cloned().collect()
}

fn job_request(run: &Run, key: RunKey, executor: &Executor<'_>) -> JobRequest {
    let outputs = run
        .nodes
        .iter()
        .map(|node| JobOutput {
            node: node.clone(),
            logs: run.tests.iter().map(|test| Share::log_path(test, node, run.planned)).collect(),
            document: Share::document_path(run, node),
        })
        .collect();
    let (nodes, tests) = (run.nodes.clone(), run.tests.clone());
    let (access, results) = (executor.settings.access_of(&tests), executor.results.map(str::to_owned));
    JobRequest { run: run.id, nodes, access, tests, limit: run.limit, key, results, outputs }
}
