//! gpu-ecc-mode: is ECC enabled where GPUs support it?
//!
//! What it does: reads whether each GPU uses error correction now and after its next reset.
//!
//! Why it matters: without ECC a flipped bit is neither corrected nor counted. The job continues with wrong numbers,
//! and every other check of GPU memory sees nothing.
//!
//! What to do: both findings are `monitor`; the GPU works.
//! - `ecc-mode-wrong`: ECC is off (or on, where this site wants it off). Run `nvidia-smi -i BUS --ecc-config=1` and
//!   reset the GPU on a drained node. DCGM also classifies this as a configuration error.
//! - `ecc-mode-pending`: the mode was changed and the GPU has not been reset since; the change takes effect at the next
//!   reset.
//!
//! Parameters: `mode`, `"on"` (the default) or `"off"`. Not applicable where no GPU has ECC.

use doctor_core::observation::{Event, Metric, Observation};

use crate::{
    gpu::{for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    check_params::invalid_param,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-ecc-mode", "ECC mode of GPUs");

const RULES: &str = r#"
rules = [
  { id = "gpu-ecc-mode-wrong", check = "gpu-ecc-mode", event = "ecc-mode-wrong", reason = "ecc-mode-wrong",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "gpu-ecc-mode-pending", check = "gpu-ecc-mode", event = "ecc-mode-pending", reason = "ecc-mode-pending",
    severity = "monitor", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_ecc_mode.rs")), rules: RULES, probes, interpret };

const CURRENT: &str = "ecc.mode.current";
const PENDING: &str = "ecc.mode.pending";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[CURRENT, PENDING])]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let expected = match params.get("mode").map(toml::Value::as_str) {
        None | Some(Some("on")) => true,
        Some(Some("off")) => false,
        Some(_) => return invalid_param("mode", "mode = \"off\""),
    };
    for_each_gpu(outputs.first(), "no GPU of this node has ECC", |gpu, builder| {
        let (current, pending) = (read_number(gpu, CURRENT, builder), read_number(gpu, PENDING, builder));
        let (Some(current), Some(pending)) = (current, pending) else { return };
        let (on, will_be) = (current != 0.0, pending != 0.0);
        builder.metric(Metric::count("ecc_on", gpu.entity(), current));
        let word = |on| if on { "on" } else { "off" };
        if on != expected {
            let text = format!("ECC is {}, expected {}", word(on), word(expected));
            builder.event(Event::seen("ecc-mode-wrong", gpu.entity(), text));
        }
        if on != will_be {
            let text = format!("ECC is {}; after a reset it will be {}", word(on), word(will_be));
            builder.event(Event::seen("ecc-mode-pending", gpu.entity(), text));
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

    fn params(mode: impl Into<toml::Value>) -> Params {
        [("mode".to_owned(), mode.into())].into()
    }

    fn check(params: &Params, gpus: &[[FieldValue; 2]]) -> Vec<String> {
        let gpus: Vec<_> = gpus.iter().map(|[now, then]| [(CURRENT, now.clone()), (PENDING, then.clone())]).collect();
        let gpus: Vec<_> = gpus.iter().map(<[_; 2]>::as_slice).collect();
        classify_outputs_with(&CHECK, params, None, &[answer(&gpus)])
    }

    #[test]
    fn current_and_pending_mode_must_match_the_expected_mode() {
        let built_in = Params::new();
        assert_eq!(check(&built_in, &[[n(1.0), n(1.0)]]), ["pass within-limits"]);
        assert_eq!(
            check(&built_in, &[[n(1.0), n(1.0)], [n(0.0), n(0.0)]]),
            ["fail ecc-mode-wrong monitor gpu:0000:19:00.0"]
        );
        assert_eq!(check(&built_in, &[[n(1.0), n(0.0)]]), ["fail ecc-mode-pending monitor gpu:0000:18:00.0"]);
        assert_eq!(check(&params("off"), &[[n(0.0), n(0.0)]]), ["pass within-limits"]);
        assert_eq!(check(&params("off"), &[[n(1.0), n(1.0)]]), ["fail ecc-mode-wrong monitor gpu:0000:18:00.0"]);
        assert_eq!(check(&params(1), &[[n(1.0), n(1.0)]]), ["inconclusive unparseable"]);
    }

    #[test]
    fn a_gpu_without_ecc_differs_from_one_with_an_unreadable_mode() {
        let built_in = Params::new();
        assert_eq!(
            check(&built_in, &[[FieldValue::NotSupported, FieldValue::NotSupported]]),
            ["not-applicable not-supported"]
        );
        assert_eq!(check(&built_in, &[[n(1.0), n(1.0)], [lost(), lost()]]), ["inconclusive failed"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
