//! The course of user jobs: how their nodes affect them, when they crash, what is lost, and what is queued again.

use doctor_core::time::Span;

use super::{
    World,
    event_queue::Event,
    users::{Hazard, Phase},
};
use crate::{fault::Class, machine::scaled, random::Purpose};

/// How often a user resubmits a crashed job.
const MAX_RESUBMITS: u32 = 10;

/// What users got and lost.
#[derive(Debug, Clone, Default)]
pub(crate) struct UserCounters {
    pub(crate) jobs_started: u64,
    pub(crate) jobs_completed: u64,
    pub(crate) jobs_crashed: u64,
    pub(crate) jobs_crashed_by_faults: u64,
    /// Their node was reset, rebooted or taken away, by us or by others.
    pub(crate) jobs_killed: u64,
    /// Waited longer than assumed acceptable.
    pub(crate) jobs_disturbed: u64,
    pub(crate) waited_for_us: Span,
    pub(crate) node_hours: f64,
    pub(crate) node_hours_lost: f64,
    pub(crate) validation_node_hours: f64,
    /// Marks on machines without a fault.
    pub(crate) false_marks: u32,
}

impl World {
    fn hazard_of(&self, nodes: &[u32]) -> Hazard {
        let assumptions = &self.config.assumptions;
        let mut all = Hazard::default();
        for node in nodes {
            let (mut worst_here, mut culprit) = (0.0, None);
            for &fault in &self.machines[self.slot(*node).machine as usize].faults {
                let facts = self.faults[fault as usize].kind.profile();
                let rate = match facts.class {
                    Class::Hard => assumptions.crash_per_hour_hard,
                    Class::Gray | Class::Sdc => assumptions.crash_per_hour_bad,
                };
                if rate > worst_here {
                    (worst_here, culprit) = (rate, Some(fault));
                }
                all.slows = all.slows.max(facts.slows);
            }
            all.faults += (worst_here - assumptions.crash_per_hour).max(0.0);
            all.worst = all.worst.or(culprit);
        }
        all
    }

    /// Accounts for what a job used and lost since it was last counted.
    #[expect(clippy::cast_precision_loss, reason = "sizes of jobs are small")]
    fn count(&mut self, job: u32) {
        let now = self.now;
        let base = self.config.assumptions.crash_per_hour;
        let counted = &mut self.users.jobs[job as usize];
        let hours = now.since(counted.counted).as_hours();
        counted.counted = now;
        counted.survivable_hazard -= (base + counted.hazard.faults) * hours;
        let node_hours = hours * counted.nodes.len() as f64;
        let (lost, culprit) = (node_hours * counted.hazard.slows, counted.hazard.worst);
        self.counters.node_hours += node_hours;
        self.add_loss(lost, culprit);
    }

    fn add_loss(&mut self, node_hours: f64, culprit: Option<u32>) {
        if let Some(fault) = culprit {
            self.counters.node_hours_lost += node_hours;
            self.faults[fault as usize].lost_node_hours += node_hours;
        }
    }

    /// Schedules the end of a running job: its completion, or the crash that its nodes cause.
    pub(super) fn schedule_end(&mut self, job: u32) {
        let hazard = self.hazard_of(&self.users.jobs[job as usize].nodes);
        let base = self.config.assumptions.crash_per_hour;
        let arranged = &mut self.users.jobs[job as usize];
        arranged.hazard = hazard;
        arranged.generation += 1;
        let crash = scaled(
            Span::hours(1),
            (arranged.survivable_hazard.max(0.0) / (base + hazard.faults).max(1e-12)).min(1.0e9),
        );
        let at = arranged.counted.plus(crash).min(arranged.since.plus(arranged.length));
        self.queue.push(at, Event::UserEnds(job, arranged.generation));
    }

    /// Updates the user job of a node whose machine became better or worse.
    pub(super) fn hazard_changed(&mut self, node: u32) {
        let Some(job) = self.slot(node).user else { return };
        if self.users.jobs[job as usize].phase == Phase::Running {
            self.count(job);
            self.schedule_end(job);
        }
    }

    pub(super) fn user_ends(&mut self, job: u32, turn: u32) {
        if self.users.jobs[job as usize].generation != turn {
            return;
        }
        self.count(job);
        let ended = &self.users.jobs[job as usize];
        if self.now >= ended.since.plus(ended.length) {
            self.counters.jobs_completed += 1;
            self.free_nodes(job);
        } else {
            self.crash(job);
            self.resubmit(job);
        }
    }

    fn crash(&mut self, job: u32) {
        let crashed = &self.users.jobs[job as usize];
        let (faults, culprit) = (crashed.hazard.faults, crashed.hazard.worst);
        let share = faults / (faults + self.config.assumptions.crash_per_hour).max(1e-12);
        let mut stream = self.seed.stream(Purpose::Placement, crashed.choice, 1 + u64::from(crashed.tries));
        let lost = self.unsaved_work(job) + self.config.assumptions.restart;
        self.counters.jobs_crashed += 1;
        self.report_crash(job);
        if stream.chance(share) {
            self.counters.jobs_crashed_by_faults += 1;
            self.add_loss(lost.as_hours() * self.size_of(job), culprit);
        }
    }

    /// Returns the work since the last checkpoint: on average half of the possible amount.
    fn unsaved_work(&self, job: u32) -> Span {
        let job = &self.users.jobs[job as usize];
        scaled(self.now.since(job.since).min(self.config.assumptions.checkpoint), 0.5)
    }

    #[expect(clippy::cast_precision_loss, reason = "sizes of jobs are small")]
    fn size_of(&self, job: u32) -> f64 {
        self.users.jobs[job as usize].nodes.len() as f64
    }

    /// Puts the rest of an interrupted job back into the queue.
    fn resubmit(&mut self, job: u32) {
        let (unsaved, now) = (self.unsaved_work(job), self.now);
        let back = &self.users.jobs[job as usize];
        let done = now.since(back.since).millis() - unsaved.millis();
        let left = Span::from_millis(back.length.millis() - done) + self.config.assumptions.restart;
        let mut luck = self.seed.stream(Purpose::Placement, back.choice, 1000 + u64::from(back.tries));
        self.free_nodes(job);
        let back = &mut self.users.jobs[job as usize];
        if back.tries >= MAX_RESUBMITS || back.is_pinned() {
            return;
        }
        self.users.unused.pop();
        back.tries += 1;
        back.phase = Phase::Queued;
        back.since = now;
        back.length = left;
        back.survivable_hazard = luck.exponential();
        let pool = back.pool;
        self.pools[pool].waiting.push_back(job);
    }

    fn free_nodes(&mut self, job: u32) {
        let over = &mut self.users.jobs[job as usize];
        over.phase = Phase::Over;
        over.generation += 1;
        for node in std::mem::take(&mut over.nodes) {
            self.slot_mut(node).user = None;
            self.update_slot(node);
        }
        self.users.unused.push(job);
    }

    /// Takes the node away from its user.
    pub(super) fn drop_user(&mut self, node: u32) {
        let Some(job) = self.slot(node).user else { return };
        if self.users.jobs[job as usize].phase == Phase::Running {
            self.count(job);
            self.counters.jobs_killed += 1;
            self.resubmit(job);
            return;
        }
        // The job had not started: it goes back to the head of the queue.
        self.free_nodes(job);
        let now = self.now;
        let back = &mut self.users.jobs[job as usize];
        if back.is_pinned() {
            return;
        }
        self.users.unused.pop();
        back.phase = Phase::Queued;
        back.since = now;
        let pool = back.pool;
        self.pools[pool].waiting.push_front(job);
    }

    /// Ends the user job on this node, as if its time were up.
    pub(super) fn end_user_of(&mut self, node: u32) {
        if let Some(job) = self.slot(node).user {
            if self.users.jobs[job as usize].phase == Phase::Running {
                self.count(job);
                self.counters.jobs_completed += 1;
            }
            self.free_nodes(job);
        }
    }

    /// Resets the figures, also for running jobs.
    pub(super) fn reset_counters(&mut self) {
        for job in 0..u32::try_from(self.users.jobs.len()).unwrap_or(u32::MAX) {
            if self.users.jobs[job as usize].phase == Phase::Running {
                self.count(job);
            }
        }
        self.counters = UserCounters::default();
    }

    /// Returns what users got and lost so far, including running jobs, and what each fault cost. It changes nothing.
    #[expect(clippy::cast_precision_loss, reason = "sizes of jobs are small")]
    pub(crate) fn user_counters(&self) -> (UserCounters, Vec<f64>) {
        let mut figures = self.counters.clone();
        let mut by_fault: Vec<f64> = self.faults.iter().map(|fault| fault.lost_node_hours).collect();
        for job in self.users.jobs.iter().filter(|job| job.phase == Phase::Running) {
            let node_hours = self.now.since(job.counted).as_hours() * job.nodes.len() as f64;
            figures.node_hours += node_hours;
            if let Some(fault) = job.hazard.worst {
                figures.node_hours_lost += node_hours * job.hazard.slows;
                by_fault[fault as usize] += node_hours * job.hazard.slows;
            }
        }
        for run in &self.runs {
            figures.validation_node_hours += run.node_hours_under_way(self.now);
        }
        (figures, by_fault)
    }
}
