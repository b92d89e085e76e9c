//! Files on the shared directory, which other nodes write too.
//!
//! A job often runs as root, and the shared directory may be writable for every node: a link that another node planted there must not
//! lead what a job reads or writes to a file of this node. So no link is followed below the data directory, which is found by the
//! layout of the path. Links above it are those of this node.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io,
    path::{Component, Path, PathBuf},
};

use doctor_checks::job_file::SLURM_FOLDER;
use doctor_host::{jobs::RUNS, shared_directory::SharedDirectory};

use super::{output::make_folders, parent};

/// Directories below the data directory of a log or a document: `<data>/<test>/<node>/<file>`.
const TEST_DEPTH: usize = 2;

#[derive(Debug)]
pub(super) struct SharedFile {
    directory: SharedDirectory,
    name: OsString,
}

impl SharedFile {
    /// Opens the directory of a log or a document, and creates what is missing of it.
    ///
    /// # Errors
    /// If something else has the name of a directory, or the file system fails.
    pub(super) fn of_test(path: &Path) -> io::Result<Self> {
        let name = name(path)?.to_owned();
        Ok(Self { directory: make_directory(split(parent(path), TEST_DEPTH))?, name })
    }

    /// Opens the directory of the claim on a run, and creates what is missing of it.
    ///
    /// # Errors
    /// If something else has the name of a directory, or the file system fails.
    pub(super) fn of_run(path: &Path) -> io::Result<Self> {
        let name = name(path)?.to_owned();
        Ok(Self { directory: make_run_directory(parent(path))?, name })
    }

    /// Opens the file for appending.
    pub(super) fn append(&self) -> io::Result<File> {
        Ok(self.directory.append(&self.name)?)
    }

    /// Writes the file: readers see the whole content or none.
    pub(super) fn write(&self, mut content: &[u8]) -> io::Result<()> {
        let _written = self.directory.replace(&self.name, &mut content)?;
        Ok(())
    }

    /// Creates the file with its content, unless there is one. Returns whether it was created.
    pub(super) fn create(&self, mut content: &[u8]) -> io::Result<bool> {
        Ok(self.directory.create_exclusive(&self.name, &mut content)?)
    }
}

/// Opens the directory of a run or of a report, and creates what is missing of it.
///
/// # Errors
/// If something else has the name of a directory, or the file system fails.
pub(crate) fn make_run_directory(directory: &Path) -> io::Result<SharedDirectory> {
    make_directory(split_run_directory(directory))
}

/// Reads a file in the directory of a run or of a report, or of all runs. Of a longer file, `max_bytes + 1` bytes are returned.
///
/// # Errors
/// If something else has its name, or that of a directory on the way, or the file system fails.
pub(crate) fn read(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let (data, below) = split_run_directory(parent(path));
    let content = SharedDirectory::open(&data)?.read(&below.join(name(path)?), max_bytes)?;
    content.ok_or_else(|| rustix::io::Errno::NOENT.into())
}

/// Returns the data directory of a directory of a run or of a report, or of all runs, and the path below it.
pub(crate) fn split_run_directory(directory: &Path) -> (PathBuf, PathBuf) {
    let is_in = |all: &str| directory.parent().is_some_and(|parent| parent.ends_with(all));
    let depth = if is_in(SLURM_FOLDER) {
        3
    } else if directory.ends_with(SLURM_FOLDER) || is_in(RUNS) {
        2
    } else {
        // A person named it, or it is in the state directory of this machine: links in it are those of this node.
        0
    };
    split(directory, depth)
}

fn name(path: &Path) -> io::Result<&OsStr> {
    path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"))
}

/// Returns the data directory, which is at most `depth` levels above, and the path below it.
fn split(directory: &Path, depth: usize) -> (PathBuf, PathBuf) {
    let parts: Vec<Component<'_>> = directory.components().collect();
    let plain = parts.iter().rev().take(depth).take_while(|part| matches!(part, Component::Normal(_))).count();
    let (root, below) = parts.split_at(parts.len() - plain);
    let root: PathBuf = if root.is_empty() { ".".into() } else { root.iter().collect() };
    (root, below.iter().collect())
}

fn make_directory((data, below): (PathBuf, PathBuf)) -> io::Result<SharedDirectory> {
    make_folders(&data)?;
    let mut directory = SharedDirectory::open(&data)?;
    for part in &below {
        let part = Path::new(part);
        directory = match directory.subdirectory(part)? {
            Some(existing) => existing,
            None => {
                let made = directory.make_subdirectory(part)?;
                // Another job of another user may have made it at the same time, with the mode that it wanted.
                let _kept = made.inherit_group_write(&directory);
                made
            }
        };
    }
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fs,
        os::unix::fs::{PermissionsExt, symlink},
    };

    #[test]
    fn the_data_directory_is_two_levels_above_a_files_directory() {
        for (directory, root, below) in [
            ("/data/memory/n1", "/data", "memory/n1"),
            ("/data/memory", "/", "data/memory"),
            ("memory/n1", ".", "memory/n1"),
            ("n1", ".", "n1"),
            (".", ".", ""),
            ("/", "/", ""),
            ("/data/../n1", "/data/..", "n1"),
        ] {
            assert_eq!(split(Path::new(directory), TEST_DEPTH), (root.into(), below.into()), "{directory}");
        }
    }

    #[test]
    fn the_data_directory_of_a_run_is_found_by_the_layout_of_the_path() {
        for (directory, root, below) in [
            ("/share/metadata/slurm/r7", "/share", "metadata/slurm/r7"),
            ("/share/metadata/slurm/report-o7/", "/share", "metadata/slurm/report-o7"),
            ("/share/metadata/slurm", "/share", "metadata/slurm"),
            ("/share/metadata/slurm/metadata/slurm/r7", "/share/metadata/slurm", "metadata/slurm/r7"),
            ("metadata/slurm/r7", ".", "metadata/slurm/r7"),
            ("/home/op/.cache/hosts/n1/runs/r7", "/home/op/.cache/hosts/n1", "runs/r7"),
            ("/var/lib/cluster-doctor/repairs/runs/r7", "/var/lib/cluster-doctor/repairs", "runs/r7"),
            ("/var/lib/cluster-doctor/reports/runs/r7/report", "/var/lib/cluster-doctor/reports/runs/r7/report", ""),
            ("/var/run", "/var/run", ""),
            ("/share/otherdata/slurm/r7", "/share/otherdata/slurm/r7", ""),
            (".", ".", ""),
        ] {
            assert_eq!(split_run_directory(Path::new(directory)), (root.into(), below.into()), "{directory}");
        }
    }

    /// Other nodes could plant each of these.
    #[test]
    fn a_link_on_the_way_is_an_error_and_nothing_is_written_through_it() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("share/memory")).unwrap();
        fs::create_dir_all(at("etc/n1")).unwrap();
        symlink(at("etc"), at("share/memory/n1")).unwrap();
        symlink(at("etc"), at("share/dl")).unwrap();
        for path in ["share/memory/n1/a.json", "share/dl/n1/a.json"] {
            let error = SharedFile::of_test(&at(path)).unwrap_err().to_string();
            assert!(error.contains("is a symbolic link, and a directory belongs there"), "{error}");
        }
        fs::write(at("etc/secret"), "untouched").unwrap();
        fs::create_dir_all(at("share/disk/n1")).unwrap();
        symlink(at("etc/secret"), at("share/disk/n1/a.log")).unwrap();
        let file = SharedFile::of_test(&at("share/disk/n1/a.log")).unwrap();
        let error = file.append().unwrap_err().to_string();
        assert!(error.contains("is a symbolic link, and a file belongs there"), "{error}");
        file.write(b"document").unwrap();
        assert_eq!(fs::read_to_string(at("etc/secret")).unwrap(), "untouched");
        assert_eq!(fs::read(at("share/disk/n1/a.log")).unwrap(), b"document");
        assert_eq!(fs::read_dir(at("etc")).unwrap().count(), 2);
    }

    #[test]
    fn new_directories_inherit_group_write_permission() {
        let folder = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        for (above, expected) in [(0o755, 0), (0o2775, 0o2020)] {
            fs::set_permissions(folder.path(), fs::Permissions::from_mode(above)).unwrap();
            let path = folder.path().join(format!("memory-{above:o}/n1/a.log"));
            for _ in 0..2 {
                drop(SharedFile::of_test(&path).unwrap().append().unwrap());
            }
            for directory in path.ancestors().skip(1).take(TEST_DEPTH) {
                assert_eq!(mode(directory) & 0o2020, expected, "{}", directory.display());
            }
        }
    }
}
