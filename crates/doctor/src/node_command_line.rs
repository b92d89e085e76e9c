//! The command line of `doctor-node`, for its manual pages and completions. It is read from a file that a test of that
//! program keeps equal to its arguments, because this program does not depend on it.

use clap::{
    Arg, ArgAction, Command, ValueHint,
    builder::{PossibleValue, PossibleValuesParser},
};
use serde::Deserialize;

const TEXT: &str = include_str!("../../node/command-line.json");

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CommandEntry {
    name: String,
    about: Option<String>,
    long_about: Option<String>,
    after_help: Option<String>,
    #[serde(default)]
    args: Vec<ArgEntry>,
    #[serde(default)]
    subcommands: Vec<CommandEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each is a property that an argument has in clap")]
struct ArgEntry {
    id: String,
    short: Option<char>,
    long: Option<String>,
    help: Option<String>,
    long_help: Option<String>,
    heading: Option<String>,
    env: Option<String>,
    #[serde(default)]
    takes_values: bool,
    #[serde(default)]
    many: bool,
    #[serde(default)]
    required: bool,
    #[serde(default)]
    hidden: bool,
    #[serde(default)]
    path: bool,
    #[serde(default)]
    value_names: Vec<String>,
    #[serde(default)]
    possible: Vec<String>,
    #[serde(default)]
    defaults: Vec<String>,
}

/// Returns the command line of `doctor-node`.
pub(crate) fn command_line() -> Command {
    let root: CommandEntry = serde_json::from_str(TEXT).expect("a test of this file reads it");
    root.into_command().version(env!("CARGO_PKG_VERSION"))
}

/// Makes a text live as long as the program, which ends after it has printed one page: clap keeps only such texts.
fn keep(text: String) -> &'static str {
    text.leak()
}

impl CommandEntry {
    fn into_command(self) -> Command {
        let mut command = Command::new(keep(self.name));
        if let Some(about) = self.about {
            command = command.about(about);
        }
        if let Some(about) = self.long_about {
            command = command.long_about(about);
        }
        if let Some(help) = self.after_help {
            command = command.after_long_help(help);
        }
        command
            .args(self.args.into_iter().map(ArgEntry::into_arg))
            .subcommands(self.subcommands.into_iter().map(Self::into_command))
    }
}

impl ArgEntry {
    fn into_arg(self) -> Arg {
        let mut arg = Arg::new(keep(self.id)).required(self.required).hide(self.hidden);
        arg = match (self.takes_values, self.many) {
            (false, _) => arg.action(ArgAction::SetTrue),
            (true, false) => arg.action(ArgAction::Set),
            (true, true) => arg.action(ArgAction::Append).num_args(1..),
        };
        if let Some(short) = self.short {
            arg = arg.short(short);
        }
        if let Some(long) = self.long {
            arg = arg.long(keep(long));
        }
        if let Some(help) = self.help {
            arg = arg.help(help);
        }
        if let Some(help) = self.long_help {
            arg = arg.long_help(help);
        }
        if let Some(heading) = self.heading {
            arg = arg.help_heading(keep(heading));
        }
        if let Some(env) = self.env {
            arg = arg.env(keep(env));
        }
        if self.path {
            arg = arg.value_hint(ValueHint::AnyPath);
        }
        if !self.value_names.is_empty() {
            arg = arg.value_names(self.value_names.into_iter().map(keep));
        }
        if !self.possible.is_empty() {
            let values = self.possible.into_iter().map(|value| PossibleValue::new(keep(value)));
            arg = arg.value_parser(PossibleValuesParser::new(values));
        }
        if !self.defaults.is_empty() {
            arg = arg.default_values(self.defaults.into_iter().map(keep));
        }
        arg
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_a_valid_command_line() {
        command_line().debug_assert();
        let names: Vec<String> = command_line().get_subcommands().map(|child| child.get_name().to_owned()).collect();
        for name in ["check", "test", "agent", "job", "profile"] {
            assert!(names.iter().any(|known| known == name), "{names:?}");
        }
        let matches = command_line().try_get_matches_from(["doctor-node", "check", "disk-space", "--json"]);
        assert!(matches.is_ok(), "{matches:?}");
    }
}
