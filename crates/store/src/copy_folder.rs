//! The private directory in which the published copy is made.
//!
//! SQLite opens its files by path. On the shared directory a node could exchange what is at that path while SQLite works on it,
//! for a link to the live database or for a pipe; in a directory of this user alone no other party can.
//!
//! A temporary one has a file that its process keeps locked. A process that is killed leaves its directory behind, with a copy of
//! the whole history; the next one removes those whose file is not locked.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use doctor_core::hex;
use rustix::fs::{FlockOperation, OFlags, flock};

use super::{
    error::{Result, StoreError},
    publish::file_error,
};

/// A directory that only this user can enter.
#[derive(Debug)]
pub struct CopyFolder {
    path: PathBuf,
    /// The locked file of a temporary directory, which is removed when this is dropped.
    lock: Option<File>,
}

impl CopyFolder {
    /// Uses this directory on a local disk, which is created if it is missing. The copy in it is extended after a restart. If it
    /// cannot be used, a temporary directory takes its place: the copy is then made anew after each start.
    ///
    /// # Errors
    /// If neither can be used.
    pub fn open(path: Option<&Path>) -> Result<Self> {
        match path.map(|path| (path, keep_private(path))) {
            Some((path, Ok(()))) => Ok(Self { path: path.to_owned(), lock: None }),
            Some((path, Err(error))) => {
                tracing::info!(path = %path.display(), %error, "the published copy is made in a temporary directory");
                Self::temporary(&std::env::temp_dir())
            }
            None => Self::temporary(&std::env::temp_dir()),
        }
    }

    fn temporary(parent: &Path) -> Result<Self> {
        remove_abandoned(parent);
        let mut random = [0_u8; 16];
        getrandom::fill(&mut random).map_err(|error| StoreError::Refused {
            operation: "making a directory for the published copy",
            why: error.to_string(),
        })?;
        let path = parent.join(format!("{PREFIX}{}", hex::encode(&random)));
        // Fails if another user made it first.
        DirBuilder::new().mode(PRIVATE).create(&path).map_err(file_error("making", &path))?;
        let name = path.join(LOCK);
        // It is locked before it has the name by which others look for it.
        let unnamed = path.join("lock.new");
        let lock = File::create_new(&unnamed).and_then(|file| {
            flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            fs::rename(&unnamed, &name)?;
            Ok(file)
        });
        Ok(Self { lock: Some(lock.map_err(file_error("locking", &name))?), path })
    }

    /// Returns the path of the copy.
    pub fn copy(&self) -> PathBuf {
        self.path.join("validation.db")
    }

    /// Opens the copy for reading.
    ///
    /// # Errors
    /// If it was not made yet, or cannot be read.
    pub fn open_copy(&self) -> Result<File> {
        let path = self.copy();
        File::open(&path).map_err(file_error("reading", &path))
    }
}

const PRIVATE: u32 = 0o700;
/// How the name of a temporary directory begins.
const PREFIX: &str = "doctor-copy-";
/// The file in it that its process keeps locked.
const LOCK: &str = "lock";

/// Removes the temporary directories of this user whose processes are gone. One without the file is left alone: its process
/// may be about to create it, or be of a version that did not.
fn remove_abandoned(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_ours = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX))
            && fs::symlink_metadata(&path)
                .is_ok_and(|found| found.is_dir() && found.uid() == rustix::process::geteuid().as_raw());
        if !is_ours {
            continue;
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(lock) = rustix::fs::open(path.join(LOCK), flags, rustix::fs::Mode::empty()) else { continue };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            match fs::remove_dir_all(&path) {
                Ok(()) => {
                    tracing::info!(path = %path.display(), "removed the published copy of a process that was killed");
                }
                // Another process may remove it, too.
                Err(error) => tracing::debug!(path = %path.display(), %error, "an abandoned directory was not removed"),
            }
        }
    }
}

/// Creates the directory, or checks that it is one of this user, and closes it to others.
fn keep_private(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(PRIVATE).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => return made,
    }
    let found = fs::symlink_metadata(path)?;
    if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is no directory of this user"));
    }
    if found.mode() & 0o077 != 0 {
        fs::set_permissions(path, fs::Permissions::from_mode(PRIVATE))?;
    }
    Ok(())
}

impl Drop for CopyFolder {
    fn drop(&mut self) {
        if self.lock.is_some() {
            // The next process removes what is left.
            let _left = fs::remove_dir_all(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_is_private_and_outlasts_only_if_it_was_named() {
        let folder = tempfile::tempdir().unwrap();
        let named = folder.path().join("published");
        fs::create_dir(&named).unwrap();
        fs::set_permissions(&named, fs::Permissions::from_mode(0o777)).unwrap();
        let opened = CopyFolder::open(Some(&named)).unwrap();
        assert_eq!(opened.copy(), named.join("validation.db"));
        assert_eq!(fs::metadata(&named).unwrap().mode() & 0o777, PRIVATE);
        drop(opened);
        assert!(named.is_dir());
        let temporary = CopyFolder::open(None).unwrap();
        let path = temporary.path.clone();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, PRIVATE);
        assert!(temporary.open_copy().is_err(), "nothing was copied yet");
        drop(temporary);
        assert!(!path.exists());
    }

    #[test]
    fn a_link_in_its_place_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("elsewhere")).unwrap();
        let named = folder.path().join("published");
        std::os::unix::fs::symlink(folder.path().join("elsewhere"), &named).unwrap();
        let opened = CopyFolder::open(Some(&named)).unwrap();
        assert!(opened.lock.is_some() && !opened.copy().starts_with(folder.path()));
    }

    #[test]
    fn the_directory_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not() {
        let parent = tempfile::tempdir().unwrap();
        let entries = || fs::read_dir(parent.path()).unwrap().count();
        let mut killed = CopyFolder::temporary(parent.path()).unwrap();
        fs::write(killed.copy(), "history").unwrap();
        // A process that is killed loses its lock and removes nothing.
        drop(killed.lock.take());
        drop(killed);
        // Other files and directories that have such a name, but are none of ours.
        fs::create_dir(parent.path().join("doctor-copy-without-a-lock")).unwrap();
        fs::write(parent.path().join("doctor-copy-file"), "").unwrap();
        assert_eq!(entries(), 3);
        let living = CopyFolder::temporary(parent.path()).unwrap();
        assert_eq!(entries(), 3, "one was removed and one made");
        let beside = CopyFolder::temporary(parent.path()).unwrap();
        assert!(living.path.is_dir() && beside.path.is_dir());
        drop((living, beside));
        assert_eq!(entries(), 2);
    }
}
