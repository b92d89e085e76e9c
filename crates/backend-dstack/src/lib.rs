//! The dstack backend: one project of a dstack server. `README.md` beside this file defines when an instance is free, what a run
//! becomes, and the required rights.

mod answers;
mod backend;
mod carry;
mod client;
mod cluster;
mod config;
mod failures;
#[doc(hidden)]
pub mod fuzzed;
mod inspect;
mod keys;
mod kind;
mod occupancy;
mod orphaned_secrets;
mod replace;
mod side_door;
mod ssh_runs;
mod task;
mod view;
mod wanted;
mod work;

pub use cluster::DstackBackend;
pub use config::{BadSettings, DstackConfig, KeyBy, OverSsh, Task};
pub use inspect::inspect;
pub use kind::Dstack;
