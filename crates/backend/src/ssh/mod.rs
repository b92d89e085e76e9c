//! Access to hosts through the system's OpenSSH: settings, host files, sessions, commands, and installing `doctor-node`.
//!
//! The SSH and dstack backends and the commands of `doctor fleet` use it. It does not deal with runs or marks.

mod client;
mod config;
mod fanout;
mod framed_output;
mod hosts;
pub mod remote_program;
pub mod session;

pub use client::{CommandResult, CommandStatus, RemoteCommand, RootAccess, SshClient, random_marker, shell_quote};
pub use config::{HostKeys, SshConfig, SshConfigError};
pub use fanout::run_on_each;
pub use framed_output::{FramedOutput, ParsedOutput};
pub use hosts::{Host, HostFileError, parse as parse_hosts};
