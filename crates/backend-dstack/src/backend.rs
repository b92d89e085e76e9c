//! Implements [`Backend`] for [`DstackBackend`]: snapshot, submit, poll, cancel, replace, and failed work.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    time::{Duration, Instant},
};

use doctor_backend::{
    Backend, BackendError, Change, Effect, JobRequest, NodeOp, PolledJob, SeenFailure, SeenNode,
    clock::{Clock, SystemClock},
};
use doctor_core::{
    ids::{JobId, NodeName, RunId},
    run::JobSeen,
    snapshot::Caps,
    time::{Span, Timestamp},
};
use serde_json::{Value, json};

use super::{
    answers::{self, Event, Fleet, Health, HealthChecks, Instance, WhenIdle, run_name},
    client::{Does, NoAnswer},
    cluster::{DstackBackend, PAGE, refused, try_again},
    failures::failures,
    occupancy::Ends,
    side_door::MOST_ASIDE,
    task,
    view::View,
    work::{JobStatus, Run, Submission},
};

/// How long to repeat a stop until the job has received it; from then on dstack does not lose it.
const TAKES_HOLD: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(200);

impl DstackBackend {
    /// Returns when dstack terminates idle instances. Queries at most [`MOST_ASIDE`] instances per snapshot whose last use is
    /// unknown.
    fn ends(&self, fleets: &[Fleet], now: Timestamp) -> BTreeMap<String, Ends> {
        let there: BTreeSet<&str> =
            fleets.iter().flat_map(|fleet| &fleet.instances).map(|instance| instance.id.as_str()).collect();
        self.known().used.retain(|id, _| there.contains(id.as_str()));
        let mut left = MOST_ASIDE;
        let mut ends = BTreeMap::new();
        for fleet in fleets {
            let WhenIdle::TerminatesAfter(seconds) = fleet.when_idle() else { continue };
            for instance in &fleet.instances {
                let at = self.last_used(instance, now, &mut left).map(|used| used.plus(Span::from_secs(seconds)));
                ends.insert(instance.id.clone(), at.map_or(Ends::Sometime, Ends::At));
            }
        }
        ends
    }

    fn last_used(&self, instance: &Instance, now: Timestamp, left: &mut usize) -> Option<Timestamp> {
        if instance.status != answers::InstanceStatus::Idle {
            self.known().used.insert(instance.id.clone(), now);
            return Some(now);
        }
        if let Some(used) = self.known().used.get(&instance.id) {
            return Some(*used);
        }
        *left = left.checked_sub(1)?;
        let ask = json!({ "target_instances": [instance.id], "limit": PAGE });
        let events: Vec<Event> = self.client.ask("/api/events/list", &ask).ok()?;
        let used = answers::last_used(&events).unwrap_or(instance.created);
        self.known().used.insert(instance.id.clone(), used);
        Some(used)
    }

    /// Returns the messages of dstack's health checks. A failed query is ignored: the status alone decides.
    fn complaints(&self, fleets: &[Fleet]) -> BTreeMap<String, String> {
        let against = |instance: &&Instance| matches!(instance.health_status, Some(Health::Warning | Health::Failure));
        let all = fleets.iter().flat_map(|fleet| fleet.instances.iter().filter(against).map(move |one| (fleet, one)));
        all.take(MOST_ASIDE)
            .filter_map(|(fleet, instance)| {
                let ask = json!({ "fleet_name": fleet.name, "instance_num": instance.instance_num, "limit": 1 });
                let path = self.in_project("instances/get_instance_health_checks");
                let checks: HealthChecks = self.client.ask(&path, &ask).ok()?;
                Some((instance.id.clone(), checks.newest()))
            })
            .collect()
    }

    /// Returns when the job of a run started to run; cached. A server without events is no error. A server that did not respond
    /// is one, because a later answer could contradict this one.
    fn began(&self, run: &Run) -> Result<Option<Timestamp>, NoAnswer> {
        use JobStatus::{Provisioning, Pulling, Submitted};
        let placed = |newest: &&Submission| !matches!(newest.status, Submitted | Provisioning | Pulling);
        let Some(newest) = run.newest().filter(placed) else { return Ok(None) };
        if let Some(began) = self.known().began.get(&newest.id) {
            return Ok(Some(*began));
        }
        let ask = json!({ "target_jobs": [newest.id], "ascending": true, "limit": PAGE });
        let events: Vec<Event> = match self.client.ask("/api/events/list", &ask) {
            Err(NoAnswer::Refused { status: 400..=499, .. }) => return Ok(None),
            told => told?,
        };
        let began = answers::began(&events);
        if let Some(began) = began {
            self.known().began.insert(newest.id.clone(), began);
        }
        Ok(began)
    }

    /// Stops a run. dstack 0.22 loses a stop that arrives while it records the run's status: `TERMINATING -> RUNNING`, a second
    /// later. The stop is therefore repeated until the job has received it, for a while; later polls of the run repeat it again.
    fn stop(&self, run: RunId, abort: bool) -> Result<(), NoAnswer> {
        let (path, body) = (self.in_project("runs/stop"), json!({ "runs_names": [run_name(run)], "abort": abort }));
        let until = Instant::now() + TAKES_HOLD;
        self.client.ask::<Value>(&path, &body)?;
        while Instant::now() < until {
            let told = self.client.ask::<Run>(&self.in_project("runs/get"), &json!({ "run_name": run_name(run) }))?;
            if told.newest().is_none_or(|newest| newest.status.is_leaving()) {
                break;
            }
            std::thread::sleep(LOOK_AGAIN);
            if told.status.goes_on() {
                self.client.ask::<Value>(&path, &body)?;
            }
        }
        Ok(())
    }

    fn job_id(&self, run: RunId) -> JobId {
        JobId(format!("{}/{}", self.config.project, run_name(run)))
    }

    fn plan(&self, job: &JobRequest) -> Result<Value, BackendError> {
        const SUBMIT: &str = "submit";
        let [node] = &*job.nodes else {
            return Err(refused(SUBMIT, "a run on dstack uses one instance, not several".to_owned()));
        };
        let (fleet, instance) = self.instance(SUBMIT, node)?;
        let policy = self.policy.as_ref().map(fs::read_to_string).transpose();
        let policy = policy.map_err(|error| try_again(SUBMIT, format!("the policy file: {error}")))?;
        if let Some(length) = policy.as_ref().map(String::len).filter(|length| *length > task::LONGEST_POLICY) {
            let most = task::LONGEST_POLICY;
            return Err(refused(SUBMIT, format!("the policy file has {length} bytes, expected at most {most}")));
        }
        Ok(task::plan(job, node, (&fleet.name, &instance), policy.as_deref(), &self.config))
    }
}

impl Backend for DstackBackend {
    fn name(&self) -> &str {
        "dstack"
    }

    fn caps(&self) -> Caps {
        Caps { replace: self.config.replace, ..Caps::NONE }
    }

    fn snapshot(&self) -> Result<Vec<SeenNode>, BackendError> {
        const LOOK: &str = "read the project";
        let fleets = self.fleets(LOOK)?;
        // After the instances: a run that starts in between is on an instance that looks idle, and is seen.
        let runs = self.runs(LOOK)?;
        let (me, now) = (self.me(LOOK)?, SystemClock.now());
        self.tidy_keys(&runs, now);
        let (ends, complaints) = (self.ends(&fleets, now), self.complaints(&fleets));
        let found = self.door.as_ref().map(|door| door.look(&fleets)).unwrap_or_default();
        let view =
            View { fleets: &fleets, runs: &runs, me: &me, now, ends: &ends, complaints: &complaints, found: &found };
        Ok(view.seen(&self.config))
    }

    fn submit(&self, job: &JobRequest) -> Result<JobId, BackendError> {
        const SUBMIT: &str = "submit";
        // The server would create a new run in the place of one that has ended.
        if self.run(SUBMIT, job.run)?.is_some() {
            return Ok(self.job_id(job.run));
        }
        if let Some(job) = self.submit_aside(SUBMIT, job)? {
            return Ok(job);
        }
        let plan = self.plan(job)?;
        self.hide_key(SUBMIT, job)?;
        let applied: Result<Run, _> = self.client.ask(&self.in_project("runs/apply"), &plan);
        match applied {
            Ok(_) => Ok(self.job_id(job.run)),
            // Another controller was faster with the same run.
            Err(error) if self.run(SUBMIT, job.run).is_ok_and(|run| run.is_some()) => {
                tracing::debug!(run = %job.run, %error, "run exists already");
                Ok(self.job_id(job.run))
            }
            Err(error) => {
                let error = error.during(SUBMIT, Does::Changes);
                if error.effect != Effect::Unknown {
                    self.forget_keys(&BTreeSet::from([job.run]));
                }
                Err(error)
            }
        }
    }

    fn poll(&self, runs: &[RunId]) -> Result<Vec<PolledJob>, BackendError> {
        const POLL: &str = "poll";
        self.carried.only(runs);
        self.known().stopped.retain(|run| runs.contains(run));
        let (mut begun, mut answers, mut asked) = (BTreeSet::new(), Vec::with_capacity(runs.len()), BTreeSet::new());
        for id in runs {
            if let Some(door) = self.door_of(POLL, *id)? {
                answers.extend(door.ssh.poll(&[*id])?);
                continue;
            }
            let Some(run) = self.run(POLL, *id)? else {
                answers.push(PolledJob { seen: JobSeen::Absent, documents: Vec::new() });
                continue;
            };
            if run.status.goes_on() && self.known().stopped.contains(id) {
                tracing::debug!(run = %id, "server lost the stop; stopping the run again");
                self.stop(*id, false).map_err(|error| error.during(POLL, Does::Reads))?;
            }
            let seen = self.began(&run).map_or_else(
                |error| JobSeen::Unknown { why: format!("its start time is unknown: {error}") },
                |began| task::seen(&run, self.job_id(*id), began),
            );
            asked.extend(run.newest().map(|newest| newest.id.clone()));
            let mut documents = Vec::new();
            if let JobSeen::Ended { started: Some(_), .. } = &seen {
                documents.extend(self.carried.fetch(&self.client, &self.config.project, *id, &run));
            }
            if matches!(seen, JobSeen::Running { .. } | JobSeen::Ended { .. }) {
                begun.insert(*id);
            }
            answers.push(PolledJob { seen, documents });
        }
        self.forget_keys(&begun);
        self.known().began.retain(|submission, _| asked.contains(submission));
        Ok(answers)
    }

    fn logs(&self, run: RunId) -> Vec<(NodeName, String)> {
        let aside = self.door.iter().flat_map(|door| door.ssh.logs(run));
        self.carried.logs(run).into_iter().chain(aside).collect()
    }

    fn cancel(&self, run: RunId) -> Result<(), BackendError> {
        const CANCEL: &str = "cancel";
        if let Some(door) = self.door_of(CANCEL, run)? {
            return door.ssh.cancel(run);
        }
        if self.run(CANCEL, run)?.is_none() {
            return Ok(());
        }
        // A second cancel means that the first was not enough.
        let abort = !self.known().stopped.insert(run);
        self.stop(run, abort).map_err(|error| error.during(CANCEL, Does::Changes))
    }

    fn apply(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        match change.what {
            Change::Replace => self.replace(node, change),
            _ => Err(refused("change the node", format!("dstack cannot {}", change.what.step()))),
        }
    }

    fn failed_work(&self, since: Timestamp) -> Result<Vec<SeenFailure>, BackendError> {
        const LOOK: &str = "list failed runs";
        let fleets = self.fleets(LOOK)?;
        let instances: Vec<&Instance> = fleets.iter().flat_map(|fleet| &fleet.instances).collect();
        let ask = json!({ "project_name": self.config.project, "only_active": false, "limit": PAGE, "job_submissions_limit": 1 });
        let newest: Vec<Run> = self.read(LOOK, "/api/runs/list", &ask)?;
        Ok(failures(&newest, &instances, since))
    }
}
