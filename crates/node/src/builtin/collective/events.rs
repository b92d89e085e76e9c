//! The events of a test on one node, which all arrive in one queue.

use super::{
    seal::{Reading, Writing},
    told::{Down, Hello, Said, Up},
};

/// An event.
#[derive(Debug)]
pub(super) enum News {
    Worker(Said),
    Log(String),
    /// The worker has closed its output.
    WorkerEnded,
    /// A node has connected to this one, which is the first.
    Came {
        hello: Hello,
        reading: Reading,
        writing: Writing,
    },
    Up(usize, Up),
    PeerGone(usize, String),
    /// From the first node to this one.
    Down(Down),
    FirstGone(String),
}
