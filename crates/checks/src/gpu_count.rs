//! gpu-count: does the node have as many GPUs as its machine type?
//!
//! What it does: counts the GPUs that the PCI bus or the driver lists and compares the number with the machine profile.
//! A GPU counts even if it is faulty, or if the driver does not answer; `gpu-presence` checks whether each is usable.
//!
//! Why it matters: a GPU that has failed completely is on no bus and in no list; only the count shows it. A job that
//! requests the whole node then waits forever.
//!
//! What to do: `gpu-count` is `reboot`: a GPU that fell off the bus often returns after a reboot, which NVIDIA advises
//! for Xid 79. If the number is still wrong afterwards, the case escalates to replacement. `lspci -d 10de: -nn` shows
//! the devices on the bus; `journalctl -k -b -1 -g "fallen off the bus"` shows when the GPU was lost.
//!
//! The expected number comes from the profile, then from the scheduler (Kubernetes capacity, Slurm Gres, dstack), then,
//! at severity `monitor`, from other nodes of the type and from this node's accepted past. Without any of them the count
//! is not judged (`no-expectation`): `doctor-node profile learn` writes a profile from a healthy node, or a rule
//! `gpu-count` with `below = 8` in the policy needs none. Not applicable (`no-hardware`) where there is no GPU and
//! nothing expects one.

use std::collections::BTreeSet;

use doctor_core::observation::{Entity, FailureKind, Metric, Observation, ProbeFailure};

use crate::{
    gpu::normalize_bus_id,
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-count", "number of GPUs, by the machine type");

const RULES: &str = r#"
rules = [
  { id = "gpu-count", check = "gpu-count", metric = "gpu_count", not_as_profile = true, reason = "gpu-count",
    severity = "reboot", text = "{value} GPUs, expected {limit} on this machine type" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_count.rs")), rules: RULES, probes, interpret };

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&["uuid"])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let answer = match outputs.first() {
        Some(ProbeOutput::Gpus(answer)) => answer,
        Some(ProbeOutput::Failed(failure)) => return Observation::Failed(failure.clone()),
        _ => {
            let failure = ProbeFailure::new(FailureKind::Unparseable, "the probe returned no GPU data");
            return Observation::Failed(failure);
        }
    };
    let bus_id = |text: &String| normalize_bus_id(text).unwrap_or_else(|| text.clone());
    let mut present: BTreeSet<String> = answer.on_pci.iter().map(bus_id).collect();
    present.extend(answer.gpus.iter().map(|gpu| bus_id(&gpu.entity().id)));
    // A GPU that could not report its bus id is one of those on the bus.
    let count = present.len().min(answer.on_pci.len().max(answer.gpus.len()));
    // Zero is a number too: a machine may have lost all of them.
    Observation::measured(vec![Metric::count("gpu_count", Entity::node(), count as f64)], Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::tests::{answer, deaf, lost, none, t},
        classify_fixture::{classify_outputs, classify_outputs_with},
    };
    use doctor_core::{ids::Sku, profile::Profile};

    fn of_two() -> Profile {
        Profile { sku: Sku::new("two").unwrap(), version: 1, expect: [("gpu_count".to_owned(), 2.0.into())].into() }
    }

    fn check(output: ProbeOutput) -> Vec<String> {
        classify_outputs_with(&CHECK, &Params::new(), Some(&of_two()), &[output])
    }

    #[test]
    fn a_missing_gpu_is_reported_and_a_faulty_one_is_counted() {
        let gpu = [("uuid", t("GPU-0"))];
        assert_eq!(check(answer(&[&gpu, &gpu])), ["pass within-limits"]);
        assert_eq!(check(answer(&[&gpu])), ["fail gpu-count reboot node"]);
        assert_eq!(check(answer(&[&gpu, &gpu, &gpu])), ["fail gpu-count reboot node"]);
        assert_eq!(check(answer(&[&gpu, &[("uuid", lost())]])), ["pass within-limits"]);
        assert_eq!(check(deaf(FailureKind::TimedOut, "no answer")), ["pass within-limits"]);
        let ProbeOutput::Gpus(mut nameless) = answer(&[&gpu, &[("uuid", lost())]]) else { panic!("gpus") };
        nameless.gpus[1].bus = String::new();
        assert_eq!(check(ProbeOutput::Gpus(nameless)), ["pass within-limits"]);
    }

    // AWS suite, defect 12: without metadata its counts passed.
    #[test]
    fn without_a_profile_a_count_does_not_pass() {
        assert_eq!(classify_outputs(&CHECK, &[answer(&[&[("uuid", t("GPU-0"))]])]), ["not-applicable no-expectation"]);
    }

    #[test]
    fn a_machine_that_lost_all_gpus_is_not_one_without_gpus() {
        assert_eq!(check(none()), ["fail gpu-count reboot node"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-hardware"]);
        let ProbeOutput::Gpus(mut result) = deaf(FailureKind::Failed, "Driver Not Loaded") else { panic!("gpus") };
        result.on_pci.clear();
        assert_eq!(check(ProbeOutput::Gpus(result)), ["fail gpu-count reboot node"]);
        assert_eq!(check(answer(&[])), ["fail gpu-count reboot node"]);
    }

    #[test]
    fn an_unreadable_count_is_not_zero() {
        let failed = ProbeOutput::Failed(ProbeFailure::new(FailureKind::TimedOut, "no answer"));
        assert_eq!(check(failed), ["inconclusive timed-out"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }
}
