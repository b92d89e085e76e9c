//! The working directory of a test: creates it, and removes it with its files.
//!
//! It is `MOUNT/.cluster-doctor/HOST-BOOT-NAMESPACE-PROCESS-START`, so that its name identifies its owner even if that
//! was killed. Only files in such a directory are ever removed, by names relative to open directories; no link is
//! followed and nothing is removed recursively, as a test creates no directories.
//!
//! Other users may be able to write to the mount. The directory therefore has mode 0700, its parent must not be
//! writable by others, and both must have the owner of files that we create: some network mounts map root to another
//! user.

use std::{
    fs::File,
    io::{self, Write as _},
    os::fd::{AsFd, OwnedFd},
    path::Path,
    time::{Duration, Instant, SystemTime},
};

use rustix::{
    fs::{AtFlags, Dir, Mode, OFlags, Stat, fstat, fstatvfs, mkdirat, open, openat, statat, unlinkat},
    io::Errno,
    system::uname,
};
use serde::{Deserialize, Serialize};

use super::mount_failure::errno_text;
use crate::runner::hung_probes::{boot_id, stat_of};

const PARENT: &str = ".cluster-doctor";
const PROBE_FILE: &str = "trial";

/// Age from which a directory of this host counts as abandoned if its process cannot be seen, because it belongs to
/// another boot, container, or machine of the same name. No test runs that long.
const STALE_AGE: Duration = Duration::from_secs(86_400);

/// Network file systems keep a removed file while it is open; a killed process closes it soon.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Another run may remove the empty parent just after it was found.
const TRIES: u32 = 20;

/// A failed operation and its errno.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{operation}: {}", errno_text(*.errno))]
pub(super) struct IoFailure {
    pub(super) operation: String,
    pub(super) errno: i32,
}

fn io_failure(what: impl Into<String>) -> impl FnOnce(Errno) -> IoFailure {
    let what = what.into();
    move |errno| IoFailure { operation: what, errno: errno.raw_os_error() }
}

/// From an error of the standard library.
fn std_io_failure(what: &str) -> impl FnOnce(io::Error) -> IoFailure {
    move |error| IoFailure { operation: what.to_owned(), errno: error.raw_os_error().unwrap_or(libc::EIO) }
}

/// A directory that was created for one test.
#[derive(Debug)]
pub(super) struct Directory {
    mount: OwnedFd,
    parent: OwnedFd,
    name: String,
    pub(super) fd: OwnedFd,
    /// Whether files in it support direct I/O.
    pub(super) direct: bool,
    /// Free bytes, if the file system reports them.
    pub(super) free: Option<u64>,
    /// Number of abandoned directories that were removed first.
    pub(super) removed_stale: usize,
}

impl Directory {
    /// Creates the directory below a mount, and removes what dead runs of this machine left there.
    pub(super) fn make(mount: &Path, owner: &Owner) -> Result<Self, IoFailure> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = open(mount, flags, Mode::empty()).map_err(io_failure("opening it"))?;
        let name = owner.name();
        let created = make_inside(&opened, &name, owner);
        let CreatedDirectory { fd: itself, parent, removed_stale: swept } = created.inspect_err(|_| {
            // The parent may have been created and be empty.
            let _in_use = unlinkat(&opened, PARENT, AtFlags::REMOVEDIR);
        })?;
        let mut created =
            Self { mount: opened, parent, name, fd: itself, direct: false, free: None, removed_stale: swept };
        match created.probe_file_system() {
            Ok(()) => Ok(created),
            Err(failure) => {
                // Report the first error.
                let _removed = created.remove();
                Err(failure)
            }
        }
    }

    fn probe_file_system(&mut self) -> Result<(), IoFailure> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file =
            openat(&self.fd, PROBE_FILE, flags, Mode::RUSR | Mode::WUSR).map_err(io_failure("creating a file"))?;
        self.verify_owner(&fstat(&file).map_err(io_failure("checking a file"))?)?;
        let mut file = File::from(file);
        let written = file.write_all(&[0x5a; 4096]).and_then(|()| file.sync_all());
        written.map_err(std_io_failure("writing to a file"))?;
        let direct = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
        self.direct = match openat(&self.fd, PROBE_FILE, direct, Mode::empty()) {
            Ok(_) => true,
            Err(Errno::INVAL | Errno::OPNOTSUPP) => false,
            Err(errno) => return Err(io_failure("opening a file for direct I/O")(errno)),
        };
        unlinkat(&self.fd, PROBE_FILE, AtFlags::empty()).map_err(io_failure("removing a file"))?;
        let space = fstatvfs(&self.fd).map_err(io_failure("reading the free space"))?;
        self.free = (space.f_blocks > 0).then(|| space.f_bavail.saturating_mul(space.f_frsize));
        Ok(())
    }

    /// Verifies the owners: a user who could replace the directory could make us write through a link.
    fn verify_owner(&self, file: &Stat) -> Result<(), IoFailure> {
        let (itself, parent) = (fstat(&self.fd), fstat(&self.parent));
        let itself = itself.map_err(io_failure("checking the directory"))?;
        let parent = parent.map_err(io_failure("checking the directory"))?;
        let of_us = itself.st_uid == file.st_uid && (parent.st_uid == file.st_uid || parent.st_uid == 0);
        let for_others = Mode::WGRP | Mode::WOTH;
        if of_us && !Mode::from_raw_mode(parent.st_mode).intersects(for_others) {
            return Ok(());
        }
        let what = format!("{PARENT} is owned by user {} or writable by others; remove it", parent.st_uid);
        Err(io_failure(what)(Errno::PERM))
    }

    /// Removes it, and the parent if that is unused.
    pub(super) fn remove(&self) -> Result<(), IoFailure> {
        let started = Instant::now();
        loop {
            match empty(&self.fd).and_then(|()| {
                unlinkat(&self.parent, self.name.as_str(), AtFlags::REMOVEDIR)
                    .map_err(io_failure("removing the directory"))
            }) {
                Err(failure)
                    if failure.errno == Errno::NOTEMPTY.raw_os_error() && started.elapsed() < RELEASE_TIMEOUT =>
                {
                    std::thread::sleep(Duration::from_millis(50));
                }
                other => {
                    let _in_use = unlinkat(&self.mount, PARENT, AtFlags::REMOVEDIR);
                    return other;
                }
            }
        }
    }
}

/// A new directory and its parent, both open, and the number of abandoned ones removed.
struct CreatedDirectory {
    fd: OwnedFd,
    parent: OwnedFd,
    removed_stale: usize,
}

fn make_inside(mount: &OwnedFd, name: &str, owner: &Owner) -> Result<CreatedDirectory, IoFailure> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::RWXU | Mode::RGRP | Mode::XGRP | Mode::ROTH | Mode::XOTH;
    let mut swept = 0;
    for _ in 0..TRIES {
        match mkdirat(mount, PARENT, mode) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(io_failure(format!("creating {PARENT}"))(errno)),
        }
        let parent = match openat(mount, PARENT, flags, Mode::empty()) {
            Ok(parent) => parent,
            Err(Errno::NOENT) => continue,
            Err(errno) => return Err(io_failure(format!("opening {PARENT}"))(errno)),
        };
        swept += remove_stale(&parent, owner);
        match mkdirat(&parent, name, Mode::RWXU) {
            Ok(()) => {}
            Err(Errno::NOENT) => continue,
            Err(errno) => return Err(io_failure("creating a directory")(errno)),
        }
        let itself = openat(&parent, name, flags, Mode::empty()).map_err(io_failure("opening the directory"))?;
        return Ok(CreatedDirectory { fd: itself, parent, removed_stale: swept });
    }
    Err(io_failure(format!("creating {PARENT}, which other processes keep removing"))(Errno::BUSY))
}

/// Removes every file in it.
fn empty(directory: &OwnedFd) -> Result<(), IoFailure> {
    for name in names(directory)? {
        match unlinkat(directory, name.as_str(), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(io_failure(format!("removing {name}"))(errno)),
        }
    }
    Ok(())
}

fn names(directory: impl AsFd) -> Result<Vec<String>, IoFailure> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory).map_err(io_failure("listing the directory"))? {
        let entry = entry.map_err(io_failure("listing the directory"))?;
        match entry.file_name().to_str() {
            Ok("." | "..") => {}
            Ok(name) => names.push(name.to_owned()),
            // Not one of our names.
            Err(_) => {}
        }
    }
    Ok(names)
}

/// Removes the directories of dead runs and returns their number. One that cannot be removed is left to the next run.
fn remove_stale(parent: &OwnedFd, owner: &Owner) -> usize {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let of_dead = |name: &String| -> Option<()> {
        let left_by = Owner::read(name)?;
        let directory = openat(parent, name.as_str(), flags, Mode::empty()).ok()?;
        let is_dead = match left_by.is_alive(owner) {
            Some(alive) => !alive,
            None => left_by.host == owner.host && time_since_write(&directory)? > STALE_AGE,
        };
        if !is_dead {
            return None;
        }
        empty(&directory).ok()?;
        unlinkat(parent, name.as_str(), AtFlags::REMOVEDIR).ok()
    };
    names(parent).unwrap_or_default().iter().filter_map(of_dead).count()
}

/// Returns the time since it or a file in it was last written.
fn time_since_write(directory: &OwnedFd) -> Option<Duration> {
    let written = |stat: Stat| {
        let since = Duration::from_secs(u64::try_from(stat.st_mtime).unwrap_or(0));
        SystemTime::UNIX_EPOCH + since
    };
    let mut newest = written(fstat(directory).ok()?);
    for name in names(directory).ok()? {
        newest = newest.max(written(statat(directory, name.as_str(), AtFlags::SYMLINK_NOFOLLOW).ok()?));
    }
    SystemTime::now().duration_since(newest).ok()
}

/// The process that owns a directory, as encoded in its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Owner {
    host: String,
    boot: String,
    /// The inode number of the pid namespace of `process`.
    namespace: u64,
    process: u32,
    start_ticks: u64,
}

impl Owner {
    /// Describes this process.
    pub(super) fn this_process() -> Option<Self> {
        let host = uname().nodename().to_string_lossy().into_owned();
        let plain = |c: char| if c.is_ascii_alphanumeric() || ".-".contains(c) { c } else { '_' };
        let namespace = std::fs::read_link("/proc/self/ns/pid").ok()?;
        let digits: String = namespace.to_str()?.chars().filter(char::is_ascii_digit).collect();
        let process = std::process::id();
        Some(Self {
            host: host.chars().take(100).map(plain).collect(),
            boot: boot_id().replace('-', ""),
            namespace: digits.parse().ok()?,
            process,
            start_ticks: stat_of(process)?.start_ticks,
        })
    }

    fn name(&self) -> String {
        let Self { host, boot, namespace, process, start_ticks } = self;
        format!("{host}-{boot}-{namespace}-{process}-{start_ticks}")
    }

    fn read(name: &str) -> Option<Self> {
        let mut parts = name.rsplitn(5, '-');
        let start_ticks = parts.next()?.parse().ok()?;
        let process = parts.next()?.parse().ok()?;
        let namespace = parts.next()?.parse().ok()?;
        let (boot, host) = (parts.next()?.to_owned(), parts.next()?.to_owned());
        let read = Self { host, boot, namespace, process, start_ticks };
        // Names in another spelling are not ours.
        (read.name() == name && !read.host.is_empty() && read.boot.len() == 32).then_some(read)
    }

    /// Whether the process lives. `None` if that cannot be determined from `other`.
    fn is_alive(&self, other: &Self) -> Option<bool> {
        let same = |owner: &Self| (owner.host.clone(), owner.boot.clone(), owner.namespace);
        (same(self) == same(other)).then(|| {
            stat_of(self.process).is_some_and(|stat| stat.start_ticks == self.start_ticks && !stat.has_exited())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fs,
        os::unix::fs::{PermissionsExt as _, symlink},
    };

    fn owner() -> Owner {
        Owner::this_process().unwrap()
    }

    #[test]
    fn a_directory_is_removed_with_its_files() {
        let mount = tempfile::tempdir().unwrap();
        let directory = Directory::make(mount.path(), &owner()).unwrap();
        let path = mount.path().join(PARENT).join(owner().name());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        fs::write(path.join("one"), "x").unwrap();
        assert!(directory.free.is_some_and(|free| free > 0));
        directory.remove().unwrap();
        assert_eq!(fs::read_dir(mount.path()).unwrap().count(), 0);
    }

    #[test]
    fn directories_of_dead_runs_are_removed_and_those_of_others_stay() {
        let mount = tempfile::tempdir().unwrap();
        let path_of = |name: &str| mount.path().join(PARENT).join(name);
        let create = |owner: Owner| {
            fs::create_dir_all(path_of(&owner.name())).unwrap();
            fs::write(path_of(&owner.name()).join("one"), "x").unwrap();
            owner.name()
        };
        let dead = create(Owner { start_ticks: 1, ..owner() });
        let alive = create(Owner { process: 1, start_ticks: stat_of(1).unwrap().start_ticks, ..owner() });
        let of_other_host = create(Owner { host: "other".to_owned(), start_ticks: 1, ..owner() });
        let of_fresh_boot = create(Owner { boot: "0".repeat(32), ..owner() });
        let of_old_boot = create(Owner { boot: "1".repeat(32), ..owner() });
        let long_ago = SystemTime::now() - STALE_AGE * 2;
        for path in [path_of(&of_old_boot).join("one"), path_of(&of_old_boot)] {
            File::open(path).unwrap().set_modified(long_ago).unwrap();
        }
        let with_directory = create(Owner { start_ticks: 2, ..owner() });
        fs::create_dir(path_of(&with_directory).join("deep")).unwrap();
        fs::create_dir_all(path_of("foreign")).unwrap();
        fs::write(mount.path().join("precious"), "x").unwrap();
        symlink(mount.path(), path_of(&Owner { start_ticks: 3, ..owner() }.name())).unwrap();

        let directory = Directory::make(mount.path(), &owner()).unwrap();
        assert_eq!(directory.removed_stale, 2);
        directory.remove().unwrap();
        assert!(!path_of(&dead).exists() && !path_of(&of_old_boot).exists());
        for stays in [&alive, &of_other_host, &of_fresh_boot, &with_directory, "foreign"] {
            assert!(path_of(stays).exists(), "{stays}");
        }
        assert!(mount.path().join("precious").exists());
    }

    #[test]
    fn a_symlink_or_a_directory_that_others_can_write_to_is_rejected() {
        let mount = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        symlink(elsewhere.path(), mount.path().join(PARENT)).unwrap();
        let error = Directory::make(mount.path(), &owner()).unwrap_err();
        assert!([libc::ELOOP, libc::ENOTDIR].contains(&error.errno), "{error}");
        assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);

        fs::remove_file(mount.path().join(PARENT)).unwrap();
        fs::create_dir(mount.path().join(PARENT)).unwrap();
        fs::set_permissions(mount.path().join(PARENT), fs::Permissions::from_mode(0o777)).unwrap();
        let error = Directory::make(mount.path(), &owner()).unwrap_err();
        assert_eq!(error.errno, libc::EPERM, "{error}");
        assert!(error.to_string().contains("remove it"), "{error}");
    }

    #[test]
    fn a_directory_name_identifies_its_owner() {
        let of_a_host_with_hyphens = Owner { host: "gpu-node-07".to_owned(), ..owner() };
        assert_eq!(Owner::read(&of_a_host_with_hyphens.name()), Some(of_a_host_with_hyphens));
        for name in ["", "x", "a-b-c-d-e", "h-0123-1-1-1", &format!("h-{}-1-01-1", "0".repeat(32))] {
            assert_eq!(Owner::read(name), None, "{name}");
        }
    }
}
