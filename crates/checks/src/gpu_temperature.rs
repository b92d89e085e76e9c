//! gpu-temperature: how close is each GPU to thermal throttling?
//!
//! What it does: reads each GPU's margin to the temperature at which it throttles (`T.Limit`); on drivers that do not
//! report it, the difference between its slowdown temperature and its current temperature.
//!
//! Why it matters: at a margin of zero the clocks drop, and a little later the GPU shuts down. The temperature alone
//! says little: 85 degrees is high for one board and usual for another; the margin is comparable for all.
//!
//! What to do: `gpu-hot` is `monitor`, confirmed by a second failure: fewer than 3 degrees are left. Check the inlet
//! temperature, fans and filters, and the GPU's neighbours: if all are hot, the cause is the room or the chassis; if
//! one is hot, its heat sink. `nvidia-smi -q -d TEMPERATURE -i BUS` shows the sensors. `gpu-throttle` shows whether
//! clocks are already reduced.
//!
//! Not applicable where GPUs report neither margin nor limit.

use doctor_core::observation::{ObservationBuilder, Metric, Observation, Unit};

use crate::{
    gpu::{Gpu, for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-temperature", "GPU temperature below the slowdown threshold");

// Throttling begins at 0. The sensor reports whole degrees, and boards vary by one or two under steady load.
const RULES: &str = r#"
rules = [
  { id = "gpu-temperature-margin", check = "gpu-temperature", metric = "temperature_margin_celsius", below = 3.0,
    reason = "gpu-hot", severity = "monitor", confirm = 2,
    text = "{entity}: {value} °C below the slowdown temperature, expected at least {limit} °C" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_temperature.rs")), rules: RULES, probes, interpret };

const MARGIN: &str = "temperature.gpu.tlimit";
const TEMPERATURE: &str = "temperature.gpu";
const SLOWDOWN: &str = "temperature.slowdown";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[MARGIN, TEMPERATURE, SLOWDOWN])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    for_each_gpu(outputs.first(), "no GPU of this node reports its slowdown temperature", |gpu, builder| {
        if let Some(margin) = margin(gpu, builder) {
            builder.metric(Metric::new("temperature_margin_celsius", gpu.entity(), margin, Unit::Celsius));
        }
    })
}

fn margin(gpu: &Gpu, builder: &mut ObservationBuilder) -> Option<f64> {
    if let Some(margin) = gpu.number(MARGIN) {
        return Some(margin);
    }
    let (now, limit) = (read_number(gpu, TEMPERATURE, builder), read_number(gpu, SLOWDOWN, builder));
    match (now, limit) {
        (Some(now), Some(limit)) => Some(limit - now),
        // Neither is available; this records a failure to read the margin, if there was one.
        _ => read_number(gpu, MARGIN, builder),
    }
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

    fn check(gpus: &[[FieldValue; 3]]) -> Vec<String> {
        let names = [MARGIN, TEMPERATURE, SLOWDOWN];
        let gpus: Vec<Vec<_>> = gpus.iter().map(|gpu| names.into_iter().zip(gpu.clone()).collect()).collect();
        let gpus: Vec<_> = gpus.iter().map(Vec::as_slice).collect();
        classify_outputs(&CHECK, &[answer(&gpus)])
    }

    #[test]
    fn a_gpu_near_its_temperature_limit_is_reported() {
        // The first is from an H200, driver 580.159.04, 2026-11-15.
        let cool = [n(47.0), n(40.0), FieldValue::NotSupported];
        assert_eq!(check(std::slice::from_ref(&cool)), ["pass within-limits"]);
        let hot = [n(2.0), n(85.0), FieldValue::NotSupported];
        assert_eq!(check(&[cool, hot]), ["fail gpu-hot monitor gpu:0000:19:00.0"]);
    }

    #[test]
    fn an_older_driver_reports_the_limit_instead_of_the_margin() {
        assert_eq!(check(&[[FieldValue::NotSupported, n(60.0), n(90.0)]]), ["pass within-limits"]);
        let hot = [FieldValue::NotSupported, n(89.0), n(90.0)];
        assert_eq!(check(&[hot]), ["fail gpu-hot monitor gpu:0000:18:00.0"]);
    }

    #[test]
    fn an_unreadable_temperature_does_not_pass() {
        let cool = [n(47.0), n(40.0), FieldValue::NotSupported];
        assert_eq!(check(&[cool, [lost(), lost(), lost()]]), ["inconclusive failed"]);
        assert_eq!(check(&[[lost(), n(40.0), FieldValue::NotSupported]]), ["inconclusive failed"]);
        let silent = [FieldValue::NotSupported, n(40.0), FieldValue::NotSupported];
        assert_eq!(check(&[silent]), ["not-applicable not-supported"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
