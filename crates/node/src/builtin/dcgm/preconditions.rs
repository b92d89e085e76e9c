//! Preconditions of diagnostics that load the GPUs: no GPU is in use, and none is partitioned by MIG.
//!
//! On a GPU in use, DCGM's memory test finds too little memory and its stress tests too little speed: a failure that
//! says nothing about the hardware, while the user's job suffers. A state that cannot be determined counts as not met.

use std::{fs, path::Path};

use doctor_checks::gpu::{FieldValue, Gpu, GpuQueryResult};
use doctor_core::observation::{FailureKind, ProbeFailure};

/// The GPU fields that are read.
pub(super) const FIELDS: [&str; 2] = [MIG, PROCESSES];
const MIG: &str = "mig.mode.current";
const PROCESSES: &str = "process.*.pid";

/// Tests the preconditions.
///
/// # Errors
/// With every precondition that is not met, by name.
pub(super) fn are_met(result: &GpuQueryResult, root: &Path) -> Result<(), ProbeFailure> {
    if let Err(failure) = &result.driver {
        return Err(failure.clone());
    }
    if result.gpus.is_empty() {
        let text = format!("the driver lists no GPU, the PCI bus has {}", result.on_pci.len());
        return Err(ProbeFailure::new(FailureKind::Failed, text));
    }
    let unmet: Vec<String> = result.gpus.iter().flat_map(|gpu| unmet(gpu, root)).collect();
    if unmet.is_empty() {
        return Ok(());
    }
    let text = format!("preconditions not met: {}", unmet.join("; "));
    Err(ProbeFailure::new(FailureKind::Failed, text))
}

fn unmet(gpu: &Gpu, root: &Path) -> Vec<String> {
    let part = gpu.entity();
    let mut unmet = Vec::new();
    match gpu.get(MIG) {
        Some(FieldValue::Number(0.0) | FieldValue::NotSupported) => {}
        Some(FieldValue::Number(_)) => unmet.push(format!("`mig-off`: {part} has MIG enabled")),
        other => unmet.push(format!("`mig-off`: MIG mode of {part} unknown ({})", why(other))),
    }
    let users: Vec<String> = gpu
        .indexed("process", "pid")
        .filter_map(|(_, reading)| match reading {
            FieldValue::Number(pid) => Some(user(*pid as u32, root)),
            _ => None,
        })
        .collect();
    match gpu.get(PROCESSES) {
        // The driver uses this name only if it has no list.
        None if users.is_empty() => {}
        None => unmet.push(format!("`gpus-free`: {part} is used by {}", users.join(", "))),
        other => unmet.push(format!("`gpus-free`: use of {part} unknown ({})", why(other))),
    }
    unmet
}

fn why(reading: Option<&FieldValue>) -> String {
    match reading {
        Some(FieldValue::Failed { text, .. }) => text.clone(),
        _ => "not reported by the driver".to_owned(),
    }
}

fn user(pid: u32, root: &Path) -> String {
    match fs::read_to_string(root.join(format!("proc/{pid}/comm"))) {
        Ok(name) => format!("process {pid} ({})", name.trim()),
        Err(_) => format!("process {pid}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_checks::gpu::Driver;

    fn unmet_text(fields: &[(&str, FieldValue)]) -> Option<String> {
        let fields = fields.iter().map(|(name, reading)| ((*name).to_owned(), reading.clone())).collect();
        let result = GpuQueryResult {
            on_pci: vec!["0000:18:00.0".to_owned()],
            driver: Ok(Driver { version: "570.124.06".to_owned(), cuda: None, source: "nvml".to_owned() }),
            gpus: vec![Gpu { index: 0, bus: "0000:18:00.0".to_owned(), fields }],
        };
        are_met(&result, Path::new("/")).err().map(|failure| failure.text)
    }

    #[test]
    fn a_gpu_in_use_or_with_mig_is_not_ready_and_an_unreadable_one_is_unknown() {
        let off = (MIG, FieldValue::Number(0.0));
        assert_eq!(unmet_text(std::slice::from_ref(&off)), None);
        assert_eq!(unmet_text(&[(MIG, FieldValue::NotSupported)]), None);
        let own_pid = f64::from(std::process::id());
        let busy = unmet_text(&[off.clone(), ("process.0.pid", FieldValue::Number(own_pid))]).unwrap();
        assert!(busy.contains("`gpus-free`: gpu:0000:18:00.0 is used by process") && busy.contains(" ("), "{busy}");
        let with_mig = unmet_text(&[(MIG, FieldValue::Number(1.0))]).unwrap();
        assert!(with_mig.contains("`mig-off`: gpu:0000:18:00.0 has MIG enabled"), "{with_mig}");
        let lost = || FieldValue::Failed { code: 15, text: "GPU is lost".to_owned() };
        let both = unmet_text(&[(MIG, lost()), (PROCESSES, lost())]).unwrap();
        assert!(both.contains("MIG mode of gpu:0000:18:00.0 unknown (GPU is lost); `gpus-free`"), "{both}");
        assert!(unmet_text(&[off, (PROCESSES, FieldValue::NotSupported)]).unwrap().contains("unknown ("));
    }
}
