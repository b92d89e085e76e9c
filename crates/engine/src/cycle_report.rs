//! The summary of one cycle, for its log line and for the caller of the engine.

use doctor_core::{plan::Action, reason::WithReason, time::Timestamp};
use doctor_store::StoreError;

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

    /// Returns what a step gave. The failure of one is a problem of the cycle, which goes on; without the lease it ends.
    ///
    /// # Errors
    /// If this controller no longer leads.
    pub(crate) fn unless_lease_lost<T>(
        &mut self,
        step: &str,
        outcome: Result<T, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        match outcome {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.is_lease_lost() => Err(error),
            Err(error) => {
                self.add_problem(format!("{step} failed: {}", chain(&error)));
                Ok(None)
            }
        }
    }
}

/// Formats an error with its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
