//! The interface to what is known of agents, and to sources of their messages other than the store's ingest queue.

use doctor_backend::ObservedNode;
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

/// The engine's side of a source of agents' messages. Messages that nodes send to the agent endpoint are in the store's
/// ingest queue; a simulated cluster keeps its agents' messages itself.
pub trait Inbox: Send {
    /// Returns messages that are not in the ingest queue. They are returned again until they are acknowledged.
    fn pending(&mut self) -> Vec<AgentMessage> {
        Vec::new()
    }
    /// These were processed, accepted or not.
    fn acknowledge(&mut self, _numbers: &[u64]) {}
    /// Tells of the nodes that the cluster has, by name. Messages of others are not accepted.
    fn set_nodes(&mut self, _nodes: &[ObservedNode]) {}
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
