//! Reports of a day, a week or any period: from the store to a view, and from the view to a page.

mod html;
mod markdown;
mod plot;
mod schedule;
mod settings;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

pub use self::{
    schedule::Reporter,
    settings::{ReportFormat, ReportSettings},
};
use doctor_core::{
    hostlist,
    time::{Span, Timestamp},
    view::{self, Count, Facts, Period, ReportView, RunFacts, TestResult, format_hours, format_time, plural},
};
use doctor_engine::share::ShareError;
use doctor_store::{
    Store, StoreError,
    records::{HistoryFilter, RunRecord},
};

/// Why a report could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{operation} {}", path.display())]
    File { operation: &'static str, path: PathBuf, source: io::Error },
    #[error(transparent)]
    Share(#[from] ShareError),
    #[error("writing the report as JSON")]
    Json(#[from] serde_json::Error),
}

pub type Result<T> = std::result::Result<T, ReportError>;

impl ReportFormat {
    pub const fn extension(self) -> &'static str {
        match self {
            Self::Html => "html",
            Self::Markdown => "md",
            Self::Json => "json",
        }
    }

    pub fn render(self, view: &ReportView) -> Result<String> {
        Ok(match self {
            Self::Html => html::page(view),
            Self::Markdown => markdown::page(view),
            Self::Json => serde_json::to_string_pretty(view)? + "\n",
        })
    }
}

/// A whole day or week, in UTC; weeks start on Monday.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CalendarPeriod {
    Day,
    Week,
}

const DAY: i64 = 86_400_000;
/// 1970-01-01 was a Thursday.
const FIRST_DAY: i64 = 3;

impl CalendarPeriod {
    /// Returns the start and end of the last complete period.
    pub fn last_before(self, now: Timestamp) -> (Timestamp, Timestamp) {
        let today = now.millis().div_euclid(DAY);
        let (end, length) = match self {
            Self::Day => (today, 1),
            Self::Week => (today - (today + FIRST_DAY).rem_euclid(7), 7),
        };
        (Timestamp::from_millis((end - length) * DAY), Timestamp::from_millis(end * DAY))
    }
}

/// Returns the report of a period. The state of nodes is the current one.
pub fn view(store: &Store, mut facts: Facts, since: Timestamp, until: Timestamp) -> Result<ReportView> {
    let period = period(store, since, facts.now)?;
    facts.now = until;
    Ok(view::report(&facts, &period, since))
}

/// Reads a period from the store.
fn period(store: &Store, since: Timestamp, now: Timestamp) -> Result<Period> {
    let results = store.history(&HistoryFilter { since: Some(since), ..HistoryFilter::default() })?;
    // A case may be closed long after it was opened: read those closed since, and all open ones.
    let cases = store.cases(since)?;
    Ok(Period {
        runs: runs_since(store, since, now)?.into_iter().map(run_facts).collect(),
        results: results
            .into_iter()
            .filter(|row| !row.untrusted)
            .map(|row| TestResult { test: row.test, node: row.node, verdict: row.verdict, at: row.at })
            .collect(),
        cases,
    })
}

fn run_facts(record: RunRecord) -> RunFacts {
    RunFacts { run: record.run, started: record.started, ended: record.ended }
}

/// Reads runs newest first, in growing batches, until they are too old to have been active in the period.
fn runs_since(store: &Store, since: Timestamp, now: Timestamp) -> Result<Vec<RunRecord>> {
    /// No run is active for longer than this before its end.
    const LONGEST: Span = Span::days(2);
    let mut limit = 1000;
    loop {
        let runs = store.last_runs(limit)?;
        let oldest = runs.last().map_or(now, |record| record.run.planned);
        if runs.len() < limit as usize || oldest < since.minus(LONGEST) || limit == u32::MAX {
            return Ok(runs);
        }
        limit = limit.saturating_mul(4);
    }
}

/// Writes a page atomically.
pub fn write(path: &Path, text: &str) -> Result<()> {
    let draft = draft_path(path);
    let result = fs::write(&draft, text).and_then(|()| fs::rename(&draft, path));
    result.map_err(|source: io::Error| {
        // Remove the incomplete draft.
        let _ignored = fs::remove_file(&draft);
        ReportError::File { operation: "writing", path: path.to_owned(), source }
    })
}

fn draft_path(path: &Path) -> PathBuf {
    let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    path.with_file_name(format!(".{name}.{}", std::process::id()))
}

pub fn title(view: &ReportView) -> String {
    format!("{} to {} UTC", format_time(view.since), format_time(view.until))
}

/// Summarises the period in one sentence.
pub fn headline(view: &ReportView) -> String {
    let per_fault = view.node_hours_per_fault.map_or_else(String::new, |hours| format!(" ({hours:.1} each)"));
    format!(
        "{} found and {} closed with {} node-hours of validation{per_fault}.",
        plural(view.cases_opened as usize, "fault"),
        view.cases_closed,
        format_hours(view.node_hours)
    )
}

pub fn jobs(view: &ReportView) -> String {
    let not_started: u32 = view.not_started.iter().map(|row| row.count).sum();
    let incomplete: u32 = view.incomplete.iter().map(|row| row.count).sum();
    format!(
        "{} queued, {} run, {} completed, {incomplete} incomplete, {not_started} never started",
        view.queued, view.run, view.completed
    )
}

pub fn count_list(rows: &[Count]) -> String {
    if rows.is_empty() {
        return "none".to_owned();
    }
    rows.iter().map(|row| format!("{} {}", row.count, row.code)).collect::<Vec<_>>().join(", ")
}

pub fn overdue(view: &ReportView) -> String {
    /// A longer list does not help.
    const MOST: usize = 40;
    let names = &view.overdue[..view.overdue.len().min(MOST)];
    match view.overdue.len() {
        0 => "none".to_owned(),
        n if n > MOST => format!("{n}: {}, …", hostlist::fold(names)),
        n => format!("{n}: {}", hostlist::fold(names)),
    }
}

/// Returns the facts above the tables of a page: names and values.
fn summary_facts(view: &ReportView) -> [(&'static str, String); 10] {
    [
        ("nodes", view.nodes.to_string()),
        ("jobs", jobs(view)),
        ("not started", count_list(&view.not_started)),
        ("incomplete", count_list(&view.incomplete)),
        ("skipped", count_list(&view.skipped)),
        ("busy", format!("{} ({} with unknown occupancy)", view.busy, view.unknown)),
        ("overdue", overdue(view)),
        ("cases open", view.cases_open.to_string()),
        ("findings open", view.open_findings.to_string()),
        ("node-hours", format_hours(view.node_hours)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_complete_day_and_week_are_returned_and_weeks_start_on_monday() {
        // A Monday, at half past two.
        let now: Timestamp = "2026-11-16T02:30:00Z".parse().unwrap();
        let span = |period: CalendarPeriod, now| {
            let (since, until) = period.last_before(now);
            (since.to_string(), until.to_string())
        };
        let day = |a: &str, b: &str| (format!("2026-11-{a}T00:00:00Z"), format!("2026-11-{b}T00:00:00Z"));
        assert_eq!(span(CalendarPeriod::Day, now), day("15", "16"));
        assert_eq!(span(CalendarPeriod::Week, now), day("09", "16"));
        let sunday: Timestamp = "2026-11-15T23:59:59Z".parse().unwrap();
        assert_eq!(span(CalendarPeriod::Week, sunday), day("02", "09"));
        assert_eq!(span(CalendarPeriod::Day, sunday), day("14", "15"));
    }
}
