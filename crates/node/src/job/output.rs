//! Writes files atomically and durably (temporary file, sync, rename), and reads the tail of growing files.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::Path,
};

use doctor_host::output_file;

use super::parent;

pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let directory = parent(path);
    make_folders(directory)?;
    let name = path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"))?;
    let temporary = directory.join(format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id()));
    // A killed job with the same pid may have left one. Absence is fine.
    let _absent = fs::remove_file(&temporary);
    let written = File::create_new(&temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    });
    if written.is_err() {
        let _tidied = fs::remove_file(&temporary);
    }
    written?;
    // The directory entry must survive a crash. Some network file systems cannot sync it; their server takes care of
    // it.
    let _durable = File::open(directory).and_then(|directory| directory.sync_all());
    Ok(())
}

/// Returns the last complete lines that fit into `max_bytes` bytes. `None` if the file does not exist.
pub(crate) fn tail(path: &Path, max_bytes: u64) -> io::Result<Option<String>> {
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => output_file::tail_of(opened?, max_bytes).map(Some),
    }
}

/// Creates a directory and its missing parents. A new directory inherits group write permission from its parent: a
/// controller that is not root shares the tree by group, and removes expired files from it.
pub(super) fn make_folders(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            make_folders(path.parent().ok_or(error)?)?;
            make_folders(path)
        }
        Err(_) if path.is_dir() => Ok(()),
        Err(error) => Err(error),
        Ok(()) => {
            let mode = |of: &Path| fs::metadata(of).map(|metadata| metadata.permissions().mode());
            let above = parent(path);
            if mode(above)? & GROUP_WRITES != 0 {
                fs::set_permissions(path, fs::Permissions::from_mode(mode(path)? | GROUP_WRITES))?;
            }
            Ok(())
        }
    }
}

const GROUP_WRITES: u32 = 0o020;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_directories_inherit_group_write_permission() {
        let directory = tempfile::tempdir().unwrap();
        let mode = |path: &str| fs::metadata(directory.path().join(path)).unwrap().permissions().mode() & 0o7777;
        for (mode_of_parent, expected) in [(0o755, 0), (0o2775, 0o2020)] {
            fs::set_permissions(directory.path(), fs::Permissions::from_mode(mode_of_parent)).unwrap();
            let path = format!("memory-{mode_of_parent:o}/n1");
            make_folders(&directory.path().join(&path)).unwrap();
            make_folders(&directory.path().join(&path)).unwrap();
            assert_eq!(mode(&path) & 0o2020, expected, "{mode_of_parent:o}");
            assert_eq!(mode(&format!("memory-{mode_of_parent:o}")) & 0o2020, expected, "{mode_of_parent:o}");
        }
        fs::write(directory.path().join("file"), "").unwrap();
        assert!(make_folders(&directory.path().join("file")).is_err());
        assert!(make_folders(&directory.path().join("file/below")).is_err());
    }

    #[test]
    fn tail_returns_the_last_complete_lines() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        assert_eq!(tail(&path, 8).unwrap(), None);
        fs::write(&path, "one\ntwo\nthree\n").unwrap();
        for (max_bytes, expected) in [(100, "one\ntwo\nthree\n"), (9, "three\n"), (6, ""), (0, "")] {
            assert_eq!(tail(&path, max_bytes).unwrap().as_deref(), Some(expected), "{max_bytes}");
        }
    }

    #[test]
    fn a_file_is_written_atomically_without_leftovers() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memory/n1/result.json");
        write_atomically(&path, b"one").unwrap();
        write_atomically(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_temporary_file_that_cannot_be_renamed_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("taken");
        fs::create_dir_all(path.join("full")).unwrap();
        assert!(write_atomically(&path, b"one").is_err());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
