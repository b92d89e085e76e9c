//! gpu-throttle: does the hardware throttle a GPU's clocks?
//!
//! What it does: reads the driver's current clock event reasons of each GPU. Two of them count here: HW slowdown (bit
//! 0x8) and HW thermal slowdown (0x40). The power brake (0x80) has its own check, `gpu-power-brake`. The others are
//! normal: idle, application clocks, the power cap under full load, sync boost, and the driver's gradual software
//! thermal slowdown.
//!
//! Why it matters: a hardware slowdown halves the clocks or worse. One such GPU slows every job that spans it to its
//! own pace, and nothing fails.
//!
//! What to do: both findings are `monitor`, confirmed by a second failure: the node computes correctly, and NVIDIA's
//! DCGM rates it the same.
//! - `thermal-slowdown`: the GPU or its memory is too hot. Check fans, filters, the inlet temperature and the
//!   neighbours; `nvidia-smi -q -d TEMPERATURE,PERFORMANCE -i BUS`. One hot GPU among cool ones has bad thermal paste
//!   or a loose heat sink: open a repair case.
//! - `hw-slowdown`: explained neither by heat nor by the power brake: power delivery of the board.
//!
//! A site that wants such nodes out of service raises these rules to `isolate`. Not applicable where no GPU reports
//! clock event reasons.

use doctor_core::observation::{Event, Metric, Observation};

use crate::{
    gpu::{for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-throttle", "GPU clocks reduced by the hardware");

const RULES: &str = r#"
rules = [
  { id = "gpu-throttle-thermal", check = "gpu-throttle", event = "thermal-slowdown", reason = "thermal-slowdown",
    severity = "monitor", confirm = 2, text = "{entity}: {value}" },
  { id = "gpu-throttle-hw", check = "gpu-throttle", event = "hw-slowdown", reason = "hw-slowdown",
    severity = "monitor", confirm = 2, text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_throttle.rs")), rules: RULES, probes, interpret };

pub(crate) const REASONS: &str = "clocks_event_reasons.active";
const CLOCK: &str = "clocks.sm";
const MAX: &str = "clocks.max.sm";

const HW_SLOWDOWN: u64 = 0x8;
const HW_THERMAL: u64 = 0x40;
pub(crate) const HW_POWER_BRAKE: u64 = 0x80;

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[REASONS, CLOCK, MAX])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    for_each_gpu(outputs.first(), "no GPU of this node reports clock event reasons", |gpu, builder| {
        let Some(active) = read_number(gpu, REASONS, builder) else { return };
        // A mask of reasons is far below 2^53.
        let reasons = active as u64;
        builder.metric(Metric::count("clock_reasons", gpu.entity(), active));
        let at = match (gpu.number(CLOCK), gpu.number(MAX)) {
            (Some(clock), Some(max)) => format!("clock {clock} of {max} MHz"),
            _ => "clock unknown".to_owned(),
        };
        if reasons & HW_THERMAL != 0 {
            let text = format!("hardware thermal slowdown; {at}");
            builder.event(Event::seen("thermal-slowdown", gpu.entity(), text));
        } else if reasons & HW_SLOWDOWN != 0 && reasons & HW_POWER_BRAKE == 0 {
            let text = format!("hardware slowdown, neither thermal nor by the power brake; {at}");
            builder.event(Event::seen("hw-slowdown", gpu.entity(), text));
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
        let gpus: Vec<_> =
            reasons.iter().map(|r| [(REASONS, r.clone()), (CLOCK, n(345.0)), (MAX, n(1980.0))]).collect();
        let gpus: Vec<_> = gpus.iter().map(<[_; 3]>::as_slice).collect();
        classify_outputs(&CHECK, &[answer(&gpus)])
    }

    #[test]
    fn only_hardware_throttling_counts() {
        for normal in [0x0, 0x1, 0x2, 0x4, 0x10, 0x20, 0x100, 0x137] {
            assert_eq!(check(&[n(f64::from(normal))]), ["pass within-limits"], "{normal:#x}");
        }
        assert_eq!(check(&[n(1.0), n(f64::from(0x48))]), ["fail thermal-slowdown monitor gpu:0000:19:00.0"]);
        assert_eq!(check(&[n(f64::from(0x8))]), ["fail hw-slowdown monitor gpu:0000:18:00.0"]);
        // The power brake has its own check.
        assert_eq!(check(&[n(f64::from(0x88))]), ["pass within-limits"]);
    }

    // AzNHC #3: its throttling check had no way to fail.
    #[test]
    fn throttling_has_a_way_to_fail() {
        assert!(check(&[n(f64::from(0x40))])[0].starts_with("fail "));
    }

    #[test]
    fn unreadable_clock_reasons_do_not_pass() {
        assert_eq!(check(&[n(0.0), lost()]), ["inconclusive failed"]);
        assert_eq!(check(&[FieldValue::NotSupported]), ["not-applicable not-supported"]);
        assert_eq!(check(&[FieldValue::Text("Active".into())]), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
