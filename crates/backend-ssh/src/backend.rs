//! The SSH backend itself: queries many hosts concurrently. It keeps only the journal of runs, each host's last answer, logs, and
//! which hosts are silent ([`super::silent_hosts`]).

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use doctor_backend::{
    Backend, BackendError, Effect, JobRequest, NodeOp, ObservedNode, PolledJob,
    clock::{Clock, SystemClock},
    deadline, program,
    ssh::{
        Host, SshConfig,
        remote_program::{HostRequester, RequestError},
    },
    state_directory, trusted_file,
};
use doctor_core::{
    ids::{JobId, NodeName, OpId, RunId},
    last_output::LastOutput,
    node::{Hardware, Marks, Node, Occupancy},
    run::Run,
    snapshot::Capabilities,
};
use doctor_host::{
    jobs::JobRemains,
    marks::MarkChange,
    occupancy::occupancy,
    protocol::{HostRequest, HostResponse, HostStatus, StatusQuery},
    vendor_reports::ReportProgress,
};

use super::{
    query_order::{QueryOrder, each},
    run_journal::{Hosts, RunJournal},
    silent_hosts::{PROMPT, Probe, SilentHosts},
};

#[derive(Debug)]
pub struct SshBackend {
    pub(super) config: SshConfig,
    pub(super) requester: Arc<HostRequester>,
    silent: SilentHosts,
    order: QueryOrder,
    pub(super) journal: RunJournal,
    /// The nodes of the runs that the controller has recorded, submitted or not.
    pub(super) recorded: Mutex<BTreeMap<RunId, Hosts>>,
    /// The policy file for jobs.
    pub(super) policy: Option<PathBuf>,
    pub(super) hosts: Mutex<BTreeMap<NodeName, Host>>,
    /// The last answers of hosts, used while they do not respond.
    last_observations: Mutex<BTreeMap<NodeName, LastObservation>>,
    /// Logs of ended runs, kept while the runs are polled.
    pub(super) logs: Mutex<BTreeMap<(RunId, NodeName), String>>,
    /// What is left of ended jobs without a document, kept while the runs are polled.
    pub(super) remains: Mutex<BTreeMap<(RunId, NodeName), JobRemains>>,
}

#[derive(Debug, Clone, Default)]
struct LastObservation {
    /// `None`: the host has never reported them.
    marks: Option<Marks>,
    jobs: Vec<RunId>,
    boot_id: Option<String>,
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

const OPEN: &str = "open the SSH backend";

impl SshBackend {
    /// Checks what [`Self::open`] would refuse, that `ssh` is installed, and that there is a program to install on hosts. Contacts
    /// no host and changes nothing.
    ///
    /// # Errors
    /// With the setting that is wrong.
    pub fn verify(config: &SshConfig) -> Result<(), BackendError> {
        let permanent = |text: String| permanent_error(OPEN, text);
        config.check().map_err(|error| permanent(error.to_string()))?;
        config.read_hosts().map_err(|error| permanent(error.to_string()))?;
        Self::verify_programs(config)
    }

    /// The part of [`Self::verify`] that does not depend on the list of hosts.
    ///
    /// # Errors
    /// With the setting that is wrong.
    pub fn verify_programs(config: &SshConfig) -> Result<(), BackendError> {
        let permanent = |text: String| permanent_error(OPEN, text);
        if let Some(path) = &config.ssh_config {
            trusted_file::open(path).map_err(|error| permanent(format!("`ssh_config` {}: {error}", path.display())))?;
        }
        state_directory::check_usable(&config.state).map_err(|error| permanent(format!("`state`: {error}")))?;
        program::check_installed("ssh", None).map_err(permanent)?;
        program::find(config.doctor_node.as_deref()).map(drop).map_err(permanent)
    }

    /// Opens the backend. `policy` is the site's policy file. The first snapshot reports whether hosts respond.
    ///
    /// # Errors
    /// If the settings are invalid, there is no program to install on hosts, or our own files cannot be read.
    pub fn open(config: SshConfig, policy: Option<&Path>) -> Result<Self, BackendError> {
        let permanent = |text: String| permanent_error(OPEN, text);
        config.check().map_err(|error| permanent(error.to_string()))?;
        let hosts = config.read_hosts().map_err(|error| permanent(error.to_string()))?;
        let sockets = config.state.join("c");
        let io_error = |error: io::Error| permanent(format!("{}: {error}", config.state.display()));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&sockets).map_err(io_error)?;
        let journal = RunJournal::open(&config.state, SystemClock.now()).map_err(io_error)?;
        let requester = Arc::new(HostRequester::new(&config, Some(&sockets)).map_err(permanent)?);
        let silent = SilentHosts::new(config.parallel, probe_limit(&config), probe(&config, &requester));
        Ok(Self {
            config,
            requester,
            silent,
            order: QueryOrder::default(),
            journal,
            recorded: Mutex::default(),
            policy: policy.map(Path::to_owned),
            hosts: Mutex::new(by_name(hosts)),
            last_observations: Mutex::default(),
            logs: Mutex::default(),
            remains: Mutex::default(),
        })
    }

    pub(super) fn host(&self, operation: &'static str, node: &NodeName) -> Result<Host, BackendError> {
        let found = locked(&self.hosts).get(node).cloned();
        found.ok_or_else(|| permanent_error(operation, format!("there is no host {node}; check `hostfile` or `hosts`")))
    }

    /// Replaces the list of hosts. What is known of hosts that are no longer in it is forgotten.
    pub(super) fn replace_hosts(&self, hosts: Vec<Host>) {
        let hosts = by_name(hosts);
        self.silent.retain(|host| hosts.get(&host.name) == Some(host));
        self.order.retain(|name| hosts.contains_key(name));
        locked(&self.last_observations).retain(|name, _| hosts.contains_key(name));
        *locked(&self.hosts) = hosts;
    }

    pub(super) fn all(&self) -> Vec<Host> {
        locked(&self.hosts).values().cloned().collect()
    }

    /// Builds the parameters of a query: what counts as use of a host, and these runs.
    pub(super) fn query_params(&self, runs: Vec<RunId>) -> StatusQuery {
        query_params(&self.config, runs)
    }

    /// Sends a request to a host, unless it is silent. `extra_time` is added to the deadline.
    pub(super) fn request(
        &self,
        host: &Host,
        request: &HostRequest,
        extra_time: Duration,
    ) -> Result<HostResponse, RequestError> {
        if let Some(why) = self.silent.why(host) {
            return Err(RequestError::NotSent(why));
        }
        let begun = Instant::now();
        let response = self.requester.request(host, request, extra_time);
        let took = begun.elapsed();
        let reads = matches!(request, HostRequest::Status(_));
        if reads {
            self.order.record(host, begun, took, response.is_ok() || !deadline::is_over());
        }
        // The end of the call cut the request short: a host that is only slow may have been asked last.
        let enough = if deadline::is_over() { self.config.connect.to_std().max(PROMPT) } else { PROMPT };
        match &response {
            // A cancelled request says nothing about the host.
            Err(_) if deadline::is_cancelled() => {}
            // A change may take its time on a host that answers.
            Err(RequestError::OutcomeUnknown(_)) if !reads => {}
            Err(error) if took >= enough => self.silent.record(host, error.text()),
            _ => {}
        }
        response
    }

    /// Records a mark change that a host has made, in case it stops responding.
    pub(super) fn record_mark(&self, node: &NodeName, change: &MarkChange) {
        let mut all = locked(&self.last_observations);
        let Some(marks) = all.get_mut(node).and_then(|last| last.marks.as_mut()) else { return };
        let (kind, set) = match change {
            MarkChange::Mark(mark) => (mark.kind, Some(mark.clone())),
            MarkChange::Unmark(kind) => (*kind, None),
        };
        marks.ours.retain(|mark| mark.kind != kind);
        marks.ours.extend(set);
    }

    /// Queries a host, including these runs. `Err` is why it could not be queried.
    pub(super) fn query_host(&self, host: &Host, runs: Vec<RunId>) -> Result<HostStatus, String> {
        match self.request(host, &HostRequest::Status(self.query_params(runs)), Duration::ZERO) {
            Ok(HostResponse::Status(status)) => Ok(*status),
            Ok(HostResponse::Failed { text }) => Err(text),
            Ok(
                HostResponse::Started(_)
                | HostResponse::InUse { .. }
                | HostResponse::Done
                | HostResponse::Repair(_)
                | HostResponse::Report(_),
            ) => Err("unexpected answer".to_owned()),
            Err(why) => Err(why.text().to_owned()),
        }
    }

    /// Calls `work` for each host with bounded concurrency, and returns the results sorted by host name.
    pub(super) fn run_on_each<T: Send>(&self, hosts: &[Host], work: impl Fn(&Host) -> T + Sync) -> Vec<(Host, T)> {
        let workers = self.config.parallel;
        each(&self.order.queues(hosts, workers), workers, work)
    }

    fn observed_node(&self, host: &Host, result: Result<HostStatus, String>) -> ObservedNode {
        let mut all = locked(&self.last_observations);
        let last = all.entry(host.name.clone()).or_default();
        let occupancy = match result {
            Ok(status) => {
                let occupancy = occupancy(&status, self.config.max_load_per_core);
                let boot_id = Some(status.boot_id).filter(|id| !id.is_empty());
                *last = LastObservation { marks: Some(status.marks), jobs: status.active_runs, boot_id };
                occupancy
            }
            Err(why) => Occupancy::Unknown { why: why.into() },
        };
        // The result of a job reports the rest of the hardware.
        let hardware = last.boot_id.clone().map(|id| Hardware { boot_id: Some(id), ..Hardware::default() });
        let node = Node {
            name: host.name.clone(),
            pool: self.config.pool.clone(),
            occupancy,
            marks: last.marks.clone().unwrap_or_default(),
            hardware: hardware.map(Arc::new),
            sku: self.config.sku.clone(),
            // Host files do not say which hardware a host has.
            declared: None,
            overrides: None,
        };
        ObservedNode { node: node.into(), agent_last_seen: None, jobs: last.jobs.clone() }
    }
}

fn query_params(config: &SshConfig, runs: Vec<RunId>) -> StatusQuery {
    StatusQuery { runs, locks: config.locks.clone(), ignored_programs: config.bystanders.clone() }
}

/// The longest time for asking a silent host: it may have to be given the program first.
fn probe_limit(config: &SshConfig) -> Duration {
    (config.connect.to_std() + config.deadline.to_std()) * 2 + config.connect.to_std() + config.copy.to_std()
}

/// Returns how a silent host is asked.
fn probe(config: &SshConfig, requester: &Arc<HostRequester>) -> Probe {
    let (config, requester) = (config.clone(), Arc::clone(requester));
    Arc::new(move |host| {
        let request = HostRequest::Status(query_params(&config, Vec::new()));
        requester.request(host, &request, Duration::ZERO).map(drop).map_err(|error| error.text().to_owned())
    })
}

impl Backend for SshBackend {
    fn name(&self) -> &str {
        "ssh"
    }

    fn caps(&self) -> Capabilities {
        let (reset, reboot) = (!self.config.reset.is_empty(), !self.config.reboot.is_empty());
        Capabilities { mark: true, drain: true, reset, reboot, ..Capabilities::NONE }
    }

    fn snapshot(&self) -> Result<Vec<ObservedNode>, BackendError> {
        let hosts = self.config.read_hosts().map_err(|error| retryable_error("query the hosts", error.to_string()))?;
        self.replace_hosts(hosts);
        let answers = self.run_on_each(&self.all(), |host| self.query_host(host, Vec::new()));
        Ok(answers.into_iter().map(|(host, result)| self.observed_node(&host, result)).collect())
    }

    fn set_recorded_runs(&self, runs: &[&Run]) {
        *locked(&self.recorded) = runs.iter().map(|run| (run.id, run.nodes.clone())).collect();
    }

    fn nodes_with_unread_marks(&self) -> Vec<NodeName> {
        let (hosts, last) = (locked(&self.hosts), locked(&self.last_observations));
        let marks_known = |name: &NodeName| last.get(name).is_some_and(|last| last.marks.is_some());
        hosts.keys().filter(|name| !marks_known(name)).cloned().collect()
    }

    fn submit(&self, job: &JobRequest) -> Result<JobId, BackendError> {
        self.submit_run(job)
    }

    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        self.poll_runs(runs)
    }

    fn logs(&self, run: RunId) -> Vec<(NodeName, String)> {
        self.logs_of(run)
    }

    fn remaining_output(&self, run: &Run) -> Result<Vec<LastOutput>, BackendError> {
        Ok(self.remains_of(run.id))
    }

    fn cancel(&self, run: RunId) -> Result<(), BackendError> {
        self.cancel_run(run)
    }

    fn collect_report(&self, node: &NodeName, op: OpId) -> ReportProgress {
        self.collect_report_from(node, op)
    }

    fn apply(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        self.apply_change(node, change)
    }
}

fn by_name(hosts: Vec<Host>) -> BTreeMap<NodeName, Host> {
    hosts.into_iter().map(|host| (host.name.clone(), host)).collect()
}

/// Builds the error for an unexpected answer of a host.
pub(super) fn unexpected_answer(
    operation: &'static str,
    host: &Host,
    response: Result<HostResponse, RequestError>,
) -> BackendError {
    let named = |text: &str| format!("{}: {text}", host.name);
    match response {
        Err(RequestError::NotSent(text)) => retryable_error(operation, named(&text)),
        Err(RequestError::OutcomeUnknown(text)) | Ok(HostResponse::Failed { text }) => {
            unknown_effect_error(operation, named(&text))
        }
        Ok(_) => unknown_effect_error(operation, named("unexpected answer")),
    }
}

pub(super) const fn permanent_error(operation: &'static str, text: String) -> BackendError {
    BackendError { operation, text, effect: Effect::NotAppliedPermanent }
}

pub(super) const fn retryable_error(operation: &'static str, text: String) -> BackendError {
    BackendError { operation, text, effect: Effect::NotAppliedRetry }
}

pub(super) const fn unknown_effect_error(operation: &'static str, text: String) -> BackendError {
    BackendError { operation, text, effect: Effect::Unknown }
}
