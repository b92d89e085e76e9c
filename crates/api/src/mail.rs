//! Queue of agent messages for the engine, and when each agent last reported.

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

/// How often contacts are stored, all together, and the list of agents is read again.
const WRITE_DOWN: Span = Span::minutes(1);
/// Limits of what may wait for one cycle.
const MOST_MESSAGES: usize = 1024;
const MOST_BYTES: usize = 256 << 20;
/// A node asks once a minute: losing one reply keeps the permit, and an opened breaker takes effect soon.
const PERMIT: Permit = Permit { lasts: Span::minutes(2) };
/// The breaker's permits lapse when the next cycle is late by this much.
const LATE: Duration = Duration::from_secs(60);

/// The queue between the agent endpoint and the engine.
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
    /// By agent that may report. One that never reported counts from its enrolment: silence is not health.
    heard: BTreeMap<NodeName, Timestamp>,
    newest: BTreeMap<NodeName, AgentHeard>,
    /// Of those, not stored yet.
    unwritten: BTreeSet<NodeName>,
    /// Whether one of them reported for the first time, which the operator who enrolled it waits for.
    new_face: bool,
    /// Agents that the store does not know yet: their cluster vouches for them and they were never enrolled.
    strangers: BTreeSet<NodeName>,
    /// The last cycle's permits, and until when they are valid.
    may_go: Option<(TakeOut, Instant)>,
}

/// What the store knows of a sender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Face {
    /// With its latest contact.
    Known(Option<AgentHeard>),
    New,
}

#[derive(Debug)]
struct Waiting {
    message: AgentMessage,
    kept: oneshot::Sender<()>,
    /// Number of cycles it was offered to. The first one may not know the cluster yet.
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

    /// Sets which nodes may be drained, until the next cycle; cycles start `every` apart.
    pub(super) fn set_may_go(&self, may_go: Option<TakeOut>, every: Duration) {
        self.lock().may_go = may_go.map(|may_go| (may_go, Instant::now() + every + LATE));
    }

    /// Returns the permit for a node that asks now.
    pub(super) fn permit(&self, node: &NodeName) -> Option<Permit> {
        let inside = self.lock();
        let (may_go, until) = inside.may_go.as_ref().filter(|_| inside.leading)?;
        (may_go.allows(node) && Instant::now() < *until).then_some(PERMIT)
    }

    pub(super) fn is_leading(&self) -> bool {
        self.lock().leading
    }

    /// Records contact from an authenticated agent. A message no newer than the last one may be a replay and proves
    /// nothing about the present.
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

    /// Queues a message and wakes the engine. The receiver resolves when it is stored; `None` if the queue is full.
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

    /// Wakes the engine if messages remain that the last cycle did not store on their first offer, or that arrived
    /// during it, so that they need not wait for the regular interval.
    pub(super) fn ring_again(&self) {
        if self.lock().waiting.values().any(|waiting| waiting.offered < 2) {
            self.wake.ring();
        }
    }

    /// Returns how many reports wait on nodes, as their agents reported to this process, and how many here.
    pub(super) fn spooled(&self) -> (u64, usize) {
        let inside = self.lock();
        let on_nodes = inside.newest.values().map(|heard| u64::from(heard.versions.waiting)).sum();
        (on_nodes, inside.waiting.len())
    }

    /// Withdraws a message whose sender no longer waits. The agent will resend it.
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

/// The engine's side of the queue.
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

    /// Adds agents that the store does not know yet, from their first contact.
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

    /// Loads which agents may report, and their last stored contact.
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
                // The handler may have given up: the agent then resends, and the store recognises the duplicate.
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
            tracing::warn!(%error, "cannot update the list of agents");
        }
        let mut inside = self.mail.lock();
        let unwritten = std::mem::take(&mut inside.unwritten);
        let heard = |node: NodeName| inside.newest.get(&node).cloned().map(|heard| (node, heard));
        unwritten.into_iter().filter_map(heard).collect()
    }
}
