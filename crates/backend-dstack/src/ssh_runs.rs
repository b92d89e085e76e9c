//! Runs started over SSH, on instances on which dstack starts nothing.

use std::sync::atomic::Ordering;

use doctor_backend::{Backend as _, BackendError, JobRequest};
use doctor_core::ids::{JobId, RunId};

use super::{
    cluster::{DstackBackend, retryable_error},
    ssh_fallback::{SshFallback, is_skipped_by_dstack, is_unused},
};

impl DstackBackend {
    /// Returns the SSH access through which this run was started, if it was.
    pub(super) fn ssh_fallback_of(
        &self,
        operation: &'static str,
        run: RunId,
    ) -> Result<Option<&SshFallback>, BackendError> {
        let Some(fallback) = &self.ssh_fallback else { return Ok(None) };
        if !fallback.ssh.has_run(operation, run)? {
            return Ok(None);
        }
        if !fallback.hosts_set.load(Ordering::Relaxed) {
            fallback.set_hosts(&self.fleets(operation)?);
        }
        Ok(Some(fallback))
    }

    /// Starts a run over SSH if dstack starts nothing on its instance and reports it as unused. `None`: the run is for dstack.
    pub(super) fn submit_over_ssh(
        &self,
        operation: &'static str,
        job: &JobRequest,
    ) -> Result<Option<JobId>, BackendError> {
        let (Some(fallback), [node]) = (&self.ssh_fallback, &*job.nodes) else { return Ok(None) };
        if self.ssh_fallback_of(operation, job.run)?.is_none() {
            let (_, instance) = self.instance(operation, node)?;
            if !is_skipped_by_dstack(&instance) {
                return Ok(None);
            }
            if !is_unused(&instance) {
                return Err(retryable_error(operation, format!("dstack has a run on {node}")));
            }
            fallback.set_hosts(&self.fleets(operation)?);
        }
        fallback.ssh.submit(job).map(Some)
    }
}
