//! This machine as a one-node cluster: runs real jobs and needs no installation. `README.md` beside this file defines when it is
//! free, and the limits.

mod config;
#[doc(hidden)]
pub mod fuzz_targets;
mod inspect;
mod kind;
mod load;

use std::{
    ffi::OsString,
    fs, io,
    path::{Component, Path, PathBuf},
    process::Command,
    time::Instant,
};

use doctor_checks::{document::RunKey, result_transport::URL_VARIABLE};
use doctor_core::{
    ids::{JobId, NodeName, OpId, RunId},
    last_output::LastOutput,
    node::{Node, Occupancy},
    run::{ObservedJobState, Run},
    snapshot::Capabilities,
    time::Timestamp,
};
use doctor_host::{
    jobs::{JobRemains, Jobs},
    marks::MarkFiles,
    parse_load_average, process,
    vendor_reports::{self, ReportProgress},
};

use super::{
    Backend, BackendError, Effect, JobOutput, JobRequest, MAX_REMAINING_OUTPUT, NodeOp, ObservedNode, PolledJob,
    program, state_directory,
};
use crate::clock::{Clock, SystemClock};
use load::OwnLoad;

pub use config::LocalConfig;
pub use kind::Local;

const OPEN: &str = "open the local backend";

fn check_load_limit(config: &LocalConfig) -> Result<(), BackendError> {
    if config.max_load_per_core.is_finite() && config.max_load_per_core > 0.0 {
        return Ok(());
    }
    let text = format!("`max_load_per_core` is {}, expected a number above 0, such as 0.7", config.max_load_per_core);
    Err(refused(OPEN, text))
}

#[derive(Debug)]
pub struct LocalBackend {
    config: LocalConfig,
    node: NodeName,
    jobs: Jobs,
    /// Report jobs, kept apart from runs.
    reports: Jobs,
    marks: MarkFiles,
    own_load: OwnLoad,
    cores: usize,
}

impl LocalBackend {
    /// Checks what [`Self::open`] would refuse, and that there is a program to run. Changes nothing.
    ///
    /// # Errors
    /// With the setting that is wrong.
    pub fn verify(config: &LocalConfig) -> Result<(), BackendError> {
        check_load_limit(config)?;
        state_directory::check_usable(&config.state).map_err(|text| refused(OPEN, text))?;
        program::find_executable(config.doctor_node.as_deref()).map(drop).map_err(|text| refused(OPEN, text))
    }

    pub fn open(config: LocalConfig) -> Result<Self, BackendError> {
        check_load_limit(&config)?;
        let failed = |error| try_again(OPEN, &error);
        // A job runs in another working directory, so its paths must be absolute.
        let config = LocalConfig {
            state: absolute(&config.state).map_err(failed)?,
            // Not touched: it may be on a file server that does not answer. Jobs create what is missing.
            share: std::path::absolute(&config.share).map_err(failed)?,
            ..config
        };
        let jobs = Jobs::open(&config.state, "local", config.start_limit).map_err(failed)?;
        let reports = Jobs::open(&config.state.join("reports"), "local", config.start_limit).map_err(failed)?;
        Ok(Self {
            node: config.node_name(),
            reports,
            marks: MarkFiles::new(&config.state),
            jobs,
            own_load: OwnLoad::default(),
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            config,
        })
    }

    pub const fn node(&self) -> &NodeName {
        &self.node
    }

    /// Determines whether other work uses the machine. Anything unreadable makes it unknown.
    fn occupancy(&self) -> io::Result<Occupancy> {
        if let Some(process) = self.jobs.unkillable_job()? {
            let why = format!("process {} of an earlier job hangs and cannot be killed", process.pid);
            return Ok(Occupancy::Unknown { why: why.into() });
        }
        if let Some(file) = &self.config.busy_file
            && file.try_exists()?
        {
            return Ok(Occupancy::Busy { by: format!("{} exists", file.display()).into() });
        }
        let file = &self.config.load_file;
        let text =
            fs::read_to_string(file).map_err(|error| io::Error::other(format!("{}: {error}", file.display())))?;
        let Some(load) = parse_load_average(&text) else {
            let why = format!("{} does not start with a load average", file.display());
            return Ok(Occupancy::Unknown { why: why.into() });
        };
        let threads = self.jobs.running()?.iter().map(process::running_threads).sum();
        let others = (load - self.own_load.follow(threads, Instant::now())).max(0.0);
        #[expect(clippy::cast_precision_loss, reason = "a count of cores")]
        let per_core = others / self.cores as f64;
        if per_core > self.config.max_load_per_core {
            let by = format!("load {per_core:.2} per core, limit {}", self.config.max_load_per_core);
            return Ok(Occupancy::Busy { by: by.into() });
        }
        Ok(Occupancy::Free)
    }

    fn check_node(&self, operation: &'static str, node: &NodeName) -> Result<(), BackendError> {
        if *node == self.node {
            return Ok(());
        }
        Err(refused(operation, format!("there is no node {node}; this machine is {}", self.node)))
    }

    fn command(&self, job: &JobRequest) -> Result<Command, BackendError> {
        let refuse = |text: String| refused("submit", text);
        let output = match (&*job.nodes, &*job.outputs) {
            ([node], [output]) if *node == self.node && output.node == self.node => output,
            _ => return Err(refuse(format!("a job of the local backend has one node, {}, and one output", self.node))),
        };
        let JobOutput { logs, document, .. } = output;
        for path in logs.iter().chain([document]) {
            if !path.components().all(|part| matches!(part, Component::Normal(_))) {
                return Err(refuse(format!("{} leads out of the shared directory", path.display())));
            }
        }
        let tests = job.tests.iter().map(|test| test.as_str()).collect::<Vec<_>>().join(",");
        let mut command = Command::new(program::find(self.config.doctor_node.as_deref()).map_err(refuse)?);
        command.arg("job").args(["--run", &job.run.to_string(), "--node", self.node.as_str(), "--tests", &tests]);
        for log in logs {
            command.arg("--log").arg(self.config.share.join(log));
        }
        command.arg("--document").arg(self.config.share.join(document));
        command.arg("--job-file").arg(self.jobs.job_file(job.run));
        command.arg("--state").arg(self.config.state.join("node"));
        command.arg("--limit").arg(job.limit.to_string());
        if let Some(policy) = &self.config.policy {
            command.arg("--policy").arg(policy);
        }
        give_key(&mut command, &job.key);
        if let Some(url) = &job.results {
            command.env(URL_VARIABLE, url);
        }
        Ok(command)
    }
}

impl Backend for LocalBackend {
    fn name(&self) -> &str {
        "local"
    }

    fn caps(&self) -> Capabilities {
        Capabilities { mark: true, drain: true, ..Capabilities::NONE }
    }

    fn snapshot(&self) -> Result<Vec<ObservedNode>, BackendError> {
        let marks = self.marks.read().map_err(|error| try_again("read the marks", &error))?;
        let occupancy = self.occupancy().unwrap_or_else(|error| Occupancy::Unknown { why: error.to_string().into() });
        let node = Node {
            name: self.node.clone(),
            pool: LocalConfig::pool(),
            occupancy,
            marks,
            // The job's result reports it.
            hardware: None,
            sku: self.config.sku.clone(),
            declared: None,
            overrides: None,
        };
        let jobs = self.jobs.active_runs(now()).map_err(|error| try_again("read the jobs", &error))?;
        Ok(vec![ObservedNode { node: node.into(), agent_last_seen: None, jobs }])
    }

    fn submit(&self, job: &JobRequest) -> Result<JobId, BackendError> {
        let command = self.command(job)?;
        let now = now();
        self.jobs.prune(now).map_err(|error| try_again("submit", &error))?;
        // Once the intent is written, the job may exist. Submitting again is safe and returns it.
        self.jobs.start(job.run, command, now).map_err(|error| unknown("submit", &error))?;
        Ok(self.jobs.id(job.run))
    }

    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        let job_of = |run: &RunId| {
            let seen = self.jobs.state(*run, now());
            let seen = seen.unwrap_or_else(|error| ObservedJobState::Unknown { why: error.to_string() });
            PolledJob { state: seen, documents: Vec::new() }
        };
        Ok(runs.iter().map(job_of).collect())
    }

    fn remaining_output(&self, run: &Run) -> Result<Vec<LastOutput>, BackendError> {
        let remains = self.jobs.remains(run.id, MAX_REMAINING_OUTPUT);
        let remains = remains.map_err(|error| try_again("read the output of a job", &error))?;
        let output = |JobRemains { ending, text }| LastOutput { node: self.node.clone(), ending, text };
        Ok(remains.map(output).into_iter().collect())
    }

    fn cancel(&self, run: RunId) -> Result<(), BackendError> {
        self.jobs.cancel(run, self.config.grace, now()).map_err(|error| unknown("cancel", &error))
    }

    fn collect_report(&self, node: &NodeName, op: OpId) -> ReportProgress {
        let failed = |text: String| ReportProgress::Failed { text };
        if *node != self.node {
            return failed(format!("there is no node {node}; this machine is {}", self.node));
        }
        let program = match program::find(self.config.doctor_node.as_deref()) {
            Ok(program) => program,
            Err(why) => return failed(why),
        };
        let start = |args: &[OsString], _| {
            let mut command = Command::new(program);
            command.args(args);
            Ok(command)
        };
        vendor_reports::report(&self.reports, op, now(), start).unwrap_or_else(|error| failed(error.to_string()))
    }

    fn apply(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        let operation = "change the node";
        self.check_node(operation, node)?;
        let Some(mark) = change.what.as_mark() else {
            return Err(refused(operation, format!("the local backend does not support {}", change.what.step())));
        };
        self.marks.apply(change.op, &mark).map(drop).map_err(|error| unknown(operation, &error))
    }
}

/// Passes the key in the environment: every user of the machine can read arguments.
fn give_key(command: &mut Command, key: &RunKey) {
    command.env("DOCTOR_RUN_KEY", key.to_hex());
}

fn absolute(path: &Path) -> io::Result<PathBuf> {
    fs::create_dir_all(path)?;
    path.canonicalize()
}

fn now() -> Timestamp {
    SystemClock.now()
}

fn refused(operation: &'static str, text: String) -> BackendError {
    BackendError { operation, text, effect: Effect::NotAppliedPermanent }
}

fn try_again(operation: &'static str, error: &io::Error) -> BackendError {
    BackendError { operation, text: error.to_string(), effect: Effect::NotAppliedRetry }
}

fn unknown(operation: &'static str, error: &io::Error) -> BackendError {
    BackendError { operation, text: error.to_string(), effect: Effect::Unknown }
}
