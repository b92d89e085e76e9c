//! `doctor status`: whether a controller runs, what is in the way, and how much of the cluster is covered.

use doctor_core::{
    capacity_plan::{CapacityPlan, Pass},
    view::{self, CoverageRow, LeaderView, StatusView},
};
use doctor_engine::cluster_state;

use crate::{
    context::Context,
    exit::Exit,
    failure::Result,
    output::{Cell, Page, Table, ago, cell, comma_separated, format_hours, format_percent, format_time, plural},
};

/// Show the state of the service: cycle, leader, breaker, coverage and open problems.
///
/// Exit code 1 if there is an open problem.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(context: &Context, _args: &Args) -> Result<Exit> {
    let store = context.store()?;
    let facts = context.facts(&store)?;
    let view = view::status(&facts, &cluster_state::status_ledger(&store, &facts)?);
    context.out.show(&view, |page| text(page, &view))?;
    Ok(if view.problems.is_empty() { Exit::Ok } else { Exit::ProblemsFound })
}

fn text(page: &mut Page, view: &StatusView) {
    let nodes = &view.nodes;
    let out: u32 = view
        .nodes
        .states
        .iter()
        .filter(|(state, _)| !matches!(*state, "in-service" | "suspect" | "held"))
        .map(|(_, n)| n)
        .sum();
    let attention = match view.problems.len() {
        0 => "no open problems".to_owned(),
        1 => "1 open problem".to_owned(),
        n => format!("{n} open problems"),
    };
    page.line(format!("{}, {out} out of service; {attention}.", plural(nodes.total as usize, "node")));
    for problem in &view.problems {
        page.line(format!("  ! {problem}"));
    }
    for note in &view.notes {
        page.line(format!("  - {note}"));
    }
    page.blank();
    page.field("controller", leader(view));
    page.field("last cycle", cycle(view));
    page.field("mode", view.mode.code());
    page.field("nodes", counts(view));
    let states = nodes.states.iter().filter(|(_, count)| *count > 0).map(|(state, count)| format!("{count} {state}"));
    page.field("states", comma_separated(states));
    let running = &view.running;
    let waiting = running.planned + running.pending;
    page.field(
        "validation",
        format!(
            "{} running, {waiting} waiting to start (limit {}), {} node-hours today, {} on request",
            running.running,
            running.limit,
            format_hours(view.spent_today_hours),
            view.commands
        ),
    );
    page.field("periods", periods(&view.capacity));
    page.field(
        "breaker",
        format!("{}, {} taken out within the hour", view.breaker.state, view.breaker.taken_out.len()),
    );
    page.field("agents", agents(view));
    page.field("rejected", format!("{} results", view.rejected));
    page.heading("Coverage (a pass or fail within the cut-off)");
    page.table(&coverage(&view.coverage));
}

fn leader(view: &StatusView) -> String {
    match &view.leader {
        LeaderView::Leads { by, until } => format!("{by} leads (lease until {} UTC)", format_time(*until)),
        LeaderView::Lost { by, since } => format!("none; {by} was lost {}", ago(view.at, *since)),
        LeaderView::NoLeader => "no controller leads".to_owned(),
    }
}

fn cycle(view: &StatusView) -> String {
    let Some(cycle) = &view.last_cycle else { return "none yet".to_owned() };
    let duration = cycle.duration.map_or_else(|| "not finished".to_owned(), |duration| format!("took {duration}"));
    let seen = view
        .observed_at
        .map_or_else(|| "cluster never observed".to_owned(), |seen| format!("cluster observed {}", ago(view.at, seen)));
    format!("{} ({}), {duration}, {} actions; {seen}", ago(view.at, cycle.at), format_time(cycle.at), cycle.actions)
}

fn counts(view: &StatusView) -> String {
    let nodes = &view.nodes;
    let mut text = format!(
        "{} free, {} busy, {} unknown, {} overdue for a test",
        nodes.free, nodes.busy, nodes.unknown, nodes.overdue
    );
    if nodes.gone > 0 {
        text.push_str(&format!("; {} gone from the cluster", nodes.gone));
    }
    text
}

/// Returns how long one pass of each period over all nodes takes, if all nodes were free.
pub(crate) fn periods(capacity: &CapacityPlan) -> String {
    let pass = |pass: &Pass| {
        let takes = pass.takes.map_or_else(|| "never".to_owned(), |takes| takes.to_string());
        format!("a pass takes {takes} of {} ({})", pass.period, plural(pass.tests.len(), "test"))
    };
    match capacity.passes.is_empty() {
        true => "no test is routine".to_owned(),
        false => capacity.passes.iter().map(pass).collect::<Vec<_>>().join("; "),
    }
}

fn agents(view: &StatusView) -> String {
    match (view.silent.agents, view.silent.silent.len()) {
        (0, _) => "none expected".to_owned(),
        (agents, 0) => format!("{agents}, all reporting"),
        (agents, silent) => {
            format!("{silent} of {agents} silent: {}", doctor_core::hostlist::fold(&view.silent.silent))
        }
    }
}

/// Returns the table of coverage, which reports use too.
pub(crate) fn coverage(rows: &[CoverageRow]) -> Table {
    let header =
        ["TEST", "COVERED", "NODES", "PASS", "FAIL", "INCONCLUSIVE", "STALE", "NEVER TESTED", "N/A", "NOT JUDGED"];
    let mut table = Table::new(header).right_align(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    for row in rows {
        let number = |count: u32| cell(count.to_string());
        let count_cell =
            |count: u32, tone: fn(Cell) -> Cell| if count == 0 { number(count) } else { tone(number(count)) };
        table.row([
            cell(row.test.as_str()),
            cell(format_percent(row.percent)),
            number(row.nodes),
            number(row.pass),
            count_cell(row.fail, Cell::bad),
            count_cell(row.inconclusive, Cell::warn),
            count_cell(row.stale, Cell::warn),
            count_cell(row.never_tested, Cell::warn),
            number(row.not_applicable),
            number(row.not_judged),
        ]);
    }
    table
}
