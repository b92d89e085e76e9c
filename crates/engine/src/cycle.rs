//! The control loop. One cycle is a straight line: observe, plan, commit, act, record, publish.
//!
//! Guarantee. A cycle completes whatever the last one left unfinished, because it reads the cluster and the recorded
//! intents, never its own memory of what it did. A controller killed at any instant loses nothing: each intent is in
//! the store before its effect, effects are idempotent by id, and results wait in the ingest queue or on the share.
//!
//! Principles. The cycle decides nothing: [`doctor_core::plan`] does, from a snapshot. Anything that could not be
//! observed is `Unknown` in it, never absent. Each effect may fail on its own. The planner's input is kept in memory
//! and updated by what changed, so that a quiet cycle over ten thousand nodes costs next to nothing; this memory is
//! only a copy of the store and of the backend's last response, and is discarded when either cannot be trusted.
//!
//! Rejected alternatives. An event-driven controller with a queue per node: its state is spread over queues that are
//! lost with the process, and the order of effects depends on timing. A cycle that acts while it decides: it cannot be
//! replayed, and one slow call delays every decision behind it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use doctor_backend::progress::{BootTime, Progress};
use doctor_checks::document::RunKey;
use doctor_core::{
    alert::{self, Route},
    classify::{self, Baselines, ExpectationSources},
    finding::Finding,
    ids::{IdSource, RunId},
    observation::{Entity, Event, Observation},
    plan::{Action, Plan, TakeOutPermit},
    reason::WithReason,
    run::Run,
    time::{Span, Timestamp},
};
use doctor_store::{
    Lease, LeaseClock, LeaseError, Store, StoreError, outbox,
    records::{CycleId, CycleIntent, RetentionPolicy, RetentionSummary, RoutedNote},
};
use tracing::field::Empty;

use crate::{
    cycle_report::CycleReport,
    deps::EngineDeps,
    execute::Executor,
    expired_files, fence, job_outputs,
    lease_keeper::LeaseKeeper,
    observe::PlannerState,
    publish::Publisher,
    settings::Settings,
    snapshot_feed::{ObservedSnapshot, SnapshotFeed},
    spans::{in_span, record_failure, span},
    status_sync::{StatusSync, SyncDeps},
};

#[derive(Debug, thiserror::Error)]
pub enum CycleError {
    /// Another controller leads; this one stays passive and may try again.
    #[error("another controller leads: {by} until {until}")]
    NotLeader { by: String, until: Timestamp },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The controller's engine.
pub struct Engine {
    /// The store among them reports progress.
    deps: EngineDeps,
    /// The store for everything outside the loop.
    store: Store,
    lease: Option<Lease>,
    /// Renews the lease. `None` in a simulation, whose clock stands still during a cycle.
    lease_keeper: Option<LeaseKeeper>,
    ids: IdSource,
    planner_state: PlannerState,
    status_sync: StatusSync,
    publisher: Publisher,
    /// A persistent problem that the caller reports.
    persistent_problem: Option<String>,
    /// Whether the last recorded cycle had a problem: its end is recorded, too.
    recorded_problem: bool,
    /// Notification routes by receiver.
    routes: Vec<(String, Route)>,
    /// The URL to which jobs post their results.
    results_url: Option<String>,
    /// The snapshot feed for readers in this process.
    snapshot_feed: Option<Arc<SnapshotFeed>>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("parts", &self.deps).finish_non_exhaustive()
    }
}

/// Maximum interval between recorded cycles: an idle cycle is recorded this often, so that its age is known.
const HEARTBEAT: Span = Span::minutes(10);

impl Engine {
    pub fn new(mut deps: EngineDeps) -> Self {
        deps.backend.set_progress(&deps.progress);
        let progress = deps.progress.clone();
        let store = deps.store.clone();
        deps.store = store.with_progress(move || progress.tick());
        let ids = IdSource::new(deps.salt);
        let publisher = Publisher::new(deps.publish_every);
        Self {
            deps,
            store,
            lease: None,
            lease_keeper: None,
            ids,
            planner_state: PlannerState::default(),
            status_sync: StatusSync::default(),
            publisher,
            persistent_problem: None,
            recorded_problem: false,
            results_url: None,
            snapshot_feed: None,
            routes: Vec::new(),
        }
    }

    /// Returns the store. Its use does not count as progress of the loop.
    pub const fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the store for work of the loop itself: each transaction counts as progress.
    pub const fn loop_store(&self) -> &Store {
        &self.deps.store
    }

    pub const fn progress(&self) -> &Progress {
        &self.deps.progress
    }

    /// Lets this thread renew the lease from the next cycle on.
    pub fn set_lease_keeper(&mut self, keeper: LeaseKeeper) {
        self.lease_keeper = Some(keeper);
    }

    fn set_lease(&mut self, lease: Option<Lease>) {
        if let Some(keeper) = &self.lease_keeper {
            keeper.keep(lease.as_ref());
        }
        // After the keeper has let go of it: a renewal of the keeper would allow effects again.
        if let (Some(lost), None) = (&self.lease, &lease) {
            self.deps.progress.end_effects(lost.fence);
        }
        self.lease = lease;
    }

    pub const fn settings(&self) -> &Settings {
        &self.deps.settings
    }

    /// Replaces the whole configuration between two cycles.
    pub fn set_settings(&mut self, settings: Settings) {
        self.deps.settings = settings;
        self.planner_state.discard();
    }

    /// Sets a persistent problem, such as an unusable configuration file. Every cycle reports it until it is cleared.
    pub fn set_persistent_problem(&mut self, problem: Option<String>) {
        self.persistent_problem = problem;
    }

    /// Sets the notification routes used from the next cycle, by receiver. The engine stores messages together with the
    /// plan; a delivery worker sends them.
    pub fn set_routes(&mut self, routes: Vec<(String, Route)>) {
        self.routes = routes;
    }

    /// Sets the URL of the agent endpoint to which jobs post their results, beside their other ways.
    pub fn set_results_url(&mut self, url: Option<String>) {
        self.results_url = url;
    }

    /// Publishes a snapshot to this feed after each cycle.
    pub fn set_snapshot_feed(&mut self, feed: Arc<SnapshotFeed>) {
        self.snapshot_feed = Some(feed);
    }

    /// Deletes expired data in the store and on the share. Does nothing while another controller leads.
    ///
    /// # Errors
    /// If the store fails.
    pub fn prune(&mut self, keep: RetentionPolicy) -> Result<RetentionSummary, StoreError> {
        let Some(lease) = &self.lease else { return Ok(RetentionSummary::default()) };
        self.deps.progress.enter("remove expired data");
        let pruned = self.deps.store.apply_retention(lease, self.deps.clock.now(), keep)?;
        if let Some(share) = &self.deps.share {
            let removed = expired_files::remove(share, &pruned.logs, keep.evidence, self.deps.clock.now());
            self.deps.store.logs_deleted(lease, &removed)?;
        }
        Ok(pruned)
    }

    /// Runs one cycle.
    ///
    /// # Errors
    /// If another controller leads, or the store fails. A failing backend is not an error: nodes become `Unknown`.
    pub fn cycle(&mut self) -> Result<CycleReport, CycleError> {
        let span = span!(
            "cycle",
            backend = self.deps.backend.name(),
            leads = Empty,
            nodes = Empty,
            free = Empty,
            running = Empty,
            actions = Empty,
            results = Empty,
            rejected = Empty,
            problems = Empty,
            failed = Empty
        );
        self.deps.progress.enter("acquire the lease");
        let outcome = span.in_scope(|| {
            let outcome = self.acquire_lease().and_then(|lease| self.run(&lease));
            self.publish_snapshot(outcome.is_ok());
            outcome
        });
        record_outcome(&span, &outcome);
        if let Err(CycleError::Store(error)) = &outcome {
            // The memory is a copy of a store that may have changed.
            self.planner_state.discard();
            if error.is_lease_lost() {
                self.set_lease(None);
            }
        }
        self.deps.progress.enter("between cycles");
        outcome
    }

    /// Enters the messages that nodes have sent since the last cycle, without one. Does nothing while another controller
    /// leads, or before the cluster was observed.
    ///
    /// # Errors
    /// If the store fails. The messages stay in the ingest queue.
    pub fn enter_messages(&mut self) -> Result<(), StoreError> {
        let Some(lease) = self.lease.clone() else { return Ok(()) };
        let entered = self.planner_state.enter_messages(&self.deps, &lease);
        if let Err(error) = &entered {
            // The memory is a copy of a store that may have changed.
            self.planner_state.discard();
            fence::end_effects_if_lost(error, &lease, &self.deps.progress);
        }
        entered
    }

    /// A controller that is not the leader knows no more than the store, which every process can read.
    fn publish_snapshot(&self, leads: bool) {
        let Some(feed) = &self.snapshot_feed else { return };
        match self.planner_state.snapshot().filter(|_| leads) {
            Some(snapshot) => feed.publish(ObservedSnapshot {
                snapshot: snapshot.clone(),
                backend: self.deps.backend.name().to_owned(),
                observed_at: self.planner_state.observed_at(),
                changed_in_store: self.planner_state.nodes_behind_store(),
                settings: self.deps.settings.clone(),
            }),
            None => feed.publish_not_leading(),
        }
    }

    /// Returns the nodes that the breaker would allow to be taken out now, for callers that cannot wait for a cycle.
    /// `None`: this controller does not know.
    pub fn removal_allowance(&self) -> Option<TakeOutPermit> {
        self.lease.as_ref().and_then(|_| self.planner_state.removal_allowance())
    }

    /// Stores the cluster state now, for processes that read the store while this controller leads.
    ///
    /// # Errors
    /// If the store fails.
    pub fn save_state(&mut self) -> Result<(), StoreError> {
        let Some(lease) = &self.lease else { return Ok(()) };
        self.publisher.save_state(&self.deps, lease, &self.planner_state)
    }

    /// Publishes a last time and releases the lease, so that the next controller need not wait.
    ///
    /// # Errors
    /// If the store fails.
    pub fn stop(&mut self) -> Result<(), StoreError> {
        let Some(lease) = self.lease.clone() else { return Ok(()) };
        self.deps.progress.enter("stop");
        let (now, lease_now) = (self.deps.clock.now(), LeaseClock::of(self.deps.clock.virtual_now()));
        // No other controller has led if the lease can be renewed, even after its end.
        let renew = || self.deps.store.renew(&lease, lease_now);
        let published = fence::extend(&*self.deps.clock, &lease, &self.deps.progress, renew)
            .and_then(|()| self.publisher.publish_now(&self.deps, &lease, &self.planner_state, now));
        if let Err(error) = published {
            tracing::warn!(%error, "publishing at shutdown failed");
        }
        for problem in self.deps.share.iter().flat_map(|share| self.publisher.finish(share)) {
            tracing::warn!(error = %problem, "publishing at shutdown failed");
        }
        let saved = self.publisher.save_state(&self.deps, &lease, &self.planner_state);
        self.set_lease(None);
        self.deps.store.release(&lease).and(saved)
    }

    fn acquire_lease(&mut self) -> Result<Lease, CycleError> {
        let now = LeaseClock::of(self.deps.clock.virtual_now());
        if let Some(lease) = self.lease.clone() {
            let renew = || self.deps.store.renew(&lease, now);
            match fence::extend(&*self.deps.clock, &lease, &self.deps.progress, renew) {
                Ok(()) => {
                    self.set_lease(Some(lease.clone()));
                    return Ok(lease);
                }
                Err(error) if error.is_lease_lost() => self.set_lease(None),
                Err(error) => return Err(error.into()),
            }
        }
        let began = BootTime::now();
        match self.deps.store.acquire(&self.deps.holder, now, self.deps.lease) {
            Ok(lease) => {
                fence::begin_term(&*self.deps.clock, &lease, &self.deps.progress, began);
                self.planner_state.discard();
                self.set_lease(Some(lease.clone()));
                Ok(lease)
            }
            Err(LeaseError::Held { by, until }) => Err(CycleError::NotLeader { by, until }),
            Err(LeaseError::Store(error)) => Err(error.into()),
        }
    }

    fn run(&mut self, lease: &Lease) -> Result<CycleReport, CycleError> {
        let progress = self.deps.progress.clone();
        progress.enter("check the shared directory");
        let mut report =
            CycleReport { problems: self.persistent_problem.iter().cloned().collect(), ..CycleReport::default() };
        if let Some(share) = &self.deps.share {
            report.problems.extend(share.check().err().map(|error| error.to_string()));
            self.publisher.problems().into_iter().for_each(|problem| report.add_problem(problem));
        }
        progress.enter("observe");
        in_span(&span!("observe", failed = Empty), || self.planner_state.observe(&mut self.deps, lease, &mut report))?;
        self.add_share_problems(&mut report);
        let now = self.deps.clock.now();
        report.at = Some(now);
        progress.enter("plan");
        let planned = span!("plan").in_scope(|| self.planner_state.plan(now, &mut self.ids));
        let plan = match planned {
            Some(plan) => plan,
            None if report.problems.is_empty() => return Ok(report),
            // Nothing is known of the cluster and nothing is planned; the status still shows why.
            None => Plan::default(),
        };
        let began = now;
        let must_record = !plan.actions.is_empty()
            || !plan.skipped.is_empty()
            || !report.problems.is_empty()
            || self.recorded_problem
            || self.planner_state.idle_for(now) >= HEARTBEAT;
        if must_record {
            // Before the commit: a run that has ended is not asked again.
            let stored = self.planner_state.active_runs();
            progress.enter("collect the output of jobs");
            report.problems.extend(job_outputs::collect(&self.deps, lease, stored, &plan.actions)?);
            progress.enter("commit");
            let cycle = match in_span(&span!("commit", failed = Empty), || self.commit(lease, now, &plan)) {
                Ok(cycle) => cycle,
                // The plan is outdated and nothing of it was done; the next cycle enters the result and plans anew.
                Err(error @ StoreError::ResultWaits { .. }) => {
                    tracing::debug!(%error, "plan discarded");
                    self.planner_state.discard();
                    return Ok(report);
                }
                Err(error) => return Err(error.into()),
            };
            progress.enter("act");
            let problems = in_span(&span!("act", failed = Empty), || self.act(lease, &plan))?;
            report.problems.extend(problems);
            let problem_text = (!report.problems.is_empty()).then(|| report.problems.join("; "));
            let elapsed = self.deps.clock.now().since(began);
            self.deps.store.finish_cycle(lease, cycle, elapsed, problem_text.as_deref())?;
            self.recorded_problem = problem_text.is_some();
            self.planner_state.set_recorded(now);
        }
        report.actions = plan.actions;
        progress.enter("write the status of nodes");
        report.problems.extend(in_span(&span!("status.sync", failed = Empty), || self.sync_status(lease))?);
        progress.enter("publish");
        in_span(&span!("publish", failed = Empty), || {
            self.publisher.publish(&self.deps, lease, &self.planner_state, now)?;
            self.publisher.save_state_if_due(&self.deps, lease, &self.planner_state)
        })?;
        self.add_share_problems(&mut report);
        self.planner_state.fill_counts(&mut report);
        Ok(report)
    }

    /// Adds what failed on the shared directory since the last call.
    fn add_share_problems(&self, report: &mut CycleReport) {
        let Some(share) = &self.deps.share else { return };
        self.publisher.settle(share).into_iter().for_each(|problem| report.add_problem(problem));
    }

    /// Records intents before their effects, in one transaction.
    fn commit(&mut self, lease: &Lease, now: Timestamp, plan: &Plan) -> Result<CycleId, StoreError> {
        let mut keys = BTreeMap::new();
        for action in &plan.actions {
            if let Action::Submit(run) = &action.value {
                keys.insert(run.id, RunKey::new((self.deps.keys)()));
            }
        }
        let notifications = self.notifications(&plan.actions)?;
        let cycle = self.deps.store.commit(
            lease,
            &CycleIntent {
                at: now,
                actions: &plan.actions,
                keys: &keys,
                attributed_findings: &self.attributed_findings(&plan.actions, now),
                changed_reasons: &plan.skipped,
                policy_version: self.deps.settings.policy.version,
                retry: &self.deps.settings.policy.retry,
                notifications: &notifications,
            },
        )?;
        self.planner_state.apply_commit(&plan.actions, &keys);
        Ok(cycle)
    }

    /// Returns the messages about this plan, addressed to their receivers.
    fn notifications(&self, actions: &[WithReason<Action>]) -> Result<Vec<RoutedNote>, StoreError> {
        let Some(snapshot) = self.planner_state.snapshot().filter(|_| !self.routes.is_empty()) else {
            return Ok(Vec::new());
        };
        let notes = alert::case_notifications(snapshot, actions, &self.deps.store.mutes()?);
        Ok(outbox::route_notes(&self.routes, &notes))
    }

    /// Classifies the nodes to which trials over several nodes attributed a fault.
    fn attributed_findings(&self, actions: &[WithReason<Action>], now: Timestamp) -> Vec<Vec<Finding>> {
        let findings = actions.iter().filter_map(|action| match &action.value {
            Action::AttributeFault { test, peer, .. } => {
                let code = if peer.is_some() { "pair-by-trials" } else { "named-by-trials" };
                let events = vec![Event::seen(code, Entity::node(), action.text.clone())];
                let observation = Observation::Measured { metrics: Vec::new(), events, failures: Vec::new() };
                let (rules, baselines) = (self.deps.settings.rules_of(test), Baselines::at(now));
                let sources = ExpectationSources::of_profile(None, &baselines);
                Some(classify::classify_with(rules, sources, test, &observation).findings)
            }
            _ => None,
        });
        findings.collect()
    }

    /// Writes the status of nodes to the nodes. A decision of this cycle appears in the next one.
    fn sync_status(&mut self, lease: &Lease) -> Result<Vec<String>, StoreError> {
        let changed = self.planner_state.take_changed();
        match changed {
            Some(names) => names.iter().for_each(|name| self.status_sync.mark_changed(name)),
            None => self.status_sync.mark_all_changed(),
        }
        let Some(snapshot) = self.planner_state.snapshot() else { return Ok(Vec::new()) };
        let deps = &self.deps;
        let (backend, store, clock) = (&*deps.backend, &deps.store, &*deps.clock);
        self.status_sync
            .sync(snapshot, &SyncDeps { backend, store, clock, lease, progress: &deps.progress, workers: deps.workers })
    }

    fn act(&self, lease: &Lease, plan: &Plan) -> Result<Vec<String>, StoreError> {
        let Some(snapshot) = self.planner_state.snapshot() else { return Ok(Vec::new()) };
        let run_ids: BTreeSet<RunId> = plan
            .actions
            .iter()
            .filter_map(|action| match &action.value {
                Action::Submit(run) => Some(run.id),
                Action::Resubmit { run } => Some(*run),
                _ => None,
            })
            .collect();
        let runs: BTreeMap<RunId, (Run, RunKey)> = self.planner_state.runs_with_keys(&run_ids);
        let executor = Executor {
            backend: &*self.deps.backend,
            store: &self.deps.store,
            clock: &*self.deps.clock,
            lease,
            progress: &self.deps.progress,
            settings: &self.deps.settings,
            share: self.deps.share.as_ref(),
            results: self.results_url.as_deref(),
            workers: self.deps.workers,
        };
        executor.execute(&plan.actions, &runs, snapshot)
    }
}

/// Records the outcome of a cycle in its span.
fn record_outcome(span: &tracing::Span, outcome: &Result<CycleReport, CycleError>) {
    match outcome {
        Ok(report) => {
            let counts = [
                ("nodes", report.nodes),
                ("free", report.free),
                ("running", report.running),
                ("actions", report.actions.len()),
                ("results", report.results),
                ("rejected", report.rejected),
                ("problems", report.problems.len()),
            ];
            for (name, count) in counts {
                span.record(name, count as u64);
            }
            span.record("leads", true);
        }
        Err(CycleError::NotLeader { .. }) => {
            span.record("leads", false);
        }
        Err(error @ CycleError::Store(_)) => record_failure(span, error),
    }
}
