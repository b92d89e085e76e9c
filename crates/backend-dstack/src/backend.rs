//! Implements [`Backend`] for [`DstackBackend`]: snapshot, submit, poll, cancel, replace, and failed work.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use doctor_backend::{
    Backend, BackendError, Change, Effect, JobRequest, NodeOp, ObservedJobFailure, ObservedNode, PolledJob,
    ReportProgress,
    clock::{Clock, SystemClock},
    deadline, trusted_file,
};
use doctor_core::{
    ids::{JobId, NodeName, OpId, RunId},
    last_output::LastOutput,
    run::{ObservedJobState, Run},
    snapshot::Capabilities,
    time::{Span, Timestamp},
};
use serde_json::{Value, json};

use super::{
    api_types::{self, Event, Fleet, Health, HealthChecks, IdlePolicy, Instance, run_name},
    client::{Access, DstackApiError},
    cluster::{DstackBackend, PAGE, permanent_error, retryable_error},
    failures::failures,
    occupancy::IdleTermination,
    result_transport,
    run_types::{self, JobStatus, JobSubmission},
    ssh_fallback::MAX_QUERIES,
    task,
    view::View,
};

/// How long to repeat a stop until the job has received it; from then on dstack does not lose it.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(200);

impl DstackBackend {
    /// Returns when dstack terminates idle instances. Queries at most [`MAX_QUERIES`] instances per snapshot whose last use is
    /// unknown.
    fn idle_terminations(&self, fleets: &[Fleet], now: Timestamp) -> BTreeMap<String, IdleTermination> {
        let present: BTreeSet<&str> =
            fleets.iter().flat_map(|fleet| &fleet.instances).map(|instance| instance.id.as_str()).collect();
        self.cache().last_used.retain(|id, _| present.contains(id.as_str()));
        let mut left = MAX_QUERIES;
        let mut ends = BTreeMap::new();
        for fleet in fleets {
            let IdlePolicy::TerminateAfter(seconds) = fleet.idle_policy() else { continue };
            for instance in &fleet.instances {
                let at = self.last_used(instance, now, &mut left).map(|used| used.plus(Span::from_secs(seconds)));
                ends.insert(instance.id.clone(), at.map_or(IdleTermination::Unknown, IdleTermination::At));
            }
        }
        ends
    }

    fn last_used(&self, instance: &Instance, now: Timestamp, left: &mut usize) -> Option<Timestamp> {
        if instance.status != api_types::InstanceStatus::Idle {
            self.cache().last_used.insert(instance.id.clone(), now);
            return Some(now);
        }
        if let Some(used) = self.cache().last_used.get(&instance.id) {
            return Some(*used);
        }
        *left = left.checked_sub(1)?;
        let query = json!({ "target_instances": [instance.id], "limit": PAGE });
        let events: Vec<Event> = self.client.post("/api/events/list", &query).ok()?;
        let used = api_types::last_used(&events).unwrap_or(instance.created);
        self.cache().last_used.insert(instance.id.clone(), used);
        Some(used)
    }

    /// Returns the messages of dstack's health checks. A failed query is ignored: the status alone decides.
    fn health_messages(&self, fleets: &[Fleet]) -> BTreeMap<String, String> {
        let against = |instance: &&Instance| matches!(instance.health_status, Some(Health::Warning | Health::Failure));
        let all = fleets.iter().flat_map(|fleet| fleet.instances.iter().filter(against).map(move |one| (fleet, one)));
        all.take(MAX_QUERIES)
            .filter_map(|(fleet, instance)| {
                let query = json!({ "fleet_name": fleet.name, "instance_num": instance.instance_num, "limit": 1 });
                let path = self.in_project("instances/get_instance_health_checks");
                let checks: HealthChecks = self.client.post(&path, &query).ok()?;
                Some((instance.id.clone(), checks.newest()))
            })
            .collect()
    }

    /// Returns when the job of a run started to run; cached. A server without events is no error. A server that did not respond
    /// is one, because a later answer could contradict this one.
    fn job_start_time(&self, run: &run_types::Run) -> Result<Option<Timestamp>, DstackApiError> {
        use JobStatus::{Provisioning, Pulling, Submitted};
        let placed = |newest: &&JobSubmission| !matches!(newest.status, Submitted | Provisioning | Pulling);
        let Some(newest) = run.latest_submission().filter(placed) else { return Ok(None) };
        if let Some(began) = self.cache().job_starts.get(&newest.id) {
            return Ok(Some(*began));
        }
        let query = json!({ "target_jobs": [newest.id], "ascending": true, "limit": PAGE });
        let events: Vec<Event> = match self.client.post("/api/events/list", &query) {
            Err(DstackApiError::Rejected { status: 400..=499, .. }) => return Ok(None),
            result => result?,
        };
        let began = api_types::job_start_time(&events);
        if let Some(began) = began {
            self.cache().job_starts.insert(newest.id.clone(), began);
        }
        Ok(began)
    }

    /// Stops a run. dstack 0.22 loses a stop that arrives while it records the run's status: `TERMINATING -> RUNNING`, a second
    /// later. The stop is therefore repeated until the job has received it, for a while; later polls of the run repeat it again.
    fn stop(&self, run: RunId, abort: bool) -> Result<(), DstackApiError> {
        let (path, body) = (self.in_project("runs/stop"), json!({ "runs_names": [run_name(run)], "abort": abort }));
        let until = Instant::now() + STOP_TIMEOUT;
        self.client.post::<Value>(&path, &body)?;
        while Instant::now() < until && !deadline::is_over() {
            let current = self
                .client
                .post::<run_types::Run>(&self.in_project("runs/get"), &json!({ "run_name": run_name(run) }))?;
            if current.latest_submission().is_none_or(|newest| newest.status.is_terminating()) {
                break;
            }
            std::thread::sleep(STOP_POLL_INTERVAL);
            if current.status.is_active() {
                self.client.post::<Value>(&path, &body)?;
            }
        }
        Ok(())
    }

    fn job_id(&self, run: RunId) -> JobId {
        JobId(format!("{}/{}", self.config.project, run_name(run)))
    }

    fn build_run(&self, job: &JobRequest) -> Result<Value, BackendError> {
        const SUBMIT: &str = "submit";
        let [node] = &*job.nodes else {
            return Err(permanent_error(SUBMIT, "a run on dstack uses one instance, not several".to_owned()));
        };
        let (fleet, instance) = self.instance(SUBMIT, node)?;
        let policy = self.policy.as_deref().map(trusted_file::read_to_string).transpose();
        let policy = policy.map_err(|error| retryable_error(SUBMIT, format!("the policy file: {error}")))?;
        if let Some(length) = policy.as_ref().map(String::len).filter(|length| *length > task::MAX_POLICY_BYTES) {
            let most = task::MAX_POLICY_BYTES;
            return Err(permanent_error(
                SUBMIT,
                format!("the policy file has {length} bytes, expected at most {most}"),
            ));
        }
        Ok(task::run_plan(job, node, (&fleet.name, &instance), policy.as_deref(), &self.config))
    }
}

impl Backend for DstackBackend {
    fn name(&self) -> &str {
        "dstack"
    }

    fn caps(&self) -> Capabilities {
        Capabilities { replace: self.config.replace, ..Capabilities::NONE }
    }

    fn snapshot(&self) -> Result<Vec<ObservedNode>, BackendError> {
        const LOOK: &str = "read the project";
        let fleets = self.fleets(LOOK)?;
        // After the instances: a run that starts in between is on an instance that looks idle, and is seen.
        let runs = self.runs(LOOK)?;
        let (user, now) = (self.current_user(LOOK)?, SystemClock.now());
        self.delete_orphaned_secrets(&runs, now);
        let (ends, complaints) = (self.idle_terminations(&fleets, now), self.health_messages(&fleets));
        let ssh_states = self.ssh_fallback.as_ref().map(|fallback| fallback.query(&fleets)).unwrap_or_default();
        let view = View {
            fleets: &fleets,
            runs: &runs,
            user: &user,
            now,
            idle_terminations: &ends,
            health_messages: &complaints,
            ssh_states: &ssh_states,
        };
        Ok(view.seen_nodes(&self.config))
    }

    fn submit(&self, job: &JobRequest) -> Result<JobId, BackendError> {
        const SUBMIT: &str = "submit";
        // The server would create a new run in the place of one that has ended.
        if self.run(SUBMIT, job.run)?.is_some() {
            return Ok(self.job_id(job.run));
        }
        if let Some(job) = self.submit_over_ssh(SUBMIT, job)? {
            return Ok(job);
        }
        let plan = self.build_run(job)?;
        self.create_secret(SUBMIT, job)?;
        let applied: Result<run_types::Run, _> = self.client.post(&self.in_project("runs/apply"), &plan);
        match applied {
            Ok(_) => Ok(self.job_id(job.run)),
            // Another controller was faster with the same run.
            Err(error) if self.run(SUBMIT, job.run).is_ok_and(|run| run.is_some()) => {
                tracing::debug!(run = %job.run, %error, "run exists already");
                Ok(self.job_id(job.run))
            }
            Err(error) => {
                let error = error.to_backend_error(SUBMIT, Access::Write);
                if error.effect != Effect::Unknown {
                    self.delete_used_secrets(&BTreeSet::from([job.run]));
                }
                Err(error)
            }
        }
    }

    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        const POLL: &str = "poll";
        self.run_results.retain_runs(runs);
        self.cache().stopped.retain(|run| runs.contains(run));
        let (mut started, mut jobs, mut polled) = (BTreeSet::new(), BTreeMap::new(), BTreeSet::new());
        let mut over_ssh = Vec::new();
        for id in runs {
            if self.ssh_fallback_of(POLL, *id)?.is_some() {
                over_ssh.push(*id);
                continue;
            }
            let Some(run) = self.run(POLL, *id)? else {
                jobs.insert(*id, PolledJob { state: ObservedJobState::Absent, documents: Vec::new() });
                continue;
            };
            if run.status.is_active() && self.cache().stopped.contains(id) {
                tracing::debug!(run = %id, "server lost the stop; stopping the run again");
                self.stop(*id, false).map_err(|error| error.to_backend_error(POLL, Access::Read))?;
            }
            let seen = self.job_start_time(&run).map_or_else(
                |error| ObservedJobState::Unknown { why: format!("its start time is unknown: {error}") },
                |began| task::job_state(&run, self.job_id(*id), began),
            );
            polled.extend(run.latest_submission().map(|newest| newest.id.clone()));
            let mut documents = Vec::new();
            if let ObservedJobState::Ended { started: Some(_), .. } = &seen {
                documents.extend(self.run_results.fetch(&self.client, &self.config.project, *id, &run));
            }
            if matches!(seen, ObservedJobState::Running { .. } | ObservedJobState::Ended { .. }) {
                started.insert(*id);
            }
            jobs.insert(*id, PolledJob { state: seen, documents });
        }
        // Last and together: a host that is silent delays neither the runs of dstack nor those of other hosts.
        if let Some(fallback) = self.ssh_fallback.as_ref().filter(|_| !over_ssh.is_empty()) {
            jobs.extend(over_ssh.iter().copied().zip(fallback.ssh.poll(&over_ssh)?));
        }
        self.delete_used_secrets(&started);
        self.cache().job_starts.retain(|submission, _| polled.contains(submission));
        let not_polled = || {
            let why = "it was not polled".to_owned();
            PolledJob { state: ObservedJobState::Unknown { why }, documents: Vec::new() }
        };
        Ok(runs.iter().map(|run| jobs.get(run).cloned().unwrap_or_else(not_polled)).collect())
    }

    fn logs(&self, run: RunId) -> Vec<(NodeName, String)> {
        let over_ssh = self.ssh_fallback.iter().flat_map(|fallback| fallback.ssh.logs(run));
        self.run_results.logs(run).into_iter().chain(over_ssh).collect()
    }

    fn remaining_output(&self, run: &Run) -> Result<Vec<LastOutput>, BackendError> {
        const READ: &str = "read the output of a job";
        if let Some(fallback) = self.ssh_fallback_of(READ, run.id)? {
            return fallback.ssh.remaining_output(run);
        }
        let Some(record) = self.run(READ, run.id)? else { return Ok(Vec::new()) };
        // The ending is known even if the log cannot be read.
        let text = result_transport::last_output(&self.client, &self.config.project, &record).unwrap_or_else(|error| {
            tracing::warn!(run = %run.id, %error, "job log not fetched");
            String::new()
        });
        let ending = record.latest_submission().map(JobSubmission::ending);
        Ok(vec![LastOutput { node: run.nodes.first().clone(), ending, text }])
    }

    fn cancel(&self, run: RunId) -> Result<(), BackendError> {
        const CANCEL: &str = "cancel";
        if let Some(fallback) = self.ssh_fallback_of(CANCEL, run)? {
            return fallback.ssh.cancel(run);
        }
        if self.run(CANCEL, run)?.is_none() {
            return Ok(());
        }
        // A second cancel means that the first was not enough.
        let abort = !self.cache().stopped.insert(run);
        self.stop(run, abort).map_err(|error| error.to_backend_error(CANCEL, Access::Write))
    }

    fn apply(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        match change.what {
            Change::Replace => self.replace(node, change),
            _ => Err(permanent_error("change the node", format!("dstack cannot {}", change.what.step()))),
        }
    }

    fn collect_report(&self, node: &NodeName, op: OpId) -> ReportProgress {
        self.collect_report_from(node, op)
    }

    fn job_failures(&self, since: Timestamp) -> Result<Vec<ObservedJobFailure>, BackendError> {
        const LOOK: &str = "list failed runs";
        let fleets = self.fleets(LOOK)?;
        let instances: Vec<&Instance> = fleets.iter().flat_map(|fleet| &fleet.instances).collect();
        let query = json!({ "project_name": self.config.project, "only_active": false, "limit": PAGE, "job_submissions_limit": 1 });
        let newest: Vec<run_types::Run> = self.read(LOOK, "/api/runs/list", &query)?;
        Ok(failures(&newest, &instances, since))
    }
}
