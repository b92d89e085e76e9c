//! Scheduled reports: the last complete day and week, each written once, even across restarts.
//!
//! The files alone show what has been written: a controller that was down at midnight writes when it is back, one that
//! restarts writes nothing twice, and a deleted file is written again while its period is the last complete one.

use std::{
    path::Path,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use doctor_core::time::Timestamp;
use doctor_engine::{
    cluster_state,
    share::{Share, ShareFiles},
    snapshot,
};
use doctor_store::Store;

use super::{CalendarPeriod, ReportError, ReportFormat, ReportSettings, Result, view};

/// How often to check whether a report is due, also after a failure.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// A report that is not written yet.
#[derive(Debug, PartialEq, Eq)]
struct Due {
    since: Timestamp,
    until: Timestamp,
    /// By name, below `reports/` of the shared directory.
    files: Vec<(String, ReportFormat)>,
}

/// Writes reports in the background: large clusters take seconds to summarise, and the shared directory may not answer; no cycle
/// waits for either. One thread at a time does it, so that a directory that hangs holds no more than one.
#[derive(Debug, Default)]
pub struct Reporter {
    last_check: Option<Instant>,
    writing: Option<JoinHandle<Result<usize>>>,
}

impl Reporter {
    /// Call this after each cycle of the leader.
    pub fn write_due(&mut self, settings: &ReportSettings, data: &Path, store: &Store, now: Timestamp) {
        if let Some(writing) = self.writing.take_if(|writing| writing.is_finished()) {
            match writing.join() {
                Ok(Ok(0)) | Err(_) => {}
                Ok(Ok(files)) => tracing::info!(files, "reports written"),
                Ok(Err(failure)) => tracing::warn!(error = %error_chain(&failure), "report failed"),
            }
        }
        if self.writing.is_some() || self.last_check.is_some_and(|last_check| last_check.elapsed() < CHECK_INTERVAL) {
            return;
        }
        self.last_check = Some(Instant::now());
        if !(settings.daily || settings.weekly) {
            return;
        }
        let (store, share, settings) = (store.clone(), Share::at(data), settings.clone());
        let body = move || write_all(&store, share.files(), &settings, now);
        // If the thread cannot be created, the next check tries again.
        self.writing = std::thread::Builder::new().name("doctor-reports".to_owned()).spawn(body).ok();
    }
}

/// Formats an error with its causes.
fn error_chain(error: &ReportError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

fn due(settings: &ReportSettings, files: &ShareFiles, now: Timestamp) -> Result<Vec<Due>> {
    let kinds = [(settings.daily, CalendarPeriod::Day, "daily"), (settings.weekly, CalendarPeriod::Week, "weekly")];
    let mut all = Vec::new();
    for (_, period, kind) in kinds.into_iter().filter(|(enabled, ..)| *enabled) {
        let (since, until) = period.last_before(now);
        let first_day: String = since.to_string().chars().take(10).collect();
        let mut missing = Vec::new();
        for format in &settings.formats {
            let name = format!("{kind}-{first_day}.{}", format.extension());
            if !files.has_report(&name)? {
                missing.push((name, *format));
            }
        }
        if !missing.is_empty() {
            all.push(Due { since, until, files: missing });
        }
    }
    Ok(all)
}

fn write_all(store: &Store, files: &ShareFiles, settings: &ReportSettings, now: Timestamp) -> Result<usize> {
    let mut written = 0;
    // A cluster that was never observed has no report, and neither has a day before that.
    let Some(first_cycle) = store.first_cycle_at()? else { return Ok(written) };
    for due in due(settings, files, now)?.into_iter().filter(|due| due.until > first_cycle) {
        let Some((observed_at, cluster)) = snapshot::last_observed(store)? else { return Ok(written) };
        let facts = cluster_state::facts(store, Some(observed_at), cluster, now)?;
        let view = view(store, facts, due.since, due.until)?;
        for (name, report_format) in &due.files {
            files.save_report(name, &report_format.render(&view)?)?;
            written += 1;
        }
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_due_once_per_period_and_again_after_its_file_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let share = Share::at(folder.path());
        let files = share.files();
        let now: Timestamp = "2026-11-16T02:30:00Z".parse().unwrap();
        let settings =
            ReportSettings { daily: true, weekly: true, formats: vec![ReportFormat::Html, ReportFormat::Json] };
        let names = |now| {
            let due = due(&settings, files, now).unwrap();
            due.into_iter().flat_map(|due| due.files).map(|(name, _)| name).collect::<Vec<_>>()
        };
        let all =
            ["daily-2026-11-15.html", "daily-2026-11-15.json", "weekly-2026-11-09.html", "weekly-2026-11-09.json"];
        assert_eq!(names(now), all);
        for name in all {
            files.save_report(name, "x").unwrap();
        }
        assert!(names(now).is_empty());
        std::fs::remove_file(folder.path().join("reports").join(all[1])).unwrap();
        assert_eq!(names(now), [all[1]]);
        let tomorrow = now.plus(doctor_core::time::Span::days(1));
        assert_eq!(names(tomorrow), ["daily-2026-11-16.html", "daily-2026-11-16.json"]);
        let off = ReportSettings { daily: false, ..ReportSettings::default() };
        assert!(due(&off, files, now).unwrap().is_empty());
        let empty = tempfile::tempdir().unwrap();
        let by_default = due(&ReportSettings::default(), Share::at(empty.path()).files(), now).unwrap();
        assert_eq!((by_default.len(), by_default[0].files.len()), (1, 3), "each day, in every format");
    }
}
