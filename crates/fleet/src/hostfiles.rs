//! `hostfile` and `hostfile-ip`: one host per line, names in one file and addresses in the other, in the same order and
//! with nothing else, because `mpirun`, `parallel-ssh` and shell loops read them.
//!
//! A host in the file keeps its position, so that ranks stay the same. A host that does not answer keeps its last known
//! line. Both files are replaced by rename, so that readers never see a partial file.
//!
//! Two files cannot be replaced in one step. The new content of both is therefore written beside them first
//! (`.hostfile.next`) and removed when both are replaced: while it exists the two may disagree, and the next run
//! completes the replacement.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use doctor_core::{hostlist::MAX_NODES, ids::NodeName};
use serde::{Deserialize, Serialize};

/// The size limit of a file: 256 bytes for each of at most 100,000 hosts, more than name and address together take.
const MAX_BYTES: u64 = MAX_NODES as u64 * 256;

/// A host in the two files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostLine {
    pub name: NodeName,
    /// The address, or the name if the address is unknown.
    pub address: String,
}

/// The paths of the two files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFiles {
    pub names: PathBuf,
    pub addresses: PathBuf,
}

/// The changes that a write makes to the files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Difference {
    pub added: Vec<HostLine>,
    pub removed: Vec<HostLine>,
    pub moved: Vec<AddressChange>,
}

/// A host whose address changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AddressChange {
    pub name: NodeName,
    pub from: String,
    pub to: String,
}

#[derive(Debug, thiserror::Error)]
pub enum BadHostFiles {
    #[error("reading {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("writing {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{}, line {line}: `{text}` is not a host; expected one name or address per line", path.display())]
    Line { path: PathBuf, line: usize, text: String },
}

/// Why the two files do not match line by line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inconsistency {
    /// The last run was interrupted between the two files. The intended content is known.
    Interrupted,
    /// One of the files was changed: no address is trusted.
    CountMismatch { names: usize, addresses: usize },
}

impl std::fmt::Display for Inconsistency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Interrupted => write!(f, "an earlier run stopped between writing the two files"),
            Self::CountMismatch { names, addresses } => {
                write!(f, "one file has {names} hosts and the other {addresses}: their addresses are ignored")
            }
        }
    }
}

impl Difference {
    pub const fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty() && self.moved.is_empty()
    }

    fn between(old: &[HostLine], new: &[HostLine]) -> Self {
        let (before, after) = (by_name(old), by_name(new));
        let mut difference = Self::default();
        for line in new {
            match before.get(&line.name) {
                None => difference.added.push(line.clone()),
                Some(then) if then.address != line.address => {
                    let (from, to) = (then.address.clone(), line.address.clone());
                    difference.moved.push(AddressChange { name: line.name.clone(), from, to });
                }
                Some(_) => {}
            }
        }
        difference.removed = old.iter().filter(|line| !after.contains_key(&line.name)).cloned().collect();
        difference
    }
}

impl HostFiles {
    pub fn in_folder(folder: &Path) -> Self {
        Self { names: folder.join("hostfile"), addresses: folder.join("hostfile-ip") }
    }

    /// Returns the path of the intended content while the files are being replaced.
    fn next(&self) -> PathBuf {
        let mut name = std::ffi::OsString::from(".");
        name.push(self.names.file_name().unwrap_or_default());
        name.push(".next");
        self.names.with_file_name(name)
    }

    /// Reads the files, or the intended content if a replacement was interrupted. Without the second file, names
    /// replace addresses; without both there are no hosts.
    ///
    /// # Errors With the invalid line.
    pub fn read(&self) -> Result<(Vec<HostLine>, Option<Inconsistency>), BadHostFiles> {
        if let Some(lines) = self.read_next()? {
            return Ok((lines, Some(Inconsistency::Interrupted)));
        }
        let names = read_lines(&self.names)?;
        let names: Vec<NodeName> = names
            .into_iter()
            .map(|(line, text)| {
                let bad =
                    |_| BadHostFiles::Line { path: self.names.clone(), line, text: text.chars().take(64).collect() };
                NodeName::new(&text).map_err(bad)
            })
            .collect::<Result<_, _>>()?;
        let mut addresses = read_lines(&self.addresses)?;
        let mut inconsistency = None;
        if !addresses.is_empty() && addresses.len() != names.len() {
            inconsistency = Some(Inconsistency::CountMismatch { names: names.len(), addresses: addresses.len() });
            addresses.clear();
        }
        let mut addresses = addresses.into_iter().map(|(_, address)| address);
        let line = |name: NodeName| HostLine { address: addresses.next().unwrap_or_else(|| name.to_string()), name };
        Ok((names.into_iter().map(line).collect(), inconsistency))
    }

    fn read_next(&self) -> Result<Option<Vec<HostLine>>, BadHostFiles> {
        let path = self.next();
        let failed = |source| BadHostFiles::Read { path: path.clone(), source };
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let lines = serde_json::from_reader(io::Read::take(file, MAX_BYTES));
        lines.map(Some).map_err(|error| failed(io::Error::new(io::ErrorKind::InvalidData, error)))
    }

    /// Returns these hosts in the order of the files, and what would change.
    ///
    /// # Errors As [`Self::read`].
    pub fn compare(&self, hosts: &[HostLine]) -> Result<(Vec<HostLine>, Difference), BadHostFiles> {
        let (old, _) = self.read()?;
        let new = sorted(&old, hosts);
        let difference = Difference::between(&old, &new);
        Ok((new, difference))
    }

    /// Writes these hosts. Existing hosts keep their positions, new ones are appended in the given order, and others
    /// are removed.
    ///
    /// # Errors If a file cannot be read or written.
    pub fn write(&self, hosts: &[HostLine]) -> Result<Difference, BadHostFiles> {
        let (new, difference) = self.compare(hosts)?;
        let names: String = new.iter().flat_map(|line| [line.name.as_str(), "\n"]).collect();
        let addresses: String = new.iter().flat_map(|line| [line.address.as_str(), "\n"]).collect();
        let is = |path: &Path, text: &str| fs::read(path).is_ok_and(|content| content == text.as_bytes());
        let next = self.next();
        if !is(&self.names, &names) || !is(&self.addresses, &addresses) {
            write_lines(
                &next,
                &serde_json::to_string(&new)
                    .map_err(|error| BadHostFiles::Write { path: next.clone(), source: error.into() })?,
            )?;
            write_lines(&self.names, &names)?;
            write_lines(&self.addresses, &addresses)?;
        }
        match fs::remove_file(&next) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(BadHostFiles::Write { path: next, source }),
            _ => Ok(difference),
        }
    }
}

fn sorted(old: &[HostLine], hosts: &[HostLine]) -> Vec<HostLine> {
    let (before, after) = (by_name(old), by_name(hosts));
    let existing = old.iter().filter_map(|line| after.get(&line.name).copied());
    let added = hosts.iter().filter(|line| !before.contains_key(&line.name));
    existing.chain(added).cloned().collect()
}

fn by_name(lines: &[HostLine]) -> BTreeMap<&NodeName, &HostLine> {
    lines.iter().map(|line| (&line.name, line)).collect()
}

/// Returns the first word of each line with the line's number. Words after it, such as `slots=8`, are ignored.
fn read_lines(path: &Path) -> Result<Vec<(usize, String)>, BadHostFiles> {
    let failed = |source| BadHostFiles::Read { path: path.to_owned(), source };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let text = io::read_to_string(io::Read::take(file, MAX_BYTES)).map_err(failed)?;
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default());
    let names = (1..).zip(lines).filter_map(|(line, text)| Some((line, text.split_whitespace().next()?.to_owned())));
    Ok(names.collect())
}

fn write_lines(path: &Path, text: &str) -> Result<(), BadHostFiles> {
    write_atomically(path, text.as_bytes()).map_err(|source| BadHostFiles::Write { path: path.to_owned(), source })
}

/// Replaces a file atomically. A file with the same content is not touched.
///
/// # Errors If the file cannot be written.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|content| content == bytes) {
        return Ok(());
    }
    let name = path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no file name"))?;
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{}", std::process::id()));
    let temporary = path.with_file_name(temporary);
    let written = File::create(&temporary).and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    let moved = written.and_then(|()| fs::rename(&temporary, path)).and_then(|()| {
        // Syncing the directory keeps the order of two replacements after a crash.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder)?.sync_all()
    });
    if moved.is_err() {
        // The temporary file may not exist.
        let _removed = fs::remove_file(&temporary);
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, address: &str) -> HostLine {
        HostLine { name: NodeName::new(name).unwrap(), address: address.to_owned() }
    }

    fn files() -> (tempfile::TempDir, HostFiles) {
        let folder = tempfile::tempdir().unwrap();
        let files = HostFiles::in_folder(folder.path());
        (folder, files)
    }

    #[test]
    fn hosts_keep_their_order_new_ones_are_appended_and_removed_ones_are_named() {
        let (_folder, files) = files();
        let first = [line("n3", "10.0.0.3"), line("n1", "10.0.0.1"), line("n2", "10.0.0.2")];
        assert_eq!(files.write(&first).unwrap().added.len(), 3);
        // Another source has another order, one changed address, one host less and one more.
        let second = [line("n1", "10.0.0.1"), line("n4", "10.0.0.4"), line("n3", "10.0.0.9")];
        let (_, difference) = files.compare(&second).unwrap();
        assert_eq!(fs::read_to_string(&files.names).unwrap(), "n3\nn1\nn2\n", "comparing writes nothing");
        assert_eq!(files.write(&second).unwrap(), difference);
        assert_eq!(fs::read_to_string(&files.names).unwrap(), "n3\nn1\nn4\n");
        assert_eq!(fs::read_to_string(&files.addresses).unwrap(), "10.0.0.9\n10.0.0.1\n10.0.0.4\n");
        assert_eq!(
            (difference.added, difference.removed),
            (vec![line("n4", "10.0.0.4")], vec![line("n2", "10.0.0.2")])
        );
        assert_eq!((difference.moved[0].from.as_str(), difference.moved[0].to.as_str()), ("10.0.0.3", "10.0.0.9"));
        assert!(files.write(&second).unwrap().is_empty());
        assert_eq!(fs::read_dir(files.names.parent().unwrap()).unwrap().count(), 2, "nothing else is left there");
    }

    #[test]
    fn an_interrupted_write_is_completed_by_the_next_one() {
        let (_folder, files) = files();
        files.write(&[line("n1", "10.0.0.1"), line("n2", "10.0.0.2")]).unwrap();
        // Interrupted after the first file was replaced: equally many lines, with the addresses of other hosts.
        let expected = [line("n2", "10.0.0.2"), line("n3", "10.0.0.3")];
        write_lines(&files.next(), &serde_json::to_string(&expected).unwrap()).unwrap();
        write_lines(&files.names, "n2\nn3\n").unwrap();
        assert_eq!(files.read().unwrap(), (expected.to_vec(), Some(Inconsistency::Interrupted)));
        assert!(files.write(&expected).unwrap().is_empty());
        assert_eq!(fs::read_to_string(&files.addresses).unwrap(), "10.0.0.2\n10.0.0.3\n");
        assert_eq!(files.read().unwrap(), (expected.to_vec(), None));
        assert_eq!(fs::read_dir(files.names.parent().unwrap()).unwrap().count(), 2, "nothing else is left there");
    }

    #[test]
    fn foreign_files_are_read_and_inconsistent_ones_are_rejected() {
        let (_folder, files) = files();
        fs::write(&files.names, "# mine\nn1 slots=8\n\nn2\n").unwrap();
        let (both, named) = ([line("n1", "10.0.0.1"), line("n2", "10.0.0.2")], [line("n1", "n1"), line("n2", "n2")]);
        assert_eq!(files.read().unwrap(), (named.to_vec(), None));
        // It is unclear whose address this is.
        fs::write(&files.addresses, "10.0.0.2\n").unwrap();
        assert_eq!(
            files.read().unwrap(),
            (named.to_vec(), Some(Inconsistency::CountMismatch { names: 2, addresses: 1 }))
        );
        files.write(&both).unwrap();
        assert_eq!(files.read().unwrap(), (both.to_vec(), None));
        fs::write(&files.names, "n1\n../etc\n").unwrap();
        let error = files.read().unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains("one name or address per line"), "{error}");
    }
}
