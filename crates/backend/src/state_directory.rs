//! Judges whether a backend's directory can be used, without creating it.

use std::{
    io,
    path::{Path, PathBuf},
};

use rustix::fs::{Access, access};

/// Checks that this directory is writable or can be created. Changes nothing.
///
/// # Errors
/// With the path that prevents it.
pub fn check_usable(directory: &Path) -> Result<(), String> {
    let absolute = std::path::absolute(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    let existing = nearest_existing(&absolute)?;
    if !existing.is_dir() {
        return Err(format!("{} is not a directory", existing.display()));
    }
    access(&existing, Access::WRITE_OK | Access::EXEC_OK)
        .map_err(|error| format!("{} cannot be written: {}", existing.display(), io::Error::from(error)))
}

/// Returns the directory itself, or the nearest of those above it that exists.
fn nearest_existing(path: &Path) -> Result<PathBuf, String> {
    for candidate in path.ancestors() {
        match candidate.metadata() {
            Ok(_) => return Ok(candidate.to_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // What is above it is a file: the next one tells.
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {}
            Err(error) => return Err(format!("{}: {error}", candidate.display())),
        }
    }
    Err(format!("{}: no directory above it exists", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_can_be_created_is_usable_and_one_below_a_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(check_usable(folder.path()), Ok(()));
        assert_eq!(check_usable(&folder.path().join("a/b/c")), Ok(()));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing was created");
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        for path in [file.clone(), file.join("below"), file.join("a/b")] {
            assert_eq!(check_usable(&path), Err(format!("{} is not a directory", file.display())), "{path:?}");
        }
    }
}
