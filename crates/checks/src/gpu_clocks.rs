//! gpu-clocks: may each GPU run at its full clock rate?
//!
//! What it does: compares each GPU's application clocks with their defaults, and its maximum clocks with those of GPUs
//! of the same model in this node.
//!
//! Why it matters: clocks that were lowered for a benchmark and forgotten, or a board with another limit than its
//! neighbours, slow every job that spans them. The GPU reports no error.
//!
//! What to do: both findings are `monitor`. `nvidia-smi -q -d CLOCK -i BUS` shows all clocks.
//! - `clocks-lowered`: `nvidia-smi -i BUS -rac` resets application clocks; `nvidia-smi -i BUS -rgc` and `-rmc` remove
//!   locked clocks.
//! - `clocks-differ`: the maximum clock differs from that of its neighbours. Compare VBIOS versions (`gpu-versions`);
//!   ask the vendor.
//!
//! Not applicable where GPUs report no clocks.

use doctor_core::observation::{Event, ObservationBuilder, Metric, Observation, Unit};

use crate::{
    gpu::{Gpu, require_gpus, not_applicable, read_number},
    differing_devices::{Part, outliers},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-clocks", "maximum and application clocks of GPUs");

const RULES: &str = r#"
rules = [
  { id = "gpu-clocks-lowered", check = "gpu-clocks", event = "clocks-lowered", reason = "clocks-lowered",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "gpu-clocks-differ", check = "gpu-clocks", event = "clocks-differ", reason = "clocks-differ",
    severity = "monitor", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_clocks.rs")), rules: RULES, probes, interpret };

const NAME: &str = "name";
const MAX_SM: &str = "clocks.max.sm";
const MAX_MEMORY: &str = "clocks.max.mem";
/// The current setting, its default, and a name for messages.
const APPLICATION: [(&str, &str, &str); 2] = [
    ("clocks.applications.graphics", "clocks.default_applications.graphics", "graphics"),
    ("clocks.applications.memory", "clocks.default_applications.memory", "memory"),
];

fn probes(_: &Params) -> Vec<Probe> {
    let [(graphics, usual_graphics, _), (memory, usual_memory, _)] = APPLICATION;
    vec![Probe::gpu(&[NAME, MAX_SM, MAX_MEMORY, graphics, usual_graphics, memory, usual_memory])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let gpus = match require_gpus(outputs.first()) {
        Ok(gpus) => gpus,
        Err(instead) => return instead,
    };
    let mut builder = ObservationBuilder::default();
    let (mut chips, mut memories) = (Vec::new(), Vec::new());
    for gpu in gpus {
        report_lowered_clock(gpu, &mut builder);
        let kind = gpu.text(NAME).unwrap_or_default();
        let part = |mhz: f64| Part { entity: gpu.entity(), kind: kind.to_owned(), value: mhz.to_string() };
        if let Some(mhz) = read_number(gpu, MAX_SM, &mut builder) {
            builder.metric(Metric::new("max_sm_clock_hertz", gpu.entity(), mhz * 1e6, Unit::Hertz));
            chips.push(part(mhz));
        }
        memories.extend(read_number(gpu, MAX_MEMORY, &mut builder).map(part));
    }
    for (what, parts) in [("SM", chips), ("memory", memories)] {
        for odd in outliers(&parts) {
            let text = format!("maximum {what} clock {} MHz, the other GPUs have {} MHz", odd.part.value, odd.majority_value);
            builder.event(Event::seen("clocks-differ", odd.part.entity.clone(), text));
        }
    }
    builder.build_or(not_applicable("not-supported", "no GPU of this node reports its clocks"))
}

/// Newer drivers have no application clocks.
fn report_lowered_clock(gpu: &Gpu, builder: &mut ObservationBuilder) {
    for (set, usual, what) in APPLICATION {
        let (set, usual) = (read_number(gpu, set, builder), read_number(gpu, usual, builder));
        let (Some(set), Some(usual)) = (set, usual) else { continue };
        if set < usual {
            let text = format!("application clock ({what}) {set} MHz, default {usual} MHz");
            builder.event(Event::seen("clocks-lowered", gpu.entity(), text));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::{
            FieldValue,
            tests::{answer, lost, n, none, t},
        },
        classify_fixture::classify_outputs,
    };

    const FIELDS: [&str; 7] =
        [NAME, MAX_SM, MAX_MEMORY, APPLICATION[0].0, APPLICATION[0].1, APPLICATION[1].0, APPLICATION[1].1];

    fn gpu(name: &str, values: [f64; 6]) -> Vec<(&'static str, FieldValue)> {
        FIELDS.into_iter().zip([t(name)].into_iter().chain(values.map(n))).collect()
    }

    /// Values of an H200, driver 580.159.04, 2026-11-15.
    fn h200() -> Vec<(&'static str, FieldValue)> {
        gpu("NVIDIA H200", [1980.0, 3201.0, 1980.0, 1980.0, 3201.0, 3201.0])
    }

    fn check(gpus: &[Vec<(&str, FieldValue)>]) -> Vec<String> {
        let gpus: Vec<_> = gpus.iter().map(Vec::as_slice).collect();
        classify_outputs(&CHECK, &[answer(&gpus)])
    }

    #[test]
    fn a_gpu_with_lower_clocks_than_its_peers_is_reported() {
        assert_eq!(check(&[h200(), h200(), h200()]), ["pass within-limits"]);
        let lowered = gpu("NVIDIA H200", [1980.0, 3201.0, 1410.0, 1980.0, 3201.0, 3201.0]);
        assert_eq!(check(&[h200(), lowered]), ["fail clocks-lowered monitor gpu:0000:19:00.0"]);
        let other = gpu("NVIDIA H200", [1755.0, 3201.0, 1980.0, 1980.0, 3201.0, 3201.0]);
        assert_eq!(check(&[h200(), h200(), other]), ["fail clocks-differ monitor gpu:0000:1a:00.0"]);
        let l4 = gpu("NVIDIA L4", [2040.0, 6251.0, 2040.0, 2040.0, 6251.0, 6251.0]);
        assert_eq!(check(&[h200(), l4]), ["pass within-limits"]);
    }

    #[test]
    fn a_gpu_with_unreadable_clocks_does_not_pass() {
        let lost_fields: Vec<_> = FIELDS.into_iter().map(|field| (field, lost())).collect();
        assert_eq!(check(&[h200(), lost_fields]), ["inconclusive failed"]);
        let silent: Vec<_> = FIELDS.into_iter().map(|field| (field, FieldValue::NotSupported)).collect();
        assert_eq!(check(&[silent]), ["not-applicable not-supported"]);
        // A newer driver, without application clocks.
        let mut newer = h200();
        newer[3..].iter_mut().for_each(|(_, reading)| *reading = FieldValue::NotSupported);
        assert_eq!(check(&[newer]), ["pass within-limits"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
