//! Collects a report from the machine and from its vendor's tool before a repair step destroys that state.
//!
//! `doctor-node report` runs as a job ([`Jobs`]) under the operation's id: it starts once per operation, survives its
//! caller, has limits, and is polled until it has ended.

use std::{ffi::OsString, fs, io, io::Read as _, path::Path, process::Command};

use doctor_core::{
    ids::{OpId, RunId},
    run::ObservedJobState,
    time::{Span, Timestamp},
};
use serde::{Deserialize, Serialize};

use crate::jobs::Jobs;

/// The vendor's tool is killed after this long.
pub const TOOL_TIMEOUT: Span = Span::minutes(3);
/// The largest vendor file that is carried, in bytes. A reply over SSH encodes it in hexadecimal, twice the size.
pub const MAX_FILE_BYTES: u64 = 12 << 20;
/// The largest machine report, in bytes. A usual one is a page.
pub const MAX_MACHINE_BYTES: u64 = 1 << 20;

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
    pub machine: serde_json::Value,
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
            let Some(machine) = read(&folder.join(MACHINE_FILE), MAX_MACHINE_BYTES)? else {
                return Ok(ReportProgress::Failed {
                    text: format!("`doctor-node report` ended ({how}) without output"),
                });
            };
            let machine = serde_json::from_slice(&machine).map_err(io::Error::other)?;
            let file = VENDOR_FILES
                .iter()
                .find_map(|name| Some((*name, read(&folder.join(name), MAX_FILE_BYTES).transpose()?)));
            let file =
                file.map(|(name, bytes)| Ok::<_, io::Error>(VendorFile { name: name.to_owned(), bytes: bytes? }));
            return Ok(ReportProgress::Done(Box::new(VendorReport { machine, file: file.transpose()? })));
        }
    }
    jobs.prune(now)?;
    let mut args: Vec<OsString> = vec!["report".into(), "--out".into(), folder.into()];
    args.extend(["--limit".into(), TOOL_TIMEOUT.to_string().into()]);
    args.extend(["--job-file".into(), jobs.job_file(id).into(), "--run".into(), id.to_string().into()]);
    jobs.start(id, start(&args, id)?, now)?;
    Ok(ReportProgress::InProgress)
}

/// Returns `None` if the file does not exist or is longer than `most` bytes.
fn read(path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match fs::File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes)?;
    Ok(Some(bytes).filter(|bytes| bytes.len() as u64 <= most))
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
