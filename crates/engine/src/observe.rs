//! Observation: builds one snapshot from the backend's response, new results and the store.
//!
//! [`PlannerState`] is the planner with its snapshot, updated by what changed since the last cycle.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use doctor_backend::{ObservedNode, PolledJob};
use doctor_checks::document::RunKey;
use doctor_core::{
    ids::{IdSource, NodeName, RunId},
    node::Occupancy,
    observation::AcknowledgedEvents,
    plan::{Action, Plan, Planner, TakeOutPermit},
    reason::WithReason,
    run::{ObservedJobState, Run, RunState},
    snapshot::{CommandKind, NodeRecord, RecentActions, Snapshot, TestRecords, Trial},
    time::{Span, Timestamp},
};
use doctor_store::{Lease, StoreError, records::StoredRun};
use tracing::field::Empty;

use crate::{
    collect_results::{self, IngestState},
    cycle_report::CycleReport,
    deps::EngineDeps,
    inbox::Inbox,
    ingest_context::IngestContext,
    job_failures::JobFailures,
    job_logs::JobLogs,
    mark_recovery::restore_marks,
    queued_results,
    snapshot::{active_runs, mark_unknown_jobs, node_record},
    spans::{in_span, span},
};

const DAY: i64 = 86_400_000;

/// State kept between cycles.
#[derive(Debug, Default)]
pub(crate) struct PlannerState {
    planner: Option<Planner>,
    runs: Vec<StoredRun>,
    /// Since when the backend has not known a run's job.
    absent_since: BTreeMap<RunId, Timestamp>,
    ingest: IngestState,
    /// What was entered since the last cycle.
    entered: CycleReport,
    /// Logs that arrived with jobs.
    logs: JobLogs,
    failures: JobFailures,
    /// Acknowledged events, by node.
    acknowledged: BTreeMap<NodeName, Vec<AcknowledgedEvents>>,
    /// Nodes changed in the planner since the last call of [`Self::take_changed`]; `None`: all of them.
    changed: Option<Vec<NodeName>>,
    /// Nodes with newer data in the store than in the planner.
    dirty: BTreeSet<NodeName>,
    stale: StaleTables,
    /// A counter that grows when another process writes to the store.
    operator_changes: Option<u64>,
    day: Option<i64>,
    /// Whether the cluster answered in this cycle.
    observed_now: bool,
    /// When the cluster last answered.
    observed_at: Option<Timestamp>,
    last_recorded: Option<Timestamp>,
}

/// Which of the small tables must be read again.
#[derive(Debug, Default)]
struct StaleTables {
    acknowledged: bool,
    runs: bool,
    cases: bool,
    node_hours: bool,
    other: bool,
}

impl PlannerState {
    /// Discards everything; the next cycle reads it again.
    pub(crate) fn discard(&mut self) {
        *self = Self { last_recorded: self.last_recorded, ..Self::default() };
    }

    pub(crate) fn snapshot(&self) -> Option<&Snapshot> {
        self.planner.as_ref().map(Planner::snapshot)
    }

    /// Returns when the cluster last answered; `None`: not since this state was built.
    pub(crate) const fn observed_at(&self) -> Option<Timestamp> {
        self.observed_at
    }

    pub(crate) fn plan(&mut self, now: Timestamp, ids: &mut IdSource) -> Option<Plan> {
        if self.observed_now {
            self.observed_at = Some(now);
        }
        self.planner.as_mut().map(|planner| planner.plan(now, ids))
    }

    /// Returns the nodes that another program may take out; `None`: the cluster was not observed yet.
    pub(crate) fn removal_allowance(&self) -> Option<TakeOutPermit> {
        self.planner.as_ref().map(Planner::take_out_permit)
    }

    /// Returns the nodes with newer data in the store than in the snapshot.
    pub(crate) fn nodes_behind_store(&self) -> Vec<NodeName> {
        self.dirty.iter().cloned().collect()
    }

    /// Returns the nodes that changed since the last call; `None`: any node may have.
    pub(crate) fn take_changed(&mut self) -> Option<Vec<NodeName>> {
        self.changed.replace(Vec::new())
    }

    pub(crate) fn idle_for(&self, now: Timestamp) -> Span {
        self.last_recorded.map_or(Span::days(1), |recorded| now.since(recorded))
    }

    pub(crate) fn set_recorded(&mut self, now: Timestamp) {
        self.last_recorded = Some(now);
    }

    pub(crate) fn runs_with_keys(&self, ids: &BTreeSet<RunId>) -> BTreeMap<RunId, (Run, RunKey)> {
        let runs = self.runs.iter().filter(|stored| ids.contains(&stored.run.id));
        runs.map(|stored| (stored.run.id, (stored.run.clone(), stored.key.clone()))).collect()
    }

    /// Returns the runs that had not ended when they were last read.
    pub(crate) fn active_runs(&self) -> &[StoredRun] {
        &self.runs
    }

    pub(crate) fn fill_counts(&self, report: &mut CycleReport) {
        if let Some(snapshot) = self.snapshot() {
            report.nodes = snapshot.nodes.len();
            report.free = snapshot.nodes.iter().filter(|record| record.node.occupancy.is_free()).count();
            report.running = self.runs.len();
        }
    }

    pub(crate) fn observe(
        &mut self,
        deps: &mut EngineDeps,
        lease: &Lease,
        report: &mut CycleReport,
    ) -> Result<(), StoreError> {
        let entered = std::mem::take(&mut self.entered);
        report.results += entered.results;
        report.rejected += entered.rejected;
        report.problems.extend(entered.problems);
        self.detect_operator_changes(deps)?;
        self.observed_now = false;
        if self.planner.is_none() || self.stale.runs {
            self.runs = deps.store.active_runs()?;
            self.stale.runs = false;
        }
        if self.planner.is_none() || self.stale.acknowledged {
            self.acknowledged = deps.store.acknowledged_events()?;
            self.stale.acknowledged = false;
        }
        // Nodes first: a result is classified by its machine type. Until the cluster has been observed once, results
        // stay where they are.
        let problems_before = report.problems.len();
        let Some(mut observed) = self.observe_nodes(deps, report) else { return Ok(()) };
        restore_marks(&deps.store, &*deps.backend, self.snapshot(), &mut observed)?;
        let snapshot_succeeded = report.problems.len() == problems_before;
        let mut polled = self.poll(deps, report);
        self.save_logs(deps, lease)?;
        self.collect_results(deps, lease, &observed, &polled, report)?;
        self.hold_unread_runs(&mut polled);
        self.record_progress(deps, lease, &polled)?;
        // Skip the failed-work query if the snapshot failed.
        if snapshot_succeeded {
            self.failures.update(deps, lease, &observed, report)?;
        }
        deps.progress.enter("read the store");
        self.update_nodes(deps, observed)?;
        self.update_rest(deps, &polled)?;
        self.observed_now = snapshot_succeeded;
        Ok(())
    }

    /// Operators' commands are written by other processes; after one, nothing in memory is trusted.
    fn detect_operator_changes(&mut self, deps: &EngineDeps) -> Result<(), StoreError> {
        let operators = deps.store.operator_changes()?;
        if self.operator_changes.is_some_and(|known| known != operators) {
            self.discard();
        }
        self.operator_changes = Some(operators);
        Ok(())
    }

    fn poll(&mut self, deps: &EngineDeps, report: &mut CycleReport) -> BTreeMap<RunId, PolledJob> {
        let ids: Vec<RunId> = self.runs.iter().map(|stored| stored.run.id).collect();
        deps.backend.set_recorded_runs(&self.runs.iter().map(|stored| &stored.run).collect::<Vec<_>>());
        if ids.is_empty() {
            return BTreeMap::new();
        }
        let span = span!(
            "backend.poll",
            otel.kind = "client",
            backend = deps.backend.name(),
            runs = ids.len() as u64,
            failed = Empty
        );
        deps.progress.enter("ask for the state of jobs");
        match in_span(&span, || deps.backend.poll(&ids)) {
            Ok(jobs) => ids.into_iter().zip(jobs).collect(),
            Err(error) => {
                report.problems.push(error.to_string());
                BTreeMap::new()
            }
        }
    }

    /// Saves logs that arrived with jobs, before their runs end with their results.
    fn save_logs(&mut self, deps: &EngineDeps, lease: &Lease) -> Result<(), StoreError> {
        let Some(share) = &deps.share else { return Ok(()) };
        let to = (&deps.store, lease, deps.clock.now());
        self.logs.save(share, to, &self.runs, &*deps.backend, || deps.progress.tick())
    }

    /// A job that is gone has left no result only if that could be looked for: until the shared directory answers, nothing is
    /// known of it, and the plan does not end its run.
    fn hold_unread_runs(&self, polled: &mut BTreeMap<RunId, PolledJob>) {
        for stored in self.runs.iter().filter(|stored| self.ingest.unread.contains(&stored.run.id)) {
            let Some(job) = polled.get_mut(&stored.run.id) else { continue };
            let is_submitted = !matches!(stored.run.state, RunState::Planned);
            let is_gone = match &job.state {
                ObservedJobState::Ended { .. } => true,
                ObservedJobState::Absent => is_submitted,
                ObservedJobState::Unknown { .. }
                | ObservedJobState::Pending { .. }
                | ObservedJobState::Running { .. } => false,
            };
            if is_gone {
                job.state = ObservedJobState::Unknown { why: "its result could not be looked for".into() };
            }
        }
    }

    /// Enters the messages of the ingest queue without a cycle, with the cluster as the last one observed it. The next
    /// cycle plans with them, and reports them.
    pub(crate) fn enter_messages(&mut self, deps: &EngineDeps, lease: &Lease) -> Result<(), StoreError> {
        let Some(snapshot) = self.planner.as_ref().map(Planner::snapshot) else { return Ok(()) };
        let observed = |record: &NodeRecord| ObservedNode {
            node: Arc::clone(&record.node),
            agent_last_seen: record.last_report,
            jobs: Vec::new(),
        };
        let nodes: Vec<ObservedNode> = snapshot.nodes.iter().map(observed).collect();
        let known = IngestContext {
            runs: &self.runs,
            polled: &BTreeMap::new(),
            nodes: &nodes,
            snapshot: Some(snapshot),
            acknowledged: &self.acknowledged,
            now: deps.clock.now(),
        };
        let span = span!("ingest", results = Empty, rejected = Empty, failed = Empty);
        let mut report = CycleReport::default();
        let (agreements, mut changed) = (&mut self.ingest.agreements, Vec::new());
        in_span(&span, || queued_results::enter(deps, lease, &known, agreements, (&mut changed, &mut report)))?;
        span.record("results", report.results as u64).record("rejected", report.rejected as u64);
        self.entered.results += report.results;
        self.entered.rejected += report.rejected;
        self.entered.problems.append(&mut report.problems);
        self.record_changes(deps, changed, report.results > 0)
    }

    /// Notes which nodes have newer data in the store, and reads the runs again if some have results.
    fn record_changes(
        &mut self,
        deps: &EngineDeps,
        changed_nodes: Vec<NodeName>,
        has_results: bool,
    ) -> Result<(), StoreError> {
        self.dirty.extend(changed_nodes);
        if has_results {
            self.runs = deps.store.active_runs()?;
            self.stale.node_hours = true;
        }
        Ok(())
    }

    /// Collects results first, because the plan depends on them.
    fn collect_results(
        &mut self,
        deps: &mut EngineDeps,
        lease: &Lease,
        observed: &[ObservedNode],
        polled: &BTreeMap<RunId, PolledJob>,
        report: &mut CycleReport,
    ) -> Result<(), StoreError> {
        let snapshot = self.planner.as_ref().map(Planner::snapshot);
        let known = IngestContext {
            runs: &self.runs,
            polled,
            nodes: observed,
            snapshot,
            acknowledged: &self.acknowledged,
            now: deps.clock.now(),
        };
        deps.progress.enter("collect results");
        let span = span!("ingest", results = Empty, rejected = Empty, failed = Empty);
        let results_before = report.results;
        let changed_nodes = in_span(&span, || collect_results::collect(deps, lease, &known, &mut self.ingest, report))?;
        span.record("results", report.results as u64).record("rejected", report.rejected as u64);
        self.record_changes(deps, changed_nodes, report.results > results_before || self.ingest.failed)
    }

    /// Records the progress of jobs once: that the backend has them, and that they started.
    fn record_progress(
        &mut self,
        deps: &EngineDeps,
        lease: &Lease,
        polled: &BTreeMap<RunId, PolledJob>,
    ) -> Result<(), StoreError> {
        let now = deps.clock.now();
        for stored in &mut self.runs {
            let id = stored.run.id;
            let Some(job) = polled.get(&id) else { continue };
            if matches!(job.state, ObservedJobState::Absent) {
                self.absent_since.entry(id).or_insert(now);
            } else {
                self.absent_since.remove(&id);
            }
            let (job_id, started) = match &job.state {
                ObservedJobState::Pending { job, .. } => (job, None),
                ObservedJobState::Running { job, since } => (job, Some(*since)),
                ObservedJobState::Ended { job, started, .. } => (job, *started),
                ObservedJobState::Unknown { .. } | ObservedJobState::Absent => continue,
            };
            if matches!(stored.run.state, RunState::Planned) {
                deps.store.record_submitted(lease, id, job_id, now)?;
                stored.run.state = RunState::Submitted { job: job_id.clone(), at: now };
            }
            if let (None, Some(started)) = (stored.started, started) {
                deps.store.record_running(lease, id, started)?;
                stored.started = Some(started);
                stored.run.state = RunState::Running { job: job_id.clone(), since: started };
                self.dirty.extend(stored.run.nodes.iter().cloned());
            }
        }
        Ok(())
    }

    /// Returns the backend's nodes by name. An outage makes every known node `Unknown`; none disappear.
    fn observe_nodes(&self, deps: &EngineDeps, report: &mut CycleReport) -> Option<Vec<ObservedNode>> {
        let span = span!("backend.snapshot", otel.kind = "client", backend = deps.backend.name(), failed = Empty);
        deps.progress.enter("observe the nodes");
        match in_span(&span, || deps.backend.snapshot()) {
            Ok(mut observed) => {
                if let Err(error) = mark_unknown_jobs(&deps.store, &self.runs, &mut observed) {
                    report.problems.push(error.to_string());
                }
                if !observed.is_sorted_by(|a, b| a.node.name < b.node.name) {
                    observed.sort_by(|a, b| a.node.name.cmp(&b.node.name));
                    observed.dedup_by(|a, b| a.node.name == b.node.name);
                }
                apply_report_times(&deps.inboxes, &mut observed);
                Some(observed)
            }
            Err(error) => {
                report.problems.push(error.to_string());
                let known = &self.snapshot()?.nodes;
                let why: Arc<str> = error.to_string().into();
                let mut observed: Vec<ObservedNode> = known
                    .iter()
                    .map(|record| {
                        let mut node = Arc::clone(&record.node);
                        Arc::make_mut(&mut node).occupancy = Occupancy::Unknown { why: why.clone() };
                        ObservedNode { node, agent_last_seen: record.last_report, jobs: Vec::new() }
                    })
                    .collect();
                apply_report_times(&deps.inboxes, &mut observed);
                Some(observed)
            }
        }
    }

    fn update_nodes(&mut self, deps: &EngineDeps, observed: Vec<ObservedNode>) -> Result<(), StoreError> {
        let same = self.planner.as_ref().is_some_and(|planner| {
            let nodes = &planner.snapshot().nodes;
            nodes.len() == observed.len()
                && nodes.iter().zip(&observed).all(|(known, observed)| {
                    known.node.name == observed.node.name && known.node.pool == observed.node.pool
                })
        });
        let Some(planner) = self.planner.as_mut().filter(|_| same) else {
            return self.rebuild(deps, observed);
        };
        let dirty: Vec<NodeName> = std::mem::take(&mut self.dirty).into_iter().collect();
        let mut stored = if dirty.is_empty() { BTreeMap::new() } else { deps.store.load_nodes_named(&dirty)? };
        let never = TestRecords::untested(deps.settings.tests.len());
        for (index, observed) in observed.into_iter().enumerate() {
            let known = &planner.snapshot().nodes[index];
            let reload = dirty.binary_search(&observed.node.name).is_ok();
            if (reload || known.node != observed.node)
                && let Some(changed) = &mut self.changed
            {
                changed.push(known.node.name.clone());
            }
            let failed = self.failures.for_node(&observed.node.name);
            if reload {
                let stored = stored.remove(&known.node.name);
                planner.set_node(node_record(&deps.settings.tests, &never, observed, stored, failed));
            } else if known.node != observed.node || known.job_failures != failed {
                let mut record = known.clone();
                record.node = observed.node;
                (record.last_report, record.job_failures) = (observed.agent_last_seen, failed);
                planner.set_node(record);
            } else {
                planner.set_last_report(index, observed.agent_last_seen);
            }
        }
        Ok(())
    }

    fn rebuild(&mut self, deps: &EngineDeps, observed: Vec<ObservedNode>) -> Result<(), StoreError> {
        let mut stored = deps.store.load_nodes()?;
        let never = TestRecords::untested(deps.settings.tests.len());
        let nodes = observed
            .into_iter()
            .map(|observed| {
                let (known, failed) = (stored.remove(&observed.node.name), self.failures.for_node(&observed.node.name));
                node_record(&deps.settings.tests, &never, observed, known, failed)
            })
            .collect();
        self.dirty.clear();
        self.changed = None;
        self.stale = StaleTables { acknowledged: false, runs: false, cases: true, node_hours: true, other: true };
        self.planner = Some(Planner::new(Snapshot {
            at: deps.clock.now(),
            planned_at: None,
            nodes,
            runs: Vec::new(),
            cases: Vec::new(),
            recent: RecentActions::default(),
            spent: Span::ZERO,
            breaker: deps.store.breaker()?,
            pauses: Vec::new(),
            commands: Vec::new(),
            trials: Vec::new(),
            silence_reported: false,
            capabilities: deps.backend.caps(),
            policy: deps.settings.policy.clone(),
            tests: deps.settings.tests.clone(),
        }));
        Ok(())
    }

    fn update_rest(&mut self, deps: &EngineDeps, polled: &BTreeMap<RunId, PolledJob>) -> Result<(), StoreError> {
        let now = deps.clock.now();
        let today = now.millis().div_euclid(DAY);
        let Some(planner) = self.planner.as_mut() else { return Ok(()) };
        let runs = active_runs(&self.runs, polled, &self.absent_since);
        planner.update_cluster(|rest| *rest.runs = runs);
        if self.stale.cases {
            let memory = deps.settings.policy.repair.memory;
            let cases = deps.store.cases(now.minus(memory))?;
            let taken_out = deps.store.nodes_taken_out_since(now.minus(Span::hours(1)))?;
            planner.update_cluster(|rest| {
                *rest.cases = cases;
                rest.recent.taken_out = taken_out;
            });
            self.stale.cases = false;
        }
        if self.stale.node_hours || self.day != Some(today) {
            let spent = deps.store.node_time_since(Timestamp::from_millis(today * DAY))?;
            planner.update_cluster(|rest| *rest.spent = spent);
            self.stale.node_hours = false;
        }
        if self.stale.other || self.day != Some(today) {
            let (breaker, pauses) = (deps.store.breaker()?, deps.store.pauses(now)?);
            let (requests, silence) = (deps.store.open_commands()?, deps.store.agent_silence_reported()?);
            planner.update_cluster(|rest| {
                *rest.breaker = breaker;
                *rest.pauses = pauses;
                *rest.requests = requests;
                *rest.silence_reported = silence;
            });
            self.stale.other = false;
            self.day = Some(today);
        }
        self.update_trials(deps)
    }

    /// Loads the results of the trials that requests wait for.
    fn update_trials(&mut self, deps: &EngineDeps) -> Result<(), StoreError> {
        let Some(planner) = self.planner.as_mut() else { return Ok(()) };
        let snapshot = planner.snapshot();
        let trial_runs = snapshot.commands.iter().flat_map(|request| match &request.kind {
            CommandKind::MultiNodeTest { trials, .. } => trials.as_slice(),
            CommandKind::Test { run, .. } => run.as_slice(),
            CommandKind::Release { .. }
            | CommandKind::Quarantine { .. }
            | CommandKind::Repair { .. }
            | CommandKind::CancelRun { .. } => &[],
        });
        let active: HashMap<RunId, &Run> = snapshot.runs.iter().map(|active| (active.run.id, &active.run)).collect();
        let mut trials = Vec::new();
        for run in trial_runs {
            match active.get(run) {
                Some(run) => trials.push(Trial::of(run)),
                None => trials.extend(deps.store.run(*run)?.map(|record| Trial::of(&record.run))),
            }
        }
        if planner.snapshot().trials != trials {
            planner.update_cluster(|rest| *rest.trials = trials);
        }
        Ok(())
    }

    /// Updates the memory for what a commit changed in the store.
    pub(crate) fn apply_commit(&mut self, actions: &[WithReason<Action>], keys: &BTreeMap<RunId, RunKey>) {
        for action in actions {
            match &action.value {
                Action::Submit(run) => {
                    self.stale.acknowledged |= run.case.is_some();
                    if let Some(key) = keys.get(&run.id) {
                        let (run, key) = (run.clone(), key.clone());
                        self.runs.push(StoredRun { run, key, started: None, cancelling: None });
                    }
                    self.stale.runs = true;
                }
                Action::Resubmit { .. } | Action::Cancel { .. } => self.stale.runs = true,
                Action::Conclude { run, .. } => {
                    self.stale.runs = true;
                    self.stale.node_hours = true;
                    self.absent_since.remove(run);
                    self.ingest.rejected.forget(*run);
                    let stored = self.runs.iter().find(|stored| stored.run.id == *run);
                    self.dirty.extend(stored.into_iter().flat_map(|stored| stored.run.nodes.iter().cloned()));
                }
                Action::OpenCase(case) => {
                    self.stale.cases = true;
                    self.dirty.insert(case.node.clone());
                }
                Action::Escalate { .. } | Action::CompleteStep { .. } => self.stale.cases = true,
                Action::RaiseSeverity { node, .. }
                | Action::Advise { node, .. }
                | Action::Step { node, .. }
                | Action::RequestRepair { node, .. }
                | Action::Propose { node, .. }
                | Action::CloseCase { node, .. }
                | Action::RebindCase { node, .. }
                | Action::WithdrawStep { node, .. }
                | Action::SetState { node, .. }
                | Action::HardwareIdentified { node, .. }
                | Action::AttributeFault { node, .. }
                | Action::HardwareReplaced { node, .. } => {
                    if matches!(action.value, Action::HardwareReplaced { .. }) {
                        self.failures.forget();
                    }
                    self.stale.cases = true;
                    self.dirty.insert(node.clone());
                }
                Action::RemoveMaintenanceMark { .. } => {}
                Action::OpenBreaker
                | Action::Notice(_)
                | Action::StartTrial { .. }
                | Action::WithdrawCommand { .. } => self.stale.other = true,
                Action::CompleteCommand { .. } => {
                    self.stale.other = true;
                    self.stale.acknowledged = true;
                }
            }
        }
    }
}

/// Applies the report times of agents that report to this controller, in addition to the cluster's.
fn apply_report_times(inboxes: &[Box<dyn Inbox>], observed: &mut [ObservedNode]) {
    for inbox in inboxes {
        for observed in observed.iter_mut() {
            observed.agent_last_seen = observed.agent_last_seen.max(inbox.last_report(&observed.node.name));
        }
    }
}

#[cfg(test)]
mod tests {
    use doctor_core::{
        ids::{JobId, TestId},
        reason::WithReason,
        run::{JobEnd, NonEmpty, Purpose},
    };

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_794_729_600);

    fn stored(number: u64, state: RunState) -> StoredRun {
        let run = Run {
            id: RunId::from_number(number),
            nodes: NonEmpty::one(NodeName::new("n1").unwrap()),
            tests: NonEmpty::one(TestId::new("memory").unwrap()),
            state,
            purpose: WithReason::new(Purpose::Validation, "due", "x"),
            case: None,
            planned: NOW,
            limit: Span::minutes(5),
        };
        StoredRun { run, key: RunKey::new([1; 32]), started: Some(NOW), cancelling: None }
    }

    #[test]
    fn a_run_whose_result_could_not_be_looked_for_does_not_end_without_one() {
        let job = JobId("job".to_owned());
        let submitted = || RunState::Submitted { job: job.clone(), at: NOW };
        let ended = || ObservedJobState::Ended { job: job.clone(), started: Some(NOW), at: NOW, how: JobEnd::Exited };
        let running = || ObservedJobState::Running { job: job.clone(), since: NOW };
        let states = [
            (submitted(), ended(), true),
            (submitted(), ObservedJobState::Absent, true),
            // It was never submitted: there is no result to wait for.
            (RunState::Planned, ObservedJobState::Absent, false),
            (submitted(), running(), false),
        ];
        for (state, seen, waits) in states {
            let run = stored(7, state);
            let id = run.run.id;
            let mut polled = BTreeMap::from([(id, PolledJob { state: seen.clone(), documents: Vec::new() })]);
            let mut planner_state = PlannerState { runs: vec![run], ..PlannerState::default() };
            planner_state.hold_unread_runs(&mut polled);
            assert_eq!(polled[&id].state, seen, "the share answered");
            planner_state.ingest.unread.insert(id);
            planner_state.hold_unread_runs(&mut polled);
            assert_eq!(matches!(polled[&id].state, ObservedJobState::Unknown { .. }), waits, "{seen:?}");
        }
    }
}
