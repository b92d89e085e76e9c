//! The command line that a controller runs for clients of its API.
//!
//! [`ClientCommand`] is the list of what a client may run: commands that read the store, the shared directory and the
//! controller's configuration, with options that name no file. A type is shared with the local command only where each of
//! its options is safe for the controller, so that an option added there for files of the local machine (`--out`) or
//! for waiting (`--follow`) is not accepted here by accident. Global options do not exist here: the store and the
//! configuration are those of the controller.

use std::sync::Arc;

use clap::{Parser, Subcommand};
use doctor_api::operator_api::{CliCall, CliError, CliHandler, CliOutput};
use doctor_core::hostlist::{self, HostlistError};
use doctor_store::{StoreUrl, access::Role};

use super::{
    agent, alert, audit, breaker, cases, config, explain, history, log, nodes, plan, report, status, token, version,
    why,
};
use crate::{
    config::ConfigSource,
    context::Context,
    exit::{Exit, NagiosExit},
    failure::{Failure, Result},
    output::{CapturedOutput, Output},
};

/// The most rows that a client may ask for at a time.
const MAX_ROWS: u32 = 10_000;
/// The most names that the node lists of one command line may expand to.
const MAX_NODE_NAMES: usize = 20_000;
/// The most characters of an error of the parser that are returned.
const MAX_ERROR_CHARS: usize = 2000;

#[derive(Debug, Parser)]
#[command(name = "doctor", disable_help_flag = true, disable_help_subcommand = true, disable_version_flag = true)]
struct ClientCommandLine {
    #[command(subcommand)]
    command: ClientCommand,
}

/// A command that a client may run.
#[derive(Debug, Subcommand)]
enum ClientCommand {
    Plan(plan::Args),
    Status(status::Args),
    Nodes(nodes::Args),
    Why(why::Args),
    History(history::Args),
    Log(log::Query),
    Report(report::Query),
    Cases(cases::Query),
    Audit(audit::Args),
    #[command(subcommand)]
    Breaker(ClientBreaker),
    #[command(subcommand)]
    Alert(ClientAlert),
    #[command(subcommand)]
    Agent(ClientAgent),
    #[command(subcommand)]
    Token(ClientToken),
    Explain(explain::Args),
    #[command(subcommand)]
    Config(ClientConfig),
    Version(version::Args),
}

#[derive(Debug, Subcommand)]
enum ClientBreaker {
    Show,
}

#[derive(Debug, Subcommand)]
enum ClientAlert {
    List(alert::ListArgs),
}

#[derive(Debug, Subcommand)]
enum ClientAgent {
    List(agent::ListArgs),
}

#[derive(Debug, Subcommand)]
enum ClientToken {
    List,
}

#[derive(Debug, Subcommand)]
enum ClientConfig {
    Show,
}

impl ClientCommand {
    /// Returns the role that the command requires. A configuration may hold the address of a receiver, which is a secret of
    /// some services; a list of tokens names those who have access.
    const fn role(&self) -> Role {
        match self {
            Self::Config(_) | Self::Token(_) => Role::Operator,
            _ => Role::Viewer,
        }
    }

    /// Returns the number of rows asked for.
    const fn rows(&self) -> u32 {
        match self {
            Self::Why(args) => args.audit,
            Self::History(args) => args.limit,
            Self::Cases(args) => args.limit,
            Self::Audit(args) => args.limit,
            Self::Alert(ClientAlert::List(args)) => args.limit,
            _ => 0,
        }
    }

    /// Runs the command, and returns the exit code of the program.
    fn run(&self, context: &Context) -> Result<u8> {
        let exit = match self {
            Self::Plan(args) => plan::run(context, args),
            Self::Status(args) => return status::run(context, args).map(NagiosExit::code),
            Self::Nodes(args) => nodes::run(context, args),
            Self::Why(args) => why::run(context, args),
            Self::History(args) => history::run(context, args),
            Self::Log(args) => log::show(context, args, false),
            Self::Report(args) => report::print(context, args, None),
            Self::Cases(args) => cases::list(context, args),
            Self::Audit(args) => audit::run(context, args),
            Self::Breaker(ClientBreaker::Show) => breaker::show(context),
            Self::Alert(ClientAlert::List(args)) => alert::list(context, args),
            Self::Agent(ClientAgent::List(args)) => agent::list(context, args),
            Self::Token(ClientToken::List) => token::list(context),
            Self::Explain(args) => explain::run(context, args),
            Self::Config(ClientConfig::Show) => config::show(context),
            Self::Version(args) => version::run(context, args),
        };
        exit.map(Exit::code)
    }

    /// Returns the exit code of the program for this failure.
    fn exit_code(&self, failure: &Failure) -> u8 {
        match self {
            Self::Status(_) => NagiosExit::Unknown.code(),
            _ => failure.exit().code(),
        }
    }
}

/// Returns the handler of a controller with this configuration. `store` is the store that was named instead of the
/// configured one.
pub(crate) fn handler(source: ConfigSource, store: Option<StoreUrl>) -> CliHandler {
    Arc::new(move |call| run(call, &source, store.as_ref()))
}

fn run(call: &CliCall, source: &ConfigSource, url: Option<&StoreUrl>) -> std::result::Result<CliOutput, CliError> {
    let command = parse(&call.args).map_err(CliError::NotAccepted)?;
    if call.role < command.role() {
        return Err(CliError::RoleRequired(command.role()));
    }
    let captured = Arc::new(CapturedOutput::default());
    let out = Output::captured(call.json, call.colour, call.width, Arc::clone(&captured));
    let context = Context::for_client(out, source.clone(), url.cloned(), call.store.clone());
    let (exit, failure) = match command.run(&context) {
        Ok(exit) => (exit, String::new()),
        Err(failure) => (command.exit_code(&failure), failure.report()),
    };
    let (stdout, stderr) = captured.take();
    Ok(CliOutput { stdout, stderr: stderr + &failure, exit })
}

fn parse(args: &[String]) -> std::result::Result<ClientCommand, String> {
    check_node_lists(args)?;
    let words = std::iter::once("doctor").chain(args.iter().map(String::as_str));
    let parsed = ClientCommandLine::try_parse_from(words).map_err(|error| {
        let text = error.to_string();
        text.trim_start_matches("error: ").trim_end().chars().take(MAX_ERROR_CHARS).collect::<String>()
    })?;
    match parsed.command.rows() {
        0..=MAX_ROWS => Ok(parsed.command),
        rows => Err(format!("{rows} rows are too many: a client may ask for {MAX_ROWS} at a time")),
    }
}

/// Rejects node lists that would expand to more names than a cluster has: a few characters can name a hundred thousand.
fn check_node_lists(args: &[String]) -> std::result::Result<(), String> {
    let mut remaining = MAX_NODE_NAMES;
    for arg in args.iter().filter(|arg| arg.contains('[')) {
        match hostlist::parse_up_to(arg, remaining) {
            Ok(names) => remaining -= names.len(),
            Err(HostlistError::TooMany(_)) => {
                return Err(format!("more than {MAX_NODE_NAMES} names: use pool=NAME, state=STATE or a name with `*`"));
            }
            // Not a list of nodes, or one that the command rejects in its own words.
            Err(_) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse_words(line: &str) -> std::result::Result<ClientCommand, String> {
        parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn every_command_of_a_client_is_one_of_the_program_with_the_same_arguments() {
        let local = crate::command_line();
        let client = ClientCommandLine::command();
        for command in client.get_subcommands() {
            let same = local.get_subcommands().find(|other| other.get_name() == command.get_name());
            let same = same.unwrap_or_else(|| panic!("doctor {}", command.get_name()));
            for arg in command.get_arguments() {
                assert!(same.get_arguments().any(|other| other.get_id() == arg.get_id()), "{}", arg.get_id());
            }
            for nested in command.get_subcommands() {
                assert!(
                    same.get_subcommands().any(|other| other.get_name() == nested.get_name()),
                    "{}",
                    nested.get_name()
                );
            }
        }
    }

    #[test]
    fn reading_commands_are_accepted() {
        for line in [
            "status",
            "nodes node[01-64] pool=gpu",
            "why node001 --audit 20",
            "history --test dl --since 7d --limit 10000",
            "report --last week --format html",
            "cases --all",
            "breaker show",
            "explain xid 79",
            "plan --all",
            "config show",
            "token list",
        ] {
            let command = parse_words(line).unwrap_or_else(|error| panic!("{line}: {error}"));
            let needed = if matches!(line, "config show" | "token list") { Role::Operator } else { Role::Viewer };
            assert_eq!(command.role(), needed, "{line}");
        }
    }

    #[test]
    fn a_hostile_command_line_is_rejected() {
        for line in [
            "serve",
            "run",
            "db backup /tmp/x",
            "db verify",
            "hold node001 --why x --yes",
            "breaker close --why x --yes",
            "cases ack 1 --yes",
            "cases snooze 1 --why x",
            "token create me --yes",
            "token revoke me --why x --yes",
            "agent enroll node001 --yes",
            "alert test",
            "config init /tmp",
            "config check --live",
            "deploy systemd",
            "fleet exec --hosts a -- id",
            "report --out /tmp/x --format html",
            "report --format html --out=/etc/passwd",
            "bundle 1",
            "log 1 --follow",
            "log 1 -f",
            "rejudge --policy /etc/shadow",
            "status --config /etc/shadow",
            "--config /etc/shadow status",
            "status --store /tmp/x.db",
            "status --json",
            "status --server http://x",
            "status --help",
            "--help",
            "--version",
            "help",
            "completions bash",
            "man /tmp",
            "sim run /etc/passwd",
            "import /tmp/x --yes",
            "context use x",
            "history --limit 10001",
            "audit --limit 4294967295",
            "why node001 --audit 4294967295",
            "nodes node[0-99999]",
            "nodes n[0-9999] m[0-9999] o[0-9999]",
            "",
        ] {
            assert!(parse_words(line).is_err(), "{line}");
        }
        assert!(parse(&[]).is_err());
        assert!(parse(&["@/etc/passwd".to_owned()]).is_err());
        let long = parse(&["x".repeat(60_000)]).unwrap_err();
        assert!(long.chars().count() <= MAX_ERROR_CHARS, "{}", long.len());
    }

    /// Words of the whole command line, and hostile ones.
    fn words() -> Vec<String> {
        let mut words: Vec<String> =
            vec!["--".into(), "-".into(), "=".into(), "\0".into(), "n[1-3]".into(), "1".into()];
        for command in crate::command_line().get_subcommands() {
            words.push(command.get_name().to_owned());
            words.extend(command.get_subcommands().map(|nested| nested.get_name().to_owned()));
            words.extend(command.get_arguments().filter_map(|arg| Some(format!("--{}", arg.get_long()?))));
        }
        words
    }

    #[test]
    fn no_combination_of_words_names_a_file_or_panics() {
        // A fixed sequence of pseudo-random numbers, so that a failure can be repeated.
        let mut state: u64 = 20;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 33
        };
        let (words, mut accepted) = (words(), 0);
        let count = u64::try_from(words.len()).unwrap();
        for _ in 0..4000 {
            let mut word = || words[usize::try_from(next() % count).unwrap()].clone();
            let args: Vec<String> = (0..4).map(|_| word()).collect();
            let length = 1 + args[0].len() % 4;
            let args = args[..length].to_vec();
            if let Ok(command) = parse(&args) {
                accepted += 1;
                assert!(command.rows() <= MAX_ROWS, "{args:?}");
                let global = args.iter().take_while(|arg| *arg != "--").find(|arg| {
                    let name = arg.trim_start_matches("--").split('=').next().unwrap_or_default();
                    matches!(name, "config" | "store" | "out" | "with" | "policy" | "follow" | "server")
                        && arg.starts_with("--")
                });
                assert_eq!(global, None, "{args:?}");
            }
        }
        assert!(accepted > 5, "{accepted}");
    }
}
