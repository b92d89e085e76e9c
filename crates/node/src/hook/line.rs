//! The one line that a hook says: to Slurm, which keeps it where it likes, and to a file of our own beside the hook's state.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

use super::Moment;
use crate::clock::now;

const FILE: &str = "hook.log";
const BEFORE: &str = "hook.log.1";
/// Some ten thousand lines, twice.
const MOST_BYTES: u64 = 1 << 20;

/// Says it. A line that cannot be kept is still told to Slurm.
pub(super) fn say(state: &Path, moment: Moment, words: &str) {
    let words = words.replace(|c: char| c.is_control(), " ");
    tell_slurm(&format!("doctor-node: {}: {words}", moment.word()));
    let path = state.join(FILE);
    let _made = fs::create_dir_all(state);
    if fs::metadata(&path).is_ok_and(|file| file.len() >= MOST_BYTES) {
        let _turned = fs::rename(&path, state.join(BEFORE));
    }
    let line = format!("{} {}: {words}\n", now(), moment.word());
    // One write for each line: hooks of several jobs may speak at once.
    let _kept =
        File::options().create(true).append(true).open(path).and_then(|mut file| file.write_all(line.as_bytes()));
}

/// On standard error. A reader that went away, or a log on a full disk, is no reason to fail a job.
pub(super) fn tell_slurm(line: &str) {
    let _said = writeln!(io::stderr(), "{line}");
}

/// An error with its causes, on one line.
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
    fn lines_are_kept_up_to_a_limit_and_never_break_in_two() {
        let state = tempfile::tempdir().unwrap();
        say(state.path(), Moment::Health, "one\nand the same");
        let text = fs::read_to_string(state.path().join(FILE)).unwrap();
        assert!(text.ends_with(" health: one and the same\n"), "{text}");
        assert_eq!(text.lines().count(), 1);
        fs::write(state.path().join(FILE), vec![b'x'; usize::try_from(MOST_BYTES).unwrap()]).unwrap();
        say(state.path(), Moment::Prolog, "two");
        assert_eq!(fs::read_to_string(state.path().join(FILE)).unwrap().lines().count(), 1);
        assert_eq!(fs::metadata(state.path().join(BEFORE)).unwrap().len(), MOST_BYTES);
    }
}
