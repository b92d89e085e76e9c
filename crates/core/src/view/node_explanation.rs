//! The structures of the node explanation, in the order of an operator's questions: its state, what is wrong, what was
//! tested, why nothing happens now, what was done, what to do. `doctor why` prints them.

use serde::Serialize;

use super::{Due, LatestResult, NodeRow, RunWithoutResult, TestStatus, evidence};
use crate::{
    case::{Advice, Case, RepairStep, Step, StepKind, StepState},
    finding::{OpenFinding, Remedy, Severity, Verdict},
    ids::{CaseId, CheckId, HardwareId, RuleId, RunId, TestId},
    job_failures::JobFailure,
    lifecycle::NodeState,
    node::Hold,
    reason::ReasonCode,
    snapshot::Backoff,
    time::{Span, Timestamp},
};

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WhyView {
    #[serde(flatten)]
    pub row: NodeRow,
    pub at: Timestamp,
    /// One sentence: the state and its cause.
    pub headline: String,
    #[serde(rename = "state_detail")]
    pub state: NodeState,
    pub hardware: Option<HardwareId>,
    pub hold: Option<Hold>,
    pub backoff: Option<Backoff>,
    #[serde(rename = "case_file")]
    pub case: Option<CaseView>,
    #[serde(rename = "open_findings")]
    pub findings: Vec<FindingView>,
    /// User work that recently failed on the node, newest first. It is not evidence by itself.
    pub job_failures: Vec<JobFailure>,
    #[serde(rename = "test_lines")]
    pub tests: Vec<TestLine>,
    pub audit: Vec<AuditLine>,
    /// The newest run that ended without a complete result, while a test of it has no newer pass or fail.
    pub without_result: Option<RunWithoutResult>,
    /// Next steps, one line each.
    pub next: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CaseView {
    pub id: CaseId,
    pub opened: Timestamp,
    pub severity: Severity,
    pub repair_step: RepairStep,
    pub open: bool,
    pub waits_for_operator: bool,
    /// The recommendation of the examination.
    pub advice: Option<Advice>,
    /// User work that had failed on the node when the case was opened.
    pub job_failures: Vec<JobFailure>,
    pub steps: Vec<StepView>,
    /// Steps that wait for an operator.
    #[serde(skip)]
    pub proposals: Vec<StepView>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StepView {
    pub at: Timestamp,
    pub what: StepKind,
    pub state: StepState,
    pub attempts: u32,
    pub text: String,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FindingView {
    pub check: CheckId,
    pub entity: String,
    pub verdict: Verdict,
    pub severity: Severity,
    pub remedy: Remedy,
    pub reason: ReasonCode,
    pub text: String,
    pub rule: RuleId,
    pub evidence: String,
    pub run: Option<RunId>,
    pub first_seen: Timestamp,
    pub last_seen: Timestamp,
    /// Consecutive failing results; `confirm` of them are needed.
    pub sightings: u32,
    pub confirm: u32,
    pub confirmed: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TestLine {
    pub test: TestId,
    /// The suite under which it is counted.
    pub suite: Option<TestId>,
    pub status: TestStatus,
    pub cutoff: Span,
    pub last: Option<LatestResult>,
    pub due: Due,
}

/// One line of the audit log, as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AuditLine {
    pub at: Timestamp,
    pub by: String,
    pub what: String,
    pub code: ReasonCode,
    pub text: String,
    pub run: Option<RunId>,
}

impl FindingView {
    pub(super) fn of(open: &OpenFinding) -> Self {
        let finding = &open.finding;
        Self {
            check: finding.check.clone(),
            entity: finding.entity.to_string(),
            verdict: finding.verdict,
            severity: finding.severity,
            remedy: finding.remedy,
            reason: finding.reason.clone(),
            text: finding.text.clone(),
            rule: finding.rule.clone(),
            evidence: evidence(&finding.evidence),
            run: open.run,
            first_seen: open.first_seen,
            last_seen: open.last_seen,
            sightings: open.sightings,
            confirm: finding.confirm,
            confirmed: open.is_confirmed(),
        }
    }
}

impl StepView {
    fn of(step: &Step) -> Self {
        Self { at: step.at, what: step.what, state: step.state, attempts: step.attempts, text: step.text.clone() }
    }
}

impl CaseView {
    pub(super) fn of(case: &Case) -> Self {
        Self {
            id: case.id,
            opened: case.opened,
            severity: case.severity,
            repair_step: case.repair_step,
            open: case.is_open(),
            waits_for_operator: case.waits_for_operator(),
            advice: case.advice,
            job_failures: case.job_failures.clone(),
            steps: case.steps.iter().map(StepView::of).collect(),
            proposals: case.open_proposals().map(StepView::of).collect(),
        }
    }
}
