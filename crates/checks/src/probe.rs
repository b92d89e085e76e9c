//! Probes: what to read on a node and with which limits, as data. A runner on the node executes them.

use serde::{Deserialize, Serialize};

use doctor_core::{
    observation::ProbeFailure,
    time::{Span, Timestamp},
};

use crate::gpu_query::GpuQueryResult;

/// One item to read.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Probe {
    /// A complete small file, such as one of /proc or /sys.
    Read { path: String },
    /// The names in a directory.
    List { path: String },
    /// Every small file whose path matches. A `*` matches any part of one name; `*` alone does not match hidden names.
    /// A pattern without matches returns an empty list, which is a valid answer.
    Glob { pattern: String },
    /// Like `Glob`, for binary files, such as the configuration space of PCI devices: at most `most` bytes of each, in
    /// hexadecimal.
    Bytes { pattern: String, most: u32 },
    /// Every symbolic link whose path matches, with its final target.
    Links { pattern: String },
    /// Like `Glob`, with the contents of the same files at earlier readings, as far back as `keep`. The files are
    /// counters or states; unchanged contents are not repeated.
    Sampled { pattern: String, keep: Span },
    /// Space and inodes of the file system of this path. A hung mount does not block the runner.
    StatFs { path: String },
    /// Records of the kernel log, newest last.
    Kmsg,
    /// Every process, with its name, state and age.
    Processes,
    /// The kernel's clock discipline, from adjtimex(2): lines `synchronized 1`, `offset_us -12`, `max_error_us 5000`,
    /// `estimated_error_us 100`, `frequency_ppm 1.5`.
    ClockDiscipline,
    /// Fields of each GPU from NVIDIA's driver, by the names of [`crate::gpu`].
    Gpu { fields: Vec<String> },
    /// The health watches of DCGM's host engine at this address, in the format of [`crate::dcgm_health_report`]. A missing
    /// library is a failure `missing`.
    DcgmHealth { address: String },
    /// A program with its arguments; no shell.
    Exec { program: String, args: Vec<String>, timeout: Span },
    /// Like `Exec`, only if `path` exists; otherwise a failure `missing` that names it.
    ExecIfExists { path: String, program: String, args: Vec<String>, timeout: Span },
    /// A test built into the node program, which runs in its own process and prints [`crate::document::Measurements`].
    Builtin { test: String, args: Vec<String>, timeout: Span },
}

impl Probe {
    pub fn read(path: &str) -> Self {
        Self::Read { path: path.to_owned() }
    }

    pub fn glob(pattern: &str) -> Self {
        Self::Glob { pattern: pattern.to_owned() }
    }

    pub fn gpu(fields: &[&str]) -> Self {
        Self::Gpu { fields: fields.iter().map(|&field| field.to_owned()).collect() }
    }
}

/// The output of a probe, kept unchanged as evidence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeOutput {
    Text(String),
    Names(Vec<String>),
    /// Ordered by path.
    Files(Vec<FileText>),
    /// Path and target, ordered by path.
    Links(Vec<(String, String)>),
    /// Oldest first; the last is the current one. Never empty.
    Samples(Vec<Sample>),
    StatFs(FileSystemSpace),
    Processes(Vec<Process>),
    Gpus(GpuQueryResult),
    Ran {
        exit: Option<i32>,
        stdout: String,
        stderr: String,
    },
    Failed(ProbeFailure),
}

/// One of several files. A failure to read it does not affect the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileText {
    pub path: String,
    pub text: Result<String, ProbeFailure>,
}

/// The contents of the files of a [`Probe::Sampled`] at one time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// According to the node's clock.
    pub at: Timestamp,
    /// The machine's uptime: a boot resets counters.
    pub uptime: Span,
    /// Files that are new or changed since the previous sample. In the first sample: all files.
    pub files: Vec<FileText>,
    /// Files removed since the previous sample.
    pub removed: Vec<String>,
}

/// A process as shown in /proc.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub parent: u32,
    pub user: u32,
    /// The kernel's short name of the process.
    pub name: String,
    /// `R`, `S`, `D`, `Z`, …
    pub state: char,
    /// The time since its start.
    pub age: Span,
    /// The kernel function in which it waits, if that can be read and its state is `D`.
    pub wchan: Option<String>,
}

/// From statfs(2), in bytes and counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSystemSpace {
    pub size: u64,
    /// Free for unprivileged users: excludes root's reserve.
    pub available: u64,
    pub free: u64,
    pub inodes: u64,
    pub inodes_free: u64,
}
