//! The state machine of a node, from in service to out of service and back: a state and an event give the next state,
//! or none.
//!
//! The planner never sets a state directly; it names the event and takes the state from here. Only transitions in the
//! table exist: a node returns to users only through a proving run or an operator's decision.

use serde::{Deserialize, Serialize};

use crate::{case::StepKind, ids::RunId};

/// The state of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Life {
    /// Available to users. No failing finding is open.
    InService,
    /// Available to users, but a failing finding is open: it is tested before other nodes.
    Suspect,
    /// Out of service; no step is in progress.
    Quarantined,
    /// Out of service; this step was started and has not ended.
    Repairing { step: StepKind, tries: u32 },
    /// Out of service; this run decides whether the node returns.
    Proving { run: RunId },
    /// Out of service until an operator releases it or another machine takes its name.
    Out,
    /// An operator intervened. The controller records and does not act.
    Held { by: String },
}

/// An event that can change the state of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LifeEvent {
    /// A failing finding is open that does not (yet) take the node out of service.
    Doubted,
    /// No finding is open any more.
    Cleared,
    TakenOut,
    StepBegan {
        step: StepKind,
        tries: u32,
    },
    /// The step ended, or an operator reported it as done.
    StepEnded,
    ProofBegan {
        run: RunId,
    },
    /// The proving run failed or gave no result.
    ProofEnded,
    /// The controller has no permitted step left.
    GivenUp,
    /// The proving run passed and our marks are removed.
    Returned,
    HeldBy {
        by: String,
    },
    /// The hold has ended; `out` tells whether a case is still open.
    LetGo {
        out: bool,
    },
}

impl Life {
    /// Returns whether Cluster Doctor keeps this node from users.
    pub const fn is_out(&self) -> bool {
        matches!(self, Self::Quarantined | Self::Repairing { .. } | Self::Proving { .. } | Self::Out)
    }

    /// Returns the name of the state for tables and selectors.
    pub const fn word(&self) -> &'static str {
        match self {
            Self::InService => "in-service",
            Self::Suspect => "suspect",
            Self::Quarantined => "quarantined",
            Self::Repairing { .. } => "repairing",
            Self::Proving { .. } => "proving",
            Self::Out => "out",
            Self::Held { .. } => "held",
        }
    }

    /// Returns the state after this event, or `None` if the event is not allowed in this state.
    #[must_use]
    pub fn after(&self, event: &LifeEvent) -> Option<Self> {
        use LifeEvent as E;
        let next = match (self, event) {
            (Self::InService, E::Doubted) => Self::Suspect,
            (Self::Suspect, E::Cleared) => Self::InService,
            (Self::InService | Self::Suspect, E::TakenOut) => Self::Quarantined,
            (Self::Quarantined | Self::Repairing { .. } | Self::Proving { .. }, E::StepBegan { step, tries }) => {
                Self::Repairing { step: *step, tries: *tries }
            }
            (Self::Repairing { .. } | Self::Out, E::StepEnded) => Self::Quarantined,
            (Self::Quarantined | Self::Repairing { .. }, E::ProofBegan { run }) => Self::Proving { run: *run },
            (Self::Proving { .. }, E::ProofEnded) => Self::Quarantined,
            (Self::Quarantined | Self::Repairing { .. } | Self::Proving { .. }, E::GivenUp) => Self::Out,
            (Self::Proving { .. }, E::Returned) => Self::InService,
            (Self::Held { .. }, E::HeldBy { .. }) => return None,
            (_, E::HeldBy { by }) => Self::Held { by: by.clone() },
            (Self::Held { .. }, E::LetGo { out: true }) => Self::Quarantined,
            (Self::Held { .. }, E::LetGo { out: false }) => Self::InService,
            _ => return None,
        };
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lives() -> Vec<Life> {
        let run = RunId::from_number(1);
        vec![
            Life::InService,
            Life::Suspect,
            Life::Quarantined,
            Life::Repairing { step: StepKind::Reset, tries: 1 },
            Life::Proving { run },
            Life::Out,
            Life::Held { by: "ann".into() },
        ]
    }

    fn events() -> Vec<LifeEvent> {
        let run = RunId::from_number(2);
        vec![
            LifeEvent::Doubted,
            LifeEvent::Cleared,
            LifeEvent::TakenOut,
            LifeEvent::StepBegan { step: StepKind::Reboot, tries: 1 },
            LifeEvent::StepEnded,
            LifeEvent::ProofBegan { run },
            LifeEvent::ProofEnded,
            LifeEvent::GivenUp,
            LifeEvent::Returned,
            LifeEvent::HeldBy { by: "bob".into() },
            LifeEvent::LetGo { out: true },
            LifeEvent::LetGo { out: false },
        ]
    }

    #[test]
    fn a_node_that_is_out_returns_only_through_a_proof_or_an_operator() {
        for life in lives().iter().filter(|life| life.is_out()) {
            for event in events() {
                if let Some(next) = life.after(&event)
                    && matches!(next, Life::InService | Life::Suspect)
                {
                    assert!(matches!(life, Life::Proving { .. }) && event == LifeEvent::Returned, "{life:?} {event:?}");
                }
            }
        }
    }

    #[test]
    fn a_hold_can_be_put_on_every_state_and_nothing_else_moves_a_held_node() {
        for life in lives() {
            let held = life.after(&LifeEvent::HeldBy { by: "bob".into() });
            assert_eq!(held.is_some(), !matches!(life, Life::Held { .. }), "{life:?}");
        }
        let held = Life::Held { by: "ann".into() };
        let moved: Vec<_> = events().into_iter().filter(|event| held.after(event).is_some()).collect();
        assert_eq!(moved, [LifeEvent::LetGo { out: true }, LifeEvent::LetGo { out: false }]);
    }

    #[test]
    fn every_state_can_be_left() {
        for life in lives() {
            assert!(events().iter().any(|event| life.after(event).is_some_and(|next| next != life)), "{life:?}");
        }
    }

    #[test]
    fn every_word_is_a_selector_and_reads_back_from_json() {
        for life in lives() {
            assert!(crate::hostlist::LIVES.contains(&life.word()));
            let json = serde_json::to_string(&life).unwrap();
            assert_eq!(serde_json::from_str::<Life>(&json).unwrap(), life);
        }
    }
}
