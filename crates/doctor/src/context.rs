//! The context of a command: the output, and lazily opened configuration, store and facts.

use std::{cell::OnceCell, path::PathBuf};

use doctor_backend::clock::{Clock, SystemClock};
use doctor_core::{hostlist::Selector, ids::NodeName, time::Timestamp, view::Facts};
use doctor_engine::{
    cluster_state, operator_commands,
    share::Share,
    snapshot::{self, ObservedCluster},
};
use doctor_store::{Store, StoreError, StoreUrl};

use crate::{
    config::{Config, ConfigSource, LoadedConfig},
    failure::{Failure, Result},
    output::Output,
};

/// The backend name of the simulated cluster, which has a clock separate from the system clock.
const SIM_BACKEND: &str = "sim";

#[derive(Debug)]
pub(crate) struct Context {
    pub out: Output,
    config_path: Option<PathBuf>,
    store: Option<StoreUrl>,
    config: OnceCell<Config>,
    loaded: OnceCell<LoadedConfig>,
}

impl Context {
    pub(crate) fn new(out: Output, named: Option<PathBuf>, store: Option<StoreUrl>) -> Self {
        Self { out, config_path: named, store, config: OnceCell::new(), loaded: OnceCell::new() }
    }

    /// Returns the store named on the command line.
    pub(crate) const fn store_url(&self) -> Option<&StoreUrl> {
        self.store.as_ref()
    }

    pub(crate) fn config_source(&self) -> Result<ConfigSource> {
        Ok(ConfigSource::find(self.config_path.as_deref(), |name| std::env::var(name).ok())?)
    }

    /// Returns the complete configuration, which is read once. For commands that classify results or act.
    pub(crate) fn loaded(&self) -> Result<&LoadedConfig> {
        if let Some(loaded) = self.loaded.get() {
            return Ok(loaded);
        }
        let mut loaded = LoadedConfig::load(self.config_source()?)?;
        self.apply_overrides(&mut loaded.config);
        Ok(self.loaded.get_or_init(|| loaded))
    }

    /// Returns the service's configuration file alone, which is read once. Read-only commands use it so that they work
    /// while the policy file is invalid.
    pub(crate) fn config(&self) -> Result<&Config> {
        if let Some(config) = self.config.get() {
            return Ok(config);
        }
        let mut config = Config::load(&self.config_source()?)?;
        self.apply_overrides(&mut config);
        Ok(self.config.get_or_init(|| config))
    }

    /// Applies command line options, which take precedence over the file.
    fn apply_overrides(&self, config: &mut Config) {
        let Some(store) = &self.store else { return };
        config.store = store.clone();
        // A demo or a copied service keeps its shared directory beside the database file.
        if let StoreUrl::Sqlite(path) = store {
            let data = path.with_file_name("data");
            if data.is_dir() {
                config.data = data;
            }
        }
    }

    /// Opens the store and creates it if it does not exist. For commands that write to it.
    pub(crate) fn open_or_create_store(&self) -> Result<Store> {
        let config = self.config()?;
        config.create_directories(&self.config_source()?)?;
        open(&config.store)
    }

    /// Opens the existing store. A missing SQLite file is an error: a mistyped path must not create an empty database.
    pub(crate) fn store(&self) -> Result<Store> {
        let url = &self.config()?.store;
        match url {
            StoreUrl::Sqlite(path) if !path.exists() => Err(Failure::NoStore(path.display().to_string())),
            _ => open(url),
        }
    }

    pub(crate) fn share(&self) -> Result<Share> {
        Ok(Share::open(&self.config()?.data)?)
    }

    /// Returns the current time for display. For a simulated cluster that is the time of the last cycle.
    pub(crate) fn now(&self, last: Option<&(Timestamp, ObservedCluster)>) -> Timestamp {
        match last {
            Some((at, cluster)) if cluster.backend == SIM_BACKEND => cluster.last_cycle(*at),
            _ => SystemClock.now(),
        }
    }

    /// Returns the facts for views. The settings come from the leader's last snapshot, or from the local configuration
    /// if there is no snapshot yet.
    pub(crate) fn facts(&self, store: &Store) -> Result<Facts> {
        let last = snapshot::last_observed(store)?;
        let now = self.now(last.as_ref());
        let (seen, cluster) = match last {
            Some((at, cluster)) => (Some(at), cluster),
            None => (None, ObservedCluster::unobserved(&self.loaded()?.settings)),
        };
        Ok(cluster_state::facts(store, seen, cluster, now)?)
    }

    /// Resolves selectors to node names. An unknown name is an error, not an empty result.
    pub(crate) fn select_nodes(&self, facts: &Facts, selectors: &[Selector]) -> Result<Vec<NodeName>> {
        Ok(operator_commands::select_nodes(facts, selectors)?)
    }
}

/// Opens a store.
pub(crate) fn open(url: &StoreUrl) -> Result<Store> {
    Store::open(url).map_err(|source| store_failure(url, source))
}

/// Adds the URL to errors that do not name the database.
pub(crate) fn store_failure(url: &StoreUrl, source: StoreError) -> Failure {
    match source {
        StoreError::Sqlite { .. }
        | StoreError::Postgres { .. }
        | StoreError::OldSchema { .. }
        | StoreError::NewerSchema { .. } => Failure::StoreOpen { store: url.to_string(), source },
        other => Failure::Store(other),
    }
}
