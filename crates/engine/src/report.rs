//! What one cycle did, for its log line and for whoever drives the engine.

use doctor_core::{plan::Action, reason::Because, time::Timestamp};

/// What a cycle did, for one log line.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CycleReport {
    pub at: Option<Timestamp>,
    pub nodes: usize,
    pub free: usize,
    pub running: usize,
    pub actions: Vec<Because<Action>>,
    pub results: usize,
    pub rejected: usize,
    /// What could not be seen or done. Each is one line.
    pub troubles: Vec<String>,
}
