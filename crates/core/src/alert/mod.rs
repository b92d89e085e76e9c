//! What people are told without asking: which changes are worth a message, and to whom.
//!
//! A [`Note`] is one thing to tell: a case that changed its state in one cycle, or a trouble of the service that began or
//! ended. Notes are decided from the snapshot and the plan, before anything is done, and are written down in the same
//! transaction as the plan: what was decided is told, and what was not decided is not. How many notes go into one message is
//! a matter of delivery; here each case gives at most one note a cycle, whatever the plan does about it.

mod service;
mod words;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use self::{
    service::{Condition, ServiceFacts, ServiceNote, conditions, turned},
    words::{command, headline, line, paragraphs, tally},
};
use crate::{
    case::{Advice, Case, Closed, Rung, StepKind},
    finding::{Finding, Severity},
    ids::{CaseId, HardwareId, NodeName, PoolName},
    plan::Action,
    reason::{Because, coded},
    snapshot::{NodeRecord, Snapshot},
    time::Timestamp,
    view,
};

/// One thing to tell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Note {
    pub at: Timestamp,
    #[serde(flatten)]
    pub about: About,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "about")]
pub enum About {
    Case(CaseNote),
    Service(ServiceNote),
    /// Somebody tries whether messages arrive.
    Trial {
        by: String,
    },
}

/// A case, and what became of it in one cycle.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseNote {
    pub case: CaseId,
    pub node: NodeName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolName>,
    pub hardware: HardwareId,
    pub opened: Timestamp,
    pub severity: Severity,
    /// Before this, if it was another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub severity_before: Option<Severity>,
    pub rung: Rung,
    pub open: bool,
    pub changes: Vec<Change>,
    /// The worst first.
    pub findings: Vec<FindingNote>,
    /// Findings that are not shown here.
    pub more_findings: u32,
}

/// One change of a case, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    pub what: ChangeKind,
    pub why: String,
}

coded! {
    /// What can become of a case that people should know.
    pub enum ChangeKind {
        Opened => "opened",
        /// It is more severe than it was.
        Worsened => "worsened",
        /// What was tried did not help: the next rung of the ladder.
        Escalated => "escalated",
        /// Its examination is over and advises something.
        Advised => "advised",
        /// A step that the policy leaves to a person.
        Proposed => "proposed",
        /// It waits for a person.
        HandedOver => "handed-over",
        /// It was snoozed, and is open still.
        StillOpen => "still-open",
        Closed => "closed",
    }
}

/// What a case rests on, as it is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingNote {
    pub check: String,
    pub entity: String,
    pub severity: Severity,
    pub reason: String,
    pub text: String,
    pub evidence: String,
}

/// Somebody has seen a case, or does not want to hear of it for a while. Its end is told in any case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mute {
    pub by: String,
    pub why: String,
    pub at: Timestamp,
    /// `None`: acknowledged, and nothing more is told until it closes. Else it is told again then if it is still open.
    pub until: Option<Timestamp>,
}

/// What a receiver wants to hear.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Of cases that are at least this severe.
    pub severity: Severity,
    /// Only of these changes; all, if there are none.
    pub changes: Vec<ChangeKind>,
    /// Of troubles of the service itself.
    pub service: bool,
}

impl Default for Route {
    fn default() -> Self {
        Self { severity: Severity::Monitor, changes: Vec::new(), service: true }
    }
}

impl Route {
    pub fn wants(&self, note: &Note) -> bool {
        match &note.about {
            About::Case(case) => {
                let kind = |change: &Change| self.changes.is_empty() || self.changes.contains(&change.what);
                // Who heard of it when it was worse hears of its end too.
                let worst = case.severity_before.map_or(case.severity, |before| before.max(case.severity));
                worst >= self.severity && case.changes.iter().any(kind)
            }
            About::Service(_) => self.service,
            About::Trial { .. } => true,
        }
    }
}

/// What this plan changes about cases, one note for each case, in the order of the plan.
pub fn notes(snapshot: &Snapshot, actions: &[Because<Action>], muted: &BTreeMap<CaseId, Mute>) -> Vec<Note> {
    let mut notes: Vec<CaseNote> = Vec::new();
    for action in actions {
        let Some((id, change)) = change(snapshot, action) else { continue };
        let known = notes.iter().position(|note| note.case == id);
        let place = match (known, case_of(snapshot, action, id)) {
            (Some(place), _) => place,
            (None, Some(case)) => {
                notes.push(CaseNote::of(snapshot, case));
                notes.len() - 1
            }
            (None, None) => continue,
        };
        notes[place].apply(snapshot, &action.what, change);
    }
    notes.retain(|note| !note.open || muted.get(&note.case).is_none_or(|mute| !mute.holds(snapshot.at)));
    notes.into_iter().map(|note| Note { at: snapshot.at, about: About::Case(note) }).collect()
}

/// How a case stands whose snooze is over.
pub fn still_open(case: &Case, mute: &Mute, at: Timestamp) -> Option<Note> {
    let mut note = CaseNote::plain(case, None);
    let why = format!("it was snoozed by {} ({})", mute.by, mute.why);
    note.changes.push(Change { what: ChangeKind::StillOpen, why });
    case.is_open().then_some(Note { at, about: About::Case(note) })
}

/// An open case as it stands, for receivers that keep a list of what is open.
pub fn standing(case: &Case) -> Note {
    let mut note = CaseNote::plain(case, None);
    note.changes.push(Change { what: ChangeKind::StillOpen, why: String::new() });
    Note { at: case.opened, about: About::Case(note) }
}

impl Mute {
    fn holds(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}

/// What the action changes about a case, if people should know.
fn change(snapshot: &Snapshot, action: &Because<Action>) -> Option<(CaseId, Change)> {
    let (case, what) = match &action.what {
        Action::OpenCase(case) => (case.id, ChangeKind::Opened),
        Action::Escalate { case, .. } => (*case, ChangeKind::Escalated),
        Action::Worsen { case, node } => {
            let before = known(snapshot, *case)?.severity;
            (*case, (worst(snapshot, node)? > before).then_some(ChangeKind::Worsened)?)
        }
        Action::Advise { case, .. } => (*case, ChangeKind::Advised),
        Action::Propose { case, .. } => (*case, ChangeKind::Proposed),
        Action::Step { case, step: StepKind::HandOver, .. } => (*case, ChangeKind::HandedOver),
        Action::CloseCase { case, .. } => (*case, ChangeKind::Closed),
        _ => return None,
    };
    let why = match &action.what {
        Action::Advise { advice, .. } => format!("{}: {}", Advice::code(*advice), action.text),
        Action::Propose { step, .. } => format!("{}: {}", StepKind::code(*step), action.text),
        Action::CloseCase { how, .. } => format!("{}: {}", Closed::code(*how), action.text),
        _ => action.text.clone(),
    };
    Some((case, Change { what, why }))
}

fn known(snapshot: &Snapshot, id: CaseId) -> Option<&Case> {
    snapshot.cases.iter().find(|case| case.id == id)
}

fn case_of<'a>(snapshot: &'a Snapshot, action: &'a Because<Action>, id: CaseId) -> Option<&'a Case> {
    match &action.what {
        Action::OpenCase(case) => Some(case),
        _ => known(snapshot, id),
    }
}

fn record<'a>(snapshot: &'a Snapshot, node: &NodeName) -> Option<&'a NodeRecord> {
    snapshot.nodes.binary_search_by(|record| record.node.name.cmp(node)).ok().map(|place| &snapshot.nodes[place])
}

fn worst(snapshot: &Snapshot, node: &NodeName) -> Option<Severity> {
    record(snapshot, node)?.findings.iter().map(|open| open.finding.severity).max()
}

impl CaseNote {
    /// Findings that are shown. More would be a log, and `doctor why` has them all.
    const SHOWN: usize = 5;

    fn of(snapshot: &Snapshot, case: &Case) -> Self {
        Self::plain(case, record(snapshot, &case.node).map(|record| record.node.pool.clone()))
    }

    fn plain(case: &Case, pool: Option<PoolName>) -> Self {
        let mut note = Self {
            case: case.id,
            node: case.node.clone(),
            pool,
            hardware: case.hardware.clone(),
            opened: case.opened,
            severity: case.severity,
            severity_before: None,
            rung: case.rung,
            open: case.is_open(),
            changes: Vec::new(),
            findings: Vec::new(),
            more_findings: 0,
        };
        note.show(case.findings.iter());
        note
    }

    fn show<'a>(&mut self, findings: impl Iterator<Item = &'a Finding>) {
        let mut findings: Vec<&Finding> = findings.collect();
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        self.more_findings = u32::try_from(findings.len().saturating_sub(Self::SHOWN)).unwrap_or(u32::MAX);
        self.findings = findings.into_iter().take(Self::SHOWN).map(FindingNote::of).collect();
    }

    fn apply(&mut self, snapshot: &Snapshot, action: &Action, change: Change) {
        match action {
            Action::Escalate { to, .. } => self.rung = *to,
            Action::Worsen { node, .. } => {
                if let Some(record) = record(snapshot, node) {
                    self.show(record.findings.iter().map(|open| &open.finding));
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

impl FindingNote {
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
