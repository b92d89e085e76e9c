//! Ways in for the fuzzer to what this module reads: tables of the kernel, and its own files of yesterday, which whoever
//! could write the state directory may have changed since.

use std::{fs, io, path::Path};

use doctor_checks::probe::{FileText, Sample};
use doctor_core::time::{Span, Timestamp};

use super::{
    abandoned,
    mounts::Mounts,
    samples::{self, Samples},
};

/// Whether a path is on a local file system, by such a `/proc/self/mounts`.
pub fn is_local(mounts: &str, path: &Path) -> bool {
    Mounts::parse(mounts).is_local(path)
}

/// Whether this is a note about a probe that was left behind.
pub fn is_note(bytes: &[u8]) -> bool {
    abandoned::Note::read(bytes).is_some()
}

/// A look at `files`, after earlier looks that were kept as `kept` in this directory.
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
