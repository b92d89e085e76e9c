//! What a job on this machine says of itself in a file, so that whoever started it may die and be replaced.
//!
//! The file appears whole or not at all, and only for the first who makes it: it is the claim on the run. A second
//! process for the same run finds it and goes away; a controller that cancels a job before it began makes the file
//! itself, and the job that comes late finds that nothing is wanted of it any more.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use doctor_core::{
    ids::{NodeName, RunId, TestId},
    time::Timestamp,
};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobFile {
    pub run: RunId,
    /// `None`: cancelled before it began.
    pub process: Option<JobProcess>,
    pub ended: Option<JobEnded>,
}

/// The process, such that it cannot be taken for another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobProcess {
    pub pid: u32,
    pub start_ticks: u64,
    /// Ticks count from boot, so they mean nothing in another one.
    pub boot_id: String,
    pub started: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobEnded {
    pub at: Timestamp,
    /// `None`: it did not say; somebody else noted that it was gone.
    pub exit: Option<u8>,
}

/// Exit codes of `doctor-node job`. They say how the job went; what the tests found is in the result document.
pub mod exit {
    /// Every test ran and the result document was written.
    pub const DONE: u8 = 0;
    /// The result document could not be written.
    pub const NO_DOCUMENT: u8 = 1;
    /// The job could not begin: a bad argument, an unreadable key or policy.
    pub const NOT_BEGUN: u8 = 2;
    /// Another process has this run, or it was cancelled before it began.
    pub const NOT_WANTED: u8 = 3;
    /// Over its time limit; what had finished was written. As timeout(1) has it.
    pub const OVER_LIMIT: u8 = 124;
    /// Told to stop; what had finished was written. As a shell would say it: 128 and SIGTERM.
    pub const STOPPED: u8 = 143;
}

/// The log of one test of a run on one node, below the shared directory. The run's result document stands beside the log
/// of its first test, with `.json` in the place of `.log`.
pub fn log_path(test: &TestId, node: &NodeName, planned: Timestamp) -> PathBuf {
    let name = format!("{test}_{node}_{}.log", planned.secs());
    [test.as_str(), node.as_str(), &name].iter().collect()
}
