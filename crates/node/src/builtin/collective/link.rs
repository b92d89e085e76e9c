//! The connections of a node: the first node has one to each other node and synchronises them; the others have one to
//! the first. A single-node test is a first node without others.

use std::{sync::mpsc::Sender, thread};

use doctor_checks::collective_order::{CollectiveOrder, Mode};
use serde::de::DeserializeOwned;

use super::{
    events::News,
    launcher::Place,
    rendezvous::{self, NoRendezvous},
    seal::{Reading, SealError, Writing},
    steps::{Steps, Tell},
    told::{Down, Hello, Up, Welcome},
};
use crate::stop::Stop;

#[derive(Debug)]
pub(super) enum Link {
    First(First),
    Other { first: Writing },
}

#[derive(Debug)]
pub(super) struct First {
    steps: Steps,
    /// One for each other node that has joined; none for this node.
    peers: Vec<Option<Writing>>,
    queue: Sender<News>,
}

impl Link {
    pub(super) fn open(
        order: &CollectiveOrder,
        place: Option<&Place>,
        name: &str,
        stop: &Stop,
        queue: &Sender<News>,
    ) -> Result<Self, NoRendezvous> {
        let queue = queue.clone();
        let nodes = match place {
            Some(place) if order.mode == Mode::Nodes && place.rank > 0 => {
                let (reading, first) = rendezvous::join(place, name, order.gather, stop)?;
                thread::spawn(move || forward(reading, &queue, News::Down, News::FirstGone));
                return Ok(Self::Other { first });
            }
            Some(place) if order.mode == Mode::Nodes => {
                rendezvous::listen(place, &queue)?;
                place.nodes as usize
            }
            Some(_) | None => 1,
        };
        let mut steps = Steps::new(nodes);
        steps.came(0, name);
        Ok(Self::First(First { steps, peers: std::iter::repeat_with(|| None).take(nodes).collect(), queue }))
    }

    pub(super) const fn is_only_node(&self) -> bool {
        matches!(self, Self::First(First { peers, .. }) if peers.len() == 1)
    }

    /// Only the first node has the barrier.
    pub(super) const fn steps(&self) -> Option<&Steps> {
        match self {
            Self::First(first) => Some(&first.steps),
            Self::Other { .. } => None,
        }
    }

    /// Sends a message of this node. On the first node, returns the resulting instruction.
    pub(super) fn up(&mut self, up: Up) -> Result<Option<Down>, SealError> {
        match self {
            Self::First(_) => Ok(self.with_steps(|steps| steps.hear(0, up))),
            Self::Other { first } => first.write(&up).map(|()| None),
        }
    }

    /// Stops the test, as far as this node can reach the others.
    pub(super) fn stop(&mut self, why: String) -> Option<Down> {
        if let Self::Other { .. } = self {
            return Some(Down::Stop(why));
        }
        self.with_steps(|steps| {
            let mut tell = steps.stop(why);
            for node in steps.missing() {
                tell.extend(steps.gone(node, "it did not join"));
            }
            tell
        })
    }

    /// Sends the messages that follow from a change. Returns the one for this node; of several the last, because each
    /// supersedes those before it: an end follows a stop.
    pub(super) fn with_steps(&mut self, change: impl FnOnce(&mut Steps) -> Vec<Tell>) -> Option<Down> {
        let Self::First(first) = self else { return None };
        let mut own = None;
        for tell in change(&mut first.steps) {
            let (to, down) = match tell {
                Tell::One(node, down) => (node..node + 1, down),
                Tell::All(down) => (0..first.peers.len(), down),
            };
            for node in to {
                match node {
                    0 => own = Some(down.clone()),
                    node => first.tell(node, &down),
                }
            }
        }
        own
    }

    pub(super) fn came(&mut self, hello: &Hello, reading: Reading, writing: Writing) {
        if let Self::First(first) = self {
            first.came(hello, reading, writing);
        }
    }
}

impl First {
    fn tell(&mut self, node: usize, down: &Down) {
        let Some(peer) = &mut self.peers[node] else { return };
        if let Err(error) = peer.write(down) {
            self.peers[node] = None;
            let _queued = self.queue.send(News::PeerGone(node, error.to_string()));
        }
    }

    fn came(&mut self, hello: &Hello, reading: Reading, mut writing: Writing) {
        let (node, nodes) = (hello.rank as usize, self.peers.len());
        let refused = if hello.nodes as usize != nodes {
            Some(format!("the first node expects {nodes} nodes, this node expects {}", hello.nodes))
        } else if self.steps.is_stopped() || !self.steps.came(node, &hello.name) {
            Some(format!("{} has already joined, or the test has ended", self.steps.words(node)))
        } else {
            None
        };
        let welcome = refused.clone().map_or(Welcome::In, Welcome::Refused);
        let written = writing.write(&welcome).and_then(|()| Ok(rendezvous::unhurried(&reading)?));
        if let Some(text) = refused {
            eprintln!("node {} was rejected: {text}", hello.name);
            return;
        }
        let queue = self.queue.clone();
        match written {
            Ok(()) => {
                eprintln!("rank {node} is {}", hello.name);
                self.peers[node] = Some(writing);
                thread::spawn(move || {
                    forward(reading, &queue, |up| News::Up(node, up), |why| News::PeerGone(node, why));
                });
            }
            Err(error) => drop(queue.send(News::PeerGone(node, error.to_string()))),
        }
    }
}

/// Forwards messages from a connection to the queue until either ends.
fn forward<T: DeserializeOwned>(
    mut reading: Reading,
    queue: &Sender<News>,
    news: impl Fn(T) -> News,
    gone: impl Fn(String) -> News,
) {
    loop {
        let (news, last) = match reading.read::<T>() {
            Ok(word) => (news(word), false),
            Err(error) => (gone(error.to_string()), true),
        };
        if queue.send(news).is_err() || last {
            return;
        }
    }
}
