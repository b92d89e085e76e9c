//! Changes of nodes by the controller. Each operation takes effect once, however often it is requested.

use doctor_backend::{BackendError, Change, Effect as After, NodeOp};
use doctor_core::{
    ids::{NodeName, OpId},
    node::{MarkKind, OurMark},
    snapshot::Capabilities,
};

use super::{World, event_queue::Event};
use crate::{
    disruptions::{Call, CallFailure},
    effects::{Disturbance, EffectKind},
    fault::Cure,
    machine::Machine,
};

const APPLY: &str = "change node";

/// A cordon has no case, because the drain operation does not name one.
const CORDON: OurMark = OurMark { kind: MarkKind::Cordon, case: None };

impl World {
    /// Changes a node.
    ///
    /// # Errors For unknown nodes, for changes that this cluster does not support, and by hostile behaviour.
    pub fn apply(&mut self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        self.check_reachable(APPLY)?;
        if !is_supported(self.config.caps, &change.what) {
            let text = format!("this cluster cannot {} a node", change.what.step());
            return Err(BackendError { operation: APPLY, text, effect: After::NotAppliedPermanent });
        }
        if self.done.contains_key(&change.op) {
            self.log(EffectKind::RepeatedOperation { op: change.op, node: node.clone() });
            return Ok(());
        }
        let slot = self.find(APPLY, node)?;
        let failure = self.check_refused(APPLY, Call::Change)?;
        self.done.insert(change.op, node.clone());
        self.change(slot, change.op, &change.what);
        self.settle();
        match failure {
            Some(CallFailure::Unanswered) => Err(super::incidents::unanswered(APPLY)),
            _ => Ok(()),
        }
    }

    fn change(&mut self, slot: u32, op: OpId, what: &Change) {
        let node = self.name(slot);
        match what {
            Change::Mark(mark) => {
                self.log(EffectKind::Marked { op, node, mark: mark.clone() });
                self.add_mark(slot, mark.clone());
            }
            Change::Unmark(mark) => {
                self.log(EffectKind::Unmarked { op, node, mark: mark.clone() });
                self.remove_mark(slot, mark);
            }
            Change::Drain => {
                self.log(EffectKind::Drained { op, node });
                self.add_mark(slot, CORDON);
            }
            Change::Undrain => {
                self.log(EffectKind::Undrained { op, node });
                self.remove_mark(slot, &CORDON);
            }
            Change::Evict => {
                self.log(EffectKind::Evicted { op, node });
                self.end_user_of(slot);
                self.update_slot(slot);
            }
            Change::Reset => self.disturb(slot, op, Disturbance::Reset),
            Change::Reboot => self.disturb(slot, op, Disturbance::Reboot),
            Change::Replace => self.disturb(slot, op, Disturbance::Replace),
        }
    }

    fn add_mark(&mut self, slot: u32, mark: OurMark) {
        let unhealthy = mark.kind == MarkKind::Unhealthy;
        let ours = &mut self.slot_mut(slot).node_mut().marks.ours;
        let new = !ours.iter().any(|there| there.kind == mark.kind);
        ours.retain(|there| there.kind != mark.kind);
        ours.push(mark);
        ours.sort();
        if unhealthy && new {
            self.slot_mut(slot).mark += 1;
            self.record_mark(slot);
            self.schedule_repair(slot);
        }
        self.update_slot(slot);
    }

    /// Removes our mark of this kind. A mark that belongs to another case stays.
    fn remove_mark(&mut self, slot: u32, mark: &OurMark) {
        let ours = &mut self.slot_mut(slot).node_mut().marks.ours;
        ours.retain(|there| there.kind != mark.kind || (mark.case.is_some() && there.case != mark.case));
        self.update_slot(slot);
    }

    fn disturb(&mut self, slot: u32, op: OpId, how: Disturbance) {
        let (user, under_way) = (self.slot(slot).user.is_some(), self.slot(slot).down.is_some_and(|down| down.ours));
        let node = self.name(slot);
        self.log(EffectKind::Disturbed { op, node, how, user, in_progress: under_way });
        self.take_down(slot, how, true);
    }

    /// Brings a node back from a reset, a reboot or a replacement.
    pub(super) fn recover(&mut self, slot: u32, turn: u32) {
        if self.slot(slot).generation != turn {
            return;
        }
        let Some(down) = self.slot_mut(slot).down.take() else { return };
        match down.how {
            Disturbance::Reset => self.cure(slot, Cure::Reset),
            Disturbance::Reboot => {
                self.reboot(slot);
                self.cure(slot, Cure::Reboot);
            }
            Disturbance::Replace => self.put_new_machine(slot),
        }
        let node = self.name(slot);
        self.log(EffectKind::Recovered { node });
        self.update_slot(slot);
        self.queue.push(self.now, Event::AgentReports(slot));
    }

    /// Reboots the machine.
    pub(super) fn reboot(&mut self, slot: u32) {
        let machine = &mut self.machines[self.slots[slot as usize].machine as usize];
        machine.boots += 1;
        self.slots[slot as usize].node_mut().hardware = Some(machine.outside().into());
    }

    /// Puts another machine under the same name. Marks stay, because they belong to the name and are removed by their
    /// owners.
    fn put_new_machine(&mut self, slot: u32) {
        self.cure(slot, Cure::Repair);
        let old = &self.machines[self.slot(slot).machine as usize];
        let machine = Machine::new(self.seed, slot, old.generation() + 1, self.now, &self.config.assumptions);
        let number = u32::try_from(self.machines.len()).unwrap_or(u32::MAX);
        self.slot_mut(slot).machine = number;
        self.slot_mut(slot).clock_ahead = 0;
        self.slot_mut(slot).node_mut().hardware = Some(machine.outside().into());
        self.machines.push(machine);
        self.schedule_fault(number as usize);
    }
}

/// Whether the cluster supports this change.
const fn is_supported(caps: Capabilities, what: &Change) -> bool {
    match what {
        Change::Mark(_) | Change::Unmark(_) => caps.mark,
        Change::Drain | Change::Undrain => caps.drain,
        Change::Evict => caps.evict,
        Change::Reset => caps.reset,
        Change::Reboot => caps.reboot,
        Change::Replace => caps.replace,
    }
}
