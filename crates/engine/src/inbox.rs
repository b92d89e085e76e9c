//! Messages of agents on their way into the engine.

use doctor_checks::document::RunKey;
use doctor_core::{ids::NodeName, time::Timestamp};
use doctor_store::records::AgentHeard;

/// An agent's message as it came in, with the key its node was enrolled with.
#[derive(Debug, Clone)]
pub struct AgentMessage {
    /// Names it when it is acknowledged.
    pub number: u64,
    pub node: NodeName,
    pub key: RunKey,
    pub bytes: Vec<u8>,
}

/// Where agents' messages wait until they have been kept: a controller that dies in between finds them again.
pub trait Inbox: Send {
    fn waiting(&mut self) -> Vec<AgentMessage>;
    /// These have been seen to, one way or the other.
    fn acknowledge(&mut self, numbers: &[u64]);
    /// When this node's agent was last heard, where messages come this way and not with the cluster's own answer. Of an
    /// agent that never spoke: since when it should.
    fn heard(&self, _node: &NodeName) -> Option<Timestamp> {
        None
    }
    /// What was heard of agents and is worth writing down now.
    fn take_heard(&mut self, _now: Timestamp) -> Vec<(NodeName, AgentHeard)> {
        Vec::new()
    }
}
