//! Runs started over SSH, on instances on which dstack starts nothing.

use std::sync::atomic::Ordering;

use doctor_backend::{Backend as _, BackendError, JobRequest};
use doctor_core::ids::{JobId, RunId};

use super::{
    cluster::{DstackBackend, try_again},
    side_door::{SideDoor, is_passed_over, is_unused},
};

impl DstackBackend {
    /// Returns the SSH access through which this run was started, if it was.
    pub(super) fn door_of(&self, operation: &'static str, run: RunId) -> Result<Option<&SideDoor>, BackendError> {
        let Some(door) = &self.door else { return Ok(None) };
        if !door.ssh.has(operation, run)? {
            return Ok(None);
        }
        if !door.told.load(Ordering::Relaxed) {
            door.tell(&self.fleets(operation)?);
        }
        Ok(Some(door))
    }

    /// Starts a run over SSH if dstack starts nothing on its instance and reports it as unused. `None`: the run is for dstack.
    pub(super) fn submit_aside(
        &self,
        operation: &'static str,
        job: &JobRequest,
    ) -> Result<Option<JobId>, BackendError> {
        let (Some(door), [node]) = (&self.door, &*job.nodes) else { return Ok(None) };
        if self.door_of(operation, job.run)?.is_none() {
            let (_, instance) = self.instance(operation, node)?;
            if !is_passed_over(&instance) {
                return Ok(None);
            }
            if !is_unused(&instance) {
                return Err(try_again(operation, format!("dstack has a run on {node}")));
            }
            door.tell(&self.fleets(operation)?);
        }
        door.ssh.submit(job).map(Some)
    }
}
