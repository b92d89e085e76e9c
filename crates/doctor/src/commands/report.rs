//! `doctor report`: the daily summary, for a terminal, a mail or a program.

use clap::ValueEnum;
use doctor_control::store::{
    Store,
    records::{HistoryFilter, RunRecord},
};
use doctor_core::{
    hostlist,
    time::{Span, Timestamp},
    view::{self, Count, Period, ReportView, RunFacts},
};

use super::{history::past, status::coverage};
use crate::{
    context::Context,
    exit::Exit,
    failure::Result,
    output::{Page, Table, cell, clock, hours, percent, plural},
};

/// A summary of a time: jobs queued, run and skipped, busy and overdue nodes, coverage, findings, cost.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// From then until now: a length such as "7d", or a moment such as "2026-11-15T00:00:00Z".
    #[arg(long, value_name = "WHEN", default_value = "1d")]
    since: String,
    /// The form of the report. --json is the same as --format json.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Markdown,
    Json,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let store = context.store()?;
    let facts = context.facts(&store)?;
    let since = past(&args.since, facts.now)?;
    let view = view::report(&facts, &period(&store, since, facts.now)?, since);
    match args.format {
        _ if context.out.is_json() => context.out.json(&view)?,
        Format::Json => context.out.json(&view)?,
        Format::Markdown => context.out.print(&markdown(&view))?,
        Format::Text => context.out.show(&view, |page| text(page, &view))?,
    }
    Ok(Exit::Ok)
}

/// What the store says of the time.
fn period(store: &Store, since: Timestamp, now: Timestamp) -> Result<Period> {
    let results = store.history(&HistoryFilter { since: Some(since), ..HistoryFilter::default() })?;
    // A case may be closed long after it was opened: all that were closed since, and those that are open.
    let cases = store.cases(since)?;
    Ok(Period {
        runs: runs_since(store, since, now)?.into_iter().map(facts_of).collect(),
        results: results
            .into_iter()
            .filter(|row| !row.untrusted)
            .map(|row| (row.test, row.node, row.verdict))
            .collect(),
        cases,
    })
}

fn facts_of(record: RunRecord) -> RunFacts {
    RunFacts { run: record.run, started: record.started, ended: record.ended }
}

/// Runs are read newest first, in growing helpings, until they are too old to have been active in the time.
fn runs_since(store: &Store, since: Timestamp, now: Timestamp) -> Result<Vec<RunRecord>> {
    /// No run is active for longer than this before its end.
    const LONGEST: Span = Span::days(2);
    let mut helping = 1000;
    loop {
        let runs = store.last_runs(helping)?;
        let oldest = runs.last().map_or(now, |record| record.run.planned);
        if runs.len() < helping as usize || oldest < since.minus(LONGEST) || helping == u32::MAX {
            return Ok(runs);
        }
        helping = helping.saturating_mul(4);
    }
}

fn title(view: &ReportView) -> String {
    format!("{} to {} UTC", clock(view.since), clock(view.until))
}

/// What happened, in one sentence.
fn headline(view: &ReportView) -> String {
    let per_fault = view.node_hours_per_fault.map_or_else(String::new, |hours| format!(" ({hours:.1} each)"));
    format!(
        "{} found and {} closed with {} node-hours of validation{per_fault}.",
        plural(view.cases_opened as usize, "fault"),
        view.cases_closed,
        hours(view.node_hours)
    )
}

fn jobs(view: &ReportView) -> String {
    let never: u32 = view.not_started.iter().map(|row| row.count).sum();
    let cut: u32 = view.incomplete.iter().map(|row| row.count).sum();
    format!(
        "{} queued, {} run, {} completed, {cut} incomplete, {never} never started",
        view.queued, view.run, view.completed
    )
}

fn counted(rows: &[Count]) -> String {
    if rows.is_empty() {
        return "none".to_owned();
    }
    rows.iter().map(|row| format!("{} {}", row.count, row.code)).collect::<Vec<_>>().join(", ")
}

fn overdue(view: &ReportView) -> String {
    /// A list longer than this is no help.
    const MOST: usize = 40;
    let names = &view.overdue[..view.overdue.len().min(MOST)];
    match view.overdue.len() {
        0 => "none".to_owned(),
        n if n > MOST => format!("{n}: {}, …", hostlist::fold(names)),
        n => format!("{n}: {}", hostlist::fold(names)),
    }
}

fn text(page: &mut Page, view: &ReportView) {
    page.line(headline(view));
    page.line(format!("{}, {}", title(view), plural(view.nodes as usize, "node")));
    page.blank();
    page.field("jobs", jobs(view));
    page.field("not started", counted(&view.not_started));
    page.field("incomplete", counted(&view.incomplete));
    page.field("skipped", counted(&view.skipped));
    page.field("busy", format!("{} now; {} of unknown use", view.busy, view.unknown));
    page.field("overdue", overdue(view));
    page.field("cases", format!("{} open, {} findings open", view.cases_open, view.open_findings));
    page.heading("Results");
    let mut results =
        Table::new(["TEST", "PASS", "FAIL", "INCONCLUSIVE", "NOT APPLICABLE", "NODES FAILING"]).right(&[1, 2, 3, 4, 5]);
    for row in &view.results {
        let numbers = [row.pass, row.fail, row.inconclusive, row.not_applicable, row.failing_nodes];
        results.row([cell(row.test.as_str())].into_iter().chain(numbers.map(|number| cell(number.to_string()))));
    }
    if results.is_empty() {
        page.line("  none: nothing was tested");
    } else {
        page.table(&results);
    }
    page.heading("Coverage");
    page.table(&coverage(&view.coverage));
    if !view.faults.is_empty() {
        page.heading("Faults found");
        let mut faults = Table::new(["OPENED (UTC)", "NODE", "SEVERITY", "CASE", "NOW", "WHAT"]);
        for fault in &view.faults {
            let now = if fault.open { "open" } else { "closed" };
            faults.row([
                cell(clock(fault.opened)),
                cell(fault.node.as_str()),
                cell(fault.severity.code()),
                cell(fault.case.to_string()),
                cell(now),
                cell(fault.text.clone()),
            ]);
        }
        page.table(&faults);
    }
}

/// What would end a table's cell.
fn escaped(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

fn markdown(view: &ReportView) -> String {
    let mut text = format!("# Cluster Doctor: {}\n\n{}\n\n", title(view), headline(view));
    let facts = [
        ("nodes", view.nodes.to_string()),
        ("jobs", jobs(view)),
        ("not started", counted(&view.not_started)),
        ("incomplete", counted(&view.incomplete)),
        ("skipped", counted(&view.skipped)),
        ("busy", format!("{} ({} of unknown use)", view.busy, view.unknown)),
        ("overdue", overdue(view)),
        ("cases open", view.cases_open.to_string()),
        ("findings open", view.open_findings.to_string()),
        ("node-hours", hours(view.node_hours)),
    ];
    text.push_str("| | |\n|---|---|\n");
    for (name, value) in facts {
        text.push_str(&format!("| {name} | {} |\n", escaped(&value)));
    }
    text.push_str("\n## Results\n\n| test | pass | fail | inconclusive | not applicable | nodes failing |\n|---|--:|--:|--:|--:|--:|\n");
    for row in &view.results {
        let (pass, fail, inconclusive) = (row.pass, row.fail, row.inconclusive);
        text.push_str(&format!(
            "| {} | {pass} | {fail} | {inconclusive} | {} | {} |\n",
            row.test, row.not_applicable, row.failing_nodes
        ));
    }
    text.push_str("\n## Coverage\n\n| test | covered | nodes | pass | fail | inconclusive | stale | never tested | not applicable |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|\n");
    for row in &view.coverage {
        text.push_str(&format!(
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} |\n",
            row.test,
            percent(row.percent),
            row.nodes,
            row.pass,
            row.fail,
            row.inconclusive,
            row.stale,
            row.never_tested,
            row.not_applicable
        ));
    }
    if !view.faults.is_empty() {
        text.push_str(
            "\n## Faults found\n\n| opened (UTC) | node | severity | case | now | what |\n|---|---|---|---|---|---|\n",
        );
        for fault in &view.faults {
            let now = if fault.open { "open" } else { "closed" };
            let what = escaped(&fault.text);
            text.push_str(&format!(
                "| {} | {} | {} | {} | {now} | {what} |\n",
                clock(fault.opened),
                fault.node,
                fault.severity,
                fault.case
            ));
        }
    }
    text
}
