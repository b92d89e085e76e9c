//! `doctor sim`: plays scenarios, compares policies, measures whether one holds its periods, and serves a simulated cluster to a controller.

use std::{
    io::{IsTerminal, Write},
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use clap::Subcommand;
use doctor_api::operator_api::{ApiDeps, ApiServer, WebConfig};
use doctor_backend::clock::SystemClock;
use doctor_core::toml_text;
use doctor_engine::{snapshot_feed::SnapshotFeed, trigger::Trigger};
use doctor_sim::{
    ServeConfig, WorldConfig,
    harness::{
        compare::{self, Row},
        period_coverage::{self, PeriodReport},
        scenario,
    },
};
use doctor_store::StoreUrl;

use super::{api_cli, serve::stop_flag};
use crate::{
    config::ConfigError,
    context::{self, Context},
    exit::Exit,
    failure::{Failure, Result},
    output::{Page, Table, cell, format_hours, plural},
};

/// The interval at which a server looks whether it is to stop.
const STOP_CHECK: Duration = Duration::from_millis(100);

/// Play scenarios, compare policies, or serve a simulated cluster to a controller.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: SimCommand,
}

#[derive(Debug, Subcommand)]
enum SimCommand {
    /// Play scenario scripts and print the events. With --store, a script's store is kept there, for other commands.
    Run {
        /// Scenario scripts; see docs/guide/simulation.md.
        #[arg(value_name = "SCRIPT", required = true)]
        scripts: Vec<PathBuf>,
        /// Then serve dashboard and API with what the script left in --store, until stopped.
        #[arg(long, value_name = "ADDRESS")]
        listen: Option<SocketAddr>,
    },
    Compare(CompareArgs),
    Periods(PeriodsArgs),
    Serve(ServeArgs),
}

/// Compare policies on the same faults and users: none, the seed's, ours, an oracle's.
#[derive(Debug, clap::Args)]
struct CompareArgs {
    /// Number of nodes.
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    nodes: u32,
    /// Number of days to play.
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=365))]
    days: u32,
    /// Number of seeds, starting at 1.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,
}

/// Simulate the policy in force with the shipped tests, and print how many results are younger than their period.
///
/// Of the pairs of node and test whose node was free within the period for twice the test's duration. DCGM, fio, NCCL and
/// perftest are installed on all nodes. Exit code 1 if fewer than 95 % are in some hour, or a problem lasts for a day.
#[derive(Debug, clap::Args)]
struct PeriodsArgs {
    /// Number of nodes.
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    nodes: u32,
    /// Number of days to play. Results of a test count from the end of its first period on.
    #[arg(long, value_name = "N", default_value_t = 14, value_parser = clap::value_parser!(u32).range(1..=365))]
    days: u32,
    #[arg(long, value_name = "N", default_value_t = 1, help = "The same seed gives the same faults and users")]
    seed: u64,
}

/// Serve a simulated cluster on a socket, for a controller with `[backend.sim]`. Time passes there also without
/// requests.
#[derive(Debug, clap::Args)]
struct ServeArgs {
    /// Unix socket to listen on.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// World as TOML (seed, pools, assumptions, disruptions, …). Default: 200 nodes.
    #[arg(long, value_name = "FILE")]
    world: Option<PathBuf>,
    /// Number of nodes, if no world is given.
    #[arg(long, value_name = "N", default_value_t = 200, conflicts_with = "world", value_parser = clap::value_parser!(u32).range(1..=20_000))]
    nodes: u32,
    #[arg(long, value_name = "N", help = "The same seed gives the same faults and users")]
    seed: Option<u64>,
    /// Simulated seconds per real second.
    #[arg(long, value_name = "FACTOR", default_value_t = 600.0)]
    speed: f64,
    /// Shared directory for the logs and results of jobs.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Append every effect to this file, one line of JSON each.
    #[arg(long, value_name = "FILE")]
    effects: Option<PathBuf>,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    match &args.command {
        SimCommand::Run { scripts, listen: None } => run_scenarios(context, scripts),
        SimCommand::Run { scripts, listen: Some(address) } => {
            let ([_], Some(store)) = (scripts.as_slice(), context.named_store()) else {
                return Err(Failure::Usage("--listen serves the store of one script: name it with --store".to_owned()));
            };
            run_scenarios(context, scripts)?;
            serve_end(context, store, *address)
        }
        SimCommand::Compare(args) => compare_policies(context, args),
        SimCommand::Periods(args) => simulate_periods(context, args),
        SimCommand::Serve(args) => serve(context, args),
    }
}

fn run_scenarios(context: &Context, scripts: &[PathBuf]) -> Result<Exit> {
    let mut outputs = Vec::new();
    for path in scripts {
        let failed = |source| Failure::File { operation: "reading", path: path.clone(), source };
        let script = std::fs::read_to_string(path).map_err(failed)?;
        let output = scenario::play_into(&script, context.named_store().cloned())
            .map_err(|error| Failure::Usage(format!("{}: {error}", path.display())))?;
        outputs.push(serde_json::json!({ "script": path, "output": output }));
        if !context.out.is_json() {
            context.out.print(&output)?;
        }
    }
    if context.out.is_json() {
        context.out.json(&outputs)?;
    }
    Ok(Exit::Ok)
}

/// Serves dashboard and API over the store that a script left. No controller leads: nothing changes any more.
fn serve_end(context: &Context, store: &StoreUrl, address: SocketAddr) -> Result<Exit> {
    let stop = stop_flag().map_err(|error| Failure::Other(format!("installing signal handlers: {error}")))?;
    let parts = ApiDeps {
        store: context::open(store)?,
        clock: Arc::new(SystemClock),
        cycle_trigger: Arc::new(Trigger::default()),
        snapshot_feed: Arc::new(SnapshotFeed::default()),
        share: None,
        settings: context.loaded()?.settings.clone(),
        cli: context.config_source().ok().map(|source| api_cli::handler(source, Some(store.clone()))),
    };
    let web = ApiServer::open(&WebConfig::listening_on(address), parts)?;
    context.out.show(&serde_json::json!({ "url": format!("http://{}/", web.address()) }), |page| {
        page.line(format!("Dashboard: http://{}/", web.address()));
    })?;
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(STOP_CHECK);
    }
    Ok(Exit::Ok)
}

fn simulate_periods(context: &Context, args: &PeriodsArgs) -> Result<Exit> {
    let policy = (*context.loaded()?.settings.policy).clone();
    let report = period_coverage::play(policy, args.nodes, args.days, args.seed)
        .map_err(|error| Failure::Other(error.to_string()))?;
    context.out.show(&report, |page| print_periods(page, &report))?;
    let holds = report.lowest_hour_percent >= 95.0 && report.lasting_problems.is_empty();
    Ok(if holds { Exit::Ok } else { Exit::ProblemsFound })
}

fn print_periods(page: &mut Page, report: &PeriodReport) {
    page.line(format!("{} nodes over {} days, seed {}.", report.nodes, report.days, report.seed));
    page.blank();
    let mut table = Table::new(["TEST", "PERIOD", "PAIRS", "YOUNGER", "LOWEST HOUR"]).right_align(&[1, 2, 3, 4]);
    let percent = |value: f64| cell(format!("{value:.1} %"));
    for row in &report.tests {
        table.row([
            cell(row.test.as_str()),
            cell(row.period.to_string()),
            cell(format!("{:.0}", row.pairs)),
            percent(row.fresh_percent),
            percent(row.lowest_hour_percent),
        ]);
    }
    page.table(&table);
    page.line(format!("Lowest hour of all tests together: {:.1} %.", report.lowest_hour_percent));
    page.line(format!(
        "Validation: {:.0} node-hours, {:.1} % of all and {:.1} % of those in which nodes were free.",
        report.validation_node_hours, report.validation_percent, report.validation_percent_of_free
    ));
    page.line(format!(
        "Users: {:.1} % of the cluster, {} jobs, {} of them disturbed. Faults: {} of {} found, {} false alarms.",
        report.utilisation_percent,
        report.user_jobs,
        report.user_jobs_disturbed,
        report.faults_found,
        report.faults,
        report.false_alarms
    ));
    for problem in &report.lasting_problems {
        page.line(format!("  ! for a day or longer: {problem}"));
    }
}

fn compare_policies(context: &Context, args: &CompareArgs) -> Result<Exit> {
    let seeds: Vec<u64> = (1..=args.seeds).collect();
    let world = WorldConfig::of(args.nodes);
    let watched = std::io::stderr().is_terminal();
    let rows = compare::compare(&world, args.days, &seeds, |policy, seed| {
        if watched {
            // A failure to print progress does not stop the comparison.
            let _written = write!(std::io::stderr(), "\r\x1b[K{} (seed {seed})", policy.word());
        }
    })
    .map_err(|error| Failure::Other(error.to_string()))?;
    if watched {
        let _written = write!(std::io::stderr(), "\r\x1b[K");
    }
    context.out.show(&rows, |page| print_comparison(page, &rows, args, &world))?;
    Ok(Exit::Ok)
}

fn print_comparison(page: &mut Page, rows: &[Row], args: &CompareArgs, world: &WorldConfig) {
    page.line(format!(
        "{} nodes over {} days, {}: the same faults and users for every policy.",
        args.nodes,
        args.days,
        plural(usize::try_from(args.seeds).unwrap_or(usize::MAX), "seed")
    ));
    page.blank();
    let header = [
        "POLICY",
        "FAULTS",
        "FOUND",
        "MEDIAN HOURS",
        "BY TESTS ONLY",
        "USER HOURS LOST",
        "VALIDATION HOURS",
        "FALSE ALARMS",
        "DISTURBED",
    ];
    let mut table = Table::new(header).right_align(&[1, 2, 3, 4, 5, 6, 7, 8]);
    let median = |hours: Option<f64>| cell(hours.map_or_else(|| "-".to_owned(), format_hours));
    for row in rows {
        table.row([
            cell(row.policy.word()),
            cell(row.faults.to_string()),
            cell(row.found.to_string()),
            median(row.median_hours_to_detect),
            median(row.median_hours_to_detect_by_tests),
            cell(format_hours(row.user_node_hours_lost)),
            cell(format_hours(row.validation_node_hours)),
            cell(row.false_alarms.to_string()),
            cell(row.user_jobs_disturbed.to_string()),
        ]);
    }
    page.table(&table);
    page.heading("What the simulation assumes");
    for line in world.assumptions.to_string().lines() {
        page.line(format!("  {line}"));
    }
}

fn serve(context: &Context, args: &ServeArgs) -> Result<Exit> {
    let stop = stop_flag().map_err(|error| Failure::Other(format!("installing signal handlers: {error}")))?;
    let mut world = match &args.world {
        Some(path) => {
            let text =
                std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.clone(), source })?;
            toml_text::read(&text, &[]).map_err(|error| ConfigError::Invalid { path: path.clone(), error })?
        }
        None => WorldConfig::of(args.nodes),
    };
    if let Some(seed) = args.seed {
        world.seed = seed;
    }
    if args.data.is_some() {
        world.share.clone_from(&args.data);
    }
    if args.effects.is_some() {
        world.effects.clone_from(&args.effects);
    }
    let config = ServeConfig { speed: args.speed, world };
    context.out.show(&serde_json::json!({ "socket": args.socket, "speed": args.speed }), |page| {
        page.line(format!(
            "Serving a simulated cluster on {} at {} times real time.",
            args.socket.display(),
            args.speed
        ));
        page.line(format!("Point a controller at it: [backend.sim] socket = \"{}\"", args.socket.display()));
    })?;
    doctor_sim::serve(&config, &args.socket, &stop).map_err(|error| {
        let source = std::error::Error::source(&error).map_or_else(String::new, |source| format!(": {source}"));
        Failure::Other(format!("{error}{source}"))
    })?;
    Ok(Exit::Ok)
}
