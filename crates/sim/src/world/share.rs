//! The shared directory as the simulated nodes write it: logs that grow, and results that appear whole.

use std::{
    fs,
    io::Write,
    path::{Component, Path, PathBuf},
};

use doctor_control::backend::JobOutput;

#[derive(Debug)]
pub(super) struct Share {
    root: PathBuf,
}

/// Whether a job may write there: below the shared directory and nowhere else.
pub(super) fn is_inside(output: &JobOutput) -> bool {
    let plain = |path: &Path| {
        !path.as_os_str().is_empty() && path.components().all(|part| matches!(part, Component::Normal(_)))
    };
    output.logs.iter().all(|log| plain(log)) && plain(&output.document)
}

impl Share {
    pub(super) const fn new(root: PathBuf) -> Self {
        Self { root }
    }

    fn place(&self, path: &Path) -> std::io::Result<PathBuf> {
        let place = self.root.join(path);
        if let Some(folder) = place.parent() {
            fs::create_dir_all(folder)?;
        }
        Ok(place)
    }

    pub(super) fn append(&self, path: &Path, line: &str) -> std::io::Result<()> {
        let mut file = fs::File::options().create(true).append(true).open(self.place(path)?)?;
        file.write_all(format!("{line}\n").as_bytes())
    }

    /// Readers see nothing of it, or all of it.
    pub(super) fn put(&self, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
        let place = self.place(path)?;
        let name = place.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let beside = place.with_file_name(format!(".{name}.part"));
        // No sync: a simulated disk need not survive a real power cut.
        fs::write(&beside, bytes)?;
        fs::rename(&beside, &place)
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
    fn a_log_grows_and_a_result_appears_whole() {
        let folder = tempfile::tempdir().unwrap();
        let share = Share::new(folder.path().to_owned());
        share.append(Path::new("dl/n1/a.log"), "one").unwrap();
        share.append(Path::new("dl/n1/a.log"), "two").unwrap();
        share.put(Path::new("dl/n1/a.json"), b"result").unwrap();
        assert_eq!(fs::read_to_string(folder.path().join("dl/n1/a.log")).unwrap(), "one\ntwo\n");
        assert_eq!(fs::read(folder.path().join("dl/n1/a.json")).unwrap(), b"result");
        assert_eq!(fs::read_dir(folder.path().join("dl/n1")).unwrap().count(), 2);
    }
}
