//! The journal of runs: a small file per run with its hosts, written before the hosts are contacted.
//!
//! The hosts themselves know their runs. But a host that does not respond cannot report a run, and without the journal the location
//! of every run would be unknown while one host is down.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use doctor_core::{
    ids::{NodeName, RunId},
    run::NonEmpty,
    time::{Span, Timestamp},
};
use doctor_host::files;

/// As long as hosts keep runs.
const RETENTION: Span = Span::days(30);

/// The hosts of a run, by rank.
pub(super) type Hosts = NonEmpty<NodeName>;

#[derive(Debug)]
pub(super) struct RunJournal {
    directory: PathBuf,
    cache: Mutex<BTreeMap<RunId, Hosts>>,
}

impl RunJournal {
    pub(super) fn open(state: &Path, now: Timestamp) -> io::Result<Self> {
        let directory = state.join("runs");
        fs::create_dir_all(&directory)?;
        let mut cache = BTreeMap::new();
        for entry in fs::read_dir(&directory)?.flatten() {
            let name = entry.file_name();
            let run = name.to_str().and_then(|name| name.strip_suffix(".json")).and_then(|name| name.parse().ok());
            let Some(run): Option<RunId> = run else { continue };
            if now.since(run.born()) > RETENTION {
                fs::remove_file(entry.path())?;
            } else if let Some(hosts) = files::read::<Hosts>(&entry.path())? {
                cache.insert(run, hosts);
            }
        }
        Ok(Self { directory, cache: Mutex::new(cache) })
    }

    fn lock_cache(&self) -> MutexGuard<'_, BTreeMap<RunId, Hosts>> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, run: RunId) -> PathBuf {
        self.directory.join(format!("{run}.json"))
    }

    /// Records that the run is on these hosts, and returns its hosts: if other hosts are recorded already, those.
    pub(super) fn write(&self, run: RunId, hosts: &Hosts) -> io::Result<Hosts> {
        let path = self.path(run);
        let created = files::create(&path, hosts)?;
        let recorded = if created { None } else { files::read(&path)? };
        let recorded = recorded.unwrap_or_else(|| hosts.clone());
        self.record_found(run, &recorded);
        Ok(recorded)
    }

    /// Caches the hosts of a run, without writing them.
    pub(super) fn record_found(&self, run: RunId, hosts: &Hosts) {
        self.lock_cache().insert(run, hosts.clone());
    }

    pub(super) fn hosts_of(&self, run: RunId) -> io::Result<Option<Hosts>> {
        if let Some(hosts) = self.lock_cache().get(&run) {
            return Ok(Some(hosts.clone()));
        }
        // Another process may have written it since.
        let recorded = files::read::<Hosts>(&self.path(run))?;
        recorded.iter().for_each(|hosts| self.record_found(run, hosts));
        Ok(recorded)
    }
}
