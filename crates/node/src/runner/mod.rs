//! Carries out probes, and comes back whatever happens.
//!
//! Everything that the kernel could make wait for ever happens in a child process: programs of course, but also the
//! reading of a file and statfs(2), which hang on a dead network mount or a broken device. A helper thread would not
//! do: a thread stuck in the kernel keeps its whole process from ending, so a job would never be seen to end. A child
//! is killed with its process group at its time limit, and left behind when even that does not end it. What was left
//! behind is remembered ([`abandoned`]): the same probe is not started again while the old one hangs, so that nothing
//! piles up on a sick node.

mod abandoned;
mod child;
mod helper;

use std::{
    io,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use doctor_checks::probe::{Probe, ProbeOutput};
use doctor_core::{
    observation::{FailureKind, ProbeFailure},
    time::Span,
};

use crate::stop::{Stop, StopWhy};
use abandoned::AbandonedProbes;
use child::{Ended, Limits};

pub use helper::answer;

/// The hidden argument by which this program reads one thing in a process of its own.
pub const HELPER_ARGUMENT: &str = "__probe";

/// The environment variable that holds the run's key. No child gets to see it.
pub const KEY_VARIABLE: &str = "DOCTOR_RUN_KEY";

/// What a program may print on each of its two streams; evidence is kept and must stay readable.
pub const MAX_STREAM_BYTES: usize = 1 << 20;

/// The helper's answer is JSON, which may need several characters for one byte of what it read.
const MAX_ANSWER_BYTES: usize = 8 << 20;

/// A file of /proc or a statfs(2) that takes longer hangs.
const FILE_TIMEOUT: Duration = Duration::from_secs(5);

/// A killed process is gone within microseconds unless it is stuck in the kernel.
const KILL_GRACE: Duration = Duration::from_secs(2);

/// Carries out what a check wants to know. Never fails and never blocks for longer than the probe's limit and a
/// little: a failure is an answer too.
pub trait ProbeRunner {
    fn run(&self, probe: &Probe) -> ProbeOutput;
}

/// Runs probes on this machine.
pub struct LocalRunner<'a> {
    root: PathBuf,
    helper: PathBuf,
    abandoned: AbandonedProbes,
    stop: &'a Stop,
    echo: Option<&'a dyn Fn(&str)>,
}

impl std::fmt::Debug for LocalRunner<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalRunner").field("root", &self.root).finish_non_exhaustive()
    }
}

impl<'a> LocalRunner<'a> {
    /// Files are looked up below `root`: `/`, or where a container sees its host. Programs are this file system's.
    pub fn new(root: impl Into<PathBuf>, stop: &'a Stop) -> Self {
        Self {
            root: root.into(),
            // Also right when the program was replaced by an update while it runs.
            helper: PathBuf::from("/proc/self/exe"),
            abandoned: AbandonedProbes::of_this_process(),
            stop,
            echo: None,
        }
    }

    /// The program that understands [`HELPER_ARGUMENT`], where that is not the running one.
    #[must_use]
    pub fn helper(mut self, program: impl Into<PathBuf>) -> Self {
        self.helper = program.into();
        self
    }

    /// Remembers here, for the processes that come after, which probes hang.
    #[must_use]
    pub fn state(mut self, directory: Option<&Path>) -> Self {
        if let Some(directory) = directory {
            self.abandoned = AbandonedProbes::kept_in(directory);
        }
        self
    }

    /// Hands over each line that a program prints, as it prints it.
    #[must_use]
    pub fn echo(mut self, echo: &'a dyn Fn(&str)) -> Self {
        self.echo = Some(echo);
        self
    }

    fn exec(&self, program: &str, args: &[String], timeout: Span) -> ProbeOutput {
        let mut command = Command::new(program);
        command.args(args).env_remove(KEY_VARIABLE).env("LC_ALL", "C").env("DOCTOR_ROOT", &self.root);
        let limits = Limits { timeout: timeout.to_std(), stream: MAX_STREAM_BYTES, kill_grace: KILL_GRACE };
        match child::run(&mut command, &limits, self.stop, self.echo) {
            Ok(Ended::Exited { status, stdout, stderr }) => ProbeOutput::Ran {
                exit: status.code(),
                stdout: String::from_utf8_lossy(&stdout).into_owned(),
                stderr: String::from_utf8_lossy(&stderr).into_owned(),
            },
            other => self.explain(&name_of(program, args), other, timeout),
        }
    }

    fn read(&self, probe: &Probe, what: &str) -> ProbeOutput {
        let Ok(asked) = serde_json::to_string(probe) else {
            return failed(FailureKind::Failed, format!("{what}: the probe cannot be written down"));
        };
        let mut command = Command::new(&self.helper);
        command.arg(HELPER_ARGUMENT).arg(asked).arg(&self.root).env_remove(KEY_VARIABLE);
        let limits = Limits { timeout: FILE_TIMEOUT, stream: MAX_ANSWER_BYTES, kill_grace: KILL_GRACE };
        match child::run(&mut command, &limits, self.stop, None) {
            Ok(Ended::Exited { status, stdout, .. }) if status.success() => serde_json::from_slice(&stdout)
                .unwrap_or_else(|error| {
                    failed(FailureKind::Unparseable, format!("{what}: the helper's answer: {error}"))
                }),
            Ok(Ended::Exited { status, stderr, .. }) => {
                let said = String::from_utf8_lossy(&stderr).trim().to_owned();
                failed(FailureKind::Failed, format!("{what}: the helper ended with {status}: {said}"))
            }
            other => self.explain(what, other, Span::from_millis(FILE_TIMEOUT.as_millis() as i64)),
        }
    }

    /// Why there is no answer.
    fn explain(&self, what: &str, ended: io::Result<Ended>, timeout: Span) -> ProbeOutput {
        let (kind, text) = match ended {
            Err(error) => (kind_of(&error), format!("{what}: {error}")),
            Ok(Ended::TimedOut) => {
                (FailureKind::TimedOut, format!("{what}: no answer within {timeout}; it was killed"))
            }
            Ok(Ended::TooLong) => {
                (FailureKind::TooLong, format!("{what}: it printed more than {MAX_STREAM_BYTES} bytes and was killed"))
            }
            Ok(Ended::Stopped(StopWhy::Signal)) => (FailureKind::Killed, format!("{what}: told to stop")),
            Ok(Ended::Stopped(StopWhy::TimeLimit)) => {
                (FailureKind::Killed, format!("{what}: the job's time limit was reached"))
            }
            Ok(Ended::Unkillable { pid, child }) => {
                self.abandoned.add(what, pid, child);
                (FailureKind::Abandoned, format!("{what}: process {pid} cannot be killed and was left behind"))
            }
            Ok(Ended::Exited { status, .. }) => (FailureKind::Failed, format!("{what}: it ended with {status}")),
        };
        failed(kind, text)
    }
}

impl ProbeRunner for LocalRunner<'_> {
    fn run(&self, probe: &Probe) -> ProbeOutput {
        let what = describe(probe);
        if let Some(pid) = self.abandoned.hanging(&what) {
            return failed(FailureKind::Abandoned, format!("{what}: process {pid} still hangs from an earlier try"));
        }
        match probe {
            Probe::Exec { program, args, timeout } => self.exec(program, args, *timeout),
            Probe::Read { .. } | Probe::List { .. } | Probe::StatFs { .. } | Probe::Kmsg => self.read(probe, &what),
            Probe::Builtin { test, .. } => {
                failed(FailureKind::Missing, format!("this doctor-node has no built-in test `{test}`"))
            }
        }
    }
}

/// Answers from what was recorded: a result document's evidence, or a fixture.
#[derive(Debug, Clone, Default)]
pub struct FixtureRunner {
    recorded: Vec<(Probe, ProbeOutput)>,
}

impl FixtureRunner {
    pub fn new(recorded: impl IntoIterator<Item = (Probe, ProbeOutput)>) -> Self {
        Self { recorded: recorded.into_iter().collect() }
    }
}

impl ProbeRunner for FixtureRunner {
    fn run(&self, probe: &Probe) -> ProbeOutput {
        let found = self.recorded.iter().find(|(recorded, _)| recorded == probe);
        found.map_or_else(
            || failed(FailureKind::Missing, format!("{}: not in the recording", describe(probe))),
            |(_, output)| output.clone(),
        )
    }
}

/// A probe in words, the same for the same probe.
pub fn describe(probe: &Probe) -> String {
    match probe {
        Probe::Read { path } => format!("read {path}"),
        Probe::List { path } => format!("list {path}"),
        Probe::StatFs { path } => format!("statfs {path}"),
        Probe::Kmsg => "read the kernel log".to_owned(),
        Probe::Exec { program, args, .. } => name_of(program, args),
        Probe::Builtin { test, .. } => format!("test {test}"),
    }
}

fn name_of(program: &str, args: &[String]) -> String {
    std::iter::once(program).chain(args.iter().map(String::as_str)).collect::<Vec<_>>().join(" ")
}

pub(crate) fn failed(kind: FailureKind, text: impl Into<String>) -> ProbeOutput {
    ProbeOutput::Failed(ProbeFailure::new(kind, text))
}

pub(crate) fn kind_of(error: &io::Error) -> FailureKind {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => FailureKind::Missing,
        io::ErrorKind::PermissionDenied => FailureKind::Denied,
        _ => FailureKind::Failed,
    }
}
