//! Preconditions of diagnostics that load the GPUs: no GPU is in use, and none is partitioned by MIG.
//!
//! On a GPU in use, DCGM's memory test finds too little memory and its stress tests too little speed: a failure that
//! says nothing about the hardware, while the user's job suffers. A state that cannot be determined counts as not met.

use doctor_checks::{
    disturbance::Disturbance,
    gpu::{FieldValue, Gpu, GpuQueryResult},
};
use doctor_core::observation::{FailureKind, ProbeFailure};

use crate::builtin::disturbance::{GPU_FIELDS, GPU_LIST, ProcessView, users_of};

/// The GPU fields that are read.
pub(super) fn fields() -> Vec<&'static str> {
    std::iter::once(MIG).chain(GPU_FIELDS).collect()
}

const MIG: &str = "mig.mode.current";

/// Why the diagnosis does not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Unmet {
    /// Other processes use GPUs, and nothing else keeps it from running.
    InUse {
        failure: ProbeFailure,
        by: Vec<Disturbance>,
    },
    Failed(ProbeFailure),
}

/// Tests the preconditions.
///
/// # Errors
/// With every precondition that is not met, by name.
pub(super) fn are_met(result: &GpuQueryResult, view: &ProcessView) -> Result<(), Unmet> {
    if let Err(failure) = &result.driver {
        return Err(Unmet::Failed(failure.clone()));
    }
    if result.gpus.is_empty() {
        let text = format!("the driver lists no GPU, the PCI bus has {}", result.on_pci.len());
        return Err(Unmet::Failed(ProbeFailure::new(FailureKind::Failed, text)));
    }
    let unknown: Vec<String> = result.gpus.iter().flat_map(unmet).collect();
    let by = users_of(&result.gpus, view);
    let in_use = by.iter().map(|user| format!("`gpus-free`: {} is {}", user.entity, user.text));
    let text = || {
        let all: Vec<String> = unknown.iter().cloned().chain(in_use).collect();
        format!("preconditions not met: {}", all.join("; "))
    };
    match (unknown.is_empty(), by.is_empty()) {
        (true, true) => Ok(()),
        (true, false) => {
            let failure = ProbeFailure::new(FailureKind::Disturbed, text());
            Err(Unmet::InUse { failure, by })
        }
        (false, _) => Err(Unmet::Failed(ProbeFailure::new(FailureKind::Failed, text()))),
    }
}

fn unmet(gpu: &Gpu) -> Vec<String> {
    let part = gpu.entity();
    let mut unmet = Vec::new();
    match gpu.get(MIG) {
        Some(FieldValue::Number(0.0) | FieldValue::NotSupported) => {}
        Some(FieldValue::Number(_)) => unmet.push(format!("`mig-off`: {part} has MIG enabled")),
        other => unmet.push(format!("`mig-off`: MIG mode of {part} unknown ({})", why(other))),
    }
    // The driver uses this name only if it has no list.
    if let Some(reading) = gpu.get(GPU_LIST) {
        unmet.push(format!("`gpus-free`: use of {part} unknown ({})", why(Some(reading))));
    }
    unmet
}

fn why(reading: Option<&FieldValue>) -> String {
    match reading {
        Some(FieldValue::Failed { text, .. }) => text.clone(),
        _ => "not reported by the driver".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use doctor_checks::gpu::Driver;

    fn unmet_of(fields: &[(&str, FieldValue)]) -> Option<ProbeFailure> {
        let fields = fields.iter().map(|(name, reading)| ((*name).to_owned(), reading.clone())).collect();
        let result = GpuQueryResult {
            on_pci: vec!["0000:18:00.0".to_owned()],
            driver: Ok(Driver { version: "570.124.06".to_owned(), cuda: None, source: "nvml".to_owned() }),
            gpus: vec![Gpu { index: 0, bus: "0000:18:00.0".to_owned(), fields }],
        };
        are_met(&result, &ProcessView::open(Path::new("/"))).err().map(|unmet| match unmet {
            Unmet::InUse { failure, .. } | Unmet::Failed(failure) => failure,
        })
    }

    #[test]
    fn a_gpu_in_use_or_with_mig_is_not_ready_and_an_unreadable_one_is_unknown() {
        let text = |fields: &[(&str, FieldValue)]| unmet_of(fields).map(|failure| failure.text);
        let off = (MIG, FieldValue::Number(0.0));
        assert_eq!(text(std::slice::from_ref(&off)), None);
        assert_eq!(text(&[(MIG, FieldValue::NotSupported)]), None);
        let pid = ("activity.0.pid", FieldValue::Number(1.0));
        let memory = |mib: u32| ("activity.0.memory", FieldValue::Number(f64::from(mib << 20)));
        let busy = unmet_of(&[off.clone(), pid.clone(), memory(512)]).unwrap();
        assert!(busy.text.contains("`gpus-free`: gpu:0000:18:00.0 is used by "), "{busy:?}");
        assert_eq!(busy.kind, FailureKind::Disturbed);
        assert_eq!(text(&[off.clone(), pid.clone(), memory(1)]), None, "monitoring does not matter");
        let both = unmet_of(&[(MIG, FieldValue::Number(1.0)), pid, memory(512)]).unwrap();
        assert!(both.text.contains("`mig-off`: gpu:0000:18:00.0 has MIG enabled; `gpus-free`"), "{both:?}");
        assert_eq!(both.kind, FailureKind::Failed);
        let lost = || FieldValue::Failed { code: 15, text: "GPU is lost".to_owned() };
        let both = text(&[(MIG, lost()), (GPU_LIST, lost())]).unwrap();
        assert!(both.contains("MIG mode of gpu:0000:18:00.0 unknown (GPU is lost); `gpus-free`"), "{both}");
        assert!(text(&[off, (GPU_LIST, FieldValue::NotSupported)]).unwrap().contains("unknown ("));
    }
}
