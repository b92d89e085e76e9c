//! The SSH backend: a fleet of hosts without a scheduler, reached through the system's OpenSSH.
//!
//! No daemon runs on a host: `doctor-node` is installed there once per version ([`doctor_backend::ssh::remote_program`]) and answers one
//! request per connection ([`doctor_backend::ssh::session`]). Runs and marks are files on the hosts (`doctor_host`), so that a
//! restarted controller finds them. [`doctor_host::occupancy`] defines when a host is free; `README.md` has everything else for
//! operators.

mod backend;
mod dynamic_hosts;
#[doc(hidden)]
pub mod fuzz_targets;
mod inspect;
mod kind;
mod multi_node;
mod node_ops;
mod query_order;
mod run_journal;
mod runs;
mod silent_hosts;

pub use backend::SshBackend;
pub use doctor_backend::ssh::{HostKeys, SshConfig, SshConfigError};
pub use inspect::{RequiredRepairs, inspect};
pub use kind::Ssh;
