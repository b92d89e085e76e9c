//! `doctor run`: runs one cycle, or cycles until no run is active.

use std::time::Duration;

use doctor_core::view::{ActionRow, action_row};
use doctor_engine::cycle_report::CycleReport;
use doctor_notify::alert;
use serde::Serialize;

use super::db;
use crate::{
    context::Context,
    controller::{ClusterConnection, Controller, ProcessMode},
    exit::Exit,
    failure::{Failure, Result},
    output::{Page, Table, cell, plural},
    watchdog::Watchdog,
};

/// Run one cycle: observe, plan, act, record.
///
/// Exit code 1 if something could not be observed or done, 5 if another controller leads, 8 if a call to the cluster hung.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Repeat until no validation is running.
    #[arg(long)]
    wait: bool,
    /// Stop waiting after this long.
    #[arg(long, value_name = "LENGTH", default_value = "1h", requires = "wait")]
    timeout: doctor_core::time::Span,
}

/// The pause between two cycles of one command.
const CYCLE_PAUSE: Duration = Duration::from_millis(500);

/// The combined result of one or more cycles.
#[derive(Debug, Default, Serialize)]
struct RunView {
    cycles: u32,
    nodes: usize,
    free: usize,
    running: usize,
    results: usize,
    rejected: usize,
    actions: Vec<ActionRow>,
    problems: Vec<String>,
}

impl RunView {
    fn add(&mut self, report: CycleReport) {
        self.cycles += 1;
        (self.nodes, self.free, self.running) = (report.nodes, report.free, report.running);
        self.results += report.results;
        self.rejected += report.rejected;
        self.actions.extend(report.actions.iter().map(action_row));
        for problem in report.problems {
            if !self.problems.contains(&problem) {
                self.problems.push(problem);
            }
        }
    }
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let store = context.open_store_to_lead()?;
    let loaded = context.loaded()?;
    let share = context.share()?;
    let world = ClusterConnection::open(loaded)?;
    let mut controller = Controller::new(loaded, store, share, world, ProcessMode::OneShot, None)?;
    let watchdog =
        Watchdog::start(None).map_err(|error| Failure::Other(format!("starting the watchdog thread: {error}")))?;
    watchdog.watch(controller.engine.progress(), controller.engine.store());
    let mut view = RunView::default();
    // The limits of calls derive from the configured cycle, as those of the service.
    let every = loaded.config.cycle.to_std().div_f64(controller.time_factor());
    let outcome = run_cycles(&mut controller, every, args, &mut view);
    // Release the lease even after a failure, so that the next controller need not wait until it expires.
    let stopped = controller.engine.stop();
    // What is left has its own deadlines, and the lease is released.
    drop(watchdog);
    alert::deliver_once(&loaded.config.alerts, controller.engine.store(), &controller.clock);
    if let Some(migrated) = controller.engine.store().take_migration_report() {
        context.out.note(&db::migration_line(&migrated));
    }
    outcome?;
    stopped?;
    context.out.show(&view, |page| text(page, &view))?;
    Ok(if view.problems.is_empty() { Exit::Ok } else { Exit::ProblemsFound })
}

fn run_cycles(controller: &mut Controller, every: Duration, args: &Args, view: &mut RunView) -> Result<()> {
    let give_up = controller.clock.now().plus(args.timeout);
    loop {
        view.add(controller.cycle(every)?);
        if !args.wait || view.running == 0 {
            return Ok(());
        }
        if controller.clock.now() >= give_up {
            view.problems.push(format!("{} still running after {}", plural(view.running, "run"), args.timeout));
            return Ok(());
        }
        std::thread::sleep(CYCLE_PAUSE);
    }
}

fn text(page: &mut Page, view: &RunView) {
    page.line(format!(
        "{} over {}: {}, {} received, {} running.",
        plural(view.cycles as usize, "cycle"),
        plural(view.nodes, "node"),
        plural(view.actions.len(), "action"),
        plural(view.results, "result"),
        view.running
    ));
    for problem in &view.problems {
        page.line(format!("  ! {problem}"));
    }
    if !view.actions.is_empty() {
        page.blank();
        let mut table = Table::new(["ACTION", "NODE", "WHAT", "CODE", "WHY"]);
        for row in &view.actions {
            table.row(action_cells(row));
        }
        page.table(&table);
        page.blank();
    }
    page.line(if view.running > 0 {
        "Next: `doctor run --wait`, or `doctor serve`, receives the results."
    } else {
        "Next: `doctor nodes` shows the state of the nodes."
    });
    if view.rejected > 0 {
        page.line(format!("{} rejected: see rejected/ in the shared directory.", plural(view.rejected, "result")));
    }
}

pub(super) fn action_cells(row: &ActionRow) -> Vec<crate::output::Cell> {
    vec![
        cell(row.action),
        cell(row.nodes.clone().unwrap_or_else(|| "-".to_owned())),
        cell(shorten_list(&row.what)),
        cell(row.code.as_str()),
        cell(row.why.clone()),
    ]
}

/// Shortens a long list of names. The JSON output has all of them.
fn shorten_list(what: &str) -> String {
    const SHOWN: usize = 6;
    let names: Vec<&str> = what.split(", ").collect();
    match names.len() {
        many if many > SHOWN + 2 => format!("{} and {} more", names[..SHOWN].join(", "), many - SHOWN),
        _ => what.to_owned(),
    }
}
