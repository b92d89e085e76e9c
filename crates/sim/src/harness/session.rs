//! One controller and one simulated cluster in one process, with one virtual clock.
//!
//! The engine and its store are the production ones; only the backend and the clock are simulated. The same seed gives
//! the same session to the last byte.

use std::{path::PathBuf, sync::Arc};

use doctor_backend::{clock::Clock, progress::Progress};
use doctor_checks::document::RunKey;
use doctor_core::{
    finding::Verdict,
    ids::{IdSource, NodeName, TestId},
    node::Hardware,
    plan::Action,
    policy::Policy,
    reason::{ReasonCode, WithReason},
    run::{NonEmpty, Outcome, Purpose as RunPurpose, Run, RunState},
    snapshot::CommandKind,
    time::{Span, Timestamp},
    view::{self, StatusView},
};
use doctor_engine::{
    cluster_state,
    cycle::{CycleError, Engine},
    cycle_report::CycleReport,
    deps::EngineDeps,
    inbox::{AgentMessage, Inbox},
    settings::{BadSettings, Settings},
    share::{Share, ShareError},
    snapshot::{self, ObservedCluster},
    snapshot_feed::SnapshotFeed,
};
use doctor_store::{
    LeaseError, Store, StoreError, StoreUrl,
    records::{ClassifiedResult, CycleIntent},
};

use crate::{
    EffectKind, WorldConfig,
    backend::{SimBackend, VirtualClock},
    config::BadWorld,
    random::{Purpose, Seed},
    simulated_tests,
};

/// The time until the simulated operators inspect and close an open breaker.
const BREAKER_REVIEW_DELAY: Span = Span::hours(1);

/// The configuration of a session.
#[derive(Debug, Clone)]
pub struct SessionConfig {
    pub world: WorldConfig,
    pub policy: Policy,
    /// `None`: the store is in memory.
    pub store: Option<StoreUrl>,
    pub share: Option<PathBuf>,
    /// Time between cycles when nothing wakes the controller.
    pub every: Span,
    /// Time between two published copies of the results on the share.
    pub publish_every: Span,
}

impl SessionConfig {
    pub fn new(world: WorldConfig) -> Self {
        Self {
            policy: if world.shipped_tests { Policy::built_in() } else { policy() },
            world,
            store: None,
            share: None,
            every: Span::minutes(5),
            publish_every: Span::minutes(10),
        }
    }
}

/// Returns the default policy for a cluster whose agents do the quick checks.
pub fn policy() -> Policy {
    let mut policy = Policy::built_in();
    let health = TestId::new(simulated_tests::GPU_HEALTH).expect("a fixed name that the type accepts");
    policy.tests.entry(health).or_default().enabled = Some(false);
    policy
}

#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error(transparent)]
    World(#[from] BadWorld),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Cycle(#[from] CycleError),
    #[error(transparent)]
    Settings(#[from] BadSettings),
    #[error(transparent)]
    Share(#[from] ShareError),
}

pub struct Session {
    backend: Arc<SimBackend>,
    clock: Arc<VirtualClock>,
    engine: Engine,
    config: SessionConfig,
    /// The number of effects that were checked for a reason to wake the controller.
    looked_at: usize,
    controllers: u64,
    /// Since when the breaker waits for an operator.
    breaker_opened: Option<Timestamp>,
    /// Receives the cluster state after each cycle.
    snapshot_feed: Option<Arc<SnapshotFeed>>,
    /// The number of results written by [`Session::record`], so that no two share an id.
    recorded: std::cell::Cell<u64>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("now", &self.clock.now()).finish_non_exhaustive()
    }
}

impl Session {
    /// Creates a session.
    ///
    /// # Errors If world, policy or store cannot be created.
    pub fn new(config: SessionConfig) -> Result<Self, SessionError> {
        let backend = Arc::new(SimBackend::new(config.world.clone())?);
        let clock = Arc::new(backend.clock());
        let store = match &config.store {
            Some(url) => Store::open(url)?,
            None => Store::open_in_memory()?,
        };
        let engine = engine(&config, &backend, &clock, store, 0)?;
        Ok(Self {
            backend,
            clock,
            engine,
            config,
            looked_at: 0,
            controllers: 0,
            breaker_opened: None,
            snapshot_feed: None,
            recorded: std::cell::Cell::new(0),
        })
    }

    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    pub const fn backend(&self) -> &Arc<SimBackend> {
        &self.backend
    }

    pub const fn store(&self) -> &Store {
        self.engine.store()
    }

    pub const fn settings(&self) -> &Settings {
        self.engine.settings()
    }

    /// Sets the time between cycles.
    pub fn set_every(&mut self, every: Span) {
        self.config.every = every;
    }

    /// Writes a past result into the store, in the same way as every result.
    ///
    /// # Errors If the store fails or a controller already leads.
    pub fn record(&self, node: &NodeName, test: &TestId, verdict: Verdict, at: Timestamp) -> Result<(), SessionError> {
        let store = self.store();
        let lease = store.acquire("the past", self.now(), Span::from_secs(1)).map_err(|error| match error {
            LeaseError::Held { by, until } => SessionError::Cycle(CycleError::NotLeader { by, until }),
            LeaseError::Store(error) => error.into(),
        })?;
        let mut ids = IdSource::new(u64::try_from(at.millis()).unwrap_or(0) ^ u64::from(node.as_str().len() as u32));
        ids.set_time(at);
        let key = RunKey::new([0; 32]);
        let run = Run {
            id: (0..self.recorded.replace(self.recorded.get() + 1)).fold(ids.run(), |_, _| ids.run()),
            nodes: NonEmpty::one(node.clone()),
            tests: NonEmpty::one(test.clone()),
            state: RunState::Planned,
            purpose: WithReason::new(RunPurpose::Validation, "recorded", "recorded by the script"),
            case: None,
            planned: at,
            limit: Span::minutes(30),
        };
        let id = run.id;
        store.commit(
            &lease,
            &CycleIntent {
                at,
                actions: &[WithReason::new(Action::Submit(run), "recorded", "recorded by the script")],
                keys: &[(id, key)].into(),
                attributed_findings: &[],
                changed_reasons: &[],
                policy_version: 1,
                retry: &self.config.policy.retry,
                notifications: &[],
            },
        )?;
        let outcome = Outcome {
            node: node.clone(),
            test: test.clone(),
            verdict,
            reason: ReasonCode::fixed("recorded"),
            at,
            duration: Span::minutes(5),
            findings: Vec::new(),
        };
        store.accept(
            &lease,
            &[ClassifiedResult {
                run: id,
                node: node.clone(),
                outcomes: vec![outcome],
                hardware: Hardware::default(),
                evidence: Vec::new(),
                complete: true,
                received: at,
                policy_version: 1,
                profile_version: None,
            }],
        )?;
        Ok(store.release(&lease)?)
    }

    /// Replaces the policy, as a changed file would.
    ///
    /// # Errors If the policy is invalid.
    pub fn set_policy(&mut self, policy: Policy) -> Result<(), SessionError> {
        self.config.policy = policy.clone();
        self.engine.set_settings(Settings::new(policy, self.config.world.catalogue(), simulated_tests::profiles())?);
        Ok(())
    }

    /// Replaces the controller, as after a crash, on the same store or an empty one.
    ///
    /// # Errors If the new controller cannot be created.
    pub fn restart(&mut self, empty_store: bool) -> Result<(), SessionError> {
        let store = if empty_store { Store::open_in_memory()? } else { self.engine.store().clone() };
        self.move_to(store)
    }

    /// Replaces the controller, as after a crash, on this store.
    ///
    /// # Errors If the new controller cannot be created.
    pub fn move_to(&mut self, store: Store) -> Result<(), SessionError> {
        self.controllers += 1;
        self.engine = engine(&self.config, &self.backend, &self.clock, store, self.controllers)?;
        if let Some(audience) = &self.snapshot_feed {
            self.engine.set_snapshot_feed(Arc::clone(audience));
        }
        Ok(())
    }

    /// Publishes the cluster state to this audience after each cycle.
    pub fn set_snapshot_feed(&mut self, audience: Arc<SnapshotFeed>) {
        self.engine.set_snapshot_feed(Arc::clone(&audience));
        self.snapshot_feed = Some(audience);
    }

    pub fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }

    /// Runs one cycle now.
    ///
    /// # Errors
    /// If the store fails or another controller leads.
    pub fn cycle(&mut self) -> Result<CycleReport, SessionError> {
        self.store_operator_requests()?;
        let report = self.engine.cycle()?;
        let opens = report.actions.iter().any(|action| matches!(action.value, Action::OpenBreaker));
        if opens && self.config.world.repairs {
            self.breaker_opened = report.at;
        }
        Ok(report)
    }

    /// Stops the controller in an orderly way.
    ///
    /// # Errors If the store fails.
    pub fn stop(&mut self) -> Result<(), SessionError> {
        Ok(self.engine.stop()?)
    }

    /// Saves the cluster state for processes that read the store.
    ///
    /// # Errors If the store fails.
    pub fn save_state(&mut self) -> Result<(), SessionError> {
        Ok(self.engine.save_state()?)
    }

    /// Returns the status as `doctor status` shows it at the time of the last cycle.
    ///
    /// # Errors If the store fails.
    pub fn status(&mut self) -> Result<StatusView, SessionError> {
        self.engine.save_state()?;
        let store = self.engine.store();
        let (observed_at, now, cluster) = match snapshot::last_observed(store)? {
            Some((at, cluster)) => (Some(at), cluster.last_cycle(at), cluster),
            None => (None, self.now(), ObservedCluster::unobserved(self.engine.settings())),
        };
        let facts = cluster_state::facts(store, observed_at, cluster, now)?;
        Ok(view::status(&facts, &cluster_state::status_ledger(store, &facts)?))
    }

    /// Lets time pass until `until`, with a cycle at every tick and whenever something wakes the controller.
    ///
    /// # Errors As [`Session::cycle`], and errors of `each`.
    pub fn run_until(
        &mut self,
        until: Timestamp,
        mut each: impl FnMut(&Self, &CycleReport) -> Result<(), SessionError>,
    ) -> Result<(), SessionError> {
        while self.backend.world().now() < until {
            let report = self.cycle()?;
            each(self, &report)?;
            self.pass_time(until);
        }
        Ok(())
    }

    /// Advances to the next tick, or to the moment when a user wants one of our nodes or an agent reports.
    fn pass_time(&mut self, until: Timestamp) {
        let mut world = self.backend.world();
        let target = world.now().plus(self.config.every).min(until);
        while let Some(next) = world.next_event().filter(|next| *next <= target) {
            world.advance_to(next);
            let fresh = &world.effects().entries()[self.looked_at..];
            self.looked_at += fresh.len();
            if fresh
                .iter()
                .any(|effect| matches!(effect.what, EffectKind::UserWaiting { .. } | EffectKind::Report { .. }))
            {
                return;
            }
        }
        world.advance_to(target);
    }

    /// Stores the requests of the simulated operators as operator commands, and closes a breaker that they have
    /// inspected.
    fn store_operator_requests(&mut self) -> Result<(), SessionError> {
        if let Some(opened) = self.breaker_opened
            && self.now().since(opened) >= BREAKER_REVIEW_DELAY
        {
            self.store().close_breaker("operators", "each of these nodes is bad for its own reason", self.now())?;
            self.breaker_opened = None;
        }
        let requests = self.backend.world().take_operator_requests();
        for request in requests {
            let command = CommandKind::Release { node: request.node };
            self.store().add_command(&command, "operators", &request.why, self.clock.now())?;
        }
        Ok(())
    }
}

fn engine(
    config: &SessionConfig,
    backend: &Arc<SimBackend>,
    clock: &Arc<VirtualClock>,
    store: Store,
    controller: u64,
) -> Result<Engine, SessionError> {
    let settings = Settings::new(config.policy.clone(), config.world.catalogue(), simulated_tests::profiles())?;
    let mut keys = Seed(config.world.seed).stream(Purpose::Keys, u64::MAX, controller);
    Ok(Engine::new(EngineDeps {
        backend: backend.clone(),
        store,
        clock: clock.clone(),
        share: config.share.as_deref().map(Share::open).transpose()?,
        copy_folder: None,
        settings,
        inboxes: vec![Box::new(SimInbox(backend.clone()))],
        keys: Box::new(move || keys.bytes()),
        salt: config.world.seed ^ controller.rotate_left(32),
        holder: format!("simulation:{controller}"),
        // With one process, the next controller may lead immediately.
        lease: Span::from_secs(1),
        progress: Progress::default(),
        workers: 1,
        publish_every: config.publish_every,
    }))
}

/// The agents of an in-process world.
struct SimInbox(Arc<SimBackend>);

impl Inbox for SimInbox {
    fn pending(&mut self) -> Vec<AgentMessage> {
        let world = self.0.world();
        let message = |report: crate::QueuedReport| AgentMessage {
            number: report.number,
            key: world.agent_key(&report.node),
            node: report.node,
            bytes: report.bytes,
        };
        world.agent_reports().into_iter().map(message).collect()
    }

    fn acknowledge(&mut self, numbers: &[u64]) {
        self.0.acknowledge_reports(numbers);
    }
}
