//! gpu-temperature: how far is each GPU from being too hot?
//!
//! What it does: reads each GPU's margin to the temperature at which it is slowed down (`T.Limit`); on drivers that do
//! not tell it, the difference between its slowdown temperature and its temperature now.
//!
//! Why it matters: at a margin of zero the clocks go down, and a little later the GPU switches itself off. Degrees
//! alone say little: 85 is much for one board and usual for another; the margin is the same for all.
//!
//! What to do: `gpu-hot` is `monitor`, twice in a row: fewer than 3 degrees are left. Look at inlet temperature, fans
//! and filters, and at the GPU's neighbours: all hot is the room or the chassis, one hot is its heat sink. `nvidia-smi
//! -q -d TEMPERATURE -i BUS`. `gpu-throttle` tells whether clocks are already held down.
//!
//! Not applicable where GPUs tell neither margin nor limit.

use doctor_core::observation::{Look, Metric, Observation, Unit};

use crate::{
    gpu::{Gpu, each, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-temperature", "how far GPUs are from being too hot");

// At 0 the slowdown begins. The sensor tells whole degrees and boards swing by one or two under steady load.
const RULES: &str = r#"
rules = [
  { id = "gpu-temperature-margin", check = "gpu-temperature", metric = "temperature_margin_celsius", below = 3.0,
    reason = "gpu-hot", severity = "monitor", confirm = 2,
    text = "{entity}: {value} degrees below the temperature at which it is slowed down, {limit} is the least" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_temperature.rs")), rules: RULES, probes, interpret };

const MARGIN: &str = "temperature.gpu.tlimit";
const NOW: &str = "temperature.gpu";
const SLOWDOWN: &str = "temperature.slowdown";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[MARGIN, NOW, SLOWDOWN])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    each(outputs.first(), "no GPU here tells at which temperature it is slowed down", |gpu, look| {
        if let Some(margin) = margin(gpu, look) {
            look.metric(Metric::new("temperature_margin_celsius", gpu.entity(), margin, Unit::Celsius));
        }
    })
}

fn margin(gpu: &Gpu, look: &mut Look) -> Option<f64> {
    if let Some(margin) = gpu.number(MARGIN) {
        return Some(margin);
    }
    let (now, limit) = (read_number(gpu, NOW, look), read_number(gpu, SLOWDOWN, look));
    match (now, limit) {
        (Some(now), Some(limit)) => Some(limit - now),
        // Neither way is open; if that is because the driver would not tell the margin, it is said.
        _ => read_number(gpu, MARGIN, look),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::{
            Reading,
            tests::{answer, lost, n, none},
        },
        judged::judged,
    };

    fn look(gpus: &[[Reading; 3]]) -> Vec<String> {
        let names = [MARGIN, NOW, SLOWDOWN];
        let gpus: Vec<Vec<_>> = gpus.iter().map(|gpu| names.into_iter().zip(gpu.clone()).collect()).collect();
        let gpus: Vec<_> = gpus.iter().map(Vec::as_slice).collect();
        judged(&CHECK, &[answer(&gpus)])
    }

    #[test]
    fn a_gpu_near_its_limit_is_found() {
        // The first as an H200 says, driver 580.159.04, 2026-11-15.
        let cool = [n(47.0), n(40.0), Reading::NotSupported];
        assert_eq!(look(std::slice::from_ref(&cool)), ["pass within-limits"]);
        let hot = [n(2.0), n(85.0), Reading::NotSupported];
        assert_eq!(look(&[cool, hot]), ["fail gpu-hot monitor gpu:0000:19:00.0"]);
    }

    #[test]
    fn an_older_driver_tells_the_limit_instead_of_the_margin() {
        assert_eq!(look(&[[Reading::NotSupported, n(60.0), n(90.0)]]), ["pass within-limits"]);
        let hot = [Reading::NotSupported, n(89.0), n(90.0)];
        assert_eq!(look(&[hot]), ["fail gpu-hot monitor gpu:0000:18:00.0"]);
    }

    #[test]
    fn a_gpu_that_would_not_tell_is_not_cool() {
        let cool = [n(47.0), n(40.0), Reading::NotSupported];
        assert_eq!(look(&[cool, [lost(), lost(), lost()]]), ["inconclusive failed"]);
        assert_eq!(look(&[[lost(), n(40.0), Reading::NotSupported]]), ["inconclusive failed"]);
        let silent = [Reading::NotSupported, n(40.0), Reading::NotSupported];
        assert_eq!(look(&[silent]), ["not-applicable not-supported"]);
        assert_eq!(judged(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
