//! Users: jobs of many sizes and durations that arrive independently of us, take free nodes, crash more often on bad
//! ones, and wait if a job of ours is slow to leave.
//!
//! A job's size, duration and luck are drawn on arrival, from its pool's stream. Only its placement depends on other
//! events.

use std::sync::Arc;

use doctor_core::time::{Span, Timestamp};

use super::{World, arc_str, event_queue::Event};
use crate::{
    assumptions::Assumptions,
    effects::EffectKind,
    machine::scaled,
    random::{Purpose, Stream},
};

/// The number of waiting jobs that are tried after one that does not fit.
const BACKFILL_DEPTH: usize = 32;
/// Once the first job in the queue has waited this long, no job overtakes it.
const MAX_OVERTAKING_WAIT: Span = Span::hours(4);

#[derive(Debug, Default)]
pub(super) struct Users {
    pub(super) jobs: Vec<UserJob>,
    /// Indices of jobs that are over.
    pub(super) unused: Vec<u32>,
    pub(super) arrivals: Vec<Stream>,
    pub(super) numbered: u64,
    pub(super) scratch: Vec<u32>,
}

#[derive(Debug)]
pub(super) struct UserJob {
    pub(super) label: Arc<str>,
    pub(super) pool: usize,
    pub(super) size: usize,
    pub(super) length: Span,
    pub(super) phase: Phase,
    pub(super) nodes: Vec<u32>,
    /// When it arrived, or was given nodes that it waits for, or started.
    pub(super) since: Timestamp,
    /// Up to when its luck and losses are accounted for.
    pub(super) counted: Timestamp,
    /// The hazard that it survives; it crashes when none is left.
    pub(super) survivable_hazard: f64,
    pub(super) hazard: Hazard,
    pub(super) generation: u32,
    pub(super) tries: u32,
    pub(super) avoids_validation: bool,
    pub(super) choice: u64,
}

/// The effect of the nodes of a job on it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Hazard {
    /// Crashes per hour because of faults.
    pub(super) faults: f64,
    pub(super) slows: f64,
    pub(super) worst: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Queued,
    /// It has its nodes; a job of ours is still on one of them.
    WaitingForUs,
    Running,
    Over,
}

impl UserJob {
    /// Whether a script placed it on certain nodes. It never crashes and is never placed elsewhere.
    pub(super) const fn is_pinned(&self) -> bool {
        self.survivable_hazard.is_infinite()
    }
}

impl Users {
    pub(super) fn label(&self, job: u32) -> Arc<str> {
        self.jobs[job as usize].label.clone()
    }
}

impl Assumptions {
    /// Returns the sizes of user jobs in a pool of this many nodes, with their weights.
    fn sizes(&self, nodes: u32) -> (Vec<usize>, Vec<f64>) {
        let largest = (nodes / 4).max(1) as usize;
        let sizes: Vec<usize> =
            (0..self.job_sizes.len().min(20)).map(|power| 1 << power).filter(|n| *n <= largest).collect();
        let weights = self.job_sizes[..sizes.len()].to_vec();
        (sizes, weights)
    }

    /// Returns the user jobs per hour that lead to the assumed utilisation.
    #[expect(clippy::cast_precision_loss, reason = "sizes of jobs are small")]
    fn arrivals_per_hour(&self, nodes: u32) -> f64 {
        let (sizes, weights) = self.sizes(nodes);
        let all: f64 = weights.iter().sum();
        if all <= 0.0 || self.utilisation <= 0.0 {
            return 0.0;
        }
        let size = sizes.iter().zip(&weights).map(|(size, weight)| *size as f64 * weight).sum::<f64>() / all;
        let length = self.mean_job_hours();
        self.utilisation * f64::from(nodes) / (size * length)
    }
}

impl World {
    pub(super) fn start_user_jobs(&mut self) {
        for pool in 0..self.pools.len() {
            let number = u32::try_from(pool).unwrap_or(u32::MAX);
            self.users.arrivals.push(self.seed.stream(Purpose::UserJobs, u64::from(number), 0));
            self.schedule_arrival(number);
        }
    }

    fn schedule_arrival(&mut self, pool: u32) {
        let pool_index = pool as usize;
        let rate = self.config.assumptions.arrivals_per_hour(self.config.pools[pool_index].nodes);
        if rate > 0.0 {
            let gap = scaled(Span::hours(1), self.users.arrivals[pool_index].exponential() / rate);
            self.queue.push(self.now.plus(gap), Event::UserArrives(pool));
        }
    }

    pub(super) fn user_arrives(&mut self, pool: u32) {
        let pool_index = pool as usize;
        let assumptions = &self.config.assumptions;
        let (sizes, weights) = assumptions.sizes(self.config.pools[pool_index].nodes);
        let stream = &mut self.users.arrivals[pool_index];
        let size = sizes[stream.pick(&weights)];
        let factor = stream.lognormal(1.0, assumptions.job_sigma);
        let length = scaled(assumptions.job_median, factor).min(assumptions.job_longest).max(Span::minutes(1));
        let luck = stream.exponential();
        let avoids_us = stream.chance(assumptions.avoids_validation);
        let choice = stream.number();
        let job = self.new_job(pool_index, size, length, luck, avoids_us, choice);
        self.pools[pool_index].waiting.push_back(job);
        self.pools[pool_index].freed = true;
        self.schedule_arrival(pool);
    }

    fn new_job(&mut self, pool: usize, size: usize, length: Span, luck: f64, avoids_us: bool, choice: u64) -> u32 {
        self.users.numbered += 1;
        let job = UserJob {
            label: arc_str(&format!("user job {}", self.users.numbered)),
            pool,
            size,
            length,
            phase: Phase::Queued,
            nodes: Vec::new(),
            since: self.now,
            counted: self.now,
            survivable_hazard: luck,
            hazard: Hazard::default(),
            generation: 0,
            tries: 0,
            avoids_validation: avoids_us,
            choice,
        };
        if let Some(index) = self.users.unused.pop() {
            // The turn keeps counting, so that events of the previous job do not apply to this one.
            let turn = self.users.jobs[index as usize].generation + 1;
            self.users.jobs[index as usize] = UserJob { generation: turn, ..job };
            index
        } else {
            self.users.jobs.push(job);
            u32::try_from(self.users.jobs.len() - 1).unwrap_or(u32::MAX)
        }
    }

    /// Creates a job on exactly these nodes. Returns false if one of them is not available.
    pub(super) fn pinned_job(&mut self, nodes: &[u32], length: Span) -> bool {
        let Some(&first) = nodes.first() else { return false };
        if nodes.iter().any(|node| !self.can_start_on(*node)) {
            return false;
        }
        let job = self.new_job(self.slot(first).pool, nodes.len(), length, f64::INFINITY, false, 0);
        self.give_nodes(job, nodes.to_vec());
        true
    }

    /// Gives idle nodes to waiting jobs in order of arrival; smaller jobs may overtake larger ones that do not fit yet.
    pub(super) fn place_jobs(&mut self, pool: usize) {
        let (mut index, mut passed) = (0, 0);
        while passed < BACKFILL_DEPTH {
            let Some(&job) = self.pools[pool].waiting.get(index) else { return };
            let (size, since) = (self.users.jobs[job as usize].size, self.users.jobs[job as usize].since);
            if self.pools[pool].idle.len() >= size {
                self.pools[pool].waiting.remove(index);
                let nodes = self.choose_nodes(pool, job);
                self.give_nodes(job, nodes);
            } else {
                if index == 0 && self.now.since(since) > MAX_OVERTAKING_WAIT {
                    return;
                }
                index += 1;
                passed += 1;
            }
        }
    }

    fn choose_nodes(&mut self, pool: usize, job: u32) -> Vec<u32> {
        let mut idle = std::mem::take(&mut self.users.scratch);
        idle.clear();
        idle.extend_from_slice(&self.pools[pool].idle);
        let (size, avoids, choice) = {
            let job = &self.users.jobs[job as usize];
            (job.size, job.avoids_validation, job.choice)
        };
        let mut stream = self.seed.stream(Purpose::Placement, choice, 0);
        let mut pickable = idle.len();
        if avoids {
            // Nodes under test go to the end, and are picked only if the others do not suffice.
            let mut index = 0;
            while index < pickable {
                if self.has_running(idle[index]) {
                    pickable -= 1;
                    idle.swap(index, pickable);
                } else {
                    index += 1;
                }
            }
            pickable = pickable.max(size);
        }
        for index in 0..size {
            idle.swap(index, index + stream.below(pickable - index));
        }
        let chosen = idle[..size].to_vec();
        self.users.scratch = idle;
        chosen
    }

    fn give_nodes(&mut self, job: u32, nodes: Vec<u32>) {
        for &node in &nodes {
            self.slot_mut(node).user = Some(job);
            self.update_slot(node);
            for run in self.slot(node).runs.clone() {
                if self.runs[run as usize].is_running() {
                    let (run, node) = (self.runs[run as usize].request.run, self.name(node));
                    self.log(EffectKind::UserWaiting { run, node });
                }
            }
        }
        let now = self.now;
        let given = &mut self.users.jobs[job as usize];
        given.nodes = nodes;
        given.phase = Phase::WaitingForUs;
        given.since = now;
        self.start_if_clear(job);
    }

    /// Starts a waiting user job after a job of ours has left this node.
    pub(super) fn node_cleared(&mut self, node: u32) {
        if let Some(job) = self.slot(node).user {
            self.start_if_clear(job);
        }
    }

    fn start_if_clear(&mut self, job: u32) {
        let waiting = &self.users.jobs[job as usize];
        if waiting.phase != Phase::WaitingForUs || waiting.nodes.iter().any(|node| self.has_running(*node)) {
            return;
        }
        let (after, first) = (self.now.since(waiting.since), waiting.nodes[0]);
        if after > Span::ZERO {
            self.counters.waited_for_us = self.counters.waited_for_us + after;
            self.counters.jobs_disturbed += u64::from(after > self.config.assumptions.disturbed_after);
            let node = self.name(first);
            self.log(EffectKind::UserStarted { node, after });
        }
        self.counters.jobs_started += 1;
        let now = self.now;
        let started = &mut self.users.jobs[job as usize];
        started.phase = Phase::Running;
        started.since = now;
        started.counted = now;
        self.schedule_end(job);
    }

    pub(super) fn has_running(&self, node: u32) -> bool {
        self.slot(node).runs.iter().any(|run| self.runs[*run as usize].is_running())
    }
}
