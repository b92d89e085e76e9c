//! Reads files that a job wrote: the end of its output, and whole files of a limited size.
//!
//! A job may grow the file, or put a link, a pipe or a device in its place: no link is followed below the given directory, only a
//! plain file is opened ([`SharedDirectory`]), and no more of it is read than the limit.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

use rustix::io::Errno;

use crate::shared_directory::{SharedDirectory, SharedDirectoryError};

/// Returns the last `max_bytes` bytes of a file below a directory, from the start of a line. `None`: there is no such plain file.
///
/// # Errors
/// If the file cannot be read.
pub fn tail(directory: &Path, path: &Path, max_bytes: u64) -> io::Result<Option<String>> {
    open(directory, path)?.map(|file| tail_of(file, max_bytes)).transpose()
}

/// Returns a whole file below a directory. `None`: there is no such plain file, or it is longer than `max_bytes` bytes.
///
/// # Errors
/// If the file cannot be read.
pub fn read(directory: &Path, path: &Path, max_bytes: u64) -> io::Result<Option<Vec<u8>>> {
    let Some(file) = open(directory, path)? else { return Ok(None) };
    let mut bytes = Vec::new();
    file.take(max_bytes + 1).read_to_end(&mut bytes)?;
    Ok(Some(bytes).filter(|bytes| bytes.len() as u64 <= max_bytes))
}

/// Opens a plain file below a directory.
fn open(directory: &Path, path: &Path) -> io::Result<Option<File>> {
    match SharedDirectory::open(directory).and_then(|directory| directory.open_file(path)) {
        Err(SharedDirectoryError::WrongKind { .. } | SharedDirectoryError::Outside { .. }) => Ok(None),
        Err(SharedDirectoryError::Io { source, .. }) if is_absent(&source) => Ok(None),
        opened => Ok(opened?),
    }
}

/// Whether a name or a directory on the way is gone, or is no longer what it was a moment ago.
fn is_absent(error: &io::Error) -> bool {
    let code = error.raw_os_error().map(Errno::from_raw_os_error);
    code.is_some_and(|code| [Errno::NOENT, Errno::LOOP, Errno::NOTDIR].contains(&code))
}

/// Returns the last `max_bytes` bytes of an open file, from the start of a line.
///
/// # Errors
/// If the file cannot be read.
pub fn tail_of(mut file: File, max_bytes: u64) -> io::Result<String> {
    let skipped = file.metadata()?.len().saturating_sub(max_bytes);
    file.seek(SeekFrom::Start(skipped))?;
    let mut bytes = Vec::new();
    file.take(max_bytes).read_to_end(&mut bytes)?;
    if skipped > 0 {
        // The first line is cut off.
        let start = bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |newline| newline + 1);
        bytes.drain(..start);
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
        time::Duration,
    };

    use super::*;

    #[test]
    fn the_end_of_a_plain_file_is_read_and_no_link_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        std::fs::create_dir_all(root.join("runs/r1")).unwrap();
        std::fs::write(root.join("runs/r1/output.txt"), "one\ntwo\nthreeÿ\n").unwrap();
        std::fs::write(root.join("secret"), "key\n").unwrap();
        std::os::unix::fs::symlink(root.join("secret"), root.join("runs/link.txt")).unwrap();
        std::os::unix::fs::symlink(root, root.join("runs/r2")).unwrap();
        let read = |path: &str, most: u64| tail(root, Path::new(path), most).unwrap();
        assert_eq!(read("runs/r1/output.txt", 100).unwrap().lines().count(), 3);
        assert_eq!(read("runs/r1/output.txt", 12).unwrap().lines().next(), Some("threeÿ"), "from the start of a line");
        let whole = |most: u64| super::read(root, Path::new("runs/r1/output.txt"), most).unwrap();
        assert_eq!((whole(100).map(|bytes| bytes.len()), whole(5)), (Some(16), None), "a longer file is not cut");
        for path in ["runs/link.txt", "runs/r2/secret", "runs/missing", "runs/r1", "../secret", "runs/r1/output.txt/x"]
        {
            assert_eq!(read(path, 100), None, "{path}");
        }
    }

    #[test]
    fn a_pipe_in_place_of_the_file_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let made = std::process::Command::new("mkfifo").arg(folder.path().join("output.txt")).status().unwrap();
        assert!(made.success());
        // Who writes to a pipe notices that it is opened, like the driver of a device.
        let (opened, path) = (Arc::new(AtomicBool::new(false)), folder.path().join("output.txt"));
        let writer = {
            let (opened, path) = (Arc::clone(&opened), path.clone());
            std::thread::spawn(move || {
                let pipe = std::fs::OpenOptions::new().write(true).open(path).unwrap();
                opened.store(true, Ordering::SeqCst);
                drop(pipe);
            })
        };
        for _ in 0..100 {
            assert_eq!(tail(folder.path(), Path::new("output.txt"), 100).unwrap(), None);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!opened.load(Ordering::SeqCst), "it was opened");
        drop(File::open(path).unwrap());
        writer.join().unwrap();
    }
}
