//! A fleet without a scheduler: hosts that are reached over SSH, by the system's own OpenSSH.
//!
//! Nothing runs on a host but what is asked for: `doctor-node` is installed there once for each version
//! ([`doctor_backend::ssh::install`]) and answers one question for each connection ([`doctor_backend::ssh::session`]). Runs and marks live in files on the hosts (`doctor_host`), so a controller that
//! starts anew finds them. What "free" means is in [`doctor_host::occupancy`], everything else for operators in `README.md`.

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
