//! Reads files by a glob pattern, such as those in /sys, in the order of their paths.

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
    rc::Rc,
};

use doctor_checks::probe::FileText;
use doctor_core::{
    hex,
    observation::{FailureKind, ProbeFailure},
};
use rustix::fs::OFlags;

use super::{
    kind_of,
    small_file::{read_start, to_text},
};

/// No check expects more files.
const MAX_FILES: usize = 16_384;
/// No check expects a directory with more names.
const MAX_NAMES: usize = 100_000;
/// Limit per file. Files of /sys have a page at most.
const MAX_FILE_BYTES: u64 = 64 << 10;
/// Limit of all files together.
const MAX_TOTAL_BYTES: usize = 4 << 20;

/// The files below a root, for one pass: a directory that several patterns share is listed once.
#[derive(Debug)]
pub(super) struct Tree {
    root: PathBuf,
    listed: HashMap<PathBuf, Rc<[String]>>,
}

impl Tree {
    pub(super) fn below(root: &Path) -> Self {
        Self { root: root.to_owned(), listed: HashMap::new() }
    }

    pub(super) fn texts(&mut self, pattern: &str) -> io::Result<Vec<FileText>> {
        let mut total_bytes = 0;
        let mut files = Vec::new();
        for (path, host_path) in self.expand(pattern)? {
            let text = match read_start(&path, &host_path, MAX_FILE_BYTES + 1) {
                Ok(bytes) if bytes.len() as u64 > MAX_FILE_BYTES => Err(ProbeFailure::new(
                    FailureKind::TooLong,
                    format!("{path} is longer than {MAX_FILE_BYTES} bytes"),
                )),
                Ok(bytes) => Ok(to_text(bytes)),
                // A pattern matches files only.
                Err(error) if error.kind() == io::ErrorKind::IsADirectory => continue,
                Err(_) if is_absent(&host_path) => continue,
                Err(error) => Err(failure(&path, &error)),
            };
            total_bytes += text.as_ref().map_or(0, String::len);
            if total_bytes > MAX_TOTAL_BYTES {
                return Err(too_much());
            }
            files.push(FileText { path, text });
        }
        Ok(files)
    }

    /// Reads the first `max_bytes` bytes of each file. Longer files are no error.
    pub(super) fn bytes(&mut self, pattern: &str, max_bytes: u32) -> io::Result<Vec<FileText>> {
        let max_bytes = u64::from(max_bytes).min(MAX_FILE_BYTES);
        let mut total_bytes = 0;
        let mut files = Vec::new();
        for (path, host_path) in self.expand(pattern)? {
            let text = match read_start(&path, &host_path, max_bytes) {
                Ok(bytes) => Ok(hex::encode(&bytes)),
                Err(_) if is_absent(&host_path) => continue,
                Err(error) => Err(failure(&path, &error)),
            };
            total_bytes += text.as_ref().map_or(0, String::len);
            if total_bytes > MAX_TOTAL_BYTES {
                return Err(too_much());
            }
            files.push(FileText { path, text });
        }
        Ok(files)
    }

    /// Resolves each matching link to its final target.
    pub(super) fn links(&mut self, pattern: &str) -> io::Result<Vec<(String, String)>> {
        let real_root = self.root.canonicalize()?;
        let resolve = |(path, host_path): (String, PathBuf)| {
            let is_link = host_path.symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_symlink());
            let target = is_link.then(|| resolve_link(&host_path).ok()).flatten()?;
            let inside =
                target.strip_prefix(&real_root).map_or_else(|_| target.clone(), |rest| Path::new("/").join(rest));
            Some((path, inside.to_string_lossy().into_owned()))
        };
        Ok(self.expand(pattern)?.into_iter().filter_map(resolve).collect())
    }

    /// Returns the candidate paths in order, as the check names them and as they are below the root. Reading shows
    /// whether they exist.
    fn expand(&mut self, pattern: &str) -> io::Result<Vec<(String, PathBuf)>> {
        let mut paths = vec![(String::new(), self.root.clone())];
        for part in pattern.trim_start_matches('/').split('/') {
            let mut next = Vec::new();
            for (mut path, mut host_path) in paths {
                if part.contains('*') {
                    for name in self.list(&host_path)?.iter().filter(|name| matches_name(part, name)) {
                        next.push((format!("{path}/{name}"), host_path.join(name)));
                    }
                } else {
                    path.push('/');
                    path.push_str(part);
                    host_path.push(part);
                    next.push((path, host_path));
                }
                if next.len() > MAX_FILES {
                    return Err(too_much());
                }
            }
            paths = next;
        }
        Ok(paths)
    }

    /// Returns the sorted names in a directory.
    fn list(&mut self, host_path: &Path) -> io::Result<Rc<[String]>> {
        if let Some(names) = self.listed.get(host_path) {
            return Ok(Rc::clone(names));
        }
        let names: Rc<[String]> = list(host_path)?.into();
        self.listed.insert(host_path.to_owned(), Rc::clone(&names));
        Ok(names)
    }
}

/// Whether the path does not exist, or was removed between listing and reading. A dangling link exists but cannot be
/// read.
fn is_absent(host_path: &Path) -> bool {
    host_path.symlink_metadata().is_err()
}

/// Resolves a link through the kernel: resolving each directory on the way would take ten times as long.
fn resolve_link(link: &Path) -> io::Result<PathBuf> {
    let flags = i32::try_from(OFlags::PATH.bits()).unwrap_or(0);
    let target = File::options().read(true).custom_flags(flags).open(link)?;
    fs::read_link(format!("/proc/self/fd/{}", target.as_raw_fd())).or_else(|_no_proc| link.canonicalize())
}

fn failure(path: &str, error: &io::Error) -> ProbeFailure {
    ProbeFailure::new(kind_of(error), format!("{path}: {error}"))
}

fn too_much() -> io::Error {
    io::ErrorKind::FileTooLarge.into()
}

fn list(host_path: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(host_path) {
        Ok(entries) => entries,
        // No such directory means no matches.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(error),
    };
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry?.file_name().to_string_lossy().into_owned());
        if names.len() > MAX_NAMES {
            return Err(too_much());
        }
    }
    names.sort_by(|a, b| natural_order(a, b));
    Ok(names)
}

/// Matches a name. Hidden files match only a pattern that starts with a dot.
fn matches_name(pattern: &str, name: &str) -> bool {
    matches_pattern(pattern, name) && (pattern.starts_with('.') || !name.starts_with('.'))
}

/// Matches a name with a pattern in which each `*` stands for any text.
fn matches_pattern(pattern: &str, name: &str) -> bool {
    let Some((before, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(name) = name.strip_prefix(before) else { return false };
    if !rest.contains('*') {
        return name.ends_with(rest);
    }
    name.char_indices().map(|(at, _)| at).chain([name.len()]).any(|at| matches_pattern(rest, &name[at..]))
}

/// Orders `mlx5_2` before `mlx5_10`.
fn natural_order(a: &str, b: &str) -> std::cmp::Ordering {
    let key = |text: &str| {
        let name = text.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        (name, text[name..].parse::<u64>().unwrap_or(0))
    };
    let ((a_name, a_number), (b_name, b_number)) = (key(a), key(b));
    a[..a_name].cmp(&b[..b_name]).then(a_number.cmp(&b_number)).then_with(|| a.cmp(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in [
            ("sys/class/infiniband/mlx5_10/ports/1/state", "4: ACTIVE\n"),
            ("sys/class/infiniband/mlx5_2/ports/1/state", "1: DOWN\n"),
            ("sys/class/infiniband/mlx5_2/ports/1/rate", "400 Gb/sec\n"),
            ("sys/class/infiniband/.hidden/ports/1/state", "x"),
            ("sys/devices/pci0/config", "\u{1}\u{2}abcdef"),
        ] {
            let file = root.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        std::os::unix::fs::symlink("../devices/pci0", root.path().join("sys/class/link")).unwrap();
        root
    }

    #[test]
    fn matching_files_are_read_in_natural_order() {
        let root = tree();
        let files = Tree::below(root.path()).texts("/sys/class/infiniband/*/ports/*/state").unwrap();
        let contents: Vec<_> =
            files.iter().map(|file| (file.path.as_str(), file.text.as_deref().unwrap().trim())).collect();
        assert_eq!(
            contents,
            [
                ("/sys/class/infiniband/mlx5_2/ports/1/state", "1: DOWN"),
                ("/sys/class/infiniband/mlx5_10/ports/1/state", "4: ACTIVE"),
            ]
        );
    }

    #[test]
    fn a_star_matches_any_text() {
        for (pattern, name, expected) in [
            ("libnvidia-*.so.*", "libnvidia-ml.so.1", true),
            ("libnvidia-*.so.*", "libnvidia-ml.so", false),
            ("libcuda.so.*", "libcuda.so.570.124.06", true),
            ("nvme*n*", "nvme0n1", true),
            ("*", "", true),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches_pattern(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn no_match_is_an_empty_list_and_an_unreadable_file_is_an_error() {
        let root = tree();
        assert_eq!(Tree::below(root.path()).texts("/sys/class/nvme/*/state").unwrap(), []);
        assert_eq!(Tree::below(root.path()).texts("/sys/class/infiniband/*").unwrap(), [], "directories are no files");
        let big = root.path().join("sys/big");
        fs::write(&big, vec![b'x'; MAX_FILE_BYTES as usize + 1]).unwrap();
        let files = Tree::below(root.path()).texts("/sys/b*g").unwrap();
        assert_eq!(files[0].text.as_ref().unwrap_err().kind, FailureKind::TooLong);
    }

    #[test]
    fn bytes_are_read_as_hexadecimal_and_links_are_resolved() {
        let root = tree();
        let files = Tree::below(root.path()).bytes("/sys/devices/*/config", 3).unwrap();
        assert_eq!(files[0].text.as_deref(), Ok("010261"));
        let links = Tree::below(root.path()).links("/sys/class/l*").unwrap();
        assert_eq!(links, [("/sys/class/link".to_owned(), "/sys/devices/pci0".to_owned())]);
    }
}
