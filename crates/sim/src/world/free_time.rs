//! When nodes were free, for scoring: a policy can only test a node that is.

use doctor_core::{ids::NodeName, time::Timestamp};

use super::World;

/// A time in which a node was in service and without user work. Our own jobs do not end it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreeStretch {
    pub from: Timestamp,
    pub to: Timestamp,
}

/// The free stretches of each node, by slot.
#[derive(Debug, Default)]
pub(super) struct FreeTimeLog {
    stretches: Vec<Vec<FreeStretch>>,
    since: Vec<Option<Timestamp>>,
}

impl FreeTimeLog {
    fn set(&mut self, slot: usize, is_free: bool, now: Timestamp) {
        match (is_free, self.since[slot]) {
            (true, None) => self.since[slot] = Some(now),
            (false, Some(from)) => {
                self.since[slot] = None;
                self.stretches[slot].push(FreeStretch { from, to: now });
            }
            (true, Some(_)) | (false, None) => {}
        }
    }
}

impl World {
    /// Begins to record when nodes are free.
    pub fn record_free_time(&mut self) {
        let nodes = self.slots.len();
        self.free_time = Some(FreeTimeLog { stretches: vec![Vec::new(); nodes], since: vec![None; nodes] });
        for slot in 0..u32::try_from(nodes).unwrap_or(u32::MAX) {
            self.note_free_time(slot);
        }
    }

    /// Returns the free stretches of each node since the record began; the last one may still go on.
    pub fn free_time(&self) -> Vec<(NodeName, Vec<FreeStretch>)> {
        let Some(log) = &self.free_time else { return Vec::new() };
        let of_slot = |(slot, name): (usize, NodeName)| {
            let mut stretches = log.stretches[slot].clone();
            stretches.extend(log.since[slot].map(|from| FreeStretch { from, to: self.now }));
            (name, stretches)
        };
        let names = self.slots.iter().map(|slot| slot.seen.node.name.clone());
        names.enumerate().map(of_slot).collect()
    }

    pub(super) fn note_free_time(&mut self, index: u32) {
        let is_free = self.can_start_on(index) && !self.slot(index).seen.node.marks.keeps_out_of_service();
        let now = self.now;
        if let Some(log) = &mut self.free_time {
            log.set(index as usize, is_free, now);
        }
    }
}
