//! `doctor report`: the summary of a period, as text, HTML, Markdown or JSON.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use doctor_core::view::ReportView;
use doctor_notify::report::{self, CalendarPeriod, count_list, headline, jobs, overdue, title};

use super::{history::parse_since, status::coverage};
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{Output, Page, Table, cell, format_time, plural},
};

/// Summarise a period: jobs queued, run and skipped, busy and overdue nodes, coverage, findings, cost.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    query: Query,
    /// Write the report to this file atomically.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// The period and the format.
#[derive(Debug, clap::Args)]
pub(crate) struct Query {
    /// Start of the period, which ends now: a duration such as "7d", or a time such as "2026-11-15T00:00:00Z".
    #[arg(long, value_name = "WHEN", default_value = "1d", conflicts_with = "last")]
    since: String,
    /// Summarise the last complete day or week (UTC, from Monday) instead.
    #[arg(long, value_enum)]
    last: Option<CompletePeriod>,
    /// Output format. --json is the same as --format json.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

impl Args {
    /// Returns the file to write. Fails if the format is for a terminal.
    pub(crate) fn file(&self, out: &Output) -> Result<Option<&Path>> {
        match &self.out {
            Some(_) if self.query.format.page().is_none() && !out.is_json() => {
                Err(Failure::Usage("--out requires --format html, markdown or json".to_owned()))
            }
            path => Ok(path.as_deref()),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CompletePeriod {
    Day,
    Week,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For a terminal.
    Text,
    /// One self-contained page, including plots.
    Html,
    Markdown,
    Json,
}

impl Format {
    const fn page(self) -> Option<report::ReportFormat> {
        match self {
            Self::Text => None,
            Self::Html => Some(report::ReportFormat::Html),
            Self::Markdown => Some(report::ReportFormat::Markdown),
            Self::Json => Some(report::ReportFormat::Json),
        }
    }
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let file = args.file(&context.out)?;
    print(context, &args.query, file)
}

/// Prints the report, or writes it to a file.
pub(super) fn print(context: &Context, args: &Query, file: Option<&Path>) -> Result<Exit> {
    let store = context.store()?;
    let facts = context.facts(&store)?;
    let (since, until) = match args.last {
        Some(CompletePeriod::Day) => CalendarPeriod::Day.last_before(facts.now),
        Some(CompletePeriod::Week) => CalendarPeriod::Week.last_before(facts.now),
        None => (parse_since(&args.since, facts.now)?, facts.now),
    };
    let view = report::view(&store, facts, since, until)?;
    let page = if context.out.is_json() { Some(report::ReportFormat::Json) } else { args.format.page() };
    match (page, file) {
        (Some(page), Some(path)) => save(context, path, &page.render(&view)?)?,
        (Some(report::ReportFormat::Json), None) => context.out.json(&view)?,
        (Some(page), None) => context.out.print(&page.render(&view)?)?,
        (None, _) => context.out.show(&view, |page| text(page, &view))?,
    }
    Ok(Exit::Ok)
}

/// Writes a report to a file atomically.
pub(crate) fn save(context: &Context, path: &Path, text: &str) -> Result<()> {
    report::write(path, text)?;
    context.out.note(&format!("wrote {}", path.display()));
    Ok(())
}

fn text(page: &mut Page, view: &ReportView) {
    page.line(headline(view));
    page.line(format!("{}, {}", title(view), plural(view.nodes as usize, "node")));
    page.blank();
    page.field("jobs", jobs(view));
    page.field("not started", count_list(&view.not_started));
    page.field("incomplete", count_list(&view.incomplete));
    page.field("skipped", count_list(&view.skipped));
    page.field("busy", format!("{} now; {} with unknown occupancy", view.busy, view.unknown));
    page.field("overdue", overdue(view));
    page.field("cases", format!("{} open, {} findings open", view.cases_open, view.open_findings));
    page.heading("Results");
    let mut results = Table::new(["TEST", "PASS", "FAIL", "INCONCLUSIVE", "NOT APPLICABLE", "NODES FAILING"])
        .right_align(&[1, 2, 3, 4, 5]);
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
                cell(format_time(fault.opened)),
                cell(fault.node.as_str()),
                cell(fault.severity.code()),
                cell(fault.case.to_string()),
                cell(now),
                cell(fault.text.clone()),
            ]);
        }
        page.table(&faults).legend(view.faults.iter().map(|fault| fault.severity));
    }
}
