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

    /// Runs the agent's checks, and queues a report if the result differs from the last one.
    pub(super) fn send_agent_report(&mut self, slot: u32) {
        if !self.agent_reports_now(self.slot(slot)) {
            return;
        }
        let machine = self.slot(slot).machine;
        let seen: Vec<u32> = self.machines[machine as usize]
            .faults
            .iter()
            .copied()
            .filter(|fault| self.faults[*fault as usize].kind.is_passive())
            .collect();
        if seen == self.slot(slot).reported {
            return;
        }
        self.slot_mut(slot).reported = seen;
        self.slot_mut(slot).reports += 1;
        let checks = vec![self.passive_evidence(slot)];
        let report = AgentReport {
            uptime: None,
            node: self.name(slot),
            hardware: self.machines[machine as usize].inside(),
            sequence: self.slot(slot).reports,
            at: self.slot(slot).clock(self.now),
            checks,
            versions: Versions {
                program: env!("CARGO_PKG_VERSION").to_owned(),
                schema: Schema::CURRENT,
                policy: 0,
                queued: 0,
            },
            dropped: None,
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
