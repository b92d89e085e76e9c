//! A probe is data: what to read, with its limits. A runner on the node carries it out.

use serde::{Deserialize, Serialize};

use doctor_core::{observation::ProbeFailure, time::Span};

/// One thing to read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Probe {
    /// A whole small file, such as one of /proc or /sys.
    Read { path: String },
    /// The names in a directory.
    List { path: String },
    /// Space and inodes of the file system that holds this path. Survives a mount that hangs.
    StatFs { path: String },
    /// Records of the kernel log, newest last.
    Kmsg,
    /// A program with its arguments; no shell.
    Exec { program: String, args: Vec<String>, timeout: Span },
    /// A test built into the node program, with its parameters.
    Builtin { test: String, timeout: Span },
}

/// What came back. Kept as evidence, exactly as it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeOutput {
    Text(String),
    Names(Vec<String>),
    StatFs(FileSystemSpace),
    Ran { exit: Option<i32>, stdout: String, stderr: String },
    Failed(ProbeFailure),
}

/// From statfs(2), in bytes and counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSystemSpace {
    pub size: u64,
    /// Free to ordinary users: the reserve of root is not free.
    pub available: u64,
    pub free: u64,
    pub inodes: u64,
    pub inodes_free: u64,
}
