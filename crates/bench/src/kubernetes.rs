//! M2, M3 and M14: the service on a real API server with 5,000 nodes and 20,000 pods.
//!
//! The shipped `doctor serve` (profile dist, feature `kubernetes`) is measured on SQLite, with the RBAC rules that
//! `doctor deploy kubernetes` prints. M14 drives the same executor, store and backend inside this process. Each
//! benchmark first verifies that the service reports every node as it was created, and again after changes.

#[cfg(feature = "kubernetes")]
mod cluster;
#[cfg(feature = "kubernetes")]
mod counting_proxy;
#[cfg(feature = "kubernetes")]
mod marking;
#[cfg(feature = "kubernetes")]
mod memory;
#[cfg(feature = "kubernetes")]
mod population;
#[cfg(feature = "kubernetes")]
mod service;
#[cfg(feature = "kubernetes")]
mod traffic;

#[cfg(feature = "kubernetes")]
pub(crate) use self::{marking::run as run_marking, memory::run as run_memory, traffic::run as run_traffic};

#[cfg(not(feature = "kubernetes"))]
mod left_out {
    use crate::Measured;

    pub(crate) fn run() -> anyhow::Result<Measured> {
        let why = "this program was built without the feature `kubernetes`; `make bench M=M2` enables it";
        Ok(Measured::NotAvailable(why.to_owned()))
    }
}

#[cfg(not(feature = "kubernetes"))]
pub(crate) use left_out::{run as run_marking, run as run_memory, run as run_traffic};
