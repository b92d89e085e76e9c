//! Builds the controller from the configuration: backend, engine, agent endpoint, API, metrics and alerts.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use doctor_api::{
    AgentListener, CONNECTIONS_PER_ADDRESS, MetricsListener, ProbesListener, ProcessMetrics, TlsFiles,
    TokenReviewCache,
    operator_api::{ApiDeps, ApiServer, CliHandler},
};
use doctor_backend::{
    Backend,
    bounded::CallLimits,
    clock::Clock,
    progress::{Progress, stall_limit},
    registration::OpenedCluster,
};
use doctor_checks::{document::RunKey, key_fingerprint::KeyFingerprint, result_transport::with_keys};
use doctor_core::{ids::NodeName, snapshot::CommandKind, time::Span};
use doctor_engine::{
    cycle::{CycleError, Engine},
    cycle_report::CycleReport,
    deps::EngineDeps,
    inbox::{AgentMessage, Inbox},
    lease_keeper::LeaseKeeper,
    share::Share,
    snapshot_feed::SnapshotFeed,
    spans::ExportCounts,
    trigger::Trigger,
};
use doctor_notify::alert::{AlertSettings, Alerter};
use doctor_sim::RemoteSim;
use doctor_store::{Store, StoreError};

use crate::{
    agent_certificate::EndpointCertificate,
    backends::BackendChoice,
    config::{Config, LoadedConfig},
    endpoint_keys::EndpointKeys,
    failure::{Failure, Result},
};

/// The cluster's backend and clock.
pub(crate) struct ClusterConnection {
    pub backend: Arc<dyn Backend>,
    pub clock: Arc<dyn Clock>,
    sim: Option<Arc<RemoteSim>>,
    /// Verifies agent tokens with the cluster, if the backend supports that.
    tokens: Option<TokenReviewCache>,
}

impl ClusterConnection {
    pub(crate) fn open(loaded: &LoadedConfig) -> Result<Self> {
        let config = &loaded.config;
        // A simulated cluster also provides its agents' reports and its operators' commands.
        if let BackendChoice::Sim(sim) = &config.backend {
            let sim = sim.connect().map_err(Failure::OpenCluster)?;
            return Ok(Self { backend: sim.clone(), clock: sim.clone(), sim: Some(sim), tokens: None });
        }
        let opened = config.backend.open(&config.service(&config.state())).map_err(Failure::OpenCluster)?;
        let OpenedCluster { backend, clock, token_reviewer: voucher } =
            opened.with_deadlines(CallLimits::of_cycle(config.cycle));
        let tokens = voucher.map(|(voucher, remember)| TokenReviewCache::new(voucher, remember));
        Ok(Self { backend, clock, sim: None, tokens })
    }
}

/// The engine with its listeners and its alert delivery.
pub(crate) struct Controller {
    pub engine: Engine,
    pub clock: Arc<dyn Clock>,
    /// Wakes the control loop for input that should not wait for the next cycle.
    pub cycle_trigger: Arc<Trigger>,
    pub agent_listener: Option<AgentListener>,
    pub api: Option<ApiServer>,
    pub metrics_listener: Option<MetricsListener>,
    pub probes_listener: Option<ProbesListener>,
    /// Delivers alerts. `None` in a process that runs one command and exits.
    alerter: Option<Alerter>,
    mode: ProcessMode,
    sim: Option<Arc<RemoteSim>>,
    /// As at the start: a change of the endpoints needs another one.
    config: Config,
    endpoint_keys: EndpointKeys,
}

/// Whether this process is a service, which opens listeners and delivers alerts, or runs one command and exits.
#[derive(Debug)]
pub(crate) enum ProcessMode {
    /// A service. `traces` counts exported and dropped spans if traces are configured.
    Service {
        traces: Option<Arc<ExportCounts>>,
    },
    OneShot,
}

/// Returns the certificate of the agent endpoint, which is made if there is none. `None`: the endpoint is plain.
fn agent_tls(config: &Config) -> Result<Option<TlsFiles>> {
    let Some(endpoint) = EndpointCertificate::of(config) else {
        if config.agents.is_unencrypted() {
            tracing::warn!("agents' reports cross the network unencrypted (`plain = true` in [agents])");
        }
        return Ok(None);
    };
    let (files, made) = endpoint.ensure(config)?;
    if made {
        tracing::info!(certificate = %files.certificate.display(), "made a certificate for the agent endpoint");
    }
    Ok(Some(files))
}

/// Returns where jobs post their results: the URL, with the keys of an encrypted endpoint. `None`: nowhere, or to an endpoint
/// that jobs could not authenticate, behind a proxy that decrypts. `with_others` adds the keys of the other controllers.
fn results_url(
    config: &Config,
    with_others: impl FnOnce(Vec<KeyFingerprint>) -> Vec<KeyFingerprint>,
) -> Option<String> {
    // Without the endpoint, jobs would post in vain.
    config.agents.listen?;
    let url = config.agents.results_url()?;
    if url.starts_with("http://") {
        return Some(url);
    }
    match EndpointCertificate::of(config)?.fingerprints(config) {
        Ok(fingerprints) => Some(with_keys(&url, &with_others(fingerprints))),
        // The start has read it: it is being replaced.
        Err(error) => {
            tracing::debug!(%error, "jobs do not post their results for now");
            None
        }
    }
}

impl Controller {
    /// Builds the controller. The caller opens the shared directory before the [`ClusterConnection`], because some backends would
    /// create it. A missing directory is an error at start; in a later cycle it is only reported. `cli` runs reading commands
    /// for clients of the API.
    pub(crate) fn new(
        loaded: &LoadedConfig,
        store: Store,
        share: Share,
        world: ClusterConnection,
        serving: ProcessMode,
        cli: Option<CliHandler>,
    ) -> Result<Self> {
        let config = &loaded.config;
        let mut salt = [0; 8];
        getrandom::fill(&mut salt).map_err(|error| Failure::Other(format!("reading random bytes: {error}")))?;
        let cycle_trigger = Arc::new(Trigger::default());
        let progress = Progress::default();
        let mut inboxes: Vec<Box<dyn Inbox>> = Vec::new();
        if let Some(sim) = world.sim.clone() {
            inboxes.push(Box::new(SimInbox { sim, keys: BTreeMap::new() }));
        }
        let mut agent_listener = None;
        if let (ProcessMode::Service { .. }, Some(at)) = (&serving, config.agents.listen) {
            let tls = agent_tls(config)?;
            let per_address = config.agents.per_address.unwrap_or(CONNECTIONS_PER_ADDRESS);
            let (clock, trigger) = (world.clock.clone(), Arc::clone(&cycle_trigger));
            let (opened, inbox) =
                AgentListener::open_with_tls(at, per_address, tls.as_ref(), &store, clock, trigger, world.tokens)?;
            opened.set_site_profiles(loaded.site_profiles.clone());
            inboxes.push(Box::new(inbox));
            agent_listener = Some(opened);
        }
        let mut probes_listener = None;
        if let (ProcessMode::Service { .. }, Some(at)) = (&serving, config.probes.listen) {
            let opened = ProbesListener::open(at, store.clone())?;
            opened.set_progress(&progress);
            probes_listener = Some(opened);
        }
        let mut scraped = None;
        if let (ProcessMode::Service { traces }, Some(at)) = (&serving, config.metrics.listen) {
            let (settings, clock) = (config.metrics.clone(), world.clock.clone());
            let process_metrics =
                ProcessMetrics { spool: agent_listener.as_ref().map(AgentListener::spool), traces: traces.clone() };
            scraped = Some(MetricsListener::open(
                at,
                settings,
                store.clone(),
                clock,
                loaded.settings.clone(),
                process_metrics,
            )?);
        }
        let mut web = None;
        let audience = Arc::new(SnapshotFeed::default());
        if let (ProcessMode::Service { .. }, Some(config)) = (&serving, &config.web) {
            let parts = ApiDeps {
                store: store.clone(),
                clock: world.clock.clone(),
                cycle_trigger: Arc::clone(&cycle_trigger),
                snapshot_feed: Arc::clone(&audience),
                share: Some(share.clone()),
                settings: loaded.settings.clone(),
                cli,
            };
            web = Some(ApiServer::open(config, parts)?);
        }
        let keeper = LeaseKeeper::start(&store, &progress)
            .map_err(|error| Failure::Other(format!("starting the thread that renews the lease: {error}")))?;
        let mut engine = Engine::new(EngineDeps {
            backend: world.backend,
            store,
            clock: world.clock.clone(),
            share: Some(share),
            copy_folder: Some(config.state().join("published")),
            settings: loaded.settings.clone(),
            inboxes,
            keys: Box::new(random_key),
            salt: u64::from_le_bytes(salt),
            holder: doctor_store::this_process(),
            lease: real_time(config.lease, world.sim.as_deref()),
            progress,
            workers: config.workers,
            publish_every: config.publish,
        });
        engine.set_lease_keeper(keeper);
        if web.is_some() {
            engine.set_snapshot_feed(audience);
        }
        let mut controller = Self {
            engine,
            clock: world.clock,
            cycle_trigger,
            agent_listener,
            api: web,
            metrics_listener: scraped,
            probes_listener,
            alerter: None,
            mode: serving,
            sim: world.sim,
            config: config.clone(),
            endpoint_keys: EndpointKeys::default(),
        };
        controller.set_alerts(&config.alerts)?;
        Ok(controller)
    }

    /// Sets the notification routes and replaces the delivery threads. The old threads finish their current delivery.
    pub(crate) fn set_alerts(&mut self, alerts: &AlertSettings) -> Result<()> {
        self.engine.set_routes(alerts.routes());
        if let ProcessMode::Service { .. } = self.mode {
            let failed = |error| Failure::Other(format!("starting an alert delivery thread: {error}"));
            self.alerter = Some(Alerter::start(alerts, self.engine.store(), &self.clock).map_err(failed)?);
        }
        Ok(())
    }

    /// Stops alert delivery after the deliveries in progress have ended.
    pub(crate) fn stop_alerts(&mut self) {
        if let Some(alerter) = self.alerter.take() {
            alerter.stop();
        }
    }

    /// Returns the cluster's seconds per second of real time: 1 except for a simulated cluster.
    pub(crate) fn time_factor(&self) -> f64 {
        self.sim.as_ref().map_or(1.0, |sim| sim.speed())
    }

    /// Runs one cycle. `every` is the configured interval between the starts of two cycles: the limits derive from it.
    pub(crate) fn cycle(&mut self, every: Duration) -> std::result::Result<CycleReport, CycleError> {
        let progress = self.engine.progress();
        progress.set_limit(stall_limit(every));
        progress.enter("begin a cycle");
        // In each cycle, because the certificate may have been replaced.
        let (store, keys) = (self.engine.loop_store().clone(), &mut self.endpoint_keys);
        self.engine.set_results_url(results_url(&self.config, |own| keys.with_others(own, &store)));
        self.store_simulated_requests()?;
        let report = self.engine.cycle();
        if report.as_ref().is_ok_and(|report| !report.actions.is_empty()) {
            self.alerter.iter().for_each(Alerter::wake);
        }
        // After a store error agents keep waiting here, because the next cycle may succeed. Only a passive controller redirects
        // them.
        let leading = !matches!(report, Err(CycleError::NotLeader { .. }));
        if let Some(listener) = &self.probes_listener {
            listener.cycle_ended(leading);
        }
        if let Some(listener) = &self.agent_listener {
            listener.cycle_ended(leading);
            listener.set_drain_permits(self.engine.removal_allowance().filter(|_| report.is_ok()), every);
        }
        report
    }

    /// Enters the messages that nodes have sent since the last cycle.
    pub(crate) fn enter_messages(&mut self) -> std::result::Result<(), StoreError> {
        self.engine.enter_messages()
    }

    /// Stores the requests of a simulated cluster's operators as operator commands.
    fn store_simulated_requests(&self) -> std::result::Result<(), StoreError> {
        let Some(sim) = &self.sim else { return Ok(()) };
        // While the simulated cluster does not answer, its operators' requests cannot be read either.
        for request in sim.take_operator_requests().unwrap_or_default() {
            let command = CommandKind::Release { node: request.node };
            self.engine.store().add_command(&command, "operators", &request.why, self.clock.now())?;
        }
        Ok(())
    }
}

/// Returns a length of the configuration in real time: that of a simulated cluster passes faster. Leases count by the
/// database's clock, whose second is a second.
fn real_time(length: Span, sim: Option<&RemoteSim>) -> Span {
    const LEAST: Span = Span::from_secs(1);
    let Some(sim) = sim else { return length };
    let real = length.to_std().div_f64(sim.speed());
    Span::from_millis(i64::try_from(real.as_millis()).unwrap_or(i64::MAX)).max(LEAST)
}

/// Agent reports of a simulated cluster. The cluster keeps each report until it is acknowledged.
struct SimInbox {
    sim: Arc<RemoteSim>,
    keys: BTreeMap<NodeName, RunKey>,
}

impl Inbox for SimInbox {
    fn pending(&mut self) -> Vec<AgentMessage> {
        // An unreachable cluster has no reports; the snapshot reports the outage.
        let reports = self.sim.agent_reports().unwrap_or_default();
        let mut messages = Vec::with_capacity(reports.len());
        for report in reports {
            let known = self.keys.get(&report.node).cloned();
            let Some(key) = known.or_else(|| self.sim.agent_key(&report.node).ok()) else { continue };
            self.keys.insert(report.node.clone(), key.clone());
            messages.push(AgentMessage { number: report.number, node: report.node, key, bytes: report.bytes });
        }
        messages
    }

    fn acknowledge(&mut self, numbers: &[u64]) {
        // The cluster repeats unacknowledged reports, and the engine recognises repetitions.
        let _comes_again = self.sim.acknowledge_reports(numbers);
    }
}

fn random_key() -> [u8; 32] {
    let mut key = [0; 32];
    getrandom::fill(&mut key).expect("the system random source worked when the program started");
    key
}
