//! A file of a job on the shared directory, which other nodes write too.
//!
//! A job often runs as root, and the shared directory may be writable for every node: a link that another node planted there must not
//! lead a job's log or document to a file of this node. Jobs write `<data>/<test>/<node>/<file>`, so no link is followed below
//! the data directory. Links above it are those of this node.

use std::{
    ffi::OsString,
    fs::File,
    io,
    path::{Component, Path, PathBuf},
};

use doctor_host::shared_directory::SharedDirectory;

use super::{output::make_folders, parent};

/// Directories below the data directory.
const DEPTH: usize = 2;

#[derive(Debug)]
pub(super) struct SharedFile {
    directory: SharedDirectory,
    name: OsString,
}

impl SharedFile {
    /// Opens the directory of a file, and creates what is missing of it.
    ///
    /// # Errors
    /// If something else has the name of a directory, or the file system fails.
    pub(super) fn in_directory(path: &Path) -> io::Result<Self> {
        let name = path.file_name();
        let name = name.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"))?;
        let (root, below) = split(parent(path));
        make_folders(&root)?;
        let mut directory = SharedDirectory::open(&root)?;
        for part in below {
            directory = match directory.subdirectory(&part)? {
                Some(existing) => existing,
                None => {
                    let made = directory.make_subdirectory(&part)?;
                    // Another job of another user may have made it at the same time, with the mode that it wanted.
                    let _kept = made.inherit_group_write(&directory);
                    made
                }
            };
        }
        Ok(Self { directory, name: name.to_owned() })
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
}

/// Returns the data directory, and the names of the directories below it.
fn split(directory: &Path) -> (PathBuf, Vec<PathBuf>) {
    let parts: Vec<Component<'_>> = directory.components().collect();
    let plain = parts.iter().rev().take(DEPTH).take_while(|part| matches!(part, Component::Normal(_))).count();
    let (root, below) = parts.split_at(parts.len() - plain);
    let root: PathBuf = if root.is_empty() { ".".into() } else { root.iter().collect() };
    (root, below.iter().map(PathBuf::from).collect())
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
            ("/data/memory/n1", "/data", vec!["memory", "n1"]),
            ("/data/memory", "/", vec!["data", "memory"]),
            ("memory/n1", ".", vec!["memory", "n1"]),
            ("n1", ".", vec!["n1"]),
            (".", ".", vec![]),
            ("/", "/", vec![]),
            ("/data/../n1", "/data/..", vec!["n1"]),
        ] {
            let below: Vec<PathBuf> = below.into_iter().map(PathBuf::from).collect();
            assert_eq!(split(Path::new(directory)), (root.into(), below), "{directory}");
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
            let error = SharedFile::in_directory(&at(path)).unwrap_err().to_string();
            assert!(error.contains("is a symbolic link, and a directory belongs there"), "{error}");
        }
        fs::write(at("etc/secret"), "untouched").unwrap();
        fs::create_dir_all(at("share/disk/n1")).unwrap();
        symlink(at("etc/secret"), at("share/disk/n1/a.log")).unwrap();
        let file = SharedFile::in_directory(&at("share/disk/n1/a.log")).unwrap();
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
                drop(SharedFile::in_directory(&path).unwrap().append().unwrap());
            }
            for directory in path.ancestors().skip(1).take(DEPTH) {
                assert_eq!(mode(directory) & 0o2020, expected, "{}", directory.display());
            }
        }
    }
}
