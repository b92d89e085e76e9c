//! The summary of one cycle, for its log line and for the caller of the engine.

use doctor_core::{plan::Action, reason::WithReason, time::Timestamp};

/// The summary of one cycle, for one log line.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CycleReport {
    pub at: Option<Timestamp>,
    pub nodes: usize,
    pub free: usize,
    pub running: usize,
    pub actions: Vec<WithReason<Action>>,
    pub results: usize,
    pub rejected: usize,
    /// What could not be observed or done, one line each.
    pub problems: Vec<String>,
}

impl CycleReport {
    /// Adds a problem unless it is there: one outage of the shared directory fails several pieces of work.
    pub(crate) fn add_problem(&mut self, problem: String) {
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }
}
