//! `rejected/`: documents that were refused, each with its reason. Nodes cause what is written here, so it is limited by age,
//! number and size; the oldest go first.

use std::{
    ffi::{OsStr, OsString},
    path::Path,
};

use doctor_backend::share_worker::Progress;
use doctor_core::time::{Span, Timestamp};
use doctor_host::shared_directory::{SharedDirectory, SharedDirectoryError};

use crate::rejection::Rejection;

pub(super) const FOLDER: &str = "rejected";
/// Kept of a document that is too long or did not come as a file: enough to recognise it.
pub(super) const KEPT_BYTES: u64 = 64 << 10;
/// Long enough to look into a fault that was noticed after a holiday.
const MAX_AGE: Span = Span::days(30);
/// A node that sends a bad result in each cycle of ten seconds fills this in a day; more of the same tells nothing new, and
/// listing more delays each prune on a network file system.
const MAX_FILES: usize = 20_000;
/// A small part of any file system that holds logs, and sixty documents of the greatest length.
const MAX_BYTES: u64 = 1 << 30;

/// Returns the name of a rejected document: the time first, so that names sort by it.
pub(super) fn name(original: &OsStr, at: Timestamp) -> OsString {
    let mut name = OsString::from(format!("{}_", at.millis()));
    name.push(original);
    name
}

/// Returns the name and the text of the file with the reason for a rejection.
pub(super) fn reason(name: &OsStr, why: &Rejection) -> (OsString, String) {
    let mut reason = name.to_owned();
    reason.push(".reason");
    (reason, format!("{why}\n"))
}

/// One entry, as far as pruning is concerned.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Aged {
    at: Timestamp,
    name: OsString,
    bytes: u64,
}

/// Removes what is too old or too much, as far as there is time. What cannot be removed now is removed the next time.
pub(super) fn prune(root: &SharedDirectory, now: Timestamp, progress: &Progress) -> Result<(), SharedDirectoryError> {
    let Some(folder) = root.subdirectory(Path::new(FOLDER))? else { return Ok(()) };
    let names = folder.names(&progress.while_listing())?;
    let go_on = progress.while_listing();
    let mut entries = Vec::new();
    for name in names {
        // When the time is over, age and number are still known from the names of ours.
        let entry = if go_on() { folder.entry(Path::new(&name))? } else { None };
        let modified = entry.map(|entry| Timestamp::from_millis(entry.modified.saturating_mul(1000)));
        let Some(at) = time_of(&name).or(modified) else { continue };
        entries.push(Aged { at, name, bytes: entry.map_or(0, |entry| entry.bytes) });
    }
    let go_on = progress.while_removing();
    for surplus in surplus(entries, now) {
        if !go_on() {
            break;
        }
        let _kept = folder.remove_tree(&surplus.name, &go_on);
    }
    Ok(())
}

/// The time in a name of ours.
fn time_of(name: &OsStr) -> Option<Timestamp> {
    name.to_str()?.split_once('_')?.0.parse().ok().map(Timestamp::from_millis)
}

/// Returns the entries to remove.
fn surplus(mut entries: Vec<Aged>, now: Timestamp) -> Vec<Aged> {
    // A time in the future is that of a node that wants its files to be kept: the oldest of all.
    let clock_slack = Span::days(1);
    for entry in &mut entries {
        if entry.at > now.plus(clock_slack) {
            entry.at = Timestamp::MIN;
        }
    }
    entries.sort_by(|a, b| b.cmp(a));
    let (mut files, mut bytes) = (0, 0_u64);
    entries.retain(|entry| {
        files += 1;
        bytes = bytes.saturating_add(entry.bytes);
        files > MAX_FILES || bytes > MAX_BYTES || entry.at < now.minus(MAX_AGE)
    });
    entries
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_794_729_600);

    fn aged(ago: Span, bytes: u64) -> Aged {
        Aged { at: NOW.minus(ago), name: OsString::from(format!("{}_x", ago.millis())), bytes }
    }

    fn ages(entries: Vec<Aged>) -> Vec<i64> {
        surplus(entries, NOW).iter().map(|entry| NOW.since(entry.at).secs()).collect()
    }

    #[test]
    fn the_oldest_go_by_age_number_and_size() {
        let day = Span::days(1);
        assert_eq!(ages(vec![aged(day, 1), aged(Span::days(31), 1)]), [31 * 86_400]);
        assert_eq!(
            ages(vec![aged(day, MAX_BYTES), aged(Span::hours(1), 1), aged(Span::days(2), 1)]),
            [86_400, 2 * 86_400]
        );
        let many = (0..=MAX_FILES).map(|second| aged(Span::from_secs(second as i64), 1)).collect();
        assert_eq!(ages(many), [MAX_FILES as i64]);
        assert!(ages(vec![aged(day, 1)]).is_empty());
    }

    #[test]
    fn a_name_from_the_future_does_not_keep_a_file() {
        let future = aged(Span::days(-400), 1);
        assert_eq!(surplus(vec![future.clone(), aged(Span::ZERO, 1)], NOW)[0].name, future.name);
    }

    #[test]
    fn a_planted_tree_and_link_are_removed_and_what_the_link_points_to_stays() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join("rejected").join(name);
        fs::create_dir_all(at("1_deep/below")).unwrap();
        fs::write(folder.path().join("outside"), "x").unwrap();
        std::os::unix::fs::symlink(folder.path().join("outside"), at("2_link")).unwrap();
        fs::write(at(&format!("{}_new.json", NOW.millis())), "{}").unwrap();
        let root = SharedDirectory::open(folder.path()).unwrap();
        prune(&root, NOW, &Progress::default()).unwrap();
        let left: Vec<_> = fs::read_dir(at("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [OsString::from(format!("{}_new.json", NOW.millis()))]);
        assert_eq!(fs::read_to_string(folder.path().join("outside")).unwrap(), "x");
    }

    #[test]
    fn a_planted_tree_of_many_files_is_removed_in_parts() {
        const FILES: usize = 11_000;
        let folder = tempfile::tempdir().unwrap();
        let wide = folder.path().join("rejected/1_wide");
        fs::create_dir_all(&wide).unwrap();
        for number in 0..FILES {
            fs::File::create(wide.join(number.to_string())).unwrap();
        }
        let root = SharedDirectory::open(folder.path()).unwrap();
        let left = || fs::read_dir(&wide).map_or(0, Iterator::count);
        prune(&root, NOW, &Progress::default()).unwrap();
        assert!((1..FILES).contains(&left()), "{} left: no more at once than the writing thread has time for", left());
        let mut before = left();
        while wide.exists() {
            prune(&root, NOW, &Progress::default()).unwrap();
            assert!(left() < before || !wide.exists(), "{before} left");
            before = left();
        }
    }

    #[test]
    fn a_rejected_document_is_named_after_its_time() {
        let name = name(OsStr::new("a.json"), NOW);
        assert_eq!(time_of(&name), Some(NOW));
        let (file, text) = reason(&name, &Rejection::UnknownRun);
        assert_eq!((time_of(&file), text.as_str()), (Some(NOW), "unknown run\n"));
        assert!(file.to_str().unwrap().ends_with("_a.json.reason"));
    }
}
