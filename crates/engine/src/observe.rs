//! Observation: builds one snapshot from the backend's response, new results and the store.
//!
//! [`Memory`] is the planner with its snapshot, updated by what changed since the last cycle.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use doctor_backend::{PolledJob, SeenNode};
use doctor_checks::document::RunKey;
use doctor_core::{
    ids::{IdSource, NodeName, RunId},
    node::Occupancy,
    observation::Settled,
    plan::{Action, Plan, Planner, TakeOut},
    reason::Because,
    run::{JobSeen, Run, RunState},
    snapshot::{Asked, RecentActions, Records, Snapshot, Trial},
    time::{Span, Timestamp},
};
use doctor_store::{Lease, StoreError, records::StoredRun};
use tracing::field::Empty;

use crate::{
    door::{self, Known, TurnedAway},
    failed_work::Failures,
    inbox::Inbox,
    parts::Parts,
    recall::recall,
    report::CycleReport,
    snapshot::{active, mark_strangers, record},
    spans::{span, within},
};

const DAY: i64 = 86_400_000;

/// State kept between cycles.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    planner: Option<Planner>,
    runs: Vec<StoredRun>,
    /// Since when the backend has not known a run's job.
    absent: BTreeMap<RunId, Timestamp>,
    turned_away: TurnedAway,
    /// Logs that arrived with jobs and were saved.
    logged: BTreeSet<(RunId, NodeName)>,
    failures: Failures,
    /// Acknowledged events, by node.
    settled: BTreeMap<NodeName, Vec<Settled>>,
    /// Nodes changed in the planner since the last call of [`Self::take_changed`]; `None`: all of them.
    changed: Option<Vec<NodeName>>,
    /// Nodes with newer data in the store than in the planner.
    dirty: BTreeSet<NodeName>,
    stale: Stale,
    /// A counter that grows when another process writes to the store.
    operators: Option<u64>,
    day: Option<i64>,
    written: Option<Timestamp>,
}

/// Which of the small tables must be read again.
#[derive(Debug, Default)]
struct Stale {
    settled: bool,
    runs: bool,
    cases: bool,
    spent: bool,
    rest: bool,
}

impl Memory {
    /// Discards everything; the next cycle reads it again.
    pub(crate) fn forget(&mut self) {
        *self = Self { written: self.written, ..Self::default() };
    }

    pub(crate) fn snapshot(&self) -> Option<&Snapshot> {
        self.planner.as_ref().map(Planner::snapshot)
    }

    pub(crate) fn plan(&mut self, now: Timestamp, ids: &mut IdSource) -> Option<Plan> {
        self.planner.as_mut().map(|planner| planner.plan(now, ids))
    }

    /// Returns the nodes that another program may take out; `None`: the cluster was not observed yet.
    pub(crate) fn may_be_taken_out(&self) -> Option<TakeOut> {
        self.planner.as_ref().map(Planner::may_be_taken_out)
    }

    /// Returns the nodes with newer data in the store than in the snapshot.
    pub(crate) fn behind(&self) -> Vec<NodeName> {
        self.dirty.iter().cloned().collect()
    }

    /// Returns the nodes that changed since the last call; `None`: any node may have.
    pub(crate) fn take_changed(&mut self) -> Option<Vec<NodeName>> {
        self.changed.replace(Vec::new())
    }

    pub(crate) fn quiet_since(&self, now: Timestamp) -> Span {
        self.written.map_or(Span::days(1), |written| now.since(written))
    }

    pub(crate) fn written(&mut self, now: Timestamp) {
        self.written = Some(now);
    }

    pub(crate) fn runs_with_keys(&self, wanted: &BTreeSet<RunId>) -> BTreeMap<RunId, (Run, RunKey)> {
        let runs = self.runs.iter().filter(|stored| wanted.contains(&stored.run.id));
        runs.map(|stored| (stored.run.id, (stored.run.clone(), stored.key.clone()))).collect()
    }

    pub(crate) fn count(&self, report: &mut CycleReport) {
        if let Some(snapshot) = self.snapshot() {
            report.nodes = snapshot.nodes.len();
            report.free = snapshot.nodes.iter().filter(|record| record.node.occupancy.is_free()).count();
            report.running = self.runs.len();
        }
    }

    pub(crate) fn observe(
        &mut self,
        parts: &mut Parts,
        lease: &Lease,
        report: &mut CycleReport,
    ) -> Result<(), StoreError> {
        self.notice_operators(parts)?;
        if self.planner.is_none() || self.stale.runs {
            self.runs = parts.store.active_runs()?;
            self.stale.runs = false;
        }
        if self.planner.is_none() || self.stale.settled {
            self.settled = parts.store.settled_events()?;
            self.stale.settled = false;
        }
        // Nodes first: a result is classified by its machine type. Until the cluster has been observed once, results
        // stay where they are.
        let troubles = report.troubles.len();
        let Some(mut seen) = self.look(parts, report) else { return Ok(()) };
        recall(&parts.store, &*parts.backend, self.snapshot(), &mut seen)?;
        let answers = report.troubles.len() == troubles;
        let polled = self.poll(parts, report);
        self.keep_logs(parts, report);
        self.take_in(parts, lease, &seen, &polled, report)?;
        self.note_progress(parts, lease, &polled)?;
        // Skip the failed-work query if the snapshot failed.
        if answers {
            self.failures.update(parts, lease, &seen, report)?;
        }
        self.update_nodes(parts, seen)?;
        self.update_rest(parts, &polled)
    }

    /// Operators' commands are written by other processes; after one, nothing in memory is trusted.
    fn notice_operators(&mut self, parts: &Parts) -> Result<(), StoreError> {
        let operators = parts.store.operator_changes()?;
        if self.operators.is_some_and(|known| known != operators) {
            self.forget();
        }
        self.operators = Some(operators);
        Ok(())
    }

    fn poll(&mut self, parts: &Parts, report: &mut CycleReport) -> BTreeMap<RunId, PolledJob> {
        let ids: Vec<RunId> = self.runs.iter().map(|stored| stored.run.id).collect();
        if ids.is_empty() {
            return BTreeMap::new();
        }
        let span = span!(
            "backend.poll",
            otel.kind = "client",
            backend = parts.backend.name(),
            runs = ids.len() as u64,
            failed = Empty
        );
        match within(&span, || parts.backend.poll(&ids)) {
            Ok(jobs) => ids.into_iter().zip(jobs).collect(),
            Err(error) => {
                report.troubles.push(error.to_string());
                BTreeMap::new()
            }
        }
    }

    /// Saves logs that arrived with jobs, before their runs end with their results.
    fn keep_logs(&mut self, parts: &Parts, report: &mut CycleReport) {
        let Some(share) = &parts.share else { return };
        self.logged.retain(|(run, _)| self.runs.iter().any(|stored| stored.run.id == *run));
        for stored in &self.runs {
            for (node, text) in parts.backend.logs(stored.run.id) {
                if !self.logged.insert((stored.run.id, node.clone())) {
                    continue;
                }
                if let Err(error) = share.keep_log(&stored.run, &node, &text) {
                    report.troubles.push(error.to_string());
                }
            }
        }
    }

    /// Collects results first, because the plan depends on them.
    fn take_in(
        &mut self,
        parts: &mut Parts,
        lease: &Lease,
        seen: &[SeenNode],
        polled: &BTreeMap<RunId, PolledJob>,
        report: &mut CycleReport,
    ) -> Result<(), StoreError> {
        let snapshot = self.planner.as_ref().map(Planner::snapshot);
        let known = Known { runs: &self.runs, polled, seen, snapshot, settled: &self.settled, now: parts.clock.now() };
        let span = span!("ingest", results = Empty, rejected = Empty, failed = Empty);
        let taken = within(&span, || door::take_in(parts, lease, &known, &mut self.turned_away, report))?;
        span.record("results", report.results as u64).record("rejected", report.rejected as u64);
        if !taken.is_empty() {
            self.dirty.extend(taken);
            self.runs = parts.store.active_runs()?;
            self.stale.spent = true;
        }
        Ok(())
    }

    /// Records the progress of jobs once: that the backend has them, and that they started.
    fn note_progress(
        &mut self,
        parts: &Parts,
        lease: &Lease,
        polled: &BTreeMap<RunId, PolledJob>,
    ) -> Result<(), StoreError> {
        let now = parts.clock.now();
        for stored in &mut self.runs {
            let id = stored.run.id;
            let Some(job) = polled.get(&id) else { continue };
            if matches!(job.seen, JobSeen::Absent) {
                self.absent.entry(id).or_insert(now);
            } else {
                self.absent.remove(&id);
            }
            let (job_id, started) = match &job.seen {
                JobSeen::Pending { job, .. } => (job, None),
                JobSeen::Running { job, since } => (job, Some(*since)),
                JobSeen::Ended { job, started, .. } => (job, *started),
                JobSeen::Unknown { .. } | JobSeen::Absent => continue,
            };
            if matches!(stored.run.state, RunState::Planned) {
                parts.store.record_submitted(lease, id, job_id, now)?;
                stored.run.state = RunState::Submitted { job: job_id.clone(), at: now };
            }
            if let (None, Some(started)) = (stored.started, started) {
                parts.store.record_running(lease, id, started)?;
                stored.started = Some(started);
                stored.run.state = RunState::Running { job: job_id.clone(), since: started };
                self.dirty.extend(stored.run.nodes.iter().cloned());
            }
        }
        Ok(())
    }

    /// Returns the backend's nodes by name. An outage makes every known node `Unknown`; none disappear.
    fn look(&self, parts: &Parts, report: &mut CycleReport) -> Option<Vec<SeenNode>> {
        let span = span!("backend.snapshot", otel.kind = "client", backend = parts.backend.name(), failed = Empty);
        match within(&span, || parts.backend.snapshot()) {
            Ok(mut seen) => {
                mark_strangers(&self.runs, &mut seen);
                if !seen.is_sorted_by(|a, b| a.node.name < b.node.name) {
                    seen.sort_by(|a, b| a.node.name.cmp(&b.node.name));
                    seen.dedup_by(|a, b| a.node.name == b.node.name);
                }
                hear(&parts.inboxes, &mut seen);
                Some(seen)
            }
            Err(error) => {
                report.troubles.push(error.to_string());
                let known = &self.snapshot()?.nodes;
                let why: Arc<str> = error.to_string().into();
                let mut seen: Vec<SeenNode> = known
                    .iter()
                    .map(|record| {
                        let mut node = record.node.clone();
                        node.occupancy = Occupancy::Unknown { why: why.clone() };
                        SeenNode { node: node.into(), heard: record.heard, jobs: Vec::new() }
                    })
                    .collect();
                hear(&parts.inboxes, &mut seen);
                Some(seen)
            }
        }
    }

    fn update_nodes(&mut self, parts: &Parts, seen: Vec<SeenNode>) -> Result<(), StoreError> {
        let same = self.planner.as_ref().is_some_and(|planner| {
            let nodes = &planner.snapshot().nodes;
            nodes.len() == seen.len()
                && nodes
                    .iter()
                    .zip(&seen)
                    .all(|(known, seen)| known.node.name == seen.node.name && known.node.pool == seen.node.pool)
        });
        let Some(planner) = self.planner.as_mut().filter(|_| same) else {
            return self.rebuild(parts, seen);
        };
        let dirty: Vec<NodeName> = std::mem::take(&mut self.dirty).into_iter().collect();
        let mut stored = if dirty.is_empty() { BTreeMap::new() } else { parts.store.load_nodes_named(&dirty)? };
        let never = Records::never(parts.settings.tests.len());
        for (place, seen) in seen.into_iter().enumerate() {
            let known = &planner.snapshot().nodes[place];
            let again = dirty.binary_search(&seen.node.name).is_ok();
            if (again || known.node != *seen.node)
                && let Some(changed) = &mut self.changed
            {
                changed.push(known.node.name.clone());
            }
            let failed = self.failures.on(&seen.node.name);
            if again {
                let stored = stored.remove(&known.node.name);
                planner.set_node(record(&parts.settings.tests, &never, seen, stored, failed));
            } else if known.node != *seen.node || known.failed != failed {
                let mut record = known.clone();
                record.node = Arc::unwrap_or_clone(seen.node);
                (record.heard, record.failed) = (seen.heard, failed);
                planner.set_node(record);
            } else {
                planner.set_heard(place, seen.heard);
            }
        }
        Ok(())
    }

    fn rebuild(&mut self, parts: &Parts, seen: Vec<SeenNode>) -> Result<(), StoreError> {
        let mut stored = parts.store.load_nodes()?;
        let never = Records::never(parts.settings.tests.len());
        let nodes = seen
            .into_iter()
            .map(|seen| {
                let (known, failed) = (stored.remove(&seen.node.name), self.failures.on(&seen.node.name));
                record(&parts.settings.tests, &never, seen, known, failed)
            })
            .collect();
        self.dirty.clear();
        self.changed = None;
        self.stale = Stale { settled: false, runs: false, cases: true, spent: true, rest: true };
        self.planner = Some(Planner::new(Snapshot {
            at: parts.clock.now(),
            nodes,
            runs: Vec::new(),
            cases: Vec::new(),
            recent: RecentActions::default(),
            spent: Span::ZERO,
            breaker: parts.store.breaker()?,
            pauses: Vec::new(),
            requests: Vec::new(),
            trials: Vec::new(),
            silence_reported: false,
            caps: parts.backend.caps(),
            policy: parts.settings.policy.clone(),
            tests: parts.settings.tests.clone(),
        }));
        Ok(())
    }

    fn update_rest(&mut self, parts: &Parts, polled: &BTreeMap<RunId, PolledJob>) -> Result<(), StoreError> {
        let now = parts.clock.now();
        let today = now.millis().div_euclid(DAY);
        let Some(planner) = self.planner.as_mut() else { return Ok(()) };
        let runs = active(&self.runs, polled, &self.absent);
        planner.set_rest(|rest| *rest.runs = runs);
        if self.stale.cases {
            let memory = parts.settings.policy.repair.memory;
            let cases = parts.store.cases(now.minus(memory))?;
            let taken_out = parts.store.taken_out_since(now.minus(Span::hours(1)))?;
            planner.set_rest(|rest| {
                *rest.cases = cases;
                rest.recent.taken_out = taken_out;
            });
            self.stale.cases = false;
        }
        if self.stale.spent || self.day != Some(today) {
            let spent = parts.store.spent_since(Timestamp::from_millis(today * DAY))?;
            planner.set_rest(|rest| *rest.spent = spent);
            self.stale.spent = false;
        }
        if self.stale.rest || self.day != Some(today) {
            let (breaker, pauses) = (parts.store.breaker()?, parts.store.pauses(now)?);
            let (requests, silence) = (parts.store.requests()?, parts.store.silence_reported()?);
            planner.set_rest(|rest| {
                *rest.breaker = breaker;
                *rest.pauses = pauses;
                *rest.requests = requests;
                *rest.silence_reported = silence;
            });
            self.stale.rest = false;
            self.day = Some(today);
        }
        self.update_trials(parts)
    }

    /// Loads the results of the trials that requests wait for.
    fn update_trials(&mut self, parts: &Parts) -> Result<(), StoreError> {
        let Some(planner) = self.planner.as_mut() else { return Ok(()) };
        let asked = planner.snapshot().requests.iter().flat_map(|request| match &request.what {
            Asked::Together { trials, .. } => trials.as_slice(),
            _ => &[],
        });
        let mut trials = Vec::new();
        for run in asked {
            trials.extend(parts.store.run(*run)?.map(|record| Trial::of(&record.run)));
        }
        if planner.snapshot().trials != trials {
            planner.set_rest(|rest| *rest.trials = trials);
        }
        Ok(())
    }

    /// Updates the memory for what a commit changed in the store.
    pub(crate) fn committed(&mut self, actions: &[Because<Action>], keys: &BTreeMap<RunId, RunKey>) {
        for action in actions {
            match &action.what {
                Action::Submit(run) => {
                    self.stale.settled |= run.case.is_some();
                    if let Some(key) = keys.get(&run.id) {
                        let (run, key) = (run.clone(), key.clone());
                        self.runs.push(StoredRun { run, key, started: None, cancelling: None });
                    }
                    self.stale.runs = true;
                }
                Action::Resubmit { .. } | Action::Cancel { .. } => self.stale.runs = true,
                Action::Conclude { run, .. } => {
                    self.stale.runs = true;
                    self.stale.spent = true;
                    self.absent.remove(run);
                    self.turned_away.forget(*run);
                    let stored = self.runs.iter().find(|stored| stored.run.id == *run);
                    self.dirty.extend(stored.into_iter().flat_map(|stored| stored.run.nodes.iter().cloned()));
                }
                Action::OpenCase(case) => {
                    self.stale.cases = true;
                    self.dirty.insert(case.node.clone());
                }
                Action::Escalate { .. } | Action::Settle { .. } => self.stale.cases = true,
                Action::Worsen { node, .. }
                | Action::Advise { node, .. }
                | Action::Step { node, .. }
                | Action::Propose { node, .. }
                | Action::CloseCase { node, .. }
                | Action::Follow { node, .. }
                | Action::Move { node, .. }
                | Action::Identify { node, .. }
                | Action::Name { node, .. }
                | Action::Rename { node, .. } => {
                    if matches!(action.what, Action::Rename { .. }) {
                        self.failures.forget();
                    }
                    self.stale.cases = true;
                    self.dirty.insert(node.clone());
                }
                Action::Tidy { .. } => {}
                Action::OpenBreaker | Action::Notice(_) | Action::Try { .. } => self.stale.rest = true,
                Action::Answer { .. } => {
                    self.stale.rest = true;
                    self.stale.settled = true;
                }
            }
        }
    }
}

/// Applies the report times of agents that report to this controller, in addition to the cluster's.
fn hear(inboxes: &[Box<dyn Inbox>], seen: &mut [SeenNode]) {
    for inbox in inboxes {
        for seen in seen.iter_mut() {
            seen.heard = seen.heard.max(inbox.heard(&seen.node.name));
        }
    }
}
