//! Access to a directory that nodes can write, so that nothing which a node puts there is followed, waited for or written through.
//!
//! Everything is opened relative to a handle: the root is set by the operator and may be a link, and below it no link is
//! followed, by `openat2` with `RESOLVE_BENEATH` and `RESOLVE_NO_SYMLINKS`, or component by component where the kernel or a
//! system call filter does not have it. What a name refers to is checked on an open handle. A file is written under a random
//! name that must not exist, synced, and renamed. Pipes and devices are never opened: a name is first opened as a mere handle
//! (`O_PATH`), and only that of a regular file is opened for reading, through the same handle.
//!
//! A call may block as long as the file server does not answer: callers that must not wait use a thread of their own.

mod error;
mod resolve;

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

pub use error::{EntryKind, MovedAside, OPEN_ROOT, SharedDirectoryError, is_outage_code};
use resolve::{check_name, check_relative, open_beneath, open_one};
use rustix::{
    fs::{AtFlags, Dir, Mode, OFlags, Stat, fchmod, fstat, fsync, linkat, mkdirat, openat, renameat, statat, unlinkat},
    io::Errno,
    rand::{GetRandomFlags, getrandom},
};

type Result<T> = std::result::Result<T, SharedDirectoryError>;

/// The start of every temporary name, also of one that a killed controller left behind.
const TEMPORARY_PREFIX: &str = ".doctor-";
const TEMPORARY_SUFFIX: &str = ".tmp";
/// The start of the name that something gets which had the name of a file or directory of ours.
const ASIDE_PREFIX: &str = "moved-aside-";
/// How often a directory that another party makes again and again is moved aside for one file.
const MAX_MOVES: usize = 10;
/// Bytes written at a time: the callers of a slow file server see progress between two of them.
const CHUNK: usize = 256 << 10;
/// Bytes after which a file is synced while it is written: one sync of a large file takes as long as a file server that hangs.
const SYNC_EVERY: usize = 8 << 20;
/// The deepest tree that [`SharedDirectory::remove_tree`] removes. Ours have one level.
const MAX_DEPTH: u32 = 8;
/// Entries read of one directory. A node could fill it; what is left is read the next time.
const MAX_ENTRIES: usize = 50_000;
/// Entries of one directory that are listed before they are removed.
const REMOVED_AT_A_TIME: usize = 500;

/// An open directory. All paths are relative to it.
#[derive(Debug)]
pub struct SharedDirectory {
    handle: OwnedFd,
    /// For messages only.
    path: PathBuf,
}

/// What a name refers to, without following a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    pub kind: EntryKind,
    pub bytes: u64,
    /// Seconds since 1970, as the file server says.
    pub modified: i64,
    pub owner: u32,
    identity: (u64, u64),
}

impl Entry {
    fn of(stat: &Stat) -> Self {
        Self {
            kind: EntryKind::of_mode(stat.st_mode),
            bytes: u64::try_from(stat.st_size).unwrap_or(u64::MAX),
            modified: stat.st_mtime,
            owner: stat.st_uid,
            identity: (stat.st_dev, stat.st_ino),
        }
    }

    /// Whether both are the same unchanged file.
    pub fn is_same_file(&self, other: &Self) -> bool {
        self.identity == other.identity && self.bytes == other.bytes && self.modified == other.modified
    }
}

/// A file that was written.
#[derive(Debug, Clone)]
pub struct Written {
    pub entry: Entry,
    /// What was in its place and is gone, if it was neither a file nor a directory.
    pub replaced: Option<EntryKind>,
    /// The directory that was in its place.
    pub moved_aside: Option<MovedAside>,
}

impl SharedDirectory {
    /// Opens the root. It must exist: creating it would hide a missing mount.
    ///
    /// # Errors
    /// If it does not exist, is no directory or cannot be read.
    pub fn open(root: &Path) -> Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        match rustix::fs::open(root, flags, Mode::empty()) {
            Ok(handle) => Ok(Self { handle, path: root.to_owned() }),
            Err(error) => Err(SharedDirectoryError::io(OPEN_ROOT, root, error)),
        }
    }

    /// The path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a directory below this one. `None`: it does not exist.
    ///
    /// # Errors
    /// If a component is no directory, or the file system fails.
    pub fn subdirectory(&self, relative: &Path) -> Result<Option<Self>> {
        let path = self.path.join(relative);
        check_relative(relative, &path)?;
        match open_beneath(&self.handle, relative) {
            Ok(handle) => Ok(Some(Self { handle, path })),
            Err(Errno::NOENT) => Ok(None),
            Err(error @ (Errno::LOOP | Errno::NOTDIR)) => Err(self.name_the_obstacle(relative, error)),
            Err(error) => Err(SharedDirectoryError::io("opening", &path, error)),
        }
    }

    /// Opens a directory below this one, and creates it and its parents if they are missing.
    ///
    /// # Errors
    /// If a component is no directory, or the file system fails.
    pub fn make_subdirectory(&self, relative: &Path) -> Result<Self> {
        if let Some(existing) = self.subdirectory(relative)? {
            return Ok(existing);
        }
        let mut made = PathBuf::new();
        let mut at = self.duplicate()?;
        for part in relative.components() {
            made.push(part);
            match mkdirat(&at.handle, part.as_os_str(), Mode::from_raw_mode(0o777)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(SharedDirectoryError::io("making", &self.path.join(&made), error)),
            }
            // Another party may have removed or exchanged it since.
            at = at
                .subdirectory(Path::new(part.as_os_str()))?
                .ok_or_else(|| SharedDirectoryError::io("making", &self.path.join(&made), Errno::NOENT))?;
        }
        Ok(at)
    }

    /// Opens a directory of ours below this one, like [`Self::make_subdirectory`]. What is no directory and has the name of one on
    /// the way is moved aside: a node could stop our writes with it.
    ///
    /// # Errors
    /// If the file system fails.
    pub fn make_own_subdirectory(&self, relative: &Path) -> Result<(Self, Vec<MovedAside>)> {
        let mut moved = Vec::new();
        for _ in 0..MAX_MOVES {
            let path = match self.make_subdirectory(relative) {
                Ok(directory) => return Ok((directory, moved)),
                Err(SharedDirectoryError::WrongKind { path, .. }) => path,
                Err(error) => return Err(error),
            };
            let obstacle = path.strip_prefix(&self.path).map(|below| self.parent_of(below));
            if let Ok(Some((directory, name))) = obstacle.unwrap_or(Ok(None)) {
                moved.extend(directory.move_aside(&name, |kind| kind != EntryKind::Directory)?);
            }
        }
        self.make_subdirectory(relative).map(|directory| (directory, moved))
    }

    /// Renames an entry of this directory to a random name, if it is of such a kind. Returns `None` if there was none.
    fn move_aside(&self, name: &OsStr, is_obstacle: impl Fn(EntryKind) -> bool) -> Result<Option<MovedAside>> {
        let path = self.path.join(name);
        let aside = OsString::from(format!("{ASIDE_PREFIX}{}", self.random_hex()?));
        if !self.rename(name, self, &aside)? {
            return Ok(None);
        }
        let found = self.entry(Path::new(&aside))?.map_or(EntryKind::Other, |entry| entry.kind);
        if !is_obstacle(found) {
            // Another thread of ours has removed the obstacle first, and this is what it made there.
            self.rename(&aside, self, name)?;
            return Ok(None);
        }
        Ok(Some(MovedAside { path, found, to: self.path.join(&aside) }))
    }

    /// Opens a regular file for reading. `None`: it does not exist.
    ///
    /// # Errors
    /// If it, or a directory on the way, is something else, or the file system fails.
    pub fn open_file(&self, relative: &Path) -> Result<Option<File>> {
        Ok(self.open_entry(relative)?.map(|(file, _)| file))
    }

    /// Opens a regular file for reading, and returns what it was then. `None`: it does not exist.
    ///
    /// # Errors
    /// If it, or a directory on the way, is something else, or the file system fails.
    pub fn open_entry(&self, relative: &Path) -> Result<Option<(File, Entry)>> {
        let Some((directory, name)) = self.parent_of(relative)? else { return Ok(None) };
        let path = directory.path.join(&name);
        let fail = |error: Errno| SharedDirectoryError::io("reading", &path, error);
        // A handle that opens nothing: neither a pipe's writer nor a device's driver notices it.
        let handle =
            match openat(&directory.handle, &name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()) {
                Ok(handle) => handle,
                Err(Errno::NOENT) => return Ok(None),
                Err(error) => return Err(fail(error)),
            };
        let checked = Entry::of(&fstat(&handle).map_err(fail)?);
        checked.kind.expect(EntryKind::File, &path)?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match rustix::fs::open(format!("/proc/self/fd/{}", handle.as_raw_fd()), flags, Mode::empty()) {
            Ok(file) => file,
            // Without /proc the name is opened again, and has to be the file that was checked.
            Err(Errno::NOENT) => {
                openat(&directory.handle, &name, flags | OFlags::NOFOLLOW, Mode::empty()).map_err(fail)?
            }
            Err(error) => return Err(fail(error)),
        };
        let opened = Entry::of(&fstat(&file).map_err(fail)?);
        opened.kind.expect(EntryKind::File, &path)?;
        match opened.identity == checked.identity {
            true => Ok(Some((File::from(file), opened))),
            false => Err(fail(Errno::STALE)),
        }
    }

    /// Returns a whole file, or `None` if it does not exist. Of a longer file, `max_bytes + 1` bytes are returned.
    ///
    /// # Errors
    /// If it is something else, or the file system fails.
    pub fn read(&self, relative: &Path, max_bytes: u64) -> Result<Option<Vec<u8>>> {
        let Some(file) = self.open_file(relative)? else { return Ok(None) };
        let mut bytes = Vec::new();
        let read = file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes);
        read.map_err(|error| SharedDirectoryError::from_io("reading", &self.path.join(relative), error))?;
        Ok(Some(bytes))
    }

    /// Returns what a path refers to. `None`: nothing is there.
    ///
    /// # Errors
    /// If a directory on the way is something else, or the file system fails.
    pub fn entry(&self, relative: &Path) -> Result<Option<Entry>> {
        let Some((directory, name)) = self.parent_of(relative)? else { return Ok(None) };
        match statat(&directory.handle, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(Entry::of(&stat))),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(SharedDirectoryError::io("reading", &directory.path.join(&name), error)),
        }
    }

    /// Writes a file of this directory: readers see the old content or the new one, never a part. A link, a pipe or a device in
    /// its place is replaced and neither followed nor opened; a directory is moved aside.
    ///
    /// # Errors
    /// If the file system fails. Nothing is left behind then.
    pub fn replace(&self, name: &OsStr, content: &mut dyn Read) -> Result<Written> {
        let path = self.path.join(name);
        check_name(name, &path)?;
        let is_replaced = |kind: &EntryKind| !matches!(kind, EntryKind::File | EntryKind::Directory);
        let replaced = self.entry(Path::new(name))?.map(|entry| entry.kind).filter(is_replaced);
        let (temporary, entry) = self.write_temporary(&path, content)?;
        let renamed = self.rename_over(&temporary, name);
        if renamed.is_err() {
            let _left = unlinkat(&self.handle, &temporary, AtFlags::empty());
        }
        let moved_aside = renamed?;
        // Some network file systems cannot sync a directory; their server takes care of it.
        let _durable = fsync(&self.handle);
        Ok(Written { entry, replaced, moved_aside })
    }

    /// Creates a file of this directory with its content, unless there is one. Returns whether it was created: of several callers
    /// only one creates it, and readers see the whole content or no file.
    ///
    /// # Errors
    /// If something else has its name, or the file system fails. Nothing is left behind then.
    pub fn create_exclusive(&self, name: &OsStr, content: &mut dyn Read) -> Result<bool> {
        let path = self.path.join(name);
        check_name(name, &path)?;
        let (temporary, ours) = self.write_temporary(&path, content)?;
        let linked = self.link(&temporary, &ours, name);
        let _left = unlinkat(&self.handle, &temporary, AtFlags::empty());
        if matches!(linked, Ok(true)) {
            let _durable = fsync(&self.handle);
        }
        linked
    }

    /// Gives a file of ours its name, unless there is a file of that name, which a rename would replace. Returns whether it has it.
    fn link(&self, temporary: &OsStr, ours: &Entry, name: &OsStr) -> Result<bool> {
        let path = self.path.join(name);
        match linkat(&self.handle, temporary, &self.handle, name, AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => {
                let Some(found) = self.entry(Path::new(name))? else { return Ok(false) };
                found.kind.expect(EntryKind::File, &path)?;
                // A network file system repeats a request whose answer was lost, and then finds its own link.
                Ok(found.identity == ours.identity)
            }
            Err(error) => Err(SharedDirectoryError::io("writing", &path, error)),
        }
    }

    /// Writes the content of the file at `path` under a random name, durably. If that fails, nothing is left behind.
    fn write_temporary(&self, path: &Path, content: &mut dyn Read) -> Result<(OsString, Entry)> {
        let (temporary, mut file) = self.create_temporary()?;
        let written = copy(content, &mut file)
            .and_then(|()| file.sync_all())
            .and_then(|()| Ok(Entry::of(&fstat(&file)?)))
            .map_err(|error| SharedDirectoryError::from_io("writing", path, error));
        if written.is_err() {
            let _left = unlinkat(&self.handle, &temporary, AtFlags::empty());
        }
        written.map(|entry| (temporary, entry))
    }

    /// Renames a file of ours to its name, and moves a directory of that name aside.
    fn rename_over(&self, temporary: &OsStr, name: &OsStr) -> Result<Option<MovedAside>> {
        let mut moved_aside = None;
        for _ in 0..MAX_MOVES {
            match renameat(&self.handle, temporary, &self.handle, name) {
                Ok(()) => return Ok(moved_aside),
                // POSIX also allows the second.
                Err(Errno::ISDIR | Errno::EXIST) => {
                    moved_aside = self.move_aside(name, |_| true)?.or(moved_aside);
                }
                Err(error) => return Err(SharedDirectoryError::io("writing", &self.path.join(name), error)),
            }
        }
        Err(SharedDirectoryError::WrongKind {
            path: self.path.join(name),
            found: EntryKind::Directory,
            expected: EntryKind::File,
        })
    }

    /// Opens a regular file of this directory for appending, and creates it if it is missing.
    ///
    /// # Errors
    /// If something else has its name, or the file system fails.
    pub fn append(&self, name: &OsStr) -> Result<File> {
        let path = self.path.join(name);
        check_name(name, &path)?;
        // Opening a device could already have an effect.
        if let Some(entry) = self.entry(Path::new(name))? {
            entry.kind.expect(EntryKind::File, &path)?;
        }
        let how = OFlags::CREATE | OFlags::APPEND | OFlags::WRONLY;
        let guards = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let fail = |error: Errno| SharedDirectoryError::io("writing", &path, error);
        let file = openat(&self.handle, name, how | guards, Mode::from_raw_mode(0o666)).map_err(fail)?;
        Entry::of(&fstat(&file).map_err(fail)?).kind.expect(EntryKind::File, &path)?;
        Ok(File::from(file))
    }

    /// Gives the group write permission, if the group of `parent` has it.
    ///
    /// # Errors
    /// If the file system fails.
    pub fn inherit_group_write(&self, parent: &Self) -> Result<()> {
        let fail = |error: Errno| SharedDirectoryError::io("setting the mode of", &self.path, error);
        let mode = |of: &Self| fstat(&of.handle).map(|stat| Mode::from_raw_mode(stat.st_mode));
        let (own, above) = (mode(self).map_err(fail)?, mode(parent).map_err(fail)?);
        match above.contains(Mode::WGRP) && !own.contains(Mode::WGRP) {
            true => fchmod(&self.handle, own | Mode::WGRP).map_err(fail),
            false => Ok(()),
        }
    }

    fn random_hex(&self) -> Result<String> {
        let mut random = [0_u8; 16];
        getrandom(&mut random, GetRandomFlags::empty())
            .map_err(|error| SharedDirectoryError::io("writing to", &self.path, error))?;
        Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Creates a file with a random name that did not exist.
    fn create_temporary(&self) -> Result<(OsString, File)> {
        let fail = |error: Errno| SharedDirectoryError::io("writing to", &self.path, error);
        let name = OsString::from(format!("{TEMPORARY_PREFIX}{}{TEMPORARY_SUFFIX}", self.random_hex()?));
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::WRONLY | OFlags::CLOEXEC;
        let file = openat(&self.handle, &name, flags, Mode::from_raw_mode(0o666)).map_err(fail)?;
        Ok((name, File::from(file)))
    }

    /// Checks that files can be created here, and leaves nothing behind.
    ///
    /// # Errors
    /// If that fails.
    pub fn check_writable(&self) -> Result<()> {
        // A file without a name is gone when it is closed. Not every file system has such files, NFS for one.
        let nameless = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        if openat(&self.handle, ".", nameless, Mode::from_raw_mode(0o600)).is_ok() {
            return Ok(());
        }
        let (name, _file) = self.create_temporary()?;
        unlinkat(&self.handle, &name, AtFlags::empty())
            .map_err(|error| SharedDirectoryError::io("writing to", &self.path, error))
    }

    /// Renames an entry of this directory, whatever it is, to a name of another. Returns whether there was one.
    ///
    /// # Errors
    /// If the file system fails.
    pub fn rename(&self, name: &OsStr, to: &Self, new_name: &OsStr) -> Result<bool> {
        let path = self.path.join(name);
        check_name(name, &path)?;
        check_name(new_name, &to.path.join(new_name))?;
        match renameat(&self.handle, name, &to.handle, new_name) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(SharedDirectoryError::io("renaming", &path, error)),
        }
    }

    /// Removes an entry of this directory that is no directory. Returns whether there was one.
    ///
    /// # Errors
    /// If it is a directory, or the file system fails.
    pub fn remove(&self, name: &OsStr) -> Result<bool> {
        let path = self.path.join(name);
        check_name(name, &path)?;
        match unlinkat(&self.handle, name, AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(SharedDirectoryError::io("removing", &path, error)),
        }
    }

    /// Removes an entry and everything below it, as long as `go_on` says so, which is called for each entry: a node could make a
    /// tree of any size. A link is removed, not followed. Returns whether nothing is left.
    ///
    /// # Errors
    /// If something cannot be removed.
    pub fn remove_tree(&self, name: &OsStr, go_on: &dyn Fn() -> bool) -> Result<bool> {
        check_name(name, &self.path.join(name))?;
        self.remove_below(name, MAX_DEPTH, go_on)
    }

    fn remove_below(&self, name: &OsStr, depth: u32, go_on: &dyn Fn() -> bool) -> Result<bool> {
        if !go_on() {
            return Ok(false);
        }
        let path = self.path.join(name);
        let fail = |error: Errno| SharedDirectoryError::io("removing", &path, error);
        match unlinkat(&self.handle, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => return Ok(true),
            // The first is Linux', the second that of POSIX.
            Err(Errno::ISDIR | Errno::PERM) if depth > 0 => {}
            Err(error) => return Err(fail(error)),
        }
        if let Some(directory) = self.subdirectory(Path::new(name))? {
            // In parts, each listed anew: so even a budget for a few entries removes some of a directory with many.
            loop {
                let part = directory.list(REMOVED_AT_A_TIME, go_on)?;
                for below in &part {
                    if !directory.remove_below(below, depth - 1, go_on)? {
                        return Ok(false);
                    }
                }
                if part.is_empty() {
                    break;
                }
            }
        }
        match unlinkat(&self.handle, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => Ok(true),
            // The listing was cut short, or another party adds to it.
            Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
            Err(error) => Err(fail(error)),
        }
    }

    /// Returns the names in this directory, at most fifty thousand of them, and as long as `go_on` says so, which is called for
    /// each name.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn names(&self, go_on: &dyn Fn() -> bool) -> Result<Vec<OsString>> {
        self.list(MAX_ENTRIES, go_on)
    }

    fn list(&self, most: usize, go_on: &dyn Fn() -> bool) -> Result<Vec<OsString>> {
        let fail = |error: Errno| SharedDirectoryError::io("listing", &self.path, error);
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.handle).map_err(fail)? {
            if names.len() >= most || !go_on() {
                break;
            }
            let entry = entry.map_err(fail)?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push(OsStr::from_bytes(name).to_owned());
            }
        }
        Ok(names)
    }

    /// Removes the temporary files among these names of this directory that a killed controller left before then, in seconds since
    /// 1970, as long as `go_on` says so. What cannot be removed is left.
    pub fn remove_left_temporaries(&self, names: &[OsString], before: i64, go_on: &dyn Fn() -> bool) {
        for name in names.iter().filter(|name| is_temporary(name)) {
            if !go_on() {
                return;
            }
            let is_old =
                self.entry(Path::new(name)).is_ok_and(|entry| entry.is_some_and(|entry| entry.modified < before));
            if is_old {
                // A node may have given such a name to a directory.
                let _kept = self.remove_tree(name, go_on);
            }
        }
    }

    fn duplicate(&self) -> Result<Self> {
        let handle = self.handle.try_clone();
        let handle = handle.map_err(|error| SharedDirectoryError::from_io("opening", &self.path, error))?;
        Ok(Self { handle, path: self.path.clone() })
    }

    /// Opens the directory of a path below this one. `None`: it does not exist.
    fn parent_of(&self, relative: &Path) -> Result<Option<(Self, OsString)>> {
        let path = self.path.join(relative);
        check_relative(relative, &path)?;
        let (Some(parent), Some(name)) = (relative.parent(), relative.file_name()) else {
            return Err(SharedDirectoryError::Outside { path });
        };
        let directory =
            if parent.as_os_str().is_empty() { Some(self.duplicate()?) } else { self.subdirectory(parent)? };
        Ok(directory.map(|directory| (directory, name.to_owned())))
    }

    /// Returns the error about the first component that is no directory.
    fn name_the_obstacle(&self, relative: &Path, error: Errno) -> SharedDirectoryError {
        let mut path = self.path.clone();
        let Ok(mut at) = self.handle.try_clone() else { return SharedDirectoryError::io("opening", &path, error) };
        for part in relative.components() {
            path.push(part);
            let Ok(stat) = statat(&at, part.as_os_str(), AtFlags::SYMLINK_NOFOLLOW) else { break };
            let found = EntryKind::of_mode(stat.st_mode);
            if found != EntryKind::Directory {
                return SharedDirectoryError::WrongKind { path, found, expected: EntryKind::Directory };
            }
            match open_one(&at, part.as_os_str()) {
                Ok(next) => at = next,
                Err(_) => break,
            }
        }
        SharedDirectoryError::io("opening", &path, error)
    }
}

/// Whether this is a name of [`SharedDirectory::replace`] for an unfinished file.
pub fn is_temporary(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| name.starts_with(TEMPORARY_PREFIX) && name.ends_with(TEMPORARY_SUFFIX))
}

fn copy(from: &mut dyn Read, to: &mut File) -> io::Result<()> {
    let mut buffer = vec![0_u8; CHUNK];
    let mut unsynced = 0;
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => {
                to.write_all(&buffer[..read])?;
                unsynced += read;
                if unsynced >= SYNC_EVERY {
                    to.sync_data()?;
                    unsynced = 0;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests;
