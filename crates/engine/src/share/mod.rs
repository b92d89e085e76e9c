//! The shared directory: jobs write logs and results to it, and the site reads the free-node list and the published
//! copy from it.
//!
//! Layout: `<data>/<test>/<node>/<test>_<node>_<epoch>.log`, a result document `.json` beside the log of the run's
//! first test, `<data>/metadata/` for published files, `<data>/rejected/` for rejected documents, `<data>/handoff/` for support
//! bundles.
//!
//! Nodes write to the directory and are not trusted, and its file server may stop answering. Two rules follow, and every access
//! keeps both. [`ShareFiles`] opens everything below a handle of the root, follows no link, reads only regular files, and writes
//! under random names. [`Share`] has two threads, one that reads and one that writes, on which the control loop has its work
//! done with a limit: a call that hangs blocks its thread and nothing else, no further thread is started beside it, the cycle's
//! report names the directory and since when it does not answer, and what waits is done when it answers again. Results wait on
//! the share meanwhile, and no run is ended for want of a result that could not be looked for.

mod error;
mod files;
mod rejected;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use doctor_backend::share_worker::{NotDone, Progress, ShareWorker};
use doctor_checks::job_file;
use doctor_core::{
    ids::{NodeName, TestId},
    run::Run,
    time::Timestamp,
};
use doctor_host::shared_directory::Entry;
pub use error::ShareError;
pub use files::{LogPart, LogRange, ResultFile, ShareFiles};

/// How long the file system may take for one answer. A healthy file server takes milliseconds, a busy one a second; a client
/// that waits for a dead one waits for minutes or for ever.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a caller waits for one answer behind other work: longer than [`PATIENCE`], so that a file server that hangs is
/// reported as such.
const ANSWER_LIMIT: Duration = Duration::from_secs(15);
/// How long one cycle reads results. What is left is read in the next cycle, which begins there.
const READ_LIMIT: Duration = Duration::from_secs(20);
/// Documents read ahead of the one that is classified: at most this many, each up to the greatest length, are in memory.
const READ_AHEAD: usize = 4;
/// Bytes of logs and documents that wait to be written. More is offered again in a later cycle.
const MAX_WAITING_BYTES: usize = 64 << 20;
/// Problems kept until a cycle takes them.
const MAX_PROBLEMS: usize = 100;

/// The shared directory and its threads. Clones share both.
#[derive(Debug, Clone)]
pub struct Share {
    files: ShareFiles,
    reader: Arc<ShareThread>,
    writer: Arc<ShareThread>,
    problems: Arc<Mutex<Vec<String>>>,
    waiting_bytes: Arc<AtomicUsize>,
}

/// How often a thread looks whether the call that hangs on the other one has returned.
const HELD_BACK: Duration = Duration::from_millis(100);

/// A thread, and the files as it uses them.
#[derive(Debug)]
struct ShareThread {
    worker: ShareWorker,
    files: ShareFiles,
    /// The calls of the other thread.
    beside: Progress,
}

impl ShareThread {
    fn new(name: &'static str, files: &ShareFiles, progress: &Progress, beside: &Progress) -> Arc<Self> {
        let files = files.clone().noting(progress.clone());
        Arc::new(Self { worker: ShareWorker::new(name, PATIENCE, progress.clone()), files, beside: beside.clone() })
    }

    /// Returns the work with its files. While a call hangs on the other thread, it does not begin: one is enough.
    fn held_back<T: 'static>(
        &self,
        work: impl FnOnce(&ShareFiles) -> T + Send + 'static,
    ) -> impl FnOnce() -> T + Send + 'static {
        let (files, beside) = (self.files.clone(), self.beside.clone());
        move || {
            while beside.stall(PATIENCE).is_some() {
                std::thread::sleep(HELD_BACK);
            }
            work(&files)
        }
    }

    fn ask<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce(&ShareFiles) -> T + Send + 'static,
    ) -> Result<T, NotDone> {
        self.worker.ask(limit, self.held_back(work))
    }
}

impl Share {
    /// Returns the shared directory without touching it.
    pub fn at(root: &Path) -> Self {
        let files = ShareFiles::at(root);
        let (reading, writing) = (Progress::default(), Progress::default());
        Self {
            reader: ShareThread::new("doctor-share-r", &files, &reading, &writing),
            writer: ShareThread::new("doctor-share-w", &files, &writing, &reading),
            files,
            problems: Arc::default(),
            waiting_bytes: Arc::default(),
        }
    }

    /// Opens the shared directory. It must exist: creating it would hide a missing mount.
    ///
    /// # Errors
    /// If it does not exist, is not a directory or does not answer.
    pub fn open(root: &Path) -> Result<Self, ShareError> {
        let share = Self::at(root);
        share.check().map(|()| share)
    }

    /// Opens the shared directory for a command. All commands that this process runs use the same two threads for it: a directory
    /// that does not answer holds no more of them, however often it is asked for.
    ///
    /// # Errors
    /// If it does not exist, is not a directory or does not answer.
    pub fn open_for_command(root: &Path) -> Result<Self, ShareError> {
        static OPENED: Mutex<BTreeMap<PathBuf, Share>> = Mutex::new(BTreeMap::new());
        let share = {
            let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
            opened.entry(root.to_owned()).or_insert_with(|| Self::at(root)).clone()
        };
        share.check().map(|()| share)
    }

    pub fn root(&self) -> &Path {
        self.files.root()
    }

    /// The files, for callers that may wait for the file server.
    pub const fn files(&self) -> &ShareFiles {
        &self.files
    }

    /// Returns the path of the log of one test of a run on one node, relative to the shared directory.
    pub fn log_path(test: &TestId, node: &NodeName, planned: Timestamp) -> PathBuf {
        job_file::log_path(test, node, planned)
    }

    /// Returns the path of the result document of a run on one node, relative to the shared directory.
    pub fn document_path(run: &Run, node: &NodeName) -> PathBuf {
        Self::log_path(run.tests.first(), node, run.planned).with_extension("json")
    }

    /// Checks that the directory (still) exists and answers.
    ///
    /// # Errors
    /// If not.
    pub fn check(&self) -> Result<(), ShareError> {
        self.read("opening it", ShareFiles::check)?
    }

    /// Checks that files can be created in the directory. Leaves nothing behind.
    ///
    /// # Errors
    /// If not; [`ShareError::is_full`] tells whether only space is missing.
    pub fn check_writable(&self) -> Result<(), ShareError> {
        self.read("writing to it", ShareFiles::check_writable)?
    }

    /// Reads on the reading thread.
    ///
    /// # Errors
    /// If the directory does not answer within a limit.
    pub fn read<T: Send + 'static>(
        &self,
        doing: &'static str,
        work: impl FnOnce(&ShareFiles) -> T + Send + 'static,
    ) -> Result<T, ShareError> {
        self.not_stalled()?;
        self.reader.ask(ANSWER_LIMIT, work).map_err(|not_done| self.error(&not_done, doing))
    }

    /// Reads the results at these paths, and takes each as it comes, by its index. Beside a path is the file that was rejected there
    /// before, which is not read again.
    ///
    /// # Errors
    /// If the directory does not answer, or not all within the limit of a cycle.
    pub fn read_results(
        &self,
        paths: Vec<(PathBuf, Option<Entry>)>,
        mut take: impl FnMut(usize, Result<ResultFile, ShareError>),
    ) -> Result<(), ShareError> {
        if paths.is_empty() {
            return Ok(());
        }
        self.not_stalled()?;
        let files = self.reader.files.clone();
        let read = move |send: &std::sync::mpsc::SyncSender<_>| {
            for (index, (path, rejected_before)) in paths.iter().enumerate() {
                if send.send((index, files.read_result(path, rejected_before.as_ref()))).is_err() {
                    return;
                }
            }
        };
        let done = self.reader.worker.stream(READ_LIMIT, READ_AHEAD, read, |(index, result)| take(index, result));
        done.map_err(|not_done| self.error(&not_done, "reading results"))
    }

    /// Has work done on the writing thread and waits for its result.
    ///
    /// # Errors
    /// If the directory does not answer within a limit.
    pub fn write<T: Send + 'static>(
        &self,
        doing: &'static str,
        limit: Duration,
        work: impl FnOnce(&ShareFiles) -> T + Send + 'static,
    ) -> Result<T, ShareError> {
        self.not_stalled()?;
        self.writer.ask(limit, work).map_err(|not_done| self.error(&not_done, doing))
    }

    /// Queues work for the writing thread. `bytes` says how much memory it holds. What fails is among the problems of a later
    /// [`Self::take_problems`]. Returns whether there was room; if not, the caller offers it again.
    pub fn write_later(
        &self,
        bytes: usize,
        work: impl FnOnce(&ShareFiles) -> Result<(), ShareError> + Send + 'static,
    ) -> bool {
        if self.waiting_bytes.fetch_add(bytes, Ordering::Relaxed) > MAX_WAITING_BYTES {
            self.waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return false;
        }
        let (problems, waiting) = (Arc::clone(&self.problems), Arc::clone(&self.waiting_bytes));
        let queued = self.writer.worker.submit(Box::new(self.writer.held_back(move |files| {
            if let Err(error) = work(files) {
                let mut problems = problems.lock().unwrap_or_else(PoisonError::into_inner);
                if problems.len() < MAX_PROBLEMS {
                    problems.push(error.to_string());
                }
            }
            waiting.fetch_sub(bytes, Ordering::Relaxed);
        })));
        if !queued {
            self.waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        queued
    }

    /// Waits for the writing thread, while it is answered and no longer than the limit. Returns what failed there, and what was
    /// found in place of our files.
    pub fn take_problems(&self, limit: Duration) -> Vec<String> {
        self.settle(limit);
        let mut problems = std::mem::take(&mut *self.problems.lock().unwrap_or_else(PoisonError::into_inner));
        problems.extend(self.files.take_remarks());
        problems
    }

    /// Waits for the writing thread, while it is answered and no longer than the limit.
    pub fn settle(&self, limit: Duration) {
        if self.is_answering() {
            self.writer.worker.settle(limit);
        }
    }

    /// Whether no call hangs, as far as is known.
    pub fn is_answering(&self) -> bool {
        self.not_stalled().is_ok()
    }

    /// Returns an error while a call hangs on either thread: the other one need not find out for itself.
    fn not_stalled(&self) -> Result<(), ShareError> {
        match self.reader.worker.stall().or_else(|| self.writer.worker.stall()) {
            Some(stall) => Err(self.error(&NotDone::Stalled(stall), stall.what)),
            None => Ok(()),
        }
    }

    fn error(&self, not_done: &NotDone, doing: &'static str) -> ShareError {
        let root = self.root().to_owned();
        match not_done {
            NotDone::Stalled(stall) => ShareError::NotAnswering { root, since: stall.since, doing: stall.what },
            NotDone::TooSlow => ShareError::Busy { root, doing },
        }
    }
}

#[cfg(test)]
mod tests;
