//! Fuzzing entry points for the runner's parsers: kernel tables, and its own state files, which any process that can
//! write to the state directory may have changed.

use std::{fs, io, path::Path};

use doctor_checks::probe::{FileText, Sample};
use doctor_core::time::{Span, Timestamp};

use super::{
    abandoned,
    mounts::Mounts,
    samples::{self, Samples},
};

/// Whether a path is on a local file system, according to this `/proc/self/mounts`.
pub fn is_local(mounts: &str, path: &Path) -> bool {
    Mounts::parse(mounts).is_local(path)
}

/// Whether this is a valid note about an abandoned probe.
pub fn is_note(bytes: &[u8]) -> bool {
    abandoned::Note::read(bytes).is_some()
}

/// Adds a sample of `files` to the earlier samples `kept` in this directory.
///
/// # Errors
/// If the directory cannot be written.
pub fn look_after(
    directory: &Path,
    kept: &[u8],
    keep: Span,
    now: (Timestamp, Span),
    files: Vec<FileText>,
) -> io::Result<Vec<Sample>> {
    fs::create_dir_all(directory)?;
    fs::write(samples::place(directory), kept)?;
    Ok(Samples::kept_in(directory).add("/sys/fuzzed/*", keep, now, files))
}
