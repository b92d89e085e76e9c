//! The control loop. One cycle is a straight line: observe, plan, commit, act, record, publish.
//!
//! Guarantee. A cycle completes whatever the last one left unfinished, because it reads the cluster and the recorded
//! intents, never its own memory of what it did. A controller killed at any instant loses nothing: each intent is in
//! the store before its effect, effects are idempotent by id, and results wait on the share.
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

use doctor_checks::document::RunKey;
use doctor_core::{
    alert::{self, Route},
    classify::{self, Past},
    finding::Finding,
    ids::{IdSource, RunId},
    observation::{Entity, Event, Observation},
    plan::{Action, Plan, TakeOut},
    reason::Because,
    run::Run,
    time::{Span, Timestamp},
};
use doctor_store::{
    Lease, LeaseError, Store, StoreError, outbox,
    records::{Addressed, CycleId, CycleIntent, Pruned, RetentionPolicy},
};
use tracing::field::Empty;

use crate::{
    audience::Audience,
    execute::Executor,
    handoff,
    observe::Memory,
    parts::Parts,
    publish::Publisher,
    report::CycleReport,
    settings::Settings,
    share::Share,
    show::{Boards, Writing},
    spans::{failed, span, within},
};

#[derive(Debug, thiserror::Error)]
pub enum CycleError {
    /// Another controller leads; this one stays passive and may try again.
    #[error("another controller leads: {by} until {until}")]
    Passive { by: String, until: Timestamp },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The controller's engine.
pub struct Engine {
    parts: Parts,
    lease: Option<Lease>,
    ids: IdSource,
    memory: Memory,
    boards: Boards,
    publisher: Publisher,
    /// A persistent problem that the caller reports.
    remark: Option<String>,
    /// Notification routes by receiver.
    routes: Vec<(String, Route)>,
    /// The snapshot feed for readers in this process.
    audience: Option<Arc<Audience>>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("parts", &self.parts).finish_non_exhaustive()
    }
}

/// Maximum interval between recorded cycles: an idle cycle is recorded this often, so that its age is known.
const HEARTBEAT: Span = Span::minutes(10);

impl Engine {
    pub fn new(parts: Parts) -> Self {
        let ids = IdSource::new(parts.salt);
        let publisher = Publisher::new(parts.publish_every);
        Self {
            parts,
            lease: None,
            ids,
            memory: Memory::default(),
            boards: Boards::default(),
            publisher,
            remark: None,
            audience: None,
            routes: Vec::new(),
        }
    }

    pub const fn store(&self) -> &Store {
        &self.parts.store
    }

    pub const fn settings(&self) -> &Settings {
        &self.parts.settings
    }

    /// Replaces the whole configuration between two cycles.
    pub fn set_settings(&mut self, settings: Settings) {
        self.parts.settings = settings;
        self.memory.forget();
    }

    /// Sets a persistent problem, such as an unusable configuration file. Every cycle reports it until it is cleared.
    pub fn set_remark(&mut self, remark: Option<String>) {
        self.remark = remark;
    }

    /// Sets the notification routes used from the next cycle, by receiver. The engine stores messages together with the
    /// plan; a delivery worker sends them.
    pub fn set_routes(&mut self, routes: Vec<(String, Route)>) {
        self.routes = routes;
    }

    /// Publishes a snapshot to this feed after each cycle.
    pub fn set_audience(&mut self, audience: Arc<Audience>) {
        self.audience = Some(audience);
    }

    /// Deletes expired data in the store and on the share. Does nothing while another controller leads.
    ///
    /// # Errors
    /// If the store fails.
    pub fn prune(&mut self, keep: RetentionPolicy) -> Result<Pruned, StoreError> {
        let Some(lease) = &self.lease else { return Ok(Pruned::default()) };
        let pruned = self.parts.store.retention(lease, self.parts.clock.now(), keep)?;
        if let Some(share) = &self.parts.share {
            for log in &pruned.logs {
                for test in &log.tests {
                    share.remove(test, &log.node, log.planned);
                }
            }
            handoff::forget(share, self.parts.clock.now().minus(keep.evidence));
            let runs: Vec<RunId> = pruned.logs.iter().map(|log| log.run).collect();
            self.parts.store.logs_deleted(lease, &runs)?;
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
            backend = self.parts.backend.name(),
            leads = Empty,
            nodes = Empty,
            free = Empty,
            running = Empty,
            actions = Empty,
            results = Empty,
            rejected = Empty,
            troubles = Empty,
            failed = Empty
        );
        let outcome = span.in_scope(|| {
            let outcome = self.lead().and_then(|lease| self.run(&lease));
            self.show_audience(outcome.is_ok());
            outcome
        });
        tell(&span, &outcome);
        if let Err(CycleError::Store(error)) = &outcome {
            // The memory is a copy of a store that may have changed.
            self.memory.forget();
            if error.is_lease_lost() {
                self.lease = None;
            }
        }
        outcome
    }

    /// A controller that does not lead knows no more than the store, which every process can read.
    fn show_audience(&self, leads: bool) {
        let Some(audience) = &self.audience else { return };
        match self.memory.snapshot().filter(|_| leads) {
            Some(snapshot) => audience.show(snapshot, self.memory.behind(), &self.parts.settings),
            None => audience.hide(),
        }
    }

    /// Returns the nodes that the breaker would allow to be taken out now, for callers that cannot wait for a cycle.
    /// `None`: this controller does not know.
    pub fn may_be_taken_out(&self) -> Option<TakeOut> {
        self.lease.as_ref().and_then(|_| self.memory.may_be_taken_out())
    }

    /// Publishes a last time and releases the lease, so that the next controller need not wait.
    ///
    /// # Errors
    /// If the store fails.
    pub fn stop(&mut self) -> Result<(), StoreError> {
        let Some(lease) = self.lease.take() else { return Ok(()) };
        let now = self.parts.clock.now();
        let mut troubles = Vec::new();
        self.publisher.publish_now(&self.parts, &self.memory, now, &mut troubles);
        for trouble in troubles {
            tracing::warn!(error = %trouble, "publishing at shutdown failed");
        }
        let saved = self.publisher.picture(&self.parts, &lease, &self.memory, now);
        self.parts.store.release(&lease).and(saved)
    }

    fn lead(&mut self) -> Result<Lease, CycleError> {
        let now = self.parts.clock.now();
        if let Some(lease) = &self.lease {
            match self.parts.store.renew(lease, now) {
                Ok(()) => return Ok(lease.clone()),
                Err(error) if error.is_lease_lost() => self.lease = None,
                Err(error) => return Err(error.into()),
            }
        }
        match self.parts.store.acquire(&self.parts.holder, now, self.parts.lease) {
            Ok(lease) => {
                self.memory.forget();
                self.lease = Some(lease.clone());
                Ok(lease)
            }
            Err(LeaseError::Held { by, until }) => Err(CycleError::Passive { by, until }),
            Err(LeaseError::Store(error)) => Err(error.into()),
        }
    }

    fn run(&mut self, lease: &Lease) -> Result<CycleReport, CycleError> {
        let mut report = CycleReport { troubles: self.remark.iter().cloned().collect(), ..CycleReport::default() };
        if let Some(Err(error)) = self.parts.share.as_ref().map(Share::check) {
            report.troubles.push(error.to_string());
        }
        within(&span!("observe", failed = Empty), || self.memory.observe(&mut self.parts, lease, &mut report))?;
        let now = self.parts.clock.now();
        report.at = Some(now);
        let planned = span!("plan").in_scope(|| self.memory.plan(now, &mut self.ids));
        let Some(plan) = planned else { return Ok(report) };
        let began = now;
        let worth_writing = !plan.actions.is_empty()
            || !plan.passed_over.is_empty()
            || !report.troubles.is_empty()
            || self.memory.quiet_since(now) >= HEARTBEAT;
        if worth_writing {
            let cycle = within(&span!("commit", failed = Empty), || self.commit(lease, now, &plan))?;
            let troubles = within(&span!("act", failed = Empty), || self.act(lease, &plan))?;
            report.troubles.extend(troubles);
            let trouble = (!report.troubles.is_empty()).then(|| report.troubles.join("; "));
            let took = self.parts.clock.now().since(began);
            self.parts.store.finish_cycle(lease, cycle, took, trouble.as_deref())?;
            self.memory.written(now);
        }
        report.actions = plan.actions;
        report.troubles.extend(within(&span!("show", failed = Empty), || self.show(lease))?);
        within(&span!("publish", failed = Empty), || {
            self.publisher.publish(&self.parts, &self.memory, now, &mut report.troubles);
            self.publisher.picture_if_due(&self.parts, lease, &self.memory, now)
        })?;
        self.memory.count(&mut report);
        Ok(report)
    }

    /// Records intents before their effects, in one transaction.
    fn commit(&mut self, lease: &Lease, now: Timestamp, plan: &Plan) -> Result<CycleId, StoreError> {
        let mut keys = BTreeMap::new();
        for action in &plan.actions {
            if let Action::Submit(run) = &action.what {
                keys.insert(run.id, RunKey::new((self.parts.keys)()));
            }
        }
        let told = self.told(&plan.actions)?;
        let cycle = self.parts.store.commit(
            lease,
            &CycleIntent {
                at: now,
                actions: &plan.actions,
                keys: &keys,
                named: &self.named(&plan.actions, now),
                changed_reasons: &plan.passed_over,
                policy_version: self.parts.settings.policy.version,
                retry: &self.parts.settings.policy.retry,
                told: &told,
            },
        )?;
        self.memory.committed(&plan.actions, &keys);
        Ok(cycle)
    }

    /// Returns the messages about this plan, addressed to their receivers.
    fn told(&self, actions: &[Because<Action>]) -> Result<Vec<Addressed>, StoreError> {
        let Some(snapshot) = self.memory.snapshot().filter(|_| !self.routes.is_empty()) else { return Ok(Vec::new()) };
        let notes = alert::notes(snapshot, actions, &self.parts.store.mutes()?);
        Ok(outbox::addressed(&self.routes, &notes))
    }

    /// Classifies the nodes to which trials over several nodes attributed a fault.
    fn named(&self, actions: &[Because<Action>], now: Timestamp) -> Vec<Vec<Finding>> {
        let named = actions.iter().filter_map(|action| match &action.what {
            Action::Name { test, peer, .. } => {
                let code = if peer.is_some() { "pair-by-trials" } else { "named-by-trials" };
                let events = vec![Event::seen(code, Entity::node(), action.text.clone())];
                let observation = Observation::Measured { metrics: Vec::new(), events, unread: Vec::new() };
                let rules = self.parts.settings.rules_of(test);
                Some(classify::judge_with(rules, None, &Past::at(now), test, &observation).findings)
            }
            _ => None,
        });
        named.collect()
    }

    /// Writes the status of nodes to the nodes. A decision of this cycle appears in the next one.
    fn show(&mut self, lease: &Lease) -> Result<Vec<String>, StoreError> {
        let changed = self.memory.take_changed();
        match changed {
            Some(names) => names.iter().for_each(|name| self.boards.changed(name)),
            None => self.boards.all_changed(),
        }
        let Some(snapshot) = self.memory.snapshot() else { return Ok(Vec::new()) };
        let parts = &self.parts;
        let (backend, store, clock) = (&*parts.backend, &parts.store, &*parts.clock);
        self.boards.write(snapshot, &Writing { backend, store, clock, lease, workers: parts.workers })
    }

    fn act(&self, lease: &Lease, plan: &Plan) -> Result<Vec<String>, StoreError> {
        let Some(snapshot) = self.memory.snapshot() else { return Ok(Vec::new()) };
        let wanted: BTreeSet<RunId> = plan
            .actions
            .iter()
            .filter_map(|action| match &action.what {
                Action::Submit(run) => Some(run.id),
                Action::Resubmit { run } => Some(*run),
                _ => None,
            })
            .collect();
        let runs: BTreeMap<RunId, (Run, RunKey)> = self.memory.runs_with_keys(&wanted);
        let executor = Executor {
            backend: &*self.parts.backend,
            store: &self.parts.store,
            clock: &*self.parts.clock,
            lease,
            settings: &self.parts.settings,
            share: self.parts.share.as_ref(),
            workers: self.parts.workers,
        };
        executor.execute(&plan.actions, &runs, snapshot)
    }
}

/// Records the outcome of a cycle in its span.
fn tell(span: &tracing::Span, outcome: &Result<CycleReport, CycleError>) {
    match outcome {
        Ok(report) => {
            let counts = [
                ("nodes", report.nodes),
                ("free", report.free),
                ("running", report.running),
                ("actions", report.actions.len()),
                ("results", report.results),
                ("rejected", report.rejected),
                ("troubles", report.troubles.len()),
            ];
            for (name, count) in counts {
                span.record(name, count as u64);
            }
            span.record("leads", true);
        }
        Err(CycleError::Passive { .. }) => {
            span.record("leads", false);
        }
        Err(error @ CycleError::Store(_)) => failed(span, error),
    }
}
