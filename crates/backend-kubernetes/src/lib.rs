//! The Kubernetes backend. `README.md` beside this file defines when a node is free, what is written where, and the required
//! permissions. The client is expensive to build: without the cargo feature `client` this crate has only the settings.

mod config;
mod kind;
mod rbac;

#[cfg(feature = "client")]
mod backend;
#[cfg(feature = "client")]
mod cluster;
#[cfg(feature = "client")]
mod collect_results;
#[cfg(feature = "client")]
mod declared;
#[cfg(feature = "client")]
mod evict_and_repair;
#[cfg(feature = "client")]
mod failures;
#[cfg(feature = "client")]
mod inspect;
#[cfg(feature = "client")]
mod interned_map;
#[cfg(feature = "client")]
mod job;
#[cfg(feature = "client")]
mod job_access;
#[cfg(feature = "client")]
mod job_template;
#[cfg(feature = "client")]
mod multi_node;
#[cfg(feature = "client")]
mod names;
#[cfg(feature = "client")]
mod objects;
#[cfg(feature = "client")]
mod occupancy;
#[cfg(feature = "client")]
mod pending_demand;
#[cfg(feature = "client")]
mod read_object;
#[cfg(feature = "client")]
mod remaining_output;
#[cfg(feature = "client")]
mod repair_job;
#[cfg(feature = "client")]
mod report_job;
#[cfg(feature = "client")]
mod result_transport;
#[cfg(feature = "client")]
mod runs;
#[cfg(feature = "client")]
mod status_writer;
#[cfg(feature = "client")]
mod streamed_list;
#[cfg(feature = "client")]
mod taints;
#[cfg(feature = "client")]
mod token_review;
#[cfg(feature = "client")]
mod volcano;
#[cfg(feature = "client")]
mod watch;
#[cfg(feature = "client")]
mod webhook;

#[cfg(feature = "client")]
pub use cluster::KubernetesBackend;
pub use config::{AgentAccount, KubernetesConfig, Replace, RunAs, Share, Volcano, Webhook, WriteConfig};
#[cfg(feature = "client")]
pub use inspect::{Inspection, inspect};
pub use kind::Kubernetes;
pub use rbac::manifests;

/// The default template of jobs, as a starting point for a site's own.
pub const STANDARD_TEMPLATE: &str = include_str!("job_template/standard.yaml");
