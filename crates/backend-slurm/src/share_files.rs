//! The files of this backend on the shared directory.
//!
//! Nodes write there, and its file server may stop answering: everything goes through [`SharedDirectory`], which follows no link
//! and waits for no pipe, and runs on one thread with a limit, so that a call that hangs blocks no caller.

use std::{io, path::Path, sync::Arc, time::Duration};

use doctor_backend::{
    share_worker::{NotDone, Progress, ShareWorker},
    shared_directory::{SharedDirectory, SharedDirectoryError},
};

/// How long the file system may take for one call.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a caller waits for its call, behind others.
const LIMIT: Duration = Duration::from_secs(20);

/// The shared directory of one cluster.
#[derive(Debug)]
pub(super) struct ShareFiles {
    root: Arc<Path>,
    progress: Progress,
    worker: ShareWorker,
}

impl ShareFiles {
    pub(super) fn new(root: &Path) -> Self {
        let progress = Progress::default();
        let worker = ShareWorker::new("doctor-slurm-s", PATIENCE, progress.clone());
        Self { root: root.into(), progress, worker }
    }

    /// Runs one call on the open root.
    ///
    /// # Errors
    /// If the call fails, or the directory does not answer.
    pub(super) fn call<T: Send + 'static>(
        &self,
        what: &'static str,
        body: impl FnOnce(&SharedDirectory) -> Result<T, SharedDirectoryError> + Send + 'static,
    ) -> io::Result<T> {
        self.call_noting(what, move |root, _| body(root))
    }

    /// Runs one call on the open root that notes each answer of the file system: a long one is not taken for one that hangs.
    ///
    /// # Errors
    /// If the call fails, or the directory does not answer.
    pub(super) fn call_noting<T: Send + 'static>(
        &self,
        what: &'static str,
        body: impl FnOnce(&SharedDirectory, &Progress) -> Result<T, SharedDirectoryError> + Send + 'static,
    ) -> io::Result<T> {
        let progress = self.progress.clone();
        self.at_root(what, move |root| Ok(SharedDirectory::open(root).and_then(|root| body(&root, &progress))?))
    }

    /// Runs one call that opens the root itself, and follows no link below it.
    ///
    /// # Errors
    /// If the call fails, or the directory does not answer.
    pub(super) fn at_root<T: Send + 'static>(
        &self,
        what: &'static str,
        body: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (root, progress) = (Arc::clone(&self.root), self.progress.clone());
        let done = self.worker.ask(LIMIT, move || {
            let _call = progress.begin(what);
            body(&root)
        });
        done.unwrap_or_else(|not_done| Err(io::Error::new(io::ErrorKind::TimedOut, self.explain(&not_done, what))))
    }

    fn explain(&self, not_done: &NotDone, what: &'static str) -> String {
        let root = self.root.display();
        match not_done {
            NotDone::Stalled(stall) => {
                format!("the shared directory {root} does not answer since {} ({})", stall.since, stall.what)
            }
            NotDone::TooSlow => format!("the shared directory {root} is too slow ({what})"),
        }
    }
}
