//! gpu-pcie-replay: do GPUs retransmit many PCIe packets?
//!
//! What it does: reads how often each GPU's PCIe link retransmitted a packet, as a rate over the time since the boot.
//!
//! Why it matters: a replay repairs a corrupted packet. A few are harmless. Many come from a bad contact, a riser or a
//! retimer; transfers become slow, and eventually the GPU falls off the bus.
//!
//! What to do: `pcie-replays` is `isolate`: more than 480 per hour, DCGM's limit of 8 per minute (error 3, isolate).
//! Open a repair case: the board or its riser must be reseated or replaced. `nvidia-smi -q -i BUS` shows the counter
//! under PCI, `pcie-aer` the errors that the bus itself reported.
//!
//! The rate covers the whole time since the boot, so that a bad hour last month does not fail the node today; on a
//! machine with a long uptime a new fault therefore shows late here, and first in `pcie-aer`. Not applicable where no
//! GPU counts replays.

use doctor_core::observation::{Metric, Observation, Unit};

use crate::{
    gpu::{for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
    uptime::{self, uptime_hours},
};

const SPEC: Spec = Spec::quick("gpu-pcie-replay", "PCIe replays of GPUs");

const RULES: &str = r#"
rules = [
  { id = "gpu-pcie-replay", check = "gpu-pcie-replay", metric = "pcie_replays_per_hour", above = 480.0,
    reason = "pcie-replays", severity = "isolate",
    text = "{entity}: {value} PCIe replays per hour since boot, limit {limit}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_pcie_replay.rs")), rules: RULES, probes, interpret };

const REPLAYS: &str = "pcie.replay";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[REPLAYS]), Probe::read(uptime::PATH)]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let hours = uptime_hours(outputs.get(1));
    for_each_gpu(outputs.first(), "no GPU of this node counts PCIe replays", |gpu, builder| {
        let Some(replays) = read_number(gpu, REPLAYS, builder) else { return };
        match &hours {
            Ok(hours) => {
                builder.metric(Metric::new("pcie_replays_per_hour", gpu.entity(), replays / hours, Unit::PerHour));
            }
            Err(failure) => builder.unreadable(failure.clone()),
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

    fn check(replays: &[FieldValue], up: &str) -> Vec<String> {
        let gpus: Vec<_> = replays.iter().map(|replays| [(REPLAYS, replays.clone())]).collect();
        let gpus: Vec<_> = gpus.iter().map(<[_; 1]>::as_slice).collect();
        classify_outputs(&CHECK, &[answer(&gpus), ProbeOutput::Text(up.to_owned())])
    }

    #[test]
    fn many_replays_per_hour_are_reported() {
        assert_eq!(check(&[n(0.0), n(4800.0)], "36000 1"), ["pass within-limits"]);
        assert_eq!(check(&[n(0.0), n(4801.0)], "36000 1"), ["fail pcie-replays isolate gpu:0000:19:00.0"]);
    }

    #[test]
    fn the_rate_is_averaged_over_the_uptime() {
        assert_eq!(check(&[n(100_000.0)], "2592000 1"), ["pass within-limits"]);
    }

    #[test]
    fn an_unreadable_counter_does_not_pass() {
        assert_eq!(check(&[n(0.0), lost()], "36000 1"), ["inconclusive failed"]);
        assert_eq!(check(&[n(0.0)], ""), ["inconclusive unparseable"]);
        assert_eq!(check(&[FieldValue::NotSupported], "36000 1"), ["not-applicable not-supported"]);
        assert_eq!(classify_outputs(&CHECK, &[none(), ProbeOutput::Text("1 1".to_owned())]), ["not-applicable no-gpu"]);
    }
}
