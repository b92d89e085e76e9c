//! The connection to a controller's API, for operators without access to its store: which controller a command line
//! means, and the requests to it.

mod contexts;
mod server;

use std::path::PathBuf;

use clap::{ArgMatches, parser::ValueSource};

pub(crate) use self::{
    contexts::{ContextsError, ContextsFile, contexts_path},
    server::{ActionReply, Server, ServerError, ServerSettings},
};

/// The options that name a controller.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct ConnectionArgs {
    /// Ask the controller with this API instead of reading the store: https://HOST:PORT.
    #[arg(long, global = true, value_name = "URL", env = "DOCTOR_SERVER", help_heading = "Global options")]
    server: Option<String>,
    /// File with the token for the controller's API, as `doctor token create` printed it.
    #[arg(long, global = true, value_name = "FILE", env = "DOCTOR_TOKEN_FILE", help_heading = "Global options")]
    token_file: Option<PathBuf>,
    /// Certificates in PEM that the controller's certificate is verified with, instead of the system's.
    #[arg(long, global = true, value_name = "FILE", env = "DOCTOR_CA_FILE", help_heading = "Global options")]
    ca_file: Option<PathBuf>,
    /// Context to use: a controller by its name in ~/.config/cluster-doctor/contexts.toml. `doctor context` lists them.
    #[arg(long, global = true, value_name = "NAME", env = "DOCTOR_CONTEXT", help_heading = "Global options")]
    context: Option<String>,
}

/// The long names of the global options that a controller never receives, and whether each takes a value.
pub(crate) const LOCAL_OPTIONS: [(&str, bool); 7] = [
    ("config", true),
    ("store", true),
    ("json", false),
    ("server", true),
    ("token-file", true),
    ("ca-file", true),
    ("context", true),
];

/// How an option was given, the weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Given {
    No,
    Environment,
    CommandLine,
}

fn given(matches: &ArgMatches, option: &str) -> Given {
    match matches.value_source(option) {
        Some(ValueSource::CommandLine) => Given::CommandLine,
        Some(ValueSource::EnvVariable) => Given::Environment,
        _ => Given::No,
    }
}

/// How the options that say where a command runs were given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct GivenOptions {
    server: Given,
    context: Given,
    /// `--config` or `--store`, whichever was given more explicitly.
    store: Given,
}

/// Where a command runs, before the contexts file is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decision {
    Here,
    Server,
    Context,
    /// On the current context's controller, if there is a contexts file with one.
    CurrentContext,
    Contradiction(&'static str),
}

impl Decision {
    /// Whether a token or a certificate that was given like this is for the controller of this decision. A context has its own: the
    /// token that the environment holds for another controller is not sent to it.
    fn accepts(self, option: Given) -> bool {
        match self {
            Self::Server => option != Given::No,
            Self::Context | Self::CurrentContext => option == Given::CommandLine,
            Self::Here | Self::Contradiction(_) => false,
        }
    }
}

impl GivenOptions {
    fn of(matches: &ArgMatches) -> Self {
        let given = |id| given(matches, id);
        let store = given("config").max(given("store"));
        Self { server: given("server"), context: given("context"), store }
    }

    /// The command line precedes the environment, and the environment precedes the contexts file. A store that is named
    /// is read here, unless a controller is named as explicitly.
    fn decide(self) -> Decision {
        let Self { server, context, store } = self;
        let controller = server.max(context);
        if controller == Given::CommandLine && store == Given::CommandLine {
            return Decision::Contradiction(
                "--store and --config are for this machine: leave out --server or --context",
            );
        }
        if server == Given::CommandLine && context == Given::CommandLine {
            return Decision::Contradiction("--server and --context both name a controller: leave out one");
        }
        match controller {
            Given::No if store == Given::No => Decision::CurrentContext,
            Given::No => Decision::Here,
            Given::Environment if store == Given::CommandLine => Decision::Here,
            // The server precedes a context that was given as explicitly.
            _ if server == controller => Decision::Server,
            _ => Decision::Context,
        }
    }
}

/// Whether the command line itself, and not the environment or a file, names a controller.
pub(crate) fn is_on_command_line(matches: &ArgMatches) -> bool {
    let given = GivenOptions::of(matches);
    given.server.max(given.context) == Given::CommandLine
}

/// Returns the controller that a command line means. `None`: the command runs on this machine.
pub(crate) fn choose(args: &ConnectionArgs, matches: &ArgMatches) -> Result<Option<ServerSettings>, ContextsError> {
    let decision = GivenOptions::of(matches).decide();
    let settings = match decision {
        Decision::Here => return Ok(None),
        Decision::Contradiction(text) => return Err(ContextsError::Contradiction(text)),
        Decision::Server => {
            let url = args.server.clone().unwrap_or_default();
            ServerSettings { url, token_file: None, ca_file: None, plain: false, context: None, is_explicit: true }
        }
        Decision::Context => {
            let path = contexts_path(|name| std::env::var(name).ok())?;
            let file = ContextsFile::load(&path)?.unwrap_or_default();
            ServerSettings { is_explicit: true, ..file.settings(&path, args.context.as_deref().unwrap_or_default())? }
        }
        Decision::CurrentContext => {
            // Without a home directory there is no contexts file.
            let Ok(path) = contexts_path(|name| std::env::var(name).ok()) else { return Ok(None) };
            let Some(file) = ContextsFile::load(&path)? else { return Ok(None) };
            let Some(current) = &file.current else { return Ok(None) };
            file.settings(&path, current)?
        }
    };
    let replaced = |option, file: &Option<PathBuf>| file.clone().filter(|_| decision.accepts(given(matches, option)));
    Ok(Some(ServerSettings {
        token_file: replaced("token_file", &args.token_file).or(settings.token_file),
        ca_file: replaced("ca_file", &args.ca_file).or(settings.ca_file),
        ..settings
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_explicit_option_says_where_a_command_runs() {
        use Given::{CommandLine, Environment, No};
        let contradiction = |decision| matches!(decision, Decision::Contradiction(_));
        for (server, context, store, expected) in [
            (No, No, No, Some(Decision::CurrentContext)),
            (No, No, Environment, Some(Decision::Here)),
            (No, No, CommandLine, Some(Decision::Here)),
            (Environment, No, No, Some(Decision::Server)),
            (Environment, No, Environment, Some(Decision::Server)),
            (Environment, No, CommandLine, Some(Decision::Here)),
            (CommandLine, No, Environment, Some(Decision::Server)),
            (CommandLine, Environment, No, Some(Decision::Server)),
            (Environment, CommandLine, No, Some(Decision::Context)),
            (Environment, Environment, No, Some(Decision::Server)),
            (No, CommandLine, Environment, Some(Decision::Context)),
            (CommandLine, No, CommandLine, None),
            (No, CommandLine, CommandLine, None),
            (CommandLine, CommandLine, No, None),
        ] {
            let decision = GivenOptions { server, context, store }.decide();
            match expected {
                Some(expected) => assert_eq!(decision, expected, "{server:?} {context:?} {store:?}"),
                None => assert!(contradiction(decision), "{server:?} {context:?} {store:?}: {decision:?}"),
            }
        }
    }

    #[test]
    fn the_environment_s_token_is_for_a_controller_that_is_named_by_its_url_and_not_for_a_context() {
        assert!(Decision::Server.accepts(Given::Environment) && Decision::Server.accepts(Given::CommandLine));
        for context in [Decision::Context, Decision::CurrentContext] {
            assert!(!context.accepts(Given::Environment), "{context:?}");
            assert!(context.accepts(Given::CommandLine), "{context:?}");
        }
    }

    #[test]
    fn every_global_option_is_kept_from_the_controller() {
        let known: Vec<String> = crate::command_line()
            .get_arguments()
            .filter(|arg| arg.is_global_set())
            .filter_map(|arg| Some(arg.get_long()?.to_owned()))
            .collect();
        let mut listed: Vec<&str> = LOCAL_OPTIONS.iter().map(|(name, _)| *name).collect();
        listed.sort_unstable();
        let mut known: Vec<&str> = known.iter().map(String::as_str).collect();
        known.sort_unstable();
        assert_eq!(known, listed);
    }
}
