//! Carries out probes, and comes back whatever happens.
//!
//! What the kernel could make wait for ever happens in a child process: programs of course, but also the reading of a
//! file and statfs(2) on a network mount, and a driver of which nobody knows whether it answers. A thread stuck in the
//! kernel keeps its whole process from ending, so a job would never be seen to end. A child is killed with its process
//! group at its time limit, and left behind when even that does not end it. What was left behind is remembered
//! ([`abandoned`]): the same probe is not started again while the old one hangs, so that nothing piles up on a sick node.
//!
//! The rest, file systems of the kernel and local disks, is read here on a thread that is watched ([`watched`]), because
//! a child takes longer than everything that a fast check reads. A driver that answered a moment ago is asked here too.

pub(crate) mod abandoned;
pub(crate) mod child;
mod clock_discipline;
mod describe;
mod fixture;
mod gpus;
mod many;
pub(crate) mod mounts;
mod processes;
mod reading;
mod samples;
mod trusted;
mod watched;

use std::{
    cell::{OnceCell, RefCell},
    collections::HashMap,
    ffi::OsString,
    io,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use doctor_checks::{
    measurements::ended_badly,
    probe::{Probe, ProbeOutput},
};
use doctor_core::{
    observation::{FailureKind, ProbeFailure},
    time::Span,
};

use crate::{
    builtin,
    clock::now,
    stop::{Stop, StopWhy},
};
use abandoned::AbandonedProbes;
use child::{Echo, Ended, Limits};
use describe::name_of;
use mounts::Mounts;
use trusted::Trusted;
use watched::{NoAnswer, WatchedReader};

pub use clock_discipline::CLOCK_FILE;
pub use describe::describe;
pub use fixture::FixtureRunner;
pub use reading::answer_as_helper;

/// The hidden argument by which this program reads one thing in a process of its own.
pub const HELPER_ARGUMENT: &str = "__probe";

/// The hidden argument by which this program runs one built-in test in a process of its own.
pub const BUILTIN_ARGUMENT: &str = "__test";

/// The environment variable that holds the run's key. No child gets to see it.
pub const KEY_VARIABLE: &str = "DOCTOR_RUN_KEY";

/// The environment variable that names the directory for what is to be remembered.
pub const STATE_VARIABLE: &str = "DOCTOR_NODE_STATE";

/// What a program may print on each of its two streams; evidence is kept and must stay readable.
pub const MAX_STREAM_BYTES: usize = 1 << 20;

/// The helper's answer is JSON, which may need several characters for one byte of what it read.
const MAX_ANSWER_BYTES: usize = 8 << 20;

/// A file of /proc or a statfs(2) that takes longer hangs.
const FILE_TIMEOUT: Duration = Duration::from_secs(5);

/// Without persistence mode the driver wakes each GPU first, which takes seconds for eight of them.
const DRIVER_TIMEOUT: Duration = Duration::from_secs(30);

/// What a built-in test may take to remove its files once it is told to stop. A job that was told to stop itself has two
/// seconds for everything.
const BUILTIN_GRACE: Duration = Duration::from_millis(800);
/// DCGM's engine keeps what it watches and answers at once; connecting has a limit of its own.
const DCGM_TIMEOUT: Duration = Duration::from_secs(15);

/// As the driver's own, for its program, which asks for far more.
const GPU_LOG_TIMEOUT: Span = Span::from_secs(60);

/// A killed process is gone within microseconds unless it is stuck in the kernel.
const KILL_GRACE: Duration = Duration::from_secs(2);

/// Carries out what a check wants to know. Never fails and never blocks for longer than the probe's limit and a
/// little: a failure is an answer too.
pub trait ProbeRunner {
    fn run(&self, probe: &Probe) -> ProbeOutput;

    /// Says beforehand what will be asked, so that what costs once is done once.
    fn prepare(&self, _probes: &[Probe]) {}
}

/// Runs probes on this machine, for one pass over checks: what several of them ask is read once.
pub struct LocalRunner<'a> {
    root: PathBuf,
    helper: PathBuf,
    library: OsString,
    dcgm: OsString,
    abandoned: AbandonedProbes,
    state: Option<PathBuf>,
    trusted: Trusted,
    mounts: OnceCell<Mounts>,
    reader: RefCell<WatchedReader>,
    known: RefCell<HashMap<Probe, ProbeOutput>>,
    /// All fields that this pass will want of the driver: opening it takes longer than reading them.
    wanted: RefCell<Vec<String>>,
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
            library: doctor_gpu::nvml::LIBRARY.into(),
            dcgm: OsString::new(),
            abandoned: AbandonedProbes::of_this_process(),
            state: None,
            trusted: Trusted::default(),
            mounts: OnceCell::new(),
            reader: RefCell::default(),
            known: RefCell::default(),
            wanted: RefCell::default(),
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

    /// NVML, where it is not the one that the system finds by its name.
    #[must_use]
    pub fn library(mut self, library: impl Into<OsString>) -> Self {
        self.library = library.into();
        self
    }

    /// DCGM's library, where it is not one that the system finds by its name.
    #[must_use]
    pub fn dcgm(mut self, library: impl Into<OsString>) -> Self {
        self.dcgm = library.into();
        self
    }

    /// Remembers here, for the processes that come after, which probes hang, whether the driver answers, and what
    /// counters stood at.
    #[must_use]
    pub fn state(mut self, directory: Option<&Path>) -> Self {
        if let Some(directory) = directory {
            self.abandoned = AbandonedProbes::kept_in(directory);
            self.trusted = Trusted::kept_in(directory);
            self.state = Some(directory.to_owned());
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
        command.args(args).env("LC_ALL", "C").env("DOCTOR_ROOT", &self.root);
        let echo = Echo { stdout: self.echo, stderr: self.echo };
        self.listen_to(command, &name_of(program, args), timeout, Duration::ZERO, echo)
    }

    /// What it prints on its standard error goes into the log; on its standard output it answers as a helper does.
    fn builtin(&self, test: &str, args: &[String], timeout: Span) -> ProbeOutput {
        let what = format!("test {test}");
        if builtin::find(test).is_none() {
            return failed(FailureKind::Missing, format!("this doctor-node has no built-in test `{test}`"));
        }
        let mut command = Command::new(&self.helper);
        command.arg(BUILTIN_ARGUMENT).arg(test).args(args);
        command.env("DOCTOR_ROOT", &self.root).env("DOCTOR_NVML", &self.library);
        if let Some(state) = &self.state {
            command.env(STATE_VARIABLE, state);
        }
        let echo = Echo { stdout: None, stderr: self.echo };
        match self.listen_to(command, &what, timeout, BUILTIN_GRACE, echo) {
            ProbeOutput::Ran { exit: Some(0), stdout, .. } => serde_json::from_str(&stdout)
                .unwrap_or_else(|error| failed(FailureKind::Unparseable, format!("{what}: its answer: {error}"))),
            ProbeOutput::Ran { exit, stderr, .. } => ProbeOutput::Failed(ended_badly(exit, &stderr)),
            other => other,
        }
    }

    /// Runs a program to its end. At a limit it is told to stop and has `grace` to clean up, before it is killed.
    fn listen_to(
        &self,
        mut command: Command,
        what: &str,
        timeout: Span,
        grace: Duration,
        echo: Echo<'_>,
    ) -> ProbeOutput {
        command.env_remove(KEY_VARIABLE);
        let limits = Limits { timeout: timeout.to_std(), stream: MAX_STREAM_BYTES, grace, kill_grace: KILL_GRACE };
        match child::run(&mut command, &limits, self.stop, echo) {
            Ok(Ended::Exited { status, stdout, stderr }) => ProbeOutput::Ran {
                exit: status.code(),
                stdout: String::from_utf8_lossy(&stdout).into_owned(),
                stderr: String::from_utf8_lossy(&stderr).into_owned(),
            },
            other => self.explain(what, other, timeout),
        }
    }

    fn read(&self, probe: &Probe, what: &str) -> ProbeOutput {
        if let Probe::Gpu { fields } = probe {
            let wanted = self.wanted.borrow().clone();
            if wanted != *fields && fields.iter().all(|field| wanted.contains(field)) {
                return gpus::only(self.read(&Probe::Gpu { fields: wanted }, what), fields);
            }
        }
        if let Some(output) = self.known.borrow().get(probe) {
            return output.clone();
        }
        let output = if self.is_safe(probe) { self.read_here(probe, what) } else { self.read_apart(probe, what) };
        let output = match probe {
            Probe::Gpu { fields } => {
                self.trusted.note(!matches!(output, ProbeOutput::Failed(_)));
                gpus::or_by_nvidia_smi(output, fields, |program, args| self.exec(program, args, GPU_LOG_TIMEOUT))
            }
            _ => output,
        };
        self.known.borrow_mut().insert(probe.clone(), output.clone());
        output
    }

    /// Whether it may be read in this process.
    fn is_safe(&self, probe: &Probe) -> bool {
        match probe {
            Probe::Kmsg | Probe::Processes | Probe::ClockDiscipline => true,
            // Without the driver's device there is nothing that could hang.
            Probe::Gpu { .. } => {
                let has_driver =
                    || reading::below(&self.root, "/dev/nvidiactl").exists() || Path::new("/dev/nvidiactl").exists();
                self.trusted.is_trusted() || !has_driver()
            }
            Probe::Read { path }
            | Probe::List { path }
            | Probe::StatFs { path }
            | Probe::Glob { pattern: path }
            | Probe::Links { pattern: path }
            | Probe::Bytes { pattern: path, .. } => {
                let fixed = path.split('*').next().unwrap_or_default();
                self.mounts.get_or_init(Mounts::now).is_local(&reading::below(&self.root, fixed))
            }
            // DCGM's library starts threads of its own and may wait for an engine that hangs in the driver.
            Probe::DcgmHealth { .. }
            | Probe::Sampled { .. }
            | Probe::Exec { .. }
            | Probe::ExecWhere { .. }
            | Probe::Builtin { .. } => false,
        }
    }

    fn read_here(&self, probe: &Probe, what: &str) -> ProbeOutput {
        if let Some(why) = self.stop.told() {
            return self.explain(what, Ok(Ended::Stopped(why)), Span::ZERO);
        }
        let (owned, root, library) = (probe.clone(), self.root.clone(), self.library.clone());
        let limit = time_for(probe);
        let answer = self.reader.borrow_mut().read(limit, move || reading::answer(&owned, &root, &library));
        answer.unwrap_or_else(|why| match why {
            NoAnswer::Hangs => {
                let limit = Span::from_millis(limit.as_millis() as i64);
                failed(FailureKind::TimedOut, format!("{what}: no answer within {limit}; it was left behind"))
            }
            NoAnswer::NoThread => failed(FailureKind::Failed, format!("{what}: the reading came to nothing")),
        })
    }

    /// Now and at earlier looks.
    fn sample(&self, pattern: &str, keep: Span) -> ProbeOutput {
        let glob = Probe::Glob { pattern: pattern.to_owned() };
        let files = match self.read(&glob, &describe(&glob)) {
            ProbeOutput::Files(files) => files,
            other => return other,
        };
        let uptime = Probe::read("/proc/uptime");
        let up = match self.read(&uptime, &describe(&uptime)) {
            ProbeOutput::Text(text) => text.split(' ').next().and_then(|text| text.parse::<f64>().ok()),
            _ => None,
        };
        let Some(up) = up else {
            return failed(FailureKind::Unparseable, format!("{pattern}: /proc/uptime does not say how long"));
        };
        let up = Span::from_millis((up * 1000.0) as i64);
        ProbeOutput::Samples(samples::add(self.state.as_deref(), pattern, keep, (now(), up), files))
    }

    fn read_apart(&self, probe: &Probe, what: &str) -> ProbeOutput {
        let Ok(asked) = serde_json::to_string(probe) else {
            return failed(FailureKind::Failed, format!("{what}: the probe cannot be written down"));
        };
        let mut command = Command::new(&self.helper);
        let library = if matches!(probe, Probe::DcgmHealth { .. }) { &self.dcgm } else { &self.library };
        command.arg(HELPER_ARGUMENT).arg(asked).arg(&self.root).arg(library).env_remove(KEY_VARIABLE);
        let limit = time_for(probe);
        let limits = Limits { timeout: limit, stream: MAX_ANSWER_BYTES, grace: Duration::ZERO, kill_grace: KILL_GRACE };
        match child::run(&mut command, &limits, self.stop, Echo::default()) {
            Ok(Ended::Exited { status, stdout, .. }) if status.success() => serde_json::from_slice(&stdout)
                .unwrap_or_else(|error| {
                    failed(FailureKind::Unparseable, format!("{what}: the helper's answer: {error}"))
                }),
            Ok(Ended::Exited { status, stderr, .. }) => {
                let said = String::from_utf8_lossy(&stderr).trim().to_owned();
                failed(FailureKind::Failed, format!("{what}: the helper ended with {status}: {said}"))
            }
            other => self.explain(what, other, Span::from_millis(limit.as_millis() as i64)),
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
    fn prepare(&self, probes: &[Probe]) {
        let mut wanted = self.wanted.borrow_mut();
        for probe in probes {
            if let Probe::Gpu { fields } = probe {
                let new: Vec<_> = fields.iter().filter(|field| !wanted.contains(field)).cloned().collect();
                wanted.extend(new);
            }
        }
    }

    fn run(&self, probe: &Probe) -> ProbeOutput {
        let what = describe(probe);
        if let Some(pid) = self.abandoned.hanging(&what) {
            return failed(FailureKind::Abandoned, format!("{what}: process {pid} still hangs from an earlier try"));
        }
        match probe {
            Probe::Exec { program, args, timeout } => self.exec(program, args, *timeout),
            Probe::ExecWhere { path, program, args, timeout } => match reading::below(&self.root, path).try_exists() {
                Ok(true) => self.exec(program, args, *timeout),
                Ok(false) => failed(FailureKind::Missing, format!("{path} is not there")),
                Err(error) => failed(kind_of(&error), format!("{path}: {error}")),
            },
            Probe::Sampled { pattern, keep } => self.sample(pattern, *keep),
            Probe::Read { .. }
            | Probe::List { .. }
            | Probe::Glob { .. }
            | Probe::Bytes { .. }
            | Probe::Links { .. }
            | Probe::StatFs { .. }
            | Probe::Kmsg
            | Probe::Processes
            | Probe::ClockDiscipline
            | Probe::DcgmHealth { .. }
            | Probe::Gpu { .. } => self.read(probe, &what),
            Probe::Builtin { test, args, timeout } => self.builtin(test, args, *timeout),
        }
    }
}

const fn time_for(probe: &Probe) -> Duration {
    match probe {
        Probe::Gpu { .. } => DRIVER_TIMEOUT,
        Probe::DcgmHealth { .. } => DCGM_TIMEOUT,
        _ => FILE_TIMEOUT,
    }
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
