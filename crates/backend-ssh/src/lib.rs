//! The SSH backend: a fleet of hosts without a scheduler, reached through the system's OpenSSH.
//!
//! No daemon runs on a host: `doctor-node` is installed there once per version ([`doctor_backend::ssh::install`]) and answers one
//! request per connection ([`doctor_backend::ssh::session`]). Runs and marks are files on the hosts (`doctor_host`), so that a
//! restarted controller finds them. [`doctor_host::occupancy`] defines when a host is free; `README.md` has everything else for
//! operators.

mod acts;
mod fleet;
#[doc(hidden)]
pub mod fuzzed;
mod given;
mod inspect;
mod kind;
mod records;
mod runs;
mod several;

pub use doctor_backend::ssh::{BadSettings, HostKeys, SshConfig};
pub use fleet::SshBackend;
pub use inspect::{Wants, inspect};
pub use kind::Ssh;
