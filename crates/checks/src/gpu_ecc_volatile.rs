//! gpu-ecc-volatile: has a GPU met memory errors that it could not correct, since it was last reset?
//!
//! What it does: reads each GPU's count of uncorrected ECC errors since the driver was loaded or the GPU was reset.
//!
//! Why it matters: an uncorrected error means that some program read wrong data. The driver ends that program, and on
//! Ampere and newer takes the memory out of use (`gpu-row-remap`), but the repair is only complete after a reset.
//!
//! What to do: `ecc-uncorrected` is `reset`: drain the node and run `nvidia-smi --gpu-reset -i BUS`. The count begins
//! anew then, so an error of the past fails nobody for ever; if it comes back within days, the case goes on to
//! replacement. `nvidia-smi -q -d ECC,ROW_REMAPPER -i BUS` tells SRAM from DRAM. NVIDIA's DCGM calls this error
//! `isolate`, its catalogue of Xids (48, 94, 95) says reset; the reset comes first here.
//!
//! Errors of the whole life of the board are not judged here: see `gpu-ecc-sram` and `gpu-row-remap`. Not applicable
//! where no GPU has ECC, or where it is switched off (`gpu-ecc-mode` tells that).

use doctor_core::observation::{Event, Metric, Observation};

use crate::{
    gpu::{each, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-ecc-volatile", "memory errors of GPUs that were not corrected");

const RULES: &str = r#"
rules = [
  { id = "gpu-ecc-volatile", check = "gpu-ecc-volatile", event = "ecc-uncorrected", reason = "ecc-uncorrected",
    severity = "reset", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_ecc_volatile.rs")), rules: RULES, probes, interpret };

const TOTAL: &str = "ecc.errors.uncorrected.volatile.total";
const PARTS: [(&str, &str); 2] =
    [("ecc.errors.uncorrected.volatile.sram", "SRAM"), ("ecc.errors.uncorrected.volatile.dram", "DRAM")];

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[TOTAL, PARTS[0].0, PARTS[1].0])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    each(outputs.first(), "no GPU here counts ECC errors", |gpu, look| {
        let Some(total) = read_number(gpu, TOTAL, look) else { return };
        look.metric(Metric::count("ecc_uncorrected_volatile", gpu.entity(), total));
        if total > 0.0 {
            // Where they were is worth telling and not worth failing for: some drivers give the sum only.
            let parts = PARTS.iter().filter_map(|(field, name)| Some(format!("{name} {}", gpu.number(field)?)));
            let parts = parts.collect::<Vec<_>>().join(", ");
            let place = if parts.is_empty() { String::new() } else { format!(" ({parts})") };
            let text = format!("{total} uncorrected memory errors since the last reset{place}");
            look.event(Event::seen("ecc-uncorrected", gpu.entity(), text));
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

    fn gpu(total: Reading, sram: Reading, dram: Reading) -> Vec<(&'static str, Reading)> {
        vec![(TOTAL, total), (PARTS[0].0, sram), (PARTS[1].0, dram)]
    }

    fn look(gpus: &[Vec<(&str, Reading)>]) -> Vec<String> {
        let gpus: Vec<_> = gpus.iter().map(Vec::as_slice).collect();
        judged(&CHECK, &[answer(&gpus)])
    }

    #[test]
    fn an_error_is_found_on_its_gpu_and_on_no_other() {
        let well = || gpu(n(0.0), n(0.0), n(0.0));
        assert_eq!(look(&[well(), well()]), ["pass within-limits"]);
        assert_eq!(look(&[well(), gpu(n(3.0), n(1.0), n(2.0))]), ["fail ecc-uncorrected reset gpu:0000:19:00.0"]);
        // A driver that gives the sum only.
        let sum = gpu(n(3.0), Reading::NotSupported, Reading::NotSupported);
        assert_eq!(look(&[sum]), ["fail ecc-uncorrected reset gpu:0000:18:00.0"]);
    }

    #[test]
    fn a_gpu_without_ecc_is_not_one_that_would_not_tell() {
        let without = gpu(Reading::NotSupported, Reading::NotSupported, Reading::NotSupported);
        assert_eq!(look(&[without]), ["not-applicable not-supported"]);
        assert_eq!(look(&[gpu(n(0.0), n(0.0), n(0.0)), gpu(lost(), lost(), lost())]), ["inconclusive failed"]);
        assert_eq!(look(&[gpu(n(1.0), n(0.0), n(1.0)), gpu(lost(), lost(), lost())]).len(), 1);
        assert_eq!(judged(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
