//! Files by a pattern: those of /sys that there are several of, read in the order of their paths.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use doctor_checks::probe::FileText;
use doctor_core::observation::{FailureKind, ProbeFailure};

use super::{kind_of, reading};

/// A check that means more files means something else.
const MOST_FILES: usize = 16_384;
/// Of one file. Those of /sys have a page at most.
const MOST_BYTES: u64 = 64 << 10;
/// Of all together.
const MOST_TOGETHER: usize = 4 << 20;

pub(super) fn texts(root: &Path, pattern: &str) -> io::Result<Vec<FileText>> {
    read(root, pattern, MOST_BYTES, |bytes| String::from_utf8_lossy(bytes).into_owned())
}

pub(super) fn bytes(root: &Path, pattern: &str, most: u32) -> io::Result<Vec<FileText>> {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let most = u64::from(most).min(MOST_BYTES);
    // Only the beginning was asked for: what comes after it is no reason to refuse.
    let mut together = 0;
    let one = |(path, place): (String, PathBuf)| {
        let text = begin(&place, most).map(|bytes| hex(&bytes)).map_err(|error| failure(&path, &error));
        together += text.as_ref().map_or(0, String::len);
        if together > MOST_TOGETHER { Err(too_much()) } else { Ok(FileText { path, text }) }
    };
    expand(root, pattern)?.into_iter().map(one).collect()
}

/// Where each link leads in the end.
pub(super) fn links(root: &Path, pattern: &str) -> io::Result<Vec<(String, String)>> {
    let real_root = root.canonicalize()?;
    let lead = |(path, place): (String, PathBuf)| {
        let is_link = place.symlink_metadata().is_ok_and(|found| found.file_type().is_symlink());
        let target = is_link.then(|| place.canonicalize().ok()).flatten()?;
        let inside = target.strip_prefix(&real_root).map_or_else(|_| target.clone(), |rest| Path::new("/").join(rest));
        Some((path, inside.to_string_lossy().into_owned()))
    };
    Ok(expand(root, pattern)?.into_iter().filter_map(lead).collect())
}

fn read(root: &Path, pattern: &str, most: u64, form: impl Fn(&[u8]) -> String) -> io::Result<Vec<FileText>> {
    let mut together = 0;
    let mut files = Vec::new();
    for (path, place) in expand(root, pattern)? {
        let text = match begin(&place, most + 1) {
            Ok(bytes) if bytes.len() as u64 > most => {
                Err(ProbeFailure::new(FailureKind::TooLong, format!("{path} is longer than {most} bytes")))
            }
            Ok(bytes) => Ok(form(&bytes)),
            // A directory that fits is no file.
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => continue,
            // It went away between listing and reading: then it is not there.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => Err(failure(&path, &error)),
        };
        together += text.as_ref().map_or(0, String::len);
        if together > MOST_TOGETHER {
            return Err(too_much());
        }
        files.push(FileText { path, text });
    }
    Ok(files)
}

fn begin(place: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = File::options().read(true).custom_flags(reading::nonblocking()).open(place)?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn failure(path: &str, error: &io::Error) -> ProbeFailure {
    ProbeFailure::new(kind_of(error), format!("{path}: {error}"))
}

fn too_much() -> io::Error {
    io::ErrorKind::FileTooLarge.into()
}

/// Paths that fit, as the check calls them and as they are here, in order.
fn expand(root: &Path, pattern: &str) -> io::Result<Vec<(String, PathBuf)>> {
    let mut found = vec![(String::new(), root.to_path_buf())];
    for part in pattern.trim_start_matches('/').split('/') {
        let mut next = Vec::new();
        for (path, place) in found {
            if part.contains('*') {
                for name in fitting(&place, part)? {
                    next.push((format!("{path}/{name}"), place.join(&name)));
                }
            } else {
                next.push((format!("{path}/{part}"), place.join(part)));
            }
            if next.len() > MOST_FILES {
                return Err(too_much());
            }
        }
        found = next;
    }
    found.retain(|(_, place)| place.symlink_metadata().is_ok());
    Ok(found)
}

fn fitting(place: &Path, pattern: &str) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(place) {
        Ok(entries) => entries,
        // Nothing of that kind is here, which is what was asked.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(error),
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if fits(pattern, &name) && (pattern.starts_with('.') || !name.starts_with('.')) {
            names.push(name);
        }
        if names.len() > MOST_FILES {
            return Err(too_much());
        }
    }
    names.sort_by(|a, b| by_number(a, b));
    Ok(names)
}

/// Whether a name fits a pattern in which each `*` stands for any text.
fn fits(pattern: &str, name: &str) -> bool {
    let Some((before, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(name) = name.strip_prefix(before) else { return false };
    if !rest.contains('*') {
        return name.ends_with(rest);
    }
    name.char_indices().map(|(at, _)| at).chain([name.len()]).any(|at| fits(rest, &name[at..]))
}

/// `mlx5_2` before `mlx5_10`.
fn by_number(a: &str, b: &str) -> std::cmp::Ordering {
    let key = |text: &str| {
        let digits = text.len() - text.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let (name, number) = text.split_at(text.len() - digits);
        (name.to_owned(), number.parse::<u64>().unwrap_or(0))
    };
    key(a).cmp(&key(b)).then_with(|| a.cmp(b))
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
        let files = texts(root.path(), "/sys/class/infiniband/*/ports/*/state").unwrap();
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
            assert_eq!(fits(pattern, name), is, "{pattern} {name}");
        }
    }

    #[test]
    fn nothing_that_fits_is_an_answer_and_a_file_that_cannot_be_read_is_told() {
        let root = tree();
        assert_eq!(texts(root.path(), "/sys/class/nvme/*/state").unwrap(), []);
        assert_eq!(texts(root.path(), "/sys/class/infiniband/*").unwrap(), [], "directories are no files");
        let big = root.path().join("sys/big");
        fs::write(&big, vec![b'x'; MOST_BYTES as usize + 1]).unwrap();
        let files = texts(root.path(), "/sys/b*g").unwrap();
        assert_eq!(files[0].text.as_ref().unwrap_err().kind, FailureKind::TooLong);
    }

    #[test]
    fn bytes_come_in_hexadecimal_and_links_lead_somewhere() {
        let root = tree();
        let files = bytes(root.path(), "/sys/devices/*/config", 3).unwrap();
        assert_eq!(files[0].text.as_deref(), Ok("010261"));
        let found = links(root.path(), "/sys/class/l*").unwrap();
        assert_eq!(found, [("/sys/class/link".to_owned(), "/sys/devices/pci0".to_owned())]);
    }
}
