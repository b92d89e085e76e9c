//! The real faults, for scoring. They never reach a planner, a classifier or the record of effects: a policy that could
//! read them would be an oracle.

use doctor_core::{
    ids::{HardwareId, NodeName},
    time::{Span, Timestamp},
};
use serde::{Deserialize, Serialize};

use crate::{
    fault::{Cure, FaultKind},
    world::World,
};

/// The truth up to a time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Truth {
    pub at: Timestamp,
    pub faults: Vec<FaultRecord>,
    /// How often a machine without a fault was marked as unhealthy.
    pub false_marks: u32,
    pub users: UserStats,
    pub validation_node_hours: f64,
}

/// A fault, from onset to cure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FaultRecord {
    pub kind: FaultKind,
    pub hardware: Option<HardwareId>,
    /// The machine's node name at onset.
    pub node: NodeName,
    pub onset: Timestamp,
    /// The node was out of service already: no user could be harmed, and nothing had to be found in time.
    pub out_at_onset: bool,
    /// The first evidence of it that left the node.
    pub shown: Option<Timestamp>,
    /// The first mark of ours on its node.
    pub marked: Option<Timestamp>,
    /// A user's complaint before we marked the node.
    pub ticket: Option<Timestamp>,
    pub cured: Option<(Timestamp, Cure)>,
    pub lost_node_hours: f64,
}

impl FaultRecord {
    /// Whether we found it: we marked the node before a user complained.
    pub fn is_found(&self) -> bool {
        self.marked.is_some_and(|marked| self.ticket.is_none_or(|ticket| marked <= ticket))
    }

    /// Returns the time from onset to the first mark or complaint.
    pub fn time_to_detect(&self) -> Option<Span> {
        let first = [self.marked, self.ticket].into_iter().flatten().min()?;
        Some(first.since(self.onset))
    }
}

/// What users got, and what faults and validation cost them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UserStats {
    pub jobs_started: u64,
    pub jobs_completed: u64,
    pub jobs_crashed: u64,
    pub jobs_crashed_by_faults: u64,
    /// Ended because their node was reset, rebooted, replaced or vanished.
    pub jobs_killed: u64,
    /// Jobs that waited for a validation job longer than assumed acceptable.
    pub jobs_disturbed: u64,
    /// Total time of waiting for validation jobs.
    pub waited: Span,
    pub node_hours: f64,
    /// Lost to crashes and slow-downs by faults.
    pub node_hours_lost: f64,
    /// Share of all node-hours since the start.
    pub utilisation: f64,
}

impl World {
    /// Returns all past and present faults and their cost. It changes nothing.
    #[expect(clippy::cast_precision_loss, reason = "a count of nodes")]
    pub fn truth(&self) -> Truth {
        let (figures, lost) = self.user_counters();
        let faults = self.faults_so_far().iter().zip(lost).map(|(fault, lost_node_hours)| FaultRecord {
            kind: fault.kind,
            hardware: self.hardware_of(fault.machine).id(),
            node: fault.node.clone(),
            onset: fault.onset,
            out_at_onset: fault.out_at_onset,
            shown: fault.shown,
            marked: fault.marked,
            ticket: fault.ticket,
            cured: fault.cured,
            lost_node_hours,
        });
        let all = self.now().since(self.config().start).as_hours() * self.size() as f64;
        Truth {
            at: self.now(),
            faults: faults.collect(),
            false_marks: figures.false_marks,
            validation_node_hours: figures.validation_node_hours,
            users: UserStats {
                jobs_started: figures.jobs_started,
                jobs_completed: figures.jobs_completed,
                jobs_crashed: figures.jobs_crashed,
                jobs_crashed_by_faults: figures.jobs_crashed_by_faults,
                jobs_killed: figures.jobs_killed,
                jobs_disturbed: figures.jobs_disturbed,
                waited: figures.waited_for_us,
                node_hours: figures.node_hours,
                node_hours_lost: figures.node_hours_lost,
                utilisation: if all > 0.0 { figures.node_hours / all } else { 0.0 },
            },
        }
    }
}
