//! gpu-ecc-volatile: has a GPU had uncorrectable memory errors since its last reset?
//!
//! What it does: reads each GPU's count of uncorrected ECC errors since the driver was loaded or the GPU was reset.
//!
//! Why it matters: after an uncorrected error a program has read wrong data. The driver ends that program, and on
//! Ampere and newer takes the memory out of use (`gpu-row-remap`), but the repair is only complete after a reset.
//!
//! What to do: `ecc-uncorrected` is `reset`: drain the node and run `nvidia-smi --gpu-reset -i BUS`. This clears the
//! count, so an old error does not fail the node forever; if it recurs within days, the case escalates to replacement.
//! `nvidia-smi -q -d ECC,ROW_REMAPPER -i BUS` distinguishes SRAM from DRAM. NVIDIA's DCGM rates this error `isolate`,
//! its Xid catalogue (48, 94, 95) recommends a reset; here the reset comes first.
//!
//! Errors over the lifetime of the board are covered by `gpu-ecc-sram` and `gpu-row-remap`. Not applicable where no GPU
//! has ECC, or where it is disabled (`gpu-ecc-mode` reports that).

use doctor_core::observation::{Event, Metric, Observation};

use crate::{
    gpu::{for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-ecc-volatile", "uncorrected memory errors of GPUs");

const RULES: &str = r#"
rules = [
  { id = "gpu-ecc-volatile", check = "gpu-ecc-volatile", event = "ecc-uncorrected", reason = "ecc-uncorrected",
    severity = "reset", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_ecc_volatile.rs")), rules: RULES, probes, interpret };

const TOTAL: &str = "ecc.errors.uncorrected.volatile.total";
const MEMORY_KINDS: [(&str, &str); 2] =
    [("ecc.errors.uncorrected.volatile.sram", "SRAM"), ("ecc.errors.uncorrected.volatile.dram", "DRAM")];

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[TOTAL, MEMORY_KINDS[0].0, MEMORY_KINDS[1].0])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    for_each_gpu(outputs.first(), "no GPU of this node counts ECC errors", |gpu, builder| {
        let Some(total) = read_number(gpu, TOTAL, builder) else { return };
        builder.metric(Metric::count("ecc_uncorrected_volatile", gpu.entity(), total));
        if total > 0.0 {
            // The breakdown is informative but not required: some drivers report only the sum.
            let parts = MEMORY_KINDS.iter().filter_map(|(field, name)| Some(format!("{name} {}", gpu.number(field)?)));
            let parts = parts.collect::<Vec<_>>().join(", ");
            let breakdown = if parts.is_empty() { String::new() } else { format!(" ({parts})") };
            let errors = if total == 1.0 { "error" } else { "errors" };
            let text = format!("{total} uncorrected memory {errors} since the last reset{breakdown}");
            builder.event(Event::seen("ecc-uncorrected", gpu.entity(), text));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::{
            FieldValue,
            tests::{answer, lost, n, none},
        },
        classify_fixture::classify_outputs,
    };

    fn gpu(total: FieldValue, sram: FieldValue, dram: FieldValue) -> Vec<(&'static str, FieldValue)> {
        vec![(TOTAL, total), (MEMORY_KINDS[0].0, sram), (MEMORY_KINDS[1].0, dram)]
    }

    fn check(gpus: &[Vec<(&str, FieldValue)>]) -> Vec<String> {
        let gpus: Vec<_> = gpus.iter().map(Vec::as_slice).collect();
        classify_outputs(&CHECK, &[answer(&gpus)])
    }

    #[test]
    fn an_error_is_reported_for_its_gpu_only() {
        let well = || gpu(n(0.0), n(0.0), n(0.0));
        assert_eq!(check(&[well(), well()]), ["pass within-limits"]);
        assert_eq!(check(&[well(), gpu(n(3.0), n(1.0), n(2.0))]), ["fail ecc-uncorrected reset gpu:0000:19:00.0"]);
        // A driver that reports only the sum.
        let sum = gpu(n(3.0), FieldValue::NotSupported, FieldValue::NotSupported);
        assert_eq!(check(&[sum]), ["fail ecc-uncorrected reset gpu:0000:18:00.0"]);
    }

    #[test]
    fn a_gpu_without_ecc_differs_from_one_with_unreadable_counters() {
        let without = gpu(FieldValue::NotSupported, FieldValue::NotSupported, FieldValue::NotSupported);
        assert_eq!(check(&[without]), ["not-applicable not-supported"]);
        assert_eq!(check(&[gpu(n(0.0), n(0.0), n(0.0)), gpu(lost(), lost(), lost())]), ["inconclusive failed"]);
        assert_eq!(check(&[gpu(n(1.0), n(0.0), n(1.0)), gpu(lost(), lost(), lost())]).len(), 1);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
