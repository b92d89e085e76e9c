//! What every command is given: how to print, and the way to configuration, store and facts, each opened when asked for.

use std::{cell::OnceCell, path::PathBuf};

use doctor_backend::clock::{Clock, SystemClock};
use doctor_core::{hostlist::Selector, ids::NodeName, time::Timestamp, view::Facts};
use doctor_engine::{
    orders, picture,
    share::Share,
    snapshot::{self, Cluster},
};
use doctor_store::{Store, StoreError, StoreUrl};

use crate::{
    config::{Config, Loaded, Place},
    failure::{Failure, Result},
    output::Out,
};

/// The simulated cluster's name as a backend: its time is its own.
const SIMULATED: &str = "sim";

#[derive(Debug)]
pub(crate) struct Context {
    pub out: Out,
    named: Option<PathBuf>,
    store: Option<StoreUrl>,
    config: OnceCell<Config>,
    loaded: OnceCell<Loaded>,
}

impl Context {
    pub(crate) fn new(out: Out, named: Option<PathBuf>, store: Option<StoreUrl>) -> Self {
        Self { out, named, store, config: OnceCell::new(), loaded: OnceCell::new() }
    }

    pub(crate) fn place(&self) -> Result<Place> {
        Ok(Place::find(self.named.as_deref(), |name| std::env::var(name).ok())?)
    }

    /// The whole configuration, read once: for commands that judge or act.
    pub(crate) fn loaded(&self) -> Result<&Loaded> {
        if let Some(loaded) = self.loaded.get() {
            return Ok(loaded);
        }
        let mut loaded = Loaded::load(self.place()?)?;
        self.lay_over(&mut loaded.config);
        Ok(self.loaded.get_or_init(|| loaded))
    }

    /// The service's file alone, read once: a mistake in the policy must not keep anybody from looking.
    pub(crate) fn config(&self) -> Result<&Config> {
        if let Some(config) = self.config.get() {
            return Ok(config);
        }
        let mut config = Config::load(&self.place()?)?;
        self.lay_over(&mut config);
        Ok(self.config.get_or_init(|| config))
    }

    /// What the command line says comes before what the file says.
    fn lay_over(&self, config: &mut Config) {
        let Some(store) = &self.store else { return };
        config.store = store.clone();
        // What a demonstration or a copied service leaves lies together: the store, and its shared directory.
        if let StoreUrl::Sqlite(path) = store {
            let data = path.with_file_name("data");
            if data.is_dir() {
                config.data = data;
            }
        }
    }

    /// The store, created if there is none: for commands that bring something into it.
    pub(crate) fn make_store(&self) -> Result<Store> {
        let config = self.config()?;
        config.make_places(&self.place()?)?;
        open(&config.store)
    }

    /// The store, which must be there: a slip in a path must not leave an empty database behind.
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

    /// The present moment for people. A simulated cluster has a time of its own, and it is as late there as when it
    /// was last seen.
    pub(crate) fn now(&self, last: Option<&(Timestamp, Cluster)>) -> Timestamp {
        match last {
            Some((at, cluster)) if cluster.backend == SIMULATED => *at,
            _ => SystemClock.now(),
        }
    }

    /// What is known, for views. What the leader judges by comes with what it saw; where there is nothing of that kind
    /// yet, the own configuration has to do.
    pub(crate) fn facts(&self, store: &Store) -> Result<Facts> {
        let last = snapshot::last_seen(store)?;
        let now = self.now(last.as_ref());
        let (seen, cluster) = match last {
            Some((at, cluster)) => (Some(at), cluster),
            None => (None, Cluster::unseen(&self.loaded()?.settings)),
        };
        Ok(picture::facts(store, seen, cluster, now)?)
    }

    /// The nodes that these selectors mean. A name that nobody knows is a slip, not an empty answer.
    pub(crate) fn pick(&self, facts: &Facts, selectors: &[Selector]) -> Result<Vec<NodeName>> {
        Ok(orders::pick(facts, selectors)?)
    }
}

/// An error of a database says nothing about which one; what names itself already is not named twice.
pub(crate) fn open(url: &StoreUrl) -> Result<Store> {
    Store::open(url).map_err(|source| match source {
        StoreError::Sqlite { .. } | StoreError::Postgres { .. } => Failure::Unopened { store: url.to_string(), source },
        other => Failure::Store(other),
    })
}
