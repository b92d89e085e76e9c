//! The copy of the history on the shared directory, `metadata/validation.db`.
//!
//! The store makes it in a private directory of this machine; its bytes are then written to the share like any other file.
//! SQLite opens nothing on the share, and nothing that a node puts there is read as a database.

use std::path::Path;

use doctor_backend::progress::EffectsPermit;
use doctor_host::shared_directory::{Entry, EntryKind};
use doctor_store::{CopyFolder, Store, StoreError, records::PublishOutcome};

use crate::share::{ShareError, ShareFiles};

const FILE: &str = "validation.db";
/// Where the database of the system that this one replaces is kept.
const ORIGINAL: &str = "validation.db.original";
/// SQLite keeps the text of the table definitions in the first page, and one of our tables is in no other database.
const FIRST_PAGE: u64 = 4096;
const OUR_TABLE: &[u8] = b"CREATE TABLE doctor_copy";

#[derive(Debug, thiserror::Error)]
pub(super) enum HistoryCopyError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Share(#[from] ShareError),
    #[error(
        "metadata/{FILE} in the shared directory is not a published copy, and metadata/{ORIGINAL} exists: move one of them away, \
         or `doctor import` it first"
    )]
    Foreign,
}

/// What this process knows of the copy.
#[derive(Debug, Default)]
pub(super) struct HistoryCopy {
    folder: Option<CopyFolder>,
    /// The file as this process wrote it.
    written: Option<Entry>,
    /// Whether the local copy is newer than the one on the share: writing that one has failed.
    is_stale: bool,
}

impl HistoryCopy {
    /// Brings the copy on the share up to date, unless the term of `permit` ends before it is written there.
    ///
    /// # Errors
    /// With one line about what failed.
    pub(super) fn publish(
        &mut self,
        files: &ShareFiles,
        permit: &EffectsPermit,
        store: &Store,
        folder: Option<&Path>,
    ) -> Result<(), String> {
        self.try_publish(files, permit, store, folder).map_err(|error| chain(&error))
    }

    fn try_publish(
        &mut self,
        files: &ShareFiles,
        permit: &EffectsPermit,
        store: &Store,
        folder: Option<&Path>,
    ) -> Result<(), HistoryCopyError> {
        let local = match self.folder.take() {
            Some(local) => local,
            None => CopyFolder::open(folder)?,
        };
        let local = self.folder.insert(local);
        let outcome = store.publish(&local.copy())?;
        self.is_stale |= matches!(outcome, PublishOutcome::Written { .. });
        if outcome == PublishOutcome::Deferred && !self.is_stale {
            return Ok(());
        }
        // The local copy of a long history takes minutes, in which another controller may have begun to lead.
        if !permit.is_valid() {
            return Ok(());
        }
        let found = files.published(FILE)?;
        match (&self.written, &found) {
            // It is ours, as it was.
            (Some(written), Some(found)) if written.is_same_file(found) && !self.is_stale => return Ok(()),
            // What another party has put in place of ours since is replaced.
            (Some(_), _) | (None, None) => {}
            (None, Some(found)) => keep_original(files, found.kind)?,
        }
        let mut copy = local.open_copy()?;
        self.written = Some(files.publish(FILE, &mut copy)?.entry);
        self.is_stale = false;
        Ok(())
    }
}

/// Moves a file that is not a copy of ours aside instead of overwriting it: it is the operator's database.
fn keep_original(files: &ShareFiles, kind: EntryKind) -> Result<(), HistoryCopyError> {
    if kind != EntryKind::File {
        return Ok(());
    }
    let start = files.published_start(FILE, FIRST_PAGE)?.unwrap_or_default();
    let is_ours = start.windows(OUR_TABLE.len()).any(|part| part == OUR_TABLE);
    if is_ours || files.move_published_aside(FILE, ORIGINAL)? { Ok(()) } else { Err(HistoryCopyError::Foreign) }
}

/// Formats an error with its causes: the text of a failed statement is in the cause.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::fs;

    use doctor_backend::progress::Progress;

    use super::*;
    use crate::share::Share;

    struct Site {
        folder: tempfile::TempDir,
        store: Store,
    }

    impl Site {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            fs::create_dir_all(folder.path().join("data/metadata")).unwrap();
            Self { folder, store: Store::open_in_memory().unwrap() }
        }

        fn at(&self, name: &str) -> std::path::PathBuf {
            self.folder.path().join(name)
        }

        fn publish(&self, copy: &mut HistoryCopy) -> Result<(), String> {
            let share = Share::open(&self.at("data")).unwrap();
            let permit = Progress::default().effects_permit();
            copy.publish(share.files(), &permit, &self.store, Some(&self.at("published")))
        }

        fn is_published(&self) -> bool {
            let bytes = fs::read(self.at("data/metadata/validation.db")).unwrap_or_default();
            bytes.starts_with(b"SQLite format 3\0") && bytes.windows(OUR_TABLE.len()).any(|part| part == OUR_TABLE)
        }
    }

    #[test]
    fn the_copy_is_made_in_private_and_written_again_only_when_it_was_touched() {
        let site = Site::new();
        let mut copy = HistoryCopy::default();
        site.publish(&mut copy).unwrap();
        assert!(site.is_published());
        let first = copy.written.unwrap();
        site.publish(&mut copy).unwrap();
        assert!(first.is_same_file(&copy.written.unwrap()), "nothing changed");
        fs::write(site.at("data/metadata/validation.db"), "spoilt by a node").unwrap();
        site.publish(&mut copy).unwrap();
        assert!(site.is_published());
        fs::remove_file(site.at("data/metadata/validation.db")).unwrap();
        site.publish(&mut copy).unwrap();
        assert!(site.is_published());
        // A new process does not take its predecessor's copy for the operator's database.
        site.publish(&mut HistoryCopy::default()).unwrap();
        assert!(!site.at("data/metadata/validation.db.original").exists());
    }

    #[test]
    fn a_copy_that_could_not_be_written_to_the_share_is_written_the_next_time() {
        let site = Site::new();
        let mut copy = HistoryCopy::default();
        site.publish(&mut copy).unwrap();
        let first = copy.written.unwrap();
        // The next local copy is a new one.
        fs::remove_file(copy.folder.as_ref().unwrap().copy()).unwrap();
        fs::rename(site.at("data"), site.at("away")).unwrap();
        let (share, permit) = (Share::at(&site.at("data")), Progress::default().effects_permit());
        copy.publish(share.files(), &permit, &site.store, Some(&site.at("published"))).unwrap_err();
        fs::rename(site.at("away"), site.at("data")).unwrap();
        site.publish(&mut copy).unwrap();
        let second = copy.written.unwrap();
        assert!(!first.is_same_file(&second), "the old copy is not taken for the current one");
        site.publish(&mut copy).unwrap();
        assert!(second.is_same_file(&copy.written.unwrap()));
    }

    #[test]
    fn a_copy_made_when_the_term_had_ended_is_written_in_the_next_one() {
        let site = Site::new();
        let (share, progress) = (Share::open(&site.at("data")).unwrap(), Progress::default());
        let ended = progress.effects_permit();
        progress.end_effects(0);
        let mut copy = HistoryCopy::default();
        copy.publish(share.files(), &ended, &site.store, Some(&site.at("published"))).unwrap();
        assert!(copy.folder.as_ref().unwrap().copy().exists() && !site.at("data/metadata/validation.db").exists());
        site.publish(&mut copy).unwrap();
        assert!(site.is_published());
    }

    #[test]
    fn a_foreign_database_is_moved_aside_and_not_overwritten() {
        let site = Site::new();
        fs::write(site.at("data/metadata/validation.db"), "SQLite format 3\0 of the operator").unwrap();
        site.publish(&mut HistoryCopy::default()).unwrap();
        let original = site.at("data/metadata/validation.db.original");
        assert_eq!(fs::read(&original).unwrap(), b"SQLite format 3\0 of the operator");
        assert!(site.is_published());
        fs::write(site.at("data/metadata/validation.db"), "another").unwrap();
        let error = site.publish(&mut HistoryCopy::default()).unwrap_err();
        assert!(error.contains("is not a published copy"), "{error}");
        assert_eq!(fs::read(site.at("data/metadata/validation.db")).unwrap(), b"another");
    }

    #[test]
    fn the_live_database_behind_a_link_is_neither_read_nor_written() {
        let site = Site::new();
        fs::write(site.at("doctor.db"), "live").unwrap();
        std::os::unix::fs::symlink(site.at("doctor.db"), site.at("data/metadata/validation.db")).unwrap();
        site.publish(&mut HistoryCopy::default()).unwrap();
        assert_eq!(fs::read_to_string(site.at("doctor.db")).unwrap(), "live");
        assert!(site.is_published() && fs::symlink_metadata(site.at("data/metadata/validation.db")).unwrap().is_file());
    }
}
