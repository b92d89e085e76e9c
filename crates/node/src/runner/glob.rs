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
        let mut together = 0;
        let mut files = Vec::new();
        for (path, place) in self.expand(pattern)? {
            let text = match read_start(&path, &place, MAX_FILE_BYTES + 1) {
                Ok(bytes) if bytes.len() as u64 > MAX_FILE_BYTES => Err(ProbeFailure::new(
                    FailureKind::TooLong,
                    format!("{path} is longer than {MAX_FILE_BYTES} bytes"),
                )),
                Ok(bytes) => Ok(to_text(bytes)),
                // A pattern matches files only.
                Err(error) if error.kind() == io::ErrorKind::IsADirectory => continue,
                Err(_) if is_absent(&place) => continue,
                Err(error) => Err(failure(&path, &error)),
            };
            together += text.as_ref().map_or(0, String::len);
            if together > MAX_TOTAL_BYTES {
                return Err(too_much());
            }
            files.push(FileText { path, text });
        }
        Ok(files)
    }

    /// Reads the first `most` bytes of each file. Longer files are no error.
    pub(super) fn bytes(&mut self, pattern: &str, most: u32) -> io::Result<Vec<FileText>> {
        let most = u64::from(most).min(MAX_FILE_BYTES);
        let mut together = 0;
        let mut files = Vec::new();
        for (path, place) in self.expand(pattern)? {
            let text = match read_start(&path, &place, most) {
                Ok(bytes) => Ok(hex::encode(&bytes)),
                Err(_) if is_absent(&place) => continue,
                Err(error) => Err(failure(&path, &error)),
            };
            together += text.as_ref().map_or(0, String::len);
            if together > MAX_TOTAL_BYTES {
                return Err(too_much());
            }
            files.push(FileText { path, text });
        }
        Ok(files)
    }

    /// Resolves each matching link to its final target.
    pub(super) fn links(&mut self, pattern: &str) -> io::Result<Vec<(String, String)>> {
        let real_root = self.root.canonicalize()?;
        let lead = |(path, place): (String, PathBuf)| {
            let is_link = place.symlink_metadata().is_ok_and(|found| found.file_type().is_symlink());
            let target = is_link.then(|| resolve_link(&place).ok()).flatten()?;
            let inside =
                target.strip_prefix(&real_root).map_or_else(|_| target.clone(), |rest| Path::new("/").join(rest));
            Some((path, inside.to_string_lossy().into_owned()))
        };
        Ok(self.expand(pattern)?.into_iter().filter_map(lead).collect())
    }

    /// Returns the candidate paths in order, as the check names them and as they are below the root. Reading shows
    /// whether they exist.
    fn expand(&mut self, pattern: &str) -> io::Result<Vec<(String, PathBuf)>> {
        let mut found = vec![(String::new(), self.root.clone())];
        for part in pattern.trim_start_matches('/').split('/') {
            let mut next = Vec::new();
            for (mut path, mut place) in found {
                if part.contains('*') {
                    for name in self.list(&place)?.iter().filter(|name| matches_name(part, name)) {
                        next.push((format!("{path}/{name}"), place.join(name)));
                    }
                } else {
                    path.push('/');
                    path.push_str(part);
                    place.push(part);
                    next.push((path, place));
                }
                if next.len() > MAX_FILES {
                    return Err(too_much());
                }
            }
            found = next;
        }
        Ok(found)
    }

    /// Returns the sorted names in a directory.
    fn list(&mut self, place: &Path) -> io::Result<Rc<[String]>> {
        if let Some(names) = self.listed.get(place) {
            return Ok(Rc::clone(names));
        }
        let names: Rc<[String]> = list(place)?.into();
        self.listed.insert(place.to_owned(), Rc::clone(&names));
        Ok(names)
    }
}

/// Whether the path does not exist, or was removed between listing and reading. A dangling link exists but cannot be
/// read.
fn is_absent(place: &Path) -> bool {
    place.symlink_metadata().is_err()
}

/// Resolves a link through the kernel: resolving each directory on the way would take ten times as long.
fn resolve_link(link: &Path) -> io::Result<PathBuf> {
    let flags = i32::try_from(OFlags::PATH.bits()).unwrap_or(0);
    let there = File::options().read(true).custom_flags(flags).open(link)?;
    fs::read_link(format!("/proc/self/fd/{}", there.as_raw_fd())).or_else(|_no_proc| link.canonicalize())
}

fn failure(path: &str, error: &io::Error) -> ProbeFailure {
    ProbeFailure::new(kind_of(error), format!("{path}: {error}"))
}

fn too_much() -> io::Error {
    io::ErrorKind::FileTooLarge.into()
}

fn list(place: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(place) {
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
            let place = root.path().join(path);
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            fs::write(place, text).unwrap();
        }
        std::os::unix::fs::symlink("../devices/pci0", root.path().join("sys/class/link")).unwrap();
        root
    }

    #[test]
    fn what_fits_is_read_in_the_order_of_numbers() {
        let root = tree();
        let files = Tree::below(root.path()).texts("/sys/class/infiniband/*/ports/*/state").unwrap();
        let seen: Vec<_> =
            files.iter().map(|file| (file.path.as_str(), file.text.as_deref().unwrap().trim())).collect();
        assert_eq!(
            seen,
            [
                ("/sys/class/infiniband/mlx5_2/ports/1/state", "1: DOWN"),
                ("/sys/class/infiniband/mlx5_10/ports/1/state", "4: ACTIVE"),
            ]
        );
    }

    #[test]
    fn a_star_stands_for_any_text() {
        for (pattern, name, is) in [
            ("libnvidia-*.so.*", "libnvidia-ml.so.1", true),
            ("libnvidia-*.so.*", "libnvidia-ml.so", false),
            ("libcuda.so.*", "libcuda.so.570.124.06", true),
            ("nvme*n*", "nvme0n1", true),
            ("*", "", true),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches_pattern(pattern, name), is, "{pattern} {name}");
        }
    }

    #[test]
    fn nothing_that_fits_is_an_answer_and_a_file_that_cannot_be_read_is_told() {
        let root = tree();
        assert_eq!(Tree::below(root.path()).texts("/sys/class/nvme/*/state").unwrap(), []);
        assert_eq!(Tree::below(root.path()).texts("/sys/class/infiniband/*").unwrap(), [], "directories are no files");
        let big = root.path().join("sys/big");
        fs::write(&big, vec![b'x'; MAX_FILE_BYTES as usize + 1]).unwrap();
        let files = Tree::below(root.path()).texts("/sys/b*g").unwrap();
        assert_eq!(files[0].text.as_ref().unwrap_err().kind, FailureKind::TooLong);
    }

    #[test]
    fn bytes_come_in_hexadecimal_and_links_lead_somewhere() {
        let root = tree();
        let files = Tree::below(root.path()).bytes("/sys/devices/*/config", 3).unwrap();
        assert_eq!(files[0].text.as_deref(), Ok("010261"));
        let found = Tree::below(root.path()).links("/sys/class/l*").unwrap();
        assert_eq!(found, [("/sys/class/link".to_owned(), "/sys/devices/pci0".to_owned())]);
    }
}
