//! Helpers for checks that read many small files, from [`Probe::Glob`](crate::probe::Probe::Glob) and
//! [`Probe::Sampled`](crate::probe::Probe::Sampled): by the wildcard parts of their paths, and over time.

use doctor_core::{
    observation::{FailureKind, Observation, ProbeFailure},
    time::{Span, Timestamp},
};

use crate::probe::{FileText, ProbeOutput, Sample};

/// Returns the files of a [`Probe::Glob`](crate::probe::Probe::Glob).
///
/// # Errors
/// Returns the observation that the check should return.
pub fn glob_files(output: Option<&ProbeOutput>) -> Result<&[FileText], Observation> {
    match output {
        Some(ProbeOutput::Files(files)) => Ok(files),
        other => Err(not_files(other)),
    }
}

/// Returns the history of each file of a [`Probe::Sampled`](crate::probe::Probe::Sampled).
///
/// # Errors
/// Returns the observation that the check should return.
pub fn sampled_series(output: Option<&ProbeOutput>) -> Result<Vec<Series<'_>>, Observation> {
    match output {
        Some(ProbeOutput::Samples(samples)) => Ok(series_of_samples(samples)),
        other => Err(not_files(other)),
    }
}

fn not_files(output: Option<&ProbeOutput>) -> Observation {
    Observation::Failed(match output {
        Some(ProbeOutput::Failed(failure)) => failure.clone(),
        _ => ProbeFailure::new(FailureKind::Unparseable, "the answer is not a list of files"),
    })
}

/// Returns the names in a directory. A missing directory is empty.
///
/// # Errors
/// Returns the failure that the check should report.
pub fn directory_names(output: Option<&ProbeOutput>) -> Result<&[String], ProbeFailure> {
    match output {
        Some(ProbeOutput::Names(names)) => Ok(names),
        Some(ProbeOutput::Failed(failure)) if failure.kind == FailureKind::Missing => Ok(&[]),
        Some(ProbeOutput::Failed(failure)) => Err(failure.clone()),
        _ => Err(ProbeFailure::new(FailureKind::Unparseable, "the answer is not a list of names")),
    }
}

/// Returns symbolic links with their targets.
///
/// # Errors
/// Returns the observation that the check should return.
pub fn symlinks(output: Option<&ProbeOutput>) -> Result<&[(String, String)], Observation> {
    match output {
        Some(ProbeOutput::Links(links)) => Ok(links),
        other => Err(not_files(other)),
    }
}

/// Returns the text of a file probe.
///
/// # Errors
/// Returns the failure that the check should report.
pub fn file_text(output: Option<&ProbeOutput>) -> Result<&str, ProbeFailure> {
    match output {
        Some(ProbeOutput::Text(text)) => Ok(text),
        Some(ProbeOutput::Failed(failure)) => Err(failure.clone()),
        _ => Err(ProbeFailure::new(FailureKind::Unparseable, "the answer is not the text of a file")),
    }
}

/// Returns the failure for a file with unexpected content.
pub fn unexpected_content(path: &str, text: &str) -> ProbeFailure {
    let text: String = text.trim().chars().take(40).collect();
    ProbeFailure::new(FailureKind::Unparseable, format!("unexpected content of {path}: `{text}`"))
}

/// Returns the parts of a path that match each `*` of the pattern, or `None` if the path does not match.
///
/// `wild("/sys/class/net/*/mtu", "/sys/class/net/eth0/mtu")` is `["eth0"]`.
pub fn match_pattern<'a>(pattern: &str, path: &'a str) -> Option<Vec<&'a str>> {
    let name_ends = |text: &str| text.bytes().position(|byte| byte == b'/').unwrap_or(text.len());
    let (mut pattern, mut rest, mut found) = (pattern, path, Vec::new());
    while let Some(star) = pattern.bytes().position(|byte| byte == b'*') {
        rest = rest.strip_prefix(&pattern[..star])?;
        // A `*` matches within one path component; the rest of the pattern's component must end the name.
        let after = &pattern[star + 1..];
        let ((end, below), (name, tail)) = (after.split_at(name_ends(after)), rest.split_at(name_ends(rest)));
        found.push(name.strip_suffix(end)?);
        (pattern, rest) = (below, tail);
    }
    (pattern == rest).then_some(found)
}

/// Like [`match_pattern`], for a known number of wildcards.
pub fn match_pattern_exact<'a, const N: usize>(pattern: &str, path: &'a str) -> Option<[&'a str; N]> {
    match_pattern(pattern, path)?.try_into().ok()
}

/// The history of one file.
#[derive(Debug, Clone, PartialEq)]
pub struct Series<'a> {
    pub path: &'a str,
    /// Oldest first, one point per reading; the last is the current one.
    pub points: Vec<Point<'a>>,
    /// Why the file exists but cannot be read now.
    pub failure: Option<&'a ProbeFailure>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point<'a> {
    pub at: Timestamp,
    pub uptime: Span,
    pub text: Option<&'a str>,
}

/// The growth of a counter and the time it took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Growth {
    pub by: f64,
    pub duration: Span,
}

impl Growth {
    pub fn per_hour(self) -> f64 {
        self.by * 3_600_000.0 / self.duration.millis().max(1) as f64
    }

    pub fn per_second(self) -> f64 {
        self.per_hour() / 3600.0
    }

    /// Returns the number of events in the last hour. If observed for less than an hour, the number seen: one event in
    /// five minutes is one, not twelve per hour. If observed for longer, the hourly average: last month's events are
    /// over.
    pub fn in_last_hour(self) -> f64 {
        self.by * 3_600_000.0 / self.duration.millis().max(3_600_000) as f64
    }
}

impl Series<'_> {
    /// Returns the current text, if the file exists and can be read.
    pub fn current_text(&self) -> Option<&str> {
        self.points.last()?.text.map(str::trim)
    }

    /// Returns the current text, or `None` if the file no longer exists.
    ///
    /// # Errors
    /// If the file exists but cannot be read.
    pub fn current(&self) -> Result<Option<&str>, ProbeFailure> {
        self.failure.map_or_else(|| Ok(self.current_text()), |failure| Err(failure.clone()))
    }

    /// Returns the growth of a counter within the last `within`. A decrease means that the counter was reset, by a
    /// reboot or a device reset. Without an earlier reading, the counter has grown since the boot at most. Returns
    /// `None` if the current text is not a number.
    pub fn growth(&self, within: Span) -> Option<Growth> {
        self.growth_by(within, |text| text.parse().ok())
    }

    /// Like [`growth`](Self::growth), for a counter that a boot itself increases, such as the state changes of a link
    /// that comes up: the value at the first reading of this boot does not count, unless the machine has been up for an
    /// hour or more.
    pub fn growth_since_boot(&self, within: Span) -> Option<Growth> {
        let last = self.points.last()?;
        let booted = last.at.minus(last.uptime);
        let points: Vec<_> = self.points.iter().filter(|point| point.at >= booted).copied().collect();
        let is_first = points.iter().filter(|point| point.text.is_some()).count() < 2;
        let growth = Self { points, ..*self }.growth(within)?;
        let is_young = is_first && last.uptime < Span::hours(1);
        Some(if is_young { Growth { by: 0.0, ..growth } } else { growth })
    }

    /// Like [`growth`](Self::growth), for a counter that is embedded in text or not decimal.
    pub fn growth_by(&self, within: Span, read: impl Fn(&str) -> Option<f64>) -> Option<Growth> {
        let number = |point: &Point<'_>| read(point.text?.trim()).filter(|n| n.is_finite() && *n >= 0.0);
        let last = self.points.last()?;
        let newest = number(last)?;
        let earlier: Vec<(Timestamp, f64)> = self.points[..self.points.len() - 1]
            .iter()
            .filter(|point| last.at.since(point.at) <= within)
            .filter_map(|point| Some((point.at, number(point)?)))
            .collect();
        let Some(&(since, mut before)) = earlier.first() else {
            return Some(Growth { by: newest, duration: last.uptime });
        };
        let mut by = 0.0;
        for value in earlier.iter().skip(1).map(|(_, value)| *value).chain([newest]) {
            by += if value >= before { value - before } else { value };
            before = value;
        }
        Some(Growth { by, duration: last.at.since(since) })
    }
}

/// Returns the history of each file, including files that no longer exist.
fn series_of_samples(samples: &[Sample]) -> Vec<Series<'_>> {
    let mut all: std::collections::BTreeMap<&str, Series<'_>> = std::collections::BTreeMap::new();
    for (index, sample) in samples.iter().enumerate() {
        let nothing = |s: &Sample| Point { at: s.at, uptime: s.uptime, text: None };
        for series in all.values_mut() {
            let before = series.points.last().and_then(|point| point.text);
            series.points.push(Point { text: before, ..nothing(sample) });
        }
        for file in &sample.files {
            let missed = || samples[..=index].iter().map(nothing).collect();
            let new = || Series { path: &file.path, points: missed(), failure: None };
            let series = all.entry(&file.path).or_insert_with(new);
            series.failure = file.text.as_ref().err();
            if let Some(point) = series.points.last_mut() {
                point.text = file.text.as_deref().ok();
            }
        }
        for path in &sample.removed {
            if let Some(series) = all.get_mut(path.as_str()) {
                series.failure = None;
                if let Some(point) = series.points.last_mut() {
                    point.text = None;
                }
            }
        }
    }
    all.into_values().collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Files as found by one reading.
    pub(crate) fn found(files: &[(&str, &str)]) -> ProbeOutput {
        ProbeOutput::Files(files.iter().map(|(path, text)| file(path, text)).collect())
    }

    /// Readings five minutes apart, the last one now, on a machine with an uptime of ten days. Each reading lists every
    /// file; unchanged files are omitted, as by the runner.
    pub(crate) fn sampled_files(each: &[&[(&str, &str)]]) -> ProbeOutput {
        let mut samples: Vec<Sample> = Vec::new();
        for (n, files) in each.iter().enumerate() {
            let earlier = n.checked_sub(1).map_or(&[][..], |before| each[before]);
            let back = Span::minutes(5 * (each.len() - 1 - n) as i64);
            samples.push(Sample {
                at: Timestamp::from_secs(1_794_700_800).minus(back),
                uptime: Span::from_millis(Span::days(10).millis() - back.millis()),
                files: files.iter().filter(|file| !earlier.contains(file)).map(|(p, t)| file(p, t)).collect(),
                removed: earlier
                    .iter()
                    .filter(|(path, _)| !files.iter().any(|(other, _)| other == path))
                    .map(|(path, _)| (*path).to_owned())
                    .collect(),
            });
        }
        ProbeOutput::Samples(samples)
    }

    fn file(path: &str, text: &str) -> FileText {
        FileText { path: path.to_owned(), text: Ok(text.to_owned()) }
    }

    fn growth(values: &[&str]) -> Option<Growth> {
        let each: Vec<Vec<(&str, &str)>> = values.iter().map(|value| vec![("/c", *value)]).collect();
        let each: Vec<&[(&str, &str)]> = each.iter().map(Vec::as_slice).collect();
        sampled_series(Some(&sampled_files(&each))).unwrap()[0].growth(Span::hours(1))
    }

    #[test]
    fn a_counter_grows_between_samples_and_restarts_after_a_reset() {
        assert_eq!(growth(&["5\n", "7\n", "7\n"]), Some(Growth { by: 2.0, duration: Span::minutes(10) }));
        assert_eq!(growth(&["5", "1", "4"]), Some(Growth { by: 4.0, duration: Span::minutes(10) }));
        assert_eq!(growth(&["5"]), Some(Growth { by: 5.0, duration: Span::days(10) }));
        assert_eq!(growth(&["5", "N/A (no PMA)"]), None);
        assert_eq!(growth(&["N/A", "5"]), Some(Growth { by: 5.0, duration: Span::days(10) }));
        let hour = vec!["0"; 20];
        assert_eq!(growth(&hour), Some(Growth { by: 0.0, duration: Span::hours(1) }));
    }

    #[test]
    fn growth_during_a_boot_does_not_count() {
        let ProbeOutput::Samples(mut readings) = sampled_files(&[&[("/c", "1")], &[("/c", "4")], &[("/c", "5")]])
        else {
            panic!("samples")
        };
        // Booted between the first reading and the second.
        (readings[1].uptime, readings[2].uptime) = (Span::minutes(1), Span::minutes(6));
        let of = |samples: Vec<Sample>| {
            let output = ProbeOutput::Samples(samples);
            let growth = sampled_series(Some(&output)).unwrap()[0].growth_since_boot(Span::hours(1));
            growth.map(|growth| growth.by)
        };
        assert_eq!(of(readings.clone()), Some(1.0));
        assert_eq!(of(readings[..2].to_vec()), Some(0.0));
        assert_eq!(of(readings[..1].to_vec()), Some(1.0));
    }

    #[test]
    fn files_appear_and_disappear_between_samples() {
        let output = sampled_files(&[&[("/a", "1")], &[("/a", "1"), ("/b", "x")], &[("/b", "x")]]);
        let all = sampled_series(Some(&output)).unwrap();
        let texts = |series: &Series<'_>| series.points.iter().map(|p| p.text.map(str::to_owned)).collect::<Vec<_>>();
        assert_eq!(texts(&all[0]), [Some("1".to_owned()), Some("1".to_owned()), None]);
        assert_eq!(texts(&all[1]), [None, Some("x".to_owned()), Some("x".to_owned())]);
        assert_eq!((all[0].current_text(), all[1].current_text()), (None, Some("x")));
        assert_eq!((all[0].current(), all[1].current()), (Ok(None), Ok(Some("x"))));
    }

    #[test]
    fn an_unreadable_file_is_not_a_removed_file() {
        let ProbeOutput::Samples(mut samples) = sampled_files(&[&[("/a", "1")], &[("/a", "2")]]) else {
            panic!("samples")
        };
        let denied = ProbeFailure::new(FailureKind::Denied, "denied");
        samples[1].files[0].text = Err(denied.clone());
        let output = ProbeOutput::Samples(samples);
        let all = sampled_series(Some(&output)).unwrap();
        assert_eq!((all[0].current_text(), all[0].current()), (None, Err(denied)));
    }

    #[test]
    fn wildcards_of_a_pattern_are_matched() {
        let pattern = "/sys/class/infiniband/*/ports/*/state";
        assert_eq!(match_pattern(pattern, "/sys/class/infiniband/mlx5_0/ports/1/state"), Some(vec!["mlx5_0", "1"]));
        assert_eq!(match_pattern("/sys/block/nvme*n1/size", "/sys/block/nvme12n1/size"), Some(vec!["12"]));
        assert_eq!(match_pattern("/a**", "/ab"), None, "one wildcard per path element");
        for path in ["/sys/class/infiniband/mlx5_0/ports/1/rate", "/sys/class/infiniband/mlx5_0", ""] {
            assert_eq!(match_pattern(pattern, path), None, "{path}");
        }
    }

    proptest! {
        #[test]
        fn every_series_has_a_point_for_each_sample(
            each in proptest::collection::vec(proptest::collection::btree_map("/[a-c]", "[0-9]{0,3}", 0..4), 1..6),
        ) {
            let each: Vec<Vec<(&str, &str)>> =
                each.iter().map(|files| files.iter().map(|(p, t)| (p.as_str(), t.as_str())).collect()).collect();
            let slices: Vec<&[(&str, &str)]> = each.iter().map(Vec::as_slice).collect();
            let output = sampled_files(&slices);
            for series in sampled_series(Some(&output)).unwrap() {
                prop_assert_eq!(series.points.len(), each.len());
                for (point, files) in series.points.iter().zip(&each) {
                    let there = files.iter().find(|(path, _)| *path == series.path).map(|(_, text)| *text);
                    prop_assert_eq!(point.text, there);
                }
                if let Some(growth) = series.growth(Span::hours(1)) {
                    prop_assert!(growth.by >= 0.0 && growth.duration.millis() > 0);
                }
            }
        }
    }
}
