//! The job's logs: lines that are on the share as soon as they are written, each in the log of its test.

use std::{
    cell::RefCell,
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use doctor_core::ids::TestId;
use rustix::fs::OFlags;

use super::parent;
use crate::clock::now;

pub(super) struct Log {
    /// The first takes what is about the job and about tests without a log of their own.
    files: Vec<(Option<TestId>, RefCell<Option<File>>)>,
}

impl Log {
    /// A log that cannot be written does not keep the tests from running; the reason goes to stderr, once.
    pub(super) fn open(paths: &[PathBuf], tests: &[TestId]) -> Self {
        let open = |path: &PathBuf| {
            Self::create(path).inspect_err(|error| eprintln!("cannot write the log {}: {error}", path.display())).ok()
        };
        let files = paths.iter().enumerate().map(|(place, path)| (tests.get(place).cloned(), RefCell::new(open(path))));
        Self { files: files.collect() }
    }

    fn create(path: &Path) -> io::Result<File> {
        fs::create_dir_all(parent(path))?;
        // The share is writable by others: a link in the log's place must not lead the writing elsewhere.
        let flags = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or(0);
        File::options().append(true).create(true).custom_flags(flags).open(path)
    }

    pub(super) fn line(&self, about: &str, text: &str) {
        let own = self.files.iter().find(|(test, _)| test.as_ref().is_some_and(|test| test.as_str() == about));
        let Some((_, file)) = own.or(self.files.first()) else { return };
        let mut file = file.borrow_mut();
        let Some(open) = file.as_mut() else { return };
        // One write, so that a reader never sees half a line.
        if let Err(error) = open.write_all(format!("{} {about}: {text}\n", now()).as_bytes()) {
            eprintln!("cannot write the log any more: {error}");
            *file = None;
        }
    }
}
