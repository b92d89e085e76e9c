//! Notifications: which changes cause a message, and which receivers get it.
//!
//! A [`Notification`] is one notification: a case that changed in one cycle, or a service condition that began or ended. Notes
//! are derived from the snapshot and the plan before anything is executed, and are stored in the same transaction as
//! the plan: exactly what was decided is reported. Delivery may combine several notes into one message; here, each case
//! has at most one note per cycle, whatever the plan does about it.

mod service;
mod text;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use self::{
    service::{Condition, ServiceFacts, ServiceNotification, condition_changes, conditions},
    text::{command, headline, line, paragraphs, summary},
};
use crate::{
    case::{Advice, Case, CaseOutcome, OperatorRequest, RepairStep, StepKind},
    finding::{Finding, Severity},
    ids::{CaseId, HardwareId, NodeName, PoolName},
    plan::Action,
    reason::{WithReason, coded},
    snapshot::{NodeRecord, Snapshot},
    time::Timestamp,
    view,
};

/// One notification.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Notification {
    pub at: Timestamp,
    #[serde(flatten)]
    pub subject: Subject,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "about")]
pub enum Subject {
    Case(CaseNotification),
    Service(ServiceNotification),
    /// An operator tests the delivery of messages.
    Test {
        by: String,
    },
}

/// A case, and how it changed in one cycle.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseNotification {
    pub case: CaseId,
    pub node: NodeName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolName>,
    pub hardware: HardwareId,
    pub opened: Timestamp,
    pub severity: Severity,
    /// The previous severity, if it was different.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub severity_before: Option<Severity>,
    pub repair_step: RepairStep,
    pub open: bool,
    pub changes: Vec<Change>,
    /// Worst first.
    pub findings: Vec<FindingSummary>,
    /// Number of findings that are not listed.
    pub more_findings: u32,
    /// What an operator requested: what, by whom, why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested: Option<String>,
}

/// One change of a case, and its reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    pub what: ChangeKind,
    pub why: String,
}

coded! {
    /// Changes of a case that are reported.
    pub enum ChangeKind {
        Opened => "opened",
        /// It is more severe than before.
        Worsened => "worsened",
        /// What was tried did not help: the next escalation level.
        Escalated => "escalated",
        /// The examination has ended with a recommendation.
        Advised => "advised",
        /// An operator requested a repair.
        RepairRequested => "repair-requested",
        /// A step that the policy leaves to an operator.
        Proposed => "proposed",
        /// It waits for an operator.
        HandedOver => "handed-over",
        /// A snooze has ended and the case is still open.
        StillOpen => "still-open",
        Closed => "closed",
    }
}

/// A finding of a case, as reported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingSummary {
    pub check: String,
    pub entity: String,
    pub severity: Severity,
    pub reason: String,
    pub text: String,
    pub evidence: String,
}

/// An operator's acknowledgement or snooze of a case. The end of the case is always reported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mute {
    pub by: String,
    pub why: String,
    pub at: Timestamp,
    /// `None`: acknowledged, and nothing is reported until it closes. Otherwise it is reported again then if still
    /// open.
    pub until: Option<Timestamp>,
}

/// Selects the notes that a receiver gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Cases of at least this severity.
    pub severity: Severity,
    /// Only these changes; all if empty.
    pub changes: Vec<ChangeKind>,
    /// Conditions of the service itself.
    pub service: bool,
}

impl Default for Route {
    fn default() -> Self {
        Self { severity: Severity::Monitor, changes: Vec::new(), service: true }
    }
}

impl Route {
    pub fn accepts(&self, note: &Notification) -> bool {
        match &note.subject {
            Subject::Case(case) => {
                let kind = |change: &Change| self.changes.is_empty() || self.changes.contains(&change.what);
                // A receiver that was notified when the case was worse is also notified of its end.
                let worst = case.severity_before.map_or(case.severity, |before| before.max(case.severity));
                worst >= self.severity && case.changes.iter().any(kind)
            }
            Subject::Service(_) => self.service,
            Subject::Test { .. } => true,
        }
    }
}

/// Returns the changes that this plan makes to cases, one note per case, in the order of the plan.
pub fn case_notifications(
    snapshot: &Snapshot,
    actions: &[WithReason<Action>],
    muted: &BTreeMap<CaseId, Mute>,
) -> Vec<Notification> {
    let mut notes: Vec<CaseNotification> = Vec::new();
    for action in actions {
        let Some((id, change)) = change(snapshot, action) else { continue };
        let known = notes.iter().position(|note| note.case == id);
        let index = match (known, case_of(snapshot, action, id)) {
            (Some(index), _) => index,
            (None, Some(case)) => {
                notes.push(CaseNotification::of(snapshot, case));
                notes.len() - 1
            }
            (None, None) => continue,
        };
        notes[index].apply(snapshot, &action.value, change);
    }
    notes.retain(|note| !note.open || muted.get(&note.case).is_none_or(|mute| !mute.is_active(snapshot.at)));
    notes.into_iter().map(|note| Notification { at: snapshot.at, subject: Subject::Case(note) }).collect()
}

/// Returns a note for an open case whose snooze has ended.
pub fn still_open(case: &Case, mute: &Mute, at: Timestamp) -> Option<Notification> {
    let mut note = CaseNotification::from_case(case, None);
    let why = format!("it was snoozed by {} ({})", mute.by, mute.why);
    note.changes.push(Change { what: ChangeKind::StillOpen, why });
    case.is_open().then_some(Notification { at, subject: Subject::Case(note) })
}

/// Returns an open case as a note, for receivers that keep a list of open cases.
pub fn open_case_notification(case: &Case) -> Notification {
    let mut note = CaseNotification::from_case(case, None);
    note.changes.push(Change { what: ChangeKind::StillOpen, why: String::new() });
    Notification { at: case.opened, subject: Subject::Case(note) }
}

impl Mute {
    fn is_active(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}

/// Returns the reported change that the action makes to a case, if any.
fn change(snapshot: &Snapshot, action: &WithReason<Action>) -> Option<(CaseId, Change)> {
    let (case, what) = match &action.value {
        Action::OpenCase(case) => (case.id, ChangeKind::Opened),
        Action::Escalate { case, .. } => (*case, ChangeKind::Escalated),
        Action::RaiseSeverity { case, node } => {
            let before = find_case(snapshot, *case)?.severity;
            (*case, (worst(snapshot, node)? > before).then_some(ChangeKind::Worsened)?)
        }
        Action::Advise { case, .. } => (*case, ChangeKind::Advised),
        Action::RequestRepair { case, .. } => (*case, ChangeKind::RepairRequested),
        Action::Propose { case, .. } => (*case, ChangeKind::Proposed),
        Action::Step { case, step: StepKind::HandOver, .. } => (*case, ChangeKind::HandedOver),
        Action::CloseCase { case, .. } => (*case, ChangeKind::Closed),
        _ => return None,
    };
    let why = match &action.value {
        Action::Advise { advice, .. } => format!("{}: {}", Advice::code(*advice), action.text),
        Action::Propose { step, .. } => format!("{}: {}", StepKind::code(*step), action.text),
        Action::CloseCase { how, .. } => format!("{}: {}", CaseOutcome::code(*how), action.text),
        _ => action.text.clone(),
    };
    Some((case, Change { what, why }))
}

fn find_case(snapshot: &Snapshot, id: CaseId) -> Option<&Case> {
    snapshot.cases.iter().find(|case| case.id == id)
}

fn case_of<'a>(snapshot: &'a Snapshot, action: &'a WithReason<Action>, id: CaseId) -> Option<&'a Case> {
    match &action.value {
        Action::OpenCase(case) => Some(case),
        _ => find_case(snapshot, id),
    }
}

fn record<'a>(snapshot: &'a Snapshot, node: &NodeName) -> Option<&'a NodeRecord> {
    snapshot.nodes.binary_search_by(|record| record.node.name.cmp(node)).ok().map(|index| &snapshot.nodes[index])
}

fn worst(snapshot: &Snapshot, node: &NodeName) -> Option<Severity> {
    record(snapshot, node)?.findings.iter().map(|open| open.finding.severity).max()
}

impl CaseNotification {
    /// Number of findings listed. `doctor why` lists all of them.
    const MAX_FINDINGS: usize = 5;

    fn of(snapshot: &Snapshot, case: &Case) -> Self {
        Self::from_case(case, record(snapshot, &case.node).map(|record| record.node.pool.clone()))
    }

    fn from_case(case: &Case, pool: Option<PoolName>) -> Self {
        let mut note = Self {
            case: case.id,
            node: case.node.clone(),
            pool,
            hardware: case.hardware.clone(),
            opened: case.opened,
            severity: case.severity,
            severity_before: None,
            repair_step: case.repair_step,
            open: case.is_open(),
            changes: Vec::new(),
            findings: Vec::new(),
            more_findings: 0,
            requested: case.request.as_ref().map(OperatorRequest::text),
        };
        note.set_findings(case.findings.iter());
        note
    }

    fn set_findings<'a>(&mut self, findings: impl Iterator<Item = &'a Finding>) {
        let mut findings: Vec<&Finding> = findings.collect();
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        self.more_findings = u32::try_from(findings.len().saturating_sub(Self::MAX_FINDINGS)).unwrap_or(u32::MAX);
        self.findings = findings.into_iter().take(Self::MAX_FINDINGS).map(FindingSummary::of).collect();
    }

    fn apply(&mut self, snapshot: &Snapshot, action: &Action, change: Change) {
        match action {
            Action::Escalate { to, .. } => self.repair_step = *to,
            Action::RequestRepair { request, .. } => {
                self.requested = Some(request.text());
                self.repair_step = request.repair.as_ref().map_or(self.repair_step, |repair| repair.what.level());
            }
            Action::RaiseSeverity { node, .. } => {
                if let Some(record) = record(snapshot, node) {
                    self.set_findings(record.findings.iter().map(|open| &open.finding));
                }
                if let Some(worst) = worst(snapshot, node).filter(|worst| *worst > self.severity) {
                    self.severity_before = Some(self.severity);
                    self.severity = worst;
                }
            }
            Action::CloseCase { .. } => self.open = false,
            _ => {}
        }
        self.changes.push(change);
    }
}

impl FindingSummary {
    fn of(finding: &Finding) -> Self {
        Self {
            check: finding.check.to_string(),
            entity: finding.entity.to_string(),
            severity: finding.severity,
            reason: finding.reason.to_string(),
            text: finding.text.clone(),
            evidence: view::evidence(&finding.evidence),
        }
    }
}
