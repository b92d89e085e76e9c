//! Puts a file in place whole: written beside its name, made durable, renamed.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

use super::parent;

pub(crate) fn put(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let directory = parent(path);
    fs::create_dir_all(directory)?;
    let name = path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "it names no file"))?;
    let temporary = directory.join(format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id()));
    // Left over from a job of the same number that was killed. What is not there need not go.
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
    // The new name itself must survive a crash. Some network file systems cannot do this; then their server sees to it.
    let _durable = File::open(directory).and_then(|directory| directory.sync_all());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_appears_whole_and_leaves_nothing_beside_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memory/n1/result.json");
        put(&path, b"one").unwrap();
        put(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn what_cannot_be_put_in_place_is_tidied_away() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("taken");
        fs::create_dir_all(path.join("full")).unwrap();
        assert!(put(&path, b"one").is_err());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
