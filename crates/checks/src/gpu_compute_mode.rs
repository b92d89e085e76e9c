//! gpu-compute-mode: may programs compute on each GPU?
//!
//! What it does: reads each GPU's compute mode: open to all processes, to one at a time, or to none.
//!
//! Why it matters: a GPU whose mode was set to `Prohibited` or `Exclusive_Process` for a test and not reset refuses the
//! second process, or every process (`CUDA-capable device(s) is/are busy or unavailable`), while all its readings look
//! healthy.
//!
//! What to do: `compute-mode` is `monitor`. `nvidia-smi -i BUS -c DEFAULT` resets it.
//!
//! Parameters: `mode`, `"default"` (the default), `"exclusive-process"` or `"prohibited"`, for a site that sets another
//! mode on purpose. Not applicable where GPUs have no such mode.

use doctor_core::observation::{Event, FailureKind, Metric, Observation, ProbeFailure};

use crate::{
    gpu::{for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    check_params::invalid_param,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-compute-mode", "compute mode of GPUs");

const RULES: &str = r#"
rules = [
  { id = "gpu-compute-mode", check = "gpu-compute-mode", event = "compute-mode", reason = "compute-mode",
    severity = "monitor", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_compute_mode.rs")), rules: RULES, probes, interpret };

const MODE: &str = "compute_mode";

/// Indexed by NVML's number. The second has not been in use for a decade.
const MODES: [&str; 4] = ["default", "exclusive-thread", "prohibited", "exclusive-process"];

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[MODE])]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let expected = match params.get("mode").map(toml::Value::as_str) {
        None => "default",
        Some(Some(mode)) if MODES.contains(&mode) => mode,
        Some(_) => return invalid_param("mode", "mode = \"exclusive-process\""),
    };
    for_each_gpu(outputs.first(), "no GPU of this node has a compute mode", |gpu, builder| {
        let Some(number) = read_number(gpu, MODE, builder) else { return };
        let Some(mode) = MODES.get(number as usize) else {
            let text = format!("{}: unknown {MODE} {number}", gpu.entity());
            builder.unreadable(ProbeFailure::new(FailureKind::Unparseable, text));
            return;
        };
        builder.metric(Metric::count("compute_mode", gpu.entity(), number));
        if *mode != expected {
            let text = format!("compute mode is {mode}, expected {expected}");
            builder.event(Event::seen("compute-mode", gpu.entity(), text));
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

    fn check(params: &str, modes: &[FieldValue]) -> Vec<String> {
        let gpus: Vec<_> = modes.iter().map(|mode| [(MODE, mode.clone())]).collect();
        let gpus: Vec<_> = gpus.iter().map(<[_; 1]>::as_slice).collect();
        classify_outputs_with(&CHECK, &toml::from_str(params).unwrap(), None, &[answer(&gpus)])
    }

    #[test]
    fn an_exclusive_compute_mode_is_reported_unless_the_site_expects_it() {
        assert_eq!(check("", &[n(0.0), n(0.0)]), ["pass within-limits"]);
        assert_eq!(check("", &[n(0.0), n(2.0)]), ["fail compute-mode monitor gpu:0000:19:00.0"]);
        assert_eq!(check("mode = 'exclusive-process'", &[n(3.0)]), ["pass within-limits"]);
        assert_eq!(check("mode = 'exclusive-process'", &[n(0.0)]), ["fail compute-mode monitor gpu:0000:18:00.0"]);
    }

    #[test]
    fn an_unknown_mode_does_not_pass() {
        assert_eq!(check("", &[n(7.0)]), ["inconclusive unparseable"]);
        assert_eq!(check("", &[n(0.0), lost()]), ["inconclusive failed"]);
        assert_eq!(check("mode = 'open'", &[n(0.0)]), ["inconclusive unparseable"]);
        assert_eq!(check("", &[FieldValue::NotSupported]), ["not-applicable not-supported"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
