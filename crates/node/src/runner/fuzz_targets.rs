//! Fuzzing entry points for the runner's parsers: kernel tables, and its own state files, which any process that can
//! write to the state directory may have changed.

use std::{fs, io, path::Path};

use doctor_checks::probe::{FileText, Sample};
use doctor_core::time::{Span, Timestamp};

use super::{
    counter_history::{self, CounterHistory},
    hung_probes,
    mounts::Mounts,
};

/// Whether a path is on a local file system, according to this `/proc/self/mounts`.
pub fn is_local(mounts: &str, path: &Path) -> bool {
    Mounts::parse(mounts).is_local(path)
}

/// Whether this is a valid note about an abandoned probe.
pub fn is_hung_probe_record(bytes: &[u8]) -> bool {
    hung_probes::HungProbeRecord::read(bytes).is_some()
}

/// Adds a sample of `files` to the earlier samples `kept` in this directory.
///
/// # Errors
/// If the directory cannot be written.
pub fn add_sample(
    directory: &Path,
    stored: &[u8],
    keep: Span,
    now: (Timestamp, Span),
    files: Vec<FileText>,
) -> io::Result<Vec<Sample>> {
    fs::create_dir_all(directory)?;
    fs::write(counter_history::history_file(directory), stored)?;
    Ok(CounterHistory::in_directory(directory).add("/sys/fuzzed/*", keep, now, files))
}
