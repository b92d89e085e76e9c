//! Collects a report from the machine and from its vendor's tool before a repair step destroys that state.
//!
//! `doctor-node report` runs as a job ([`Jobs`]) under the operation's id: it starts once per operation, survives its
//! caller, has limits, and is polled until it has ended.

use std::{ffi::OsString, io, path::Path, process::Command};

use doctor_core::{
    ids::{OpId, RunId},
    run::ObservedJobState,
    time::{Span, Timestamp},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{jobs::Jobs, output_file};

/// The vendor's tool is killed after this long.
pub const TOOL_TIMEOUT: Span = Span::minutes(3);
/// The largest vendor file that is carried, in bytes. A reply over SSH encodes it in hexadecimal, twice the size.
pub const MAX_FILE_BYTES: u64 = 12 << 20;
/// The largest machine report, in bytes. A usual one is a page.
pub const MAX_MACHINE_BYTES: u64 = 1 << 20;

/// The largest vendor file that is carried in the log of a container, in bytes: a log is rotated at ten megabytes, and the file
/// takes a third more there.
pub const MAX_CARRIED_BYTES: u64 = 4 << 20;

/// The machine report, relative to the report's folder.
pub const MACHINE_FILE: &str = "machine.json";
/// The files of the vendor's tool: the finished archive, and the plain log that remains if the tool was killed early.
pub const VENDOR_FILES: [&str; 2] = ["nvidia-bug-report.log.gz", "nvidia-bug-report.log"];

/// The progress of a report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReportProgress {
    InProgress,
    Done(Box<VendorReport>),
    /// Nothing was collected.
    Failed {
        text: String,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VendorReport {
    /// Serial numbers, firmware, cloud; whether the vendor's tool ran, and if not, why.
    pub machine: Value,
    pub file: Option<VendorFile>,
}

/// The file that the vendor's tool wrote.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VendorFile {
    pub name: String,
    #[serde(with = "hex")]
    pub bytes: Vec<u8>,
}

impl std::fmt::Debug for VendorFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} bytes", self.name, self.bytes.len())
    }
}

/// Starts a report, or returns its progress. `start` builds the command from the arguments that follow the program's name.
///
/// # Errors
/// Fails if the job's files cannot be read or written.
pub fn report(
    jobs: &Jobs,
    op: OpId,
    now: Timestamp,
    start: impl FnOnce(&[OsString], RunId) -> io::Result<Command>,
) -> io::Result<ReportProgress> {
    // The job is stored under the operation's number. Runs are in another directory, so the two cannot collide.
    let id = RunId::from_number(op.number());
    let folder = jobs.run_directory(id).join("report");
    match jobs.state(id, now)? {
        ObservedJobState::Absent => {}
        ObservedJobState::Pending { .. } | ObservedJobState::Running { .. } => return Ok(ReportProgress::InProgress),
        ObservedJobState::Unknown { why } => return Ok(ReportProgress::Failed { text: why }),
        ObservedJobState::Ended { how, .. } => {
            let failed =
                || ReportProgress::Failed { text: format!("`doctor-node report` ended ({how}) without output") };
            let read = read(&folder, Path::new(""), MAX_FILE_BYTES)?;
            return Ok(read.map_or_else(failed, |report| ReportProgress::Done(Box::new(report))));
        }
    }
    jobs.prune(now)?;
    let mut args: Vec<OsString> = vec!["report".into(), "--out".into(), folder.into()];
    args.extend(["--limit".into(), TOOL_TIMEOUT.to_string().into()]);
    args.extend(["--job-file".into(), jobs.job_file(id).into(), "--run".into(), id.to_string().into()]);
    jobs.start(id, start(&args, id)?, now)?;
    Ok(ReportProgress::InProgress)
}

/// Reads the report that `doctor-node report` wrote into `folder`, a path below `directory`. `None`: there is none. A vendor's file
/// of more than `max_file_bytes` bytes is left out, and the machine report says so.
///
/// # Errors
/// If a file cannot be read, or the machine report is not JSON.
pub fn read(directory: &Path, folder: &Path, max_file_bytes: u64) -> io::Result<Option<VendorReport>> {
    let Some(machine) = output_file::read(directory, &folder.join(MACHINE_FILE), MAX_MACHINE_BYTES)? else {
        return Ok(None);
    };
    let mut machine: Value = serde_json::from_slice(&machine).map_err(io::Error::other)?;
    let mut file = None;
    for name in VENDOR_FILES {
        if let Some(bytes) = output_file::read(directory, &folder.join(name), max_file_bytes)? {
            file = Some(VendorFile { name: name.to_owned(), bytes });
            break;
        }
    }
    if file.is_none() && !machine["vendor_report"]["file"].is_null() {
        let why = format!("its file has more than {} KiB, or is gone", max_file_bytes >> 10);
        machine["vendor_report"] = json!({ "why_not": why });
    }
    Ok(Some(VendorReport { machine, file }))
}

/// Serialises bytes as hexadecimal text.
mod hex {
    use doctor_core::hex::{decode, encode};
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&encode(bytes))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(deserializer)?;
        decode(&text).ok_or_else(|| D::Error::custom("not a hexadecimal string"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vendor_file_survives_serialisation() {
        let file = VendorFile { name: "a.gz".to_owned(), bytes: (0..=255).collect() };
        let text = serde_json::to_string(&file).unwrap();
        assert_eq!(serde_json::from_str::<VendorFile>(&text).unwrap(), file);
        for bad in ["0", "0g", "é"] {
            let text = format!("{{\"name\": \"a\", \"bytes\": \"{bad}\"}}");
            assert!(serde_json::from_str::<VendorFile>(&text).is_err(), "{bad}");
        }
    }
}
