//! Access to one project of a dstack server: the client, the settings, cached facts, and the queries that other modules share.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use doctor_backend::{BackendError, Effect};
use doctor_backend_ssh::SshBackend;
use doctor_core::{
    ids::{NodeName, RunId},
    time::Timestamp,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{
    api_types::{CurrentUser, Fleet, Instance, run_name},
    client::{Access, Client},
    config::DstackConfig,
    orphaned_secrets::OrphanedSecrets,
    result_transport::RunResults,
    run_types::Run,
    ssh_fallback::SshFallback,
};

/// The page size of lists, which is the largest that dstack returns.
pub(super) const PAGE: usize = 100;
/// The most pages of one list: more than ten thousand fleets or runs indicate an error.
const MAX_PAGES: usize = 100;

#[derive(Debug)]
pub struct DstackBackend {
    pub(super) config: DstackConfig,
    pub(super) client: Client,
    /// The policy file for jobs.
    pub(super) policy: Option<PathBuf>,
    pub(super) cache: Mutex<Cache>,
    pub(super) run_results: RunResults,
    /// Access to instances on which dstack starts nothing.
    pub(super) ssh_fallback: Option<SshFallback>,
}

/// Cached facts.
#[derive(Debug, Default)]
pub(super) struct Cache {
    user: Option<String>,
    /// When jobs started to run, by submission.
    pub(super) job_starts: BTreeMap<String, Timestamp>,
    /// When instances were last used, by id.
    pub(super) last_used: BTreeMap<String, Timestamp>,
    /// Runs of this process whose key may still be a secret of the project.
    pub(super) secrets: BTreeSet<RunId>,
    /// Secrets that other processes left behind.
    pub(super) orphaned_secrets: OrphanedSecrets,
    /// Runs that were cancelled.
    pub(super) stopped: BTreeSet<RunId>,
}

const OPEN: &str = "open the dstack backend";

impl DstackBackend {
    /// Checks what [`Self::open`] would refuse, and that there is a token. Asks no server and changes nothing.
    ///
    /// # Errors
    /// With the setting that is wrong.
    pub fn verify(config: &DstackConfig) -> Result<(), BackendError> {
        let refuse = |text: String| permanent_error(OPEN, text);
        config.check().map_err(|error| refuse(error.to_string()))?;
        Client::new(config).and_then(|client| client.check_token()).map_err(refuse)?;
        config.ssh.as_ref().map_or(Ok(()), |settings| SshBackend::verify_programs(&settings.to_ssh_config()))
    }

    /// Opens the backend. `policy` is the site's policy file. The first snapshot reports whether the server responds.
    ///
    /// # Errors
    /// If the settings are invalid, or the certificates cannot be loaded.
    pub fn open(config: DstackConfig, policy: Option<&Path>) -> Result<Self, BackendError> {
        let refuse = |text: String| permanent_error(OPEN, text);
        config.check().map_err(|error| refuse(error.to_string()))?;
        let client = Client::new(&config).map_err(refuse)?;
        let ssh_fallback = config.ssh.as_ref().map(|settings| SshFallback::open(settings, policy)).transpose()?;
        let policy = policy.map(Path::to_owned);
        Ok(Self { config, client, policy, cache: Mutex::default(), run_results: RunResults::default(), ssh_fallback })
    }

    pub(super) fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn read<T: DeserializeOwned>(
        &self,
        operation: &'static str,
        path: &str,
        body: &Value,
    ) -> Result<T, BackendError> {
        self.client.post(path, body).map_err(|error| error.to_backend_error(operation, Access::Read))
    }

    pub(super) fn in_project(&self, what: &str) -> String {
        format!("/api/project/{}/{what}", self.config.project)
    }

    /// Reads every page of a list; `after` returns the position from which the next one continues.
    fn read_pages<T: DeserializeOwned>(
        &self,
        operation: &'static str,
        path: &str,
        query: &Value,
        after: impl Fn(&T) -> Value,
    ) -> Result<Vec<T>, BackendError> {
        let mut all: Vec<T> = Vec::new();
        for _ in 0..MAX_PAGES {
            let mut body = query.clone();
            if let (Some(last), Some(body)) = (all.last(), body.as_object_mut()) {
                body.extend(after(last).as_object().cloned().unwrap_or_default());
            }
            let page: Vec<T> = self.read(operation, path, &body)?;
            let over = page.len() < PAGE;
            all.extend(page);
            if over {
                return Ok(all);
            }
        }
        Err(retryable_error(operation, format!("{path} has more than {} entries", all.len())))
    }

    /// Returns the managed fleets with all their instances. The server's list of instances omits those that are being created.
    pub(super) fn fleets(&self, operation: &'static str) -> Result<Vec<Fleet>, BackendError> {
        let query = json!({ "project_name": self.config.project, "only_active": true, "limit": PAGE });
        let after = |fleet: &Fleet| json!({ "prev_created_at": fleet.created_at, "prev_id": fleet.id });
        let mut fleets = self.read_pages(operation, "/api/fleets/list", &query, after)?;
        if !self.config.fleets.is_empty() {
            fleets.retain(|fleet: &Fleet| self.config.fleets.contains(&fleet.name));
        }
        Ok(fleets)
    }

    pub(super) fn runs(&self, operation: &'static str) -> Result<Vec<Run>, BackendError> {
        let query = json!({ "project_name": self.config.project, "only_active": true, "limit": PAGE, "job_submissions_limit": 1 });
        let after = |run: &Run| json!({ "prev_submitted_at": run.submitted_at, "prev_run_id": run.id });
        self.read_pages(operation, "/api/runs/list", &query, after)
    }

    /// Returns the user name of our token.
    pub(super) fn current_user(&self, operation: &'static str) -> Result<String, BackendError> {
        if let Some(user) = &self.cache().user {
            return Ok(user.clone());
        }
        let user: CurrentUser = self.read(operation, "/api/users/get_my_user", &json!({}))?;
        self.cache().user = Some(user.username.clone());
        Ok(user.username)
    }

    /// Returns `None` if the server has no such run.
    pub(super) fn run(&self, operation: &'static str, run: RunId) -> Result<Option<Run>, BackendError> {
        let result = self.client.post(&self.in_project("runs/get"), &json!({ "run_name": run_name(run) }));
        match result {
            Ok(run) => Ok(Some(run)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error.to_backend_error(operation, Access::Read)),
        }
    }

    /// Returns `None` if the server has no such instance.
    pub(super) fn find(
        &self,
        operation: &'static str,
        node: &NodeName,
    ) -> Result<Option<(Fleet, Instance)>, BackendError> {
        let fleets = self.fleets(operation)?;
        Ok(fleets.into_iter().find_map(|fleet| {
            let instance = fleet.instances.iter().find(|instance| instance.name == node.as_str())?.clone();
            Some((fleet, instance))
        }))
    }

    /// Like [`Self::find`], but a missing instance is a permanent error.
    pub(super) fn instance(&self, operation: &'static str, node: &NodeName) -> Result<(Fleet, Instance), BackendError> {
        let project = &self.config.project;
        let missing =
            || permanent_error(operation, format!("there is no instance {node} in the fleets of project {project}"));
        self.find(operation, node)?.ok_or_else(missing)
    }
}

pub(super) fn permanent_error(operation: &'static str, text: String) -> BackendError {
    BackendError { operation, text, effect: Effect::NotAppliedPermanent }
}

pub(super) fn retryable_error(operation: &'static str, text: String) -> BackendError {
    BackendError { operation, text, effect: Effect::NotAppliedRetry }
}
