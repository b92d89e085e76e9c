//! The `doctor` program: parses the command line, runs one command and exits with a documented exit code.

mod agent_certificate;
mod backends;
mod cli;
mod commands;
mod config;
mod connection;
mod context;
mod controller;
mod deploy;
mod endpoint_keys;
mod exit;
mod failure;
mod help_examples;
mod node_command_line;
mod output;
mod reference_pages;
mod remote;
mod startup;
mod watchdog;

use std::{io::Write, process::ExitCode};

use clap::{ArgMatches, CommandFactory, FromArgMatches};

use crate::{
    cli::{Cli, Command},
    context::Context,
    exit::{Exit, NagiosExit},
    failure::Result,
    output::Output,
};

fn main() -> ExitCode {
    let parsed = command_line().try_get_matches().and_then(|matches| Ok((Cli::from_arg_matches(&matches)?, matches)));
    let (cli, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            // There is no other channel on which to report that printing failed.
            let _printed = error.print();
            return match error.use_stderr() {
                true if names_status() => NagiosExit::Unknown.into(),
                true => Exit::Usage.into(),
                false => Exit::Ok.into(),
            };
        }
    };
    let is_status = matches!(cli.command, Command::Status(_));
    match run(cli, &matches) {
        Ok(exit) => exit,
        Err(failure) => {
            // There is no other channel on which to report that printing failed.
            let _printed = std::io::stderr().write_all(failure.report().as_bytes());
            if is_status { NagiosExit::Unknown.into() } else { failure.exit().into() }
        }
    }
}

/// Returns whether an invalid command line is one of `doctor status`. A monitoring system that runs it must not take a
/// mistyped option for a critical state.
fn names_status() -> bool {
    let parsed = command_line().ignore_errors(true).try_get_matches();
    parsed.is_ok_and(|matches| matches.subcommand_name() == Some("status"))
}

/// Returns the command line, with the exit codes appended to its long help.
pub(crate) fn command_line() -> clap::Command {
    let codes = Exit::ALL.map(|exit| format!("  {}  {}", exit.code(), exit.meaning())).join("\n");
    let nagios = NagiosExit::ALL.map(|exit| format!("  {}  {}", exit.code(), exit.meaning())).join("\n");
    let status = format!("Exit codes, as of a Nagios plugin:\n{nagios}");
    let status = |command: clap::Command| command.after_long_help(status);
    help_examples::add(Cli::command().mut_subcommand("status", status))
        .after_long_help(format!("Exit codes:\n{codes}\n\nThose of `doctor status` differ: see its --help."))
}

fn run(cli: Cli, matches: &ArgMatches) -> Result<ExitCode> {
    let mut context = Context::new(Output::new(cli.json), cli.config, cli.store);
    // What is left runs in this process; a change is sent to the controller if the context has a connection to one.
    if let Some(exit) = remote::run(&mut context, &cli.connection, &cli.command, matches)? {
        return Ok(exit);
    }
    let exit = match cli.command {
        Command::Serve(args) => commands::serve::run(&context, &args),
        Command::Run(args) => commands::run::run(&context, &args),
        Command::Plan(args) => commands::plan::run(&context, &args),
        Command::Status(args) => return commands::status::run(&context, &args).map(ExitCode::from),
        Command::Nodes(args) => commands::nodes::run(&context, &args),
        Command::Why(args) => commands::why::run(&context, &args),
        Command::History(args) => commands::history::run(&context, &args),
        Command::Log(args) => commands::log::run(&context, &args),
        Command::Report(args) => commands::report::run(&context, &args),
        Command::Cases(args) => commands::cases::run(&context, &args),
        Command::Bundle(args) => commands::bundle::run(&context, &args),
        Command::Audit(args) => commands::audit::run(&context, &args),
        Command::Test(args) => commands::operator_commands::test(&context, &args),
        Command::Hold(args) => commands::operator_commands::hold(&context, &args),
        Command::Release(args) => commands::operator_commands::release(&context, &args),
        Command::Quarantine(args) => commands::operator_commands::quarantine(&context, &args),
        Command::Repair(args) => commands::operator_commands::repair(&context, &args),
        Command::Pause(args) => commands::pause::pause(&context, &args),
        Command::Resume(args) => commands::pause::resume(&context, &args),
        Command::Breaker(args) => commands::breaker::run(&context, &args),
        Command::Alert(args) => commands::alert::run(&context, &args),
        Command::Token(args) => commands::token::run(&context, &args),
        Command::Agent(args) => commands::agent::run(&context, &args),
        Command::Explain(args) => commands::explain::run(&context, &args),
        Command::Rejudge(args) => commands::rejudge::run(&context, &args),
        Command::Config(args) => commands::config::run(&context, &args),
        Command::Deploy(args) => commands::deploy::run(&context, &args),
        Command::Fleet(args) => commands::fleet::run(&context, &args),
        Command::Db(args) => commands::db::run(&context, &args),
        Command::Import(args) => commands::import::run(&context, &args),
        Command::Demo(args) => commands::demo::run(&context, &args),
        Command::Sim(args) => commands::sim::run(&context, &args),
        Command::Completions(args) => commands::shell::completions(&context, &args),
        Command::Man(args) => commands::shell::man(&context, &args),
        Command::Version(args) => commands::version::run(&context, &args),
        Command::Context(args) => commands::server_contexts::run(&context, &args),
        Command::Docs(args) => commands::docs::run(&context, &args),
    };
    exit.map(ExitCode::from)
}
