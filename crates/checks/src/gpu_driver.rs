//! gpu-driver: does NVIDIA's driver answer?
//!
//! What it does: queries the driver through its library (NVML), and checks whether the kernel module is loaded
//! (`/proc/driver/nvidia/gpus`). Other checks evaluate what each GPU reports.
//!
//! Why it matters: when the driver does not answer, no job can use a GPU and no other check sees anything: a node whose
//! driver hangs looks quiet, not faulty. A hung driver also blocks every process that calls it.
//!
//! What to do: log in and run `timeout 20 nvidia-smi`; `journalctl -k -g NVRM` shows why.
//! - `driver-hung` is `reboot`, confirmed by a second failure: the driver did not answer in time. Its callers are stuck
//!   in the kernel and cannot be killed (`ps -eo pid,stat,wchan:30,comm | grep ' D'`); only a reboot frees them.
//! - `driver-mismatch` is `reboot`: the library was upgraded while the kernel still has the old module loaded. On a
//!   drained node, `rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe nvidia` works as well.
//! - `driver-not-loaded` is `reboot`: GPUs are on the bus and the module is not loaded. If this persists after a
//!   reboot, the module was not built for this kernel (`dkms status`, `modprobe -v nvidia`), or `nouveau` has claimed
//!   the GPUs (`lsmod`).
//!
//! Inconclusive, and never a pass, where the library is not installed, where this program lacks permission, or where
//! the driver returns another error. Not applicable without an NVIDIA GPU on the bus.

use doctor_core::observation::{Entity, Event, FailureKind, Metric, Observation, ProbeFailure};

use crate::{
    gpu::{DRIVER_NOT_LOADED, VERSION_MISMATCH, no_gpu},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-driver", "whether the NVIDIA driver is loaded and responds");

const RULES: &str = r#"
rules = [
  { id = "gpu-driver-hung", check = "gpu-driver", event = "driver-hung", reason = "driver-hung",
    severity = "reboot", confirm = 2, text = "GPU driver does not respond: {value}" },
  { id = "gpu-driver-mismatch", check = "gpu-driver", event = "driver-mismatch", reason = "driver-mismatch",
    severity = "reboot", text = "{value}" },
  { id = "gpu-driver-not-loaded", check = "gpu-driver", event = "driver-not-loaded", reason = "driver-not-loaded",
    severity = "reboot", text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_driver.rs")), rules: RULES, probes, interpret };

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&["uuid"]), Probe::List { path: "/proc/driver/nvidia/gpus".to_owned() }]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let loaded = matches!(outputs.get(1), Some(ProbeOutput::Names(_)));
    let is_absent = matches!(outputs.get(1), Some(ProbeOutput::Failed(f)) if f.kind == FailureKind::Missing);
    let answer = match outputs.first() {
        Some(ProbeOutput::Gpus(answer)) => answer,
        // The bus could not be read either, but a driver that is loaded and does not answer hangs.
        Some(ProbeOutput::Failed(failure)) if loaded && is_hang(failure.kind) => return hang_event(failure),
        Some(ProbeOutput::Failed(failure)) => return Observation::Failed(failure.clone()),
        _ => return Observation::Failed(ProbeFailure::new(FailureKind::Unparseable, "the probe returned no GPU data")),
    };
    let on_pci = answer.on_pci.len();
    match &answer.driver {
        _ if on_pci == 0 && answer.gpus.is_empty() => no_gpu(),
        Ok(driver) if driver.version.trim().is_empty() => {
            Observation::Failed(ProbeFailure::new(FailureKind::Empty, "the driver reports no version"))
        }
        Ok(_) => Observation::measured(vec![driver_metric(1.0)], Vec::new()),
        Err(failure) if is_hang(failure.kind) => hang_event(failure),
        Err(failure) if text_contains(failure, VERSION_MISMATCH) => {
            let text = format!("versions of the driver's library and kernel module differ: {}", failure.text);
            finding("driver-mismatch", text)
        }
        Err(failure) if is_absent || text_contains(failure, DRIVER_NOT_LOADED) || text_contains(failure, "couldn't communicate") => {
            let text = format!("{DRIVER_NOT_LOADED}; NVIDIA GPUs on the PCI bus: {on_pci}");
            finding("driver-not-loaded", text)
        }
        Err(failure) => Observation::Failed(failure.clone()),
    }
}

const fn is_hang(kind: FailureKind) -> bool {
    matches!(kind, FailureKind::TimedOut | FailureKind::Abandoned)
}

/// Matches the error texts of doctor-gpu, NVML and nvidia-smi, ignoring case. `pattern` is in lower case.
fn text_contains(failure: &ProbeFailure, pattern: &str) -> bool {
    failure.text.to_ascii_lowercase().contains(pattern)
}

fn hang_event(failure: &ProbeFailure) -> Observation {
    finding("driver-hung", failure.text.clone())
}

fn finding(code: &'static str, text: String) -> Observation {
    Observation::measured(vec![driver_metric(0.0)], vec![Event::seen(code, Entity::node(), text)])
}

fn driver_metric(value: f64) -> Metric {
    Metric::count("driver_answers", Entity::node(), value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::tests::{answer, deaf, none, t},
        classify_fixture::classify_outputs,
    };
    use proptest::prelude::*;

    fn loaded() -> ProbeOutput {
        ProbeOutput::Names(vec!["0000:18:00.0".to_owned()])
    }

    fn absent() -> ProbeOutput {
        ProbeOutput::Failed(ProbeFailure::new(FailureKind::Missing, "no /proc/driver/nvidia"))
    }

    #[test]
    fn a_driver_that_answers_passes() {
        assert_eq!(classify_outputs(&CHECK, &[answer(&[&[("uuid", t("GPU-0"))]]), loaded()]), ["pass within-limits"]);
        assert_eq!(classify_outputs(&CHECK, &[none(), absent()]), ["not-applicable no-gpu"]);
    }

    #[test]
    fn each_driver_failure_has_its_reason_code() {
        use FailureKind as K;
        // The texts are NVML's (nvmlErrorString) and nvidia-smi's.
        for (kind, text, module, line) in [
            (K::TimedOut, "no answer within 10s", loaded(), "fail driver-hung reboot node"),
            (K::Abandoned, "stuck", loaded(), "fail driver-hung reboot node"),
            (K::Failed, "Driver/library version mismatch", loaded(), "fail driver-mismatch reboot node"),
            (K::Failed, "Driver Not Loaded", absent(), "fail driver-not-loaded reboot node"),
            (
                K::Failed,
                "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
                absent(),
                "fail driver-not-loaded reboot node",
            ),
            (K::Missing, "libnvidia-ml.so.1: not found", absent(), "fail driver-not-loaded reboot node"),
            (K::Missing, "libnvidia-ml.so.1: not found", loaded(), "inconclusive missing"),
            (K::Denied, "Insufficient Permissions", loaded(), "inconclusive denied"),
            (K::Failed, "Unknown Error", loaded(), "inconclusive failed"),
        ] {
            assert_eq!(classify_outputs(&CHECK, &[deaf(kind, text), module]), [line], "{text}");
        }
    }

    #[test]
    fn the_texts_of_doctor_gpu_are_recognised_while_the_kernel_module_is_loaded() {
        for (kind, cause, line) in [
            (FailureKind::Missing, DRIVER_NOT_LOADED, "fail driver-not-loaded reboot node"),
            (FailureKind::Failed, VERSION_MISMATCH, "fail driver-mismatch reboot node"),
        ] {
            let text = format!("libnvidia-ml.so.1 cannot be initialised: {cause} (NVML 9)");
            assert_eq!(classify_outputs(&CHECK, &[deaf(kind, &text), loaded()]), [line], "{text}");
        }
    }

    #[test]
    fn a_hang_is_attributed_to_the_driver_only_if_it_is_loaded() {
        let hung = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Abandoned, "stuck"));
        assert_eq!(classify_outputs(&CHECK, &[hung.clone(), loaded()]), ["fail driver-hung reboot node"]);
        assert_eq!(classify_outputs(&CHECK, &[hung, absent()]), ["inconclusive abandoned"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_error_text_of_the_driver_passes(text in ".{0,80}") {
            prop_assert_ne!(classify_outputs(&CHECK, &[deaf(FailureKind::Failed, &text), loaded()]), ["pass within-limits"]);
        }
    }
}
