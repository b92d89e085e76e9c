//! The private directory in which the vendor's tool runs.
//!
//! The tool writes its files, and its temporary files, into the current directory, as root and under fixed names. On a directory
//! that others can write, they could plant a link or a pipe of such a name; in a new one of this user alone they cannot.

use std::{
    ffi::OsStr,
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use doctor_host::shared_directory::SharedDirectory;
use rustix::rand::{GetRandomFlags, getrandom};

const PREFIX: &str = "doctor-report-";
/// The age after which a directory was left by a process that was killed.
const LEFT_AFTER: Duration = Duration::from_secs(86_400);

/// A new directory that only this user can enter. It is removed with its content when this is dropped.
#[derive(Debug)]
pub(super) struct Workspace(PathBuf);

impl Workspace {
    /// Creates one in a directory of this machine.
    pub(super) fn create_in(parent: &Path) -> io::Result<Self> {
        remove_left(parent);
        let mut random = [0; 8];
        getrandom(&mut random, GetRandomFlags::empty())?;
        let path = parent.join(format!("{PREFIX}{:016x}", u64::from_ne_bytes(random)));
        // Fails if the name is taken, also by a link.
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn name(&self) -> &OsStr {
        self.0.file_name().unwrap_or_default()
    }

    /// Opens the first of these files that exists, and returns its name and length.
    pub(super) fn first_file(&self, names: &[&'static str]) -> Result<Option<(&'static str, File, u64)>, String> {
        let directory = SharedDirectory::open(&self.0).map_err(|error| error.to_string())?;
        for name in names {
            if let Some((file, entry)) = directory.open_entry(Path::new(name)).map_err(|error| error.to_string())? {
                return Ok(Some((name, file, entry.bytes)));
            }
        }
        Ok(None)
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // A later report removes what is left.
        let _left = fs::remove_dir_all(&self.0);
    }
}

/// Removes the old directories of this user. What cannot be removed is left.
fn remove_left(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_named = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
        let is_left = |found: fs::Metadata| {
            found.is_dir()
                && found.uid() == rustix::process::geteuid().as_raw()
                && found.modified().is_ok_and(|at| at.elapsed().is_ok_and(|age| age > LEFT_AFTER))
        };
        if is_named && fs::symlink_metadata(&path).is_ok_and(is_left) {
            let _kept = fs::remove_dir_all(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::FileTimes,
        os::unix::fs::{PermissionsExt as _, symlink},
        time::SystemTime,
    };

    use super::*;

    #[test]
    fn only_this_user_can_enter_it_and_it_is_removed_with_its_content() {
        let parent = tempfile::tempdir().unwrap();
        let workspace = Workspace::create_in(parent.path()).unwrap();
        assert_eq!(fs::metadata(workspace.path()).unwrap().permissions().mode() & 0o7777, 0o700);
        fs::create_dir(workspace.path().join("below")).unwrap();
        fs::write(workspace.path().join("below/file"), "").unwrap();
        drop(workspace);
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_next_one_removes_those_that_killed_processes_left() {
        let parent = tempfile::tempdir().unwrap();
        let at = |name: &str| parent.path().join(name);
        let old = FileTimes::new().set_modified(SystemTime::now() - 2 * LEFT_AFTER);
        for (name, is_old) in [("doctor-report-1", true), ("doctor-report-2", false), ("other", true)] {
            fs::create_dir(at(name)).unwrap();
            fs::write(at(name).join("file"), "").unwrap();
            if is_old {
                File::open(at(name)).unwrap().set_times(old).unwrap();
            }
        }
        symlink(at("other"), at("doctor-report-link")).unwrap();
        drop(Workspace::create_in(parent.path()).unwrap());
        let mut left: Vec<_> = fs::read_dir(parent.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["doctor-report-2", "doctor-report-link", "other"]);
        assert!(at("other/file").exists());
    }
}
