//! What the same files held at earlier looks, kept on this node so that counters are judged by how they grow.
//!
//! One file for all patterns, read at the first question of a pass and replaced as a whole at its end: a pass asks for
//! thirty of them, and making thirty files takes longer than reading the counters. A pass that is killed has not been.
//! A file that cannot be read is begun anew: earlier looks are lost and nothing is invented.

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

/// Of one pattern. Older ones are folded into the next.
const MOST: usize = 400;
/// A larger file is not one of ours.
const MOST_BYTES: u64 = 16 << 20;
/// Looks at which nothing was new are kept this far apart: a hook that runs before every job looks many times a minute.
const APART: Span = Span::minutes(1);
/// A pattern that nobody has asked for in this long is forgotten. Checks look back a day at most.
const UNASKED: Span = Span::days(7);

type Kept = BTreeMap<String, Vec<Sample>>;

/// The looks of one pass and of those before it.
#[derive(Debug, Default)]
pub(super) struct Samples {
    /// Without a directory there is only now.
    directory: Option<PathBuf>,
    pass: RefCell<Option<Pass>>,
}

#[derive(Debug)]
struct Pass {
    kept: Kept,
    /// How far back this pass looks, by pattern: several checks may ask for the same one.
    asked: BTreeMap<String, Span>,
    /// When it looked.
    at: Timestamp,
}

impl Samples {
    pub(super) fn kept_in(directory: &Path) -> Self {
        Self { directory: Some(directory.to_owned()), pass: RefCell::default() }
    }

    /// Adds a look to those before it, and returns all that are not older than `keep`. A pass looks at one moment: a
    /// pattern that is asked for again is not looked at again.
    pub(super) fn add(&self, pattern: &str, keep: Span, now: (Timestamp, Span), files: Vec<FileText>) -> Vec<Sample> {
        let mut pass = self.pass.borrow_mut();
        let pass = pass.get_or_insert_with(|| {
            let kept = self.directory.as_deref().and_then(load).unwrap_or_default();
            Pass { kept, asked: BTreeMap::new(), at: now.0 }
        });
        let longest = pass.asked.entry(pattern.to_owned()).or_insert(keep);
        *longest = keep.max(*longest);
        let samples = pass.kept.entry(pattern.to_owned()).or_default();
        // A clock that was set back would make the past come after now.
        samples.retain(|sample| sample.at < now.0);
        let look = difference(&state(samples), now, files);
        if is_between(samples, &look) {
            samples.pop();
        }
        samples.push(look);
        let mut answer = samples.clone();
        fold_older(&mut answer, keep, now.0);
        answer
    }

    /// Puts down what this pass has added.
    fn save(&self) -> io::Result<()> {
        let (Some(directory), Some(pass)) = (&self.directory, self.pass.take()) else { return Ok(()) };
        let Pass { mut kept, asked, at } = pass;
        kept.retain(|pattern, samples| {
            if let Some(keep) = asked.get(pattern) {
                fold_older(samples, *keep, at);
            }
            samples.last().is_some_and(|last| at.since(last.at) <= UNASKED)
        });
        fs::create_dir_all(directory)?;
        let place = place(directory);
        let beside = place.with_extension(format!("part{}", std::process::id()));
        let written = fs::write(&beside, serde_json::to_vec(&kept)?).and_then(|()| fs::rename(&beside, place));
        if written.is_err() {
            // It may not be there at all.
            let _tidied = fs::remove_file(beside);
        }
        written
    }
}

/// The end of the pass, however it came.
impl Drop for Samples {
    fn drop(&mut self) {
        // No answer depends on it. The next look has one less to compare with.
        let _kept = self.save();
    }
}

pub(super) fn place(directory: &Path) -> PathBuf {
    directory.join("samples.json")
}

fn load(directory: &Path) -> Option<Kept> {
    // Where versions before this one kept a file for each pattern. Most passes find nothing to remove.
    let _gone = fs::remove_dir_all(directory.join("samples"));
    let place = place(directory);
    if fs::metadata(&place).ok()?.len() > MOST_BYTES {
        return None;
    }
    let mut kept: Kept = serde_json::from_slice(&fs::read(place).ok()?).ok()?;
    // Folding them one by one takes the square of their number; we never leave that many.
    kept.retain(|_, samples| (1..=MOST).contains(&samples.len()));
    Some(kept)
}

/// Whether the newest of these looks says nothing that its neighbours do not say: nothing was new at it, nothing is new
/// now, the machine did not boot since, and there is another one shortly before.
fn is_between(samples: &[Sample], now: &Sample) -> bool {
    let is_quiet = |sample: &Sample| sample.files.is_empty() && sample.gone.is_empty();
    let [.., before, newest] = samples else { return false };
    is_quiet(newest)
        && is_quiet(now)
        && before.up <= newest.up
        && newest.up <= now.up
        && now.at.since(before.at) < APART
}

type State<'a> = BTreeMap<&'a str, &'a Result<String, ProbeFailure>>;

/// Everything as it was at the last of these looks.
fn state(samples: &[Sample]) -> State<'_> {
    let mut state = State::new();
    for sample in samples {
        state.extend(sample.files.iter().map(|file| (file.path.as_str(), &file.text)));
        for gone in &sample.gone {
            state.remove(gone.as_str());
        }
    }
    state
}

fn difference(before: &State<'_>, (at, up): (Timestamp, Span), files: Vec<FileText>) -> Sample {
    let gone = before.keys().filter(|path| !files.iter().any(|file| file.path == **path));
    let gone = gone.map(|path| (*path).to_owned()).collect();
    let files = files.into_iter().filter(|file| before.get(file.path.as_str()) != Some(&&file.text)).collect();
    Sample { at, up, files, gone }
}

/// What is older than `keep`, or more than there is room for, becomes one look.
fn fold_older(samples: &mut Vec<Sample>, keep: Span, now: Timestamp) {
    let is_old = |sample: &Sample| now.since(sample.at) > keep;
    while samples.len() > MOST || samples.len() > 1 && is_old(&samples[0]) {
        fold_oldest(samples);
    }
}

/// The first two looks become one, with everything in it, at the time of the second.
fn fold_oldest(samples: &mut Vec<Sample>) {
    let files =
        state(&samples[..2]).into_iter().map(|(path, text)| FileText { path: path.to_owned(), text: text.clone() });
    let (at, up) = (samples[1].at, samples[1].up);
    let first = Sample { at, up, files: files.collect(), gone: Vec::new() };
    samples.splice(..2, [first]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> FileText {
        FileText { path: path.into(), text: Ok(text.into()) }
    }

    /// A pass of its own, at this second.
    fn look(directory: &Path, second: i64, files: &[(&str, &str)]) -> Vec<Sample> {
        let files = files.iter().map(|(path, text)| file(path, text)).collect();
        let now = (Timestamp::from_secs(second), Span::from_secs(second));
        Samples::kept_in(directory).add("/sys/*/count", Span::minutes(30), now, files)
    }

    #[test]
    fn looks_are_remembered_and_what_did_not_change_is_not_repeated() {
        let folder = tempfile::tempdir().unwrap();
        look(folder.path(), 60, &[("/sys/a/count", "1"), ("/sys/b/count", "1")]);
        let samples = look(folder.path(), 360, &[("/sys/a/count", "2")]);
        assert_eq!(samples.len(), 2);
        assert_eq!(samples[1].files.iter().map(|file| file.path.as_str()).collect::<Vec<_>>(), ["/sys/a/count"]);
        assert_eq!(samples[1].gone, ["/sys/b/count"]);
        let samples = look(folder.path(), 2400, &[("/sys/a/count", "2")]);
        assert_eq!(samples.len(), 1, "older than half an hour");
        assert_eq!(samples[0].files.len(), 1, "the first look has everything in it");
    }

    #[test]
    fn many_quiet_looks_in_a_minute_are_kept_as_one_and_a_change_keeps_the_look_before_it() {
        let folder = tempfile::tempdir().unwrap();
        for second in 1..=30 {
            look(folder.path(), second, &[("/sys/a/count", "1")]);
        }
        let samples = look(folder.path(), 31, &[("/sys/a/count", "2")]);
        let seconds: Vec<_> = samples.iter().map(|sample| sample.at.millis() / 1000).collect();
        assert_eq!(seconds, [1, 30, 31]);
        for second in 32..=300 {
            look(folder.path(), second, &[("/sys/a/count", "2")]);
        }
        let kept = look(folder.path(), 301, &[("/sys/a/count", "2")]).len();
        assert!((5..=9).contains(&kept), "about one a minute: {kept}");
    }

    #[test]
    fn one_file_holds_all_patterns_and_a_pass_that_asks_for_one_keeps_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let pass = |minute: i64, patterns: &[&str]| {
            let (samples, now) =
                (Samples::kept_in(folder.path()), (Timestamp::from_secs(60 * minute), Span::minutes(minute)));
            let add = |pattern: &&str| samples.add(pattern, Span::hours(1), now, vec![file("/sys/a", "1")]).len();
            patterns.iter().map(add).collect::<Vec<_>>()
        };
        assert_eq!(pass(1, &["/a", "/b"]), [1, 1]);
        assert_eq!(pass(6, &["/a"]), [2]);
        assert_eq!(pass(11, &["/a", "/b"]), [3, 2]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let ten_days = 14_400;
        pass(ten_days, &["/a"]);
        let kept = load(folder.path()).unwrap();
        assert_eq!(kept.keys().collect::<Vec<_>>(), ["/a"], "nobody asks for the other any more");
    }

    #[test]
    fn checks_that_look_back_differently_share_a_pattern_and_the_longest_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let pass = |minute: i64| {
            let (samples, now) =
                (Samples::kept_in(folder.path()), (Timestamp::from_secs(60 * minute), Span::minutes(minute)));
            let files = || vec![file("/sys/a", &minute.to_string())];
            [30, 90].map(|keep| samples.add("/sys/*", Span::minutes(keep), now, files()).len())
        };
        assert_eq!(pass(10), [1, 1]);
        assert_eq!(pass(30), [2, 2]);
        assert_eq!(pass(50), [2, 3]);
        assert_eq!(pass(70), [2, 4]);
    }

    #[test]
    fn a_damaged_file_and_a_clock_set_back_begin_anew() {
        let folder = tempfile::tempdir().unwrap();
        look(folder.path(), 600, &[("/sys/a/count", "1")]);
        let samples = look(folder.path(), 300, &[("/sys/a/count", "1")]);
        assert_eq!((samples.len(), samples[0].files.len()), (1, 1));
        fs::write(place(folder.path()), "not json").unwrap();
        assert_eq!(look(folder.path(), 900, &[("/sys/a/count", "1")]).len(), 1);
    }

    #[test]
    fn what_an_older_version_kept_is_tidied_away() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("samples")).unwrap();
        fs::write(folder.path().join("samples/syscount-0123456789abcdef.json"), "[]").unwrap();
        look(folder.path(), 60, &[]);
        assert!(!folder.path().join("samples").exists());
    }

    #[test]
    fn without_a_directory_there_is_only_now() {
        let now = (Timestamp::from_secs(60), Span::minutes(1));
        assert_eq!(Samples::default().add("/sys/*", Span::days(1), now, Vec::new()).len(), 1);
    }
}
