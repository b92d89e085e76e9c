//! The job's log: lines that are on the share as soon as they are written.

use std::{
    cell::RefCell,
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use rustix::fs::OFlags;

use super::parent;
use crate::clock::now;

pub(super) struct Log {
    file: RefCell<Option<File>>,
}

impl Log {
    /// A log that cannot be written does not keep the tests from running; the reason goes to stderr, once.
    pub(super) fn open(path: &Path) -> Self {
        let file =
            Self::create(path).inspect_err(|error| eprintln!("cannot write the log {}: {error}", path.display()));
        Self { file: RefCell::new(file.ok()) }
    }

    fn create(path: &Path) -> io::Result<File> {
        fs::create_dir_all(parent(path))?;
        // The share is writable by others: a link in the log's place must not lead the writing elsewhere.
        let flags = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or(0);
        File::options().append(true).create(true).custom_flags(flags).open(path)
    }

    pub(super) fn line(&self, about: &str, text: &str) {
        let mut file = self.file.borrow_mut();
        let Some(open) = file.as_mut() else { return };
        // One write, so that a reader never sees half a line.
        if let Err(error) = open.write_all(format!("{} {about}: {text}\n", now()).as_bytes()) {
            eprintln!("cannot write the log any more: {error}");
            *file = None;
        }
    }
}
