//! The connections of a node: the first node has one to each other node and synchronises them; the others have one to
//! the first. A single-node test is a first node without others.

use std::{sync::mpsc::Sender, thread};

use doctor_checks::collective_params::{CollectiveParams, Mode};
use serde::de::DeserializeOwned;

use super::{
    events::CoordinatorEvent,
    frame_auth::{FrameError, ReadChannel, WriteChannel},
    launcher::JobPosition,
    messages::{FromFirst, JoinReply, JoinRequest, ToFirst},
    rendezvous::{self, RendezvousError},
    step_barrier::{Barrier, Outgoing},
};
use crate::stop::Stop;

#[derive(Debug)]
pub(super) enum Link {
    First(First),
    Other { first: WriteChannel },
}

#[derive(Debug)]
pub(super) struct First {
    barrier: Barrier,
    /// One for each other node that has joined; none for this node.
    peers: Vec<Option<WriteChannel>>,
    queue: Sender<CoordinatorEvent>,
}

impl Link {
    pub(super) fn open(
        params: &CollectiveParams,
        position: Option<&JobPosition>,
        name: &str,
        stop: &Stop,
        queue: &Sender<CoordinatorEvent>,
    ) -> Result<Self, RendezvousError> {
        let queue = queue.clone();
        let nodes = match position {
            Some(position) if params.mode == Mode::Nodes && position.rank > 0 => {
                let (reading, first) = rendezvous::join(position, name, params.gather, stop)?;
                thread::spawn(move || {
                    forward(reading, &queue, CoordinatorEvent::FromFirst, CoordinatorEvent::FirstLost);
                });
                return Ok(Self::Other { first });
            }
            Some(position) if params.mode == Mode::Nodes => {
                rendezvous::listen(position, &queue)?;
                position.nodes as usize
            }
            Some(_) | None => 1,
        };
        let mut steps = Barrier::new(nodes);
        steps.join(0, name);
        Ok(Self::First(First { barrier: steps, peers: std::iter::repeat_with(|| None).take(nodes).collect(), queue }))
    }

    pub(super) const fn is_only_node(&self) -> bool {
        matches!(self, Self::First(First { peers, .. }) if peers.len() == 1)
    }

    /// Only the first node has the barrier.
    pub(super) const fn barrier(&self) -> Option<&Barrier> {
        match self {
            Self::First(first) => Some(&first.barrier),
            Self::Other { .. } => None,
        }
    }

    /// Sends a message of this node. On the first node, returns the resulting instruction.
    pub(super) fn send_up(&mut self, up: ToFirst) -> Result<Option<FromFirst>, FrameError> {
        match self {
            Self::First(_) => Ok(self.with_barrier(|steps| steps.handle(0, up))),
            Self::Other { first } => first.write(&up).map(|()| None),
        }
    }

    /// Stops the test, as far as this node can reach the others.
    pub(super) fn stop(&mut self, reason: String) -> Option<FromFirst> {
        if let Self::Other { .. } = self {
            return Some(FromFirst::Stop(reason));
        }
        self.with_barrier(|steps| {
            let mut outgoing = steps.stop(reason);
            for node in steps.missing() {
                outgoing.extend(steps.node_lost(node, "it did not join"));
            }
            outgoing
        })
    }

    /// Sends the messages that follow from a change. Returns the one for this node; of several the last, because each
    /// supersedes those before it: an end follows a stop.
    pub(super) fn with_barrier(&mut self, change: impl FnOnce(&mut Barrier) -> Vec<Outgoing>) -> Option<FromFirst> {
        let Self::First(first) = self else { return None };
        let mut own = None;
        for message in change(&mut first.barrier) {
            let (to, down) = match message {
                Outgoing::One(node, down) => (node..node + 1, down),
                Outgoing::All(down) => (0..first.peers.len(), down),
            };
            for node in to {
                match node {
                    0 => own = Some(down.clone()),
                    node => first.send_down(node, &down),
                }
            }
        }
        own
    }

    pub(super) fn node_joined(&mut self, hello: &JoinRequest, reading: ReadChannel, writing: WriteChannel) {
        if let Self::First(first) = self {
            first.node_joined(hello, reading, writing);
        }
    }
}

impl First {
    fn send_down(&mut self, node: usize, down: &FromFirst) {
        let Some(peer) = &mut self.peers[node] else { return };
        if let Err(error) = peer.write(down) {
            self.peers[node] = None;
            let _queued = self.queue.send(CoordinatorEvent::PeerLost(node, error.to_string()));
        }
    }

    fn node_joined(&mut self, hello: &JoinRequest, reading: ReadChannel, mut writing: WriteChannel) {
        let (node, nodes) = (hello.rank as usize, self.peers.len());
        let rejection = if hello.nodes as usize != nodes {
            Some(format!("the first node expects {nodes} nodes, this node expects {}", hello.nodes))
        } else if self.barrier.is_stopped() || !self.barrier.join(node, &hello.name) {
            Some(format!("{} has already joined, or the test has ended", self.barrier.describe_node(node)))
        } else {
            None
        };
        let welcome = rejection.clone().map_or(JoinReply::Accepted, JoinReply::Rejected);
        let written = writing.write(&welcome).and_then(|()| Ok(rendezvous::remove_read_timeout(&reading)?));
        if let Some(text) = rejection {
            eprintln!("node {} was rejected: {text}", hello.name);
            return;
        }
        let queue = self.queue.clone();
        match written {
            Ok(()) => {
                eprintln!("rank {node} is {}", hello.name);
                self.peers[node] = Some(writing);
                thread::spawn(move || {
                    forward(
                        reading,
                        &queue,
                        |up| CoordinatorEvent::FromPeer(node, up),
                        |reason| CoordinatorEvent::PeerLost(node, reason),
                    );
                });
            }
            Err(error) => drop(queue.send(CoordinatorEvent::PeerLost(node, error.to_string()))),
        }
    }
}

/// Forwards messages from a connection to the queue until either ends.
fn forward<T: DeserializeOwned>(
    mut reading: ReadChannel,
    queue: &Sender<CoordinatorEvent>,
    to_event: impl Fn(T) -> CoordinatorEvent,
    to_lost_event: impl Fn(String) -> CoordinatorEvent,
) {
    loop {
        let (event, last) = match reading.read::<T>() {
            Ok(message) => (to_event(message), false),
            Err(error) => (to_lost_event(error.to_string()), true),
        };
        if queue.send(event).is_err() || last {
            return;
        }
    }
}
