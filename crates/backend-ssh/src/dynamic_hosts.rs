//! Hosts supplied by another backend, for instances that its own cluster cannot reach.

use doctor_backend::{BackendError, ssh::Host};
use doctor_core::ids::RunId;
use doctor_host::protocol::HostStatus;

use super::{SshBackend, backend::retryable_error};

impl SshBackend {
    /// Replaces the list of hosts.
    pub fn set_hosts(&self, hosts: Vec<Host>) {
        self.replace_hosts(hosts);
    }

    /// Queries these hosts, sorted by name. `Err` is why one could not be queried.
    pub fn query_hosts(&self, hosts: &[Host]) -> Vec<(Host, Result<HostStatus, String>)> {
        self.run_on_each(hosts, |host| self.query_host(host, Vec::new()))
    }

    /// Returns whether this run was ever submitted to a host of ours.
    pub fn has_run(&self, operation: &'static str, run: RunId) -> Result<bool, BackendError> {
        let recorded = self.journal.hosts_of(run).map_err(|error| retryable_error(operation, error.to_string()))?;
        Ok(recorded.is_some())
    }
}
