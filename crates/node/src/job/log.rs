//! The job's logs: unbuffered lines in one file per test on the share, or on standard output, where the cluster keeps
//! them.

use std::{
    cell::RefCell,
    fs::File,
    io::{self, Write},
    path::PathBuf,
};

use doctor_core::ids::TestId;

use super::shared_file::SharedFile;
use crate::clock::now;

pub(super) struct Log {
    /// The first file also takes lines about the job and about tests without their own log.
    files: Vec<(Option<TestId>, RefCell<Option<File>>)>,
    to_output: bool,
}

impl Log {
    /// Opens the logs. A log that cannot be written does not stop the tests; the reason goes to stderr once.
    pub(super) fn open(paths: &[PathBuf], tests: &[TestId]) -> Self {
        let open = |path: &PathBuf| {
            let opened = SharedFile::of_test(path).and_then(|file| file.append());
            opened.inspect_err(|error| eprintln!("cannot write the log {}: {error}", path.display())).ok()
        };
        let files = paths.iter().enumerate().map(|(index, path)| (tests.get(index).cloned(), RefCell::new(open(path))));
        Self { files: files.collect(), to_output: false }
    }

    pub(super) const fn to_output() -> Self {
        Self { files: Vec::new(), to_output: true }
    }

    pub(super) fn line(&self, about: &str, text: &str) {
        if self.to_output {
            // One line per message: a tool's output must not imitate the markers around the packed document.
            let text = text.replace(['\n', '\r'], " ");
            // A closed output is no reason to stop the test.
            let _unread = writeln!(io::stdout().lock(), "{} {about}: {text}", now());
            return;
        }
        let own = self.files.iter().find(|(test, _)| test.as_ref().is_some_and(|test| test.as_str() == about));
        let Some((_, file)) = own.or(self.files.first()) else { return };
        let mut file = file.borrow_mut();
        let Some(open) = file.as_mut() else { return };
        // One write per line, so that a reader never sees half a line.
        if let Err(error) = open.write_all(format!("{} {about}: {text}\n", now()).as_bytes()) {
            eprintln!("cannot write the log, the rest is lost: {error}");
            *file = None;
        }
    }
}
