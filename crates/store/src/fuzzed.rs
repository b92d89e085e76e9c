//! Ways in for the fuzzer to what this module reads that others wrote.

use std::path::Path;

use doctor_core::{
    ids::{NodeName, RunId},
    time::Timestamp,
};

use super::{error::Result, import, lease, records::Imported};

/// Node, moment and run number of a row.
pub type OldRow = (NodeName, Timestamp, RunId);

/// The rows of an old database, with the run numbers that they would be given, and how many were not understood.
///
/// # Errors
/// If it is none of the known files.
pub fn old_rows(file: &Path) -> Result<(Vec<OldRow>, u64)> {
    let mut report = Imported::default();
    let found = import::read_file(file, &mut report)?;
    Ok((found.into_iter().map(|row| (row.node, row.at, row.run)).collect(), report.skipped))
}

/// Host, process and start of the holder of a lease.
pub fn holder(text: &str) -> Option<(&str, u32, u64)> {
    lease::split(text)
}
