//! Hosts supplied by another backend, for instances that its own cluster cannot reach.

use doctor_backend::{BackendError, ssh::Host};
use doctor_core::ids::RunId;
use doctor_host::protocol::Look;

use super::{
    SshBackend,
    fleet::{locked, try_again},
};

impl SshBackend {
    /// Replaces the list of hosts.
    pub fn give(&self, hosts: Vec<Host>) {
        *locked(&self.hosts) = hosts.into_iter().map(|host| (host.name.clone(), host)).collect();
    }

    /// Queries these hosts, sorted by name. `Err` is why one could not be queried.
    pub fn look_at(&self, hosts: &[Host]) -> Vec<(Host, Result<Look, String>)> {
        self.each(hosts, |host| self.look(host, Vec::new()))
    }

    /// Returns whether this run was ever submitted to a host of ours.
    pub fn has(&self, operation: &'static str, run: RunId) -> Result<bool, BackendError> {
        let written = self.records.hosts_of(run).map_err(|error| try_again(operation, error.to_string()))?;
        Ok(written.is_some())
    }
}
