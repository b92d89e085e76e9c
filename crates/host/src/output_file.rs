//! Reads files that a job wrote: the end of its output, and whole files of a limited size.
//!
//! A job may grow the file, or put a link or a pipe in its place: no link is followed below the given directory, only a plain
//! file is read, and no more of it than the limit.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    os::fd::OwnedFd,
    path::{Component, Path},
};

use rustix::{
    fs::{FileType, Mode, OFlags, fstat, openat},
    io::Errno,
};

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
    let file = match open_no_follow(directory, path) {
        Ok(file) => file,
        Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR | Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let plain = FileType::from_raw_mode(fstat(&file)?.st_mode) == FileType::RegularFile;
    Ok(plain.then(|| File::from(file)))
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

fn open_no_follow(directory: &Path, path: &Path) -> rustix::io::Result<OwnedFd> {
    let folder = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    // The directory itself is set by the operator and may be a link.
    let mut at = rustix::fs::open(directory, folder, Mode::empty())?;
    let mut parts = path.components().peekable();
    while let Some(part) = parts.next() {
        let Component::Normal(name) = part else { return Err(Errno::LOOP) };
        // Opening a pipe would block for ever; NONBLOCK makes it return.
        let file = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let flags = if parts.peek().is_some() { folder } else { file };
        at = openat(&at, name, flags | OFlags::NOFOLLOW, Mode::empty())?;
    }
    Ok(at)
}

#[cfg(test)]
mod tests {
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
        assert_eq!(tail(folder.path(), Path::new("output.txt"), 100).unwrap(), None);
    }
}
