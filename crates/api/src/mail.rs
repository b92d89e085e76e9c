//! What came in and waits for the engine, and when each agent was last heard.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use doctor_checks::permit::Permit;
use doctor_core::{
    ids::NodeName,
    plan::TakeOut,
    time::{Span, Timestamp},
};
use doctor_engine::{
    inbox::{AgentMessage, Inbox},
    wake::Wake,
};
use doctor_store::{Store, StoreError, records::AgentHeard};
use tokio::sync::oneshot;

use super::liveness::Pulse;

/// What was heard is written down this often, for all together, and the list of agents is read again.
const WRITE_DOWN: Span = Span::minutes(1);
/// What may wait for one cycle.
const MOST_MESSAGES: usize = 1024;
const MOST_BYTES: usize = 256 << 20;
/// A node asks once a minute. One answer that is lost takes no permit away, and a breaker that opens is heard of soon.
const PERMIT: Permit = Permit { lasts: Span::minutes(2) };
/// What the breaker said is old when the next cycle is late by this much.
const LATE: Duration = Duration::from_secs(60);

/// Between the door and the engine.
#[derive(Debug)]
pub(super) struct Mail {
    inside: Mutex<Inside>,
    wake: Arc<Wake>,
    pub(super) pulse: Pulse,
}

#[derive(Debug, Default)]
struct Inside {
    leading: bool,
    numbered: u64,
    waiting: BTreeMap<u64, Waiting>,
    bytes: usize,
    /// Of every agent that may speak. One that never spoke is counted from its enrolment on: silence is not health.
    heard: BTreeMap<NodeName, Timestamp>,
    newest: BTreeMap<NodeName, AgentHeard>,
    /// Of those, what was not written down yet.
    unwritten: BTreeSet<NodeName>,
    /// One of them was never heard before, which somebody who has just enrolled it waits for.
    new_face: bool,
    /// Those that the store does not know yet, because nobody enrolled them: their cluster vouches for them.
    strangers: BTreeSet<NodeName>,
    /// What the last cycle's breaker said, and until when that counts.
    may_go: Option<(TakeOut, Instant)>,
}

/// What the store knows of who speaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Face {
    /// With the newest that was heard of it.
    Known(Option<AgentHeard>),
    New,
}

#[derive(Debug)]
struct Waiting {
    message: AgentMessage,
    kept: oneshot::Sender<()>,
    /// To so many cycles. The first one may not know the cluster yet.
    offered: u8,
}

impl Mail {
    pub(super) fn new(wake: Arc<Wake>) -> Self {
        Self { inside: Mutex::default(), wake, pulse: Pulse::new(Instant::now()) }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_leading(&self, leading: bool) {
        self.lock().leading = leading;
    }

    /// Who may be taken out by others, until the next of cycles that begin as long as `every` apart.
    pub(super) fn set_may_go(&self, may_go: Option<TakeOut>, every: Duration) {
        self.lock().may_go = may_go.map(|may_go| (may_go, Instant::now() + every + LATE));
    }

    /// What a node is told that asks now.
    pub(super) fn permit(&self, node: &NodeName) -> Option<Permit> {
        let inside = self.lock();
        let (may_go, until) = inside.may_go.as_ref().filter(|_| inside.leading)?;
        (may_go.allows(node) && Instant::now() < *until).then_some(PERMIT)
    }

    pub(super) fn is_leading(&self) -> bool {
        self.lock().leading
    }

    /// An agent spoke and it was really that agent. What is not newer than what is known (a copy that somebody kept)
    /// proves nothing about now.
    pub(super) fn hear(&self, node: &NodeName, face: &Face, heard: AgentHeard) {
        let mut inside = self.lock();
        let stored = match face {
            Face::Known(stored) => stored.as_ref(),
            Face::New => {
                inside.strangers.insert(node.clone());
                None
            }
        };
        let known = inside.newest.get(node).or(stored);
        if known.is_some_and(|known| heard.number <= known.number && heard.sent <= known.sent) {
            return;
        }
        inside.new_face |= known.is_none();
        inside.heard.insert(node.clone(), heard.at);
        inside.newest.insert(node.clone(), heard);
        inside.unwritten.insert(node.clone());
    }

    /// Puts a message before the engine and wakes it. The receiver hears when it was kept; `None`: there is no room.
    pub(super) fn post(&self, message: AgentMessage) -> Option<(u64, oneshot::Receiver<()>)> {
        let mut inside = self.lock();
        let bytes = inside.bytes + message.bytes.len();
        if inside.waiting.len() >= MOST_MESSAGES || bytes > MOST_BYTES {
            return None;
        }
        inside.bytes = bytes;
        inside.numbered += 1;
        let number = inside.numbered;
        let (kept, hears) = oneshot::channel();
        inside.waiting.insert(number, Waiting { message: AgentMessage { number, ..message }, kept, offered: 0 });
        drop(inside);
        self.wake.ring();
        Some((number, hears))
    }

    /// A cycle is over that did not keep what it was offered for the first time, or was not offered what came meanwhile:
    /// another one may, and should not take its time.
    pub(super) fn ring_again(&self) {
        if self.lock().waiting.values().any(|waiting| waiting.offered < 2) {
            self.wake.ring();
        }
    }

    /// How much waits on nodes, as far as their agents have told this process, and how much here for the engine.
    pub(super) fn spooled(&self) -> (u64, usize) {
        let inside = self.lock();
        let on_nodes = inside.newest.values().map(|heard| u64::from(heard.versions.waiting)).sum();
        (on_nodes, inside.waiting.len())
    }

    /// Nobody waits for the answer any more. The agent will send it again.
    pub(super) fn withdraw(&self, number: u64) {
        self.lock().take(number);
    }
}

impl Inside {
    fn take(&mut self, number: u64) -> Option<oneshot::Sender<()>> {
        let waiting = self.waiting.remove(&number)?;
        self.bytes -= waiting.message.bytes.len();
        Some(waiting.kept)
    }
}

/// The engine's side of the door.
#[derive(Debug)]
pub struct DoorInbox {
    mail: Arc<Mail>,
    store: Store,
    written: Timestamp,
}

impl DoorInbox {
    pub(super) fn new(mail: Arc<Mail>, store: Store, now: Timestamp) -> Result<Self, StoreError> {
        let inbox = Self { mail, store, written: now };
        inbox.read_roster()?;
        Ok(inbox)
    }

    /// The store is told of those that it does not know yet, from when they were heard.
    fn introduce_strangers(&self) -> Result<(), StoreError> {
        let strangers: Vec<(NodeName, Timestamp)> = {
            let inside = self.mail.lock();
            let heard = |node: &NodeName| Some((node.clone(), *inside.heard.get(node)?));
            inside.strangers.iter().filter_map(heard).collect()
        };
        if strangers.is_empty() {
            return Ok(());
        }
        self.store.introduce_agents(&strangers)?;
        let mut inside = self.mail.lock();
        for (node, _) in &strangers {
            inside.strangers.remove(node);
        }
        Ok(())
    }

    /// Who may speak, and when they last did as far as the store knows.
    fn read_roster(&self) -> Result<(), StoreError> {
        let agents = self.store.agents()?;
        let mut inside = self.mail.lock();
        let mut heard = BTreeMap::new();
        for agent in agents.into_iter().filter(|agent| agent.revoked.is_none()) {
            let stored = agent.heard.map_or(agent.created, |heard| heard.at);
            let known = inside.heard.get(&agent.node).copied();
            heard.insert(agent.node, known.map_or(stored, |known| known.max(stored)));
        }
        inside.newest.retain(|node, _| heard.contains_key(node));
        inside.heard = heard;
        Ok(())
    }
}

impl Inbox for DoorInbox {
    fn waiting(&mut self) -> Vec<AgentMessage> {
        let offer = |waiting: &mut Waiting| {
            waiting.offered = waiting.offered.saturating_add(1);
            waiting.message.clone()
        };
        self.mail.lock().waiting.values_mut().map(offer).collect()
    }

    fn acknowledge(&mut self, numbers: &[u64]) {
        let mut inside = self.mail.lock();
        for number in numbers {
            if let Some(kept) = inside.take(*number) {
                // Whoever waited may have given up: then it comes again and is recognised.
                let _heard = kept.send(());
            }
        }
    }

    fn heard(&self, node: &NodeName) -> Option<Timestamp> {
        self.mail.lock().heard.get(node).copied()
    }

    fn take_heard(&mut self, now: Timestamp) -> Vec<(NodeName, AgentHeard)> {
        let new_face = std::mem::take(&mut self.mail.lock().new_face);
        if !new_face && now.since(self.written) < WRITE_DOWN {
            return Vec::new();
        }
        self.written = now;
        if let Err(error) = self.introduce_strangers().and_then(|()| self.read_roster()) {
            tracing::warn!(%error, "the list of agents could not be brought up to date");
        }
        let mut inside = self.mail.lock();
        let unwritten = std::mem::take(&mut inside.unwritten);
        let heard = |node: NodeName| inside.newest.get(&node).cloned().map(|heard| (node, heard));
        unwritten.into_iter().filter_map(heard).collect()
    }
}
