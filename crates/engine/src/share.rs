//! The shared directory: jobs write logs and results to it, and the site reads the free-node list and the published
//! copy from it.
//!
//! Layout: `<data>/<test>/<node>/<test>_<node>_<epoch>.log`, a result document `.json` beside the log of the run's
//! first test, `<data>/metadata/` for published files, `<data>/rejected/` for rejected documents. Nodes write to the
//! directory and are not trusted: no link is followed on the way to a file, only plain files of active runs are opened,
//! and at most the maximum length of a document is read.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::fd::OwnedFd,
    path::{Component, Path, PathBuf},
};

use doctor_checks::{document::MAX_DOCUMENT_BYTES, job_file};
use doctor_core::{
    ids::{NodeName, TestId},
    run::Run,
    time::Timestamp,
};
use rustix::fs::{FileType, Mode, OFlags, fstat, openat};

use crate::rejection::Rejection;

/// An unusable share. The message includes what to do.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {}: {source}: {hint}", path.display())]
pub struct ShareError {
    operation: &'static str,
    path: PathBuf,
    hint: &'static str,
    source: io::Error,
}

impl ShareError {
    /// Whether only space is missing.
    pub fn is_full(&self) -> bool {
        matches!(self.source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }

    fn new(operation: &'static str, path: &Path, source: io::Error) -> Self {
        let hint = match source.kind() {
            io::ErrorKind::NotFound => "create the directory or set `data` in the configuration",
            io::ErrorKind::PermissionDenied => "grant this user write access",
            io::ErrorKind::ReadOnlyFilesystem => "mount it writable or set `data` to another directory",
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free some space; nothing was lost",
            _ => "check the file system",
        };
        Self { operation, path: path.to_owned(), hint, source }
    }
}

#[derive(Debug, Clone)]
pub struct Share {
    root: PathBuf,
}

/// What was found at the path of a result.
#[derive(Debug)]
pub enum ResultFile {
    Missing,
    Document(Vec<u8>),
    Rejected(Rejection),
}

impl Share {
    /// Opens the shared directory. It must exist: creating it would hide a missing mount.
    ///
    /// # Errors
    /// If it does not exist or is not a directory.
    pub fn open(root: &Path) -> Result<Self, ShareError> {
        let share = Self { root: root.to_owned() };
        share.check().map(|()| share)
    }

    /// Checks that the directory (still) exists: a mount may disappear while the controller runs.
    ///
    /// # Errors
    /// If it does not exist or is not a directory.
    pub fn check(&self) -> Result<(), ShareError> {
        let fail = |error| ShareError::new("opening the shared directory", &self.root, error);
        match fs::metadata(&self.root).map_err(fail)?.is_dir() {
            true => Ok(()),
            false => Err(fail(io::ErrorKind::NotADirectory.into())),
        }
    }

    /// Checks that files can be created in the directory. Leaves nothing behind.
    ///
    /// # Errors
    /// If that fails, unless only space is missing: [`ShareError::is_full`] tells.
    pub fn check_writable(&self) -> Result<(), ShareError> {
        let fail = |error: io::Error| ShareError::new("writing to", &self.root, error);
        // A file without a name is gone when it is closed. Not every file system has such files, NFS for one.
        let nameless = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        if rustix::fs::open(&self.root, nameless, Mode::from_raw_mode(0o600)).is_ok() {
            return Ok(());
        }
        let path = self.root.join(format!(".doctor-trial-{}", std::process::id()));
        File::options().write(true).create_new(true).open(&path).map_err(fail)?;
        fs::remove_file(&path).map_err(fail)
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path of the log of one test of a run on one node, relative to the shared directory.
    pub fn log_path(test: &TestId, node: &NodeName, planned: Timestamp) -> PathBuf {
        job_file::log_path(test, node, planned)
    }

    /// Returns the path of the result document of a run on one node, relative to the shared directory.
    pub fn document_path(run: &Run, node: &NodeName) -> PathBuf {
        Self::log_path(run.tests.first(), node, run.planned).with_extension("json")
    }

    /// Reads the result of a run on one node, if it exists.
    ///
    /// # Errors
    /// If the share itself cannot be read; a bad document is not an error but [`ResultFile::Rejected`].
    pub fn read(&self, path: &Path) -> Result<ResultFile, ShareError> {
        let fail = |error: io::Error| ShareError::new("reading", &self.root.join(path), error);
        let file = match self.open_no_follow(path) {
            Ok(file) => file,
            Err(rustix::io::Errno::NOENT) => return Ok(ResultFile::Missing),
            // A link in place of a directory or file.
            Err(rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR) => {
                return Ok(ResultFile::Rejected(Rejection::NotRegularFile));
            }
            Err(error) => return Err(fail(error.into())),
        };
        let stat = fstat(&file).map_err(|error| fail(error.into()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(ResultFile::Rejected(Rejection::NotRegularFile));
        }
        let size = u64::try_from(stat.st_size).unwrap_or(u64::MAX);
        if size > MAX_DOCUMENT_BYTES {
            let error = doctor_checks::document::DocumentError::TooLong { bytes: size };
            return Ok(ResultFile::Rejected(Rejection::Document(error)));
        }
        let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or(0));
        File::from(file).take(MAX_DOCUMENT_BYTES + 1).read_to_end(&mut bytes).map_err(fail)?;
        Ok(ResultFile::Document(bytes))
    }

    /// Opens a log below the shared directory. `None`: there is no such plain file.
    ///
    /// # Errors
    /// If the share itself cannot be read.
    pub fn open_log(&self, path: &Path) -> Result<Option<File>, ShareError> {
        use rustix::io::Errno;
        let fail = |error: Errno| ShareError::new("reading", &self.root.join(path), error.into());
        let file = match self.open_no_follow(path) {
            Ok(file) => file,
            Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => return Ok(None),
            Err(error) => return Err(fail(error)),
        };
        let plain = FileType::from_raw_mode(fstat(&file).map_err(fail)?.st_mode) == FileType::RegularFile;
        Ok(plain.then(|| File::from(file)))
    }

    /// Opens component by component without following any link.
    fn open_no_follow(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let dir = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
        // The root is set by the operator and may be a link.
        let mut at = rustix::fs::open(&self.root, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let mut parts = path.components().peekable();
        while let Some(part) = parts.next() {
            let Component::Normal(name) = part else { return Err(rustix::io::Errno::LOOP) };
            // Opening a pipe would block for ever; NONBLOCK makes it return.
            let file = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            at = openat(&at, name, if parts.peek().is_some() { dir } else { file }, Mode::empty())?;
        }
        Ok(at)
    }

    /// Moves a rejected document to `rejected/`, with the reason beside it.
    ///
    /// # Errors
    /// If `rejected/` cannot be written.
    pub fn reject_file(&self, path: &Path, why: &Rejection, at: Timestamp) -> Result<(), ShareError> {
        let name = path.file_name().map_or_else(|| "document".into(), |name| name.to_string_lossy().into_owned());
        let to = self.rejected_path(&format!("{}_{name}", at.millis()), why)?;
        let from = self.root.join(path);
        match fs::rename(&from, &to) {
            // The file is already gone; the reason is kept all the same.
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(ShareError::new("rejecting", &from, error)),
            _ => Ok(()),
        }
    }

    /// Saves the bytes of a rejected document that came with a job's output.
    ///
    /// # Errors
    /// If `rejected/` cannot be written.
    pub fn reject_bytes(&self, name: &str, bytes: &[u8], why: &Rejection, at: Timestamp) -> Result<(), ShareError> {
        /// Enough to recognise it.
        const KEPT: usize = 64 << 10;
        let to = self.rejected_path(&format!("{}_{name}.json", at.millis()), why)?;
        fs::write(&to, &bytes[..bytes.len().min(KEPT)]).map_err(|e| ShareError::new("rejecting", &to, e))
    }

    fn rejected_path(&self, name: &str, why: &Rejection) -> Result<PathBuf, ShareError> {
        let dir = self.root.join("rejected");
        fs::create_dir_all(&dir).map_err(|e| ShareError::new("making", &dir, e))?;
        let to = dir.join(name);
        let reason = dir.join(format!("{name}.reason"));
        fs::write(&reason, format!("{why}\n")).map_err(|e| ShareError::new("writing", &reason, e))?;
        Ok(to)
    }

    /// Writes a file of `metadata/` atomically: readers see the old or the new content, never a part.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn publish(&self, name: &str, content: &[u8]) -> Result<(), ShareError> {
        let path = self.metadata_path(name)?;
        write_atomically(&path, content).map_err(|e| ShareError::new("writing", &path, e))
    }

    /// Returns the path of a file of `metadata/`, and creates the directory.
    ///
    /// # Errors
    /// If the directory cannot be created.
    pub fn metadata_path(&self, name: &str) -> Result<PathBuf, ShareError> {
        let dir = self.root.join("metadata");
        fs::create_dir_all(&dir).map_err(|e| ShareError::new("making", &dir, e))?;
        Ok(dir.join(name))
    }

    /// Saves the log of a run on one node that came with a job's output: each line in the log of its test, other lines
    /// in the log of the first test.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save_log(&self, run: &Run, node: &NodeName, text: &str) -> Result<(), ShareError> {
        let mut logs: Vec<(&TestId, String)> = run.tests.iter().map(|test| (test, String::new())).collect();
        for line in text.split_inclusive('\n') {
            // A line is `TIME ABOUT: TEXT`.
            let about = line.split_once(' ').and_then(|(_, rest)| rest.split_once(": ")).map_or("", |(about, _)| about);
            let index = logs.iter().position(|(test, _)| test.as_str() == about).unwrap_or(0);
            logs[index].1.push_str(line);
        }
        for (test, text) in logs.iter().filter(|(_, text)| !text.is_empty()) {
            let path = self.root.join(Self::log_path(test, node, run.planned));
            let folder = path.parent().unwrap_or(&self.root);
            fs::create_dir_all(folder).map_err(|e| ShareError::new("making", folder, e))?;
            write_atomically(&path, text.as_bytes()).map_err(|e| ShareError::new("writing", &path, e))?;
        }
        Ok(())
    }

    /// Removes an expired log and its document.
    pub fn remove(&self, test: &TestId, node: &NodeName, planned: Timestamp) {
        let log = self.root.join(Self::log_path(test, node, planned));
        // A missing file is not an error here.
        let _ = fs::remove_file(log.with_extension("json"));
        let _ = fs::remove_file(log);
    }
}

/// Writes to a temporary name in the same directory, syncs, then renames.
pub(crate) fn write_atomically(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let written = (|| {
        let mut file = File::create(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}
