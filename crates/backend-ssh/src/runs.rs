//! Starts, finds and cancels runs on hosts. A multi-node run has one part on each host, under the same id.
//!
//! All hosts of a run must respond before any part starts, and a part that cannot start cancels the others: alone they would wait
//! for it until their time limit. [`super::several`] combines the states of the parts.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Component,
    time::Duration,
};

use doctor_backend::{
    BackendError, JobOutput, JobRequest, PolledJob,
    ssh::{Host, remote_program::RequestError},
};
use doctor_core::{
    ids::{JobId, NodeName, RunId},
    run::{NonEmpty, ObservedJobState},
};
use doctor_host::protocol::{HostRequest, HostResponse, HostStatus, MultiNode, Outputs, RunStatus, StartRun};

use super::{
    SshBackend,
    backend::{locked, permanent_error, retryable_error, unexpected_answer, unknown_effect_error},
    multi_node::combined_state,
};

const SUBMIT: &str = "submit";
const CANCEL: &str = "cancel";

/// Where a run is.
enum RunLocation {
    Hosts(Vec<Host>),
    Absent,
    /// No responding host has it, and some hosts do not respond.
    Unknown(String),
}

impl SshBackend {
    pub(super) fn submit_run(&self, job: &JobRequest) -> Result<JobId, BackendError> {
        let orders = self.start_requests(job)?;
        let hosts: Vec<Host> = orders.values().map(|(host, _)| host.clone()).collect();
        let there = self.journal.write(job.run, &job.nodes);
        let there = there.map_err(|error| retryable_error(SUBMIT, error.to_string()))?;
        if there != job.nodes {
            let names = there.iter().map(NodeName::as_str).collect::<Vec<_>>().join(", ");
            return Err(permanent_error(SUBMIT, format!("run {} is already on {names}", job.run)));
        }
        if hosts.len() > 1 {
            self.check_all_respond(&hosts)?;
        }
        let start =
            |host: &Host| orders.get(&host.name).map(|(_, ask)| self.requester.request(host, ask, Duration::ZERO));
        let answers = self.run_on_each(&hosts, start);
        let mut begun = None;
        for (host, answer) in answers.into_iter().filter_map(|(host, answer)| Some((host, answer?))) {
            match begun_as(&host, answer) {
                Ok(job) => begun = Some(job),
                Err(error) if hosts.len() == 1 => return Err(error),
                Err(error) => return Err(self.cancel_other_parts(job.run, &hosts, &error)),
            }
        }
        begun.ok_or_else(|| permanent_error(SUBMIT, "the run names no host".to_owned()))
    }

    /// Checks that all hosts respond, before anything starts. One that does not may respond later.
    fn check_all_respond(&self, hosts: &[Host]) -> Result<(), BackendError> {
        let answers = self.run_on_each(hosts, |host| self.query_host(host, Vec::new()));
        let silent = answers.into_iter().find_map(|(host, look)| look.err().map(|why| format!("{}: {why}", host.name)));
        silent.map_or(Ok(()), |text| Err(retryable_error(SUBMIT, text)))
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
        let policy = self.policy.as_ref().map(fs::read_to_string).transpose();
        let policy = policy.map_err(|error| retryable_error(SUBMIT, format!("the policy file: {error}")))?;
        let hosts = job.nodes.iter().map(|node| self.host(SUBMIT, node)).collect::<Result<Vec<_>, _>>()?;
        let rendezvous = match &*hosts {
            [first, _, ..] => Some(self.rendezvous(first)?),
            _ => None,
        };
        let mut orders = BTreeMap::new();
        for host in hosts {
            let missing = || permanent_error(SUBMIT, format!("{} has no output", host.name));
            let output = job.outputs.iter().find(|output| output.node == host.name).ok_or_else(missing)?;
            let together = rendezvous.as_ref().map(|rendezvous| MultiNode {
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
                together,
                users: self.query_params(Vec::new()),
                max_load_per_core: self.config.max_load_per_core,
            };
            orders.insert(host.name.clone(), (host, HostRequest::Start(Box::new(start))));
        }
        Ok(orders)
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

    /// Finds the hosts of each run: from the journal, otherwise from the hosts.
    fn locate_runs(
        &self,
        operation: &'static str,
        runs: &[RunId],
    ) -> Result<BTreeMap<RunId, RunLocation>, BackendError> {
        let mut places = BTreeMap::new();
        let mut homeless = Vec::new();
        for run in runs {
            match self.journal.hosts_of(*run).map_err(|error| retryable_error(operation, error.to_string()))? {
                Some(nodes) => drop(places.insert(*run, self.location_of(&nodes))),
                None => homeless.push(*run),
            }
        }
        if homeless.is_empty() {
            return Ok(places);
        }
        let answers = self.run_on_each(&self.all(), |host| self.query_host(host, homeless.clone()));
        for run in homeless {
            places.insert(run, self.location_from_answers(run, &answers));
        }
        Ok(places)
    }

    fn location_of(&self, nodes: &[NodeName]) -> RunLocation {
        let hosts = locked(&self.hosts);
        let found = nodes.iter().map(|node| hosts.get(node).cloned().ok_or(node)).collect::<Result<Vec<_>, _>>();
        found.map_or_else(
            |node| RunLocation::Unknown(format!("{node} is no longer among the hosts")),
            RunLocation::Hosts,
        )
    }

    /// Determines the place of a run from the hosts' answers. Each host knows the other hosts of the run.
    fn location_from_answers(&self, run: RunId, answers: &[(Host, Result<HostStatus, String>)]) -> RunLocation {
        let has_it = |seen: &&RunStatus| seen.run == run && seen.seen != ObservedJobState::Absent;
        let told = answers.iter().find_map(|(host, look)| {
            let seen = look.as_ref().ok()?.runs.iter().find(has_it)?;
            Some(NonEmpty::new(seen.nodes.clone()).unwrap_or_else(|| NonEmpty::one(host.name.clone())))
        });
        if let Some(nodes) = told {
            self.journal.record_found(run, &nodes);
            return self.location_of(&nodes);
        }
        let mut silent = answers.iter().filter(|(_, look)| look.is_err()).map(|(host, _)| &host.name);
        match silent.next() {
            None => RunLocation::Absent,
            Some(first) => {
                RunLocation::Unknown(format!("hosts that do not answer: {}, first {first}", silent.count() + 1))
            }
        }
    }

    pub(super) fn poll_runs(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        let places = self.locate_runs("poll", runs)?;
        let seen = self.query_parts(&places);
        let answer = |run: &RunId| match places.get(run) {
            Some(RunLocation::Hosts(hosts)) => combined_job(*run, hosts, &seen),
            Some(RunLocation::Absent) => bare(ObservedJobState::Absent),
            Some(RunLocation::Unknown(why)) => bare(ObservedJobState::Unknown { why: why.clone() }),
            None => bare(ObservedJobState::Unknown { why: "it was not queried".to_owned() }),
        };
        let answers = runs.iter().map(answer).collect();
        self.cache_logs(runs, seen);
        Ok(answers)
    }

    /// Returns the state of each part; each host is queried once.
    fn query_parts(&self, places: &BTreeMap<RunId, RunLocation>) -> BTreeMap<(RunId, NodeName), RunStatus> {
        let mut by_host: BTreeMap<NodeName, (Host, Vec<RunId>)> = BTreeMap::new();
        for (run, place) in places {
            let RunLocation::Hosts(hosts) = place else { continue };
            for host in hosts {
                by_host.entry(host.name.clone()).or_insert_with(|| (host.clone(), Vec::new())).1.push(*run);
            }
        }
        let hosts: Vec<Host> = by_host.values().map(|(host, _)| host.clone()).collect();
        let asked = |host: &Host| by_host.get(&host.name).map(|(_, runs)| runs.clone()).unwrap_or_default();
        let mut seen = BTreeMap::new();
        for (host, looked) in self.run_on_each(&hosts, |host| self.query_host(host, asked(host))) {
            let said = looked.map(|look| look.runs).unwrap_or_else(|why| {
                let unknown = |run| {
                    RunStatus::without_result(run, ObservedJobState::Unknown { why: format!("{}: {why}", host.name) })
                };
                asked(&host).into_iter().map(unknown).collect()
            });
            seen.extend(said.into_iter().map(|one| ((one.run, host.name.clone()), one)));
        }
        seen
    }

    /// Keeps logs while their runs are polled.
    fn cache_logs(&self, runs: &[RunId], seen: BTreeMap<(RunId, NodeName), RunStatus>) {
        let asked: BTreeSet<&RunId> = runs.iter().collect();
        let mut logs = locked(&self.logs);
        logs.retain(|(run, _), _| asked.contains(run));
        logs.extend(seen.into_iter().filter_map(|(part, seen)| Some((part, seen.log?))));
    }

    pub(super) fn logs_of(&self, run: RunId) -> Vec<(NodeName, String)> {
        let logs = locked(&self.logs);
        let of_run = logs.iter().filter(|((of, _), _)| *of == run);
        of_run.map(|((_, node), text)| (node.clone(), text.clone())).collect()
    }

    pub(super) fn cancel_run(&self, run: RunId) -> Result<(), BackendError> {
        match self.locate_runs(CANCEL, &[run])?.remove(&run) {
            Some(RunLocation::Hosts(hosts)) => self.cancel_on(run, &hosts),
            Some(RunLocation::Absent) | None => Ok(()),
            Some(RunLocation::Unknown(why)) => Err(unknown_effect_error(CANCEL, why)),
        }
    }

    /// Cancels the run on every host, even if one of them fails.
    fn cancel_on(&self, run: RunId, hosts: &[Host]) -> Result<(), BackendError> {
        let grace = self.config.grace;
        let end = |host: &Host| self.requester.request(host, &HostRequest::Cancel { run, grace }, grace.to_std());
        let ended = self.run_on_each(hosts, end).into_iter().map(|(host, answer)| match answer {
            Ok(HostResponse::Done) => Ok(()),
            other => Err(unexpected_answer(CANCEL, &host, other)),
        });
        ended.collect::<Vec<_>>().into_iter().collect()
    }
}

fn begun_as(host: &Host, answer: Result<HostResponse, RequestError>) -> Result<JobId, BackendError> {
    match answer {
        Ok(HostResponse::Started(
            ObservedJobState::Pending { job, .. }
            | ObservedJobState::Running { job, .. }
            | ObservedJobState::Ended { job, .. },
        )) => Ok(job),
        // The next snapshot shows the user who came meanwhile, and the planner gives up the run.
        Ok(HostResponse::InUse { by }) => Err(retryable_error(SUBMIT, format!("{}: {by}", host.name))),
        Ok(HostResponse::Started(seen)) => {
            Err(unknown_effect_error(SUBMIT, format!("{}: the run is {seen:?}", host.name)))
        }
        other => Err(unexpected_answer(SUBMIT, host, other)),
    }
}

fn combined_job(run: RunId, hosts: &[Host], seen: &BTreeMap<(RunId, NodeName), RunStatus>) -> PolledJob {
    let part = |host: &Host| seen.get(&(run, host.name.clone()));
    let silent = |host: &Host| ObservedJobState::Unknown { why: format!("{} did not report the run", host.name) };
    let parts: Vec<ObservedJobState> =
        hosts.iter().map(|host| part(host).map_or_else(|| silent(host), |one| one.seen.clone())).collect();
    let documents = hosts.iter().filter_map(|host| part(host)?.document.clone()).map(String::into_bytes);
    PolledJob { state: combined_state(&parts), documents: documents.collect() }
}

const fn bare(seen: ObservedJobState) -> PolledJob {
    PolledJob { state: seen, documents: Vec::new() }
}
