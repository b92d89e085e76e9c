//! What the same files held at earlier looks, kept on this node so that counters are judged by how they grow.
//!
//! One file for each pattern, replaced as a whole. A file that cannot be read is begun anew: earlier looks are lost and
//! nothing is invented.

use std::{
    collections::BTreeMap,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
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

/// Adds a look to those before it, and returns all that are not older than `keep`.
pub(super) fn add(
    directory: Option<&Path>,
    pattern: &str,
    keep: Span,
    now: (Timestamp, Span),
    files: Vec<FileText>,
) -> Vec<Sample> {
    let place = directory.map(|directory| place(directory, pattern));
    let mut samples = place.as_deref().and_then(load).unwrap_or_default();
    // A clock that was set back would make the past come after now.
    samples.retain(|sample| sample.at < now.0);
    samples.push(difference(&state(&samples), now, files));
    while samples.len() > MOST || samples.len() > 1 && now.0.since(samples[0].at) > keep {
        fold_oldest(&mut samples);
    }
    if let Some(place) = place {
        // The answer does not depend on it. The next look has one less to compare with.
        let _kept = save(&place, &samples);
    }
    samples
}

pub(super) fn place(directory: &Path, pattern: &str) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    pattern.hash(&mut hasher);
    let words: String = pattern.chars().filter(char::is_ascii_alphanumeric).take(60).collect();
    directory.join("samples").join(format!("{words}-{:016x}.json", hasher.finish()))
}

fn load(place: &Path) -> Option<Vec<Sample>> {
    if fs::metadata(place).ok()?.len() > MOST_BYTES {
        return None;
    }
    let samples: Vec<Sample> = serde_json::from_slice(&fs::read(place).ok()?).ok()?;
    // Folding them one by one takes the square of their number; we never leave that many.
    (samples.len() <= MOST).then_some(samples)
}

fn save(place: &Path, samples: &[Sample]) -> std::io::Result<()> {
    if let Some(folder) = place.parent() {
        fs::create_dir_all(folder)?;
    }
    let beside = place.with_extension(format!("part{}", std::process::id()));
    fs::write(&beside, serde_json::to_vec(samples)?)?;
    fs::rename(&beside, place)
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

    fn look(directory: &Path, minute: i64, files: &[(&str, &str)]) -> Vec<Sample> {
        let files =
            files.iter().map(|(path, text)| FileText { path: (*path).into(), text: Ok((*text).into()) }).collect();
        let now = (Timestamp::from_secs(60 * minute), Span::minutes(minute));
        add(Some(directory), "/sys/*/count", Span::minutes(30), now, files)
    }

    #[test]
    fn looks_are_remembered_and_what_did_not_change_is_not_repeated() {
        let folder = tempfile::tempdir().unwrap();
        look(folder.path(), 1, &[("/sys/a/count", "1"), ("/sys/b/count", "1")]);
        let samples = look(folder.path(), 6, &[("/sys/a/count", "2")]);
        assert_eq!(samples.len(), 2);
        assert_eq!(samples[1].files.iter().map(|file| file.path.as_str()).collect::<Vec<_>>(), ["/sys/a/count"]);
        assert_eq!(samples[1].gone, ["/sys/b/count"]);
        let samples = look(folder.path(), 40, &[("/sys/a/count", "2")]);
        assert_eq!(samples.len(), 1, "older than half an hour");
        assert_eq!(samples[0].files.len(), 1, "the first look has everything in it");
    }

    #[test]
    fn a_damaged_file_and_a_clock_set_back_begin_anew() {
        let folder = tempfile::tempdir().unwrap();
        look(folder.path(), 10, &[("/sys/a/count", "1")]);
        let samples = look(folder.path(), 5, &[("/sys/a/count", "1")]);
        assert_eq!((samples.len(), samples[0].files.len()), (1, 1));
        let file = fs::read_dir(folder.path().join("samples")).unwrap().next().unwrap().unwrap().path();
        fs::write(&file, "not json").unwrap();
        assert_eq!(look(folder.path(), 15, &[("/sys/a/count", "1")]).len(), 1);
        let sample = Sample { at: Timestamp::from_secs(1000), up: Span::ZERO, files: Vec::new(), gone: Vec::new() };
        fs::write(&file, serde_json::to_vec(&vec![sample; MOST + 1]).unwrap()).unwrap();
        assert_eq!(look(folder.path(), 20, &[("/sys/a/count", "1")]).len(), 1, "more than we ever leave");
    }

    #[test]
    fn without_a_directory_there_is_only_now() {
        let now = (Timestamp::from_secs(60), Span::minutes(1));
        assert_eq!(add(None, "/sys/*", Span::days(1), now, Vec::new()).len(), 1);
    }
}
