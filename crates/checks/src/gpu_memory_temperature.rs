//! gpu-memory-temperature: is the memory of a GPU too hot?
//!
//! What it does: reads the temperature of each GPU's HBM.
//!
//! Why it matters: HBM is stacked next to the chip and can be much hotter than it. Above its limit it has errors, and
//! the hardware throttles the whole GPU although the chip itself is cool.
//!
//! What to do: `gpu-memory-hot` is `monitor`, confirmed by a second failure: above 95 degrees, the maximum that NVIDIA
//! allows for the memory of A100 and H100 (`nvidia-smi -q -d TEMPERATURE`, "Memory Max Operating Temp" where the driver
//! still prints it). Check the cooling as for `gpu-temperature`. For boards with another limit, add a rule with the id
//! `gpu-memory-temperature` to the policy.
//!
//! Not applicable where no GPU reports it: GDDR boards such as L4 and L40 have no such sensor.

use doctor_core::observation::{Metric, Observation, Unit};

use crate::{
    gpu::{for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-memory-temperature", "temperature of the GPUs' memory");

const RULES: &str = r#"
rules = [
  { id = "gpu-memory-temperature", check = "gpu-memory-temperature", metric = "memory_temperature_celsius",
    above = 95.0, reason = "gpu-memory-hot", severity = "monitor", confirm = 2,
    text = "{entity}: memory temperature {value} °C, limit {limit} °C" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_memory_temperature.rs")), rules: RULES, probes, interpret };

const MEMORY: &str = "temperature.memory";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[MEMORY])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    for_each_gpu(outputs.first(), "no GPU of this node reports its memory temperature", |gpu, builder| {
        if let Some(degrees) = read_number(gpu, MEMORY, builder) {
            builder.metric(Metric::new("memory_temperature_celsius", gpu.entity(), degrees, Unit::Celsius));
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

    fn check(degrees: &[FieldValue]) -> Vec<String> {
        let gpus: Vec<_> = degrees.iter().map(|degrees| [(MEMORY, degrees.clone())]).collect();
        let gpus: Vec<_> = gpus.iter().map(<[_; 1]>::as_slice).collect();
        classify_outputs(&CHECK, &[answer(&gpus)])
    }

    #[test]
    fn hot_memory_is_reported_and_a_missing_sensor_does_not_pass() {
        // The first is from an H200, driver 580.159.04, 2026-11-15.
        assert_eq!(check(&[n(40.0), n(95.0)]), ["pass within-limits"]);
        assert_eq!(check(&[n(40.0), n(96.0)]), ["fail gpu-memory-hot monitor gpu:0000:19:00.0"]);
        assert_eq!(check(&[FieldValue::NotSupported]), ["not-applicable not-supported"]);
        assert_eq!(check(&[n(40.0), lost()]), ["inconclusive failed"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
