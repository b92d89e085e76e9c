//! Paths below an open directory: which are accepted, and how one is opened without following a link.

use std::{
    ffi::OsStr,
    os::fd::OwnedFd,
    path::{Component, Path},
};

use rustix::{
    fs::{Mode, OFlags, ResolveFlags, openat, openat2},
    io::Errno,
};

use super::error::SharedDirectoryError;

/// Accepts only paths of plain names.
pub(super) fn check_relative(relative: &Path, path: &Path) -> Result<(), SharedDirectoryError> {
    let plain = relative.components().all(|part| matches!(part, Component::Normal(_)));
    match plain && !relative.as_os_str().is_empty() {
        true => Ok(()),
        false => Err(SharedDirectoryError::Outside { path: path.to_owned() }),
    }
}

/// Accepts only one plain name.
pub(super) fn check_name(name: &OsStr, path: &Path) -> Result<(), SharedDirectoryError> {
    let mut parts = Path::new(name).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(only)), None) if only == name => Ok(()),
        _ => Err(SharedDirectoryError::Outside { path: path.to_owned() }),
    }
}

const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::RDONLY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Opens a directory below a handle, without following any link.
pub(super) fn open_beneath(at: &OwnedFd, relative: &Path) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match openat2(at, relative, DIRECTORY, Mode::empty(), resolve) {
        // Linux before 5.6, or a system call filter that does not know the call.
        Err(Errno::NOSYS | Errno::PERM) => open_by_component(at, relative),
        opened => opened,
    }
}

pub(super) fn open_by_component(at: &OwnedFd, relative: &Path) -> rustix::io::Result<OwnedFd> {
    let mut parts = relative.components();
    let mut at = match parts.next() {
        Some(first) => open_one(at, first.as_os_str())?,
        None => return Err(Errno::INVAL),
    };
    for part in parts {
        at = open_one(&at, part.as_os_str())?;
    }
    Ok(at)
}

pub(super) fn open_one(at: &OwnedFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    openat(at, name, DIRECTORY, Mode::empty())
}
