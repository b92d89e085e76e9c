//! An instance that goes for another to come: possible where dstack makes instances by itself.

use doctor_core::ids::NodeName;
use serde_json::{Value, json};

use super::{
    client::Does,
    cluster::{DstackBackend, refused, try_again},
    work::Run,
};
use crate::backend::{BackendError, Effect, NodeOp};

impl DstackBackend {
    /// Deletes an instance of a backend fleet, for dstack to make another.
    pub(super) fn replace(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        const REPLACE: &str = "replace the instance";
        if !self.config.replace {
            return Err(refused(REPLACE, "`replace` is off in [backend.dstack]".to_owned()));
        }
        let (fleet, instance) = match self.find(REPLACE, node) {
            // It is gone: that is what was asked for.
            Err(error) if error.effect == Effect::NoneGiveUp => return Ok(()),
            found => found?,
        };
        if instance.created > change.op.born() {
            // The one that came in its place.
            return Ok(());
        }
        if fleet.is_ssh() {
            let text = format!(
                "{node} is a host of the SSH fleet {}: take {} out of its `hosts`, apply the fleet, mend or change the host, and add it again",
                fleet.name,
                instance.hostname.as_deref().unwrap_or("it"),
            );
            return Err(refused(REPLACE, text));
        }
        let runs = self.runs(REPLACE)?;
        let on_it = |run: &&Run| {
            let hosts = run
                .jobs
                .iter()
                .filter_map(|job| job.job_submissions.last())
                .filter(|newest| !newest.status.is_finished());
            let mut hosts = hosts.filter_map(|newest| newest.job_provisioning_data.as_ref()?.hostname.as_ref());
            hosts.any(|host| Some(host) == instance.hostname.as_ref())
        };
        if let Some(run) = runs.iter().find(on_it) {
            return Err(try_again(REPLACE, format!("{} is on {node}", run.described())));
        }
        let body = json!({ "name": fleet.name, "instance_nums": [instance.instance_num] });
        let deleted: Result<Value, _> = self.client.ask(&self.in_project("fleets/delete_instances"), &body);
        deleted.map(drop).map_err(|error| error.during(REPLACE, Does::Changes))
    }
}
