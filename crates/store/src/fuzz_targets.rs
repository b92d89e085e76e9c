//! Entry points for the fuzzer to the parsers of external input in this crate.

use std::path::Path;

use doctor_core::{
    ids::{NodeName, RunId},
    time::Timestamp,
};

use super::{error::Result, fencing, import, records::ImportSummary};

/// Node, time and run id of a row.
pub type LegacyRowKey = (NodeName, Timestamp, RunId);

/// Returns the rows of a legacy database with the run ids they would get, and the number of unreadable rows.
///
/// # Errors
/// If the file is none of the known databases.
pub fn legacy_rows(file: &Path) -> Result<(Vec<LegacyRowKey>, u64)> {
    let mut report = ImportSummary::default();
    let found = import::read_file(file, &mut report)?;
    Ok((found.into_iter().map(|row| (row.node, row.at, row.run)).collect(), report.skipped))
}

/// Splits a lease holder into host, process id and start time.
pub fn parse_holder(text: &str) -> Option<(&str, u32, u64)> {
    fencing::split(text)
}
