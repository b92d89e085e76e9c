//! The private directory in which the published copy is made.
//!
//! SQLite opens its files by path. On the shared directory a node could exchange what is at that path while SQLite works on it,
//! for a link to the live database or for a pipe; in a directory of this user alone no other party can.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use doctor_core::hex;

use super::{
    error::{Result, StoreError},
    publish::file_error,
};

/// A directory that only this user can enter.
#[derive(Debug)]
pub struct CopyFolder {
    path: PathBuf,
    /// Whether it is removed when this is dropped.
    is_temporary: bool,
}

impl CopyFolder {
    /// Uses this directory on a local disk, which is created if it is missing. The copy in it is extended after a restart. If it
    /// cannot be used, a temporary directory takes its place: the copy is then made anew after each start.
    ///
    /// # Errors
    /// If neither can be used.
    pub fn open(path: Option<&Path>) -> Result<Self> {
        match path.map(|path| (path, keep_private(path))) {
            Some((path, Ok(()))) => Ok(Self { path: path.to_owned(), is_temporary: false }),
            Some((path, Err(error))) => {
                tracing::info!(path = %path.display(), %error, "the published copy is made in a temporary directory");
                Self::temporary()
            }
            None => Self::temporary(),
        }
    }

    fn temporary() -> Result<Self> {
        let mut random = [0_u8; 16];
        getrandom::fill(&mut random).map_err(|error| StoreError::Refused {
            operation: "making a directory for the published copy",
            why: error.to_string(),
        })?;
        let path = std::env::temp_dir().join(format!("doctor-copy-{}", hex::encode(&random)));
        // Fails if another user made it first.
        DirBuilder::new().mode(PRIVATE).create(&path).map_err(file_error("making", &path))?;
        Ok(Self { path, is_temporary: true })
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
        if self.is_temporary {
            // A rest in the temporary directory harms nothing.
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
        assert!(opened.is_temporary && !opened.copy().starts_with(folder.path()));
    }
}
