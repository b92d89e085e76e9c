//! The files of the shared directory, through calls that block as long as its file server does not answer.
//!
//! All access goes through [`SharedDirectory`]: nodes write here, so no link is followed, only regular files are read, at most
//! as much as the limit, and files are written under random names and renamed.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use doctor_backend::share_worker::{Noting, Progress};
use doctor_checks::{
    document::{DocumentError, MAX_DOCUMENT_BYTES},
    job_file,
};
use doctor_core::{
    ids::{NodeName, TestId},
    run::Run,
    time::{Span, Timestamp},
};
use doctor_host::shared_directory::{Entry, EntryKind, SharedDirectory, SharedDirectoryError, Written};

use super::{error::ShareError, rejected};
use crate::rejection::Rejection;

/// Published files: the free-node list, the copy of the history.
const METADATA: &str = "metadata";
/// Support bundles.
const HANDOFF: &str = "handoff";
/// Scheduled reports.
const REPORTS: &str = "reports";
/// The folders in which the controller alone writes. The others are those of nodes.
const OWN_FOLDERS: [&str; 4] = [METADATA, HANDOFF, REPORTS, rejected::FOLDER];
/// A temporary file of this age belongs to no controller that lives.
const LEFT_AFTER: Span = Span::days(1);

/// What was found at the path of a result.
#[derive(Debug)]
pub enum ResultFile {
    Missing,
    Document {
        bytes: Vec<u8>,
        entry: Entry,
    },
    Rejected {
        why: Rejection,
        entry: Entry,
    },
    /// It is the one that the caller has rejected already.
    RejectedBefore,
}

/// A part of a log.
#[derive(Debug)]
pub struct LogPart {
    pub bytes: Vec<u8>,
    /// Where the part begins.
    pub start: u64,
}

/// Which part of a log to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogRange {
    /// From this position, at most this many bytes.
    From(u64, u64),
    /// At most this many bytes before its end.
    Last(u64),
}

/// The files below the root of the shared directory.
#[derive(Debug, Clone)]
pub struct ShareFiles {
    root: PathBuf,
    /// Where the thread that uses this notes its calls.
    progress: Progress,
    /// The owner of the last file that this process wrote: a file server may change it. [`NO_OWNER`]: none was written yet.
    owner: Arc<AtomicU32>,
    /// What a node or a user did to files of ours, and was undone.
    remarks: Arc<Mutex<Vec<String>>>,
}

/// Remarks kept until a cycle takes them.
const MAX_REMARKS: usize = 100;

/// The user id that means no user.
const NO_OWNER: u32 = u32::MAX;

type Result<T> = std::result::Result<T, ShareError>;

impl ShareFiles {
    pub(super) fn at(root: &Path) -> Self {
        let owner = Arc::new(AtomicU32::new(NO_OWNER));
        Self { root: root.to_owned(), progress: Progress::default(), owner, remarks: Arc::default() }
    }

    /// Returns the same files, with calls noted here.
    pub(super) fn noting(mut self, progress: Progress) -> Self {
        self.progress = progress;
        self
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Checks that the directory (still) exists: a mount may disappear while the controller runs.
    ///
    /// # Errors
    /// If it does not exist, is not a directory or cannot be read.
    pub fn check(&self) -> Result<()> {
        self.call("opening it", |_| Ok(()))
    }

    /// Checks that files can be created in the directory. Leaves nothing behind.
    ///
    /// # Errors
    /// If that fails; [`ShareError::is_full`] tells whether only space is missing.
    pub fn check_writable(&self) -> Result<()> {
        self.call("writing to it", SharedDirectory::check_writable)
    }

    /// Reads the result of a run on one node, if it exists and is not the one that was rejected before.
    ///
    /// # Errors
    /// If the share itself cannot be read, or a directory on the way is none; a bad document is not an error but
    /// [`ResultFile::Rejected`].
    pub fn read_result(&self, path: &Path, rejected_before: Option<&Entry>) -> Result<ResultFile> {
        let _call = self.progress.begin("reading results");
        let root = self.open()?;
        let is_known = |entry: &Entry| rejected_before.is_some_and(|before| before.is_same_file(entry));
        let reject = |why, entry| match is_known(&entry) {
            true => Ok(ResultFile::RejectedBefore),
            false => Ok(ResultFile::Rejected { why, entry }),
        };
        let (file, entry) = match root.open_entry(path) {
            Ok(Some(opened)) => opened,
            Ok(None) => return Ok(ResultFile::Missing),
            // What has the name of the document is rejected like a bad document; what is in place of a directory cannot be.
            Err(SharedDirectoryError::WrongKind { path: at, .. }) if at == self.root.join(path) => {
                return match root.entry(path)?.filter(|entry| entry.kind != EntryKind::File) {
                    Some(entry) => reject(Rejection::NotRegularFile, entry),
                    // It was replaced meanwhile, and is read the next time.
                    None => Ok(ResultFile::Missing),
                };
            }
            Err(error) => return Err(error.into()),
        };
        if is_known(&entry) {
            return Ok(ResultFile::RejectedBefore);
        }
        let too_long = |bytes| reject(Rejection::Document(DocumentError::TooLong { bytes }), entry);
        if entry.bytes > MAX_DOCUMENT_BYTES {
            return too_long(entry.bytes);
        }
        // It may grow while it is read.
        let bytes = self.read_to_end(path, file, MAX_DOCUMENT_BYTES + 1)?;
        if bytes.len() as u64 > MAX_DOCUMENT_BYTES {
            too_long(bytes.len() as u64)
        } else {
            Ok(ResultFile::Document { bytes, entry })
        }
    }

    /// Opens a log below the shared directory. `None`: it does not exist.
    ///
    /// # Errors
    /// If it is no file, or the share itself cannot be read.
    pub fn open_log(&self, path: &Path) -> Result<Option<File>> {
        let _call = self.progress.begin("reading a log");
        Ok(self.open()?.open_file(path)?)
    }

    /// Reads a part of a log. `None`: it does not exist.
    ///
    /// # Errors
    /// If it is no file, or the share itself cannot be read.
    pub fn read_log(&self, path: &Path, range: LogRange) -> Result<Option<LogPart>> {
        let _call = self.progress.begin("reading a log");
        let Some((mut file, entry)) = self.open()?.open_entry(path)? else { return Ok(None) };
        let fail = |source| ShareError::File { operation: "reading", path: self.root.join(path), source };
        let (start, most) = match range {
            LogRange::From(start, most) => (start, most),
            LogRange::Last(most) => (entry.bytes.saturating_sub(most), most),
        };
        file.seek(SeekFrom::Start(start)).map_err(fail)?;
        Ok(Some(LogPart { bytes: self.read_to_end(path, file, most)?, start }))
    }

    fn read_to_end(&self, path: &Path, file: File, most: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = Noting { reader: file.take(most), progress: &self.progress }.read_to_end(&mut bytes);
        read.map_err(|source| ShareError::File { operation: "reading", path: self.root.join(path), source })?;
        Ok(bytes)
    }

    /// Moves a rejected document to `rejected/`, with the reason beside it. What is no file is removed: a link in `rejected/`
    /// would wait for an operator who opens it. A document that has replaced the rejected one since stays.
    ///
    /// # Errors
    /// If that cannot be done.
    pub fn reject_file(&self, path: &Path, rejected: &Entry, why: &Rejection, at: Timestamp) -> Result<()> {
        self.call("rejecting a result", |root| {
            let Some(name) = path.file_name() else { return Ok(()) };
            let kept_name = rejected::name(name, at);
            let kept = self.keep_reason(root, &kept_name, why)?;
            let folder = path.parent().map(|parent| root.subdirectory(parent)).transpose()?.flatten();
            // The file is already gone; the reason is kept all the same.
            let Some(folder) = folder else { return Ok(()) };
            let Some(entry) = folder.entry(Path::new(name))?.filter(|entry| entry.is_same_file(rejected)) else {
                return Ok(());
            };
            match (entry.kind, entry.bytes) {
                (EntryKind::File, bytes) if bytes <= MAX_DOCUMENT_BYTES => {
                    match folder.rename(name, &kept, &kept_name) {
                        Err(error) if is_other_file_system(&error) => {
                            self.copy_and_remove(&folder, name, &kept, &kept_name, MAX_DOCUMENT_BYTES)
                        }
                        renamed => renamed.map(drop),
                    }
                }
                // Its beginning is enough to recognise it.
                (EntryKind::File, _) => self.copy_and_remove(&folder, name, &kept, &kept_name, rejected::KEPT_BYTES),
                (EntryKind::Directory, _) => match folder.rename(name, &kept, &kept_name) {
                    Err(error) if is_other_file_system(&error) => {
                        folder.remove_tree(name, &self.progress.while_removing()).map(drop)
                    }
                    renamed => renamed.map(drop),
                },
                _ => folder.remove(name).map(drop),
            }
        })
    }

    /// Copies the beginning of a file to `rejected/`, and removes it.
    fn copy_and_remove(
        &self,
        folder: &SharedDirectory,
        name: &OsStr,
        kept: &SharedDirectory,
        kept_name: &OsStr,
        most: u64,
    ) -> std::result::Result<(), SharedDirectoryError> {
        if let Some(file) = folder.open_file(Path::new(name))? {
            self.replace(kept, kept_name, &mut file.take(most))?;
        }
        folder.remove(name).map(drop)
    }

    /// Saves the bytes of a rejected document that came with a job's output.
    ///
    /// # Errors
    /// If `rejected/` cannot be written.
    pub fn reject_bytes(&self, name: &str, bytes: &[u8], why: &Rejection, at: Timestamp) -> Result<()> {
        self.call("rejecting a result", |root| {
            let name = rejected::name(OsStr::new(&format!("{name}.json")), at);
            let kept = self.keep_reason(root, &name, why)?;
            self.replace(&kept, &name, &mut bytes.take(rejected::KEPT_BYTES)).map(drop)
        })
    }

    /// Writes the reason for a rejection, and returns the folder for the document.
    fn keep_reason(
        &self,
        root: &SharedDirectory,
        name: &OsStr,
        why: &Rejection,
    ) -> std::result::Result<SharedDirectory, SharedDirectoryError> {
        let folder = self.make_folder(root, Path::new(rejected::FOLDER))?;
        let (name, text) = rejected::reason(name, why);
        self.replace(&folder, &name, &mut text.as_bytes())?;
        Ok(folder)
    }

    /// Writes a file of `metadata/` atomically: readers see the old or the new content, never a part.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn publish(&self, name: &str, content: &mut dyn Read) -> Result<Written> {
        self.write(Path::new(METADATA), OsStr::new(name), "publishing", content)
    }

    /// Returns what has the name of a file of `metadata/`.
    ///
    /// # Errors
    /// If the share cannot be read.
    pub fn published(&self, name: &str) -> Result<Option<Entry>> {
        self.own_entry(METADATA, name, "publishing")
    }

    /// Returns the beginning of a file of `metadata/`. `None`: it does not exist.
    ///
    /// # Errors
    /// If it is no file, or the share cannot be read.
    pub fn published_start(&self, name: &str, max_bytes: u64) -> Result<Option<Vec<u8>>> {
        self.call("publishing", |root| root.read(&Path::new(METADATA).join(name), max_bytes))
    }

    /// Renames a file of `metadata/`. Returns `false`, and does nothing, if the new name is taken.
    ///
    /// # Errors
    /// If the share cannot be written.
    pub fn move_published_aside(&self, name: &str, aside: &str) -> Result<bool> {
        self.call("publishing", |root| {
            let Some(metadata) = root.subdirectory(Path::new(METADATA))? else { return Ok(true) };
            if metadata.entry(Path::new(aside))?.is_some() {
                return Ok(false);
            }
            metadata.rename(OsStr::new(name), &metadata, OsStr::new(aside)).map(|_| true)
        })
    }

    /// Saves the log of a run on one node that came with a job's output: each line in the log of its test, other lines
    /// in the log of the first test.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save_log(&self, run: &Run, node: &NodeName, text: &str) -> Result<()> {
        let mut logs: Vec<(&TestId, String)> = run.tests.iter().map(|test| (test, String::new())).collect();
        for line in text.split_inclusive('\n') {
            // A line is `TIME ABOUT: TEXT`.
            let about = line.split_once(' ').and_then(|(_, rest)| rest.split_once(": ")).map_or("", |(about, _)| about);
            let index = logs.iter().position(|(test, _)| test.as_str() == about).unwrap_or(0);
            logs[index].1.push_str(line);
        }
        for (test, text) in logs.iter().filter(|(_, text)| !text.is_empty()) {
            let path = job_file::log_path(test, node, run.planned);
            if let (Some(folder), Some(name)) = (path.parent(), path.file_name()) {
                self.write(folder, name, "keeping a log", &mut text.as_bytes())?;
            }
        }
        Ok(())
    }

    /// Removes an expired log and its document.
    ///
    /// # Errors
    /// If the share cannot be read. What cannot be removed for another reason stays.
    pub fn remove_log(&self, test: &TestId, node: &NodeName, planned: Timestamp) -> Result<()> {
        let log = job_file::log_path(test, node, planned);
        let outcome = self.call("removing expired logs", |root| {
            let Some(folder) = log.parent().map(|folder| root.subdirectory(folder)).transpose()?.flatten() else {
                return Ok(());
            };
            for path in [log.with_extension("json"), log.clone()] {
                if let Some(name) = path.file_name() {
                    folder.remove(name)?;
                }
            }
            Ok(())
        });
        outcome.or_else(|error| if error.is_outage() { Err(error) } else { Ok(()) })
    }

    /// Saves a support bundle.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save_bundle(&self, name: &str, bytes: &[u8]) -> Result<PathBuf> {
        self.write(Path::new(HANDOFF), OsStr::new(name), "saving evidence", &mut &*bytes)?;
        Ok(self.root.join(HANDOFF).join(name))
    }

    /// Returns whether this controller, or the one before, saved a support bundle of this name. A file that a node put there does
    /// not count: it would keep the evidence from being saved.
    ///
    /// # Errors
    /// If the share cannot be read.
    pub fn has_bundle(&self, name: &str) -> Result<bool> {
        let entry = self.own_entry(HANDOFF, name, "saving evidence")?;
        let ours = [rustix::process::geteuid().as_raw(), self.owner.load(Ordering::Relaxed)];
        Ok(entry.is_some_and(|entry| entry.kind == EntryKind::File && entry.bytes > 0 && ours.contains(&entry.owner)))
    }

    /// Returns whether there is a scheduled report of this name.
    ///
    /// # Errors
    /// If the share cannot be read.
    pub fn has_report(&self, name: &str) -> Result<bool> {
        let entry = self.own_entry(REPORTS, name, "writing reports")?;
        Ok(entry.is_some_and(|entry| entry.kind == EntryKind::File))
    }

    /// Saves a scheduled report.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save_report(&self, name: &str, text: &str) -> Result<()> {
        self.write(Path::new(REPORTS), OsStr::new(name), "writing reports", &mut text.as_bytes()).map(drop)
    }

    /// Removes the support bundles whose names these are.
    ///
    /// # Errors
    /// If the share cannot be read.
    pub fn remove_bundles(&self, is_expired: impl Fn(&str) -> bool) -> Result<()> {
        self.call("removing expired bundles", |root| {
            let Some(folder) = root.subdirectory(Path::new(HANDOFF))? else { return Ok(()) };
            let names: Vec<OsString> = folder.names(&self.progress.while_listing())?;
            let go_on = self.progress.while_removing();
            for name in names.iter().filter(|name| name.to_str().is_some_and(&is_expired)) {
                if !go_on() {
                    break;
                }
                // Tried again the next time.
                let _kept = folder.remove_tree(name, &go_on);
            }
            Ok(())
        })
    }

    /// Limits `rejected/`, and removes temporary files that a killed controller left.
    ///
    /// # Errors
    /// With the first error, after everything was tried.
    pub fn prune(&self, now: Timestamp) -> Result<()> {
        self.call("removing rejected results", |root| {
            let mut outcome = rejected::prune(root, now, &self.progress);
            for folder in OWN_FOLDERS {
                outcome = outcome.and(self.remove_left_temporaries(root, Path::new(folder), now));
            }
            outcome
        })
    }

    fn remove_left_temporaries(
        &self,
        root: &SharedDirectory,
        folder: &Path,
        now: Timestamp,
    ) -> std::result::Result<(), SharedDirectoryError> {
        if let Some(folder) = root.subdirectory(folder)? {
            let names = folder.names(&self.progress.while_listing())?;
            folder.remove_left_temporaries(&names, now.minus(LEFT_AFTER).secs(), &self.progress.while_removing());
        }
        Ok(())
    }

    /// Writes a file of a directory, which is created if it is missing.
    fn write(&self, folder: &Path, name: &OsStr, what: &'static str, content: &mut dyn Read) -> Result<Written> {
        self.call(what, |root| {
            let folder = self.make_folder(root, folder)?;
            let written = self.replace(&folder, name, content)?;
            self.owner.store(written.entry.owner, Ordering::Relaxed);
            Ok(written)
        })
    }

    /// Opens a folder to write in, and creates it if it is missing. What a node put in place of a folder of the controller's own is
    /// moved aside: it would stop repairs, which need their evidence saved.
    fn make_folder(
        &self,
        root: &SharedDirectory,
        folder: &Path,
    ) -> std::result::Result<SharedDirectory, SharedDirectoryError> {
        if !OWN_FOLDERS.iter().any(|own| folder == Path::new(own)) {
            return root.make_subdirectory(folder);
        }
        let (folder, moved) = root.make_own_subdirectory(folder)?;
        moved.iter().for_each(|moved| self.remark(moved.to_string()));
        Ok(folder)
    }

    fn replace(
        &self,
        folder: &SharedDirectory,
        name: &OsStr,
        content: &mut dyn Read,
    ) -> std::result::Result<Written, SharedDirectoryError> {
        let written = folder.replace(name, &mut Noting { reader: content, progress: &self.progress })?;
        if let Some(replaced) = written.replaced {
            let path = folder.path().join(name);
            self.remark(format!(
                "{} was {replaced} and has been replaced by a file: find out which node or user made it",
                path.display()
            ));
        }
        written.moved_aside.iter().for_each(|moved| self.remark(moved.to_string()));
        Ok(written)
    }

    /// Returns what has a name in a folder of the controller's own. What is in place of the folder has nothing in it: the next write
    /// moves it aside.
    fn own_entry(&self, folder: &str, name: &str, what: &'static str) -> Result<Option<Entry>> {
        match self.call(what, |root| root.entry(&Path::new(folder).join(name))) {
            Err(error) if error.is_wrong_kind() => Ok(None),
            found => found,
        }
    }

    /// Runs one call on the open root.
    fn call<T>(
        &self,
        what: &'static str,
        body: impl FnOnce(&SharedDirectory) -> std::result::Result<T, SharedDirectoryError>,
    ) -> Result<T> {
        let _call = self.progress.begin(what);
        Ok(body(&self.open()?)?)
    }

    fn remark(&self, text: String) {
        let mut remarks = self.remarks.lock().unwrap_or_else(PoisonError::into_inner);
        if remarks.len() < MAX_REMARKS {
            remarks.push(text);
        }
    }

    /// Returns what a node or a user did to files of ours, and was undone.
    pub(super) fn take_remarks(&self) -> Vec<String> {
        std::mem::take(&mut *self.remarks.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn open(&self) -> Result<SharedDirectory> {
        Ok(SharedDirectory::open(&self.root)?)
    }
}

/// Whether a rename failed because the two directories are on different file systems: a node's folder may be a mount of its own.
fn is_other_file_system(error: &SharedDirectoryError) -> bool {
    matches!(error, SharedDirectoryError::Io { source, .. } if source.kind() == io::ErrorKind::CrossesDevices)
}
