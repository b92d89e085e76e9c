//! `rejected/`: documents that were refused, each with its reason. Nodes cause what is written here, so it is limited by age,
//! number and size; the oldest go first.

use std::{
    ffi::{OsStr, OsString},
    io::Cursor,
    path::Path,
};

use doctor_core::time::{Span, Timestamp};
use doctor_host::shared_directory::{EntryKind, SharedDirectory, SharedDirectoryError};

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

/// The place of one rejected document.
pub(super) struct Kept {
    pub(super) folder: SharedDirectory,
    pub(super) name: OsString,
}

/// Returns the name of a rejected document: the time first, so that names sort by it.
pub(super) fn name(original: &OsStr, at: Timestamp) -> OsString {
    let mut name = OsString::from(format!("{}_", at.millis()));
    name.push(original);
    name
}

/// Writes the reason for a rejection, and returns the place for the document.
pub(super) fn keep_reason(root: &SharedDirectory, name: &OsStr, why: &Rejection) -> Result<Kept, SharedDirectoryError> {
    let folder = root.make_subdirectory(Path::new(FOLDER))?;
    let mut reason = name.to_owned();
    reason.push(".reason");
    folder.replace(&reason, &mut Cursor::new(format!("{why}\n")))?;
    Ok(Kept { folder, name: name.to_owned() })
}

/// One entry, as far as pruning is concerned.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Aged {
    at: Timestamp,
    name: OsString,
    bytes: u64,
    is_directory: bool,
}

/// Removes what is too old or too much. `answered` is called after each answer of the file system.
pub(super) fn prune(root: &SharedDirectory, now: Timestamp, answered: &dyn Fn()) -> Result<(), SharedDirectoryError> {
    let Some(folder) = root.subdirectory(Path::new(FOLDER))? else { return Ok(()) };
    let mut entries = Vec::new();
    for name in folder.names()? {
        answered();
        let Some(entry) = folder.entry(Path::new(&name))? else { continue };
        let at = time_of(&name).unwrap_or(Timestamp::from_millis(entry.modified.saturating_mul(1000)));
        entries.push(Aged { at, name, bytes: entry.bytes, is_directory: entry.kind == EntryKind::Directory });
    }
    for surplus in surplus(entries, now) {
        // What cannot be removed now is removed the next time.
        let _kept = if surplus.is_directory {
            folder.remove_tree(&surplus.name)
        } else {
            folder.remove(&surplus.name).map(drop)
        };
        answered();
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
        Aged { at: NOW.minus(ago), name: OsString::from(format!("{}_x", ago.millis())), bytes, is_directory: false }
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
        prune(&root, NOW, &|| {}).unwrap();
        let left: Vec<_> = fs::read_dir(at("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [OsString::from(format!("{}_new.json", NOW.millis()))]);
        assert_eq!(fs::read_to_string(folder.path().join("outside")).unwrap(), "x");
    }

    #[test]
    fn a_rejection_is_kept_with_its_reason_under_its_time() {
        let folder = tempfile::tempdir().unwrap();
        let root = SharedDirectory::open(folder.path()).unwrap();
        let name = name(OsStr::new("a.json"), NOW);
        let kept = keep_reason(&root, &name, &Rejection::UnknownRun).unwrap();
        assert_eq!(time_of(&kept.name), Some(NOW));
        let reason = folder.path().join("rejected").join(format!("{}_a.json.reason", NOW.millis()));
        assert_eq!(fs::read_to_string(reason).unwrap(), "unknown run\n");
    }
}
