//! gpu-power-limit: may each GPU draw its rated power?
//!
//! What it does: compares each GPU's power limit with its default, or with the limit that this site configures.
//!
//! Why it matters: a limit that was lowered for a test and not reset makes one GPU slower than its neighbours, at full
//! load only. Every job that spans it waits for it.
//!
//! What to do: `power-limit-low` (and with `watts` also `power-limit-high`) is `monitor`. `nvidia-smi -i BUS -pl WATTS`
//! sets it until the driver is reloaded; `nvidia-smi -q -d POWER -i BUS` shows the limit, the default and the allowed
//! range. A limit that keeps returning comes from the chassis (`ipmitool dcmi power get_limit`) or from a boot script.
//!
//! Parameters: `watts`, the limit that this site sets on purpose; a GPU above it is reported too. Not applicable where
//! GPUs have no power limit.

use doctor_core::observation::{Event, Metric, Observation, Unit};

use crate::{
    gpu::{for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    check_params,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-power-limit", "power limits of GPUs");

const RULES: &str = r#"
rules = [
  { id = "gpu-power-limit-low", check = "gpu-power-limit", event = "power-limit-low", reason = "power-limit-low",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "gpu-power-limit-high", check = "gpu-power-limit", event = "power-limit-high", reason = "power-limit-high",
    severity = "monitor", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_power_limit.rs")), rules: RULES, probes, interpret };

const LIMIT: &str = "power.limit";
const DEFAULT: &str = "power.default_limit";

/// Limits are set in whole watts and reported in milliwatts.
const TOLERANCE_WATTS: f64 = 1.0;

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[LIMIT, DEFAULT])]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let watts = match check_params::number(params, "watts", "watts = 600") {
        Ok(watts) => watts,
        Err(instead) => return instead,
    };
    for_each_gpu(outputs.first(), "no GPU of this node has a power limit", |gpu, builder| {
        let (limit, default) = (read_number(gpu, LIMIT, builder), read_number(gpu, DEFAULT, builder));
        let (Some(limit), Some(expected)) = (limit, watts.or(default)) else { return };
        builder.metric(Metric::new("power_limit_watts", gpu.entity(), limit, Unit::Watts));
        let whose = if watts.is_some() { "expected" } else { "default" };
        let text = format!("power limit {limit} W, {whose} {expected} W");
        if limit < expected - TOLERANCE_WATTS {
            builder.event(Event::seen("power-limit-low", gpu.entity(), text));
        } else if watts.is_some() && limit > expected + TOLERANCE_WATTS {
            builder.event(Event::seen("power-limit-high", gpu.entity(), text));
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

    fn check(params: &str, gpus: &[[FieldValue; 2]]) -> Vec<String> {
        let gpus: Vec<_> =
            gpus.iter().map(|[limit, usual]| [(LIMIT, limit.clone()), (DEFAULT, usual.clone())]).collect();
        let gpus: Vec<_> = gpus.iter().map(<[_; 2]>::as_slice).collect();
        classify_outputs_with(&CHECK, &toml::from_str(params).unwrap(), None, &[answer(&gpus)])
    }

    #[test]
    fn a_limit_below_the_default_is_reported_unless_the_site_expects_it() {
        // The first is from an H200, driver 580.159.04, 2026-11-15.
        let well = [n(700.0), n(700.0)];
        assert_eq!(check("", std::slice::from_ref(&well)), ["pass within-limits"]);
        let low = [n(500.0), n(700.0)];
        assert_eq!(check("", &[well.clone(), low.clone()]), ["fail power-limit-low monitor gpu:0000:19:00.0"]);
        assert_eq!(check("watts = 500", &[low]), ["pass within-limits"]);
        assert_eq!(check("watts = 500", &[well]), ["fail power-limit-high monitor gpu:0000:18:00.0"]);
        assert_eq!(check("", &[[n(800.0), n(700.0)]]), ["pass within-limits"]);
    }

    #[test]
    fn an_unreadable_limit_does_not_pass() {
        assert_eq!(check("", &[[n(700.0), n(700.0)], [lost(), lost()]]), ["inconclusive failed"]);
        assert_eq!(check("", &[[FieldValue::NotSupported, FieldValue::NotSupported]]), ["not-applicable not-supported"]);
        assert_eq!(check("watts = 'all'", &[[n(700.0), n(700.0)]]), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
