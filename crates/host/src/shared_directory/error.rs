//! What can go wrong in a directory that nodes write.

use std::{
    error::Error,
    fmt, io,
    path::{Path, PathBuf},
};

use rustix::{fs::FileType, io::Errno};

/// What a name refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    File,
    Directory,
    Link,
    Pipe,
    Socket,
    Device,
    Other,
}

impl EntryKind {
    pub const ALL: [Self; 7] =
        [Self::File, Self::Directory, Self::Link, Self::Pipe, Self::Socket, Self::Device, Self::Other];

    pub(super) fn of_mode(mode: u32) -> Self {
        match FileType::from_raw_mode(mode) {
            FileType::RegularFile => Self::File,
            FileType::Directory => Self::Directory,
            FileType::Symlink => Self::Link,
            FileType::Fifo => Self::Pipe,
            FileType::Socket => Self::Socket,
            FileType::CharacterDevice | FileType::BlockDevice => Self::Device,
            FileType::Unknown => Self::Other,
        }
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::File => "a file",
            Self::Directory => "a directory",
            Self::Link => "a symbolic link",
            Self::Pipe => "a named pipe",
            Self::Socket => "a socket",
            Self::Device => "a device",
            Self::Other => "of an unknown type",
        }
    }

    pub(super) fn expect(self, expected: Self, path: &Path) -> Result<(), SharedDirectoryError> {
        if self == expected {
            return Ok(());
        }
        Err(SharedDirectoryError::WrongKind { path: path.to_owned(), found: self, expected })
    }
}

impl fmt::Display for EntryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[derive(Debug)]
pub enum SharedDirectoryError {
    Io {
        operation: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// Something else has the name of a file or directory of ours.
    WrongKind {
        path: PathBuf,
        found: EntryKind,
        expected: EntryKind,
    },
    /// The path leads out of the directory, or names nothing.
    Outside {
        path: PathBuf,
    },
}

/// Something that had the name of a file or directory of ours and was renamed, because it cannot be replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MovedAside {
    pub path: PathBuf,
    pub found: EntryKind,
    /// Where it is now.
    pub to: PathBuf,
}

impl fmt::Display for MovedAside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, found, to } = self;
        let (path, to) = (path.display(), to.display());
        write!(f, "{path} was {found} and has been moved to {to}: find out which node or user made it")
    }
}

/// The operation of [`super::SharedDirectory::open`].
pub const OPEN_ROOT: &str = "opening the shared directory";

/// Whether this is how a file server that is away, or a mount that is gone, answers.
pub fn is_outage_code(error: &io::Error) -> bool {
    error.raw_os_error().map(Errno::from_raw_os_error).is_some_and(|code| {
        [
            Errno::IO,
            Errno::STALE,
            Errno::TIMEDOUT,
            Errno::HOSTDOWN,
            Errno::HOSTUNREACH,
            Errno::NOTCONN,
            Errno::CONNABORTED,
            Errno::CONNRESET,
            Errno::REMOTEIO,
            Errno::NODEV,
        ]
        .contains(&code)
    })
}

impl SharedDirectoryError {
    /// Whether the directory as a whole is away for now, so that what is on it cannot be known. A file that a node spoilt is no
    /// outage: waiting for it would let the node stop us.
    pub fn is_outage(&self) -> bool {
        match self {
            Self::Io { operation, source, .. } => *operation == OPEN_ROOT || is_outage_code(source),
            Self::WrongKind { .. } | Self::Outside { .. } => false,
        }
    }

    pub(super) fn io(operation: &'static str, path: &Path, error: Errno) -> Self {
        Self::from_io(operation, path, error.into())
    }

    pub(super) fn from_io(operation: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { operation, path: path.to_owned(), source }
    }
}

impl fmt::Display for SharedDirectoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { operation, path, source } => write!(f, "{operation} {}: {source}", path.display()),
            Self::WrongKind { path, found, expected } => write!(
                f,
                "{} is {found}, and {expected} belongs there: remove it, and find out which node or user made it",
                path.display()
            ),
            Self::Outside { path } => write!(f, "{} is no path below the shared directory", path.display()),
        }
    }
}

impl Error for SharedDirectoryError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        // The text of the source is part of the message, which is printed alone in many places.
        None
    }
}

impl From<SharedDirectoryError> for io::Error {
    fn from(error: SharedDirectoryError) -> Self {
        let kind = match &error {
            SharedDirectoryError::Io { source, .. } => source.kind(),
            SharedDirectoryError::WrongKind { .. } | SharedDirectoryError::Outside { .. } => {
                io::ErrorKind::InvalidInput
            }
        };
        Self::new(kind, error)
    }
}
