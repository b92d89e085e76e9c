//! State shared by the request handlers.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock},
};

use doctor_backend::clock::Clock;
use doctor_core::hex;
use doctor_core::{ids::NodeName, view::Facts};
use doctor_engine::{
    agents::AgentBrief, audience::Audience, picture, settings::Settings, share::Share, snapshot::Cluster, wake::Wake,
};
use doctor_store::{Store, StoreError};

use super::{
    answer::Answers, config::WebConfig, confirmations::Confirmations, desk::Desks, guard::Guard,
    measurement_cache::Figures, news::News, noted::Noted, scene::Scene,
};

/// Dependencies of the API.
pub struct WebParts {
    pub store: Store,
    pub clock: Arc<dyn Clock>,
    /// Triggers a cycle after a command that should not wait for the next one.
    pub wake: Arc<Wake>,
    /// Feed of the engine's cluster states.
    pub audience: Arc<Audience>,
    /// The shared directory, which contains the logs.
    pub share: Option<Share>,
    pub settings: Settings,
}

impl std::fmt::Debug for WebParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WebParts").finish_non_exhaustive()
    }
}

/// The API state.
pub(super) struct Hall {
    pub(super) store: Store,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) wake: Arc<Wake>,
    pub(super) share: Option<Share>,
    rack_before: Option<String>,
    scene: RwLock<Arc<Scene>>,
    pub(super) answers: Answers,
    pub(super) desks: Desks,
    pub(super) figures: Figures,
    pub(super) guard: Guard,
    pub(super) news: News,
    pub(super) confirmations: Confirmations,
    pub(super) noted: Noted,
}

impl std::fmt::Debug for Hall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hall").field("guard", &self.guard).finish_non_exhaustive()
    }
}

impl Hall {
    /// `key` signs confirmations. `places` are the names of the readable endpoints; each gets its own workers.
    pub(super) fn new(
        config: &WebConfig,
        parts: WebParts,
        key: [u8; 32],
        places: impl Iterator<Item = &'static str>,
    ) -> Result<Self, StoreError> {
        let WebParts { store, clock, wake, share, settings, .. } = parts;
        let unseen = Cluster::unseen(&settings);
        let facts = picture::facts(&store, None, unseen, clock.now())?;
        let scene = Scene::new(0, facts, settings, BTreeMap::new(), config.rack_before.as_deref());
        Ok(Self {
            guard: Guard::new(store.clone(), config.proxy.clone(), config.listen.ip().is_loopback()),
            store,
            clock,
            wake,
            share,
            rack_before: config.rack_before.clone(),
            scene: RwLock::new(Arc::new(scene)),
            answers: Answers::new(),
            desks: Desks::new(places),
            figures: Figures::default(),
            news: News::new(hex::encode(&key[..4])),
            confirmations: Confirmations::new(key),
            noted: Noted::default(),
        })
    }

    /// Returns the current cluster state.
    pub(super) fn scene(&self) -> Arc<Scene> {
        Arc::clone(&self.scene.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Serves this cluster state from now on.
    pub(super) fn show(&self, facts: Facts, settings: Settings, agents: BTreeMap<NodeName, AgentBrief>) {
        let before = self.scene();
        let scene = Scene::new(before.number + 1, facts, settings, agents, self.rack_before.as_deref());
        let changes = scene.changes(Some(&before).filter(|before| before.number > 0).map(|before| &**before));
        *self.scene.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(scene);
        self.news.tell(&changes);
    }
}
