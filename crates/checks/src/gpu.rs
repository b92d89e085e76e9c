//! Access to the GPU fields that NVIDIA's driver reports, by name.
//!
//! A check requests fields by name ([`crate::probe::Probe::Gpu`]). The runner maps each name to an NVML call, or reads
//! it from `nvidia-smi` if the library cannot be used. A field that a GPU does not support differs from one that could
//! not be read, and neither is a number.
//!
//! Names follow `nvidia-smi --help-query-gpu` where it has one. `*` in a name stands for every link: `nvlink.*.state`
//! returns `nvlink.0.state`, `nvlink.1.state`, and so on. `process.*` are the processes with a compute context;
//! `activity.*` are all that use the GPU, with `pid`, `memory` and `utilization` in percent.

use doctor_core::{
    observation::{CodedReason, FailureKind, Observation, ObservationBuilder, ProbeFailure},
    reason::ReasonCode,
};

pub use crate::gpu_query::{
    DRIVER_NOT_LOADED, Driver, FieldValue, Gpu, GpuQueryResult, NVML_GPU_IS_LOST, NVML_RESET_REQUIRED, VERSION_MISMATCH,
};
use crate::probe::ProbeOutput;

/// Returns the GPUs of a probe's output. A GPU check starts with this.
///
/// # Errors
/// Returns the observation that the check should return: not applicable on a machine without an NVIDIA GPU; could not
/// run if the driver does not answer, or lists no GPU although the bus has some.
pub fn require_gpus(output: Option<&ProbeOutput>) -> Result<&[Gpu], Observation> {
    let could_not = |kind, text: String| Observation::Failed(ProbeFailure::new(kind, text));
    let answer = match output {
        Some(ProbeOutput::Gpus(answer)) => answer,
        Some(ProbeOutput::Failed(failure)) => return Err(Observation::Failed(failure.clone())),
        _ => return Err(could_not(FailureKind::Unparseable, "the probe returned no GPU data".to_owned())),
    };
    if answer.on_pci.is_empty() && answer.gpus.is_empty() {
        return Err(no_gpu());
    }
    if let Err(failure) = &answer.driver {
        return Err(Observation::Failed(failure.clone()));
    }
    if answer.gpus.is_empty() {
        let text = format!("{} NVIDIA GPUs on the PCI bus, none in the driver", answer.on_pci.len());
        return Err(could_not(FailureKind::Empty, text));
    }
    Ok(&answer.gpus)
}

/// Returns "not applicable" for a test that found no GPU or driver on a machine whose PCI bus has no NVIDIA GPU either.
/// Results of a test that ran are kept: in some virtual machines the GPU is not on the bus.
pub fn not_applicable_without_gpu(output: Option<&ProbeOutput>, observation: Observation) -> Observation {
    match (&observation, require_gpus(output)) {
        (Observation::Failed(failure), Err(instead @ Observation::NotApplicable(_)))
            if failure.kind == FailureKind::Missing =>
        {
            instead
        }
        _ => observation,
    }
}

/// Returns why one of these fields could not be read, or `None` if each was read or is not supported.
pub fn read_failure(gpu: &Gpu, fields: &[&str]) -> Option<ProbeFailure> {
    let because = |kind, text: String| ProbeFailure::new(kind, format!("{}: {text}", gpu.entity()));
    fields.iter().find_map(|field| match gpu.get(field) {
        None => Some(because(FailureKind::Empty, format!("the probe did not query {field}"))),
        Some(FieldValue::Failed { text, .. }) => Some(because(FailureKind::Failed, format!("{field}: {text}"))),
        Some(FieldValue::Number(_) | FieldValue::Text(_) | FieldValue::NotSupported) => None,
    })
}

/// Calls `see` for each GPU, to add its metrics and events; for a GPU without the feature, `see` adds nothing. If no
/// GPU has the feature, the result is not applicable with the text `nothing`.
pub fn for_each_gpu(
    output: Option<&ProbeOutput>,
    nothing: &str,
    mut see: impl FnMut(&Gpu, &mut ObservationBuilder),
) -> Observation {
    let gpus = match require_gpus(output) {
        Ok(gpus) => gpus,
        Err(instead) => return instead,
    };
    let mut builder = ObservationBuilder::default();
    for gpu in gpus {
        see(gpu, &mut builder);
    }
    builder.build_or(not_applicable("not-supported", nothing))
}

/// Returns a numeric field if the GPU supports it. Records a failure to read it in `builder`.
pub fn read_number(gpu: &Gpu, field: &str, builder: &mut ObservationBuilder) -> Option<f64> {
    match gpu.get(field) {
        Some(FieldValue::Number(value)) => Some(*value),
        Some(FieldValue::Text(text)) => {
            let text = format!("{}: {field} is not a number: {text}", gpu.entity());
            builder.unreadable(ProbeFailure::new(FailureKind::Unparseable, text));
            None
        }
        Some(FieldValue::NotSupported) => None,
        Some(FieldValue::Failed { .. }) | None => {
            read_failure(gpu, &[field]).into_iter().for_each(|failure| builder.unreadable(failure));
            None
        }
    }
}

/// Like [`read_number`], for text. Empty text counts as unreadable.
pub fn read_text<'a>(gpu: &'a Gpu, field: &str, builder: &mut ObservationBuilder) -> Option<&'a str> {
    match gpu.get(field) {
        Some(FieldValue::Text(text)) if !text.trim().is_empty() => Some(text.trim()),
        Some(FieldValue::Text(_) | FieldValue::Number(_)) => {
            builder.unreadable(ProbeFailure::new(
                FailureKind::Unparseable,
                format!("{}: {field} is not text", gpu.entity()),
            ));
            None
        }
        Some(FieldValue::NotSupported) => None,
        Some(FieldValue::Failed { .. }) | None => {
            read_failure(gpu, &[field]).into_iter().for_each(|failure| builder.unreadable(failure));
            None
        }
    }
}

/// Like [`read_number`], for all members of a numbered family. If the family itself cannot be read, the runner records
/// the failure under the requested name, `nvlink.*.state`.
pub fn read_indexed(gpu: &Gpu, family: &str, what: &str, builder: &mut ObservationBuilder) -> Vec<(u32, f64)> {
    let pattern = format!("{family}.*.{what}");
    if matches!(gpu.get(&pattern), Some(FieldValue::Failed { .. })) {
        read_failure(gpu, &[&pattern]).into_iter().for_each(|failure| builder.unreadable(failure));
    }
    let mut read = |(number, reading): (u32, &FieldValue)| match reading {
        FieldValue::Number(value) => Some((number, *value)),
        _ => Some((number, read_number(gpu, &format!("{family}.{number}.{what}"), builder)?)),
    };
    gpu.indexed(family, what).filter_map(&mut read).collect()
}

/// The observation of a GPU check on a machine without GPUs.
pub fn no_gpu() -> Observation {
    not_applicable("no-gpu", "no NVIDIA GPU on the PCI bus")
}

/// Returns a "not applicable" observation with a fixed reason.
pub fn not_applicable(code: &'static str, text: impl Into<String>) -> Observation {
    Observation::NotApplicable(CodedReason { code: ReasonCode::fixed(code), text: text.into() })
}

/// Normalises a PCI bus id to the kernel's lower-case form. Accepts `00000000:18:00.0`, `0000:18:00.0`, `0000:18:00`
/// and `PCI:0000:18:00`. Returns `None` if the text is not a bus id.
pub fn normalize_bus_id(text: &str) -> Option<String> {
    let text = text.trim().strip_prefix("PCI:").unwrap_or(text.trim());
    let mut parts = text.split(':');
    let (domain, bus, rest) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() {
        return None;
    }
    let (device, function) = rest.split_once('.').unwrap_or((rest, "0"));
    let hex = |text: &str, most: usize| {
        (!text.is_empty() && text.len() <= most).then(|| u32::from_str_radix(text, 16).ok()).flatten()
    };
    let (domain, bus) = (hex(domain, 8)?, hex(bus, 2)?);
    let (device, function) = (hex(device, 2)?, hex(function, 1)?);
    Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An answer like NVML's: one list of fields for each GPU.
    pub(crate) fn answer(gpus: &[&[(&str, FieldValue)]]) -> ProbeOutput {
        let bus = |index: usize| format!("0000:{:02x}:00.0", 0x18 + index);
        let gpu = |(index, fields): (usize, &&[(&str, FieldValue)])| Gpu {
            index: index as u32,
            bus: bus(index),
            fields: fields.iter().map(|(name, reading)| ((*name).to_owned(), reading.clone())).collect(),
        };
        ProbeOutput::Gpus(GpuQueryResult {
            on_pci: (0..gpus.len()).map(bus).collect(),
            driver: Ok(Driver { version: "570.124.06".into(), cuda: Some("12.8".into()), source: "nvml".into() }),
            gpus: gpus.iter().enumerate().map(gpu).collect(),
        })
    }

    /// The answer on a machine without a GPU.
    pub(crate) fn none() -> ProbeOutput {
        let missing = ProbeFailure::new(FailureKind::Missing, "libnvidia-ml.so.1: not found");
        ProbeOutput::Gpus(GpuQueryResult { on_pci: Vec::new(), driver: Err(missing), gpus: Vec::new() })
    }

    pub(crate) fn n(value: f64) -> FieldValue {
        FieldValue::Number(value)
    }

    pub(crate) fn t(text: &str) -> FieldValue {
        FieldValue::Text(text.to_owned())
    }

    /// The result of every call for a GPU that has fallen off the bus.
    pub(crate) fn lost() -> FieldValue {
        FieldValue::Failed { code: NVML_GPU_IS_LOST, text: "GPU is lost".to_owned() }
    }

    /// Two GPUs on the bus and a driver that fails with this error.
    pub(crate) fn deaf(kind: FailureKind, text: &str) -> ProbeOutput {
        ProbeOutput::Gpus(GpuQueryResult {
            on_pci: vec!["0000:18:00.0".to_owned(), "0000:19:00.0".to_owned()],
            driver: Err(ProbeFailure::new(kind, text)),
            gpus: Vec::new(),
        })
    }

    #[test]
    fn no_gpu_differs_from_a_driver_that_does_not_answer() {
        assert!(matches!(require_gpus(Some(&none())), Err(Observation::NotApplicable(_))));
        let ProbeOutput::Gpus(mut dead) = none() else { panic!("gpus") };
        dead.on_pci.push("0000:18:00.0".into());
        let dead = ProbeOutput::Gpus(dead);
        assert!(matches!(require_gpus(Some(&dead)), Err(Observation::Failed(f)) if f.kind == FailureKind::Missing));
        let ProbeOutput::Gpus(mut lost) = answer(&[]) else { panic!("gpus") };
        lost.on_pci.push("0000:18:00.0".into());
        let lost = ProbeOutput::Gpus(lost);
        assert!(matches!(require_gpus(Some(&lost)), Err(Observation::Failed(f)) if f.kind == FailureKind::Empty));
        assert!(matches!(require_gpus(None), Err(Observation::Failed(_))));
    }

    #[test]
    fn bus_ids_are_normalized() {
        for text in ["00000000:18:00.0", "0000:18:00.0", "0000:18:00", "PCI:0000:18:00", "0:18:0.0"] {
            assert_eq!(normalize_bus_id(text).as_deref(), Some("0000:18:00.0"), "{text}");
        }
        assert_eq!(normalize_bus_id("0018:01:00").as_deref(), Some("0018:01:00.0"));
        for text in ["", "18:00.0", "a:b:c:d", "0000:xx:00.0", "0000:18:00.0.0"] {
            assert_eq!(normalize_bus_id(text), None, "{text}");
        }
    }

    #[test]
    fn links_are_found_by_number() {
        let ProbeOutput::Gpus(answer) = answer(&[&[("nvlink.0.state", n(1.0)), ("nvlink.17.state", n(0.0))]]) else {
            panic!("gpus")
        };
        let states: Vec<_> = answer.gpus[0].indexed("nvlink", "state").map(|(link, r)| (link, r.clone())).collect();
        assert_eq!(states, [(0, n(1.0)), (17, n(0.0))]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,40}") {
            normalize_bus_id(&text);
        }
    }
}
