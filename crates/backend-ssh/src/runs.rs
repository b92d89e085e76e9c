//! Starts, finds and cancels runs on hosts. A multi-node run has one part on each host, under the same id.
//!
//! All hosts of a run must respond before any part starts, and a part that cannot start cancels the others: alone they would wait
//! for it until their time limit. [`super::multi_node`] combines the states of the parts.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Component,
    time::Duration,
};

use doctor_backend::{
    BackendError, JobOutput, JobRequest, PolledJob,
    ssh::{Host, remote_program::RequestError},
    trusted_file,
};
use doctor_core::{
    ids::{JobId, NodeName, RunId},
    last_output::LastOutput,
    run::{NonEmpty, ObservedJobState},
};
use doctor_host::{
    jobs::JobRemains,
    protocol::{HostRequest, HostResponse, HostStatus, MultiNode, Outputs, RunStatus, StartRun},
};

use super::{
    SshBackend,
    backend::{locked, permanent_error, retryable_error, unexpected_answer, unknown_effect_error},
    multi_node::combined_state,
};

const SUBMIT: &str = "submit";
const CANCEL: &str = "cancel";

/// Where a run is.
enum RunLocation {
    /// It has a part on each of these hosts, or will have one.
    Hosts(RunHosts),
    Absent,
    /// No responding host has it, and some hosts do not respond.
    Unknown(String),
}

/// The hosts of a run.
struct RunHosts {
    present: Vec<Host>,
    /// The number of hosts that are no longer configured. Their parts cannot be found any more: they are lost.
    removed: usize,
}

impl SshBackend {
    pub(super) fn submit_run(&self, job: &JobRequest) -> Result<JobId, BackendError> {
        let requests = self.start_requests(job)?;
        let hosts: Vec<Host> = requests.values().map(|(host, _)| host.clone()).collect();
        let recorded = self.journal.write(job.run, &job.nodes);
        let recorded = recorded.map_err(|error| retryable_error(SUBMIT, error.to_string()))?;
        if recorded != job.nodes {
            let names = recorded.iter().map(NodeName::as_str).collect::<Vec<_>>().join(", ");
            return Err(permanent_error(SUBMIT, format!("run {} is already on {names}", job.run)));
        }
        if hosts.len() > 1 {
            self.check_all_respond(&hosts)?;
        }
        let start =
            |host: &Host| requests.get(&host.name).map(|(_, request)| self.request(host, request, Duration::ZERO));
        let responses = self.run_on_each(&hosts, start);
        let mut started = None;
        for (host, response) in responses.into_iter().filter_map(|(host, response)| Some((host, response?))) {
            match started_job(&host, response) {
                Ok(job) => started = Some(job),
                Err(error) if hosts.len() == 1 => return Err(error),
                Err(error) => return Err(self.cancel_other_parts(job.run, &hosts, &error)),
            }
        }
        started.ok_or_else(|| permanent_error(SUBMIT, "the run names no host".to_owned()))
    }

    /// Checks that all hosts respond, before anything starts. One that does not may respond later.
    fn check_all_respond(&self, hosts: &[Host]) -> Result<(), BackendError> {
        let responses = self.run_on_each(hosts, |host| self.query_host(host, Vec::new()));
        let unreachable =
            responses.into_iter().find_map(|(host, status)| status.err().map(|why| format!("{}: {why}", host.name)));
        unreachable.map_or(Ok(()), |text| Err(retryable_error(SUBMIT, text)))
    }

    /// Cancels the other parts after one could not start. Once they have ended, this run can never be complete, and a new one may
    /// start.
    fn cancel_other_parts(&self, run: RunId, hosts: &[Host], error: &BackendError) -> BackendError {
        match self.cancel_on(run, hosts) {
            Ok(()) => permanent_error(SUBMIT, format!("{}; the other parts of the run were cancelled", error.text)),
            Err(other) => {
                unknown_effect_error(SUBMIT, format!("{}; cancelling another part failed: {}", error.text, other.text))
            }
        }
    }

    fn start_requests(&self, job: &JobRequest) -> Result<BTreeMap<NodeName, (Host, HostRequest)>, BackendError> {
        if job.outputs.len() != job.nodes.len() {
            return Err(permanent_error(SUBMIT, "each host of a run needs one output".to_owned()));
        }
        let policy = self.policy.as_deref().map(trusted_file::read_to_string).transpose();
        let policy = policy.map_err(|error| retryable_error(SUBMIT, format!("the policy file: {error}")))?;
        let hosts = job.nodes.iter().map(|node| self.host(SUBMIT, node)).collect::<Result<Vec<_>, _>>()?;
        let rendezvous = match &*hosts {
            [first, _, ..] => Some(self.rendezvous(first)?),
            _ => None,
        };
        let mut requests = BTreeMap::new();
        for host in hosts {
            let missing = || permanent_error(SUBMIT, format!("{} has no output", host.name));
            let output = job.outputs.iter().find(|output| output.node == host.name).ok_or_else(missing)?;
            let multi_node = rendezvous.as_ref().map(|rendezvous| MultiNode {
                nodes: job.nodes.clone(),
                rendezvous: rendezvous.clone(),
                secret: job.key.rendezvous_secret(),
            });
            let start = StartRun {
                run: job.run,
                node: host.name.clone(),
                tests: job.tests.clone(),
                limit: job.limit,
                key: job.key.to_hex(),
                outputs: self.outputs(output)?,
                policy: policy.clone(),
                multi_node,
                status_query: self.query_params(Vec::new()),
                max_load_per_core: self.config.max_load_per_core,
            };
            requests.insert(host.name.clone(), (host, HostRequest::Start(Box::new(start))));
        }
        Ok(requests)
    }

    /// Returns the address at which the other hosts of a multi-node run reach the first.
    fn rendezvous(&self, first: &Host) -> Result<String, BackendError> {
        let address =
            self.requester.address(first).map_err(|why| retryable_error(SUBMIT, format!("{}: {why}", first.name)))?;
        let port = self.config.rendezvous_port;
        Ok(if address.contains(':') { format!("[{address}]:{port}") } else { format!("{address}:{port}") })
    }

    /// Returns the output paths on the host. `None`: there is no shared directory.
    fn outputs(&self, output: &JobOutput) -> Result<Option<Outputs>, BackendError> {
        for path in output.logs.iter().chain([&output.document]) {
            if !path.components().all(|part| matches!(part, Component::Normal(_))) {
                return Err(permanent_error(SUBMIT, format!("{} leads out of the shared directory", path.display())));
            }
        }
        Ok(self.config.share.as_ref().map(|share| Outputs {
            logs: output.logs.iter().map(|log| share.join(log)).collect(),
            document: share.join(&output.document),
        }))
    }

    /// Finds the hosts of each run: from the journal, otherwise from what the controller has recorded, because a run whose
    /// submission was interrupted is on its own hosts or nowhere. Only a run of which neither knows is looked for on all hosts.
    fn locate_runs(
        &self,
        operation: &'static str,
        runs: &[RunId],
    ) -> Result<BTreeMap<RunId, RunLocation>, BackendError> {
        let mut locations = BTreeMap::new();
        let mut unrecorded = Vec::new();
        for run in runs {
            let journal = self.journal.hosts_of(*run).map_err(|error| retryable_error(operation, error.to_string()))?;
            match journal.or_else(|| locked(&self.recorded).get(run).cloned()) {
                Some(nodes) => drop(locations.insert(*run, self.location_of(&nodes))),
                None => unrecorded.push(*run),
            }
        }
        if unrecorded.is_empty() {
            return Ok(locations);
        }
        let responses = self.run_on_each(&self.all(), |host| self.query_host(host, unrecorded.clone()));
        for run in unrecorded {
            locations.insert(run, self.location_from_answers(run, &responses));
        }
        Ok(locations)
    }

    fn location_of(&self, nodes: &[NodeName]) -> RunLocation {
        let hosts = locked(&self.hosts);
        let present: Vec<Host> = nodes.iter().filter_map(|node| hosts.get(node).cloned()).collect();
        let removed = nodes.len() - present.len();
        if present.is_empty() { RunLocation::Absent } else { RunLocation::Hosts(RunHosts { present, removed }) }
    }

    /// Determines the location of a run from the hosts' answers. Each host knows the other hosts of the run.
    fn location_from_answers(&self, run: RunId, responses: &[(Host, Result<HostStatus, String>)]) -> RunLocation {
        let has_it = |part: &&RunStatus| part.run == run && part.job != ObservedJobState::Absent;
        let nodes_of_run = responses.iter().find_map(|(host, status)| {
            let part = status.as_ref().ok()?.runs.iter().find(has_it)?;
            Some(NonEmpty::new(part.nodes.clone()).unwrap_or_else(|| NonEmpty::one(host.name.clone())))
        });
        if let Some(nodes) = nodes_of_run {
            self.journal.record_found(run, &nodes);
            return self.location_of(&nodes);
        }
        let mut unreachable = responses.iter().filter(|(_, status)| status.is_err()).map(|(host, _)| &host.name);
        match unreachable.next() {
            None => RunLocation::Absent,
            Some(first) => {
                RunLocation::Unknown(format!("hosts that do not answer: {}, first {first}", unreachable.count() + 1))
            }
        }
    }

    pub(super) fn poll_runs(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        let locations = self.locate_runs("poll", runs)?;
        let parts = self.query_parts(&locations);
        let job_of = |run: &RunId| match locations.get(run) {
            Some(RunLocation::Hosts(hosts)) => combined_job(*run, hosts, &parts),
            Some(RunLocation::Absent) => without_documents(ObservedJobState::Absent),
            Some(RunLocation::Unknown(why)) => without_documents(ObservedJobState::Unknown { why: why.clone() }),
            None => without_documents(ObservedJobState::Unknown { why: "it was not queried".to_owned() }),
        };
        let jobs = runs.iter().map(job_of).collect();
        self.cache_logs(runs, parts);
        Ok(jobs)
    }

    /// Returns the state of each part; each host is queried once.
    fn query_parts(&self, locations: &BTreeMap<RunId, RunLocation>) -> BTreeMap<(RunId, NodeName), RunStatus> {
        let mut by_host: BTreeMap<NodeName, (Host, Vec<RunId>)> = BTreeMap::new();
        for (run, location) in locations {
            let RunLocation::Hosts(hosts) = location else { continue };
            for host in &hosts.present {
                by_host.entry(host.name.clone()).or_insert_with(|| (host.clone(), Vec::new())).1.push(*run);
            }
        }
        let hosts: Vec<Host> = by_host.values().map(|(host, _)| host.clone()).collect();
        let runs_of = |host: &Host| by_host.get(&host.name).map(|(_, runs)| runs.clone()).unwrap_or_default();
        let mut parts = BTreeMap::new();
        for (host, result) in self.run_on_each(&hosts, |host| self.query_host(host, runs_of(host))) {
            let statuses = result.map(|status| status.runs).unwrap_or_else(|why| {
                let unknown = |run| {
                    RunStatus::without_result(run, ObservedJobState::Unknown { why: format!("{}: {why}", host.name) })
                };
                runs_of(&host).into_iter().map(unknown).collect()
            });
            parts.extend(statuses.into_iter().map(|part| ((part.run, host.name.clone()), part)));
        }
        parts
    }

    /// Keeps logs, and what is left of jobs without a document, while their runs are polled.
    fn cache_logs(&self, runs: &[RunId], seen: BTreeMap<(RunId, NodeName), RunStatus>) {
        let polled: BTreeSet<&RunId> = runs.iter().collect();
        let (mut logs, mut remains) = (locked(&self.logs), locked(&self.remains));
        logs.retain(|(run, _), _| polled.contains(run));
        remains.retain(|(run, _), _| polled.contains(run));
        for (part, seen) in seen {
            remains.extend(seen.remains.map(|left| (part.clone(), left)));
            logs.extend(seen.log.map(|log| (part, log)));
        }
    }

    /// Returns what is left of a run's job on each host, from the last poll: a job that ends is polled before its run ends.
    pub(super) fn remains_of(&self, run: RunId) -> Vec<LastOutput> {
        let remains = locked(&self.remains);
        let of_run = remains.iter().filter(|((of, _), _)| *of == run);
        let output = |node: &NodeName, left: &JobRemains| LastOutput {
            node: node.clone(),
            ending: left.ending.clone(),
            text: left.text.clone(),
        };
        of_run.map(|((_, node), left)| output(node, left)).collect()
    }

    pub(super) fn logs_of(&self, run: RunId) -> Vec<(NodeName, String)> {
        let logs = locked(&self.logs);
        let of_run = logs.iter().filter(|((of, _), _)| *of == run);
        of_run.map(|((_, node), text)| (node.clone(), text.clone())).collect()
    }

    pub(super) fn cancel_run(&self, run: RunId) -> Result<(), BackendError> {
        match self.locate_runs(CANCEL, &[run])?.remove(&run) {
            Some(RunLocation::Hosts(hosts)) => self.cancel_on(run, &hosts.present),
            Some(RunLocation::Absent) | None => Ok(()),
            Some(RunLocation::Unknown(why)) => Err(unknown_effect_error(CANCEL, why)),
        }
    }

    /// Cancels the run on every host, even if one of them fails.
    fn cancel_on(&self, run: RunId, hosts: &[Host]) -> Result<(), BackendError> {
        let grace = self.config.grace;
        let cancel = |host: &Host| self.request(host, &HostRequest::Cancel { run, grace }, grace.to_std());
        let results = self.run_on_each(hosts, cancel).into_iter().map(|(host, response)| match response {
            Ok(HostResponse::Done) => Ok(()),
            other => Err(unexpected_answer(CANCEL, &host, other)),
        });
        results.collect::<Vec<_>>().into_iter().collect()
    }
}

fn started_job(host: &Host, response: Result<HostResponse, RequestError>) -> Result<JobId, BackendError> {
    match response {
        Ok(HostResponse::Started(
            ObservedJobState::Pending { job, .. }
            | ObservedJobState::Running { job, .. }
            | ObservedJobState::Ended { job, .. },
        )) => Ok(job),
        // The next snapshot shows the user who came meanwhile, and the planner gives up the run.
        Ok(HostResponse::InUse { by }) => Err(retryable_error(SUBMIT, format!("{}: {by}", host.name))),
        Ok(HostResponse::Started(state)) => {
            Err(unknown_effect_error(SUBMIT, format!("{}: the run is {state:?}", host.name)))
        }
        other => Err(unexpected_answer(SUBMIT, host, other)),
    }
}

fn combined_job(run: RunId, hosts: &RunHosts, statuses: &BTreeMap<(RunId, NodeName), RunStatus>) -> PolledJob {
    let part = |host: &Host| statuses.get(&(run, host.name.clone()));
    let unreported = |host: &Host| ObservedJobState::Unknown { why: format!("{} did not report the run", host.name) };
    let seen = |host: &Host| part(host).map_or_else(|| unreported(host), |status| status.job.clone());
    let lost = std::iter::repeat_n(ObservedJobState::Absent, hosts.removed);
    let parts: Vec<ObservedJobState> = hosts.present.iter().map(seen).chain(lost).collect();
    let documents = hosts.present.iter().filter_map(|host| part(host)?.document.clone()).map(String::into_bytes);
    PolledJob { state: combined_state(&parts), documents: documents.collect() }
}

const fn without_documents(state: ObservedJobState) -> PolledJob {
    PolledJob { state, documents: Vec::new() }
}
