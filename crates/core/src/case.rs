//! A case: one trouble of one machine, from its first finding to its return or replacement, with every step taken.

use serde::{Deserialize, Serialize};

use crate::{
    failed_work::FailedWork,
    finding::{Finding, Severity},
    ids::{CaseId, HardwareId, NodeName, OpId},
    node::{MarkKind, OurMark},
    reason::coded,
    time::Timestamp,
};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Case {
    pub id: CaseId,
    /// The machine. The name is where it was last seen.
    pub hardware: HardwareId,
    pub node: NodeName,
    pub opened: Timestamp,
    pub severity: Severity,
    pub findings: Vec<Finding>,
    /// How far up the ladder this case is.
    pub rung: Rung,
    pub steps: Vec<Step>,
    pub state: CaseState,
    /// Boot at the time of the newest finding; another boot means that somebody rebooted it.
    pub boot_id: Option<String>,
    /// What its examination says should become of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<Advice>,
    /// User work that had failed on the node lately when it was opened.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_work: Vec<FailedWork>,
}

coded! {
    /// What the tests of a quarantined node say should become of it.
    pub enum Advice {
        /// Every test that applies has passed.
        Return => "return",
        /// It may return, and there is something to watch.
        ReturnFlagged => "return-flagged",
        Reboot => "reboot",
        Replace => "replace",
        /// Something could not be tested: nobody can say.
        ExamineAgain => "examine-again",
    }
}

coded! {
    /// The ladder. What did not help once is not tried again for the same machine while it is remembered.
    pub enum Rung {
        Reset => "reset",
        Reboot => "reboot",
        /// Out of service, deep tests decide.
        Quarantine => "quarantine",
        /// Replaced where the policy allows it, else handed to a person.
        Replace => "replace",
    }
}

impl Rung {
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
    pub rung: Rung,
    pub state: StepState,
    pub at: Timestamp,
    pub tries: u32,
    pub text: String,
}

coded! {
    /// What can be done about a case.
    pub enum StepKind {
        Mark => "mark",
        Drain => "drain",
        /// User work is asked to leave, by whatever means the cluster has for that.
        Evict => "evict",
        /// The evidence is put where the next step cannot destroy it.
        KeepEvidence => "keep-evidence",
        Reset => "reset",
        Reboot => "reboot",
        /// Tests that must pass before the node returns.
        Prove => "prove",
        /// Tests on an operator's word; what they say is put before a person, who decides.
        Examine => "examine",
        Replace => "replace",
        /// A person takes over.
        HandOver => "hand-over",
        /// A person gives it back, to be proved.
        Release => "release",
        Undrain => "undrain",
        Unmark => "unmark",
    }
}

impl StepKind {
    /// After this, what the node knew about its trouble is gone.
    pub const fn destroys_evidence(self) -> bool {
        matches!(self, Self::Reset | Self::Reboot | Self::Replace)
    }

    /// It happens in our own books and nowhere else: once it is written down, it is done.
    pub const fn is_bookkeeping(self) -> bool {
        matches!(self, Self::KeepEvidence | Self::Prove | Self::HandOver | Self::Release)
    }
}

coded! {
    /// How far a step got.
    pub enum StepState {
        /// Waiting for a person: the policy does not let us do it.
        Proposed => "proposed",
        /// Written down; the effect may or may not have happened.
        Intended => "intended",
        Done => "done",
        Failed => "failed",
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum CaseState {
    Open,
    Closed { at: Timestamp, how: Closed },
}

coded! {
    /// How a case ended.
    pub enum Closed {
        /// Proved well and back in service.
        Returned => "returned",
        /// Another machine bears the name now.
        Replaced => "replaced",
        /// An operator took it away from us.
        Withdrawn => "withdrawn",
    }
}

impl Case {
    pub const fn is_open(&self) -> bool {
        matches!(self.state, CaseState::Open)
    }

    /// The newest step of this kind on the present rung.
    pub fn step(&self, what: StepKind) -> Option<&Step> {
        self.steps.iter().rev().find(|step| step.what == what && step.rung == self.rung)
    }

    /// Handed to a person who has not given it back.
    pub fn waits_for_person(&self) -> bool {
        let last = self.steps.iter().rev().find(|step| {
            matches!(step.what, StepKind::HandOver | StepKind::Release) && step.state != StepState::Failed
        });
        last.is_some_and(|step| step.what == StepKind::HandOver)
    }

    /// Given back by a person, and nothing heavier was decided since.
    pub fn is_released(&self) -> bool {
        let given = self.steps.iter().rposition(|step| step.what == StepKind::Release);
        given.is_some_and(|place| self.steps[place].rung == self.rung && !self.waits_for_person())
    }

    /// An operator has the node examined, and that is not over.
    pub fn is_examined(&self) -> bool {
        self.step(StepKind::Examine).is_some_and(|step| step.state == StepState::Intended)
    }

    /// Marks of ours that its steps have set (true) or taken away again since then, the last word on each.
    pub fn marked_since(&self, since: Timestamp) -> Vec<(OurMark, bool)> {
        let kinds = [
            (MarkKind::Unhealthy, StepKind::Mark, StepKind::Unmark),
            (MarkKind::Cordon, StepKind::Drain, StepKind::Undrain),
        ];
        let said = kinds.into_iter().filter_map(|(kind, set, unset)| {
            let is_word = |step: &&Step| {
                step.state == StepState::Done && step.at >= since && (step.what == set || step.what == unset)
            };
            let last = self.steps.iter().rev().find(is_word)?;
            Some((OurMark { kind, case: Some(self.id) }, last.what == set))
        });
        said.collect()
    }

    /// Whether this was done at any time in this case.
    pub fn ever_done(&self, what: StepKind) -> bool {
        self.steps.iter().any(|step| step.what == what && step.state == StepState::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ladder_ends() {
        let mut rung = Rung::Reset;
        let mut seen = vec![rung];
        while let Some(next) = rung.next() {
            rung = next;
            seen.push(rung);
        }
        assert_eq!(seen, Rung::ALL);
    }

    #[test]
    fn the_last_word_on_a_mark_is_the_newest_step_that_was_done() {
        let step = |what, state, at| Step {
            op: OpId::from_number(1),
            what,
            rung: Rung::Quarantine,
            state,
            at: Timestamp::from_secs(at),
            tries: 1,
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
            rung: Rung::Quarantine,
            steps: vec![step(StepKind::Mark, Done, 10), step(StepKind::Drain, Done, 20)],
            state: CaseState::Open,
            boot_id: None,
            advice: None,
            failed_work: Vec::new(),
        };
        let said = |case: &Case, since| {
            let said = case.marked_since(Timestamp::from_secs(since));
            said.into_iter().map(|(mark, set)| (mark.kind, set)).collect::<Vec<_>>()
        };
        assert_eq!(said(&case, 0), [(MarkKind::Unhealthy, true), (MarkKind::Cordon, true)]);
        assert_eq!(said(&case, 15), [(MarkKind::Cordon, true)]);
        case.steps.extend([step(StepKind::Undrain, Done, 30), step(StepKind::Unmark, Intended, 40)]);
        assert_eq!(
            said(&case, 0),
            [(MarkKind::Unhealthy, true), (MarkKind::Cordon, false)],
            "what is only intended is not done"
        );
        assert_eq!(case.marked_since(Timestamp::MIN)[0].0.case, Some(case.id));
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
        for closed in Closed::ALL {
            assert_eq!(Closed::from_code(closed.code()), Some(*closed));
        }
    }
}
