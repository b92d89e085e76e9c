//! The world: nodes, the machines behind them, users, operators and time.
//!
//! Time passes only in [`World::advance_to`], event by event; between two calls nothing changes. Every random choice
//! has a separate stream and every table a fixed order, so that the same calls produce the same world.

mod agents;
mod changes;
mod event_queue;
mod failures;
mod faults;
mod free_time;
mod incidents;
mod nodes;
mod results;
mod runs;
mod share;
mod user_job_outcomes;
mod users;

use std::{collections::BTreeMap, sync::Arc};

use doctor_backend::{BackendError, Effect as After};
use doctor_checks::document::RunKey;
use doctor_core::{
    ids::{NodeName, OpId, RunId},
    time::{Span, Timestamp},
};

use crate::{
    config::{BadWorld, WorldConfig},
    disruptions::Incident,
    effects::{EffectKind, EffectLog},
    fault::Fault,
    machine::Machine,
    random::{Purpose, Seed},
};

pub use agents::QueuedReport;
pub use faults::OperatorRequest;
pub use free_time::FreeStretch;
pub use nodes::Changes;
pub(crate) use user_job_outcomes::UserCounters;

use agents::Agents;
use event_queue::{Event, EventQueue};
use failures::Failures;
use free_time::FreeTimeLog;
use incidents::PendingDisruptions;
use nodes::{Pool, Slot};
use runs::{KeptResults, TestRun};
use share::Share;
use users::Users;

/// Users fill the cluster for this long before the start.
const WARM_UP: Span = Span::days(2);

/// A simulated cluster.
#[derive(Debug)]
pub struct World {
    config: WorldConfig,
    seed: Seed,
    now: Timestamp,
    /// How far the controller's clock is ahead of the world's, in milliseconds.
    controller_ahead: i64,
    queue: EventQueue,
    slots: Vec<Slot>,
    /// Present nodes.
    by_name: BTreeMap<NodeName, u32>,
    /// Vanished nodes, by their last name.
    vanished: BTreeMap<NodeName, u32>,
    /// Vanished names, each with the version of the change.
    gone: Vec<(u64, NodeName)>,
    pools: Vec<Pool>,
    machines: Vec<Machine>,
    faults: Vec<Fault>,
    users: Users,
    runs: Vec<TestRun>,
    by_run: BTreeMap<RunId, u32>,
    kept_results: KeptResults,
    /// Operations that have taken effect.
    done: BTreeMap<OpId, NodeName>,
    effects: EffectLog,
    share: Option<Share>,
    disruptions: PendingDisruptions,
    agents: Agents,
    failures: Failures,
    requests: Vec<OperatorRequest>,
    script: Vec<Incident>,
    counters: UserCounters,
    /// Absent unless it is requested.
    free_time: Option<FreeTimeLog>,
    /// Counts changes of nodes.
    version: u64,
}

impl World {
    /// Creates a world.
    ///
    /// # Errors If the configuration is invalid, or the file of effects cannot be opened.
    pub fn new(config: WorldConfig) -> Result<Self, BadWorld> {
        config.check()?;
        let effects = match &config.effects {
            Some(path) => {
                EffectLog::with_file(path).map_err(|source| BadWorld::Effects { path: path.clone(), source })?
            }
            None => EffectLog::default(),
        };
        let seed = Seed(config.seed);
        let mut world = Self {
            seed,
            now: config.start.minus(WARM_UP),
            controller_ahead: 0,
            queue: EventQueue::default(),
            slots: Vec::new(),
            by_name: BTreeMap::new(),
            vanished: BTreeMap::new(),
            gone: Vec::new(),
            pools: Vec::new(),
            machines: Vec::new(),
            faults: Vec::new(),
            users: Users::default(),
            runs: Vec::new(),
            by_run: BTreeMap::new(),
            kept_results: KeptResults::new(),
            done: BTreeMap::new(),
            effects,
            share: config.share.clone().map(Share::new),
            disruptions: PendingDisruptions::new(seed),
            agents: Agents::default(),
            failures: Failures::default(),
            requests: Vec::new(),
            script: Vec::new(),
            counters: UserCounters::default(),
            free_time: None,
            version: 0,
            config,
        };
        world.make_nodes()?;
        world.start_user_jobs();
        world.advance_to(world.config.start);
        world.reset_counters();
        // Faults begin at the start: earlier ones would count as undetected for the time before any controller ran.
        for machine in 0..world.machines.len() {
            world.schedule_fault(machine);
        }
        world.schedule_outage();
        world.schedule_agent_checks();
        Ok(world)
    }

    fn make_nodes(&mut self) -> Result<(), BadWorld> {
        for (pool_index, pool) in self.config.pools.clone().iter().enumerate() {
            self.pools.push(Pool::default());
            for number in 1..=pool.nodes {
                let name = pool.node_name(number)?;
                let slot = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
                if self.by_name.insert(name.clone(), slot).is_some() {
                    return Err(BadWorld::DuplicateName(name));
                }
                let machine = Machine::new(self.seed, slot, 0, self.config.start, &self.config.assumptions);
                self.slots.push(Slot::new(name, (pool_index, pool), (slot, &machine)));
                self.machines.push(machine);
                self.update_slot(slot);
            }
        }
        Ok(())
    }

    pub const fn now(&self) -> Timestamp {
        self.now
    }

    /// Returns the time on the controller's clock.
    pub const fn controller_now(&self) -> Timestamp {
        self.now.plus(Span::from_millis(self.controller_ahead))
    }

    /// Returns the world's time at which the controller's clock will show `moment`.
    pub(crate) const fn world_time(&self, moment: Timestamp) -> Timestamp {
        moment.minus(Span::from_millis(self.controller_ahead))
    }

    pub const fn config(&self) -> &WorldConfig {
        &self.config
    }

    pub const fn effects(&self) -> &EffectLog {
        &self.effects
    }

    /// Lets time pass until `moment`, with all events on the way. A past moment has no effect on the time.
    pub fn advance_to(&mut self, moment: Timestamp) {
        self.settle();
        while let Some((at, event)) = self.queue.next_until(moment) {
            self.now = at;
            self.handle_event(event);
            self.settle();
        }
        self.now = self.now.max(moment);
    }

    /// Returns the time of the next event, if there is one.
    pub fn next_event(&self) -> Option<Timestamp> {
        self.queue.peek()
    }

    /// Schedules an incident; one in the past happens with the next step of time.
    pub fn schedule(&mut self, at: Timestamp, incident: Incident) {
        let number = u32::try_from(self.script.len()).unwrap_or(u32::MAX);
        self.script.push(incident);
        self.queue.push(at.max(self.now), Event::Scripted(number));
    }

    /// Returns the key with which this node's agent signs.
    pub fn agent_key(&self, node: &NodeName) -> RunKey {
        let number = doctor_core::fnv::fnv1a(node.as_str().as_bytes());
        RunKey::new(self.seed.stream(Purpose::Keys, number, 0).bytes())
    }

    fn handle_event(&mut self, event: Event) {
        match event {
            Event::UserArrives(pool) => self.user_arrives(pool),
            Event::UserEnds(job, turn) => self.user_ends(job, turn),
            Event::RunStarts(run) => self.run_starts(run),
            Event::TestHalf(run, test) => self.test_half(run, test),
            Event::TestEnds(run, test) => self.test_ends(run, test),
            Event::RunBreaks(run) => self.run_breaks(run),
            Event::RunKilled(run) => self.run_killed(run),
            Event::FaultOccurs(machine) => self.fault_occurs(machine),
            Event::AgentReports(slot) => self.send_agent_report(slot),
            Event::AgentChecks(slot) => self.run_agent_checks(slot),
            Event::Ticket(fault) => self.ticket(fault),
            Event::TicketDone(slot, machine) => self.ticket_done(slot, machine),
            Event::RepairVisit(slot, machine, mark) => self.repair_visit(slot, machine, mark),
            Event::NodeRecovers(slot, turn) => self.recover(slot, turn),
            Event::NodeReachable(slot) => self.update_slot(slot),
            Event::OutageBegins => self.begin_outage(),
            Event::Scripted(number) => self.scripted(number),
        }
    }

    /// Applies immediate consequences: users take nodes that became free.
    fn settle(&mut self) {
        for pool in 0..self.pools.len() {
            if std::mem::take(&mut self.pools[pool].freed) {
                self.place_jobs(pool);
            }
        }
    }

    fn log(&mut self, what: EffectKind) {
        self.effects.add(self.now, what);
    }

    fn slot(&self, slot: u32) -> &Slot {
        &self.slots[slot as usize]
    }

    fn slot_mut(&mut self, slot: u32) -> &mut Slot {
        &mut self.slots[slot as usize]
    }

    fn name(&self, slot: u32) -> NodeName {
        self.slot(slot).seen.node.name.clone()
    }

    /// Finds a node by name.
    ///
    /// # Errors If there is no such node.
    fn find(&self, operation: &'static str, node: &NodeName) -> Result<u32, BackendError> {
        self.by_name.get(node).copied().ok_or_else(|| BackendError {
            operation,
            text: format!("there is no node `{node}` in this cluster"),
            effect: After::NotAppliedPermanent,
        })
    }
}

/// Returns a shared string.
fn arc_str(text: &str) -> Arc<str> {
    Arc::from(text)
}

/// For scoring only.
impl World {
    pub(crate) fn faults_so_far(&self) -> &[Fault] {
        &self.faults
    }

    pub(crate) fn hardware_of(&self, machine: u32) -> doctor_core::node::Hardware {
        self.machines[machine as usize].outside()
    }

    pub(crate) const fn size(&self) -> usize {
        self.slots.len()
    }
}
