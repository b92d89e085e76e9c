//! gpu-memory-size: does each GPU have the memory size of its model?
//!
//! What it does: reads each GPU's memory size and compares it with the machine profile.
//!
//! Why it matters: a board of another model installed in a repair, or one that started with part of its memory
//! disabled, looks like its neighbours until a job needs the last gigabytes.
//!
//! What to do: `gpu-memory-small` is `isolate`: less than 98 % of the profile's size. `nvidia-smi -q -d MEMORY -i BUS`
//! and the product name show which of the two it is; return the board to the vendor. MIG, ECC on GDDR boards, or a
//! larger reserve of a new driver change the size slightly, which the 2 % allow for.
//!
//! Without a profile the size is not judged (`no-expectation`). Not applicable where the GPU uses the host's memory.

use doctor_core::observation::{Metric, Observation, Unit};

use crate::{
    gpu::{for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-memory-size", "size of the GPUs' memory, by the machine type");

const RULES: &str = r#"
rules = [
  { id = "gpu-memory-size", check = "gpu-memory-size", metric = "gpu_memory_bytes", below_percent_of_profile = 98.0,
    reason = "gpu-memory-small", severity = "isolate",
    text = "{entity}: {value}B of memory, expected at least {limit}B on this machine type" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_memory_size.rs")), rules: RULES, probes, interpret };

const TOTAL: &str = "memory.total";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[TOTAL])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    for_each_gpu(outputs.first(), "no GPU of this node has its own memory", |gpu, builder| {
        if let Some(bytes) = read_number(gpu, TOTAL, builder) {
            builder.metric(Metric::new("gpu_memory_bytes", gpu.entity(), bytes, Unit::Bytes));
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
        classify_fixture::{classify_outputs, classify_outputs_with},
    };
    use doctor_core::{ids::Sku, profile::Profile};

    /// 143771 MiB: an H200, driver 580.159.04, 2026-11-15.
    const H200: f64 = 143_771.0 * 1_048_576.0;

    fn check(sizes: &[FieldValue]) -> Vec<String> {
        let profile = Profile {
            sku: Sku::new("h200").unwrap(),
            version: 1,
            expect: [("gpu_memory_bytes".to_owned(), H200.into())].into(),
        };
        let gpus: Vec<_> = sizes.iter().map(|size| [(TOTAL, size.clone())]).collect();
        let gpus: Vec<_> = gpus.iter().map(<[_; 1]>::as_slice).collect();
        classify_outputs_with(&CHECK, &Params::new(), Some(&profile), &[answer(&gpus)])
    }

    #[test]
    fn a_gpu_with_less_memory_is_reported() {
        assert_eq!(check(&[n(H200), n(H200 * 0.99)]), ["pass within-limits"]);
        assert_eq!(check(&[n(H200), n(H200 * 0.8)]), ["fail gpu-memory-small isolate gpu:0000:19:00.0"]);
        assert_eq!(check(&[n(H200), lost()]), ["inconclusive failed"]);
        assert_eq!(check(&[FieldValue::NotSupported]), ["not-applicable not-supported"]);
        assert_eq!(classify_outputs(&CHECK, &[answer(&[&[(TOTAL, n(H200))]])]), ["not-applicable no-expectation"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
