//! gpu-ecc-corrected: does a GPU correct unusually many memory errors?
//!
//! What it does: reads each GPU's corrected ECC errors of SRAM and DRAM since the driver was loaded or the GPU was
//! reset.
//!
//! Why it matters: corrected errors harm no job; that is what ECC is for. Very many of them on one GPU precede
//! uncorrectable errors, and cost some bandwidth.
//!
//! What to do: no immediate action, both findings are `monitor`. Watch `gpu-row-remap` and `gpu-ecc-volatile` of the
//! same GPU; give the number to the vendor when one of those fails. The limits are those of Azure's node health check.
//! - `ecc-corrected-sram`: more than 10,000.
//! - `ecc-corrected-dram`: more than 20,000,000.
//!
//! Errors before the last reset do not count: a bad day last month does not fail the node today. Not applicable where
//! no GPU distinguishes SRAM from DRAM (before Ampere) or ECC is off.

use doctor_core::observation::{Metric, Observation};

use crate::{
    gpu::{for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-ecc-corrected", "corrected memory errors of GPUs");

const RULES: &str = r#"
rules = [
  { id = "gpu-ecc-corrected-sram", check = "gpu-ecc-corrected", metric = "ecc_corrected_sram", above = 10000.0,
    reason = "ecc-corrected-sram", severity = "monitor",
    text = "{entity}: {value} corrected SRAM errors since the last reset, limit {limit}" },
  { id = "gpu-ecc-corrected-dram", check = "gpu-ecc-corrected", metric = "ecc_corrected_dram", above = 20000000.0,
    reason = "ecc-corrected-dram", severity = "monitor",
    text = "{entity}: {value} corrected DRAM errors since the last reset, limit {limit}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_ecc_corrected.rs")), rules: RULES, probes, interpret };

const SRAM: &str = "ecc.errors.corrected.volatile.sram";
const DRAM: &str = "ecc.errors.corrected.volatile.dram";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[SRAM, DRAM])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    for_each_gpu(outputs.first(), "no GPU of this node has separate counters for SRAM and DRAM errors", |gpu, builder| {
        let (sram, dram) = (read_number(gpu, SRAM, builder), read_number(gpu, DRAM, builder));
        if let (Some(sram), Some(dram)) = (sram, dram) {
            builder.metric(Metric::count("ecc_corrected_sram", gpu.entity(), sram));
            builder.metric(Metric::count("ecc_corrected_dram", gpu.entity(), dram));
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

    fn check(gpus: &[[FieldValue; 2]]) -> Vec<String> {
        let gpus: Vec<_> = gpus.iter().map(|[sram, dram]| [(SRAM, sram.clone()), (DRAM, dram.clone())]).collect();
        let gpus: Vec<_> = gpus.iter().map(<[_; 2]>::as_slice).collect();
        classify_outputs(&CHECK, &[answer(&gpus)])
    }

    #[test]
    fn very_many_corrected_errors_are_reported_and_a_few_are_not() {
        assert_eq!(check(&[[n(0.0), n(51.0)], [n(10_000.0), n(2e7)]]), ["pass within-limits"]);
        assert_eq!(
            check(&[[n(0.0), n(0.0)], [n(10_001.0), n(0.0)]]),
            ["fail ecc-corrected-sram monitor gpu:0000:19:00.0"]
        );
        assert_eq!(check(&[[n(0.0), n(2e7 + 1.0)]]), ["fail ecc-corrected-dram monitor gpu:0000:18:00.0"]);
    }

    // The check does not read the lifetime counters.
    #[test]
    fn aggregate_counters_are_not_queried() {
        let requested = probes(&Params::new());
        assert!(requested.iter().all(|probe| !format!("{probe:?}").contains("aggregate")), "{requested:?}");
    }

    #[test]
    fn missing_counters_differ_from_unreadable_ones() {
        assert_eq!(check(&[[FieldValue::NotSupported, FieldValue::NotSupported]]), ["not-applicable not-supported"]);
        assert_eq!(check(&[[n(0.0), n(0.0)], [n(0.0), lost()]]), ["inconclusive failed"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
