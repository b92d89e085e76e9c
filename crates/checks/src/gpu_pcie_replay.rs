//! gpu-pcie-replay: must GPUs send much of their PCIe traffic twice?
//!
//! What it does: reads how often each GPU's PCIe link had to send a packet again, and makes a rate of it over the time
//! since the boot.
//!
//! Why it matters: a replay repairs a bit that was hurt on the way. A few are nothing. Many come from a bad contact, a
//! riser or a retimer; transfers become slow, and one day the GPU falls off the bus.
//!
//! What to do: `pcie-replays` is `isolate`: more than 480 an hour, DCGM's limit of 8 a minute (error 3, isolate). Hand
//! the machine over: the board or its riser wants to be reseated or replaced. `nvidia-smi -q -i BUS` shows the counter
//! under PCI, `pcie-aer` what the bus itself saw.
//!
//! The rate is over the whole time since the boot, so that a bad hour last month does not mark the node today; it also
//! means that on a machine that has been up for long a new fault shows late here, and first in `pcie-aer`. Not
//! applicable where no GPU counts replays.

use doctor_core::observation::{Metric, Observation, Unit};

use crate::{
    gpu::{each, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
    uptime::{self, hours_up},
};

const SPEC: Spec = Spec::quick("gpu-pcie-replay", "PCIe packets of GPUs that were sent again");

const RULES: &str = r#"
rules = [
  { id = "gpu-pcie-replay", check = "gpu-pcie-replay", metric = "pcie_replays_per_hour", above = 480.0,
    reason = "pcie-replays", severity = "isolate",
    text = "{entity}: {value} PCIe replays an hour since the boot, {limit} is the limit" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_pcie_replay.rs")), rules: RULES, probes, interpret };

const REPLAYS: &str = "pcie.replay";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[REPLAYS]), Probe::read(uptime::PATH)]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let hours = hours_up(outputs.get(1));
    each(outputs.first(), "no GPU here counts PCIe replays", |gpu, look| {
        let Some(replays) = read_number(gpu, REPLAYS, look) else { return };
        match &hours {
            Ok(hours) => {
                look.metric(Metric::new("pcie_replays_per_hour", gpu.entity(), replays / hours, Unit::PerHour));
            }
            Err(failure) => look.could_not(failure.clone()),
        }
    })
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

    fn look(replays: &[Reading], up: &str) -> Vec<String> {
        let gpus: Vec<_> = replays.iter().map(|replays| [(REPLAYS, replays.clone())]).collect();
        let gpus: Vec<_> = gpus.iter().map(<[_; 1]>::as_slice).collect();
        judged(&CHECK, &[answer(&gpus), ProbeOutput::Text(up.to_owned())])
    }

    #[test]
    fn many_an_hour_are_found() {
        assert_eq!(look(&[n(0.0), n(4800.0)], "36000 1"), ["pass within-limits"]);
        assert_eq!(look(&[n(0.0), n(4801.0)], "36000 1"), ["fail pcie-replays isolate gpu:0000:19:00.0"]);
    }

    #[test]
    fn a_counter_of_last_month_does_not_fail_today() {
        assert_eq!(look(&[n(100_000.0)], "2592000 1"), ["pass within-limits"]);
    }

    #[test]
    fn what_could_not_be_read_is_never_a_pass() {
        assert_eq!(look(&[n(0.0), lost()], "36000 1"), ["inconclusive failed"]);
        assert_eq!(look(&[n(0.0)], ""), ["inconclusive unparseable"]);
        assert_eq!(look(&[Reading::NotSupported], "36000 1"), ["not-applicable not-supported"]);
        assert_eq!(judged(&CHECK, &[none(), ProbeOutput::Text("1 1".to_owned())]), ["not-applicable no-gpu"]);
    }
}
