//! `doctor demo`: plays a simulated month in seconds and leaves its store for other commands.

use std::{io::IsTerminal, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use doctor_api::operator_api::{ApiDeps, ApiServer, WebConfig};
use doctor_engine::{share::Share, snapshot_feed::SnapshotFeed, trigger::Trigger};

use doctor_sim::harness::{
    demo::{Demo, DemoError, DemoSummary},
    score::Score,
};
use doctor_store::StoreUrl;

use super::{api_cli, serve::stop_flag};
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{Page, Table, cell, format_hours, format_percent, plural},
};

/// Play a simulated month of a cluster, then show what was found, how fast, and at what cost.
///
/// The engine is the real one; users, faults and time are simulated. The store is kept for `doctor nodes`, `doctor why`
/// and other commands.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of nodes.
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    nodes: u32,
    /// Number of days to play.
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=365))]
    days: u32,
    /// The same seed gives the same month.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Directory for the store and the shared directory. An earlier demo there is replaced.
    #[arg(long, value_name = "DIR", default_value = "doctor-demo")]
    dir: PathBuf,
    /// Draw nothing while the demo plays.
    #[arg(long)]
    quiet: bool,
    /// Then continue as a live cluster with dashboard and API until stopped.
    #[arg(long)]
    serve: bool,
    /// Address of the API.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:7480", requires = "serve")]
    listen: SocketAddr,
    /// Simulated seconds per real second while serving.
    #[arg(long, value_name = "FACTOR", default_value_t = 600.0, requires = "serve")]
    speed: f64,
}

/// The least duration of a live demo, so that a viewer can follow it.
const MIN_LIVE_DURATION: Duration = Duration::from_secs(8);

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let live = !args.quiet && !context.out.is_json() && std::io::stdout().is_terminal();
    if !live && !context.out.is_json() {
        context.out.print(&format!("Playing {} days of {} nodes …\n", args.days, args.nodes))?;
    }
    let demo = Demo {
        nodes: args.nodes,
        days: args.days,
        seed: args.seed,
        folder: args.dir.clone(),
        live,
        min_duration: if live { MIN_LIVE_DURATION } else { Duration::ZERO },
    };
    let failed = |error: DemoError| Failure::Other(error.to_string());
    if args.serve {
        return serve(context, args, &demo);
    }
    let summary = demo.play(&mut std::io::stdout().lock()).map_err(failed)?;
    context.out.show(&summary.score, |page| text(page, &summary))?;
    Ok(Exit::Ok)
}

/// Plays the past, then continues behind the API.
fn serve(context: &Context, args: &Args, demo: &Demo) -> Result<Exit> {
    if !(1.0..=100_000.0).contains(&args.speed) {
        return Err(Failure::Usage(format!("--speed is {}, expected 1 to 100000", args.speed)));
    }
    let stop = stop_flag().map_err(|error| Failure::Other(format!("installing signal handlers: {error}")))?;
    let result = demo.play_and_continue(&mut std::io::stdout().lock());
    let (summary, mut running) = result.map_err(|error| Failure::Other(error.to_string()))?;
    let (cycle_trigger, snapshot_feed) = (Arc::new(Trigger::default()), Arc::new(SnapshotFeed::default()));
    let named = StoreUrl::Sqlite(summary.store.clone());
    let cli = context.config_source().ok().map(|source| api_cli::handler(source, Some(named)));
    let parts = ApiDeps {
        store: running.store().clone(),
        clock: running.clock(),
        cycle_trigger: Arc::clone(&cycle_trigger),
        snapshot_feed: Arc::clone(&snapshot_feed),
        share: Some(Share::open(&summary.share)?),
        settings: running.settings().clone(),
        cli,
    };
    let web = ApiServer::open(&WebConfig::listening_on(args.listen), parts)?;
    let (url, store) = (format!("http://{}/api/v1/", web.address()), summary.store.display().to_string());
    let details = serde_json::json!({ "url": url, "store": store, "speed": args.speed });
    context.out.show(&details, |page| {
        page.line(format!("A simulated cluster of {} nodes runs at {} times real time.", args.nodes, args.speed));
        page.line(format!("Dashboard: http://{}/, API: {url}", web.address()));
        page.line(format!(
            "Read-only. To allow actions, create a token: `doctor token create me --role operator --store {store}`"
        ));
    })?;
    running
        .advance(args.speed, snapshot_feed, &cycle_trigger, &stop)
        .map_err(|error| Failure::Other(error.to_string()))?;
    drop(web);
    Ok(Exit::Ok)
}

fn text(page: &mut Page, summary: &DemoSummary) {
    let score = &summary.score;
    // Assumptions come first: the end of the output is what stays visible on the screen.
    page.heading("What the simulation assumes");
    for line in summary.assumptions.lines() {
        page.line(format!("  {line}"));
    }
    page.heading("What was found");
    page.line(headline(score));
    page.line(format!(
        "It cost {} node-hours of validation ({} of what users had) and disturbed {}.",
        format_hours(score.validation_node_hours),
        format_percent(percentage(score.validation_node_hours, score.user_node_hours)),
        plural(usize::try_from(score.user_jobs_disturbed).unwrap_or(usize::MAX), "user job")
    ));
    page.line(format!(
        "Found by agents {}, by tests {}, by users first {}; false alarms {}; users lost {} node-hours; played in {:.1} s.",
        score.found_by_agents,
        score.found_by_tests,
        score.found_by_users,
        score.false_alarms,
        format_hours(score.user_node_hours_lost),
        summary.took.as_secs_f64()
    ));
    page.heading("By kind of fault");
    page.table(&fault_kind_table(score));
    page.heading("Coverage at the end");
    let mut coverage = Table::new(["TEST", "COVERED"]).right_align(&[1]);
    for (test, share) in &score.coverage {
        coverage.row([cell(test.as_str()), cell(format_percent(Some(share * 100.0)))]);
    }
    page.table(&coverage);
    page.heading("Explore it");
    let store = summary.store.display();
    for command in ["status", "nodes", "cases --all", "why NODE", "history --limit 20", "report --since 7d"] {
        page.line(format!("  doctor {command} --store {store}"));
    }
    page.line("  doctor demo --serve continues as a live cluster with the dashboard");
}

fn headline(score: &Score) -> String {
    let speed = score
        .median_hours_to_detect
        .map_or_else(String::new, |hours| format!(", half of them within {hours:.1} hours"));
    format!(
        "{} of {} faults were found before users hit them{speed}, on {} nodes in {} days.",
        score.faults_found, score.faults_injected, score.nodes, score.virtual_days
    )
}

fn percentage(part: f64, total: f64) -> Option<f64> {
    (total > 0.0).then(|| 100.0 * part / total)
}

fn fault_kind_table(score: &Score) -> Table {
    let mut table = Table::new(["KIND", "INJECTED", "FOUND", "MEDIAN HOURS"]).right_align(&[1, 2, 3]);
    for (kind, row) in &score.kinds {
        table.row([
            cell(*kind),
            cell(row.injected.to_string()),
            cell(row.found.to_string()),
            cell(row.median_hours_to_detect.map_or_else(|| "-".to_owned(), format_hours)),
        ]);
    }
    table
}
