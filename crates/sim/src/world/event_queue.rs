//! The event queue, ordered by time; events at the same time happen in the order in which they were scheduled.

use std::{cmp::Reverse, collections::BinaryHeap};

use doctor_core::time::Timestamp;

/// A scheduled event. The numbers are indices into the world's tables; a turn distinguishes a valid event from one that
/// was superseded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    UserArrives(u32),
    UserEnds(u32, u32),
    RunStarts(u32),
    TestHalf(u32, u32),
    TestEnds(u32, u32),
    RunBreaks(u32),
    RunKilled(u32),
    FaultOccurs(u32),
    AgentReports(u32),
    /// An agent runs its checks, and will again.
    AgentChecks(u32),
    Ticket(u32),
    TicketDone(u32, u32),
    /// An operator comes to repair this node, for this machine, because of this mark.
    RepairVisit(u32, u32, u32),
    NodeRecovers(u32, u32),
    NodeReachable(u32),
    OutageBegins,
    Scripted(u32),
}

#[derive(Debug, Default)]
pub(super) struct EventQueue {
    heap: BinaryHeap<Reverse<(Timestamp, u64, Event)>>,
    next_sequence: u64,
}

impl EventQueue {
    pub(super) fn push(&mut self, at: Timestamp, event: Event) {
        self.heap.push(Reverse((at, self.next_sequence, event)));
        self.next_sequence += 1;
    }

    pub(super) fn peek(&self) -> Option<Timestamp> {
        self.heap.peek().map(|Reverse((at, _, _))| *at)
    }

    /// Removes and returns the next event, if it is at or before `moment`.
    pub(super) fn next_until(&mut self, moment: Timestamp) -> Option<(Timestamp, Event)> {
        if self.peek()? > moment {
            return None;
        }
        self.heap.pop().map(|Reverse((at, _, event))| (at, event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_ordered_by_time_and_then_by_insertion() {
        let mut queue = EventQueue::default();
        let at = Timestamp::from_secs;
        queue.push(at(2), Event::OutageBegins);
        queue.push(at(1), Event::NodeReachable(2));
        queue.push(at(1), Event::NodeReachable(1));
        let order: Vec<_> = std::iter::from_fn(|| queue.next_until(at(1))).map(|(_, event)| event).collect();
        assert_eq!(order, [Event::NodeReachable(2), Event::NodeReachable(1)]);
        assert_eq!(queue.peek(), Some(at(2)));
    }
}
