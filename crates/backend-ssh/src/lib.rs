//! A fleet without a scheduler: hosts that are reached over SSH, by the system's own OpenSSH.
//!
//! Nothing runs on a host but what is asked for: `doctor-node` is carried there once for each version ([`install`]) and answers
//! one question for each connection ([`line`]). Runs and marks live in files on the hosts (`doctor_host`), so a controller that
//! starts anew finds them. What "free" means is in [`doctor_host::occupancy`], everything else for operators in `README.md`.

mod acts;
mod at_once;
mod between;
mod client;
mod config;
mod fleet;
#[doc(hidden)]
pub mod fuzzed;
mod given;
mod hosts;
mod inspect;
mod install;
mod kind;
mod line;
mod records;
mod runs;
mod several;

pub use at_once::each;
pub use between::{Between, Heard};
pub use client::{Answer, Client, How, Order, Root, quoted, unguessable};
pub use config::{BadSettings, HostKeys, SshConfig};
pub use fleet::SshBackend;
pub use hosts::{BadHosts, Host, parse as parse_hosts};
pub use inspect::{Wants, inspect};
pub use kind::Ssh;
