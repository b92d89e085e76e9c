//! gpu-row-remap: does GPU memory have rows that must be, or could not be, remapped to spare ones?
//!
//! What it does: reads each GPU's row remapping state from the driver: rows remapped after corrected and after
//! uncorrected errors, whether a remapping is pending until a reset, and whether one has failed.
//!
//! Why it matters: from Ampere on, a row of HBM with an uncorrectable error is replaced by a spare one at the next
//! reset. Until then the bad row is still in use, and the next job may hit it. When a bank has no spare rows left the
//! remapping fails, and that memory stays bad: NVIDIA accepts this as a reason to return the board.
//!
//! What to do: `doctor why NODE` names the GPU.
//! - `row-remap-pending` is `reset`: drain the node and reset the GPU (`nvidia-smi --gpu-reset -i BUS`), which remaps
//!   the row.
//! - `row-remap-failed` is `isolate`: keep the node out of service, run the vendor's field diagnostic and request a
//!   return.
//! - `row-remap-many` is `monitor`: more than 512 rows were remapped after uncorrectable errors. The board works;
//!   expect more.
//!
//! Not applicable where the GPU is older than Ampere (see `gpu-retired-pages`) or has no ECC memory.

use doctor_core::observation::{Event, ObservationBuilder, Metric, Observation};

use crate::{
    gpu::{Gpu, require_gpus, not_applicable, read_failure},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-row-remap", "remapped rows of GPU memory");

const RULES: &str = r#"
rules = [
  { id = "gpu-row-remap-failed", check = "gpu-row-remap", event = "row-remap-failed", reason = "row-remap-failed",
    severity = "isolate", text = "{entity}: {value}" },
  { id = "gpu-row-remap-pending", check = "gpu-row-remap", event = "row-remap-pending", reason = "row-remap-pending",
    severity = "reset", text = "{entity}: {value}" },
  { id = "gpu-row-remap-many", check = "gpu-row-remap", metric = "rows_remapped_uncorrectable", above = 512.0,
    reason = "row-remap-many", severity = "monitor", text = "{entity}: {value} remapped memory rows, limit {limit}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_row_remap.rs")), rules: RULES, probes, interpret };

const FIELDS: [&str; 4] = [
    "remapped_rows.correctable",
    "remapped_rows.uncorrectable",
    "remapped_rows.pending",
    "remapped_rows.failure",
];

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&FIELDS)]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let gpus = match require_gpus(outputs.first()) {
        Ok(gpus) => gpus,
        Err(instead) => return instead,
    };
    let mut builder = ObservationBuilder::default();
    for gpu in gpus {
        if let [Some(correctable), Some(uncorrectable), Some(pending), Some(failure)] = FIELDS.map(|f| gpu.number(f)) {
            builder.metric(Metric::count("rows_remapped_correctable", gpu.entity(), correctable));
            builder.metric(Metric::count("rows_remapped_uncorrectable", gpu.entity(), uncorrectable));
            remap_events(gpu, pending, failure).for_each(|event| builder.event(event));
        } else if let Some(failure) = read_failure(gpu, &FIELDS) {
            builder.unreadable(failure);
        }
    }
    builder.build_or(not_applicable("not-supported", "no GPU of this node supports row remapping"))
}

fn remap_events(gpu: &Gpu, pending: f64, failure: f64) -> impl Iterator<Item = Event> {
    let failed = (failure != 0.0)
        .then(|| Event::seen("row-remap-failed", gpu.entity(), "row remapping failed: no spare memory row is left"));
    let waits = (pending != 0.0)
        .then(|| Event::seen("row-remap-pending", gpu.entity(), "row remapping pending until the next reset"));
    failed.into_iter().chain(waits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::{
            FieldValue,
            tests::{answer, n, none},
        },
        classify_fixture::classify_outputs,
    };

    fn gpu(values: [FieldValue; 4]) -> Vec<(&'static str, FieldValue)> {
        FIELDS.into_iter().zip(values).collect()
    }

    fn check(gpus: &[Vec<(&str, FieldValue)>]) -> Vec<String> {
        let fields: Vec<_> = gpus.iter().map(Vec::as_slice).collect();
        classify_outputs(&CHECK, &[answer(&fields)])
    }

    fn healthy() -> Vec<(&'static str, FieldValue)> {
        gpu([n(0.0), n(0.0), n(0.0), n(0.0)])
    }

    #[test]
    fn each_trouble_is_found_on_its_gpu_and_on_no_other() {
        assert_eq!(check(&[healthy(), healthy()]), ["pass within-limits"]);
        let pending = gpu([n(0.0), n(1.0), n(1.0), n(0.0)]);
        assert_eq!(check(&[healthy(), pending]), ["fail row-remap-pending reset gpu:0000:19:00.0"]);
        let failed = gpu([n(0.0), n(513.0), n(1.0), n(1.0)]);
        assert_eq!(
            check(&[failed, healthy()]),
            [
                "fail row-remap-failed isolate gpu:0000:18:00.0",
                "fail row-remap-pending reset gpu:0000:18:00.0",
                "fail row-remap-many monitor gpu:0000:18:00.0",
            ]
        );
    }

    #[test]
    fn a_gpu_without_row_remapping_differs_from_one_with_unreadable_fields() {
        let old = gpu([const { FieldValue::NotSupported }; 4]);
        assert_eq!(check(std::slice::from_ref(&old)), ["not-applicable not-supported"]);
        assert_eq!(check(&[old, healthy()]), ["pass within-limits"]);
        let lost = FieldValue::Failed { code: 15, text: "GPU is lost".into() };
        assert_eq!(check(&[healthy(), gpu([lost.clone(), lost.clone(), lost.clone(), lost])]), ["inconclusive failed"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }

    #[test]
    fn a_lost_gpu_does_not_hide_a_fault_of_another() {
        let lost = FieldValue::Failed { code: 15, text: "GPU is lost".into() };
        let lost = gpu([lost.clone(), lost.clone(), lost.clone(), lost]);
        let pending = gpu([n(0.0), n(1.0), n(1.0), n(0.0)]);
        assert_eq!(check(&[lost, pending]), ["fail row-remap-pending reset gpu:0000:19:00.0"]);
    }
}
