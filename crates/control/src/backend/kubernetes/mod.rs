//! A Kubernetes cluster. What "free" means here, what is written where, and the rights that are needed, are in `README.md`
//! beside this file. The client is heavy to build: without the cargo feature `kubernetes` only the settings are here.

mod config;
mod rights;

#[cfg(feature = "kubernetes")]
mod cluster;
#[cfg(feature = "kubernetes")]
mod job;
#[cfg(feature = "kubernetes")]
mod marks;
#[cfg(feature = "kubernetes")]
mod objects;
#[cfg(feature = "kubernetes")]
mod occupancy;
#[cfg(feature = "kubernetes")]
mod watch;

#[cfg(feature = "kubernetes")]
pub use cluster::KubernetesBackend;
pub use config::{KubernetesConfig, Share};
pub use rights::manifests;
