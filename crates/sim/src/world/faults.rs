//! Faults as they come and go, users who complain about them and operators who repair them.

use doctor_core::{
    ids::NodeName,
    node::{ForeignMark, MarkKind},
    time::{Span, Timestamp},
};

use super::{World, event_queue::Event};
use crate::{
    fault::{Class, Cure, Fault},
    machine::{UpcomingFault, scaled},
};

/// An operator's request to return a repaired node to service. The driver of the engine stores it as an operator
/// command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperatorRequest {
    pub at: Timestamp,
    pub node: NodeName,
    pub why: String,
}

/// The owner of the mark that takes a node away after a complaint.
pub(super) const OPERATORS: &str = "operators";
/// The delay of a repair that finds the node in use.
const REVISIT_AFTER: Span = Span::hours(1);

impl World {
    /// Schedules the next fault of a machine.
    pub(super) fn schedule_fault(&mut self, machine: usize) {
        let coming = self.machines[machine].next_fault(self.now, &self.config.assumptions);
        if let Some(coming) = coming {
            self.queue.push(coming.at, Event::FaultOccurs(u32::try_from(machine).unwrap_or(u32::MAX)));
            self.machines[machine].upcoming_fault = Some(coming);
        }
    }

    pub(super) fn fault_occurs(&mut self, machine: u32) {
        let coming = self.machines[machine as usize].upcoming_fault.take();
        let slot = self.machines[machine as usize].place();
        if self.slot(slot).machine != machine {
            // The machine was replaced, and its faults went with it.
            return;
        }
        if let Some(coming) = coming {
            self.begin_fault(slot, coming);
        }
        self.schedule_fault(machine as usize);
    }

    pub(super) fn begin_fault(&mut self, slot: u32, coming: UpcomingFault) {
        let machine = self.slot(slot).machine;
        let present = &self.machines[machine as usize].faults;
        if present.iter().any(|fault| self.faults[*fault as usize].kind == coming.kind) {
            // A kind of fault that is present does not occur again.
            return;
        }
        let number = u32::try_from(self.faults.len()).unwrap_or(u32::MAX);
        let assumptions = &self.config.assumptions;
        let ticket = match coming.kind.profile().class {
            Class::Hard => assumptions.ticket_hard,
            Class::Gray => assumptions.ticket_gray,
            Class::Sdc => assumptions.ticket_sdc,
        };
        let agent = self.now.plus(scaled(assumptions.agent_poll, coming.draw.agent_delay));
        self.faults.push(Fault {
            kind: coming.kind,
            machine,
            nth: coming.nth,
            node: self.name(slot),
            onset: self.now,
            out_at_onset: !self.slot(slot).seen.node.marks.ours.is_empty() || self.slot(slot).down.is_some(),
            cure: coming.draw.cure,
            depth: coming.draw.depth,
            part: coming.draw.part,
            detection_draws: 0,
            shown: None,
            marked: None,
            ticket: None,
            cured: None,
            lost_node_hours: 0.0,
        });
        self.machines[machine as usize].faults.push(number);
        self.hazard_changed(slot);
        if coming.kind.is_passive() {
            self.queue.push(agent, Event::AgentReports(slot));
        }
        if self.config.tickets {
            self.queue.push(self.now.plus(scaled(ticket, coming.draw.ticket)), Event::Ticket(number));
        }
    }

    /// Ends every fault of a node's machine that this cures.
    pub(super) fn cure(&mut self, slot: u32, by: Cure) {
        let machine = self.slot(slot).machine as usize;
        let present = std::mem::take(&mut self.machines[machine].faults);
        let (cured, left) = present.into_iter().partition::<Vec<_>, _>(|fault| self.faults[*fault as usize].cure <= by);
        for &fault in &cured {
            self.faults[fault as usize].cured = Some((self.now, by));
        }
        self.machines[machine].faults = left;
        if !cured.is_empty() {
            self.hazard_changed(slot);
            self.queue.push(self.now, Event::AgentReports(slot));
        }
    }

    /// Records that we marked the node as unhealthy: a false mark if its machine has no fault.
    pub(super) fn record_mark(&mut self, slot: u32) {
        let present = self.machines[self.slot(slot).machine as usize].faults.clone();
        if present.is_empty() {
            self.counters.false_marks += 1;
        }
        for fault in present {
            self.faults[fault as usize].marked.get_or_insert(self.now);
        }
    }

    /// Schedules the repair of a node that we marked.
    pub(super) fn schedule_repair(&mut self, slot: u32) {
        if self.config.repairs {
            let (machine, mark) = (self.slot(slot).machine, self.slot(slot).mark);
            let at = self.now.plus(self.repair_time(machine));
            self.queue.push(at, Event::RepairVisit(slot, machine, mark));
        }
    }

    pub(super) fn repair_visit(&mut self, slot: u32, machine: u32, mark: u32) {
        let here = self.slot(slot);
        let applies =
            here.machine == machine && here.mark == mark && here.seen.node.marks.has_ours(MarkKind::Unhealthy);
        if !applies {
            return;
        }
        if self.in_use(slot) {
            self.queue.push(self.now.plus(REVISIT_AFTER), Event::RepairVisit(slot, machine, mark));
            return;
        }
        self.repair(slot);
        let request = OperatorRequest {
            at: self.now,
            node: self.name(slot),
            why: "repaired; requalify and return to service".to_owned(),
        };
        self.requests.push(request);
        // If the node is not returned, the operators come again.
        self.schedule_repair(slot);
    }

    fn in_use(&self, slot: u32) -> bool {
        let here = self.slot(slot);
        !here.present || here.user.is_some() || here.down.is_some() || self.has_running(slot)
    }

    fn repair(&mut self, slot: u32) {
        self.reboot(slot);
        self.cure(slot, Cure::Repair);
        self.update_slot(slot);
    }

    /// Records a user's complaint about an undetected fault.
    pub(super) fn ticket(&mut self, fault: u32) {
        let machine = self.faults[fault as usize].machine;
        let slot = self.machines[machine as usize].place();
        if self.faults[fault as usize].cured.is_some() || self.slot(slot).machine != machine {
            return;
        }
        let marks = &self.slot(slot).seen.node.marks;
        if !marks.ours.is_empty() || marks.blocking_foreign_mark().is_some() || !self.slot(slot).present {
            // The node has no users now, so the complaint is postponed.
            self.queue.push(self.now.plus(Span::days(1)), Event::Ticket(fault));
            return;
        }
        self.faults[fault as usize].ticket = Some(self.now);
        let mark = ForeignMark { by: OPERATORS.to_owned(), text: "a user complained".to_owned(), blocks: true };
        self.slot_mut(slot).node_mut().marks.foreign.push(mark);
        self.update_slot(slot);
        let at = self.now.plus(self.repair_time(machine));
        self.queue.push(at, Event::TicketDone(slot, machine));
    }

    pub(super) fn ticket_done(&mut self, slot: u32, machine: u32) {
        if self.slot(slot).machine == machine {
            if self.in_use(slot) {
                self.queue.push(self.now.plus(REVISIT_AFTER), Event::TicketDone(slot, machine));
                return;
            }
            self.repair(slot);
        }
        self.slot_mut(slot).node_mut().marks.foreign.retain(|mark| mark.by != OPERATORS);
        self.update_slot(slot);
    }

    /// Returns the operators' requests since the last call.
    pub fn take_operator_requests(&mut self) -> Vec<OperatorRequest> {
        std::mem::take(&mut self.requests)
    }
}
