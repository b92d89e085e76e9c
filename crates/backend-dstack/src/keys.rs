//! Keys of runs as secrets of the project, from a run's submission until its job has started.

use std::collections::BTreeSet;

use doctor_backend::{BackendError, JobRequest};
use doctor_core::{ids::RunId, time::Timestamp};
use serde_json::{Value, json};

use super::{
    answers::{Secret, run_of, run_of_secret, secret_name},
    client::Does,
    cluster::DstackBackend,
    config::KeyBy,
    work::Run,
};

impl DstackBackend {
    /// Stores the key as a secret of the project, until the job has it.
    pub(super) fn hide_key(&self, operation: &'static str, job: &JobRequest) -> Result<(), BackendError> {
        if self.config.key != KeyBy::Secret {
            return Ok(());
        }
        let body = json!({ "name": secret_name(job.run), "value": job.key.to_hex() });
        let made: Result<Secret, _> = self.client.ask(&self.in_project("secrets/create_or_update"), &body);
        made.map_err(|error| {
            let mut failed = error.during(operation, Does::Reads);
            failed.text = format!(
                "creating the secret for the run's key failed: {}; use a project manager's token, or set `key = \"environment\"`",
                failed.text
            );
            failed
        })?;
        self.known().secrets.insert(job.run);
        Ok(())
    }

    /// Deletes the keys of these runs: their jobs have them, or will never need them. A failure is retried later.
    pub(super) fn forget_keys(&self, runs: &BTreeSet<RunId>) {
        let known = self.known();
        let there = &(&known.secrets | &known.left.used) & runs;
        drop(known);
        for run in there {
            if self.delete_key(run) {
                let mut known = self.known();
                known.secrets.remove(&run);
                known.left.used.remove(&run);
            }
        }
    }

    /// Deletes keys that an earlier controller left behind.
    pub(super) fn tidy_keys(&self, runs: &[Run], now: Timestamp) {
        if self.config.key != KeyBy::Secret || !self.known().left.is_time(now) {
            return;
        }
        let Ok(secrets) = self.client.ask::<Vec<Secret>>(&self.in_project("secrets/list"), &json!({})) else { return };
        let there: BTreeSet<RunId> = secrets.iter().filter_map(|secret| run_of_secret(&secret.name)).collect();
        let under_way: BTreeSet<RunId> = runs.iter().filter_map(|run| run_of(run.name())).collect();
        let old = {
            let mut known = self.known();
            let wanted = &known.secrets | &under_way;
            known.left.used = &there & &under_way;
            known.left.old(&there, &wanted, now)
        };
        for run in old {
            self.delete_key(run);
        }
    }

    /// Returns whether the secret is gone.
    fn delete_key(&self, run: RunId) -> bool {
        let body = json!({ "secrets_names": [secret_name(run)] });
        let gone: Result<Value, _> = self.client.ask(&self.in_project("secrets/delete"), &body);
        match gone {
            Ok(_) => true,
            Err(error) if error.is_not_there() => true,
            Err(error) => {
                tracing::warn!(%run, %error, "secret of a run not deleted");
                false
            }
        }
    }
}
