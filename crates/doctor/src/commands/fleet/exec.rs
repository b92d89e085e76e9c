//! `doctor fleet exec`: runs a command on every host.

use doctor_backend::ssh::{CommandResult, CommandStatus, RemoteCommand, RootAccess, shell_quote};
use doctor_core::{ids::NodeName, time::Span};
use serde::Serialize;

use super::{HostArgs, failure_text, group_by_value};
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{plural, sanitize},
};

/// Run a command on every host and print its output by host.
///
/// A single argument after `--` is a shell command line; several are a command and its arguments, passed unchanged.
/// Standard input is empty. Hosts with the same output are printed once, as node[01-14]. Control sequences in the
/// output are made visible; --json has all text unchanged.
///
/// Exit codes: 0 it exited with 0 on every host; 1 on some it failed, exceeded the deadline or lost its
/// connection; 3 on none, but some hosts could not be reached. An exit code of 255 comes from the command.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Args {
    /// Time limit per host, counted from the connection; then the command is ended there.
    #[arg(long, value_name = "TIME", default_value = "60s")]
    deadline: Span,
    /// Run as root with `as_root` of [backend.ssh]; without that setting the login user must be root.
    #[arg(long)]
    root: bool,
    /// Limit in KiB for each host's standard output, and for its standard error.
    #[arg(long, value_name = "KIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    most: u64,
    /// Print each host separately.
    #[arg(long)]
    no_fold: bool,
    #[command(flatten)]
    host_args: HostArgs,
    /// Command to run.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

const EXAMPLES: &str = "\
Examples:
  doctor fleet exec -- uptime
  doctor fleet exec --hosts 'gpu[01-08]' --deadline 5m -- nvidia-smi -q -d ECC
  doctor fleet exec --hostfile hostfile -- 'dmesg | grep -c Xid'";

#[derive(Debug, Serialize)]
struct ExecView {
    host: NodeName,
    ended: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    stdout: String,
    stderr: String,
    /// Bytes over the limit, which were dropped.
    left_out: u64,
    seconds: f64,
}

impl ExecView {
    fn new(host: &NodeName, result: &CommandResult) -> Self {
        let (ended, code) = match result.status {
            CommandStatus::Exited(code) => ("exited", Some(code)),
            CommandStatus::TimedOut { .. } => ("late", None),
            CommandStatus::NotStarted(_) => ("not-reached", None),
            CommandStatus::ConnectionLost(_) => ("lost", None),
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self {
            host: host.clone(),
            ended,
            code,
            why: failure_text(&result.status),
            stdout: text(&result.stdout),
            stderr: text(&result.stderr),
            left_out: result.dropped_bytes,
            seconds: (result.duration.as_secs_f64() * 1000.0).round() / 1000.0,
        }
    }
}

pub(super) fn run(context: &Context, args: &Args) -> Result<Exit> {
    if args.deadline < Span::from_secs(1) {
        return Err(Failure::Usage(format!("--deadline is {}, expected 1s or more", args.deadline)));
    }
    let fleet = args.host_args.open(context)?;
    let script = script(&args.command);
    let most = usize::try_from(args.most * 1024).unwrap_or(usize::MAX);
    let command = RemoteCommand {
        script: &script,
        input: b"",
        limit: args.deadline.to_std(),
        max_output: most,
        root: RootAccess::from_flag(args.root),
    };
    let results = fleet.for_each_host("done", |host| fleet.run(host, &command));
    let exit = exit(results.iter().map(|result| &result.status));
    let views: Vec<ExecView> =
        fleet.hosts.iter().zip(&results).map(|(host, result)| ExecView::new(&host.name, result)).collect();
    if context.out.is_json() {
        context.out.json(&views)?;
    } else {
        show(context, &views, args.no_fold)?;
    }
    Ok(exit)
}

/// Returns a single argument as a shell command line, and quotes several.
fn script(command: &[String]) -> String {
    match command {
        [line] => line.clone(),
        args => args.iter().map(|arg| shell_quote(arg)).collect::<Vec<_>>().join(" "),
    }
}

fn exit<'a>(all: impl Iterator<Item = &'a CommandStatus>) -> Exit {
    let (mut failed, mut unreachable) = (false, false);
    for how in all {
        match how {
            CommandStatus::Exited(0) => {}
            CommandStatus::Exited(_) | CommandStatus::TimedOut { .. } | CommandStatus::ConnectionLost(_) => {
                failed = true;
            }
            CommandStatus::NotStarted(_) => unreachable = true,
        }
    }
    match (failed, unreachable) {
        (true, _) => Exit::ProblemsFound,
        (false, true) => Exit::Unreachable,
        (false, false) => Exit::Ok,
    }
}

/// Prints the hosts' standard output to standard output, and their standard error and failures to standard error.
fn show(context: &Context, views: &[ExecView], apart: bool) -> Result<()> {
    // Including the index makes every key unique, so that hosts stay separate.
    let key = |(index, view): (usize, &ExecView)| {
        let index = if apart { index } else { 0 };
        let left_out = (view.left_out > 0).then(|| format!("{} bytes over the limit were dropped", view.left_out));
        (view.host.clone(), (index, view.stdout.clone(), view.stderr.clone(), view.why.clone(), left_out))
    };
    for (hosts, _, (_, stdout, stderr, why, left_out)) in group_by_value(views.iter().enumerate().map(key)) {
        context.out.print(&prefix_lines(&hosts, &stdout))?;
        eprint!("{}", prefix_lines(&hosts, &stderr));
        for note in left_out.iter().chain(&why) {
            eprint!("{}", prefix_lines(&hosts, note));
        }
    }
    if views.iter().any(|view| view.why.is_some()) {
        let succeeded = views.iter().filter(|view| view.why.is_none()).count();
        eprintln!("{}: {succeeded} succeeded, {} failed", plural(views.len(), "host"), views.len() - succeeded);
    }
    Ok(())
}

/// Puts the label before every line, so that a host cannot imitate another host's lines.
pub(super) fn prefix_lines(label: &str, text: &str) -> String {
    sanitize(text).lines().map(|line| format!("{label}: {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_argument_is_a_shell_line_and_several_are_quoted() {
        assert_eq!(script(&["a | b".to_owned()]), "a | b");
        assert_eq!(script(&["echo".to_owned(), "it's; $HOME".to_owned()]), "'echo' 'it'\\''s; $HOME'");
    }

    #[test]
    fn a_failed_command_outranks_an_unreachable_host() {
        let unreachable = || CommandStatus::NotStarted(String::new());
        for (all, expected) in [
            (vec![CommandStatus::Exited(0)], Exit::Ok),
            (vec![CommandStatus::Exited(0), unreachable()], Exit::Unreachable),
            (vec![CommandStatus::Exited(255), unreachable()], Exit::ProblemsFound),
            (vec![CommandStatus::TimedOut { ended: true }, CommandStatus::Exited(0)], Exit::ProblemsFound),
            (vec![CommandStatus::ConnectionLost(String::new())], Exit::ProblemsFound),
        ] {
            assert_eq!(exit(all.iter()), expected, "{all:?}");
        }
    }

    #[test]
    fn output_of_one_host_cannot_look_like_anothers() {
        assert_eq!(prefix_lines("n1", "one\rn2: two\x1b[2K\nthree"), "n1: one\u{fffd}n2: two\u{fffd}[2K\nn1: three\n");
    }
}
