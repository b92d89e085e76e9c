//! Opens the files that decide what this program does, and refuses those that another user could change.
//!
//! Configuration, policies, profiles and credentials, and the programs that they name, direct a program that runs as root on nodes
//! or holds the credentials of a cluster. A user who can change such a file has these rights. A file is therefore read only if root and
//! the user of this program are the only ones who can change it:
//!
//! - The file belongs to root or to this user, and neither its group nor others may write to it.
//! - The same holds for each directory of its path, since a user who may write to a directory can replace what is in it. In a
//!   directory with the sticky bit, such as /tmp, others can replace only what they own, so it is accepted if what the path names
//!   in it, links included, belongs to root or to this user.
//! - A link is followed by this module itself, not by the kernel, and the directories of its target are judged too.
//! - What is on a read-only mount is accepted. The kubelet mounts ConfigMaps and Secrets read-only, from directories that are writable
//!   by all users on the node's side.
//!
//! The mode's group bits are the mask of a POSIX access list, so that an access list which lets another user write is refused as well.
//!
//! Each directory is opened from the one before it, without following links, and judged by its handle; the file is judged by the handle
//! that is read. Nothing is looked up a second time, so that there is no moment in which a user could exchange what was judged. There
//! is no setting that turns this off: each refusal names the command that ends it.

use std::{
    env,
    ffi::OsString,
    fmt,
    fs::{self, File},
    io::{self, Read},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            ffi::{OsStrExt, OsStringExt},
            fs::MetadataExt,
        },
    },
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{FileType, Mode, OFlags, Stat, StatVfsMountFlags, fstat, fstatvfs, major, minor, openat, readlinkat},
    io::Errno,
    process::geteuid,
};

/// The longest text that [`read_to_string`] reads. Nothing that a person writes is longer.
pub const MAX_TEXT_BYTES: u64 = 16 << 20;
/// The links that a path may contain, as in the kernel.
const MAX_LINKS: usize = 40;
/// Where a program is looked up without `PATH`, as the C library does.
const DEFAULT_PATH: &str = "/bin:/usr/bin";
/// Permits users other than the owner to write.
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;
/// /dev/null, which is writable by all users and always empty.
const NULL_DEVICE: (u32, u32) = (1, 3);

/// A component of a path that a user other than root and the user of this program could change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct ChangeableByOthers {
    /// The directory, link or file.
    pub component: PathBuf,
    pub owner: u32,
    /// Permission bits, with setuid, setgid and sticky.
    pub mode: u32,
    pub kind: ComponentKind,
    /// The file that was to be used.
    pub target: PathBuf,
    /// The user of this program.
    user: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComponentKind {
    File,
    Directory,
    Link,
}

impl ChangeableByOthers {
    /// Whether the owner is neither root nor the user of this program.
    pub const fn has_foreign_owner(&self) -> bool {
        self.owner != 0 && self.owner != self.user
    }

    /// Returns the bits that let others write, as `chmod` names them. The permission bits of a link have no meaning.
    const fn writers(&self) -> Option<&'static str> {
        match (self.kind, self.mode & OTHERS_WRITE) {
            (ComponentKind::Link, _) | (_, 0) => None,
            (_, 0o020) => Some("g"),
            (_, 0o002) => Some("o"),
            _ => Some("go"),
        }
    }

    /// Returns the command after which the component is accepted.
    pub fn remedy(&self) -> String {
        let component = shell_word(&self.component);
        let owner = self.has_foreign_owner().then(|| {
            let option = if self.kind == ComponentKind::Link { "-h " } else { "" };
            format!("chown {option}root {component}")
        });
        // The sticky bit of a directory with a foreign owner protects nothing: that owner is not bound by it.
        let mode = self.writers().map(|who| format!("chmod {who}-w {component}"));
        owner.into_iter().chain(mode).collect::<Vec<_>>().join(" && ")
    }
}

impl fmt::Display for ChangeableByOthers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { component, owner, mode, .. } = self;
        let kind = match self.kind {
            ComponentKind::File => "file",
            ComponentKind::Directory => "directory",
            ComponentKind::Link => "link",
        };
        let reason = match (self.has_foreign_owner(), self.writers()) {
            (true, _) => "belongs to another user",
            (false, Some("g")) => "is writable by its group",
            (false, _) => "is writable by all users",
        };
        write!(f, "the {kind} {} {reason} (owner: user {owner}, mode {mode:04o})", component.display())?;
        if self.component != self.target {
            write!(f, ", who could change {}", self.target.display())?;
        }
        write!(f, ": {}", self.remedy())
    }
}

/// Opens a file for reading.
///
/// # Errors
/// As opening it does. With [`ChangeableByOthers`] inside, if another user could change it.
pub fn open(path: &Path) -> io::Result<File> {
    open_trusting(path, None)
}

fn open_trusting(path: &Path, service_user: Option<u32>) -> io::Result<File> {
    let mut walk = Walk { service_user, ..Walk::start(path)? };
    let Some(name) = walk.walk_to_end()? else { return Err(Errno::ISDIR.into()) };
    // Non-blocking: opening a FIFO would wait for a writer. It changes nothing for a regular file.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let parent = walk.directory();
    let opened = openat(&parent.handle, &name, flags, Mode::empty())?;
    let stat = fstat(&opened)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {}
        FileType::CharacterDevice if (major(stat.st_rdev), minor(stat.st_rdev)) == NULL_DEVICE => {
            return Ok(File::from(opened));
        }
        _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")),
    }
    walk.judge(&parent.path.join(&name), ComponentKind::File, &opened, &stat)?;
    Ok(File::from(opened))
}

/// Reads a file of at most [`MAX_TEXT_BYTES`].
///
/// # Errors
/// As [`open`]; if the file is longer, or not UTF-8.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_all(open(path)?)
}

/// As [`read`], for a file that a service makes in its own state directory. Root, who judges or runs such a service, trusts the owner
/// of the directory, too: the service runs as that user, who can change everything that it has.
///
/// # Errors
/// As [`read`].
pub fn read_of_service(path: &Path, state_directory: &Path) -> io::Result<Vec<u8>> {
    let service_user = match geteuid().is_root() {
        true => Some(fs::metadata(state_directory)?.uid()),
        false => None,
    };
    read_all(open_trusting(path, service_user)?)
}

fn read_all(file: File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MAX_TEXT_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_TEXT_BYTES {
        let text = format!("longer than {MAX_TEXT_BYTES} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok(bytes)
}

/// Reads a text file of at most [`MAX_TEXT_BYTES`].
///
/// # Errors
/// As [`read`]; if the file is not UTF-8.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "not UTF-8 text"))
}

/// Returns the paths in a directory, sorted. Others cannot add any.
///
/// # Errors
/// As listing it does. With [`ChangeableByOthers`] inside, if another user could change what is in it.
pub fn list(path: &Path) -> io::Result<Vec<PathBuf>> {
    let mut walk = Walk::start(path)?;
    if walk.walk_to_end()?.is_some() {
        return Err(Errno::NOTDIR.into());
    }
    let directory = walk.directory();
    if directory.sticky {
        return Err(walk.refusal(&directory.path, ComponentKind::Directory, &fstat(&directory.handle)?));
    }
    // Others cannot replace any directory of the path, so this opens the same one.
    let mut paths = fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    paths.sort_unstable();
    Ok(paths)
}

/// Returns the absolute path of a program that only root and this user can change. A name without a slash is looked up in `PATH`, as
/// when it is run. What an interpreter's script calls is not followed.
///
/// # Errors
/// If there is no such program. With [`ChangeableByOthers`] inside, if another user could change it.
pub fn program(name: &Path) -> io::Result<PathBuf> {
    let path = match name.as_os_str().as_bytes().contains(&b'/') {
        true => name.to_owned(),
        false => {
            let path = env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
            // An empty entry is the current directory, whose programs are run only by their path.
            let directories = env::split_paths(&path).filter(|directory| directory.is_absolute());
            let mut candidates = directories.map(|directory| directory.join(name));
            let not_found = || io::Error::new(io::ErrorKind::NotFound, "not in PATH");
            candidates.find(|candidate| is_executable(candidate)).ok_or_else(not_found)?
        }
    };
    let mut walk = Walk::start(&path)?;
    let Some(file) = walk.walk_to_end()? else { return Err(Errno::ISDIR.into()) };
    let parent = walk.directory();
    // A program need not be readable.
    let handle = openat(&parent.handle, &file, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let resolved = parent.path.join(&file);
    walk.judge(&resolved, ComponentKind::File, &handle, &fstat(&handle)?)?;
    std::path::absolute(&path)
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

/// A directory of the path.
#[derive(Debug)]
struct Directory {
    path: PathBuf,
    handle: OwnedFd,
    /// Others may write to it, and replace what they own in it.
    sticky: bool,
}

/// A path that is followed component by component.
#[derive(Debug)]
struct Walk<'a> {
    target: &'a Path,
    user: u32,
    /// A further user whose files are accepted.
    service_user: Option<u32>,
    /// From the root to the current directory.
    directories: Vec<Directory>,
    /// The components that follow, the next one last.
    pending: Vec<OsString>,
    links: usize,
}

impl<'a> Walk<'a> {
    fn start(target: &'a Path) -> io::Result<Self> {
        let user = geteuid().as_raw();
        let (directories, pending) = (Vec::new(), Vec::new());
        let mut walk = Self { target, user, service_user: None, directories, pending, links: 0 };
        let root = rustix::fs::open("/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let stat = fstat(&root)?;
        walk.enter(PathBuf::from("/"), root, &stat)?;
        // The current directory is judged like any other.
        walk.push_components(&std::path::absolute(target)?);
        Ok(walk)
    }

    /// Adds the components of a path before those that follow.
    fn push_components(&mut self, path: &Path) {
        let names = path.components().filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some(OsString::from("..")),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
        });
        self.pending.extend(names.collect::<Vec<_>>().into_iter().rev());
    }

    fn directory(&self) -> &Directory {
        self.directories.last().expect("the root directory is never removed")
    }

    /// Follows the path. Returns the name of the file in the directory that was reached, or `None` if the path names that directory.
    fn walk_to_end(&mut self) -> io::Result<Option<OsString>> {
        while let Some(name) = self.pending.pop() {
            if name == ".." {
                if self.directories.len() > 1 {
                    self.directories.pop();
                }
                continue;
            }
            let parent = self.directory();
            let path = parent.path.join(&name);
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let handle = openat(&parent.handle, &name, flags, Mode::empty())?;
            let stat = fstat(&handle)?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Symlink => self.follow(&path, &handle, &stat)?,
                FileType::Directory => self.enter(path, handle, &stat)?,
                _ if self.pending.is_empty() => return Ok(Some(name)),
                _ => return Err(Errno::NOTDIR.into()),
            }
        }
        Ok(None)
    }

    fn enter(&mut self, path: PathBuf, handle: OwnedFd, stat: &Stat) -> io::Result<()> {
        self.judge(&path, ComponentKind::Directory, &handle, stat)?;
        let sticky = stat.st_mode & OTHERS_WRITE != 0 && !is_read_only(&handle)?;
        self.directories.push(Directory { path, handle, sticky });
        Ok(())
    }

    fn follow(&mut self, path: &Path, link: &OwnedFd, stat: &Stat) -> io::Result<()> {
        self.links += 1;
        if self.links > MAX_LINKS {
            return Err(Errno::LOOP.into());
        }
        // Elsewhere a link cannot be changed by its owner: only one who may write to its directory can replace it.
        if self.directory().sticky {
            self.judge(path, ComponentKind::Link, link, stat)?;
        }
        let target = PathBuf::from(OsString::from_vec(readlinkat(link, "", Vec::new())?.into_bytes()));
        if target.is_absolute() {
            self.directories.truncate(1);
        }
        self.push_components(&target);
        Ok(())
    }

    /// Refuses a component that a user other than root and our own could change.
    fn judge(&self, path: &Path, kind: ComponentKind, handle: &OwnedFd, stat: &Stat) -> io::Result<()> {
        let is_ours = stat.st_uid == 0 || stat.st_uid == self.user || Some(stat.st_uid) == self.service_user;
        let only_we_write = match kind {
            ComponentKind::Link => true,
            ComponentKind::File => stat.st_mode & OTHERS_WRITE == 0,
            ComponentKind::Directory => stat.st_mode & OTHERS_WRITE == 0 || stat.st_mode & STICKY != 0,
        };
        if (is_ours && only_we_write) || is_read_only(handle)? {
            return Ok(());
        }
        Err(self.refusal(path, kind, stat))
    }

    fn refusal(&self, path: &Path, kind: ComponentKind, stat: &Stat) -> io::Error {
        let refused = ChangeableByOthers {
            component: path.to_owned(),
            owner: stat.st_uid,
            mode: stat.st_mode & 0o7777,
            kind,
            target: self.target.to_owned(),
            user: self.service_user.filter(|user| *user == stat.st_uid).unwrap_or(self.user),
        };
        io::Error::new(io::ErrorKind::PermissionDenied, refused)
    }
}

/// Whether the file is on a mount that is read-only here.
fn is_read_only(handle: impl AsFd) -> io::Result<bool> {
    Ok(fstatvfs(handle)?.f_flag.contains(StatVfsMountFlags::RDONLY))
}

/// Returns the path as a word for a shell.
fn shell_word(path: &Path) -> String {
    let text = path.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+,:@%".contains(c);
    match text.chars().all(plain) {
        true => text.into_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

/// Returns the refusal inside an error, if another user could change the file.
pub fn refusal(error: &io::Error) -> Option<&ChangeableByOthers> {
    error.get_ref()?.downcast_ref()
}

#[cfg(test)]
mod tests;
