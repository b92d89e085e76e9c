//! The events of a test on one node, which all arrive in one queue.

use super::{
    frame_auth::{ReadChannel, WriteChannel},
    messages::{FromFirst, JoinRequest, ToFirst, WorkerMessage},
};

/// An event.
#[derive(Debug)]
pub(super) enum CoordinatorEvent {
    Worker(WorkerMessage),
    Log(String),
    /// The worker has closed its output.
    WorkerEnded,
    /// A node has connected to this one, which is the first.
    Joined {
        hello: JoinRequest,
        reading: ReadChannel,
        writing: WriteChannel,
    },
    FromPeer(usize, ToFirst),
    PeerLost(usize, String),
    /// From the first node to this one.
    FromFirst(FromFirst),
    FirstLost(String),
}
