//! What NVIDIA's driver says of the GPUs of a machine, by name, and how checks read it.
//!
//! A check asks for fields by name ([`crate::probe::Probe::Gpu`]); the runner knows which call of NVML brings each, and
//! takes the same names from `nvidia-smi` where the library cannot be used. A field that a GPU does not have is not the
//! same as one that could not be read, and neither is a number.
//!
//! Names follow `nvidia-smi --help-query-gpu` where it has one. `*` in a name stands for every link: `nvlink.*.state`
//! brings `nvlink.0.state`, `nvlink.1.state`, and so on.

use doctor_core::{
    observation::{FailureKind, Look, Observation, ProbeFailure, Why},
    reason::ReasonCode,
};

pub use crate::gpu_answer::{Driver, Gpu, GpuAnswer, NVML_GPU_IS_LOST, NVML_RESET_REQUIRED, Reading};
use crate::probe::ProbeOutput;

/// The GPUs in a probe's output; or what to say where there are none to look at. A check begins with this.
///
/// # Errors
/// With the observation that the check should return: not applicable on a machine without an NVIDIA GPU, could not
/// look where the driver does not answer or knows no GPU although the bus has some.
pub fn gpus(output: Option<&ProbeOutput>) -> Result<&[Gpu], Observation> {
    let could_not = |kind, text: String| Observation::CouldNot(ProbeFailure::new(kind, text));
    let answer = match output {
        Some(ProbeOutput::Gpus(answer)) => answer,
        Some(ProbeOutput::Failed(failure)) => return Err(Observation::CouldNot(failure.clone())),
        _ => return Err(could_not(FailureKind::Unparseable, "the answer is not one about GPUs".to_owned())),
    };
    if answer.on_pci.is_empty() && answer.gpus.is_empty() {
        return Err(no_gpu());
    }
    if let Err(failure) = &answer.driver {
        return Err(Observation::CouldNot(failure.clone()));
    }
    if answer.gpus.is_empty() {
        let text = format!("{} NVIDIA GPUs are on the PCI bus and the driver knows none of them", answer.on_pci.len());
        return Err(could_not(FailureKind::Empty, text));
    }
    Ok(&answer.gpus)
}

/// Why one of these fields could not be read from a GPU that has it. `None`: it has none of them.
pub fn unread(gpu: &Gpu, fields: &[&str]) -> Option<ProbeFailure> {
    let because = |kind, text: String| ProbeFailure::new(kind, format!("{}: {text}", gpu.entity()));
    fields.iter().find_map(|field| match gpu.get(field) {
        None => Some(because(FailureKind::Empty, format!("the driver was not asked for {field}"))),
        Some(Reading::Failed { text, .. }) => Some(because(FailureKind::Failed, format!("{field}: {text}"))),
        Some(Reading::Number(_) | Reading::Text(_) | Reading::NotSupported) => None,
    })
}

/// Looks at one GPU after the other. `see` puts what it finds into the look, and nothing for a GPU that has no such
/// thing; `nothing` says what it means if no GPU has.
pub fn each(output: Option<&ProbeOutput>, nothing: &str, mut see: impl FnMut(&Gpu, &mut Look)) -> Observation {
    let gpus = match gpus(output) {
        Ok(gpus) => gpus,
        Err(instead) => return instead,
    };
    let mut look = Look::default();
    for gpu in gpus {
        see(gpu, &mut look);
    }
    look.or(not_applicable("not-supported", nothing))
}

/// A number of a GPU that has it. That it could not be read is told to `look`.
pub fn read_number(gpu: &Gpu, field: &str, look: &mut Look) -> Option<f64> {
    match gpu.get(field) {
        Some(Reading::Number(value)) => Some(*value),
        Some(Reading::Text(text)) => {
            let text = format!("{}: {field} is no number: {text}", gpu.entity());
            look.could_not(ProbeFailure::new(FailureKind::Unparseable, text));
            None
        }
        Some(Reading::NotSupported) => None,
        Some(Reading::Failed { .. }) | None => {
            unread(gpu, &[field]).into_iter().for_each(|failure| look.could_not(failure));
            None
        }
    }
}

/// The same for a text. An empty one says nothing.
pub fn read_text<'a>(gpu: &'a Gpu, field: &str, look: &mut Look) -> Option<&'a str> {
    match gpu.get(field) {
        Some(Reading::Text(text)) if !text.trim().is_empty() => Some(text.trim()),
        Some(Reading::Text(_) | Reading::Number(_)) => {
            look.could_not(ProbeFailure::new(
                FailureKind::Unparseable,
                format!("{}: {field} is no text", gpu.entity()),
            ));
            None
        }
        Some(Reading::NotSupported) => None,
        Some(Reading::Failed { .. }) | None => {
            unread(gpu, &[field]).into_iter().for_each(|failure| look.could_not(failure));
            None
        }
    }
}

/// The same for a numbered family: every number that it has. Where the family itself would not tell, the runner puts
/// the failure under the name that was asked for, `nvlink.*.state`.
pub fn read_numbered(gpu: &Gpu, family: &str, what: &str, look: &mut Look) -> Vec<(u32, f64)> {
    let asked = format!("{family}.*.{what}");
    if matches!(gpu.get(&asked), Some(Reading::Failed { .. })) {
        unread(gpu, &[&asked]).into_iter().for_each(|failure| look.could_not(failure));
    }
    let mut read = |(number, reading): (u32, &Reading)| match reading {
        Reading::Number(value) => Some((number, *value)),
        _ => Some((number, read_number(gpu, &format!("{family}.{number}.{what}"), look)?)),
    };
    gpu.numbered(family, what).filter_map(&mut read).collect()
}

/// What a check says on a machine that has nothing of its kind.
pub fn no_gpu() -> Observation {
    not_applicable("no-gpu", "there is no NVIDIA GPU on the PCI bus")
}

/// A fixed reason for having nothing to look at.
pub fn not_applicable(code: &'static str, text: impl Into<String>) -> Observation {
    Observation::NotApplicable(Why { code: ReasonCode::fixed(code), text: text.into() })
}

/// The same part of the bus, however it is written: `00000000:18:00.0`, `0000:18:00.0`, `0000:18:00`, `PCI:0000:18:00`.
/// As the kernel writes it, in lower case. `None` if it is no bus id.
pub fn bus_id(text: &str) -> Option<String> {
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

    /// An answer as NVML would give it: one list of fields for each GPU.
    pub(crate) fn answer(gpus: &[&[(&str, Reading)]]) -> ProbeOutput {
        let bus = |index: usize| format!("0000:{:02x}:00.0", 0x18 + index);
        let gpu = |(index, fields): (usize, &&[(&str, Reading)])| Gpu {
            index: index as u32,
            bus: bus(index),
            fields: fields.iter().map(|(name, reading)| ((*name).to_owned(), reading.clone())).collect(),
        };
        ProbeOutput::Gpus(GpuAnswer {
            on_pci: (0..gpus.len()).map(bus).collect(),
            driver: Ok(Driver { version: "570.124.06".into(), cuda: Some("12.8".into()), asked: "nvml".into() }),
            gpus: gpus.iter().enumerate().map(gpu).collect(),
        })
    }

    /// What every machine without a GPU says.
    pub(crate) fn none() -> ProbeOutput {
        let missing = ProbeFailure::new(FailureKind::Missing, "libnvidia-ml.so.1: not found");
        ProbeOutput::Gpus(GpuAnswer { on_pci: Vec::new(), driver: Err(missing), gpus: Vec::new() })
    }

    pub(crate) fn n(value: f64) -> Reading {
        Reading::Number(value)
    }

    pub(crate) fn t(text: &str) -> Reading {
        Reading::Text(text.to_owned())
    }

    /// What every call says of a GPU that has fallen off the bus.
    pub(crate) fn lost() -> Reading {
        Reading::Failed { code: NVML_GPU_IS_LOST, text: "GPU is lost".to_owned() }
    }

    /// Two GPUs on the bus and a driver that says this instead of an answer.
    pub(crate) fn deaf(kind: FailureKind, text: &str) -> ProbeOutput {
        ProbeOutput::Gpus(GpuAnswer {
            on_pci: vec!["0000:18:00.0".to_owned(), "0000:19:00.0".to_owned()],
            driver: Err(ProbeFailure::new(kind, text)),
            gpus: Vec::new(),
        })
    }

    #[test]
    fn no_gpu_is_not_the_same_as_a_driver_that_does_not_answer() {
        assert!(matches!(gpus(Some(&none())), Err(Observation::NotApplicable(_))));
        let ProbeOutput::Gpus(mut dead) = none() else { panic!("gpus") };
        dead.on_pci.push("0000:18:00.0".into());
        let dead = ProbeOutput::Gpus(dead);
        assert!(matches!(gpus(Some(&dead)), Err(Observation::CouldNot(f)) if f.kind == FailureKind::Missing));
        let ProbeOutput::Gpus(mut lost) = answer(&[]) else { panic!("gpus") };
        lost.on_pci.push("0000:18:00.0".into());
        let lost = ProbeOutput::Gpus(lost);
        assert!(matches!(gpus(Some(&lost)), Err(Observation::CouldNot(f)) if f.kind == FailureKind::Empty));
        assert!(matches!(gpus(None), Err(Observation::CouldNot(_))));
    }

    #[test]
    fn a_bus_id_is_the_same_however_it_is_written() {
        for text in ["00000000:18:00.0", "0000:18:00.0", "0000:18:00", "PCI:0000:18:00", "0:18:0.0"] {
            assert_eq!(bus_id(text).as_deref(), Some("0000:18:00.0"), "{text}");
        }
        assert_eq!(bus_id("0018:01:00").as_deref(), Some("0018:01:00.0"));
        for text in ["", "18:00.0", "a:b:c:d", "0000:xx:00.0", "0000:18:00.0.0"] {
            assert_eq!(bus_id(text), None, "{text}");
        }
    }

    #[test]
    fn links_are_found_by_number() {
        let ProbeOutput::Gpus(answer) = answer(&[&[("nvlink.0.state", n(1.0)), ("nvlink.17.state", n(0.0))]]) else {
            panic!("gpus")
        };
        let states: Vec<_> = answer.gpus[0].numbered("nvlink", "state").map(|(link, r)| (link, r.clone())).collect();
        assert_eq!(states, [(0, n(1.0)), (17, n(0.0))]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,40}") {
            bus_id(&text);
        }
    }
}
