//! gpu-persistence: does the driver keep each GPU initialised between jobs?
//!
//! What it does: reads each GPU's persistence mode.
//!
//! Why it matters: without it the driver shuts a GPU down when the last program ends and initialises it again for the
//! next one. Each job then waits seconds for its GPUs, settings such as clocks and power limits are lost in between,
//! and initialisation errors hit users first.
//!
//! What to do: `persistence-off` is `monitor`. `systemctl enable --now nvidia-persistenced` sets it permanently,
//! `nvidia-smi -pm 1` until the next boot. DCGM classifies it as a configuration error (error 29).
//!
//! Not applicable where a GPU has no such mode.

use doctor_core::observation::{Event, Metric, Observation};

use crate::{
    gpu::{for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-persistence", "persistence mode of GPUs");

const RULES: &str = r#"
rules = [
  { id = "gpu-persistence-off", check = "gpu-persistence", event = "persistence-off", reason = "persistence-off",
    severity = "monitor", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_persistence.rs")), rules: RULES, probes, interpret };

const MODE: &str = "persistence_mode";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[MODE])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    for_each_gpu(outputs.first(), "no GPU of this node has a persistence mode", |gpu, builder| {
        let Some(mode) = read_number(gpu, MODE, builder) else { return };
        builder.metric(Metric::count("persistence_on", gpu.entity(), mode));
        if mode == 0.0 {
            let text = "persistence mode is off: the driver unloads the GPU between jobs";
            builder.event(Event::seen("persistence-off", gpu.entity(), text));
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

    fn check(modes: &[FieldValue]) -> Vec<String> {
        let gpus: Vec<_> = modes.iter().map(|mode| [(MODE, mode.clone())]).collect();
        let gpus: Vec<_> = gpus.iter().map(<[_; 1]>::as_slice).collect();
        classify_outputs(&CHECK, &[answer(&gpus)])
    }

    #[test]
    fn a_disabled_mode_is_reported_and_an_unreadable_one_does_not_pass() {
        assert_eq!(check(&[n(1.0), n(1.0)]), ["pass within-limits"]);
        assert_eq!(check(&[n(1.0), n(0.0)]), ["fail persistence-off monitor gpu:0000:19:00.0"]);
        assert_eq!(check(&[n(1.0), lost()]), ["inconclusive failed"]);
        assert_eq!(check(&[FieldValue::NotSupported]), ["not-applicable not-supported"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
