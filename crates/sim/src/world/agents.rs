//! The nodes' agents: each reports its readings when they change, and keeps the report until it is acknowledged.

use doctor_checks::document::{AgentReport, Schema, Versions};
use doctor_core::ids::NodeName;

use super::{World, event_queue::Event};
use crate::effects::EffectKind;

/// A signed report that waits for acknowledgement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuedReport {
    /// Its id for the acknowledgement.
    pub number: u64,
    /// The node whose agent sent it. The reader verifies the contents.
    pub node: NodeName,
    pub bytes: Vec<u8>,
}

#[derive(Debug, Default)]
pub(super) struct Agents {
    queued: Vec<QueuedReport>,
    numbered: u64,
}

impl World {
    /// Returns the unacknowledged reports, oldest first. Delivery is at least once.
    pub fn agent_reports(&self) -> Vec<QueuedReport> {
        self.agents.queued.clone()
    }

    /// Acknowledges reports that were stored; their agents need not send them again.
    pub fn acknowledge_reports(&mut self, numbers: &[u64]) {
        self.agents.queued.retain(|report| !numbers.contains(&report.number));
    }

    /// Takes all reports together, for a reader that cannot be interrupted.
    pub fn drain_agent_reports(&mut self) -> Vec<QueuedReport> {
        std::mem::take(&mut self.agents.queued)
    }

    /// Schedules the first checks of every agent that reports unchanged readings too.
    pub(super) fn schedule_agent_checks(&mut self) {
        if self.config.agents_every.is_some() {
            for slot in 0..u32::try_from(self.slots.len()).unwrap_or(u32::MAX) {
                self.queue.push(self.config.start, Event::AgentChecks(slot));
            }
        }
    }

    /// Reports an agent's readings, changed or not, and schedules its next checks.
    pub(super) fn run_agent_checks(&mut self, slot: u32) {
        let Some(every) = self.config.agents_every else { return };
        self.queue.push(self.now.plus(every), Event::AgentChecks(slot));
        if self.agent_reports_now(self.slot(slot)) {
            let seen = self.passive_faults(slot);
            self.queue_report(slot, seen);
        }
    }

    /// Runs the agent's checks, and queues a report if the result differs from the last one.
    pub(super) fn send_agent_report(&mut self, slot: u32) {
        if !self.agent_reports_now(self.slot(slot)) {
            return;
        }
        let seen = self.passive_faults(slot);
        if seen != self.slot(slot).reported {
            self.queue_report(slot, seen);
        }
    }

    fn passive_faults(&self, slot: u32) -> Vec<u32> {
        let machine = &self.machines[self.slot(slot).machine as usize];
        let is_passive = |fault: &u32| self.faults[*fault as usize].kind.is_passive();
        machine.faults.iter().copied().filter(is_passive).collect()
    }

    fn queue_report(&mut self, slot: u32, seen: Vec<u32>) {
        let machine = self.slot(slot).machine;
        self.slot_mut(slot).reported = seen;
        self.slot_mut(slot).reports += 1;
        let checks = vec![self.passive_evidence(slot)];
        let program = env!("CARGO_PKG_VERSION").to_owned();
        let versions = Versions { program, schema: Schema::CURRENT, policy: 0, queued: 0 };
        let (number, at) = (self.slot(slot).reports, self.slot(slot).clock(self.now));
        let report = AgentReport {
            hardware: self.machines[machine as usize].inside(),
            checks,
            ..AgentReport::heartbeat(self.name(slot), number, at, versions)
        };
        let bytes =
            report.sign(&self.agent_key(&report.node)).expect("finite numbers and plain words have a JSON form");
        self.agents.numbered += 1;
        let number = self.agents.numbered;
        self.log(EffectKind::Report { node: report.node.clone(), number });
        self.agents.queued.push(QueuedReport { number, node: report.node, bytes });
    }

    /// Schedules a report for when the agent is no longer silent.
    pub(super) fn schedule_agent_report(&mut self, slot: u32) {
        let here = self.slot(slot);
        let at = here.silent_until.max(here.unreachable_until);
        self.queue.push(at, Event::AgentReports(slot));
    }
}
