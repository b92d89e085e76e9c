//! The context of a command: the output, and lazily opened configuration, store and facts.

use std::{
    cell::OnceCell,
    path::PathBuf,
    time::{Duration, Instant},
};

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
    connection::Server,
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
    /// The store of the controller that runs this command for a client, and where its configuration comes from.
    served: Option<(Store, ConfigSource)>,
    /// The controller that carries out changes. `None`: this process does.
    server: Option<Server>,
}

impl Context {
    pub(crate) fn new(out: Output, named: Option<PathBuf>, store: Option<StoreUrl>) -> Self {
        let (config, loaded) = (OnceCell::new(), OnceCell::new());
        Self { out, config_path: named, store, config, loaded, served: None, server: None }
    }

    /// Returns the context of a command that a controller runs for a client: with the controller's store, and with its
    /// configuration as it is now.
    pub(crate) fn for_client(out: Output, source: ConfigSource, url: Option<StoreUrl>, store: Store) -> Self {
        Self { served: Some((store, source)), ..Self::new(out, None, url) }
    }

    /// Whether the command runs for a client of the API.
    pub(crate) const fn is_for_client(&self) -> bool {
        self.served.is_some()
    }

    /// Sends changes to this controller from now on.
    pub(crate) fn connect(&mut self, server: Server) {
        self.server = Some(server);
    }

    pub(crate) const fn server(&self) -> Option<&Server> {
        self.server.as_ref()
    }

    /// Returns the store that was named instead of the configured one.
    pub(crate) const fn named_store(&self) -> Option<&StoreUrl> {
        self.store.as_ref()
    }

    /// Whether a plan is that of the cluster which the store's controller last observed. A store that is named without a
    /// configuration may be that of any cluster, and a client's request does not query the cluster.
    pub(crate) const fn plans_last_observation(&self) -> bool {
        self.served.is_some() || (self.store.is_some() && self.config_path.is_none())
    }

    pub(crate) fn config_source(&self) -> Result<ConfigSource> {
        if let Some((_, source)) = &self.served {
            return Ok(source.clone());
        }
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

    /// Opens the store of a controller, creates it if it does not exist, and migrates it when the controller leads.
    pub(crate) fn open_store_to_lead(&self) -> Result<Store> {
        let config = self.config()?;
        config.create_directories(&self.config_source()?)?;
        let opened = Store::open_to_lead(&config.store, config.migration_backup.clone());
        opened.map_err(|source| store_failure(&config.store, source))
    }

    /// Opens the existing store for reading, which needs no write permission and migrates nothing. A missing SQLite file
    /// is an error: a mistyped path must not create an empty database.
    pub(crate) fn store(&self) -> Result<Store> {
        match &self.served {
            Some((store, _)) => Ok(store.clone()),
            None => open_to_read(self.existing_store()?),
        }
    }

    /// Opens the existing store, also for changes.
    pub(crate) fn store_for_changes(&self) -> Result<Store> {
        open(self.existing_store()?)
    }

    /// Returns where the existing store is. A missing SQLite file is an error.
    pub(crate) fn existing_store(&self) -> Result<&StoreUrl> {
        match &self.config()?.store {
            // A directory that this user may not search hides the file; opening it reports that.
            StoreUrl::Sqlite(path) if matches!(path.try_exists(), Ok(false)) => {
                Err(Failure::NoStore(path.display().to_string()))
            }
            url => Ok(url),
        }
    }

    /// Opens the shared directory for a command. One that does not answer is an error after some seconds.
    pub(crate) fn share(&self) -> Result<Share> {
        Ok(Share::open_for_command(&self.config()?.data)?)
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

/// How long a reader waits for a controller that is creating the store.
const CREATION_TIMEOUT: Duration = Duration::from_secs(10);
const CREATION_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Opens a store for reading.
pub(crate) fn open_to_read(url: &StoreUrl) -> Result<Store> {
    let began = Instant::now();
    loop {
        match Store::open_to_read(url) {
            Err(StoreError::NoSchema) if began.elapsed() < CREATION_TIMEOUT => {
                std::thread::sleep(CREATION_POLL_INTERVAL);
            }
            result => return result.map_err(|source| store_failure(url, source)),
        }
    }
}

/// Opens a store for changes.
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
