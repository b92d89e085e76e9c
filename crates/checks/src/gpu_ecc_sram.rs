//! gpu-ecc-sram: has the on-chip memory of a GPU had more errors than NVIDIA accepts?
//!
//! What it does: reads the flag that the driver sets when the uncorrected errors of SRAM (caches, registers, shared
//! memory) exceed NVIDIA's threshold over the lifetime of the board, and their number.
//!
//! Why it matters: DRAM has spare rows, SRAM has not. A cell that keeps failing cannot be taken out of use, and ends
//! one job after the other.
//!
//! What to do: `sram-threshold` is `isolate`: keep the node out of service, run the field diagnostic and request a
//! return; this flag is NVIDIA's own criterion (DCGM error 118). A reset does not clear it.
//! `nvidia-smi -q -d ECC -i BUS` shows the unit (`SRAM L2`, `SRAM SM`, …).
//!
//! The number alone is shown without a limit: every board has single errors caused by cosmic rays. Not applicable where
//! the driver has no such flag (older drivers, GPUs before Ampere): `gpu-ecc-volatile` still detects each error.

use doctor_core::observation::{Event, Metric, Observation};

use crate::{
    gpu::{for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-ecc-sram", "lifetime SRAM errors of GPUs");

const RULES: &str = r#"
rules = [
  { id = "gpu-ecc-sram", check = "gpu-ecc-sram", event = "sram-threshold", reason = "sram-threshold",
    severity = "isolate", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_ecc_sram.rs")), rules: RULES, probes, interpret };

const FLAG: &str = "ecc.sram.threshold_exceeded";
const ERRORS: &str = "ecc.errors.uncorrected.aggregate.sram";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[FLAG, ERRORS])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    for_each_gpu(outputs.first(), "no GPU of this node has a threshold for SRAM errors", |gpu, builder| {
        let Some(flag) = read_number(gpu, FLAG, builder) else { return };
        let errors = gpu.number(ERRORS);
        builder.metric(Metric::count("sram_threshold_exceeded", gpu.entity(), flag));
        if let Some(errors) = errors {
            builder.metric(Metric::count("sram_uncorrected_aggregate", gpu.entity(), errors));
        }
        if flag != 0.0 {
            let number = errors.map_or_else(|| "unknown".to_owned(), |errors| errors.to_string());
            let text = format!("SRAM errors above NVIDIA's threshold; uncorrected in its lifetime: {number}");
            builder.event(Event::seen("sram-threshold", gpu.entity(), text));
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
        let gpus: Vec<_> = gpus.iter().map(|[flag, errors]| [(FLAG, flag.clone()), (ERRORS, errors.clone())]).collect();
        let gpus: Vec<_> = gpus.iter().map(<[_; 2]>::as_slice).collect();
        classify_outputs(&CHECK, &[answer(&gpus)])
    }

    #[test]
    fn only_the_threshold_flag_fails() {
        // The first is from an H200, driver 580.159.04, 2026-11-15; the others are made by hand.
        assert_eq!(check(&[[n(0.0), n(0.0)]]), ["pass within-limits"]);
        assert_eq!(check(&[[n(0.0), n(2.0)]]), ["pass within-limits"]);
        assert_eq!(check(&[[n(0.0), n(0.0)], [n(1.0), n(9.0)]]), ["fail sram-threshold isolate gpu:0000:19:00.0"]);
        assert_eq!(check(&[[n(1.0), FieldValue::NotSupported]]), ["fail sram-threshold isolate gpu:0000:18:00.0"]);
    }

    #[test]
    fn a_driver_without_the_flag_differs_from_an_unreadable_flag() {
        assert_eq!(check(&[[FieldValue::NotSupported, n(0.0)]]), ["not-applicable not-supported"]);
        assert_eq!(check(&[[n(0.0), n(0.0)], [lost(), lost()]]), ["inconclusive failed"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
