//! Hosts that another backend names, for what its own cluster cannot reach: one at a time, and only those that it means.

use doctor_backend::{BackendError, ssh::Host};
use doctor_core::ids::RunId;
use doctor_host::protocol::Look;

use super::{
    SshBackend,
    fleet::{locked, try_again},
};

impl SshBackend {
    /// These are the hosts from now on, until it is told otherwise.
    pub fn give(&self, hosts: Vec<Host>) {
        *locked(&self.hosts) = hosts.into_iter().map(|host| (host.name.clone(), host)).collect();
    }

    /// How these hosts are, in the order of their names. `Err` says why one could not be looked at.
    pub fn look_at(&self, hosts: &[Host]) -> Vec<(Host, Result<Look, String>)> {
        self.each(hosts, |host| self.look(host, Vec::new()))
    }

    /// Whether this run was ever to be started on a host of ours.
    pub fn has(&self, operation: &'static str, run: RunId) -> Result<bool, BackendError> {
        let written = self.records.hosts_of(run).map_err(|error| try_again(operation, error.to_string()))?;
        Ok(written.is_some())
    }
}
