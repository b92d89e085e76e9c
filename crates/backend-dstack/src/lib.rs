//! The dstack backend: one project of a dstack server. `README.md` beside this file defines when an instance is free, what a run
//! becomes, and the required rights.

mod api_types;
mod backend;
mod client;
mod cluster;
mod config;
mod failures;
#[doc(hidden)]
pub mod fuzz_targets;
mod inspect;
mod kind;
mod occupancy;
mod orphaned_secrets;
mod pending_demand;
mod replace;
mod report_task;
mod result_transport;
mod run_secrets;
mod run_types;
mod ssh_fallback;
mod ssh_runs;
mod task;
mod view;

pub use cluster::DstackBackend;
pub use config::{DstackConfig, DstackConfigError, KeyDelivery, SshFallbackConfig, Task};
pub use inspect::inspect;
pub use kind::Dstack;
