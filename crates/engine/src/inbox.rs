//! The interface through which agents' messages reach the engine.

use doctor_checks::document::RunKey;
use doctor_core::{ids::NodeName, time::Timestamp};
use doctor_store::records::{AgentConfirmation, AgentContact};

/// An agent's message as received, with the key of its node's enrolment.
#[derive(Debug, Clone)]
pub struct AgentMessage {
    /// Identifies the message in an acknowledgement.
    pub number: u64,
    pub node: NodeName,
    pub key: RunKey,
    pub bytes: Vec<u8>,
}

/// Holds agents' messages until they are stored: a controller that restarts in between finds them again.
pub trait Inbox: Send {
    fn pending(&mut self) -> Vec<AgentMessage>;
    /// These were processed, accepted or not.
    fn acknowledge(&mut self, numbers: &[u64]);
    /// Returns when this node's agent last reported, if messages arrive here and not in the cluster's own response. For
    /// an agent that never reported: since when it is expected to.
    fn last_report(&self, _node: &NodeName) -> Option<Timestamp> {
        None
    }
    /// Returns the agents' last reports that should be stored now.
    fn take_last_reports(&mut self, _now: Timestamp) -> Vec<(NodeName, AgentContact)> {
        Vec::new()
    }
    /// Returns the results that agents have confirmed in heartbeats and that should be stored now.
    fn take_confirmations(&mut self, _now: Timestamp) -> Vec<AgentConfirmation> {
        Vec::new()
    }
}
