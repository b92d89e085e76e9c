//! gpu-versions: do the driver and firmware versions of all GPUs agree, with each other and with the site's settings?
//!
//! What it does: compares VBIOS and infoROM image between GPUs of the same model and part number, and the driver and
//! the VBIOS with the versions in the parameters.
//!
//! Why it matters: a replaced board often has another VBIOS. It clocks and reports slightly differently, and errors
//! that an update fixed elsewhere remain on this one GPU. A node with another driver than the rest of the cluster fails
//! containers built for it.
//!
//! What to do: all findings are `monitor`; the GPU works.
//! `nvidia-smi --query-gpu=pci.bus_id,vbios_version,inforom.img --format=csv` lists the versions.
//! - `vbios-differs`, `inforom-differs`: one GPU differs from its neighbours. Ask the vendor for the firmware update.
//! - `vbios-unexpected`, `driver-unexpected`: not the configured version. A driver that is installed but not yet loaded
//!   by a reboot shows up here too.
//!
//! Parameters: `driver`, such as `"570.124.06"`; `vbios`, such as `"96.00.A5.00.1A"`. Without them only the GPUs of the
//! node are compared with each other.

use doctor_core::observation::{Entity, Event, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure};

use crate::{
    gpu::{Gpu, require_gpus, no_gpu, read_text},
    differing_devices::{Part, outliers},
    probe::{Probe, ProbeOutput},
    check_params::invalid_param,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-versions", "driver and firmware versions of GPUs");

const RULES: &str = r#"
rules = [
  { id = "gpu-versions-vbios", check = "gpu-versions", event = "vbios-differs", reason = "vbios-differs",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "gpu-versions-inforom", check = "gpu-versions", event = "inforom-differs", reason = "inforom-differs",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "gpu-versions-vbios-wanted", check = "gpu-versions", event = "vbios-unexpected", reason = "vbios-unexpected",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "gpu-versions-driver-wanted", check = "gpu-versions", event = "driver-unexpected",
    reason = "driver-unexpected", severity = "monitor", text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_versions.rs")), rules: RULES, probes, interpret };

const NAME: &str = "name";
const PART: &str = "board_part";
const VBIOS: &str = "vbios_version";
const INFOROM: &str = "inforom.image";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[NAME, PART, VBIOS, INFOROM])]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let (expected_driver, expected_vbios) =
        match (expected_version(params, "driver", "570.124.06"), expected_version(params, "vbios", "96.00.A5.00.1A")) {
            (Ok(driver), Ok(vbios)) => (driver, vbios),
            (Err(refused), _) | (_, Err(refused)) => return refused,
        };
    let gpus = match require_gpus(outputs.first()) {
        Ok(gpus) => gpus,
        Err(instead) => return instead,
    };
    let Some(ProbeOutput::Gpus(answer)) = outputs.first() else { return no_gpu() };
    let version = answer.driver.as_ref().map(|driver| driver.version.trim()).unwrap_or_default();
    if version.is_empty() {
        return Observation::Failed(ProbeFailure::new(FailureKind::Empty, "the driver reports no version"));
    }
    let mut builder = ObservationBuilder::default();
    builder.metric(Metric::count("gpus_compared", Entity::node(), gpus.len() as f64));
    if let Some(expected) = expected_driver.filter(|expected| *expected != version) {
        let text = format!("driver version {version}, expected {expected}");
        builder.event(Event::seen("driver-unexpected", Entity::node(), text));
    }
    let vbios = version_parts(gpus, VBIOS, &mut builder);
    for part in vbios.iter().filter(|part| expected_vbios.is_some_and(|expected| !part.value.eq_ignore_ascii_case(expected)))
    {
        let text = format!("VBIOS version {}, expected {}", part.value, expected_vbios.unwrap_or_default());
        builder.event(Event::seen("vbios-unexpected", part.entity.clone(), text));
    }
    // Deviations from the configured version are already reported.
    if expected_vbios.is_none() {
        report_outliers(&vbios, "vbios-differs", "VBIOS", &mut builder);
    }
    report_outliers(&version_parts(gpus, INFOROM, &mut builder), "inforom-differs", "infoROM image", &mut builder);
    builder.build_or(no_gpu())
}

fn expected_version<'a>(params: &'a Params, name: &str, example: &str) -> Result<Option<&'a str>, Observation> {
    match params.get(name).map(toml::Value::as_str) {
        None => Ok(None),
        Some(Some(text)) => Ok(Some(text.trim())),
        Some(None) => Err(invalid_param(name, &format!("{name} = \"{example}\""))),
    }
}

/// Returns one version field of each GPU that has it. GPUs are grouped by model and part number.
fn version_parts(gpus: &[Gpu], field: &str, builder: &mut ObservationBuilder) -> Vec<Part> {
    let kind = |gpu: &Gpu| format!("{} {}", gpu.text(NAME).unwrap_or_default(), gpu.text(PART).unwrap_or_default());
    let part = |gpu: &Gpu| {
        let value = read_text(gpu, field, builder)?.to_owned();
        Some(Part { entity: gpu.entity(), kind: kind(gpu), value })
    };
    gpus.iter().filter_map(part).collect()
}

fn report_outliers(parts: &[Part], code: &'static str, what: &str, builder: &mut ObservationBuilder) {
    for odd in outliers(parts) {
        let text = format!("{what} {}, the other GPUs have {}", odd.part.value, odd.majority_value);
        builder.event(Event::seen(code, odd.part.entity.clone(), text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::{
            FieldValue,
            tests::{answer, lost, none, t},
        },
        classify_fixture::{classify_outputs, classify_outputs_with},
    };

    fn gpu(name: &str, vbios: &str, inforom: &str) -> [(&'static str, FieldValue); 4] {
        [(NAME, t(name)), (PART, t("692-2G520-0282-001")), (VBIOS, t(vbios)), (INFOROM, t(inforom))]
    }

    /// Values of an H200, driver 580.159.04, 2026-11-15.
    fn h200() -> [(&'static str, FieldValue); 4] {
        gpu("NVIDIA H200", "96.00.A5.00.1A", "G520.0282.02.02")
    }

    fn check(params: &str, gpus: &[[(&str, FieldValue); 4]]) -> Vec<String> {
        let gpus: Vec<_> = gpus.iter().map(<[_; 4]>::as_slice).collect();
        classify_outputs_with(&CHECK, &toml::from_str(params).unwrap(), None, &[answer(&gpus)])
    }

    #[test]
    fn a_version_that_differs_from_the_other_gpus_is_reported() {
        assert_eq!(check("", &[h200(), h200(), h200()]), ["pass within-limits"]);
        let other = gpu("NVIDIA H200", "96.00.A0.00.01", "G520.0282.02.02");
        assert_eq!(check("", &[h200(), other, h200()]), ["fail vbios-differs monitor gpu:0000:19:00.0"]);
        let other = gpu("NVIDIA H200", "96.00.A5.00.1A", "G520.0200.00.01");
        assert_eq!(check("", &[h200(), h200(), other]), ["fail inforom-differs monitor gpu:0000:1a:00.0"]);
        // Another model has other firmware.
        assert_eq!(check("", &[h200(), gpu("NVIDIA L4", "95.04.3D.00.01", "G193.0200.00.02")]), ["pass within-limits"]);
    }

    #[test]
    fn configured_versions_are_enforced() {
        let right = "driver = '570.124.06'\nvbios = '96.00.a5.00.1a'";
        assert_eq!(check(right, &[h200(), h200()]), ["pass within-limits"]);
        assert_eq!(check("driver = '580.65.06'", &[h200()]), ["fail driver-unexpected monitor node"]);
        assert_eq!(check("vbios = '1'", &[h200()]), ["fail vbios-unexpected monitor gpu:0000:18:00.0"]);
        assert_eq!(check("vbios = 96", &[h200()]), ["inconclusive unparseable"]);
    }

    #[test]
    fn unreadable_versions_do_not_pass() {
        let lost_fields = [(NAME, lost()), (PART, lost()), (VBIOS, lost()), (INFOROM, lost())];
        assert_eq!(check("", &[h200(), lost_fields]), ["inconclusive failed"]);
        let without =
            [(NAME, t("x")), (PART, FieldValue::NotSupported), (VBIOS, t("1")), (INFOROM, FieldValue::NotSupported)];
        assert_eq!(check("", &[without]), ["pass within-limits"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
