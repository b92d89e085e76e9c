//! A probe is data: what to read, with its limits. A runner on the node carries it out.

use serde::{Deserialize, Serialize};

use doctor_core::{
    observation::ProbeFailure,
    time::{Span, Timestamp},
};

use crate::gpu_answer::GpuAnswer;

/// One thing to read.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Probe {
    /// A whole small file, such as one of /proc or /sys.
    Read { path: String },
    /// The names in a directory.
    List { path: String },
    /// Every small file whose path fits. A `*` stands for any part of one name, and `*` alone not for hidden ones.
    /// A pattern that nothing fits brings an empty list, which is an answer.
    Glob { pattern: String },
    /// As `Glob`, for files that are no text, such as the configuration space of PCI devices: at most `most` bytes of
    /// each, in hexadecimal.
    Bytes { pattern: String, most: u32 },
    /// Every symbolic link whose path fits, with the path it leads to in the end.
    Links { pattern: String },
    /// As `Glob`, together with what the same files held at earlier looks, as far back as `keep`. The files are
    /// counters or states; what did not change from one look to the next is not repeated.
    Sampled { pattern: String, keep: Span },
    /// Space and inodes of the file system that holds this path. Survives a mount that hangs.
    StatFs { path: String },
    /// Records of the kernel log, newest last.
    Kmsg,
    /// Every process: what it is called, what it does, how long it has done it.
    Processes,
    /// How the kernel's clock is kept, from adjtimex(2): lines `synchronized 1`, `offset_us -12`, `max_error_us 5000`,
    /// `estimated_error_us 100`, `frequency_ppm 1.5`.
    ClockDiscipline,
    /// What NVIDIA's driver says of each GPU, by the names of [`crate::gpu`].
    Gpu { fields: Vec<String> },
    /// What DCGM's host engine at this address says of the GPUs that it watches, in the lines of [`crate::dcgm_watch`].
    /// A library that is not there is a failure `missing`.
    DcgmHealth { address: String },
    /// A program with its arguments; no shell.
    Exec { program: String, args: Vec<String>, timeout: Span },
    /// As `Exec`, only where `path` is there; where it is not, the answer is a failure `missing` that names it.
    ExecWhere { path: String, program: String, args: Vec<String>, timeout: Span },
    /// A test built into the node program, which runs in a process of its own and prints [`crate::document::Measurements`].
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

/// What came back. Kept as evidence, exactly as it was.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeOutput {
    Text(String),
    Names(Vec<String>),
    /// In the order of their paths.
    Files(Vec<FileText>),
    /// Path and where it leads, in the order of paths.
    Links(Vec<(String, String)>),
    /// Oldest first; the last one is now. At least that one is there.
    Samples(Vec<Sample>),
    StatFs(FileSystemSpace),
    Processes(Vec<Process>),
    Gpus(GpuAnswer),
    Ran {
        exit: Option<i32>,
        stdout: String,
        stderr: String,
    },
    Failed(ProbeFailure),
}

/// One of several files. That one cannot be read says nothing about the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileText {
    pub path: String,
    pub text: Result<String, ProbeFailure>,
}

/// What the files of a [`Probe::Sampled`] held at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// By the node's clock.
    pub at: Timestamp,
    /// How long the machine had been up: counters begin anew with a boot.
    pub up: Span,
    /// Files that are new or changed since the sample before. In the first sample: all.
    pub files: Vec<FileText>,
    /// Files that have gone since the sample before.
    pub gone: Vec<String>,
}

/// A process as /proc shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub parent: u32,
    pub user: u32,
    /// The kernel's short name for it.
    pub name: String,
    /// `R`, `S`, `D`, `Z`, …
    pub state: char,
    /// Since its start.
    pub age: Span,
    /// In which function of the kernel it waits, where that can be read and its state is `D`.
    pub waits_in: Option<String>,
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
