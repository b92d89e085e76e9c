//! Builds the controller from the configuration: backend, engine, agent endpoint, API, metrics and alerts.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use doctor_api::{
    Door, OfProcess, Scraped, Tokens,
    api::{Web, WebParts},
};
use doctor_backend::{Backend, clock::Clock, registration::Opened};
use doctor_checks::document::RunKey;
use doctor_core::{ids::NodeName, snapshot::Asked};
use doctor_engine::{
    audience::Audience,
    cycle::{CycleError, Engine},
    inbox::{AgentMessage, Inbox},
    parts::Parts,
    report::CycleReport,
    share::Share,
    spans::Counts,
    wake::Wake,
};
use doctor_notify::alert::{AlertSettings, Alerter};
use doctor_sim::RemoteSim;
use doctor_store::{Store, StoreError};

use crate::{
    backends::BackendChoice,
    config::Loaded,
    failure::{Failure, Result},
};

/// The cluster's backend and clock.
pub(crate) struct World {
    pub backend: Arc<dyn Backend>,
    pub clock: Arc<dyn Clock>,
    sim: Option<Arc<RemoteSim>>,
    /// Verifies agent tokens with the cluster, if the backend supports that.
    tokens: Option<Tokens>,
}

impl World {
    pub(crate) fn open(loaded: &Loaded) -> Result<Self> {
        let config = &loaded.config;
        // A simulated cluster also provides its agents' reports and its operators' commands.
        if let BackendChoice::Sim(sim) = &config.backend {
            let sim = sim.connect()?;
            return Ok(Self { backend: sim.clone(), clock: sim.clone(), sim: Some(sim), tokens: None });
        }
        let Opened { backend, clock, voucher } = config.backend.open(&config.service(&config.state()))?;
        let tokens = voucher.map(|(voucher, remember)| Tokens::new(voucher, remember));
        Ok(Self { backend, clock, sim: None, tokens })
    }
}

/// The engine with its listeners and its alert delivery.
pub(crate) struct Controller {
    pub engine: Engine,
    pub clock: Arc<dyn Clock>,
    /// Wakes the control loop for input that should not wait for the next cycle.
    pub wake: Arc<Wake>,
    pub door: Option<Door>,
    pub web: Option<Web>,
    pub scraped: Option<Scraped>,
    /// Delivers alerts. `None` in a process that runs one command and exits.
    alerter: Option<Alerter>,
    serving: Serving,
    sim: Option<Arc<RemoteSim>>,
}

/// Whether this process is a service, which opens listeners and delivers alerts, or runs one command and exits.
#[derive(Debug)]
pub(crate) enum Serving {
    /// A service. `traces` counts exported and dropped spans if traces are configured.
    Everybody {
        traces: Option<Arc<Counts>>,
    },
    Nobody,
}

impl Controller {
    /// Builds the controller. The caller opens the shared directory before the [`World`], because some backends would
    /// create it. A missing directory is an error at start; in a later cycle it is only reported.
    pub(crate) fn new(loaded: &Loaded, store: Store, share: Share, world: World, serving: Serving) -> Result<Self> {
        let config = &loaded.config;
        let mut salt = [0; 8];
        getrandom::fill(&mut salt).map_err(|error| Failure::Other(format!("reading random bytes: {error}")))?;
        let wake = Arc::new(Wake::default());
        let mut inboxes: Vec<Box<dyn Inbox>> = Vec::new();
        if let Some(sim) = world.sim.clone() {
            inboxes.push(Box::new(SimInbox { sim, keys: BTreeMap::new() }));
        }
        let mut door = None;
        if let (Serving::Everybody { .. }, Some(at)) = (&serving, config.agents.listen) {
            let (opened, inbox) = Door::open_with(at, &store, world.clock.clone(), Arc::clone(&wake), world.tokens)?;
            inboxes.push(Box::new(inbox));
            door = Some(opened);
        }
        let mut scraped = None;
        if let (Serving::Everybody { traces }, Some(at)) = (&serving, config.metrics.listen) {
            let (settings, clock) = (config.metrics.clone(), world.clock.clone());
            let own = OfProcess { spool: door.as_ref().map(Door::spool), traces: traces.clone() };
            scraped = Some(Scraped::open(at, settings, store.clone(), clock, loaded.settings.clone(), own)?);
        }
        let mut web = None;
        let audience = Arc::new(Audience::default());
        if let (Serving::Everybody { .. }, Some(config)) = (&serving, &config.web) {
            let parts = WebParts {
                store: store.clone(),
                clock: world.clock.clone(),
                wake: Arc::clone(&wake),
                audience: Arc::clone(&audience),
                share: Some(share.clone()),
                settings: loaded.settings.clone(),
            };
            web = Some(Web::open(config, parts)?);
        }
        let mut engine = Engine::new(Parts {
            backend: world.backend,
            store,
            clock: world.clock.clone(),
            share: Some(share),
            settings: loaded.settings.clone(),
            inboxes,
            keys: Box::new(random_key),
            salt: u64::from_le_bytes(salt),
            holder: doctor_store::this_process(),
            lease: config.lease,
            workers: config.workers,
            publish_every: config.publish,
        });
        if web.is_some() {
            engine.set_audience(audience);
        }
        let mut controller =
            Self { engine, clock: world.clock, wake, door, web, scraped, alerter: None, serving, sim: world.sim };
        controller.set_alerts(&config.alerts)?;
        Ok(controller)
    }

    /// Sets the notification routes and replaces the delivery threads. The old threads finish their current delivery.
    pub(crate) fn set_alerts(&mut self, alerts: &AlertSettings) -> Result<()> {
        self.engine.set_routes(alerts.routes());
        if let Serving::Everybody { .. } = self.serving {
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
    pub(crate) fn pace(&self) -> f64 {
        self.sim.as_ref().map_or(1.0, |sim| sim.speed())
    }

    /// Runs one cycle. `every` is the interval between the starts of two cycles.
    pub(crate) fn cycle(&mut self, every: Duration) -> std::result::Result<CycleReport, CycleError> {
        let turned = |door: &Option<Door>| door.iter().for_each(|door| door.turned(every));
        turned(&self.door);
        self.hear_operators()?;
        let report = self.engine.cycle();
        turned(&self.door);
        if report.as_ref().is_ok_and(|report| !report.actions.is_empty()) {
            self.alerter.iter().for_each(Alerter::ring);
        }
        if let Some(door) = &self.door {
            // After a store error agents keep waiting here, because the next cycle may succeed. Only a passive
            // controller redirects them.
            door.cycle_ended(!matches!(report, Err(CycleError::Passive { .. })));
            door.may_take_out(self.engine.may_be_taken_out().filter(|_| report.is_ok()), every);
        }
        report
    }

    /// Stores the requests of a simulated cluster's operators as operator commands.
    fn hear_operators(&self) -> std::result::Result<(), StoreError> {
        let Some(sim) = &self.sim else { return Ok(()) };
        // While the simulated cluster does not answer, its operators' requests cannot be read either.
        for request in sim.take_operator_requests().unwrap_or_default() {
            let asked = Asked::Release { node: request.node };
            self.engine.store().add_request(&asked, "operators", &request.why, self.clock.now())?;
        }
        Ok(())
    }
}

/// Agent reports of a simulated cluster. The cluster keeps each report until it is acknowledged.
struct SimInbox {
    sim: Arc<RemoteSim>,
    keys: BTreeMap<NodeName, RunKey>,
}

impl Inbox for SimInbox {
    fn waiting(&mut self) -> Vec<AgentMessage> {
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
