//! Hands verified messages of nodes to the store's ingest queue, and knows when each agent last reported.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use doctor_backend::ObservedNode;
use doctor_checks::{drain_permit::DrainPermit, site_profiles::SiteProfiles};
use doctor_core::{
    ids::NodeName,
    plan::TakeOutPermit,
    time::{Span, Timestamp},
};
use doctor_engine::{inbox::Inbox, trigger::Trigger};
use doctor_store::{
    GroupCommit, Store, StoreError, SubmitOutcome,
    messages::VerifiedMessage,
    records::{AgentConfirmation, AgentContact},
};
use tokio::sync::oneshot;

use super::body_memory::BodyPermit;

/// How often contacts are stored, all together, and the list of agents is read again.
const STORE_INTERVAL: Span = Span::minutes(1);
/// Rounds of checks of one agent that are kept until they are stored; an agent has three or four a minute at most.
const MAX_ROUNDS: usize = 16;
/// A node asks once a minute: losing one reply keeps the permit, and an opened breaker takes effect soon.
const PERMIT: DrainPermit = DrainPermit { duration: Span::minutes(2) };
/// The breaker's permits lapse when the next cycle is late by this much.
const PERMIT_GRACE: Duration = Duration::from_secs(60);

/// What the agent endpoint and the engine share.
#[derive(Debug)]
pub(super) struct AgentQueue {
    state: Mutex<QueueState>,
    messages: GroupCommit,
    store: Store,
    cycle_trigger: Arc<Trigger>,
}

#[derive(Debug, Default)]
struct QueueState {
    leading: bool,
    /// The cluster's nodes, by name; `None`: no cycle has observed it yet.
    nodes: Option<Arc<[NodeName]>>,
    /// By agent that may report. One that never reported counts from its enrolment: silence is not health.
    last_contact: BTreeMap<NodeName, Timestamp>,
    latest_report: BTreeMap<NodeName, AgentContact>,
    /// Of those, not stored yet.
    unsaved: BTreeSet<NodeName>,
    /// Results that agents have confirmed in heartbeats, not stored yet.
    confirmed: BTreeMap<NodeName, AgentConfirmation>,
    /// Whether one of them reported for the first time, which the operator who enrolled it waits for.
    first_contact: bool,
    /// Agents that the store does not know yet: their cluster vouches for them and they were never enrolled.
    unregistered: BTreeSet<NodeName>,
    /// The last cycle's permits, and until when they are valid.
    drain_permits: Option<(TakeOutPermit, Instant)>,
    site_profiles: Arc<SignableProfiles>,
}

/// The site's profiles, and the digest that agents compare.
#[derive(Debug)]
pub(super) struct SignableProfiles {
    pub(super) profiles: SiteProfiles,
    pub(super) digest: String,
}

impl From<SiteProfiles> for SignableProfiles {
    fn from(profiles: SiteProfiles) -> Self {
        Self { digest: profiles.digest(), profiles }
    }
}

impl Default for SignableProfiles {
    fn default() -> Self {
        SiteProfiles::default().into()
    }
}

/// What the store knows of a sender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AgentIdentity {
    /// With its latest contact.
    Known(Option<AgentContact>),
    New,
}

impl AgentQueue {
    pub(super) fn new(store: &Store, cycle_trigger: Arc<Trigger>) -> Result<Self, StoreError> {
        let messages = GroupCommit::start(store)?;
        Ok(Self { state: Mutex::default(), messages, store: store.clone(), cycle_trigger })
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_leading(&self, leading: bool) {
        self.lock().leading = leading;
    }

    /// Sets which nodes may be drained, until the next cycle; cycles start `every` apart.
    pub(super) fn set_drain_permits(&self, permits: Option<TakeOutPermit>, every: Duration) {
        self.lock().drain_permits = permits.map(|permits| (permits, Instant::now() + every + PERMIT_GRACE));
    }

    /// Returns the permit for a node that asks now.
    pub(super) fn permit(&self, node: &NodeName) -> Option<DrainPermit> {
        let state = self.lock();
        let (permits, expires) = state.drain_permits.as_ref().filter(|_| state.leading)?;
        (permits.allows(node) && Instant::now() < *expires).then_some(PERMIT)
    }

    pub(super) fn set_site_profiles(&self, profiles: SiteProfiles) {
        self.lock().site_profiles = Arc::new(profiles.into());
    }

    pub(super) fn site_profiles(&self) -> Arc<SignableProfiles> {
        Arc::clone(&self.lock().site_profiles)
    }

    pub(super) fn is_leading(&self) -> bool {
        self.lock().leading
    }

    /// Records contact from an authenticated agent, and the results that a heartbeat confirms. A message no newer than
    /// the last one may be a replay and proves nothing about the present.
    pub(super) fn record_contact(
        &self,
        node: &NodeName,
        identity: &AgentIdentity,
        contact: AgentContact,
        confirmed: Option<AgentConfirmation>,
    ) {
        let mut state = self.lock();
        let stored = match identity {
            AgentIdentity::Known(stored) => stored.as_ref(),
            AgentIdentity::New => {
                state.unregistered.insert(node.clone());
                None
            }
        };
        let known = state.latest_report.get(node).or(stored);
        if known.is_some_and(|known| contact.number <= known.number && contact.sent <= known.sent) {
            return;
        }
        state.first_contact |= known.is_none();
        state.last_contact.insert(node.clone(), contact.at);
        state.latest_report.insert(node.clone(), contact);
        state.unsaved.insert(node.clone());
        if let Some(confirmed) = confirmed {
            state.add_confirmation(confirmed);
        }
    }

    /// Returns whether the cluster has this node, as far as it is known. If it has not, the engine looks again.
    pub(super) fn is_in_cluster(&self, node: &NodeName) -> bool {
        let nodes = self.lock().nodes.clone();
        let is_in = nodes.is_none_or(|nodes| nodes.binary_search(node).is_ok());
        if !is_in {
            self.cycle_trigger.fire();
        }
        is_in
    }

    /// Submits a message; the receiver resolves when it is durable. It is compressed here, which takes time. `memory` is its
    /// memory until then, also after its sender has disconnected.
    pub(super) fn submit(&self, message: VerifiedMessage, memory: BodyPermit) -> oneshot::Receiver<SubmitOutcome> {
        let (sender, outcome) = oneshot::channel();
        self.messages.submit(message, move |answer| {
            drop(memory);
            // The sender may have given up: it then repeats the message, which is recognised.
            drop(sender.send(answer));
        });
        outcome
    }

    /// Wakes the engine for messages that wait.
    pub(super) fn trigger_cycle(&self) {
        self.cycle_trigger.fire();
    }

    /// Wakes the engine if messages arrived during the last cycle or were not entered on their first offer, so that they
    /// need not wait for the regular interval.
    pub(super) fn trigger_if_pending(&self) {
        if self.store.has_new_messages() {
            self.cycle_trigger.fire();
        }
    }

    /// Returns how many reports wait on nodes, as their agents reported to this process, and how many messages here.
    pub(super) fn waiting_counts(&self) -> (u64, usize) {
        let state = self.lock();
        let on_nodes = state.latest_report.values().map(|report| u64::from(report.versions.queued)).sum();
        (on_nodes, self.messages.waiting())
    }
}

impl QueueState {
    /// Adds to what the agent has confirmed since the last time. All of it holds only for a store that has the agent's
    /// last report.
    fn add_confirmation(&mut self, confirmed: AgentConfirmation) {
        match self.confirmed.entry(confirmed.node.clone()) {
            Entry::Vacant(vacant) => drop(vacant.insert(confirmed)),
            Entry::Occupied(mut known) => {
                let known = known.get_mut();
                known.through = confirmed.through;
                known.rounds.extend(confirmed.rounds);
                let surplus = known.rounds.len().saturating_sub(MAX_ROUNDS);
                known.rounds.drain(..surplus);
            }
        }
    }
}

/// The engine's side of the queue.
#[derive(Debug)]
pub struct AgentInbox {
    queue: Arc<AgentQueue>,
    store: Store,
    last_saved: Timestamp,
    last_confirmed: Timestamp,
}

impl AgentInbox {
    pub(super) fn new(queue: Arc<AgentQueue>, store: Store, now: Timestamp) -> Result<Self, StoreError> {
        let mut inbox = Self { queue, store, last_saved: now, last_confirmed: now };
        match inbox.reload_agents() {
            // This controller waits for the lease to migrate the store, and accepts no report before. The agents are
            // loaded with the first cycle that it leads.
            Err(error) if error.awaits_migration() => inbox.last_saved = now.minus(STORE_INTERVAL),
            loaded => loaded?,
        }
        Ok(inbox)
    }

    /// Adds agents that the store does not know yet, from their first contact.
    fn register_agents(&self) -> Result<(), StoreError> {
        let unregistered: Vec<(NodeName, Timestamp)> = {
            let state = self.queue.lock();
            let with_contact = |node: &NodeName| Some((node.clone(), *state.last_contact.get(node)?));
            state.unregistered.iter().filter_map(with_contact).collect()
        };
        if unregistered.is_empty() {
            return Ok(());
        }
        self.store.register_agents(&unregistered)?;
        let mut state = self.queue.lock();
        for (node, _) in &unregistered {
            state.unregistered.remove(node);
        }
        Ok(())
    }

    /// Loads which agents may report, and their last stored contact.
    fn reload_agents(&self) -> Result<(), StoreError> {
        let agents = self.store.agents()?;
        let mut state = self.queue.lock();
        let mut last_contact = BTreeMap::new();
        for agent in agents.into_iter().filter(|agent| agent.revoked.is_none()) {
            let stored = agent.last_contact.map_or(agent.created, |contact| contact.at);
            let known = state.last_contact.get(&agent.node).copied();
            last_contact.insert(agent.node, known.map_or(stored, |known| known.max(stored)));
        }
        state.latest_report.retain(|node, _| last_contact.contains_key(node));
        state.last_contact = last_contact;
        Ok(())
    }
}

impl Inbox for AgentInbox {
    fn set_nodes(&mut self, nodes: &[ObservedNode]) {
        let names = || nodes.iter().map(|observed| &observed.node.name);
        let known = self.queue.lock().nodes.clone();
        if !known.is_some_and(|known| known.iter().eq(names())) {
            self.queue.lock().nodes = Some(names().cloned().collect());
        }
    }

    fn last_report(&self, node: &NodeName) -> Option<Timestamp> {
        self.queue.lock().last_contact.get(node).copied()
    }

    fn take_last_reports(&mut self, now: Timestamp) -> Vec<(NodeName, AgentContact)> {
        let first_contact = std::mem::take(&mut self.queue.lock().first_contact);
        if !first_contact && now.since(self.last_saved) < STORE_INTERVAL {
            return Vec::new();
        }
        self.last_saved = now;
        if let Err(error) = self.register_agents().and_then(|()| self.reload_agents()) {
            tracing::warn!(%error, "cannot update the list of agents");
        }
        let mut state = self.queue.lock();
        let unsaved = std::mem::take(&mut state.unsaved);
        let with_report = |node: NodeName| state.latest_report.get(&node).cloned().map(|report| (node, report));
        unsaved.into_iter().filter_map(with_report).collect()
    }

    fn take_confirmations(&mut self, now: Timestamp) -> Vec<AgentConfirmation> {
        if now.since(self.last_confirmed) < STORE_INTERVAL {
            return Vec::new();
        }
        self.last_confirmed = now;
        std::mem::take(&mut self.queue.lock().confirmed).into_values().collect()
    }
}
