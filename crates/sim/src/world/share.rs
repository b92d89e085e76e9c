//! The shared directory as the simulated nodes write it: logs that grow, and results that appear atomically.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fs,
    io::Write,
    path::{Component, Path, PathBuf},
};

use doctor_backend::JobOutput;

/// The limit of logs kept open.
const MOST_OPEN: usize = 32;

#[derive(Debug)]
pub(super) struct Share {
    root: PathBuf,
    /// The logs written last. A test writes to its log several times.
    open: BTreeMap<PathBuf, fs::File>,
}

/// Whether a job's paths are below the shared directory.
pub(super) fn is_inside(output: &JobOutput) -> bool {
    let plain = |path: &Path| {
        !path.as_os_str().is_empty() && path.components().all(|part| matches!(part, Component::Normal(_)))
    };
    output.logs.iter().all(|log| plain(log)) && plain(&output.document)
}

impl Share {
    pub(super) fn new(root: PathBuf) -> Self {
        Self { root, open: BTreeMap::new() }
    }

    pub(super) fn append(&mut self, path: &Path, line: &str) -> std::io::Result<()> {
        if self.open.len() >= MOST_OPEN {
            self.open.clear();
        }
        let file = match self.open.entry(path.to_owned()) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(vacant) => {
                let full_path = self.root.join(path);
                let made =
                    in_its_folder(&full_path, || fs::File::options().create(true).append(true).open(&full_path))?;
                vacant.insert(made)
            }
        };
        file.write_all(format!("{line}\n").as_bytes())
    }

    /// Writes a file atomically.
    pub(super) fn put(&self, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
        let full_path = self.root.join(path);
        let name = full_path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let temporary = full_path.with_file_name(format!(".{name}.part"));
        // No sync: a simulated disk need not survive a real power failure.
        in_its_folder(&temporary, || fs::write(&temporary, bytes))?;
        fs::rename(&temporary, &full_path)
    }
}

/// Creates the directory of a file if it is missing.
fn in_its_folder<T>(path: &Path, make: impl Fn() -> std::io::Result<T>) -> std::io::Result<T> {
    match (make(), path.parent()) {
        (Err(error), Some(folder)) if error.kind() == std::io::ErrorKind::NotFound => {
            fs::create_dir_all(folder)?;
            make()
        }
        (made, _) => made,
    }
}

#[cfg(test)]
mod tests {
    use doctor_core::ids::NodeName;

    use super::*;

    #[test]
    fn only_paths_below_the_share_are_accepted() {
        let output = |log: &str, document: &str| JobOutput {
            node: NodeName::new("n1").unwrap(),
            logs: vec![log.into()],
            document: document.into(),
        };
        assert!(is_inside(&output("storage/n1/a.log", "storage/n1/a.json")));
        for (log, document) in [("/etc/passwd", "a.json"), ("a.log", "../a.json"), ("", "a.json"), ("a/../../b", "a")] {
            assert!(!is_inside(&output(log, document)), "{log} {document}");
        }
    }

    #[test]
    fn a_log_is_appended_and_a_result_is_written_atomically() {
        let folder = tempfile::tempdir().unwrap();
        let mut share = Share::new(folder.path().to_owned());
        share.append(Path::new("dl/n1/a.log"), "one").unwrap();
        share.append(Path::new("dl/n1/a.log"), "two").unwrap();
        share.put(Path::new("dl/n1/a.json"), b"result").unwrap();
        assert_eq!(fs::read_to_string(folder.path().join("dl/n1/a.log")).unwrap(), "one\ntwo\n");
        assert_eq!(fs::read(folder.path().join("dl/n1/a.json")).unwrap(), b"result");
        assert_eq!(fs::read_dir(folder.path().join("dl/n1")).unwrap().count(), 2);
    }
}
