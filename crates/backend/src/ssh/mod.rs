//! Hosts over SSH, by the system's own OpenSSH: settings, host files, sessions, commands, and `doctor-node` installed on hosts.
//!
//! The backends for SSH and dstack and the commands of `doctor fleet` use it. It knows no runs and no marks.

mod client;
mod config;
mod fanout;
mod framed_output;
mod hosts;
pub mod install;
pub mod session;

pub use client::{Answer, Client, How, Order, Root, quoted, unguessable};
pub use config::{BadSettings, HostKeys, SshConfig};
pub use fanout::each;
pub use framed_output::{Between, Heard};
pub use hosts::{BadHosts, Host, parse as parse_hosts};
