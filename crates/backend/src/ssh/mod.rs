//! Access to hosts through the system's OpenSSH: settings, host files, sessions, commands, and installing `doctor-node`.
//!
//! The SSH and dstack backends and the commands of `doctor fleet` use it. It does not deal with runs or marks.

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
