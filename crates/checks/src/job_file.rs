//! The file in which a job on this machine records its process and its end, so that the process that started it may die
//! and be replaced.
//!
//! The file appears atomically, and only the first process can create it: it is the claim on the run. A second process
//! for the same run finds it and exits. A controller that cancels a job before it starts creates the file itself, and
//! the job that starts late finds that it is not wanted.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use doctor_core::{
    hex,
    ids::{NodeName, RunId, TestId},
    time::Timestamp,
};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobFile {
    pub run: RunId,
    /// `None`: cancelled before it started.
    pub process: Option<JobProcess>,
    pub ended: Option<JobEnded>,
}

/// Identifies the process uniquely, also after its pid is reused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobProcess {
    pub pid: u32,
    pub start_ticks: u64,
    /// Ticks count from the boot, so they are only valid within one.
    pub boot_id: String,
    pub started: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobEnded {
    pub at: Timestamp,
    /// `None`: the job recorded no exit code; another process found it gone.
    pub exit: Option<u8>,
}

/// Exit codes of `doctor-node job`. They describe how the job ran; the result document has the test results.
pub mod exit {
    /// Every test ran and the result document was written.
    pub const DONE: u8 = 0;
    /// The result document could not be written.
    pub const NO_DOCUMENT: u8 = 1;
    /// The job could not start: a bad argument, an unreadable key or policy.
    pub const NOT_BEGUN: u8 = 2;
    /// Another process has claimed this run, or it was cancelled before it started.
    pub const NOT_WANTED: u8 = 3;
    /// The time limit was exceeded; finished tests were written. The same code as timeout(1).
    pub const OVER_LIMIT: u8 = 124;
    /// The job was terminated; finished tests were written. The shell's code for SIGTERM, 128 + 15.
    pub const STOPPED: u8 = 143;
}

/// The directory of Slurm's jobs, relative to the shared directory: `RUN/NODE.json` below it is the claim of a node.
pub const SLURM_FOLDER: &str = "metadata/slurm";

/// The environment variable with the [`policy_digest`] of the policy that a job was submitted with.
pub const POLICY_DIGEST_VARIABLE: &str = "DOCTOR_POLICY_DIGEST";

/// Returns the digest by which a job recognises the policy that it was submitted with. The file is often on a share or in the home
/// directory of a login user, where others could change it.
pub fn policy_digest(text: &[u8]) -> String {
    hex::encode(&Sha256::digest(text))
}

/// Returns the path of the log of one test of a run on one node, relative to the shared directory. The run's result
/// document is next to the log of its first test, with `.json` instead of `.log`.
pub fn log_path(test: &TestId, node: &NodeName, planned: Timestamp) -> PathBuf {
    let name = format!("{test}_{node}_{}.log", planned.secs());
    [test.as_str(), node.as_str(), &name].iter().collect()
}
