//! The events of a test on one node, which all come in by one queue.

use super::{
    seal::{Reading, Writing},
    told::{Down, Hello, Said, Up},
};

/// What the queue brings.
#[derive(Debug)]
pub(super) enum News {
    Worker(Said),
    Log(String),
    /// The worker has said its last word.
    WorkerEnded,
    /// A node has come to this one, which is the first.
    Came {
        hello: Hello,
        reading: Reading,
        writing: Writing,
    },
    Up(usize, Up),
    PeerGone(usize, String),
    /// The first node to this one.
    Down(Down),
    FirstGone(String),
}
