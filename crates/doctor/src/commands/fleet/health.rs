//! `doctor fleet health`: shows the health of each host by its last checks.

use doctor_backend::ssh::{CommandStatus, Host, RemoteCommand, RootAccess, random_marker};
use doctor_core::{ids::NodeName, time::Span};
use doctor_fleet::status::{self, Health, MAX_OUTPUT_BYTES, Source, Status};
use serde::Serialize;

use super::{Fleet, HostArgs, failure_text};
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{Cell, Page, Table, cell, plural, sanitize, short_duration},
};

/// Show the health of each host by the results of its last checks: AzNHC, DCGM's diagnostics, and our own.
///
/// Reads aznhc-health.log, dcgmi-diag.log and doctor-check.log (or, if that is missing, node-health.log, which
/// summarises the others) with the `.status` file of each. A `passed` counts only if the log of the same run shows that
/// something was checked and reports no fault. What is missing, unreadable or too old is unknown, never healthy; a
/// failure counts at any age. The worst of the three is the host's health.
///
/// Exit codes: 0 every host is healthy; 1 some host is unhealthy; 3 none is, but the health of some is unknown.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Args {
    /// Run `doctor-node check` on each host first, which appends to its doctor-check.log; as root, if `as_root` is set.
    #[arg(long)]
    run: bool,
    /// Only these sources, separated by commas: aznhc, dcgm, own.
    #[arg(long = "sources", value_name = "SOURCES", value_delimiter = ',', value_parser = source)]
    sources: Vec<Source>,
    /// Age after which a good result is unknown.
    #[arg(long, value_name = "TIME", default_value = "7d")]
    stale: Span,
    /// Directory of the logs on the hosts.
    #[arg(long, value_name = "DIR", default_value = "/var/log")]
    logs: String,
    /// Time limit per host, counted from the connection.
    #[arg(long, value_name = "TIME", default_value = "2m")]
    deadline: Span,
    /// Read the logs as root with `as_root` of [backend.ssh]; without that setting the login user must be root.
    #[arg(long)]
    root: bool,
    #[command(flatten)]
    host_args: HostArgs,
}

const EXAMPLES: &str = "\
Examples:
  doctor fleet health --hostfile hostfile
  doctor fleet health --run --sources own     # where neither AzNHC nor DCGM is installed
  doctor fleet health --json | jq -r '.[] | select(.health != \"healthy\") | .host'";

fn source(text: &str) -> std::result::Result<Source, String> {
    Source::from_code(text).ok_or_else(|| {
        let known = Source::ALL.map(Source::code).join(", ");
        format!("expected one of {known}")
    })
}

#[derive(Debug, Serialize)]
struct HealthView {
    host: NodeName,
    health: Health,
    checks: Vec<Status>,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<Exit> {
    if !args.logs.starts_with('/') {
        return Err(Failure::Usage(format!("--logs is `{}`, expected an absolute path", args.logs)));
    }
    let fleet = args.host_args.open(context)?;
    let sources = if args.sources.is_empty() { Source::ALL.to_vec() } else { args.sources.clone() };
    let no_bits = |error| Failure::Other(format!("reading random bytes: {error}"));
    let word = random_marker().map_err(no_bits)?;
    let views = fleet.for_each_host("checked", |host| {
        let checks = read_status(&fleet, host, args, &sources, &word);
        HealthView { host: host.name.clone(), health: status::worst(&checks), checks }
    });
    context.out.show(&views, |page| text(page, &views, &sources))?;
    let worst = views.iter().map(|view| view.health).max().unwrap_or(Health::Unknown);
    Ok(match worst {
        Health::Healthy => Exit::Ok,
        Health::Unhealthy => Exit::ProblemsFound,
        Health::Unknown => Exit::Unreachable,
    })
}

fn read_status(fleet: &Fleet, host: &Host, args: &Args, sources: &[Source], word: &str) -> Vec<Status> {
    // Check first, so that the new result is read below. If the check fails, an older result must not replace it.
    let unchecked = args.run.then(|| run_check(fleet, host, args).err()).flatten();
    let script = status::script(word, &args.logs, sources);
    let (limit, most) = (args.deadline.to_std(), MAX_OUTPUT_BYTES);
    let result = fleet.run(
        host,
        &RemoteCommand { script: &script, input: b"", limit, max_output: most, root: RootAccess::from_flag(args.root) },
    );
    let unknown =
        |source: &Source, why: &str| Status { source: *source, health: Health::Unknown, why: sanitize(why), age: None };
    let mut all = match &result.status {
        CommandStatus::Exited(0) => {
            let text = String::from_utf8_lossy(&result.stdout);
            let mut all = status::read(word, &text, sources, args.stale);
            all.iter_mut().for_each(|status| status.why = sanitize(&status.why));
            all
        }
        how => {
            let why = failure_text(how).unwrap_or_default();
            sources.iter().map(|source| unknown(source, &why)).collect()
        }
    };
    if let Some(why) = unchecked {
        let why = format!("it could not be checked: {why}");
        all.iter_mut().filter(|status| status.source == Source::Own).for_each(|own| *own = unknown(&Source::Own, &why));
    }
    all
}

/// Runs our own check on a host, which writes its result to the logs that are read.
fn run_check(fleet: &Fleet, host: &Host, args: &Args) -> std::result::Result<(), String> {
    let program = fleet.client.install_program(host)?;
    let mut script = status::check_script(&program, &args.logs);
    if args.logs == "/var/log" {
        // Update the host's summary, if the host has the script that writes it.
        script.push_str("; S=$?; [ ! -x /opt/check-node-health.sh ] || /opt/check-node-health.sh >/dev/null; exit $S");
    }
    let command = RemoteCommand {
        script: &script,
        input: b"",
        limit: args.deadline.to_std(),
        max_output: 4096,
        root: RootAccess::IfConfigured,
    };
    let output = fleet.run(host, &command);
    match failure_text(&output.status) {
        None => Ok(()),
        Some(why) => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let last = stderr.lines().last().map(|line| format!(": {line}")).unwrap_or_default();
            Err(why + &last)
        }
    }
}

fn text(page: &mut Page, views: &[HealthView], sources: &[Source]) {
    let upper: Vec<String> = sources.iter().map(|source| source.code().to_uppercase()).collect();
    let mut header = vec!["HOST", "HEALTH"];
    header.extend(upper.iter().map(String::as_str));
    header.push("WHY");
    let mut table = Table::new(header);
    for view in views {
        let mut cells = vec![cell(view.host.as_str()), health_cell(view.health, view.health.code().to_owned())];
        cells.extend(view.checks.iter().map(|status| {
            let age = status.age.map_or_else(String::new, |age| format!(" {}", short_duration(age)));
            health_cell(status.health, format!("{}{age}", status.health.code()))
        }));
        cells.push(cell(why(&view.checks)));
        table.row(cells);
    }
    page.table(&table);
    let count = |health: Health| views.iter().filter(|view| view.health == health).count();
    let counts = Health::ALL.map(|health| format!("{} {}", count(health), health.code()));
    page.line(format!("{}: {}", plural(views.len(), "host"), counts.join(", ")));
}

/// Joins the reasons of all sources that need one. A host that was not reached has the same reason everywhere: print it
/// once.
fn why(checks: &[Status]) -> String {
    let same = |other: &Status| checks.first().is_some_and(|first| first.why == other.why && first.age.is_none());
    if checks.len() > 1 && checks.iter().all(same) {
        return checks[0].why.clone();
    }
    let plain = |status: &&Status| status.health != Health::Healthy || status.why.contains(' ');
    let texts = checks.iter().filter(plain).map(|status| format!("{}: {}", status.source.code(), status.why));
    texts.collect::<Vec<_>>().join("; ")
}

fn health_cell(health: Health, text: String) -> Cell {
    match health {
        Health::Healthy => cell(text).good(),
        Health::Unknown => cell(text).warn(),
        Health::Unhealthy => cell(text).bad(),
    }
}
