//! gpu-inforom: is the memory with each GPU's settings and history intact?
//!
//! What it does: has the driver verify the checksum of each GPU's infoROM.
//!
//! Why it matters: the infoROM holds the ECC mode, the list of bad memory rows and the board's identity. When it is
//! corrupt, bad rows are used again and the error counters are meaningless.
//!
//! What to do: `inforom-corrupt` is `isolate`: keep the node out of service. `nvidia-smi -q -i BUS` shows a warning
//! (`infoROM is corrupted at gpu`). A power cycle (not only a reboot) cures some of them; return the others to the
//! vendor, who alone can rewrite it. Azure reports such machines as `HpcInforomCorruption`, DCGM asks for triage (error
//! 9).
//!
//! Not applicable where GPUs have no infoROM (consumer boards, virtual GPUs).

use doctor_core::observation::{Event, Metric, Observation};

use crate::{
    gpu::{FieldValue, for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-inforom", "integrity of the GPUs' infoROM");

const RULES: &str = r#"
rules = [
  { id = "gpu-inforom-corrupt", check = "gpu-inforom", event = "inforom-corrupt", reason = "inforom-corrupt",
    severity = "isolate", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_inforom.rs")), rules: RULES, probes, interpret };

const VALID: &str = "inforom.valid";

/// NVML's error code for a corrupt infoROM, returned instead of a value.
const NVML_CORRUPTED_INFOROM: u32 = 14;

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[VALID])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    for_each_gpu(outputs.first(), "no GPU of this node has an infoROM", |gpu, builder| {
        let valid = match gpu.get(VALID) {
            Some(FieldValue::Failed { code: NVML_CORRUPTED_INFOROM, .. }) => Some(0.0),
            _ => read_number(gpu, VALID, builder),
        };
        let Some(valid) = valid else { return };
        builder.metric(Metric::count("inforom_valid", gpu.entity(), valid));
        if valid == 0.0 {
            let text = "infoROM is corrupt: settings and the list of remapped memory rows are unreliable";
            builder.event(Event::seen("inforom-corrupt", gpu.entity(), text));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::tests::{answer, lost, n, none},
        classify_fixture::classify_outputs,
    };

    fn check(valid: &[FieldValue]) -> Vec<String> {
        let gpus: Vec<_> = valid.iter().map(|valid| [(VALID, valid.clone())]).collect();
        let gpus: Vec<_> = gpus.iter().map(<[_; 1]>::as_slice).collect();
        classify_outputs(&CHECK, &[answer(&gpus)])
    }

    #[test]
    fn a_corrupt_inforom_is_reported_in_either_form() {
        assert_eq!(check(&[n(1.0), n(1.0)]), ["pass within-limits"]);
        assert_eq!(check(&[n(1.0), n(0.0)]), ["fail inforom-corrupt isolate gpu:0000:19:00.0"]);
        let corrupt = FieldValue::Failed { code: 14, text: "infoROM is corrupted".to_owned() };
        assert_eq!(check(&[n(1.0), corrupt]), ["fail inforom-corrupt isolate gpu:0000:19:00.0"]);
    }

    #[test]
    fn a_gpu_without_an_inforom_differs_from_an_unreadable_one() {
        assert_eq!(check(&[FieldValue::NotSupported]), ["not-applicable not-supported"]);
        assert_eq!(check(&[n(1.0), lost()]), ["inconclusive failed"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
