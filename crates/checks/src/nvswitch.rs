//! nvswitch: does the node have as many NVSwitches as its machine type?
//!
//! What it does: counts the NVSwitches in `/dev` (`nvidia-nvswitch0`, …) and compares the number with the machine
//! profile (6 on an HGX A100, 4 on HGX H100 and H200).
//!
//! Why it matters: a missing switch removes the same links from all GPUs. Each GPU looks like its neighbour, and all
//! are slow.
//!
//! What to do: `nvswitch-count` is `reboot`: a switch that the driver lost returns after a reboot or not at all; then
//! the case escalates to replacement of the machine. `lspci -d 10de: | grep -i bridge` shows the devices on the bus,
//! `journalctl -k -g nvswitch` why the driver lost one (SXid).
//!
//! Without an expected number the count is not judged (`no-expectation`). Where this machine cannot see the switches (B200, GB200
//! trays, virtual machines), the profile's `nvswitch_count` is 0. Not applicable where neither `/dev` nor any GPU's
//! NVLink shows a switch.

use doctor_core::observation::{Entity, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure};

use crate::{
    gpu::{require_gpus, not_applicable, read_indexed},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("nvswitch", "number of NVSwitches, by the machine type");

const RULES: &str = r#"
rules = [
  { id = "nvswitch-count", check = "nvswitch", metric = "nvswitch_count", not_as_profile = true,
    reason = "nvswitch-count", severity = "reboot",
    text = "{value} NVSwitches in /dev, expected {limit} on this machine type" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("nvswitch.rs")), rules: RULES, probes, interpret };

/// `nvmlIntNvLinkDeviceType_t`.
const TO_SWITCH: f64 = 2.0;

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::List { path: "/dev".to_owned() }, Probe::gpu(&["nvlink.*.remote_kind"])]
}

/// Returns the NVSwitches among the names of `/dev`. `nvidia-nvswitchctl` is not one.
pub(crate) fn switches(names: &[String]) -> impl Iterator<Item = &str> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    names.iter().map(String::as_str).filter(move |name| name.strip_prefix("nvidia-nvswitch").is_some_and(is_number))
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let count = match outputs.first() {
        Some(ProbeOutput::Names(names)) => switches(names).count(),
        Some(ProbeOutput::Failed(failure)) => return Observation::Failed(failure.clone()),
        _ => return Observation::Failed(ProbeFailure::new(FailureKind::Unparseable, "the answer for /dev is not a list")),
    };
    let found = Metric::count("nvswitch_count", Entity::node(), count as f64);
    if count > 0 {
        return Observation::measured(vec![found], Vec::new());
    }
    // None in /dev: the GPUs' links show whether there should be some.
    let gpus = match require_gpus(outputs.get(1)) {
        Ok(gpus) => gpus,
        Err(instead) => return instead,
    };
    let mut builder = ObservationBuilder::default();
    let to_switch =
        |gpu| read_indexed(gpu, "nvlink", "remote_kind", &mut builder).iter().any(|(_, kind)| *kind == TO_SWITCH);
    if gpus.iter().any(to_switch) {
        return Observation::measured(vec![found], Vec::new());
    }
    builder.build_or(not_applicable("no-nvswitch", "no NVSwitch in /dev, and no GPU has an NVLink to one"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::tests::{answer, lost, n, none},
        classify_fixture::{classify_outputs, classify_outputs_with},
    };
    use doctor_core::{ids::Sku, profile::Profile};

    fn dev(names: &[&str]) -> ProbeOutput {
        ProbeOutput::Names(names.iter().map(|&name| name.to_owned()).collect())
    }

    fn gpu(kind: f64) -> ProbeOutput {
        answer(&[&[("nvlink.0.remote_kind", n(kind))]])
    }

    fn check(names: &[&str], gpus: ProbeOutput) -> Vec<String> {
        let profile =
            Profile { sku: Sku::new("x").unwrap(), version: 1, expect: [("nvswitch_count".to_owned(), 2.0.into())].into() };
        classify_outputs_with(&CHECK, &Params::new(), Some(&profile), &[dev(names), gpus])
    }

    #[test]
    fn missing_switches_are_reported_even_if_all_are_missing() {
        assert_eq!(
            check(&["nvidia-nvswitch0", "nvidia-nvswitch1", "nvidia-nvswitchctl"], gpu(2.0)),
            ["pass within-limits"]
        );
        assert_eq!(check(&["nvidia-nvswitch1", "nvidia-nvswitchctl"], gpu(2.0)), ["fail nvswitch-count reboot node"]);
        assert_eq!(check(&["nvidia-nvswitchctl"], gpu(2.0)), ["fail nvswitch-count reboot node"]);
        assert_eq!(classify_outputs(&CHECK, &[dev(&["nvidia-nvswitch0"]), gpu(2.0)]), ["not-applicable no-expectation"]);
    }

    #[test]
    fn a_machine_without_switches_is_known_to_have_none() {
        assert_eq!(classify_outputs(&CHECK, &[dev(&["null"]), gpu(0.0)]), ["not-applicable no-nvswitch"]);
        assert_eq!(check(&["null"], gpu(0.0)), ["inconclusive hardware-missing"], "the profile expects some");
        assert_eq!(check(&["null"], none()), ["not-applicable no-gpu"]);
        assert_eq!(check(&["null"], answer(&[&[("nvlink.*.remote_kind", lost())]])), ["inconclusive failed"]);
        let denied = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "no"));
        assert_eq!(classify_outputs(&CHECK, &[denied, none()]), ["inconclusive denied"]);
    }
}
