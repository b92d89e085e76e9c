//! Replaces an instance, if dstack provisions the fleet's instances itself.

use doctor_backend::{BackendError, Effect, NodeOp};
use doctor_core::ids::NodeName;
use serde_json::{Value, json};

use super::{
    api_types::{Fleet, Instance, InstanceStatus},
    client::Access,
    cluster::{DstackBackend, permanent_error, retryable_error},
    run_types::Job,
    ssh_fallback::is_unused,
};

/// Returns the instructions to replace a host of an SSH fleet.
pub(super) fn manual_steps(fleet: &Fleet, instance: &Instance) -> String {
    format!(
        "{} is a host of the SSH fleet {}: remove {} from its `hosts`, apply the fleet, repair or replace the host, and add it again",
        instance.name,
        fleet.name,
        instance.hostname.as_deref().unwrap_or("it"),
    )
}

impl DstackBackend {
    /// Deletes an instance of a backend fleet, so that dstack creates another. An instance that is missing or terminating counts
    /// as replaced.
    pub(super) fn replace(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        const REPLACE: &str = "replace the instance";
        if !self.config.replace {
            return Err(permanent_error(REPLACE, "disabled by `replace` of [backend.dstack]".to_owned()));
        }
        let Some((fleet, instance)) = self.find(REPLACE, node)? else { return Ok(()) };
        let leaves = matches!(instance.status, InstanceStatus::Terminating | InstanceStatus::Terminated);
        // Or it is the replacement already.
        if leaves || instance.created > change.op.born() {
            return Ok(());
        }
        if fleet.is_ssh() {
            return Err(permanent_error(REPLACE, manual_steps(&fleet, &instance)));
        }
        self.require_idle(REPLACE, &instance)?;
        let body = json!({ "name": fleet.name, "instance_nums": [instance.instance_num] });
        let deleted: Result<Value, _> = self.client.post(&self.in_project("fleets/delete_instances"), &body);
        match deleted {
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) => {
                let mut failed = error.to_backend_error(REPLACE, Access::Write);
                // The server reports this for a fleet that it is processing.
                if failed.effect == Effect::NotAppliedPermanent && failed.text.contains("Try again later") {
                    failed.effect = Effect::NotAppliedRetry;
                }
                Err(failed)
            }
        }
    }

    /// Checks the list of runs and the instance's own state, which alone shows runs of other projects.
    fn require_idle(&self, operation: &'static str, instance: &Instance) -> Result<(), BackendError> {
        let runs = self.runs(operation)?;
        let on_it = |host: &str| Some(host) == instance.hostname.as_deref();
        let run = runs.iter().find(|run| run.jobs.iter().filter_map(Job::host).any(on_it));
        if let Some(run) = run {
            return Err(retryable_error(operation, format!("{} is on {}", run.description(), instance.name)));
        }
        if is_unused(instance) {
            return Ok(());
        }
        Err(retryable_error(operation, format!("dstack does not report {} as idle", instance.name)))
    }
}
