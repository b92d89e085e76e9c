//! The nodes' agents: each reports what it reads when that has changed, and keeps its report until somebody takes it.

use doctor_checks::document::{AgentReport, Schema, Versions};
use doctor_core::ids::NodeName;

use super::{World, queue::Event};
use crate::effects::Happened;

/// A signed report that waits to be taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuedReport {
    /// Names it when it is acknowledged.
    pub number: u64,
    /// Whose connection it came over. What the report itself says is for its reader to verify.
    pub node: NodeName,
    pub bytes: Vec<u8>,
}

#[derive(Debug, Default)]
pub(super) struct Agents {
    queued: Vec<QueuedReport>,
    numbered: u64,
}

impl World {
    /// Reports that nobody has acknowledged, oldest first. They are delivered at least once.
    pub fn agent_reports(&self) -> Vec<QueuedReport> {
        self.agents.queued.clone()
    }

    /// These reports have been kept; their agents need not send them again.
    pub fn acknowledge_reports(&mut self, numbers: &[u64]) {
        self.agents.queued.retain(|report| !numbers.contains(&report.number));
    }

    /// Takes all reports at once, for a reader that cannot be interrupted.
    pub fn drain_agent_reports(&mut self) -> Vec<QueuedReport> {
        std::mem::take(&mut self.agents.queued)
    }

    /// The agent looks, and reports if it sees something else than what it reported last.
    pub(super) fn agent_speaks(&mut self, slot: u32) {
        if !self.speaks(self.slot(slot)) {
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
            up: None,
            node: self.name(slot),
            hardware: self.machines[machine as usize].inside(),
            number: self.slot(slot).reports,
            at: self.slot(slot).clock(self.now),
            checks,
            versions: Versions {
                program: env!("CARGO_PKG_VERSION").to_owned(),
                schema: Schema::KNOWN,
                policy: 0,
                waiting: 0,
            },
            dropped: None,
        };
        let bytes =
            report.sign(&self.agent_key(&report.node)).expect("finite numbers and plain words have a JSON form");
        self.agents.numbered += 1;
        let number = self.agents.numbered;
        self.log(Happened::Report { node: report.node.clone(), number });
        self.agents.queued.push(QueuedReport { number, node: report.node, bytes });
    }

    /// Agents whose silence ends then speak again, if they have anything to say.
    pub(super) fn await_voice(&mut self, slot: u32) {
        let here = self.slot(slot);
        let at = here.silent_until.max(here.unreachable_until);
        self.queue.push(at, Event::AgentSpeaks(slot));
    }
}
