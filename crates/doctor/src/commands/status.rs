//! `doctor status`: what needs an operator, whether a controller runs, and how much of the cluster is covered.

use doctor_core::{
    capacity_plan::{CapacityPlan, Pass},
    view::{
        self, AttentionItem, AttentionKind, CoverageRow, LeaderView, StatusView, SuiteCoverage, TestStatus, Urgency,
        coverage_by_suite,
    },
};
use doctor_engine::cluster_state;

use crate::{
    context::Context,
    exit::NagiosExit,
    failure::Result,
    output::{
        Cell, Page, Table, ago, cell, comma_separated, format_hours, format_percent, format_time, plural, sanitize,
    },
};

/// Show what needs an operator, most urgent first, each with the command to type next; then the controller, the breaker
/// and the coverage.
///
/// The exit codes are those of a Nagios plugin: 0 ok, 1 warning, 2 critical, 3 unknown.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// One line of coverage for each test instead of each suite.
    #[arg(long)]
    tests: bool,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<NagiosExit> {
    let store = context.store()?;
    let facts = context.facts(&store)?;
    let view = view::status(&facts, &cluster_state::status_ledger(&store, &facts)?);
    context.out.show(&view, |page| text(page, &view, args.tests))?;
    Ok(view.state.into())
}

fn text(page: &mut Page, view: &StatusView, every_test: bool) {
    let nodes = &view.nodes;
    let out: u32 = view
        .nodes
        .states
        .iter()
        .filter(|(state, _)| !matches!(*state, "in-service" | "suspect" | "held"))
        .map(|(_, n)| n)
        .sum();
    let total = plural(nodes.total as usize, "node");
    page.line(format!(
        "{}: {total}, {out} out of service; {}.",
        view.state.code().to_uppercase(),
        summary(&view.attention)
    ));
    attention(page, &view.attention);
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
    if every_test {
        page.heading("Coverage (a pass or fail within the cut-off)");
        page.table(&coverage(&view.coverage));
    } else {
        page.heading("Coverage (a pass or fail within the cut-off; --tests: one line for each test)");
        page.table(&suites(&coverage_by_suite(&view.coverage)));
    }
}

/// Counts the items by urgency. Notices are no problems.
fn summary(items: &[AttentionItem]) -> String {
    let count = |urgency: Urgency| items.iter().filter(|item| item.urgency == urgency).count();
    let (critical, warning, notice) = (count(Urgency::Critical), count(Urgency::Warning), count(Urgency::Notice));
    let mut parts = Vec::new();
    parts.extend((critical > 0).then(|| format!("{critical} critical")));
    parts.extend((warning > 0).then(|| plural(warning, "warning")));
    if parts.is_empty() {
        parts.push("no open problems".to_owned());
    }
    parts.extend((notice > 0).then(|| plural(notice, "notice")));
    parts.join(", ")
}

/// Prints each item with its command. Texts come from nodes and jobs, too, and are not trusted.
fn attention(page: &mut Page, items: &[AttentionItem]) {
    let longest =
        |text: fn(&AttentionItem) -> &'static str| items.iter().map(|item| text(item).len()).max().unwrap_or(0);
    let (urgency, kind) = (longest(|item| item.urgency.code()), longest(|item| AttentionKind::code(item.kind)));
    for item in items {
        let text = sanitize(&item.text).replace(['\n', '\t'], " ");
        page.line(format!("  {:<urgency$}  {:<kind$}  {text}", item.urgency, item.kind));
        if let Some(next) = &item.next {
            page.line(format!("  {:urgency$}  {:kind$}  -> {}", "", "", sanitize(next)));
        }
    }
}

fn leader(view: &StatusView) -> String {
    match &view.leader {
        LeaderView::Leads { by, until } => format!("{by} leads (lease until {} UTC)", format_time(*until)),
        LeaderView::Lost { by, since } => format!("none; {by} was lost {}", ago(view.at, *since)),
        LeaderView::NoLeader => "none leads".to_owned(),
    }
}

fn cycle(view: &StatusView) -> String {
    let Some(cycle) = &view.last_cycle else { return "none yet".to_owned() };
    let duration = cycle.duration.map_or_else(|| "not finished".to_owned(), |duration| format!("took {duration}"));
    let seen = view.observed_at.map_or_else(
        || "cluster never observed".to_owned(),
        |seen| format!("cluster last answered {}", ago(view.at, seen)),
    );
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

/// Returns one line for each suite: of how many tests, the counts of results, and the names of tests that are not pass.
fn suites(suites: &[SuiteCoverage]) -> Table {
    let mut table = Table::new(["SUITE", "TESTS", "COVERED", "LOWEST", "RESULTS", "NOT PASS"]).right_align(&[1, 2]);
    for suite in suites {
        let lowest = suite.lowest.as_ref().filter(|(_, percent)| *percent < 100.0);
        let lowest = lowest
            .map_or_else(|| "-".to_owned(), |(test, percent)| format!("{test} {}", format_percent(Some(*percent))));
        let counts = suite.counts.iter().map(|(status, count)| format!("{count} {}", TestStatus::label(*status)));
        table.row([
            cell(suite.suite.as_str()),
            cell(suite.tests.to_string()),
            cell(format_percent(suite.percent)),
            cell(lowest),
            cell(comma_separated(counts)),
            cell(names(&suite.not_pass)),
        ]);
    }
    table
}

/// Names at most this many tests; the others are counted.
const MAX_NAMED: usize = 5;

/// Names tests and counts what is too long for a line.
pub(crate) fn names(tests: &[impl ToString]) -> String {
    let named = comma_separated(tests.iter().take(MAX_NAMED).map(ToString::to_string));
    match tests.len().saturating_sub(MAX_NAMED) {
        0 => named,
        more => format!("{named} and {more} more"),
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
