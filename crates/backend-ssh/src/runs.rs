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
    ssh::{Host, install::NoAnswer},
};
use doctor_core::{
    ids::{JobId, NodeName, RunId},
    run::{JobSeen, NonEmpty},
};
use doctor_host::protocol::{Ask, Look, Outputs, Said, SeenRun, Start, Together};

use super::{
    SshBackend,
    fleet::{failed, locked, refused, try_again, unknown},
    several::together,
};

const SUBMIT: &str = "submit";
const CANCEL: &str = "cancel";

/// Where a run is.
enum Place {
    On(Vec<Host>),
    Nowhere,
    /// No responding host has it, and some hosts do not respond.
    Unclear(String),
}

impl SshBackend {
    pub(super) fn submit_run(&self, job: &JobRequest) -> Result<JobId, BackendError> {
        let orders = self.orders(job)?;
        let hosts: Vec<Host> = orders.values().map(|(host, _)| host.clone()).collect();
        let there = self.records.write(job.run, &job.nodes);
        let there = there.map_err(|error| try_again(SUBMIT, error.to_string()))?;
        if there != job.nodes {
            let names = there.iter().map(NodeName::as_str).collect::<Vec<_>>().join(", ");
            return Err(refused(SUBMIT, format!("run {} is already on {names}", job.run)));
        }
        if hosts.len() > 1 {
            self.all_answer(&hosts)?;
        }
        let start = |host: &Host| orders.get(&host.name).map(|(_, ask)| self.asker.ask(host, ask, Duration::ZERO));
        let answers = self.each(&hosts, start);
        let mut begun = None;
        for (host, answer) in answers.into_iter().filter_map(|(host, answer)| Some((host, answer?))) {
            match begun_as(&host, answer) {
                Ok(job) => begun = Some(job),
                Err(error) if hosts.len() == 1 => return Err(error),
                Err(error) => return Err(self.end_the_others(job.run, &hosts, &error)),
            }
        }
        begun.ok_or_else(|| refused(SUBMIT, "the run names no host".to_owned()))
    }

    /// Checks that all hosts respond, before anything starts. One that does not may respond later.
    fn all_answer(&self, hosts: &[Host]) -> Result<(), BackendError> {
        let answers = self.each(hosts, |host| self.look(host, Vec::new()));
        let silent = answers.into_iter().find_map(|(host, look)| look.err().map(|why| format!("{}: {why}", host.name)));
        silent.map_or(Ok(()), |text| Err(try_again(SUBMIT, text)))
    }

    /// Cancels the other parts after one could not start. Once they have ended, this run can never be complete, and a new one may
    /// start.
    fn end_the_others(&self, run: RunId, hosts: &[Host], error: &BackendError) -> BackendError {
        match self.end_on(run, hosts) {
            Ok(()) => refused(SUBMIT, format!("{}; the other parts of the run were cancelled", error.text)),
            Err(other) => unknown(SUBMIT, format!("{}; cancelling another part failed: {}", error.text, other.text)),
        }
    }

    fn orders(&self, job: &JobRequest) -> Result<BTreeMap<NodeName, (Host, Ask)>, BackendError> {
        if job.outputs.len() != job.nodes.len() {
            return Err(refused(SUBMIT, "each host of a run needs one output".to_owned()));
        }
        let policy = self.policy.as_ref().map(fs::read_to_string).transpose();
        let policy = policy.map_err(|error| try_again(SUBMIT, format!("the policy file: {error}")))?;
        let hosts = job.nodes.iter().map(|node| self.host(SUBMIT, node)).collect::<Result<Vec<_>, _>>()?;
        let rendezvous = match &*hosts {
            [first, _, ..] => Some(self.rendezvous(first)?),
            _ => None,
        };
        let mut orders = BTreeMap::new();
        for host in hosts {
            let missing = || refused(SUBMIT, format!("{} has no output", host.name));
            let output = job.outputs.iter().find(|output| output.node == host.name).ok_or_else(missing)?;
            let together = rendezvous.as_ref().map(|rendezvous| Together {
                nodes: job.nodes.clone(),
                rendezvous: rendezvous.clone(),
                secret: job.key.rendezvous(),
            });
            let start = Start {
                run: job.run,
                node: host.name.clone(),
                tests: job.tests.clone(),
                limit: job.limit,
                key: job.key.to_hex(),
                outputs: self.outputs(output)?,
                policy: policy.clone(),
                together,
                users: self.wanted(Vec::new()),
                max_load_per_core: self.config.max_load_per_core,
            };
            orders.insert(host.name.clone(), (host, Ask::Start(Box::new(start))));
        }
        Ok(orders)
    }

    /// Returns the address at which the other hosts of a multi-node run reach the first.
    fn rendezvous(&self, first: &Host) -> Result<String, BackendError> {
        let address = self.asker.address(first).map_err(|why| try_again(SUBMIT, format!("{}: {why}", first.name)))?;
        let port = self.config.rendezvous_port;
        Ok(if address.contains(':') { format!("[{address}]:{port}") } else { format!("{address}:{port}") })
    }

    /// Returns the output paths on the host. `None`: there is no shared directory.
    fn outputs(&self, output: &JobOutput) -> Result<Option<Outputs>, BackendError> {
        for path in output.logs.iter().chain([&output.document]) {
            if !path.components().all(|part| matches!(part, Component::Normal(_))) {
                return Err(refused(SUBMIT, format!("{} leads out of the shared directory", path.display())));
            }
        }
        Ok(self.config.share.as_ref().map(|share| Outputs {
            logs: output.logs.iter().map(|log| share.join(log)).collect(),
            document: share.join(&output.document),
        }))
    }

    /// Finds the hosts of each run: from the journal, otherwise from the hosts.
    fn find(&self, operation: &'static str, runs: &[RunId]) -> Result<BTreeMap<RunId, Place>, BackendError> {
        let mut places = BTreeMap::new();
        let mut homeless = Vec::new();
        for run in runs {
            match self.records.hosts_of(*run).map_err(|error| try_again(operation, error.to_string()))? {
                Some(nodes) => drop(places.insert(*run, self.on(&nodes))),
                None => homeless.push(*run),
            }
        }
        if homeless.is_empty() {
            return Ok(places);
        }
        let answers = self.each(&self.all(), |host| self.look(host, homeless.clone()));
        for run in homeless {
            places.insert(run, self.as_told(run, &answers));
        }
        Ok(places)
    }

    fn on(&self, nodes: &[NodeName]) -> Place {
        let hosts = locked(&self.hosts);
        let found = nodes.iter().map(|node| hosts.get(node).cloned().ok_or(node)).collect::<Result<Vec<_>, _>>();
        found.map_or_else(|node| Place::Unclear(format!("{node} is no longer among the hosts")), Place::On)
    }

    /// Determines the place of a run from the hosts' answers. Each host knows the other hosts of the run.
    fn as_told(&self, run: RunId, answers: &[(Host, Result<Look, String>)]) -> Place {
        let has_it = |seen: &&SeenRun| seen.run == run && seen.seen != JobSeen::Absent;
        let told = answers.iter().find_map(|(host, look)| {
            let seen = look.as_ref().ok()?.runs.iter().find(has_it)?;
            Some(NonEmpty::new(seen.nodes.clone()).unwrap_or_else(|| NonEmpty::one(host.name.clone())))
        });
        if let Some(nodes) = told {
            self.records.learn(run, &nodes);
            return self.on(&nodes);
        }
        let mut silent = answers.iter().filter(|(_, look)| look.is_err()).map(|(host, _)| &host.name);
        match silent.next() {
            None => Place::Nowhere,
            Some(first) => Place::Unclear(format!("hosts that do not answer: {}, first {first}", silent.count() + 1)),
        }
    }

    pub(super) fn poll_runs(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        let places = self.find("poll", runs)?;
        let seen = self.parts_of(&places);
        let answer = |run: &RunId| match places.get(run) {
            Some(Place::On(hosts)) => whole(*run, hosts, &seen),
            Some(Place::Nowhere) => bare(JobSeen::Absent),
            Some(Place::Unclear(why)) => bare(JobSeen::Unknown { why: why.clone() }),
            None => bare(JobSeen::Unknown { why: "it was not queried".to_owned() }),
        };
        let answers = runs.iter().map(answer).collect();
        self.keep_logs(runs, seen);
        Ok(answers)
    }

    /// Returns the state of each part; each host is queried once.
    fn parts_of(&self, places: &BTreeMap<RunId, Place>) -> BTreeMap<(RunId, NodeName), SeenRun> {
        let mut by_host: BTreeMap<NodeName, (Host, Vec<RunId>)> = BTreeMap::new();
        for (run, place) in places {
            let Place::On(hosts) = place else { continue };
            for host in hosts {
                by_host.entry(host.name.clone()).or_insert_with(|| (host.clone(), Vec::new())).1.push(*run);
            }
        }
        let hosts: Vec<Host> = by_host.values().map(|(host, _)| host.clone()).collect();
        let asked = |host: &Host| by_host.get(&host.name).map(|(_, runs)| runs.clone()).unwrap_or_default();
        let mut seen = BTreeMap::new();
        for (host, looked) in self.each(&hosts, |host| self.look(host, asked(host))) {
            let said = looked.map(|look| look.runs).unwrap_or_else(|why| {
                let unknown = |run| SeenRun::bare(run, JobSeen::Unknown { why: format!("{}: {why}", host.name) });
                asked(&host).into_iter().map(unknown).collect()
            });
            seen.extend(said.into_iter().map(|one| ((one.run, host.name.clone()), one)));
        }
        seen
    }

    /// Keeps logs while their runs are polled.
    fn keep_logs(&self, runs: &[RunId], seen: BTreeMap<(RunId, NodeName), SeenRun>) {
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
        match self.find(CANCEL, &[run])?.remove(&run) {
            Some(Place::On(hosts)) => self.end_on(run, &hosts),
            Some(Place::Nowhere) | None => Ok(()),
            Some(Place::Unclear(why)) => Err(unknown(CANCEL, why)),
        }
    }

    /// Cancels the run on every host, even if one of them fails.
    fn end_on(&self, run: RunId, hosts: &[Host]) -> Result<(), BackendError> {
        let grace = self.config.grace;
        let end = |host: &Host| self.asker.ask(host, &Ask::Cancel { run, grace }, grace.to_std());
        let ended = self.each(hosts, end).into_iter().map(|(host, answer)| match answer {
            Ok(Said::Done) => Ok(()),
            other => Err(failed(CANCEL, &host, other)),
        });
        ended.collect::<Vec<_>>().into_iter().collect()
    }
}

fn begun_as(host: &Host, answer: Result<Said, NoAnswer>) -> Result<JobId, BackendError> {
    match answer {
        Ok(Said::Started(JobSeen::Pending { job, .. } | JobSeen::Running { job, .. } | JobSeen::Ended { job, .. })) => {
            Ok(job)
        }
        // The next snapshot shows the user who came meanwhile, and the planner gives up the run.
        Ok(Said::InUse { by }) => Err(try_again(SUBMIT, format!("{}: {by}", host.name))),
        Ok(Said::Started(seen)) => Err(unknown(SUBMIT, format!("{}: the run is {seen:?}", host.name))),
        other => Err(failed(SUBMIT, host, other)),
    }
}

fn whole(run: RunId, hosts: &[Host], seen: &BTreeMap<(RunId, NodeName), SeenRun>) -> PolledJob {
    let part = |host: &Host| seen.get(&(run, host.name.clone()));
    let silent = |host: &Host| JobSeen::Unknown { why: format!("{} did not report the run", host.name) };
    let parts: Vec<JobSeen> =
        hosts.iter().map(|host| part(host).map_or_else(|| silent(host), |one| one.seen.clone())).collect();
    let documents = hosts.iter().filter_map(|host| part(host)?.document.clone()).map(String::into_bytes);
    PolledJob { seen: together(&parts), documents: documents.collect() }
}

const fn bare(seen: JobSeen) -> PolledJob {
    PolledJob { seen, documents: Vec::new() }
}
