//! What can go wrong on the shared directory, and what to do about it.

use std::{io, path::PathBuf};

use doctor_core::time::Timestamp;
use doctor_host::shared_directory::{EntryKind, OPEN_ROOT, SharedDirectoryError, is_outage_code};

/// A failed operation on the shared directory. The message includes what to do.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    #[error("{operation} {}: {source}: {}", path.display(), hint(source))]
    File {
        operation: &'static str,
        path: PathBuf,
        /// Part of the message, which is shown alone in the status.
        #[source]
        source: io::Error,
    },
    /// Something else has the name of a file or directory of ours. It is neither followed nor waited for.
    #[error(
        "{} is {found}, and {expected} belongs there: remove it, and find out which node or user made it",
        path.display()
    )]
    WrongKind { path: PathBuf, found: EntryKind, expected: EntryKind },
    #[error("{} is no path below the shared directory", path.display())]
    Outside { path: PathBuf },
    #[error(
        "the shared directory {} does not answer since {since} ({doing}): check its mount and its file server; what waits is \
         done when it answers",
        root.display()
    )]
    NotAnswering { root: PathBuf, since: Timestamp, doing: &'static str },
    /// It answers, and is too slow for what there is to do.
    #[error("the shared directory {} is too slow: {doing} waits for the next cycle", root.display())]
    Busy { root: PathBuf, doing: &'static str },
}

impl ShareError {
    /// Whether only space is missing.
    pub fn is_full(&self) -> bool {
        matches!(
            self,
            Self::File { source, .. }
                if matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        )
    }

    /// Whether the directory as a whole is away for now, so that what is on it cannot be known. A file that a node spoilt is no
    /// outage: waiting for it would let the node stop us.
    pub fn is_outage(&self) -> bool {
        match self {
            Self::NotAnswering { .. } | Self::Busy { .. } => true,
            Self::WrongKind { .. } | Self::Outside { .. } => false,
            Self::File { operation, source, .. } => *operation == OPEN_ROOT || is_outage_code(source),
        }
    }

    /// Whether a node or a user put something else in place of what is needed.
    pub const fn is_wrong_kind(&self) -> bool {
        matches!(self, Self::WrongKind { .. })
    }
}

impl From<SharedDirectoryError> for ShareError {
    fn from(error: SharedDirectoryError) -> Self {
        match error {
            SharedDirectoryError::Io { operation, path, source } => Self::File { operation, path, source },
            SharedDirectoryError::WrongKind { path, found, expected } => Self::WrongKind { path, found, expected },
            SharedDirectoryError::Outside { path } => Self::Outside { path },
        }
    }
}

fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => "create the directory or set `data` in the configuration",
        io::ErrorKind::PermissionDenied => "grant this user write access",
        io::ErrorKind::ReadOnlyFilesystem => "mount it writable or set `data` to another directory",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free some space; nothing was lost",
        _ => "check the file system",
    }
}
