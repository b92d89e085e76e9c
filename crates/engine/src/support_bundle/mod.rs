//! The support bundle of a case: one archive with what a vendor or a cloud requires for a repair.
//!
//! It is created before a step that destroys evidence on the node (reset, reboot, replacement), so that it is available
//! weeks later, and by `doctor bundle` at any time. All text from nodes and people is redacted, and every part has a
//! size limit. A file that the vendor's own tool wrote on the node is included unchanged.

mod cloud;
mod firmware;
mod tar;

use std::{collections::BTreeSet, path::PathBuf, time::Duration};

use doctor_checks::document::Document;
use doctor_core::{
    case::{Case, CaseState},
    ids::{CaseId, HardwareId, RunId},
    node::Hardware,
    time::{Span, Timestamp},
    view,
};
use doctor_host::vendor_reports::{self, VendorReport};
use doctor_store::{Store, StoreError, records::HistoryFilter};
use serde::Serialize;
use serde_json::Value;

use crate::{
    gzip::gzip,
    redact::{redact, redact_json},
    share::{LogRange, Share, ShareError, ShareFiles},
};

/// Bytes kept of one log, from its end: a failed run reports the failure there.
const MAX_LOG_BYTES: u64 = 4 << 20;
/// Bytes kept of all logs and documents together.
const MAX_TOTAL_BYTES: usize = 48 << 20;
/// The newest runs on the node that are included, and how long before the case they may have been.
const MAX_RUNS: usize = 20;
const LOOKBACK: Span = Span::days(3);
/// How long a step waits for its archive to be packed and written, beside other work on the share. It is tried again in the next
/// cycle.
const SAVE_LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Share(#[from] ShareError),
    #[error("cannot write a part of the archive as JSON")]
    Json(#[from] serde_json::Error),
    #[error("there is no case {0}")]
    NoCase(CaseId),
}

/// A file of the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BundleFile {
    pub name: String,
    pub bytes: Vec<u8>,
}

/// A machine that had the name of the case's node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HardwareRecord {
    pub id: HardwareId,
    pub first_seen: Timestamp,
    pub last_seen: Timestamp,
    /// Whether it is the machine of the case.
    pub belongs_to_case: bool,
    pub hardware: Hardware,
}

/// The report taken on the node itself, or why there is none.
pub type NodeEvidence = Result<VendorReport, String>;

/// Creates the archive, as `.tar.gz`. `more` holds additional files from the caller.
///
/// # Errors
/// If the store or the share cannot be read.
pub fn archive(
    store: &Store,
    share: Option<&ShareFiles>,
    case: CaseId,
    from_node: &NodeEvidence,
    more: Vec<BundleFile>,
) -> Result<Vec<u8>, BundleError> {
    let case = store.case(case)?.ok_or(BundleError::NoCase(case))?;
    let mut parts = bundle_files(store, share, &case, from_node)?;
    parts.extend(more.into_iter().map(|part| BundleFile { name: format!("more/{}", part.name), bytes: part.bytes }));
    let folder = format!("case-{}", case.id);
    Ok(gzip(&tar::tar(&folder, &parts, case.opened)))
}

/// Returns the name of a case's archive: one for each escalation level, and for each repair that an operator requests.
fn archive_name(case: CaseId, label: &str) -> String {
    format!("{case}-{label}.tar.gz")
}

/// Returns whether the archive with this label was already saved.
///
/// # Errors
/// If the share does not answer.
pub fn is_saved(share: &Share, case: CaseId, label: &str) -> Result<bool, ShareError> {
    let name = archive_name(case, label);
    share.read("saving evidence", move |files| files.has_bundle(&name))?
}

/// Saves an archive of the case on the share, before a step destroys evidence.
///
/// # Errors
/// If it cannot be created or written.
pub fn save(
    store: &Store,
    share: &Share,
    case: CaseId,
    label: &str,
    from_node: NodeEvidence,
) -> Result<PathBuf, BundleError> {
    let (store, name) = (store.without_progress(), archive_name(case, label));
    share.write("saving evidence", SAVE_LIMIT, move |files| {
        let bytes = archive(&store, Some(files), case, &from_node, Vec::new())?;
        Ok(files.save_bundle(&name, &bytes)?)
    })?
}

/// Removes archives of cases that were opened before then. A failed removal is retried next time.
///
/// # Errors
/// If the share cannot be read.
pub fn remove_expired(files: &ShareFiles, before: Timestamp) -> Result<(), ShareError> {
    files.remove_bundles(|name| {
        let case = name.split_once('-').and_then(|(case, _)| case.parse::<CaseId>().ok());
        case.is_some_and(|case| case.born() < before)
    })
}

fn bundle_files(
    store: &Store,
    share: Option<&ShareFiles>,
    case: &Case,
    from_node: &NodeEvidence,
) -> Result<Vec<BundleFile>, BundleError> {
    let node = &case.node;
    let machines: Vec<HardwareRecord> = store
        .hardware_history(node)?
        .into_iter()
        .map(|(id, first_seen, last_seen, described)| {
            let of_the_case = id == case.hardware;
            HardwareRecord { id, first_seen, last_seen, belongs_to_case: of_the_case, hardware: described }
        })
        .collect();
    let since = Some(case.opened.minus(LOOKBACK));
    let history = store.history(&HistoryFilter {
        node: Some(node.clone()),
        since,
        limit: Some(1000),
        ..HistoryFilter::default()
    })?;
    let mut runs: Vec<RunId> = history.iter().filter_map(|row| row.run).collect();
    let mut seen = BTreeSet::new();
    runs.retain(|run| seen.insert(*run));
    runs.truncate(MAX_RUNS);
    let mut documents = Vec::new();
    for run in &runs {
        let stored = store.evidence(*run, node)?;
        documents.extend(stored.and_then(|stored| Document::parse_stored(&stored.bytes).ok()));
    }
    let versions = firmware::read(documents.iter());
    let machine_report = from_node.as_ref().ok().map(|report| &report.machine);
    let summary = summary(case, &machines, from_node, &versions);
    let of_the_case = machines.iter().find(|machine| machine.belongs_to_case);
    let mut parts = vec![
        BundleFile { name: "summary.md".to_owned(), bytes: redact(&summary).into_owned().into_bytes() },
        json_file("case.json", case)?,
        json_file("machines.json", &machines)?,
        json_file("firmware.json", machine_report.unwrap_or(&versions))?,
        json_file(
            "cloud.json",
            &cloud::provider_fields(case, of_the_case, machine_report.map(|machine_report| &machine_report["cloud"])),
        )?,
        json_file("history.json", &history)?,
        json_file("audit.json", &store.audit(500, Some(node))?)?,
    ];
    if let Ok(VendorReport { file: Some(file), .. }) = from_node {
        // The file name comes from a node, so only known names are used.
        let known = vendor_reports::VENDOR_FILES.iter().find(|known| **known == file.name);
        let name = format!("node/{}", known.unwrap_or(&"file"));
        parts.push(BundleFile { name, bytes: file.bytes.clone() });
    }
    let mut remaining_bytes = MAX_TOTAL_BYTES;
    for run in runs {
        add_run(store, share, case, run, &mut remaining_bytes, &mut parts)?;
    }
    Ok(parts)
}

/// Adds the documents and logs of one run, as far as the size limit allows.
fn add_run(
    store: &Store,
    share: Option<&ShareFiles>,
    case: &Case,
    run: RunId,
    remaining_bytes: &mut usize,
    parts: &mut Vec<BundleFile>,
) -> Result<(), BundleError> {
    let mut add = |name: String, bytes: &[u8]| {
        let text = redact(&String::from_utf8_lossy(bytes)).into_owned().into_bytes();
        if text.len() <= *remaining_bytes {
            *remaining_bytes -= text.len();
            parts.push(BundleFile { name, bytes: text });
        }
    };
    if let Some(evidence) = store.evidence(run, &case.node)? {
        add(format!("evidence/{run}.txt"), &evidence.bytes);
    }
    for output in store.job_output(run)?.into_iter().filter(|output| output.node == case.node) {
        let ending = output.ending.map_or_else(String::new, |ending| format!("\n== {ending}\n"));
        add(format!("job-output/{run}.txt"), format!("{}{ending}", output.text).as_bytes());
    }
    let (Some(share), Some(record)) = (share, store.run(run)?) else { return Ok(()) };
    for test in record.run.tests.iter() {
        let path = Share::log_path(test, &case.node, record.run.planned);
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        match share.read_log(&path, LogRange::Last(MAX_LOG_BYTES)) {
            Ok(Some(part)) => add(format!("logs/{name}"), &part.bytes),
            Ok(None) => {}
            // A node that puts something else in place of its log must not keep the rest from being saved.
            Err(error) => add(format!("logs/{name}.missing.txt"), format!("{error}\n").as_bytes()),
        }
    }
    Ok(())
}

fn json_file(name: &str, value: &impl Serialize) -> Result<BundleFile, BundleError> {
    let mut value = serde_json::to_value(value)?;
    redact_json(&mut value);
    Ok(BundleFile { name: name.to_owned(), bytes: serde_json::to_vec_pretty(&value)? })
}

/// Returns a one-page summary: what is wrong with which machine, and what was tried.
fn summary(case: &Case, machines: &[HardwareRecord], from_node: &NodeEvidence, stored_versions: &Value) -> String {
    let mut lines = vec![format!("# Case {} on {}", case.id, case.node), String::new()];
    let state = match &case.state {
        CaseState::Open => "open".to_owned(),
        CaseState::Closed { at, how } => format!("closed at {at}: {how}"),
    };
    // A closed case requires nothing any more.
    let severity = if case.is_open() { case.severity.described() } else { case.severity.to_string() };
    lines.push(format!("Opened {}, {state}. Severity {severity}.", case.opened));
    lines.push("\n## The machine\n".to_owned());
    for machine in machines.iter().filter(|machine| machine.belongs_to_case) {
        let Hardware { gpu_uuids, board_serial, physical_host, boot_id } = &machine.hardware;
        let known = |value: &Option<String>| value.clone().unwrap_or_else(|| "not known".to_owned());
        lines.push(format!("- id: {}", machine.id));
        lines.push(format!("- board serial: {}", known(board_serial)));
        lines.push(format!("- physical host: {}", known(physical_host)));
        lines.push(format!("- boot: {}", known(&case.boot_id.clone().or_else(|| boot_id.clone()))));
        lines.extend(gpu_uuids.iter().map(|uuid| format!("- GPU: {uuid}")));
    }
    lines.push("\n## Firmware\n".to_owned());
    let versions = firmware::lines(from_node.as_ref().map_or(stored_versions, |report| &report.machine));
    lines.push(if versions.is_empty() { "Not known.".to_owned() } else { versions.join("\n") });
    lines.push("\n## nvidia-bug-report\n".to_owned());
    lines.push(match from_node {
        Ok(VendorReport { file: Some(file), machine }) => {
            let file_name = machine["vendor_report"]["file"].as_str().unwrap_or(&file.name);
            format!("It is in node/, as the vendor's tool wrote it: {file_name}.")
        }
        Ok(VendorReport { file: None, machine }) => {
            let why = machine["vendor_report"]["why_not"].as_str().unwrap_or("the node gives no reason");
            format!("It could not be taken: {why}.")
        }
        Err(why) => format!("It was not taken: {why}."),
    });
    lines.push("\n## What was found\n".to_owned());
    for finding in &case.findings {
        lines.push(format!("- {} on {} ({}): {}", finding.check, finding.entity, finding.reason, finding.text));
        lines.push(format!("  evidence: {}", view::evidence(&finding.evidence)));
    }
    lines.push("\n## What was done\n".to_owned());
    for step in &case.steps {
        lines.push(format!("- {} {} ({}): {}", step.at, step.what, step.state, step.text));
    }
    lines.push(String::new());
    lines.join("\n")
}
