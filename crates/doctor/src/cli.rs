//! The command line: all commands and the options that they share.

use std::path::PathBuf;

use doctor_store::StoreUrl;

use clap::{Parser, Subcommand};

use crate::{commands, connection::ConnectionArgs};

/// Finds the bad nodes of a cluster before user jobs do, proves it, and takes them out of service and back.
///
/// Without a configuration file this machine is a cluster of one node, and all state is kept below
/// ~/.local/state/cluster-doctor. `doctor demo` shows a simulated month.
#[derive(Debug, Parser)]
#[command(name = "doctor", version, max_term_width = 100, propagate_version = true)]
pub(crate) struct Cli {
    /// Configuration file. Default: /etc/cluster-doctor/doctor.toml, then ./doctor.toml, then the built-in
    /// configuration. A file that another user could change is refused.
    #[arg(long, global = true, value_name = "FILE", env = "DOCTOR_CONFIG", help_heading = "Global options")]
    pub config: Option<PathBuf>,
    /// Database to use instead of the configured one: a file, or postgres://USER@HOST/DATABASE.
    #[arg(long, global = true, value_name = "URL", env = "DOCTOR_STORE", help_heading = "Global options")]
    pub store: Option<StoreUrl>,
    /// Print JSON.
    #[arg(long, global = true, help_heading = "Global options")]
    pub json: bool,
    #[command(flatten)]
    pub connection: ConnectionArgs,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Serve(commands::serve::Args),
    Run(commands::run::Args),
    Plan(commands::plan::Args),
    Status(commands::status::Args),
    Nodes(commands::nodes::Args),
    Why(commands::why::Args),
    History(commands::history::Args),
    Log(commands::log::Args),
    Report(commands::report::Args),
    Cases(commands::cases::Args),
    Bundle(commands::bundle::Args),
    Audit(commands::audit::Args),
    Test(commands::operator_commands::TestArgs),
    Hold(commands::operator_commands::HoldArgs),
    Release(commands::operator_commands::ReleaseArgs),
    Quarantine(commands::operator_commands::QuarantineArgs),
    Repair(commands::operator_commands::RepairArgs),
    Pause(commands::pause::PauseArgs),
    Resume(commands::pause::ResumeArgs),
    Breaker(commands::breaker::Args),
    Alert(commands::alert::Args),
    Agent(commands::agent::Args),
    Token(commands::token::Args),
    Explain(commands::explain::Args),
    Rejudge(commands::rejudge::Args),
    Config(commands::config::Args),
    Context(commands::server_contexts::Args),
    Deploy(commands::deploy::Args),
    Fleet(commands::fleet::Args),
    Db(commands::db::Args),
    Import(commands::import::Args),
    Demo(commands::demo::Args),
    Sim(commands::sim::Args),
    Completions(commands::shell::CompletionsArgs),
    Man(commands::shell::ManArgs),
    Version(commands::version::Args),
    Docs(commands::docs::Args),
}
