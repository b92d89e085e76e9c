//! Commands for a controller that is reached over its API: reading commands are sent as they were typed, changes as
//! actions, and the rest is refused with the reason.

mod command_line;

use std::{collections::BTreeMap, path::Path, process::ExitCode, thread, time::Duration};

use clap::ArgMatches;
use doctor_api::operator_api::CliOutput;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    cli::Command,
    commands::{bundle, log, report},
    connection::{self, ConnectionArgs, Server, ServerSettings},
    context::Context,
    failure::{Failure, Result},
    output::{sanitize, sanitize_page},
};

/// The interval at which a growing log is asked for.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// What a command needs.
#[derive(Debug)]
enum Handling<'a> {
    /// Neither a store nor a controller, or a store of this machine in any case.
    ThisMachine,
    /// The controller's store or its machine. Without an option that says where, a context in use means the controller.
    ControllerMachine,
    Read,
    Version,
    Change,
    Log(&'a log::Args),
    Report(&'a report::Args),
    Bundle(&'a bundle::Args),
}

fn handling(command: &Command) -> Handling<'_> {
    let changes_unless = |reads: bool| if reads { Handling::Read } else { Handling::Change };
    let here_unless = |reads: bool| if reads { Handling::Read } else { Handling::ControllerMachine };
    match command {
        Command::Plan(_)
        | Command::Status(_)
        | Command::Nodes(_)
        | Command::Why(_)
        | Command::History(_)
        | Command::Audit(_)
        | Command::Explain(_) => Handling::Read,
        Command::Version(_) => Handling::Version,
        Command::Log(args) => Handling::Log(args),
        Command::Report(args) => Handling::Report(args),
        Command::Bundle(args) if args.needs_this_machine() => Handling::ControllerMachine,
        Command::Bundle(args) => Handling::Bundle(args),
        Command::Test(_)
        | Command::Hold(_)
        | Command::Release(_)
        | Command::Quarantine(_)
        | Command::Repair(_)
        | Command::Pause(_)
        | Command::Resume(_) => Handling::Change,
        Command::Cases(args) => changes_unless(args.reads()),
        Command::Breaker(args) => changes_unless(args.reads()),
        Command::Alert(args) => here_unless(args.reads()),
        Command::Token(args) => here_unless(args.reads()),
        Command::Agent(args) => here_unless(args.reads()),
        Command::Config(args) if args.initialises() => Handling::ThisMachine,
        Command::Config(args) => here_unless(args.shows()),
        Command::Rejudge(_) => Handling::ControllerMachine,
        Command::Serve(_)
        | Command::Run(_)
        | Command::Db(_)
        | Command::Import(_)
        | Command::Context(_)
        | Command::Deploy(_)
        | Command::Fleet(_)
        | Command::Demo(_)
        | Command::Sim(_)
        | Command::Completions(_)
        | Command::Man(_)
        | Command::Docs(_) => Handling::ThisMachine,
    }
}

/// Runs a command by the controller that the command line means. `None`: it runs in this process, and sends its change to
/// the controller that the context has then.
pub(crate) fn run(
    context: &mut Context,
    args: &ConnectionArgs,
    command: &Command,
    matches: &ArgMatches,
) -> Result<Option<ExitCode>> {
    let handling = handling(command);
    if matches!(handling, Handling::ThisMachine) {
        return match connection::is_on_command_line(matches) {
            true => Err(refusal(matches, "runs on this machine: leave out --server and --context")),
            false => Ok(None),
        };
    }
    let Some(settings) = connection::choose(args, matches)? else { return Ok(None) };
    if matches!(handling, Handling::ControllerMachine) {
        return Err(refusal(matches, &why_not_remote(&settings)));
    }
    let server = Server::open(&settings)?;
    let exit = match handling {
        Handling::Change => {
            context.connect(server);
            return Ok(None);
        }
        Handling::Version => {
            if !context.out.is_json() {
                context.out.print(&format!("{:<13}{}\n", "client", env!("CARGO_PKG_VERSION")))?;
            }
            show(context, &server)?
        }
        Handling::Log(args) if args.follow => follow(context, &server, &args.query)?,
        Handling::Report(args) => match args.file(&context.out)? {
            Some(path) => save_report(context, &server, path)?,
            None => show(context, &server)?,
        },
        Handling::Bundle(args) => {
            let bytes = server.get(&format!("/cases/{}/bundle", args.case))?;
            return args.save(context, &bytes, &[]).map(ExitCode::from).map(Some);
        }
        _ => show(context, &server)?,
    };
    Ok(Some(ExitCode::from(exit)))
}

fn why_not_remote(settings: &ServerSettings) -> String {
    match settings.context.as_ref().filter(|_| !settings.is_explicit) {
        Some(name) => format!(
            "needs the controller's machine, and the context {name} is in use: run it there, or name a store of this machine \
             with --config or --store"
        ),
        None => "needs the controller's machine: run it there, without --server and --context".to_owned(),
    }
}

/// Returns the error of a command that does not run where the command line says.
fn refusal(matches: &ArgMatches, why: &str) -> Failure {
    let mut name = String::from("doctor");
    let mut level = Some(matches);
    while let Some((command, inner)) = level.and_then(ArgMatches::subcommand) {
        name = format!("{name} {command}");
        level = Some(inner);
    }
    Failure::Usage(format!("`{name}` {why}"))
}

#[derive(Debug, Deserialize)]
struct CliReply {
    stdout: String,
    stderr: String,
    exit: u8,
}

/// Has the controller run the command line of this process, and prints what it printed.
fn show(context: &Context, server: &Server) -> Result<u8> {
    show_args(context, server, &command_line::without(&[]))
}

fn show_args(context: &Context, server: &Server, args: &[String]) -> Result<u8> {
    let output = send(context, server, args)?;
    print(context, &output)?;
    Ok(output.exit)
}

/// Writes the report that the controller makes to a file of this machine.
fn save_report(context: &Context, server: &Server, path: &Path) -> Result<u8> {
    let output = send(context, server, &command_line::without(&[("out", true)]))?;
    match output.exit {
        0 => report::save(context, path, &output.stdout)?,
        _ => print(context, &output)?,
    }
    Ok(output.exit)
}

fn send(context: &Context, server: &Server, args: &[String]) -> Result<CliOutput> {
    let out = &context.out;
    request(server, &json!({ "args": args, "json": out.is_json(), "colour": out.is_coloured(), "width": out.width() }))
}

fn request(server: &Server, body: &Value) -> Result<CliOutput> {
    let CliReply { stdout, stderr, exit } = server.post("/cli", body)?;
    Ok(CliOutput { stdout, stderr, exit })
}

fn print(context: &Context, output: &CliOutput) -> Result<()> {
    match context.out.is_json() {
        true => context.out.print(&output.stdout)?,
        false => context.out.print(&sanitize_page(&output.stdout))?,
    }
    // There is no other channel on which to report that printing failed.
    let _printed = std::io::Write::write_all(&mut std::io::stderr(), sanitize_page(&output.stderr).as_bytes());
    Ok(())
}

/// What `doctor log --json` prints of one log.
#[derive(Debug, Deserialize)]
struct LogPart {
    node: String,
    path: Option<String>,
    /// The bytes of the log before the text: a controller sends the end of a long log.
    start: u64,
    text: String,
}

/// What a follower has printed of one log.
#[derive(Debug, Default)]
struct Printed {
    start: u64,
    /// The length of the last text, and its end.
    length: usize,
    end: String,
}

impl Printed {
    /// Returns what the text has that was not printed yet. The text may begin later in the log than the last one.
    fn new_text<'a>(&mut self, part: &'a LogPart) -> &'a str {
        /// Enough to be recognised.
        const KEPT: usize = 4096;
        let from = if self.start == part.start {
            self.length
        } else {
            part.text.rfind(&self.end).map_or(0, |at| at + self.end.len())
        };
        let new = part.text.get(from..).unwrap_or_default();
        let kept = part.text.ceil_char_boundary(part.text.len().saturating_sub(KEPT));
        *self = Self { start: part.start, length: part.text.len(), end: part.text[kept..].to_owned() };
        new
    }
}

/// The state of a run, as far as following its log needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum RunProgress {
    Planned,
    Pending,
    Running,
    #[serde(other)]
    Ended,
}

#[derive(Debug, Deserialize)]
struct RunReply {
    state: RunProgress,
    nodes: Vec<String>,
    tests: Vec<String>,
}

/// Follows the output of a run until it ends.
fn follow(context: &Context, server: &Server, query: &log::Query) -> Result<u8> {
    let args = command_line::without(&[("follow", false)]);
    if context.out.is_json() {
        return show_args(context, server, &args);
    }
    let mut printed: BTreeMap<(String, Option<String>), Printed> = BTreeMap::new();
    loop {
        // Before the log, so that everything written before the end is printed.
        let reply: RunReply = server.get_json(&format!("/runs/{}", query.run))?;
        let has_several = reply.tests.len() * query.node.as_ref().map_or(reply.nodes.len(), |_| 1) > 1;
        let output = request(server, &json!({ "args": args, "json": true }))?;
        let Ok(parts) = serde_json::from_str::<Vec<LogPart>>(&output.stdout) else {
            // An error, which the controller has put into words.
            print(context, &output)?;
            return Ok(output.exit);
        };
        for part in &parts {
            let name = part.path.as_ref().unwrap_or(&part.node);
            let printed = printed.entry((part.node.clone(), part.path.clone())).or_default();
            let is_first = printed.end.is_empty();
            let new = printed.new_text(part);
            if has_several && is_first && !new.is_empty() {
                context.out.print(&format!("== {name}\n"))?;
            }
            if is_first && part.start > 0 {
                context.out.print(&log::omitted(part.start, name))?;
            }
            context.out.print(&sanitize(new))?;
        }
        match (reply.state, parts.is_empty()) {
            (RunProgress::Ended, false) => return Ok(output.exit),
            // The controller says in words that there is no log.
            (RunProgress::Ended, true) => return show_args(context, server, &args),
            _ => thread::sleep(POLL_INTERVAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_follower_prints_each_line_once_also_when_the_controller_sends_only_the_end_of_a_long_log() {
        let part = |start: u64, text: &str| LogPart { node: "a".into(), path: None, start, text: text.into() };
        let mut printed = Printed::default();
        assert_eq!(printed.new_text(&part(0, "one\ntwo\n")), "one\ntwo\n");
        assert_eq!(printed.new_text(&part(0, "one\ntwo\nthree\n")), "three\n");
        assert_eq!(printed.new_text(&part(0, "one\ntwo\nthree\n")), "");
        // All of it was sent before, so that the beginning of the next text is known.
        let mut printed = Printed { start: 0, length: 8, end: "two\n".into() };
        assert_eq!(printed.new_text(&part(4, "two\nthree\nfour\n")), "three\nfour\n");
        assert_eq!(printed.new_text(&part(30, "much later\n")), "much later\n");
    }
}
