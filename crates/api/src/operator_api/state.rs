//! State shared by the request handlers.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock},
};

use doctor_backend::clock::Clock;
use doctor_core::hex;
use doctor_core::{ids::NodeName, view::Facts};
use doctor_engine::{
    agents::AgentBrief, cluster_state, settings::Settings, share::Share, snapshot::ObservedCluster,
    snapshot_feed::SnapshotFeed, trigger::Trigger,
};
use doctor_store::{Store, StoreError};

use super::{
    audit_throttle::AuditThrottle, auth::Authenticator, cli_handler::CliHandler, config::WebConfig,
    confirmations::Confirmations, events::EventBroker, fleet_view::FleetView, measurement_cache::MeasurementCache,
    proxy_secret::ProxySecret, response_cache::ResponseCache, worker_pool::WorkerPools,
};

/// Dependencies of the API.
pub struct ApiDeps {
    pub store: Store,
    pub clock: Arc<dyn Clock>,
    /// Triggers a cycle after a command that should not wait for the next one.
    pub cycle_trigger: Arc<Trigger>,
    /// Feed of the engine's cluster states.
    pub snapshot_feed: Arc<SnapshotFeed>,
    /// The shared directory, which contains the logs.
    pub share: Option<Share>,
    pub settings: Settings,
    /// Runs reading commands for clients. `None`: there is no such endpoint.
    pub cli: Option<CliHandler>,
}

impl std::fmt::Debug for ApiDeps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiDeps").finish_non_exhaustive()
    }
}

/// The API state.
pub(super) struct ApiState {
    pub(super) store: Store,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) cycle_trigger: Arc<Trigger>,
    pub(super) share: Option<Share>,
    rack_before: Option<String>,
    fleet_view: RwLock<Arc<FleetView>>,
    pub(super) response_cache: ResponseCache,
    pub(super) workers: WorkerPools,
    pub(super) measurement_cache: MeasurementCache,
    pub(super) auth: Authenticator,
    pub(super) events: EventBroker,
    pub(super) confirmations: Confirmations,
    pub(super) audit_throttle: AuditThrottle,
    pub(super) cli: Option<CliHandler>,
}

impl std::fmt::Debug for ApiState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiState").field("auth", &self.auth).finish_non_exhaustive()
    }
}

impl ApiState {
    /// `key` signs confirmations. `endpoints` are the names of the readable endpoints; each gets its own workers.
    pub(super) fn new(
        config: &WebConfig,
        proxy_secret: Option<ProxySecret>,
        deps: ApiDeps,
        key: [u8; 32],
        endpoints: impl Iterator<Item = &'static str>,
    ) -> Result<Self, StoreError> {
        let ApiDeps { store, clock, cycle_trigger, share, settings, cli, .. } = deps;
        let unobserved = ObservedCluster::unobserved(&settings);
        let facts = cluster_state::facts(&store, None, unobserved, clock.now())?;
        let view = FleetView::new(0, facts, settings, BTreeMap::new(), config.rack_before.as_deref());
        Ok(Self {
            auth: Authenticator::new(
                store.clone(),
                config.proxy.clone().zip(proxy_secret),
                config.listen.ip().is_loopback(),
            ),
            store,
            clock,
            cycle_trigger,
            share,
            rack_before: config.rack_before.clone(),
            fleet_view: RwLock::new(Arc::new(view)),
            response_cache: ResponseCache::new(),
            workers: WorkerPools::new(endpoints),
            measurement_cache: MeasurementCache::default(),
            events: EventBroker::new(hex::encode(&key[..4])),
            confirmations: Confirmations::new(key),
            audit_throttle: AuditThrottle::default(),
            cli,
        })
    }

    /// Returns the current cluster state.
    pub(super) fn fleet_view(&self) -> Arc<FleetView> {
        Arc::clone(&self.fleet_view.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Serves this cluster state from now on.
    pub(super) fn publish(&self, facts: Facts, settings: Settings, agents: BTreeMap<NodeName, AgentBrief>) {
        let previous = self.fleet_view();
        let view = FleetView::new(previous.number + 1, facts, settings, agents, self.rack_before.as_deref());
        let changes = view.changes(Some(&previous).filter(|previous| previous.number > 0).map(|previous| &**previous));
        *self.fleet_view.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(view);
        self.response_cache.clear();
        self.events.publish(&changes);
    }
}
