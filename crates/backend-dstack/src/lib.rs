//! A project of a dstack server. What "free" means here, what a run becomes, and which rights are needed, are in `README.md` beside this
//! file.

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
