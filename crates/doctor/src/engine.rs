//! Wiring: the engine from the configuration.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use doctor_checks::document::RunKey;
use doctor_control::{
    backend::{Backend, local::LocalBackend},
    clock::{Clock, SystemClock},
    cycle::{AgentMessage, CycleError, CycleReport, Engine, Inbox, Parts},
    share::Share,
    store::{self, Store, StoreError},
    wake::Wake,
    web::Door,
};
use doctor_core::{ids::NodeName, snapshot::Asked};
use doctor_sim::RemoteSim;

use crate::{
    config::{BackendChoice, Loaded},
    failure::{Failure, Result},
};

/// A simulated cluster that is just being started is waited for.
const WAIT_FOR_SIM: Duration = Duration::from_secs(5);

/// The cluster, and the time there.
pub(crate) struct World {
    pub backend: Arc<dyn Backend>,
    pub clock: Arc<dyn Clock>,
    sim: Option<Arc<RemoteSim>>,
}

impl World {
    pub(crate) fn open(loaded: &Loaded) -> Result<Self> {
        match &loaded.config.backend {
            BackendChoice::Local(config) => {
                let backend = LocalBackend::open(config.clone())?;
                Ok(Self { backend: Arc::new(backend), clock: Arc::new(SystemClock), sim: None })
            }
            #[cfg(feature = "kubernetes")]
            BackendChoice::Kubernetes(config) => {
                let backend = doctor_control::backend::kubernetes::KubernetesBackend::open((**config).clone())?;
                Ok(Self { backend: Arc::new(backend), clock: Arc::new(SystemClock), sim: None })
            }
            #[cfg(not(feature = "kubernetes"))]
            BackendChoice::Kubernetes(_) => Err(Failure::Other(
                "this program was built without Kubernetes: build it with `cargo build --release --features kubernetes`"
                    .to_owned(),
            )),
            BackendChoice::Sim(config) => {
                let sim = RemoteSim::connect(&config.socket, WAIT_FOR_SIM);
                let sim = Arc::new(sim.map_err(|error| Failure::Unreachable(error.to_string()))?);
                Ok(Self { backend: sim.clone(), clock: sim.clone(), sim: Some(sim) })
            }
        }
    }
}

/// The engine and what belongs to its cluster.
pub(crate) struct Controller {
    pub engine: Engine,
    pub clock: Arc<dyn Clock>,
    /// Rings when something has come in that should not wait for the next cycle.
    pub wake: Arc<Wake>,
    pub door: Option<Door>,
    sim: Option<Arc<RemoteSim>>,
}

/// Whether agents may knock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Serving {
    Agents,
    Nobody,
}

impl Controller {
    /// A shared directory that is missing now is a failure at the start; later it is a trouble of a cycle. It is opened
    /// before the world is: some worlds would make it.
    pub(crate) fn new(loaded: &Loaded, store: Store, share: Share, world: World, serving: Serving) -> Result<Self> {
        let config = &loaded.config;
        let mut salt = [0; 8];
        getrandom::fill(&mut salt)
            .map_err(|error| Failure::Other(format!("asking the system for random bits: {error}")))?;
        let wake = Arc::new(Wake::default());
        let mut inboxes: Vec<Box<dyn Inbox>> = Vec::new();
        if let Some(sim) = world.sim.clone() {
            inboxes.push(Box::new(SimInbox { sim, keys: BTreeMap::new() }));
        }
        let mut door = None;
        if let (Serving::Agents, Some(at)) = (serving, config.agents.listen) {
            let (opened, inbox) = Door::open(at, &store, world.clock.clone(), Arc::clone(&wake))?;
            inboxes.push(Box::new(inbox));
            door = Some(opened);
        }
        let engine = Engine::new(Parts {
            backend: world.backend,
            store,
            clock: world.clock.clone(),
            share: Some(share),
            settings: loaded.settings.clone(),
            inboxes,
            keys: Box::new(random_key),
            salt: u64::from_le_bytes(salt),
            holder: store::this_process(),
            lease: config.lease,
            workers: config.workers,
            publish_every: config.publish,
        });
        Ok(Self { engine, clock: world.clock, wake, door, sim: world.sim })
    }

    /// Seconds that pass in the cluster while one passes here. Only a simulated cluster is in a hurry.
    pub(crate) fn pace(&self) -> f64 {
        self.sim.as_ref().map_or(1.0, |sim| sim.speed())
    }

    pub(crate) fn cycle(&mut self) -> std::result::Result<CycleReport, CycleError> {
        self.hear_operators()?;
        let report = self.engine.cycle();
        if let Some(door) = &self.door {
            // A store that fails may work again in the next cycle; agents wait for that.
            door.cycle_ended(!matches!(report, Err(CycleError::Passive { .. })));
        }
        report
    }

    /// The people of a simulated cluster ask as real ones do, with a line in the store.
    fn hear_operators(&self) -> std::result::Result<(), StoreError> {
        let Some(sim) = &self.sim else { return Ok(()) };
        // While the cluster does not answer, its people cannot be heard either.
        for request in sim.take_operator_requests().unwrap_or_default() {
            let asked = Asked::Release { node: request.node };
            self.engine.store().add_request(&asked, "operators", &request.why, self.clock.now())?;
        }
        Ok(())
    }
}

/// Agents' reports of a simulated cluster. They wait there until they have been kept here.
struct SimInbox {
    sim: Arc<RemoteSim>,
    keys: BTreeMap<NodeName, RunKey>,
}

impl Inbox for SimInbox {
    fn waiting(&mut self) -> Vec<AgentMessage> {
        // A cluster that does not answer has no news; that it does not, the snapshot says.
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
        // What could not be acknowledged comes again and is recognised.
        let _comes_again = self.sim.acknowledge_reports(numbers);
    }
}

fn random_key() -> [u8; 32] {
    let mut key = [0; 32];
    getrandom::fill(&mut key).expect("the system gave random bits when the program started and does not stop doing so");
    key
}
