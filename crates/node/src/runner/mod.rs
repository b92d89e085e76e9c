//! Executes probes and always returns, whatever the machine does.
//!
//! Whatever the kernel could block forever runs in a child process: programs, but also reads and statfs(2) on a network
//! mount, and every driver call. A thread stuck in the kernel keeps its whole process from exiting, so the job would
//! never end. A child is killed with its process group at its time limit and left behind if that does not end it.
//! Abandoned children are recorded ([`hung_probes`]): the same probe is not started again while an old one hangs, so that
//! nothing piles up on a sick node. A helper process serves all queries of the GPU driver ([`nvml_helper`]).
//!
//! Everything else, on kernel file systems and local disks, is read in this process on a watched thread ([`watchdog`]),
//! because a child takes longer than all the reads of a fast check. A pass that announces its probes
//! ([`ProbeRunner::prepare`]) has them all read together, while the driver answers.

pub(crate) mod child;
mod clock_discipline;
mod counter_history;
#[doc(hidden)]
pub mod fuzz_targets;
mod glob;
mod gpus;
pub(crate) mod hung_probes;
mod mounts;
mod nvml_helper;
mod processes;
mod reader;
mod recorded;
mod small_file;
mod subprocess;
mod watchdog;
mod words;

use std::{
    cell::{OnceCell, RefCell},
    collections::{HashMap, HashSet},
    ffi::OsString,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use doctor_checks::probe::{Probe, ProbeOutput};
use doctor_core::{
    observation::{FailureKind, ProbeFailure},
    time::{Span, Timestamp},
};

use crate::{
    clock::now,
    stop::{Stop, StopReason},
};
use child::ChildOutcome;
use counter_history::CounterHistory;
use hung_probes::HungProbes;
use mounts::Mounts;
use nvml_helper::DriverRequest;
use reader::Reader;
use watchdog::NoAnswer;

pub use clock_discipline::CLOCK_FILE;
pub(crate) use hung_probes::boot_id;
pub use nvml_helper::{DRIVER_ARGUMENT, DriverHelper, serve_driver_queries};
pub use reader::serve_one_probe;
pub use recorded::FixtureRunner;
pub use words::describe;

/// The hidden argument that makes this program execute one probe and exit.
pub const HELPER_ARGUMENT: &str = "__probe";

/// The hidden argument that makes this program run one built-in test and exit.
pub const BUILTIN_ARGUMENT: &str = "__test";

/// The environment variable that holds the run's key. It is removed from every child's environment.
pub const KEY_VARIABLE: &str = "DOCTOR_RUN_KEY";

/// The environment variable that names the state directory.
pub const STATE_VARIABLE: &str = "DOCTOR_NODE_STATE";

/// Most bytes that a program may print on each stream; evidence is stored and must stay readable.
pub const MAX_STREAM_BYTES: usize = 1 << 20;

/// A read in /proc or a statfs(2) that takes longer hangs.
const FILE_TIMEOUT: Duration = Duration::from_secs(5);

/// Without persistence mode the driver initialises each GPU first, which takes seconds for eight of them.
const DRIVER_TIMEOUT: Duration = Duration::from_secs(30);

/// DCGM's engine answers from its cache; connecting has its own limit.
const DCGM_TIMEOUT: Duration = Duration::from_secs(15);

/// Limit of `nvidia-smi -q`, which queries far more than we do.
const GPU_LOG_TIMEOUT: Span = Span::from_secs(60);

/// Read in every pass: counters need the uptime.
const UPTIME: &str = "/proc/uptime";

/// Executes the probes of checks. `run` returns failures as outputs, and never blocks much longer than the probe's limit.
pub trait ProbeRunner {
    fn run(&self, probe: &Probe) -> ProbeOutput;

    /// Announces probes so that they can be read together.
    fn prepare(&self, _probes: &[Probe]) {}
}

/// Executes probes on this machine for one pass over checks. Probes that several checks share run once.
pub struct LocalRunner<'a> {
    /// Identifies this runner within the process.
    number: u64,
    root: PathBuf,
    helper: PathBuf,
    library: OsString,
    dcgm: OsString,
    abandoned: HungProbes,
    state: Option<PathBuf>,
    samples: CounterHistory,
    driver_helper: Arc<DriverHelper>,
    driver_limit: Duration,
    /// Whether a query could reach a driver at all.
    may_have_driver: OnceCell<bool>,
    mounts: OnceCell<Mounts>,
    cache: RefCell<HashMap<Probe, ProbeOutput>>,
    /// All driver fields that this pass needs: opening the driver takes longer than reading them.
    driver_fields: RefCell<Vec<String>>,
    /// The driver's answer for those fields.
    driver: RefCell<Option<ProbeOutput>>,
    /// Whether all GPUs returned the same fields.
    same_fields: OnceCell<bool>,
    /// The time of this pass and the uptime then, shared by all counters.
    sample_time: OnceCell<Option<(Timestamp, Span)>>,
    stop: &'a Stop,
    echo: Option<&'a dyn Fn(&str)>,
}

impl std::fmt::Debug for LocalRunner<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalRunner").field("root", &self.root).finish_non_exhaustive()
    }
}

impl<'a> LocalRunner<'a> {
    /// Creates a runner. Files are resolved below `root`: `/`, or the host's mount point in a container. Programs are
    /// not.
    pub fn new(root: impl Into<PathBuf>, stop: &'a Stop) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            root: root.into(),
            // Stays valid if an update replaces the running program.
            helper: PathBuf::from("/proc/self/exe"),
            library: doctor_gpu::nvml::LIBRARY.into(),
            dcgm: OsString::new(),
            abandoned: HungProbes::in_memory(),
            state: None,
            samples: CounterHistory::default(),
            driver_helper: Arc::default(),
            driver_limit: DRIVER_TIMEOUT,
            may_have_driver: OnceCell::new(),
            mounts: OnceCell::new(),
            cache: RefCell::default(),
            driver_fields: RefCell::default(),
            driver: RefCell::default(),
            same_fields: OnceCell::new(),
            sample_time: OnceCell::new(),
            stop,
            echo: None,
        }
    }

    /// Sets the program that understands [`HELPER_ARGUMENT`] and [`DRIVER_ARGUMENT`]. Default: the running one.
    #[must_use]
    pub fn helper(mut self, program: impl Into<PathBuf>) -> Self {
        self.helper = program.into();
        self
    }

    /// Shares a driver helper process between runners.
    #[must_use]
    pub fn driver_helper(mut self, helper: &Arc<DriverHelper>) -> Self {
        self.driver_helper = Arc::clone(helper);
        self
    }

    /// Sets the time limit of driver queries.
    #[must_use]
    pub const fn driver_limit(mut self, limit: Duration) -> Self {
        self.driver_limit = limit;
        self
    }

    /// Sets the path of NVML. Default: found by the loader.
    #[must_use]
    pub fn library(mut self, library: impl Into<OsString>) -> Self {
        self.library = library.into();
        self
    }

    /// Sets the path of DCGM's library. Default: found by the loader.
    #[must_use]
    pub fn dcgm(mut self, library: impl Into<OsString>) -> Self {
        self.dcgm = library.into();
        self
    }

    /// Sets the state directory, which tells later processes about hanging probes and earlier counter values.
    #[must_use]
    pub fn state(mut self, directory: Option<&Path>) -> Self {
        if let Some(directory) = directory {
            self.abandoned = HungProbes::in_directory(directory);
            self.samples = CounterHistory::in_directory(directory);
            self.state = Some(directory.to_owned());
        }
        self
    }

    /// Passes each line that a program prints to `echo` as it arrives.
    #[must_use]
    pub fn echo(mut self, echo: &'a dyn Fn(&str)) -> Self {
        self.echo = Some(echo);
        self
    }

    fn read(&self, probe: &Probe, what: &str) -> ProbeOutput {
        if let Probe::Gpu { fields } = probe
            && self.is_announced(fields)
        {
            return self.driver_fields_answer(fields, what);
        }
        if let Some(output) = self.cache.borrow().get(probe) {
            return output.clone();
        }
        let output = self.read_now(probe, what);
        self.cache.borrow_mut().insert(probe.clone(), output.clone());
        output
    }

    fn is_announced(&self, fields: &[String]) -> bool {
        let announced = self.driver_fields.borrow();
        fields.iter().all(|field| announced.contains(field))
    }

    /// Queries the driver once for all checks, and returns only the requested fields.
    fn driver_fields_answer(&self, fields: &[String], what: &str) -> ProbeOutput {
        let mut driver = self.driver.borrow_mut();
        let all = driver
            .get_or_insert_with(|| self.read_now(&Probe::Gpu { fields: self.driver_fields.borrow().clone() }, what));
        match all {
            ProbeOutput::Gpus(result) => {
                let alike = *self.same_fields.get_or_init(|| gpus::are_alike(result));
                ProbeOutput::Gpus(gpus::select_fields(result, alike, fields))
            }
            other => other.clone(),
        }
    }

    fn read_now(&self, probe: &Probe, what: &str) -> ProbeOutput {
        if self.can_read_in_process(probe) {
            let output =
                self.read_in_process(std::slice::from_ref(probe)).pop().unwrap_or_else(|| self.stopped_output(what));
            return self.or_nvidia_smi(probe, output);
        }
        match probe {
            Probe::Gpu { fields } => self.or_nvidia_smi(probe, self.query_helper(fields)),
            _ => self.read_in_helper(probe, what),
        }
    }

    fn driver_request<'q>(&'q self, fields: &'q [String]) -> DriverRequest<'q> {
        DriverRequest {
            runner: self.number,
            program: &self.helper,
            root: &self.root,
            library: &self.library,
            fields,
            limit: self.driver_limit,
            stop: self.stop,
            abandoned: &self.abandoned,
        }
    }

    fn query_helper(&self, fields: &[String]) -> ProbeOutput {
        self.driver_helper.query(&self.driver_request(fields)).map_or_else(ProbeOutput::Failed, ProbeOutput::Gpus)
    }

    /// Falls back to `nvidia-smi` if a driver has no library.
    fn or_nvidia_smi(&self, probe: &Probe, output: ProbeOutput) -> ProbeOutput {
        let Probe::Gpu { fields } = probe else { return output };
        gpus::or_nvidia_smi(output, fields, |program, args| {
            let exec = Probe::Exec { program: program.to_owned(), args: args.to_vec(), timeout: GPU_LOG_TIMEOUT };
            self.run(&exec)
        })
    }

    /// Whether the probe may run in this process.
    fn can_read_in_process(&self, probe: &Probe) -> bool {
        match probe {
            Probe::Kmsg | Probe::Processes | Probe::ClockDiscipline => true,
            Probe::Gpu { .. } => {
                !*self.may_have_driver.get_or_init(|| gpus::may_have_driver(&self.root, &self.library))
            }
            Probe::Read { path }
            | Probe::List { path }
            | Probe::StatFs { path }
            | Probe::Glob { pattern: path }
            | Probe::Links { pattern: path }
            | Probe::Bytes { pattern: path, .. } => {
                let fixed = path.split('*').next().unwrap_or_default();
                self.mounts.get_or_init(Mounts::now).is_local(&reader::path_on_machine(&self.root, fixed))
            }
            // DCGM's library starts threads and may wait for an engine that hangs in the driver.
            Probe::DcgmHealth { .. }
            | Probe::Sampled { .. }
            | Probe::Exec { .. }
            | Probe::ExecIfExists { .. }
            | Probe::Builtin { .. } => false,
        }
    }

    /// Returns one output per probe, or fewer after a stop request.
    fn read_in_process(&self, probes: &[Probe]) -> Vec<ProbeOutput> {
        if self.stop.requested().is_some() {
            return Vec::new();
        }
        let (root, library) = (self.root.clone(), self.library.clone());
        let make = move || {
            let mut reader = Reader::new(&root, &library);
            move |probe: &Probe| reader.read_probe(probe)
        };
        let outputs = watchdog::read_all(probes, timeout_for, make, || self.stop.requested().is_some());
        let or_failure =
            |(probe, output): (&Probe, Result<_, _>)| output.unwrap_or_else(|reason| no_answer(probe, reason));
        probes.iter().zip(outputs).map(or_failure).collect()
    }

    /// Adds the fields of these probes, and returns a probe for all fields if there are new ones.
    fn add_driver_fields(&self, probes: &[Probe]) -> Option<Probe> {
        let mut driver_fields = self.driver_fields.borrow_mut();
        let before = driver_fields.len();
        for probe in probes {
            if let Probe::Gpu { fields } = probe {
                let new: Vec<_> = fields.iter().filter(|field| !driver_fields.contains(field)).cloned().collect();
                driver_fields.extend(new);
            }
        }
        (driver_fields.len() > before).then(|| {
            *self.driver.borrow_mut() = None;
            Probe::Gpu { fields: driver_fields.clone() }
        })
    }

    fn stopped_output(&self, what: &str) -> ProbeOutput {
        self.explain(what, Ok(ChildOutcome::Stopped(self.stop.requested().unwrap_or(StopReason::Signal))), Span::ZERO)
    }

    /// Reads the current values and returns them with the earlier samples.
    fn sample(&self, pattern: &str, keep: Span) -> ProbeOutput {
        let glob = Probe::glob(pattern);
        let files = match self.read(&glob, &describe(&glob)) {
            ProbeOutput::Files(files) => files,
            other => return other,
        };
        match self.sample_time.get_or_init(|| self.read_clock()) {
            Some(at) => ProbeOutput::Samples(self.samples.add(pattern, keep, *at, files)),
            None => failed(FailureKind::Unparseable, format!("{pattern}: cannot parse /proc/uptime")),
        }
    }

    fn read_clock(&self) -> Option<(Timestamp, Span)> {
        let uptime = Probe::read(UPTIME);
        let ProbeOutput::Text(text) = self.read(&uptime, &describe(&uptime)) else { return None };
        let up: f64 = text.split(' ').next()?.parse().ok()?;
        Some((now(), Span::from_millis((up * 1000.0) as i64)))
    }
}

impl ProbeRunner for LocalRunner<'_> {
    fn prepare(&self, probes: &[Probe]) {
        let mut seen: HashSet<Probe> = self.cache.borrow().keys().cloned().collect();
        let mut ahead = Vec::new();
        for probe in probes.iter().filter_map(read_for).chain([Probe::read(UPTIME)]) {
            if seen.insert(probe.clone()) {
                ahead.push(probe);
            }
        }
        let driver_probe = self.add_driver_fields(probes);
        // The driver answers while files are read. A failure here is returned by the query itself.
        let helper_probe = driver_probe.as_ref().filter(|probe| !self.can_read_in_process(probe));
        if let Some(Probe::Gpu { fields }) = helper_probe {
            let _begun = self.driver_helper.begin(&self.driver_request(fields));
        }
        ahead.extend(driver_probe.iter().filter(|_| helper_probe.is_none()).cloned());
        ahead.retain(|probe| self.can_read_in_process(probe) && self.abandoned.hanging(&describe(probe)).is_none());
        let outputs = self.read_in_process(&ahead);
        for (probe, output) in ahead.into_iter().zip(outputs) {
            let output = self.or_nvidia_smi(&probe, output);
            match probe {
                Probe::Gpu { .. } => *self.driver.borrow_mut() = Some(output),
                _ => drop(self.cache.borrow_mut().insert(probe, output)),
            }
        }
    }

    fn run(&self, probe: &Probe) -> ProbeOutput {
        let what = describe(probe);
        // The driver helper tracks its own hangs.
        let hanging = (!matches!(probe, Probe::Gpu { .. })).then(|| self.abandoned.hanging(&what)).flatten();
        if let Some(pid) = hanging {
            return failed(
                FailureKind::Abandoned,
                format!("{what}: process {pid} still hangs from an earlier attempt"),
            );
        }
        match probe {
            Probe::Exec { program, args, timeout } => self.exec(program, args, *timeout),
            Probe::ExecIfExists { path, program, args, timeout } => {
                match reader::path_on_machine(&self.root, path).try_exists() {
                    Ok(true) => self.exec(program, args, *timeout),
                    Ok(false) => failed(FailureKind::Missing, format!("{path} does not exist")),
                    Err(error) => failed(kind_of(&error), format!("{path}: {error}")),
                }
            }
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

/// Returns the file-system part of a probe.
fn read_for(probe: &Probe) -> Option<Probe> {
    match probe {
        Probe::Exec { .. } | Probe::ExecIfExists { .. } | Probe::Builtin { .. } | Probe::Gpu { .. } => None,
        Probe::Sampled { pattern, .. } => Some(Probe::glob(pattern)),
        other => Some(other.clone()),
    }
}

fn no_answer(probe: &Probe, reason: NoAnswer) -> ProbeOutput {
    let what = describe(probe);
    match reason {
        NoAnswer::Hangs => {
            let limit = Span::from_millis(timeout_for(probe).as_millis() as i64);
            failed(FailureKind::TimedOut, format!("{what}: no answer within {limit}; the read was abandoned"))
        }
        NoAnswer::NoThread => failed(FailureKind::Failed, format!("{what}: the reader thread failed")),
    }
}

const fn timeout_for(probe: &Probe) -> Duration {
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
