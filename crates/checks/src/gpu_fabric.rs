//! gpu-fabric: is each GPU registered with the NVLink fabric?
//!
//! What it does: on GPUs that register with a fabric (Hopper and newer behind NVSwitch), reads whether registration
//! completed and succeeded, and the driver's report of the fabric's health: bandwidth, routes, configuration.
//!
//! Why it matters: on such machines an unregistered GPU cannot run CUDA at all (error 802, "system not yet
//! initialized"); one with unhealthy routes is slow or fails in the next collective.
//!
//! What to do: see `nvidia-smi -q -i BUS`, section Fabric, and the fabric manager's log (`/var/log/fabricmanager.log`;
//! on GB200 that of the switch trays).
//! - `fabric-not-ready` is `reset`, confirmed by a second failure: registration did not start or does not complete.
//!   Check `fabric-manager` first: without it nothing registers.
//! - `fabric-failed` is `reset`: registration ended with an error.
//! - `fabric-degraded` is `monitor`: reduced bandwidth, or a route or a timed-out access is being recovered.
//! - `fabric-unhealthy` is `reset`: a route is broken, or the configuration is wrong (the text shows how: no partition,
//!   too few NVLinks, another chassis).
//!
//! Not applicable where GPUs register with no fabric (PCIe boards, A100, virtual machines that hide it from the guest).

use doctor_core::observation::{Event, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure};

use crate::{
    gpu::{Gpu, for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-fabric", "registration of GPUs with the NVLink fabric");

const RULES: &str = r#"
rules = [
  { id = "gpu-fabric-not-ready", check = "gpu-fabric", event = "fabric-not-ready", reason = "fabric-not-ready",
    severity = "reset", confirm = 2, text = "{entity}: {value}" },
  { id = "gpu-fabric-failed", check = "gpu-fabric", event = "fabric-failed", reason = "fabric-failed",
    severity = "reset", text = "{entity}: {value}" },
  { id = "gpu-fabric-unhealthy", check = "gpu-fabric", event = "fabric-unhealthy", reason = "fabric-unhealthy",
    severity = "reset", text = "{entity}: {value}" },
  { id = "gpu-fabric-degraded", check = "gpu-fabric", event = "fabric-degraded", reason = "fabric-degraded",
    severity = "monitor", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_fabric.rs")), rules: RULES, probes, interpret };

const STATE: &str = "fabric.state";
const STATUS: &str = "fabric.status";
const HEALTH: &str = "fabric.health_mask";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[STATE, STATUS, HEALTH])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    for_each_gpu(outputs.first(), "no GPU of this node registers with an NVLink fabric", |gpu, builder| {
        let Some(state) = read_number(gpu, STATE, builder) else { return };
        // 0: this GPU has no fabric.
        if state == 0.0 {
            return;
        }
        builder.metric(Metric::count("fabric_state", gpu.entity(), state));
        match state as u32 {
            1 => not_ready(gpu, "registration with the NVLink fabric has not started", builder),
            2 => not_ready(gpu, "registration with the NVLink fabric does not complete", builder),
            3 => check_registration(gpu, builder),
            _ => {
                let text = format!("{}: unknown {STATE} {state}", gpu.entity());
                builder.unreadable(ProbeFailure::new(FailureKind::Unparseable, text));
            }
        }
    })
}

fn not_ready(gpu: &Gpu, text: &str, builder: &mut ObservationBuilder) {
    builder.event(Event::seen("fabric-not-ready", gpu.entity(), text));
}

fn check_registration(gpu: &Gpu, builder: &mut ObservationBuilder) {
    match read_number(gpu, STATUS, builder) {
        Some(0.0) | None => {}
        Some(code) => {
            let text = format!("registration with the NVLink fabric failed (NVML {code})");
            builder.event(Event::seen("fabric-failed", gpu.entity(), text));
            return;
        }
    }
    if let Some(mask) = read_number(gpu, HEALTH, builder) {
        health_events(gpu, mask as u32).into_iter().for_each(|event| builder.event(event));
    }
}

/// Decodes NVML's `healthMask`: fields of two bits (0 unknown, 1 yes, 2 no), and four bits for the configuration (0
/// unknown, 1 right, others are errors).
fn health_events(gpu: &Gpu, mask: u32) -> Vec<Event> {
    let is = |shift: u32| mask >> shift & 0x3 == 1;
    let seen = |code, text: &str| Event::seen(code, gpu.entity(), text);
    let mut events = Vec::new();
    if is(0) {
        events.push(seen("fabric-degraded", "NVLink fabric bandwidth is degraded"));
    }
    if is(2) {
        events.push(seen("fabric-degraded", "NVLink fabric route recovery is in progress"));
    }
    if is(4) {
        events.push(seen("fabric-unhealthy", "NVLink fabric route is unhealthy"));
    }
    if is(6) {
        events.push(seen("fabric-degraded", "NVLink fabric is recovering from an access timeout"));
    }
    let wrong = match mask >> 8 & 0xf {
        0 | 1 => return events,
        2 => "wrong system identifier",
        3 => "wrong chassis serial number",
        4 => "no partition",
        5 => "too few NVLinks",
        6 => "incompatible firmware",
        7 => "invalid location",
        _ => "unknown reason",
    };
    events.push(seen("fabric-unhealthy", &format!("NVLink fabric configuration is incorrect: {wrong}")));
    events
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
    use proptest::prelude::*;

    /// All "no", configuration right: the mask of a healthy GB200.
    const HEALTHY: u32 = 2 | 2 << 2 | 2 << 4 | 2 << 6 | 1 << 8;

    fn check(gpus: &[[FieldValue; 3]]) -> Vec<String> {
        let names = [STATE, STATUS, HEALTH];
        let gpus: Vec<Vec<_>> = gpus.iter().map(|gpu| names.into_iter().zip(gpu.clone()).collect()).collect();
        let gpus: Vec<_> = gpus.iter().map(Vec::as_slice).collect();
        classify_outputs(&CHECK, &[answer(&gpus)])
    }

    fn with(mask: u32) -> [FieldValue; 3] {
        [n(3.0), n(0.0), n(f64::from(mask))]
    }

    #[test]
    fn each_fabric_problem_is_reported_for_its_gpu() {
        assert_eq!(check(&[with(HEALTHY), with(0)]), ["pass within-limits"]);
        // Hopper reports no health mask.
        assert_eq!(check(&[[n(3.0), n(0.0), FieldValue::NotSupported]]), ["pass within-limits"]);
        for (gpu, line) in [
            ([n(1.0), n(0.0), n(0.0)], "fail fabric-not-ready reset gpu:0000:19:00.0"),
            ([n(2.0), n(0.0), n(0.0)], "fail fabric-not-ready reset gpu:0000:19:00.0"),
            ([n(3.0), n(999.0), n(0.0)], "fail fabric-failed reset gpu:0000:19:00.0"),
            (with(HEALTHY & !0x3 | 1), "fail fabric-degraded monitor gpu:0000:19:00.0"),
            (with(HEALTHY & !(0x3 << 4) | 1 << 4), "fail fabric-unhealthy reset gpu:0000:19:00.0"),
            (with(HEALTHY & !(0xf << 8) | 5 << 8), "fail fabric-unhealthy reset gpu:0000:19:00.0"),
        ] {
            assert_eq!(check(&[with(HEALTHY), gpu]), [line]);
        }
    }

    #[test]
    fn a_gpu_without_a_fabric_differs_from_one_with_unreadable_fields() {
        assert_eq!(check(&[[n(0.0), n(0.0), n(0.0)]]), ["not-applicable not-supported"]);
        // An H200 in a virtual machine, driver 580.159.04, 2026-11-15: N/A for all.
        let none_at_all = [FieldValue::NotSupported, FieldValue::NotSupported, FieldValue::NotSupported];
        assert_eq!(check(&[none_at_all]), ["not-applicable not-supported"]);
        assert_eq!(check(&[with(HEALTHY), [lost(), lost(), lost()]]), ["inconclusive failed"]);
        assert_eq!(check(&[[n(3.0), lost(), n(0.0)]]), ["inconclusive failed"]);
        assert_eq!(check(&[[n(9.0), n(0.0), n(0.0)]]), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }

    proptest! {
        #[test]
        fn no_mask_makes_it_panic(mask: u32) {
            check(&[with(mask)]);
        }
    }
}
