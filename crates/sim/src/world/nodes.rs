//! Nodes as the cluster shows them: their users, marks and machines.

use std::sync::{Arc, LazyLock};

use doctor_backend::ObservedNode;
use doctor_core::{
    ids::NodeName,
    node::{Declared, Marks, Node, Occupancy},
    time::{Span, Timestamp},
};

use super::{World, arc_str, event_queue::Event, runs::Phase};
use crate::{
    config::PoolConfig,
    effects::{Disturbance, Target},
    machine::{Machine, scaled},
    random::Purpose,
};

/// A place in the cluster. Its machine and its name may change.
#[derive(Debug)]
pub(super) struct Slot {
    /// The node as the cluster shows it. `agent_last_seen` is valid only while the agent is silent.
    pub(super) seen: ObservedNode,
    pub(super) pool: usize,
    pub(super) machine: u32,
    pub(super) present: bool,
    /// The user job that has it, or waits for our job to leave.
    pub(super) user: Option<u32>,
    /// Our jobs for this node that have not ended.
    pub(super) runs: Vec<u32>,
    pub(super) down: Option<Down>,
    pub(super) unreachable_until: Timestamp,
    /// Until then its jobs can be neither polled nor cancelled.
    pub(super) hangs_until: Timestamp,
    pub(super) silent_until: Timestamp,
    /// The node's clock minus the world's, in milliseconds.
    pub(super) clock_ahead: i64,
    /// Since when it has not been free.
    pub(super) taken_since: Option<Timestamp>,
    /// Counts downtimes and marks, so that events scheduled for an earlier one are recognised.
    pub(super) generation: u32,
    pub(super) mark: u32,
    /// The faults that its agent reported last.
    pub(super) reported: Vec<u32>,
    pub(super) reports: u64,
    /// The world's version at its last change.
    changed: u64,
    /// Its index among the pool's idle nodes.
    idle: Option<u32>,
}

impl Slot {
    /// Returns the node for a change. Snapshots taken earlier keep their copy.
    pub(super) fn node_mut(&mut self) -> &mut Node {
        Arc::make_mut(&mut self.seen.node)
    }
}

/// Why a node is down, and until when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Down {
    pub(super) how: Disturbance,
    pub(super) until: Timestamp,
    /// Whether the controller requested it. The controller cannot know of other causes.
    pub(super) ours: bool,
}

/// The changes between two queries of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changes {
    /// Names that went away. The caller removes them before it adds `nodes`.
    pub gone: Vec<NodeName>,
    pub nodes: Vec<ObservedNode>,
    /// The version for the next query.
    pub version: u64,
}

/// The users' side of a pool.
#[derive(Debug, Default)]
pub(super) struct Pool {
    /// Nodes available to users, in a reproducible order without meaning.
    pub(super) idle: Vec<u32>,
    /// User jobs in the order of their arrival.
    pub(super) waiting: std::collections::VecDeque<u32>,
    /// Whether a node became idle since jobs were last placed.
    pub(super) freed: bool,
}

/// Every simulated machine has the same number of GPUs.
static DECLARED: LazyLock<Arc<Declared>> =
    LazyLock::new(|| Arc::new(Declared { gpus: Some(u32::from(crate::simulated_tests::PARTS)) }));

impl Slot {
    pub(super) fn new(
        name: NodeName,
        (pool_index, pool): (usize, &PoolConfig),
        (number, machine): (u32, &Machine),
    ) -> Self {
        let node = Node {
            name,
            pool: pool.name.clone(),
            occupancy: Occupancy::Free,
            marks: Marks::default(),
            hardware: Some(machine.outside().into()),
            sku: Some(pool.sku.clone()),
            declared: Some(Arc::clone(&DECLARED)),
            overrides: None,
        };
        Self {
            seen: ObservedNode { node: node.into(), agent_last_seen: None, jobs: Vec::new() },
            pool: pool_index,
            machine: number,
            present: true,
            user: None,
            runs: Vec::new(),
            down: None,
            unreachable_until: Timestamp::MIN,
            hangs_until: Timestamp::MIN,
            silent_until: Timestamp::MIN,
            clock_ahead: 0,
            taken_since: None,
            generation: 0,
            mark: 0,
            reported: Vec::new(),
            reports: 0,
            changed: 0,
            idle: None,
        }
    }

    pub(super) const fn clock(&self, now: Timestamp) -> Timestamp {
        now.plus(Span::from_millis(self.clock_ahead))
    }
}

impl World {
    /// Returns every present node, sorted by name. It includes the agents' heartbeats; they have no messages.
    ///
    /// # Errors While the cluster does not answer.
    pub fn snapshot(&mut self) -> Result<Vec<ObservedNode>, doctor_backend::BackendError> {
        self.check_reachable("snapshot")?;
        Ok(self.by_name.values().map(|slot| self.as_seen(*slot)).collect())
    }

    /// Returns the changes after `version`, except heartbeats. A name that went away and returned is in both lists.
    ///
    /// # Errors While the cluster does not answer.
    pub fn changed_since(&mut self, version: u64) -> Result<Changes, doctor_backend::BackendError> {
        self.check_reachable("snapshot")?;
        let changed = self.by_name.values().filter(|slot| self.slot(**slot).changed > version);
        Ok(Changes {
            gone: self.gone.iter().filter(|(at, _)| *at > version).map(|(_, name)| name.clone()).collect(),
            nodes: changed.map(|slot| self.as_seen(*slot)).collect(),
            version: self.version,
        })
    }

    fn as_seen(&self, slot: u32) -> ObservedNode {
        let slot = self.slot(slot);
        let last_contact =
            if self.agent_reports_now(slot) { Some(minute(self.now)) } else { slot.seen.agent_last_seen };
        let jobs = slot.runs.iter().map(|run| self.runs[*run as usize].request.run).collect();
        ObservedNode {
            node: slot.seen.node.clone(),
            agent_last_seen: if self.config.agents { last_contact } else { None },
            jobs,
        }
    }

    pub(super) fn agent_reports_now(&self, slot: &Slot) -> bool {
        self.config.agents
            && slot.present
            && slot.down.is_none()
            && slot.silent_until <= self.now
            && slot.unreachable_until <= self.now
    }

    /// Fixes the time of the last heartbeat when the agent falls silent.
    pub(super) fn freeze_last_heartbeat(&mut self, slot: u32) {
        if self.agent_reports_now(self.slot(slot)) {
            self.slot_mut(slot).seen.agent_last_seen = Some(minute(self.now));
        }
    }

    /// Updates a node's occupancy, the users' idle nodes and pending jobs. Must be called after every change of a slot.
    pub(super) fn update_slot(&mut self, index: u32) {
        self.note_change(index);
        let occupancy = self.occupancy(index);
        let now = self.now;
        let slot = self.slot_mut(index);
        slot.taken_since = if occupancy.is_free() { None } else { slot.taken_since.or(Some(now)) };
        slot.node_mut().occupancy = occupancy;
        self.keep_idle(index);
        self.note_free_time(index);
        if self.can_start_on(index) {
            for run in self.slot(index).runs.clone() {
                if self.runs[run as usize].phase == Phase::Pending {
                    self.schedule_start(run);
                }
            }
        }
    }

    /// Records that the node changed.
    pub(super) fn note_change(&mut self, index: u32) {
        self.version += 1;
        let version = self.version;
        self.slot_mut(index).changed = version;
    }

    fn occupancy(&self, index: u32) -> Occupancy {
        let slot = self.slot(index);
        if let Some(down) = slot.down {
            let why = match down.how {
                Disturbance::Reset => "its GPUs are being reset",
                Disturbance::Reboot => "it is rebooting",
                Disturbance::Replace => "it is being replaced",
            };
            return Occupancy::Unknown { why: arc_str(why) };
        }
        if slot.unreachable_until > self.now {
            return Occupancy::Unknown { why: arc_str("it does not answer") };
        }
        match slot.user {
            Some(job) => Occupancy::Busy { by: self.users.label(job) },
            None => Occupancy::Free,
        }
    }

    /// Whether a job of ours could start here. Our own marks do not prevent it: repaired nodes are requalified while
    /// marked.
    pub(super) fn can_start_on(&self, index: u32) -> bool {
        let slot = self.slot(index);
        slot.present
            && slot.user.is_none()
            && slot.down.is_none()
            && slot.unreachable_until <= self.now
            && slot.seen.node.marks.blocking_foreign_mark().is_none()
    }

    fn keep_idle(&mut self, index: u32) {
        let is_available = self.can_start_on(index) && self.slot(index).seen.node.marks.ours.is_empty();
        let pool = self.slot(index).pool;
        match (is_available, self.slot(index).idle) {
            (true, None) => {
                let idle = u32::try_from(self.pools[pool].idle.len()).unwrap_or(u32::MAX);
                self.pools[pool].idle.push(index);
                self.pools[pool].freed = true;
                self.slot_mut(index).idle = Some(idle);
            }
            (false, Some(idle)) => {
                self.pools[pool].idle.swap_remove(idle as usize);
                self.slot_mut(index).idle = None;
                if let Some(&moved) = self.pools[pool].idle.get(idle as usize) {
                    self.slot_mut(moved).idle = Some(idle);
                }
            }
            (true, Some(_)) | (false, None) => {}
        }
    }

    pub(super) fn target(&self, index: u32) -> Target {
        let slot = self.slot(index);
        Target { node: slot.seen.node.name.clone(), taken_for: slot.taken_since.map(|since| self.now.since(since)) }
    }

    /// Takes a node down for a while. Everything that runs on it ends.
    pub(super) fn take_down(&mut self, index: u32, how: Disturbance, ours: bool) {
        self.freeze_last_heartbeat(index);
        let takes = match how {
            Disturbance::Reset => self.config.assumptions.reset_takes,
            Disturbance::Reboot => self.config.assumptions.reboot_takes,
            Disturbance::Replace => self.repair_time(self.slot(index).machine),
        };
        let until = self.now.plus(takes);
        let slot = self.slot_mut(index);
        // A lighter disturbance does not shorten one in progress.
        let (how, until, ours) =
            slot.down.map_or((how, until, ours), |down| (how.max(down.how), until.max(down.until), ours || down.ours));
        slot.down = Some(Down { how, until, ours });
        slot.generation += 1;
        let turn = slot.generation;
        self.queue.push(until, Event::NodeRecovers(index, turn));
        self.evict(index);
        self.update_slot(index);
    }

    /// Ends the user job and our jobs on the node.
    pub(super) fn evict(&mut self, index: u32) {
        // The user first: a user who waits for our job must not get a node that is going down.
        self.drop_user(index);
        for run in self.slot(index).runs.clone() {
            self.lose_node(run);
        }
    }

    /// Draws the duration of the next repair or replacement of a machine.
    pub(super) fn repair_time(&mut self, machine: u32) -> Span {
        let assumptions = &self.config.assumptions;
        let machine = &mut self.machines[machine as usize];
        machine.repairs += 1;
        let mut stream = self.seed.stream(Purpose::Repair, machine.number, u64::from(machine.repairs));
        let factor = stream.lognormal(1.0, assumptions.repair_sigma());
        let shortest = scaled(assumptions.repair_median, 0.1);
        scaled(assumptions.repair_median, factor.min(1.0e6)).min(assumptions.repair_longest).max(shortest)
    }
}

/// Rounds down to the minute, the interval of heartbeats.
const fn minute(now: Timestamp) -> Timestamp {
    now.minus(Span::from_millis(now.millis().rem_euclid(60_000)))
}
