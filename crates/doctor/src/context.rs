//! What every command is given: how to print, and the way to configuration, store and facts, each opened when asked for.

use std::{cell::OnceCell, path::PathBuf};

use doctor_control::{
    clock::{Clock, SystemClock},
    picture::{self, Cluster},
    share::Share,
    store::{Store, StoreUrl},
};
use doctor_core::{
    hostlist::{self, Selector},
    ids::NodeName,
    time::Timestamp,
    view::Facts,
};

use crate::{
    config::{Loaded, Place},
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
    loaded: OnceCell<Loaded>,
}

impl Context {
    pub(crate) fn new(out: Out, named: Option<PathBuf>, store: Option<StoreUrl>) -> Self {
        Self { out, named, store, loaded: OnceCell::new() }
    }

    pub(crate) fn place(&self) -> Result<Place> {
        Ok(Place::find(self.named.as_deref(), |name| std::env::var(name).ok())?)
    }

    /// The configuration, read once.
    pub(crate) fn loaded(&self) -> Result<&Loaded> {
        if let Some(loaded) = self.loaded.get() {
            return Ok(loaded);
        }
        let mut loaded = Loaded::load(self.place()?)?;
        if let Some(store) = &self.store {
            loaded.config.store = store.clone();
            // What a demonstration or a copied service leaves lies together: the store, and its shared directory.
            if let StoreUrl::Sqlite(path) = store {
                let data = path.with_file_name("data");
                if data.is_dir() {
                    loaded.config.data = data;
                }
            }
        }
        Ok(self.loaded.get_or_init(|| loaded))
    }

    /// The store, created if there is none: for commands that bring something into it.
    pub(crate) fn make_store(&self) -> Result<Store> {
        let loaded = self.loaded()?;
        loaded.make_places()?;
        Ok(Store::open(&loaded.config.store)?)
    }

    /// The store, which must be there: a slip in a path must not leave an empty database behind.
    pub(crate) fn store(&self) -> Result<Store> {
        let url = &self.loaded()?.config.store;
        match url {
            StoreUrl::Sqlite(path) if !path.exists() => Err(Failure::NoStore(path.display().to_string())),
            _ => Ok(Store::open(url)?),
        }
    }

    pub(crate) fn share(&self) -> Result<Share> {
        Ok(Share::open(&self.loaded()?.config.data)?)
    }

    /// The present moment for people. A simulated cluster has a time of its own, and it is as late there as when it
    /// was last seen.
    pub(crate) fn now(&self, last: Option<&(Timestamp, Cluster)>) -> Timestamp {
        match last {
            Some((at, cluster)) if cluster.backend == SIMULATED => *at,
            _ => SystemClock.now(),
        }
    }

    /// What is known, for views.
    pub(crate) fn facts(&self, store: &Store) -> Result<Facts> {
        let last = picture::last_seen(store)?;
        let now = self.now(last.as_ref());
        Ok(picture::facts(store, &self.loaded()?.settings, last, now)?)
    }

    /// The nodes that these selectors mean. A name that nobody knows is a slip, not an empty answer.
    pub(crate) fn pick(&self, facts: &Facts, selectors: &[Selector]) -> Result<Vec<NodeName>> {
        let unknown = |name: String| {
            let mut names = facts.select(&[]);
            let more = names.len().saturating_sub(1000);
            names.truncate(1000);
            let known = match (names.is_empty(), more) {
                (true, _) => "none; no cycle has looked at the cluster yet".to_owned(),
                (_, 0) => hostlist::fold(&names),
                (..) => format!("{} and {more} more", hostlist::fold(&names)),
            };
            Failure::Unknown { what: "node", name, known }
        };
        for selector in selectors {
            match selector {
                Selector::Names(names) => {
                    if let Some(name) = names.iter().find(|name| facts.node(name).is_none()) {
                        return Err(unknown(name.to_string()));
                    }
                }
                other if facts.select(std::slice::from_ref(other)).is_empty() => {
                    return Err(unknown(other.to_string()));
                }
                _ => {}
            }
        }
        Ok(facts.select(selectors))
    }
}
