//! gpu-mig: are GPUs partitioned (MIG) as this site wants?
//!
//! What it does: reads each GPU's MIG mode now and after its next reset.
//!
//! Why it matters: a GPU left in MIG mode has no NVLink and no whole device: jobs for whole GPUs do not start on it,
//! and the deep tests (DCGM level 3 and 4, NCCL) cannot run. A pending change takes effect unexpectedly at the next
//! reboot.
//!
//! What to do: all findings are `monitor`; the GPU is healthy.
//! - `mig-mode`: differs from the parameter. Run `nvidia-smi -i BUS -mig 0` (or `1`) on a drained node, then reset the
//!   GPU.
//! - `mig-mixed`: without the parameter, some GPUs of the node are partitioned and others are not.
//! - `mig-pending`: the mode was changed and the GPU has not been reset since.
//!
//! Parameters: `mode`, `"off"`, `"on"` or `"mixed"`. Without it, all GPUs of a node must have the same mode. Not
//! applicable where no GPU supports MIG.

use doctor_core::observation::{Entity, Event, ObservationBuilder, Metric, Observation};

use crate::{
    gpu::{Gpu, require_gpus, not_applicable, read_number},
    probe::{Probe, ProbeOutput},
    check_params::invalid_param,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-mig", "MIG mode of GPUs");

const RULES: &str = r#"
rules = [
  { id = "gpu-mig-mode", check = "gpu-mig", event = "mig-mode", reason = "mig-mode", severity = "monitor",
    text = "{entity}: {value}" },
  { id = "gpu-mig-mixed", check = "gpu-mig", event = "mig-mixed", reason = "mig-mixed", severity = "monitor",
    text = "{value}" },
  { id = "gpu-mig-pending", check = "gpu-mig", event = "mig-pending", reason = "mig-pending", severity = "monitor",
    text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_mig.rs")), rules: RULES, probes, interpret };

const CURRENT: &str = "mig.mode.current";
const PENDING: &str = "mig.mode.pending";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[CURRENT, PENDING])]
}

enum ExpectedMode {
    Uniform,
    Fixed(bool),
    Mixed,
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let expected = match params.get("mode").map(toml::Value::as_str) {
        None => ExpectedMode::Uniform,
        Some(Some("off")) => ExpectedMode::Fixed(false),
        Some(Some("on")) => ExpectedMode::Fixed(true),
        Some(Some("mixed")) => ExpectedMode::Mixed,
        Some(_) => return invalid_param("mode", "mode = \"off\""),
    };
    let gpus = match require_gpus(outputs.first()) {
        Ok(gpus) => gpus,
        Err(instead) => return instead,
    };
    let mut builder = ObservationBuilder::default();
    let modes: Vec<(&Gpu, bool)> = gpus.iter().filter_map(|gpu| Some((gpu, current_mode(gpu, &mut builder)?))).collect();
    let divided = modes.iter().filter(|(_, on)| *on).count();
    match expected {
        ExpectedMode::Uniform if divided > 0 && divided < modes.len() => {
            let text = format!("MIG is on for {divided} of {} GPUs and off for the others", modes.len());
            builder.event(Event::seen("mig-mixed", Entity::node(), text));
        }
        ExpectedMode::Uniform | ExpectedMode::Mixed => {}
        ExpectedMode::Fixed(expected) => {
            for (gpu, on) in modes.iter().filter(|(_, on)| *on != expected) {
                let text = format!("MIG is {}, expected {}", on_off(*on), on_off(expected));
                builder.event(Event::seen("mig-mode", gpu.entity(), text));
            }
        }
    }
    builder.build_or(not_applicable("not-supported", "no GPU of this node supports MIG"))
}

const fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// Returns whether MIG is on.
fn current_mode(gpu: &Gpu, builder: &mut ObservationBuilder) -> Option<bool> {
    let (current, pending) = (read_number(gpu, CURRENT, builder), read_number(gpu, PENDING, builder));
    let (on, will_be) = (current? != 0.0, pending? != 0.0);
    builder.metric(Metric::count("mig_on", gpu.entity(), f64::from(u8::from(on))));
    if on != will_be {
        let text = format!("MIG is {}; after a reset it will be {}", on_off(on), on_off(will_be));
        builder.event(Event::seen("mig-pending", gpu.entity(), text));
    }
    Some(on)
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

    fn check(params: &str, gpus: &[[FieldValue; 2]]) -> Vec<String> {
        let gpus: Vec<_> = gpus.iter().map(|[now, then]| [(CURRENT, now.clone()), (PENDING, then.clone())]).collect();
        let gpus: Vec<_> = gpus.iter().map(<[_; 2]>::as_slice).collect();
        classify_outputs_with(&CHECK, &toml::from_str(params).unwrap(), None, &[answer(&gpus)])
    }

    #[test]
    fn current_and_pending_mode_must_match_the_expected_mode() {
        let (on, off) = ([n(1.0), n(1.0)], [n(0.0), n(0.0)]);
        assert_eq!(check("", &[off.clone(), off.clone()]), ["pass within-limits"]);
        assert_eq!(check("", &[on.clone(), on.clone()]), ["pass within-limits"]);
        let both = [off.clone(), on];
        assert_eq!(check("", &both), ["fail mig-mixed monitor node"]);
        assert_eq!(check("mode = 'mixed'", &both), ["pass within-limits"]);
        assert_eq!(check("mode = 'off'", &both), ["fail mig-mode monitor gpu:0000:19:00.0"]);
        assert_eq!(check("mode = 'on'", &both), ["fail mig-mode monitor gpu:0000:18:00.0"]);
        assert_eq!(check("", &[off, [n(0.0), n(1.0)]]), ["fail mig-pending monitor gpu:0000:19:00.0"]);
    }

    #[test]
    fn a_gpu_without_mig_differs_from_one_with_an_unreadable_mode() {
        let without = [FieldValue::NotSupported, FieldValue::NotSupported];
        assert_eq!(check("mode = 'off'", &[without]), ["not-applicable not-supported"]);
        assert_eq!(check("", &[[n(0.0), n(0.0)], [lost(), lost()]]), ["inconclusive failed"]);
        assert_eq!(check("mode = true", &[[n(0.0), n(0.0)]]), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
