//! Earlier values of counter files, stored on this node so that checks can judge growth.
//!
//! One file holds all patterns. It is read at the first query of a pass and replaced at its end: a pass queries about
//! thirty patterns, and creating thirty files takes longer than reading the counters. A pass that is killed stores
//! nothing. An unreadable file is replaced: earlier samples are lost and none are invented.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use doctor_checks::probe::{FileText, Sample};
use doctor_core::{
    observation::ProbeFailure,
    time::{Span, Timestamp},
};

/// Most samples per pattern. Older ones are merged into the next.
const MAX_SAMPLES: usize = 400;
/// A larger file is not ours.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// Minimum distance of samples without changes: a prolog may run many times a minute.
const MIN_SPACING: Span = Span::minutes(1);
/// A pattern that no check has queried for this long is dropped. Checks go back a day at most.
const UNUSED_RETENTION: Span = Span::days(7);

type StoredSamples = BTreeMap<String, Vec<Sample>>;

/// The samples of one pass and of earlier ones.
#[derive(Debug, Default)]
pub(super) struct CounterHistory {
    /// Without a directory only the current sample exists.
    directory: Option<PathBuf>,
    pass: RefCell<Option<Pass>>,
}

#[derive(Debug)]
struct Pass {
    samples: StoredSamples,
    /// How far back this pass goes, by pattern: several checks may query the same one.
    lookback: BTreeMap<String, Span>,
    /// The time of the pass.
    at: Timestamp,
}

impl CounterHistory {
    pub(super) fn in_directory(directory: &Path) -> Self {
        Self { directory: Some(directory.to_owned()), pass: RefCell::default() }
    }

    /// Adds a sample to the earlier ones and returns all that are no older than `keep`. All samples of a pass have the
    /// same time, so a pattern that is queried again gets no second sample.
    pub(super) fn add(&self, pattern: &str, keep: Span, now: (Timestamp, Span), files: Vec<FileText>) -> Vec<Sample> {
        let mut pass = self.pass.borrow_mut();
        let pass = pass.get_or_insert_with(|| {
            let stored = self.directory.as_deref().and_then(load).unwrap_or_default();
            Pass { samples: stored, lookback: BTreeMap::new(), at: now.0 }
        });
        let longest = pass.lookback.entry(pattern.to_owned()).or_insert(keep);
        *longest = keep.max(*longest);
        let samples = pass.samples.entry(pattern.to_owned()).or_default();
        // After a clock was set back, earlier samples would come after now.
        samples.retain(|sample| sample.at < now.0);
        let newest = difference(&contents_after(samples), now, files);
        if is_redundant(samples, &newest) {
            samples.pop();
        }
        samples.push(newest);
        let mut result = samples.clone();
        merge_older(&mut result, keep, now.0);
        result
    }

    /// Stores the samples of this pass.
    fn save(&self) -> io::Result<()> {
        let (Some(directory), Some(pass)) = (&self.directory, self.pass.take()) else { return Ok(()) };
        let Pass { samples: mut stored, lookback, at } = pass;
        stored.retain(|pattern, samples| {
            if let Some(keep) = lookback.get(pattern) {
                merge_older(samples, *keep, at);
            }
            samples.last().is_some_and(|last| at.since(last.at) <= UNUSED_RETENTION)
        });
        fs::create_dir_all(directory)?;
        let path = history_file(directory);
        let temporary = path.with_extension(format!("part{}", std::process::id()));
        let written = fs::write(&temporary, serde_json::to_vec(&stored)?).and_then(|()| fs::rename(&temporary, path));
        if written.is_err() {
            // The file may not exist at all.
            let _removed = fs::remove_file(temporary);
        }
        written
    }
}

/// Stores the samples at the end of the pass, however it ends.
impl Drop for CounterHistory {
    fn drop(&mut self) {
        // No result depends on it: the next pass has one sample less.
        let _saved = self.save();
    }
}

pub(super) fn history_file(directory: &Path) -> PathBuf {
    directory.join("samples.json")
}

fn load(directory: &Path) -> Option<StoredSamples> {
    // Earlier versions stored one file per pattern. Usually there is nothing to remove.
    let _removed = fs::remove_dir_all(directory.join("samples"));
    let path = history_file(directory);
    if fs::metadata(&path).ok()?.len() > MAX_FILE_BYTES {
        return None;
    }
    let mut stored: StoredSamples = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    // Merging samples one by one is quadratic; we never store that many.
    stored.retain(|_, samples| (1..=MAX_SAMPLES).contains(&samples.len()));
    Some(stored)
}

/// Whether the newest sample is redundant: nothing changed at it or now, the machine did not reboot, and there is
/// another sample shortly before.
fn is_redundant(samples: &[Sample], now: &Sample) -> bool {
    let is_quiet = |sample: &Sample| sample.files.is_empty() && sample.removed.is_empty();
    let [.., before, newest] = samples else { return false };
    is_quiet(newest)
        && is_quiet(now)
        && before.uptime <= newest.uptime
        && newest.uptime <= now.uptime
        && now.at.since(before.at) < MIN_SPACING
}

type State<'a> = BTreeMap<&'a str, &'a Result<String, ProbeFailure>>;

/// Returns the file contents as of the last of these samples.
fn contents_after(samples: &[Sample]) -> State<'_> {
    let mut state = State::new();
    for sample in samples {
        state.extend(sample.files.iter().map(|file| (file.path.as_str(), &file.text)));
        for path in &sample.removed {
            state.remove(path.as_str());
        }
    }
    state
}

fn difference(before: &State<'_>, (at, up): (Timestamp, Span), files: Vec<FileText>) -> Sample {
    let removed = before.keys().filter(|path| !files.iter().any(|file| file.path == **path));
    let removed = removed.map(|path| (*path).to_owned()).collect();
    let files = files.into_iter().filter(|file| before.get(file.path.as_str()) != Some(&&file.text)).collect();
    Sample { at, uptime: up, files, removed }
}

/// Merges samples that are older than `keep` or exceed the limit into one.
fn merge_older(samples: &mut Vec<Sample>, keep: Span, now: Timestamp) {
    let is_old = |sample: &Sample| now.since(sample.at) > keep;
    while samples.len() > MAX_SAMPLES || samples.len() > 1 && is_old(&samples[0]) {
        merge_oldest(samples);
    }
}

/// Merges the first two samples into a complete one, at the time of the second.
fn merge_oldest(samples: &mut Vec<Sample>) {
    let files = contents_after(&samples[..2])
        .into_iter()
        .map(|(path, text)| FileText { path: path.to_owned(), text: text.clone() });
    let (at, up) = (samples[1].at, samples[1].uptime);
    let first = Sample { at, uptime: up, files: files.collect(), removed: Vec::new() };
    samples.splice(..2, [first]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> FileText {
        FileText { path: path.into(), text: Ok(text.into()) }
    }

    /// A separate pass, at this second.
    fn run_pass(directory: &Path, second: i64, files: &[(&str, &str)]) -> Vec<Sample> {
        let files = files.iter().map(|(path, text)| file(path, text)).collect();
        let now = (Timestamp::from_secs(second), Span::from_secs(second));
        CounterHistory::in_directory(directory).add("/sys/*/count", Span::minutes(30), now, files)
    }

    #[test]
    fn samples_are_stored_with_changed_files_only() {
        let folder = tempfile::tempdir().unwrap();
        run_pass(folder.path(), 60, &[("/sys/a/count", "1"), ("/sys/b/count", "1")]);
        let samples = run_pass(folder.path(), 360, &[("/sys/a/count", "2")]);
        assert_eq!(samples.len(), 2);
        assert_eq!(samples[1].files.iter().map(|file| file.path.as_str()).collect::<Vec<_>>(), ["/sys/a/count"]);
        assert_eq!(samples[1].removed, ["/sys/b/count"]);
        let samples = run_pass(folder.path(), 2400, &[("/sys/a/count", "2")]);
        assert_eq!(samples.len(), 1, "older than half an hour");
        assert_eq!(samples[0].files.len(), 1, "the first sample is complete");
    }

    #[test]
    fn unchanged_samples_within_a_minute_are_merged_and_a_change_keeps_the_sample_before_it() {
        let folder = tempfile::tempdir().unwrap();
        for second in 1..=30 {
            run_pass(folder.path(), second, &[("/sys/a/count", "1")]);
        }
        let samples = run_pass(folder.path(), 31, &[("/sys/a/count", "2")]);
        let seconds: Vec<_> = samples.iter().map(|sample| sample.at.millis() / 1000).collect();
        assert_eq!(seconds, [1, 30, 31]);
        for second in 32..=300 {
            run_pass(folder.path(), second, &[("/sys/a/count", "2")]);
        }
        let sample_count = run_pass(folder.path(), 301, &[("/sys/a/count", "2")]).len();
        assert!((5..=9).contains(&sample_count), "about one a minute: {sample_count}");
    }

    #[test]
    fn one_file_holds_all_patterns_and_a_pass_that_queries_one_keeps_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let pass = |minute: i64, patterns: &[&str]| {
            let (samples, now) = (
                CounterHistory::in_directory(folder.path()),
                (Timestamp::from_secs(60 * minute), Span::minutes(minute)),
            );
            let add = |pattern: &&str| samples.add(pattern, Span::hours(1), now, vec![file("/sys/a", "1")]).len();
            patterns.iter().map(add).collect::<Vec<_>>()
        };
        assert_eq!(pass(1, &["/a", "/b"]), [1, 1]);
        assert_eq!(pass(6, &["/a"]), [2]);
        assert_eq!(pass(11, &["/a", "/b"]), [3, 2]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let ten_days = 14_400;
        pass(ten_days, &["/a"]);
        let stored = load(folder.path()).unwrap();
        assert_eq!(stored.keys().collect::<Vec<_>>(), ["/a"], "no check queries the other any more");
    }

    #[test]
    fn checks_with_different_lookbacks_share_a_pattern_and_the_longest_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let pass = |minute: i64| {
            let (samples, now) = (
                CounterHistory::in_directory(folder.path()),
                (Timestamp::from_secs(60 * minute), Span::minutes(minute)),
            );
            let files = || vec![file("/sys/a", &minute.to_string())];
            [30, 90].map(|keep| samples.add("/sys/*", Span::minutes(keep), now, files()).len())
        };
        assert_eq!(pass(10), [1, 1]);
        assert_eq!(pass(30), [2, 2]);
        assert_eq!(pass(50), [2, 3]);
        assert_eq!(pass(70), [2, 4]);
    }

    #[test]
    fn a_damaged_file_and_a_clock_set_back_discard_earlier_samples() {
        let folder = tempfile::tempdir().unwrap();
        run_pass(folder.path(), 600, &[("/sys/a/count", "1")]);
        let samples = run_pass(folder.path(), 300, &[("/sys/a/count", "1")]);
        assert_eq!((samples.len(), samples[0].files.len()), (1, 1));
        fs::write(history_file(folder.path()), "not json").unwrap();
        assert_eq!(run_pass(folder.path(), 900, &[("/sys/a/count", "1")]).len(), 1);
    }

    #[test]
    fn files_of_an_older_version_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("samples")).unwrap();
        fs::write(folder.path().join("samples/syscount-0123456789abcdef.json"), "[]").unwrap();
        run_pass(folder.path(), 60, &[]);
        assert!(!folder.path().join("samples").exists());
    }

    #[test]
    fn without_a_directory_only_the_current_sample_exists() {
        let now = (Timestamp::from_secs(60), Span::minutes(1));
        assert_eq!(CounterHistory::default().add("/sys/*", Span::days(1), now, Vec::new()).len(), 1);
    }
}
