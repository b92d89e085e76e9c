//! gpu-retired-pages: has an older GPU retired too many memory pages?
//!
//! What it does: on GPUs before Ampere, reads how many pages were retired after single-bit and double-bit errors, and
//! whether a retirement is pending.
//!
//! Why it matters: these GPUs have no spare rows; a bad page is retired at the next reset, and is in use until then.
//! The list has room for 64 pages, and a board that fills it is failing.
//!
//! What to do: `nvidia-smi -q -d PAGE_RETIREMENT -i BUS` shows the list.
//! - `page-retirement-pending` is `reset`: drain the node and reset the GPU (or reboot the node where it cannot be
//!   reset).
//! - `retired-pages-many` is `isolate`: 60 pages or more, NVIDIA's criterion for returning the board.
//!
//! A retired page is repaired, so a few of them are harmless (AWS's suite isolates a node for a single one). Not
//! applicable on Ampere and newer, whatever the driver reports there: see `gpu-row-remap`.

use doctor_core::observation::{Event, Metric, Observation};

use crate::{
    gpu::{for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-retired-pages", "retired memory pages (GPUs before Ampere)");

const RULES: &str = r#"
rules = [
  { id = "gpu-retired-pages-many", check = "gpu-retired-pages", metric = "retired_pages", above = 59.0,
    reason = "retired-pages-many", severity = "isolate",
    text = "{entity}: {value} retired memory pages, limit {limit} (replace the board)" },
  { id = "gpu-retired-pages-pending", check = "gpu-retired-pages", event = "page-retirement-pending",
    reason = "page-retirement-pending", severity = "reset", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_retired_pages.rs")), rules: RULES, probes, interpret };

/// `nvmlDeviceArchitecture_t` of the first architecture that remaps rows instead.
const AMPERE: f64 = 7.0;

const ARCHITECTURE: &str = "architecture";
const SINGLE: &str = "retired_pages.single_bit_ecc.count";
const DOUBLE: &str = "retired_pages.double_bit.count";
const PENDING: &str = "retired_pages.pending";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[ARCHITECTURE, SINGLE, DOUBLE, PENDING])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    for_each_gpu(outputs.first(), "no GPU of this node retires pages", |gpu, builder| {
        match read_number(gpu, ARCHITECTURE, builder) {
            Some(architecture) if architecture < AMPERE => {}
            _ => return,
        }
        let fields = [SINGLE, DOUBLE, PENDING].map(|field| read_number(gpu, field, builder));
        let [Some(single), Some(double), Some(pending)] = fields else { return };
        builder.metric(Metric::count("retired_pages", gpu.entity(), single + double));
        if pending != 0.0 {
            let text = "a bad memory page is in use until the next reset";
            builder.event(Event::seen("page-retirement-pending", gpu.entity(), text));
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

    fn check(gpus: &[[FieldValue; 4]]) -> Vec<String> {
        let names = [ARCHITECTURE, SINGLE, DOUBLE, PENDING];
        let gpus: Vec<Vec<_>> = gpus.iter().map(|gpu| names.into_iter().zip(gpu.clone()).collect()).collect();
        let gpus: Vec<_> = gpus.iter().map(Vec::as_slice).collect();
        classify_outputs(&CHECK, &[answer(&gpus)])
    }

    #[test]
    fn each_trouble_is_found_on_its_gpu_and_on_no_other() {
        let well = [n(5.0), n(1.0), n(1.0), n(0.0)];
        assert_eq!(check(std::slice::from_ref(&well)), ["pass within-limits"]);
        let many = [n(6.0), n(40.0), n(20.0), n(0.0)];
        assert_eq!(check(&[well.clone(), many]), ["fail retired-pages-many isolate gpu:0000:19:00.0"]);
        let pending = [n(5.0), n(1.0), n(0.0), n(1.0)];
        assert_eq!(check(&[pending, well]), ["fail page-retirement-pending reset gpu:0000:18:00.0"]);
    }

    // AWS suite, defect 10.
    #[test]
    fn retired_pages_on_ampere_are_not_a_fault() {
        assert_eq!(check(&[[n(7.0), n(70.0), n(70.0), n(1.0)]]), ["not-applicable not-supported"]);
        let none = || FieldValue::NotSupported;
        assert_eq!(check(&[[n(9.0), none(), none(), none()]]), ["not-applicable not-supported"]);
    }

    #[test]
    fn a_gpu_with_unreadable_counters_does_not_pass() {
        assert_eq!(check(&[[lost(), lost(), lost(), lost()]]), ["inconclusive failed"]);
        assert_eq!(check(&[[n(5.0), n(0.0), n(0.0), lost()]]), ["inconclusive failed"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
