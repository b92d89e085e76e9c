//! Writes the hook's one line to Slurm, through standard error, and to a log file in the hook's state directory.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

use super::HookKind;
use crate::clock::now;

const FILE: &str = "hook.log";
const ROTATED_FILE: &str = "hook.log.1";
/// Some ten thousand lines per file; there are two.
const MAX_BYTES: u64 = 1 << 20;

/// Prints and logs the line. Slurm gets it even if it cannot be logged.
pub(super) fn log_line(state: &Path, kind: HookKind, text: &str) {
    let text = text.replace(|c: char| c.is_control(), " ");
    print_stderr(&format!("doctor-node: {}: {text}", kind.as_str()));
    let path = state.join(FILE);
    let _made = fs::create_dir_all(state);
    if fs::metadata(&path).is_ok_and(|file| file.len() >= MAX_BYTES) {
        let _turned = fs::rename(&path, state.join(ROTATED_FILE));
    }
    let line = format!("{} {}: {text}\n", now(), kind.as_str());
    // One write per line: hooks of several jobs may run concurrently.
    let _kept =
        File::options().create(true).append(true).open(path).and_then(|mut file| file.write_all(line.as_bytes()));
}

/// Prints to standard error. A closed pipe or a full disk is no reason to fail a job.
pub(super) fn print_stderr(line: &str) {
    let _said = writeln!(io::stderr(), "{line}");
}

/// Formats an error and its causes on one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_keeps_a_limited_number_of_complete_lines() {
        let state = tempfile::tempdir().unwrap();
        log_line(state.path(), HookKind::Health, "one\nand the same");
        let text = fs::read_to_string(state.path().join(FILE)).unwrap();
        assert!(text.ends_with(" health: one and the same\n"), "{text}");
        assert_eq!(text.lines().count(), 1);
        fs::write(state.path().join(FILE), vec![b'x'; usize::try_from(MAX_BYTES).unwrap()]).unwrap();
        log_line(state.path(), HookKind::Prolog, "two");
        assert_eq!(fs::read_to_string(state.path().join(FILE)).unwrap().lines().count(), 1);
        assert_eq!(fs::metadata(state.path().join(ROTATED_FILE)).unwrap().len(), MAX_BYTES);
    }
}
