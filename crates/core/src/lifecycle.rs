//! The state machine of a node, from in service to out of service and back: a state and an event give the next state,
//! or none.
//!
//! The planner never sets a state directly; it names the event and takes the state from here. Only transitions in the
//! table exist: a node returns to users only through a requalification run or an operator's decision.

use serde::{Deserialize, Serialize};

use crate::{case::StepKind, ids::RunId};

/// The state of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum NodeState {
    /// Available to users. No failing finding is open.
    InService,
    /// Available to users, but a failing finding is open: it is tested before other nodes.
    Suspect,
    /// Out of service; no step is in progress.
    Quarantined,
    /// Out of service; this step was started and has not ended.
    Repairing { step: StepKind, tries: u32 },
    /// Out of service; this run and the agent's checks decide whether the node returns. Without a run, the agent's checks
    /// alone do.
    Requalifying { run: Option<RunId> },
    /// Out of service until an operator releases it or another machine takes its name.
    Out,
    /// An operator intervened. The controller records and does not act.
    Held { by: String },
}

/// An event that can change the state of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeEvent {
    /// A failing finding is open that does not (yet) take the node out of service.
    Suspected,
    /// No finding is open any more.
    Cleared,
    TakenOut,
    StepStarted {
        step: StepKind,
        attempts: u32,
    },
    /// The step ended, or an operator reported it as done.
    StepEnded,
    RequalificationStarted {
        run: Option<RunId>,
    },
    /// The requalification run failed or gave no result.
    RequalificationEnded,
    /// The controller has no permitted step left.
    HandedOver,
    /// The requalification run passed and our marks are removed.
    Returned,
    Held {
        by: String,
    },
    /// The hold has ended; `out` tells whether a case is still open.
    HoldEnded {
        out: bool,
    },
}

impl NodeState {
    /// Returns whether Cluster Doctor keeps this node from users.
    pub const fn is_out_of_service(&self) -> bool {
        matches!(self, Self::Quarantined | Self::Repairing { .. } | Self::Requalifying { .. } | Self::Out)
    }

    /// Returns the name of the state for tables and selectors.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::InService => "in-service",
            Self::Suspect => "suspect",
            Self::Quarantined => "quarantined",
            Self::Repairing { .. } => "repairing",
            Self::Requalifying { .. } => "requalifying",
            Self::Out => "out",
            Self::Held { .. } => "held",
        }
    }

    /// Returns the state after this event, or `None` if the event is not allowed in this state.
    #[must_use]
    pub fn apply(&self, event: &NodeEvent) -> Option<Self> {
        use NodeEvent as E;
        let next = match (self, event) {
            (Self::InService, E::Suspected) => Self::Suspect,
            (Self::Suspect, E::Cleared) => Self::InService,
            (Self::InService | Self::Suspect, E::TakenOut) => Self::Quarantined,
            (
                Self::Quarantined | Self::Repairing { .. } | Self::Requalifying { .. },
                E::StepStarted { step, attempts: tries },
            ) => Self::Repairing { step: *step, tries: *tries },
            (Self::Repairing { .. } | Self::Out, E::StepEnded) => Self::Quarantined,
            (Self::Quarantined | Self::Repairing { .. }, E::RequalificationStarted { run }) => {
                Self::Requalifying { run: *run }
            }
            (Self::Requalifying { .. }, E::RequalificationEnded) => Self::Quarantined,
            (Self::Quarantined | Self::Repairing { .. } | Self::Requalifying { .. }, E::HandedOver) => Self::Out,
            (Self::Requalifying { .. }, E::Returned) => Self::InService,
            (Self::Held { .. }, E::Held { .. }) => return None,
            (_, E::Held { by }) => Self::Held { by: by.clone() },
            (Self::Held { .. }, E::HoldEnded { out: true }) => Self::Quarantined,
            (Self::Held { .. }, E::HoldEnded { out: false }) => Self::InService,
            _ => return None,
        };
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn states() -> Vec<NodeState> {
        let run = RunId::from_number(1);
        vec![
            NodeState::InService,
            NodeState::Suspect,
            NodeState::Quarantined,
            NodeState::Repairing { step: StepKind::Reset, tries: 1 },
            NodeState::Requalifying { run: Some(run) },
            NodeState::Requalifying { run: None },
            NodeState::Out,
            NodeState::Held { by: "ann".into() },
        ]
    }

    fn events() -> Vec<NodeEvent> {
        let run = RunId::from_number(2);
        vec![
            NodeEvent::Suspected,
            NodeEvent::Cleared,
            NodeEvent::TakenOut,
            NodeEvent::StepStarted { step: StepKind::Reboot, attempts: 1 },
            NodeEvent::StepEnded,
            NodeEvent::RequalificationStarted { run: Some(run) },
            NodeEvent::RequalificationEnded,
            NodeEvent::HandedOver,
            NodeEvent::Returned,
            NodeEvent::Held { by: "bob".into() },
            NodeEvent::HoldEnded { out: true },
            NodeEvent::HoldEnded { out: false },
        ]
    }

    #[test]
    fn a_node_that_is_out_returns_only_through_a_proof_or_an_operator() {
        for state in states().iter().filter(|state| state.is_out_of_service()) {
            for event in events() {
                if let Some(next) = state.apply(&event)
                    && matches!(next, NodeState::InService | NodeState::Suspect)
                {
                    assert!(
                        matches!(state, NodeState::Requalifying { .. }) && event == NodeEvent::Returned,
                        "{state:?} {event:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn every_state_can_be_held_and_only_the_end_of_the_hold_moves_a_held_node() {
        for state in states() {
            let held = state.apply(&NodeEvent::Held { by: "bob".into() });
            assert_eq!(held.is_some(), !matches!(state, NodeState::Held { .. }), "{state:?}");
        }
        let held = NodeState::Held { by: "ann".into() };
        let moved: Vec<_> = events().into_iter().filter(|event| held.apply(event).is_some()).collect();
        assert_eq!(moved, [NodeEvent::HoldEnded { out: true }, NodeEvent::HoldEnded { out: false }]);
    }

    #[test]
    fn every_state_can_be_left() {
        for state in states() {
            assert!(events().iter().any(|event| state.apply(event).is_some_and(|next| next != state)), "{state:?}");
        }
    }

    #[test]
    fn every_state_name_is_a_selector_and_reads_back_from_json() {
        for state in states() {
            assert!(crate::hostlist::NODE_STATES.contains(&state.as_str()));
            let json = serde_json::to_string(&state).unwrap();
            assert_eq!(serde_json::from_str::<NodeState>(&json).unwrap(), state);
        }
    }
}
