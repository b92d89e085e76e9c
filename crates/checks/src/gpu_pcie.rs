//! gpu-pcie: does each GPU have the full width and speed of its PCIe slot?
//!
//! What it does: compares each GPU's PCIe link with the maximum that GPU and slot support. The width is always checked,
//! the generation only while the GPU is busy (P0 and not idle): an idle GPU lowers it to save power, which is not a
//! fault.
//!
//! Why it matters: a slot that trained at 8 lanes instead of 16 halves the GPU's bandwidth to the host and to the
//! network adapter. Training runs slower than on every other node, and no log shows why.
//!
//! What to do: `lspci -vv -s BUS | grep LnkSta` shows the link from the bus (`downgraded`); check the bridges above it
//! too (`lspci -t`).
//! - `pcie-width` is `reboot`, confirmed by a second failure: the link is retrained at boot. If it is still narrow, the
//!   board must be reseated or replaced: open a repair case.
//! - `pcie-generation` is `reboot`, confirmed by a second failure: the same for its speed under load.
//!
//! Not applicable where GPUs report no PCIe link (some virtual machines, Grace boards).

use doctor_core::observation::{Event, ObservationBuilder, Metric, Observation};

use crate::{
    gpu::{Gpu, for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-pcie", "width and speed of the GPUs' PCIe links");

const RULES: &str = r#"
rules = [
  { id = "gpu-pcie-width", check = "gpu-pcie", event = "pcie-width", reason = "pcie-width", severity = "reboot",
    confirm = 2, text = "{entity}: {value}" },
  { id = "gpu-pcie-generation", check = "gpu-pcie", event = "pcie-generation", reason = "pcie-generation",
    severity = "reboot", confirm = 2, text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_pcie.rs")), rules: RULES, probes, interpret };

const WIDTH: [&str; 2] = ["pcie.link.width.current", "pcie.link.width.max"];
const GENERATION: [&str; 2] = ["pcie.link.gen.current", "pcie.link.gen.max"];
const STATE: &str = "pstate";
const LOAD: &str = "utilization.gpu";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[WIDTH[0], WIDTH[1], GENERATION[0], GENERATION[1], STATE, LOAD])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    for_each_gpu(outputs.first(), "no GPU of this node reports its PCIe link", |gpu, builder| {
        if let Some([current, best]) = current_and_max(gpu, WIDTH, builder) {
            builder.metric(Metric::count("pcie_width", gpu.entity(), current));
            if current < best {
                let text = format!("PCIe link width x{current}, GPU and slot support x{best}");
                builder.event(Event::seen("pcie-width", gpu.entity(), text));
            }
        }
        if let Some([current, best]) = current_and_max(gpu, GENERATION, builder) {
            builder.metric(Metric::count("pcie_generation", gpu.entity(), current));
            if current < best && is_busy(gpu) {
                let text = format!("PCIe generation {current} under load, GPU and slot support {best}");
                builder.event(Event::seen("pcie-generation", gpu.entity(), text));
            }
        }
    })
}

/// Returns the current and the maximum value. Zero means that there is no such link.
fn current_and_max(gpu: &Gpu, fields: [&str; 2], builder: &mut ObservationBuilder) -> Option<[f64; 2]> {
    let [current, best] = fields.map(|field| read_number(gpu, field, builder));
    Some([current.filter(|value| *value > 0.0)?, best.filter(|value| *value > 0.0)?])
}

/// Returns whether the GPU is at full clocks and busy. Unknown counts as no, in the GPU's favour.
fn is_busy(gpu: &Gpu) -> bool {
    gpu.number(STATE) == Some(0.0) && gpu.number(LOAD).is_some_and(|percent| percent > 0.0)
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

    fn check(gpus: &[[FieldValue; 6]]) -> Vec<String> {
        let names = [WIDTH[0], WIDTH[1], GENERATION[0], GENERATION[1], STATE, LOAD];
        let gpus: Vec<Vec<_>> = gpus.iter().map(|gpu| names.into_iter().zip(gpu.clone()).collect()).collect();
        let gpus: Vec<_> = gpus.iter().map(Vec::as_slice).collect();
        classify_outputs(&CHECK, &[answer(&gpus)])
    }

    fn gpu(values: [f64; 6]) -> [FieldValue; 6] {
        values.map(n)
    }

    #[test]
    fn a_narrow_link_is_reported_and_a_link_slow_while_idle_is_not() {
        // An idle H200, driver 580.159.04, 2026-11-15: full generation also when idle.
        let well = gpu([16.0, 16.0, 5.0, 5.0, 0.0, 0.0]);
        assert_eq!(check(std::slice::from_ref(&well)), ["pass within-limits"]);
        let narrow = gpu([8.0, 16.0, 5.0, 5.0, 0.0, 0.0]);
        assert_eq!(check(&[well.clone(), narrow]), ["fail pcie-width reboot gpu:0000:19:00.0"]);
        let idle = gpu([16.0, 16.0, 1.0, 4.0, 8.0, 0.0]);
        let full_clocks_but_idle = gpu([16.0, 16.0, 1.0, 4.0, 0.0, 0.0]);
        assert_eq!(check(&[idle, full_clocks_but_idle]), ["pass within-limits"]);
        let slow = gpu([16.0, 16.0, 3.0, 4.0, 0.0, 97.0]);
        assert_eq!(check(&[slow, well]), ["fail pcie-generation reboot gpu:0000:18:00.0"]);
    }

    #[test]
    fn a_gpu_without_a_link_differs_from_one_with_unreadable_fields() {
        assert_eq!(check(&[[const { FieldValue::NotSupported }; 6]]), ["not-applicable not-supported"]);
        assert_eq!(check(&[gpu([0.0, 0.0, 0.0, 0.0, 0.0, 0.0])]), ["not-applicable not-supported"]);
        let well = gpu([16.0, 16.0, 5.0, 5.0, 0.0, 0.0]);
        let lost_fields = [lost(), lost(), lost(), lost(), lost(), lost()];
        assert_eq!(check(&[well, lost_fields]), ["inconclusive failed"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
