//! Messages of nodes on their way into history.

use doctor_checks::document::{AgentReport, Document};
use doctor_core::{
    ids::{NodeName, RunId},
    time::Timestamp,
};

/// A message whose signature was verified with the key of its sender, and whose content is about that sender.
#[derive(Debug)]
pub struct VerifiedMessage {
    pub node: NodeName,
    pub received: Timestamp,
    pub content: MessageContent,
    /// The signed bytes as received.
    pub bytes: Vec<u8>,
}

/// The parsed content of a message.
#[derive(Debug)]
pub enum MessageContent {
    /// Of the node's agent, outside of any run.
    Report(Box<AgentReport>),
    /// The result of a run on the node.
    Document(Box<Document>),
}

impl MessageContent {
    /// Returns the run of a document.
    pub const fn run(&self) -> Option<RunId> {
        match self {
            Self::Report(_) => None,
            Self::Document(document) => Some(document.run),
        }
    }
}

/// What became of a message that was submitted to the ingest queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enqueued {
    /// It is durable.
    Queued,
    /// A result of this node for this run was accepted before.
    Duplicate,
    /// The run has ended: its results, if it has any, are in history.
    RunEnded,
    /// The node has no part in such a run.
    UnknownRun,
    QueueFull,
    /// Too many messages of this node wait.
    NodeQueueFull,
}

/// A message in the ingest queue, without its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuedMessage {
    pub id: i64,
    pub node: NodeName,
    /// `None`: a report of the node's agent.
    pub run: Option<RunId>,
    pub received: Timestamp,
    /// Length of the signed message.
    pub bytes: u64,
    /// Length in the queue.
    pub stored_bytes: u64,
}
