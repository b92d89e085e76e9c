//! Keys of runs as secrets of the project, from a run's submission until its job has started.

use std::collections::BTreeSet;

use doctor_backend::{BackendError, JobRequest};
use doctor_core::{ids::RunId, time::Timestamp};
use serde_json::{Value, json};

use super::{
    api_types::{Secret, run_of, run_of_secret, secret_name},
    client::Access,
    cluster::DstackBackend,
    config::KeyDelivery,
    run_types::Run,
};

impl DstackBackend {
    /// Stores the key as a secret of the project, until the job has it.
    pub(super) fn create_secret(&self, operation: &'static str, job: &JobRequest) -> Result<(), BackendError> {
        if self.config.key != KeyDelivery::Secret {
            return Ok(());
        }
        let body = json!({ "name": secret_name(job.run), "value": job.key.to_hex() });
        let result: Result<Secret, _> = self.client.post(&self.in_project("secrets/create_or_update"), &body);
        result.map_err(|error| {
            let mut failed = error.to_backend_error(operation, Access::Read);
            failed.text = format!(
                "creating the secret for the run's key failed: {}; use a project manager's token, or set `key = \"environment\"`",
                failed.text
            );
            failed
        })?;
        self.cache().secrets.insert(job.run);
        Ok(())
    }

    /// Deletes the keys of these runs: their jobs have them, or will never need them. A failure is retried later.
    pub(super) fn delete_used_secrets(&self, runs: &BTreeSet<RunId>) {
        let known = self.cache();
        let to_delete = &(&known.secrets | &known.orphaned_secrets.in_use) & runs;
        drop(known);
        for run in to_delete {
            if self.delete_secret(run) {
                let mut known = self.cache();
                known.secrets.remove(&run);
                known.orphaned_secrets.in_use.remove(&run);
            }
        }
    }

    /// Deletes keys that an earlier controller left behind.
    pub(super) fn delete_orphaned_secrets(&self, runs: &[Run], now: Timestamp) {
        if self.config.key != KeyDelivery::Secret || !self.cache().orphaned_secrets.is_due(now) {
            return;
        }
        let Ok(secrets) = self.client.post::<Vec<Secret>>(&self.in_project("secrets/list"), &json!({})) else { return };
        let existing: BTreeSet<RunId> = secrets.iter().filter_map(|secret| run_of_secret(&secret.name)).collect();
        let under_way: BTreeSet<RunId> = runs.iter().filter_map(|run| run_of(run.name())).collect();
        let old = {
            let mut known = self.cache();
            let required = &known.secrets | &under_way;
            known.orphaned_secrets.in_use = &existing & &under_way;
            known.orphaned_secrets.expired(&existing, &required, now)
        };
        for run in old {
            self.delete_secret(run);
        }
    }

    /// Returns whether the secret is gone.
    fn delete_secret(&self, run: RunId) -> bool {
        let body = json!({ "secrets_names": [secret_name(run)] });
        let result: Result<Value, _> = self.client.post(&self.in_project("secrets/delete"), &body);
        match result {
            Ok(_) => true,
            Err(error) if error.is_not_found() => true,
            Err(error) => {
                tracing::warn!(%run, %error, "secret of a run not deleted");
                false
            }
        }
    }
}
