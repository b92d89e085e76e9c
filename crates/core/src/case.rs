//! A case: one problem of one machine, from its first finding to its return or replacement, with every step taken.

use serde::{Deserialize, Serialize};

use crate::{
    finding::{Finding, Severity},
    ids::{CaseId, HardwareId, NodeName, OpId},
    job_failures::JobFailure,
    node::{MarkKind, OurMark},
    reason::coded,
    time::Timestamp,
};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Case {
    pub id: CaseId,
    /// The machine. `node` is the name under which it was last seen.
    pub hardware: HardwareId,
    pub node: NodeName,
    pub opened: Timestamp,
    pub severity: Severity,
    pub findings: Vec<Finding>,
    /// The escalation level that the case has reached.
    pub repair_step: RepairStep,
    pub steps: Vec<Step>,
    pub state: CaseState,
    /// Boot id at the time of the newest finding. A different boot id means that the node has rebooted since.
    pub boot_id: Option<String>,
    /// The recommendation of the examination.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<Advice>,
    /// User work that had recently failed on the node when the case was opened.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub job_failures: Vec<JobFailure>,
    /// What an operator requested last, by a quarantine or a repair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<OperatorRequest>,
}

/// An operator's request, in the operator's own words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorRequest {
    pub by: String,
    pub why: String,
    /// The repair; none for a quarantine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repair: Option<RequestedRepair>,
}

/// A repair step that an operator requested.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestedRepair {
    pub what: Repair,
    /// The id of the one operation that performs it.
    pub op: OpId,
    /// Whether user work is evicted, or may finish.
    pub evict: bool,
    /// The first attempt that may have reached the cluster; none while the repair has not begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sent: Option<SentRepair>,
}

/// A requested repair at the moment right before it is sent to the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SentRepair {
    pub at: Timestamp,
    /// Boot id of the node. A reboot by another party before this moment is not ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<String>,
}

coded! {
    /// The repairs that an operator can request.
    pub enum Repair {
        Reset => "reset",
        Reboot => "reboot",
        Replace => "replace",
    }
}

impl Repair {
    /// Returns the step that performs it.
    pub const fn step(self) -> StepKind {
        match self {
            Self::Reset => StepKind::Reset,
            Self::Reboot => StepKind::Reboot,
            Self::Replace => StepKind::Replace,
        }
    }

    /// Returns the escalation level of a case on which it is requested.
    pub const fn level(self) -> RepairStep {
        match self {
            Self::Reset => RepairStep::Reset,
            Self::Reboot => RepairStep::Reboot,
            Self::Replace => RepairStep::Replace,
        }
    }
}

impl OperatorRequest {
    /// Returns the request as one sentence: what, by whom, why.
    pub fn text(&self) -> String {
        match &self.repair {
            Some(repair) => format!("{} requested by {}: {}", repair.what, self.by, self.why),
            None => format!("taken out by {}: {}", self.by, self.why),
        }
    }
}

coded! {
    /// Recommendation for a quarantined node, derived from its test results.
    pub enum Advice {
        /// Every test that applies has passed.
        Return => "return",
        /// The node may return; a finding needs watching.
        ReturnFlagged => "return-flagged",
        Reboot => "reboot",
        Replace => "replace",
        /// A test could not run, so there is no recommendation.
        ExamineAgain => "examine-again",
    }
}

coded! {
    /// Escalation levels, mildest first. A remedy that did not help is not repeated on the same machine within
    /// `repair.memory`.
    pub enum RepairStep {
        Reset => "reset",
        Reboot => "reboot",
        /// Out of service; deep tests decide.
        Quarantine => "quarantine",
        /// Replaced if the policy allows it, otherwise handed over to an operator.
        Replace => "replace",
    }
}

impl RepairStep {
    pub const fn next(self) -> Option<Self> {
        match self {
            Self::Reset => Some(Self::Reboot),
            Self::Reboot => Some(Self::Quarantine),
            Self::Quarantine => Some(Self::Replace),
            Self::Replace => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub op: OpId,
    pub what: StepKind,
    pub repair_step: RepairStep,
    pub state: StepState,
    pub at: Timestamp,
    pub attempts: u32,
    pub text: String,
}

coded! {
    /// An action taken on a case.
    pub enum StepKind {
        Mark => "mark",
        Drain => "drain",
        /// Evicts user work by the means that the cluster provides.
        Evict => "evict",
        /// Saves the evidence before a later step can destroy it.
        SaveEvidence => "keep-evidence",
        Reset => "reset",
        Reboot => "reboot",
        /// Tests that must pass before the node returns.
        Requalify => "requalify",
        /// Tests requested by an operator, who then decides what to do with the node.
        Examine => "examine",
        Replace => "replace",
        /// An operator takes over.
        HandOver => "hand-over",
        /// An operator gives the node back, to be tested before it returns.
        Release => "release",
        /// An operator requested a repair step.
        RequestRepair => "request-repair",
        Undrain => "undrain",
        Unmark => "unmark",
    }
}

impl StepKind {
    /// Returns whether the step destroys the evidence that is on the node.
    pub const fn destroys_evidence(self) -> bool {
        matches!(self, Self::Reset | Self::Reboot | Self::Replace)
    }

    /// Returns whether the step changes only the store: it is done once it is recorded.
    pub const fn is_bookkeeping(self) -> bool {
        matches!(self, Self::SaveEvidence | Self::Requalify | Self::HandOver | Self::Release | Self::RequestRepair)
    }
}

coded! {
    /// The progress of a step.
    pub enum StepState {
        /// Waiting for an operator: the policy does not allow the controller to do it.
        Proposed => "proposed",
        /// Recorded; the effect may or may not have happened.
        Intended => "intended",
        Done => "done",
        Failed => "failed",
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum CaseState {
    Open,
    Closed { at: Timestamp, how: CaseOutcome },
}

coded! {
    /// How a case ended.
    pub enum CaseOutcome {
        /// All tests passed and the node is back in service.
        Returned => "returned",
        /// Another machine has the node name now.
        Replaced => "replaced",
        /// The case ended without a requalification run: another case took over, or its findings cleared before the node was
        /// taken out.
        Withdrawn => "withdrawn",
    }
}

impl Case {
    pub const fn is_open(&self) -> bool {
        matches!(self.state, CaseState::Open)
    }

    /// Returns the newest step of this kind at the current escalation level.
    pub fn step(&self, what: StepKind) -> Option<&Step> {
        self.steps.iter().rev().find(|step| step.what == what && step.repair_step == self.repair_step)
    }

    /// Returns whether an operator holds the case and has not released it or requested a repair.
    pub fn waits_for_operator(&self) -> bool {
        self.waits_since().is_some()
    }

    /// Returns since when an operator holds the case without having released it or requested a repair.
    pub fn waits_since(&self) -> Option<Timestamp> {
        self.last_decision().filter(|step| step.what == StepKind::HandOver).map(|step| step.at)
    }

    /// Returns the newest step that gave the case to an operator, or that an operator decided.
    fn last_decision(&self) -> Option<&Step> {
        let decides = |what| matches!(what, StepKind::HandOver | StepKind::Release | StepKind::RequestRepair);
        self.steps.iter().rev().find(|step| decides(step.what) && step.state != StepState::Failed)
    }

    /// Returns the repair that an operator requested, until the case is handed over or released.
    pub fn requested_repair(&self) -> Option<(&OperatorRequest, &RequestedRepair)> {
        self.last_decision().filter(|step| step.what == StepKind::RequestRepair)?;
        let request = self.request.as_ref()?;
        Some((request, request.repair.as_ref()?))
    }

    /// Returns when the operator's repair was requested on this case, until the case is handed over or released.
    pub fn repair_requested_at(&self) -> Option<Timestamp> {
        self.requested_repair()?;
        self.steps_since_request().first().map(|step| step.at)
    }

    /// Returns the requested repair that this operation performs, also after the case was handed over or released.
    pub fn repair_with_op_mut(&mut self, op: OpId) -> Option<&mut RequestedRepair> {
        self.request.as_mut()?.repair.as_mut().filter(|repair| repair.op == op)
    }

    /// Removes a step that was recorded as intended and has not begun.
    pub fn withdraw_step(&mut self, op: OpId) {
        self.steps.retain(|step| step.op != op || step.state != StepState::Intended);
    }

    /// Returns the steps since an operator last requested a repair.
    pub fn steps_since_request(&self) -> &[Step] {
        let asked = self.steps.iter().rposition(|step| step.what == StepKind::RequestRepair);
        asked.map_or(&[], |index| &self.steps[index..])
    }

    /// Records an operator's repair: the case is at its escalation level from now on, and waits for no operator. `op`
    /// identifies the request, not the step that performs it.
    pub fn request_repair(&mut self, request: &OperatorRequest, op: OpId, at: Timestamp) {
        let Some(repair) = &request.repair else { return };
        self.repair_step = repair.what.level();
        let (what, state, text) = (StepKind::RequestRepair, StepState::Done, request.text());
        self.steps.push(Step { op, what, repair_step: self.repair_step, state, at, attempts: 1, text });
        self.request = Some(request.clone());
    }

    /// Returns the steps of the current escalation level that wait for an operator: proposed, because the policy does not allow
    /// the controller to take them, and neither taken nor superseded by a requested repair since.
    pub fn open_proposals(&self) -> impl Iterator<Item = &Step> {
        let asked = self.steps.iter().rposition(|step| step.what == StepKind::RequestRepair);
        let since = asked.map_or(0, |index| index + 1);
        let is_newest = |step: &&Step| self.step(step.what).is_some_and(|newest| newest.op == step.op);
        self.steps[since..].iter().filter(|step| step.state == StepState::Proposed).filter(is_newest)
    }

    /// Returns whether an operator released the case and it has not escalated since.
    pub fn is_released(&self) -> bool {
        let release = self.steps.iter().rposition(|step| step.what == StepKind::Release);
        release.is_some_and(|index| self.steps[index].repair_step == self.repair_step && !self.waits_for_operator())
    }

    /// Returns whether an examination requested by an operator is still in progress.
    pub fn is_under_examination(&self) -> bool {
        self.step(StepKind::Examine).is_some_and(|step| step.state == StepState::Intended)
    }

    /// Returns the marks that the case's completed steps have set (`true`) or removed (`false`) since then; the newest
    /// step of each kind decides.
    pub fn mark_changes_since(&self, since: Timestamp) -> Vec<(OurMark, bool)> {
        let kinds = [
            (MarkKind::Unhealthy, StepKind::Mark, StepKind::Unmark),
            (MarkKind::Cordon, StepKind::Drain, StepKind::Undrain),
        ];
        let changes = kinds.into_iter().filter_map(|(kind, set, unset)| {
            let changes_mark = |step: &&Step| {
                step.state == StepState::Done && step.at >= since && (step.what == set || step.what == unset)
            };
            let last = self.steps.iter().rev().find(changes_mark)?;
            Some((OurMark { kind, case: Some(self.id) }, last.what == set))
        });
        changes.collect()
    }

    /// Returns whether a step of this kind was ever completed in this case.
    pub fn ever_done(&self, what: StepKind) -> bool {
        self.steps.iter().any(|step| step.what == what && step.state == StepState::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repair_steps_end_with_replacement() {
        let mut step = RepairStep::Reset;
        let mut seen = vec![step];
        while let Some(next) = step.next() {
            step = next;
            seen.push(step);
        }
        assert_eq!(seen, RepairStep::ALL);
    }

    #[test]
    fn the_newest_completed_step_decides_the_state_of_a_mark() {
        let step = |what, state, at| Step {
            op: OpId::from_number(1),
            what,
            repair_step: RepairStep::Quarantine,
            state,
            at: Timestamp::from_secs(at),
            attempts: 1,
            text: String::new(),
        };
        use StepState::{Done, Intended};
        let mut case = Case {
            id: CaseId::from_number(7),
            hardware: HardwareId::new("h").unwrap(),
            node: NodeName::new("n").unwrap(),
            opened: Timestamp::from_secs(0),
            severity: Severity::Isolate,
            findings: Vec::new(),
            repair_step: RepairStep::Quarantine,
            steps: vec![step(StepKind::Mark, Done, 10), step(StepKind::Drain, Done, 20)],
            state: CaseState::Open,
            boot_id: None,
            advice: None,
            job_failures: Vec::new(),
            request: None,
        };
        let changes_since = |case: &Case, since| {
            let changes = case.mark_changes_since(Timestamp::from_secs(since));
            changes.into_iter().map(|(mark, set)| (mark.kind, set)).collect::<Vec<_>>()
        };
        assert_eq!(changes_since(&case, 0), [(MarkKind::Unhealthy, true), (MarkKind::Cordon, true)]);
        assert_eq!(changes_since(&case, 15), [(MarkKind::Cordon, true)]);
        case.steps.extend([step(StepKind::Undrain, Done, 30), step(StepKind::Unmark, Intended, 40)]);
        assert_eq!(
            changes_since(&case, 0),
            [(MarkKind::Unhealthy, true), (MarkKind::Cordon, false)],
            "what is only intended is not done"
        );
        assert_eq!(case.mark_changes_since(Timestamp::MIN)[0].0.case, Some(case.id));
    }

    #[test]
    fn every_code_reads_back() {
        for step in StepKind::ALL {
            assert_eq!(StepKind::from_code(step.code()), Some(*step));
        }
        for state in StepState::ALL {
            assert_eq!(StepState::from_code(state.code()), Some(*state));
        }
        for advice in Advice::ALL {
            assert_eq!(Advice::from_code(advice.code()), Some(*advice));
        }
        for repair in Repair::ALL {
            assert_eq!(Repair::from_code(repair.code()), Some(*repair));
            assert_eq!(repair.step().code(), repair.code());
            assert_eq!(repair.level().code(), repair.code());
        }
        for closed in CaseOutcome::ALL {
            assert_eq!(CaseOutcome::from_code(closed.code()), Some(*closed));
        }
    }
}
