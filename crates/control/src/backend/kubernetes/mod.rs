//! A Kubernetes cluster. What "free" means here, what is written where, and the rights that are needed, are in `README.md`
//! beside this file. The client is heavy to build: without the cargo feature `kubernetes` only the settings are here.

mod config;
mod rights;

#[cfg(feature = "kubernetes")]
mod acts;
#[cfg(feature = "kubernetes")]
mod board;
#[cfg(feature = "kubernetes")]
mod carry;
#[cfg(feature = "kubernetes")]
mod cluster;
#[cfg(feature = "kubernetes")]
mod failures;
#[cfg(feature = "kubernetes")]
mod inspect;
#[cfg(feature = "kubernetes")]
mod job;
#[cfg(feature = "kubernetes")]
mod marks;
#[cfg(feature = "kubernetes")]
mod objects;
#[cfg(feature = "kubernetes")]
mod occupancy;
#[cfg(feature = "kubernetes")]
mod pairs;
#[cfg(feature = "kubernetes")]
mod repair;
#[cfg(feature = "kubernetes")]
mod runs;
#[cfg(feature = "kubernetes")]
mod several;
#[cfg(feature = "kubernetes")]
mod template;
#[cfg(feature = "kubernetes")]
mod tokens;
#[cfg(feature = "kubernetes")]
mod volcano;
#[cfg(feature = "kubernetes")]
mod wanted;
#[cfg(feature = "kubernetes")]
mod watch;
#[cfg(feature = "kubernetes")]
mod webhook;

#[cfg(feature = "kubernetes")]
pub use cluster::KubernetesBackend;
pub use config::{AgentAccount, KubernetesConfig, Replace, RunAs, Share, Volcano, Webhook, Write};
#[cfg(feature = "kubernetes")]
pub use inspect::{Inspection, inspect};
pub use rights::manifests;
#[cfg(feature = "kubernetes")]
pub use template::check_template;

/// The template of jobs that is in force without another, for a site to begin with.
pub const STANDARD_TEMPLATE: &str = include_str!("template/standard.yaml");
