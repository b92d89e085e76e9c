//! gpu-power-brake: does the machine throttle its GPUs because its power supply is insufficient?
//!
//! What it does: reads each GPU's clock event reasons and looks for the power brake (bit 0x80): a signal by which the
//! chassis makes the GPUs reduce their power immediately.
//!
//! Why it matters: the brake cuts clocks to a fraction. It is asserted when a power supply failed or was unplugged,
//! when the rack's power is capped, or when a board is broken; usually for all GPUs of a node together.
//!
//! What to do: `power-brake` is `monitor`, confirmed by a second failure: results stay correct. Check the power
//! supplies in the machine's management controller (`ipmitool sdr type "Power Supply"`, `ipmitool sel list`) and the
//! rack's feeds. If a single GPU brakes, its board is at fault: open a repair case. The software power cap (bit 0x4) is
//! normal under full load and does not count.
//!
//! Not applicable where no GPU reports clock event reasons.

use doctor_core::observation::{Event, Metric, Observation};

use crate::{
    gpu::{for_each_gpu, read_number},
    gpu_throttle::{HW_POWER_BRAKE, REASONS},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-power-brake", "GPUs slowed by the power brake");

const RULES: &str = r#"
rules = [
  { id = "gpu-power-brake", check = "gpu-power-brake", event = "power-brake", reason = "power-brake",
    severity = "monitor", confirm = 2, text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_power_brake.rs")), rules: RULES, probes, interpret };

const DRAW: &str = "power.draw";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[REASONS, DRAW])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    for_each_gpu(outputs.first(), "no GPU of this node reports clock event reasons", |gpu, builder| {
        let Some(active) = read_number(gpu, REASONS, builder) else { return };
        let brakes = active as u64 & HW_POWER_BRAKE != 0;
        builder.metric(Metric::count("power_brake", gpu.entity(), f64::from(u8::from(brakes))));
        if brakes {
            let draw = gpu.number(DRAW).map_or_else(String::new, |watts| format!(" at {watts} W"));
            let text = format!("clocks reduced by the external power brake{draw}");
            builder.event(Event::seen("power-brake", gpu.entity(), text));
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

    fn check(reasons: &[FieldValue]) -> Vec<String> {
        let gpus: Vec<_> = reasons.iter().map(|r| [(REASONS, r.clone()), (DRAW, n(97.4))]).collect();
        let gpus: Vec<_> = gpus.iter().map(<[_; 2]>::as_slice).collect();
        classify_outputs(&CHECK, &[answer(&gpus)])
    }

    #[test]
    fn the_power_brake_is_reported_and_the_power_cap_is_not() {
        assert_eq!(check(&[n(f64::from(0x4)), n(f64::from(0x48))]), ["pass within-limits"]);
        assert_eq!(check(&[n(0.0), n(f64::from(0x88))]), ["fail power-brake monitor gpu:0000:19:00.0"]);
    }

    #[test]
    fn unreadable_clock_reasons_do_not_pass() {
        assert_eq!(check(&[n(0.0), lost()]), ["inconclusive failed"]);
        assert_eq!(check(&[FieldValue::NotSupported]), ["not-applicable not-supported"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
