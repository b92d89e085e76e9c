//! The function with which the program runs a command line for a client, and what goes in and comes out.

use std::sync::Arc;

use doctor_store::{Store, access::Role};
use serde::Serialize;

/// Runs a command for a client. The program supplies it: the commands are not part of this crate.
pub type CliHandler = Arc<dyn Fn(&CliCall) -> Result<CliOutput, CliError> + Send + Sync>;

/// A command line of a client.
#[derive(Debug)]
pub struct CliCall {
    /// The arguments after `doctor`, without global options.
    pub args: Vec<String>,
    pub json: bool,
    pub colour: bool,
    /// The columns of the client's terminal. `None`: lines are not wrapped.
    pub width: Option<u16>,
    /// The role of the client.
    pub role: Role,
    /// The controller's store, with the deadline of the request.
    pub store: Store,
}

/// What the command printed, and its exit code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CliOutput {
    pub stdout: String,
    pub stderr: String,
    pub exit: u8,
}

/// Why a command was not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CliError {
    /// The command or one of its arguments is not accepted from a client.
    NotAccepted(String),
    RoleRequired(Role),
}
