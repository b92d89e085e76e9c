//! Keeps `command-line.json` equal to the command line of this program. `doctor` makes manual pages and completions of
//! `doctor-node` from that file: the programs do not depend on each other, and generators would make this one larger.

use clap::{Arg, Command, CommandFactory as _, ValueHint};
use serde_json::{Map, Value, json};

/// Examples for the manual pages. They are not part of the program, which has to stay small.
const EXAMPLES: [(&str, &[&str]); 6] = [
    (
        "check",
        &["doctor-node check", "doctor-node check disk-space memory --all", "doctor-node check --suite quick --json"],
    ),
    (
        "test",
        &["doctor-node test dl", "doctor-node test standard --echo", "doctor-node test dl --set pattern_time=30s"],
    ),
    ("agent", &["doctor-node agent --help"]),
    ("record", &["doctor-node record --out recording"]),
    ("report", &["doctor-node report --help"]),
    ("profile", &["doctor-node profile show", "doctor-node profile learn --help"]),
];

/// Set to rewrite the file.
const WRITE_VARIABLE: &str = "DOCTOR_WRITE_COMMAND_LINE";

fn describe(command: &Command) -> Value {
    let mut fields = Map::new();
    let mut set = |name: &str, value: Value| {
        let is_empty = match &value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(items) => items.is_empty(),
            _ => false,
        };
        if !is_empty {
            fields.insert(name.to_owned(), value);
        }
    };
    set("name", json!(command.get_name()));
    set("about", json!(command.get_about().map(ToString::to_string)));
    set("long_about", json!(command.get_long_about().map(ToString::to_string)));
    set("after_help", json!(examples(command.get_name())));
    let own = |arg: &&Arg| !matches!(arg.get_id().as_str(), "help" | "version");
    set("args", command.get_arguments().filter(own).map(argument).collect());
    let visible = |child: &&Command| child.get_name() != "help" && !child.is_hide_set();
    set("subcommands", command.get_subcommands().filter(visible).map(describe).collect());
    Value::Object(fields)
}

fn examples(command: &str) -> Option<String> {
    let (_, examples) = EXAMPLES.iter().find(|(name, _)| *name == command)?;
    let lines: Vec<String> = examples.iter().map(|line| format!("  {line}")).collect();
    Some(format!("Examples:\n{}", lines.join("\n")))
}

fn argument(arg: &Arg) -> Value {
    let takes_values = arg.get_action().takes_values();
    let possible = if takes_values { arg.get_possible_values() } else { Vec::new() };
    let fields = [
        ("id", json!(arg.get_id().as_str())),
        ("short", json!(arg.get_short())),
        ("long", json!(arg.get_long())),
        ("help", json!(arg.get_help().map(ToString::to_string))),
        ("long_help", json!(arg.get_long_help().map(ToString::to_string))),
        ("heading", json!(arg.get_help_heading())),
        ("env", json!(arg.get_env().map(|name| name.to_string_lossy()))),
        ("takes_values", json!(takes_values)),
        ("many", json!(takes_values && arg.get_num_args().is_some_and(|range| range.max_values() > 1))),
        ("required", json!(arg.is_required_set())),
        ("hidden", json!(arg.is_hide_set())),
        ("path", json!(matches!(arg.get_value_hint(), ValueHint::AnyPath | ValueHint::FilePath | ValueHint::DirPath))),
        ("value_names", arg.get_value_names().unwrap_or_default().iter().map(|name| json!(name.as_str())).collect()),
        ("possible", possible.iter().map(|value| json!(value.get_name())).collect()),
        (
            "defaults",
            match takes_values {
                true => arg.get_default_values().iter().map(|value| json!(value.to_string_lossy())).collect(),
                false => Value::Null,
            },
        ),
    ];
    let is_set = |value: &Value| match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(items) => !items.is_empty(),
        _ => true,
    };
    Value::Object(
        fields.into_iter().filter(|(_, value)| is_set(value)).map(|(name, value)| (name.to_owned(), value)).collect(),
    )
}

#[test]
fn the_file_describes_this_command_line() {
    let mut command = super::Cli::command();
    command.build();
    let text = format!("{:#}\n", describe(&command));
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/command-line.json");
    if std::env::var_os(WRITE_VARIABLE).is_some() {
        std::fs::write(path, &text).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        written == text,
        "command-line.json differs: {WRITE_VARIABLE}=1 cargo test -p doctor-node --bin doctor-node"
    );
}

#[test]
fn every_example_is_a_valid_command() {
    use clap::error::ErrorKind;

    let names: Vec<String> = super::Cli::command().get_subcommands().map(|child| child.get_name().to_owned()).collect();
    for (name, examples) in EXAMPLES {
        assert!(names.iter().any(|known| known == name), "{name}");
        for example in examples {
            assert!(example.starts_with(&format!("doctor-node {name}")), "{example}");
            if let Err(error) = super::Cli::command().try_get_matches_from(example.split_whitespace()) {
                assert_eq!(error.kind(), ErrorKind::DisplayHelp, "{example}: {error}");
            }
        }
    }
}
