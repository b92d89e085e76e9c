//! nvlink-count: does each GPU have as many NVLinks as its machine type?
//!
//! What it does: counts the NVLinks of each GPU and compares the number with the machine profile (12 on an A100 with
//! NVSwitch, 18 on H100, H200 and B200). A link that is down next to others that are up counts here, and `nvlink-state`
//! reports it; if no link of the machine is up, the count is zero.
//!
//! Why it matters: if every link of a machine is down, or the driver does not list some at all, no GPU looks worse than
//! its neighbour. Only the expected number shows it.
//!
//! What to do: `nvlink-count` is `reset`: drain the node and reset its GPUs together with the fabric manager running.
//! `nvidia-smi nvlink -s` shows the links. If no link of any GPU is up, check the fabric manager first:
//! `systemctl status nvidia-fabricmanager`.
//!
//! Without an expected number the count is not judged (`no-expectation`). Not applicable where no GPU has NVLink.

use doctor_core::observation::{Metric, Observation};

use crate::{
    gpu::{Gpu, FieldValue, for_each_gpu, require_gpus, read_indexed},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("nvlink-count", "number of NVLinks of each GPU, by the machine type");

const RULES: &str = r#"
rules = [
  { id = "nvlink-count", check = "nvlink-count", metric = "nvlink_count", not_as_profile = true,
    reason = "nvlink-count", severity = "reset",
    text = "{entity}: {value} active NVLinks, expected {limit} on this machine type" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("nvlink_count.rs")), rules: RULES, probes, interpret };

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&["nvlink.*.state"])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let is_up = |reading: &FieldValue| matches!(reading, FieldValue::Number(state) if *state != 0.0);
    let any_up = require_gpus(outputs.first())
        .is_ok_and(|gpus| gpus.iter().any(|gpu| gpu.indexed("nvlink", "state").any(|(_, reading)| is_up(reading))));
    for_each_gpu(outputs.first(), "no GPU of this node has NVLink", |gpu, builder| {
        let states = read_indexed(gpu, "nvlink", "state", builder);
        // If a link could not be read there is no count.
        if !states.is_empty() && states.len() == has_links(gpu) {
            let count = if any_up { states.len() } else { 0 };
            builder.metric(Metric::count("nvlink_count", gpu.entity(), count as f64));
        }
    })
}

fn has_links(gpu: &Gpu) -> usize {
    gpu.indexed("nvlink", "state").filter(|(_, reading)| !matches!(reading, FieldValue::NotSupported)).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::tests::{answer, lost, n, none},
        classify_fixture::{classify_outputs, classify_outputs_with},
    };
    use doctor_core::{ids::Sku, profile::Profile};

    fn check(gpus: &[[FieldValue; 2]]) -> Vec<String> {
        let profile =
            Profile { sku: Sku::new("x").unwrap(), version: 1, expect: [("nvlink_count".to_owned(), 2.0.into())].into() };
        let gpus: Vec<_> =
            gpus.iter().map(|[a, b]| [("nvlink.0.state", a.clone()), ("nvlink.1.state", b.clone())]).collect();
        let gpus: Vec<_> = gpus.iter().map(<[_; 2]>::as_slice).collect();
        classify_outputs_with(&CHECK, &Params::new(), Some(&profile), &[answer(&gpus)])
    }

    #[test]
    fn missing_links_are_reported_even_if_missing_on_every_gpu() {
        assert_eq!(check(&[[n(1.0), n(1.0)], [n(1.0), n(1.0)]]), ["pass within-limits"]);
        assert_eq!(check(&[[n(0.0), n(0.0)], [n(0.0), n(0.0)]]).len(), 2);
        let fewer = [n(1.0), FieldValue::NotSupported];
        assert_eq!(check(&[[n(1.0), n(1.0)], fewer]), ["fail nvlink-count reset gpu:0000:19:00.0"]);
    }

    #[test]
    fn a_link_reported_by_nvlink_state_is_not_reported_twice() {
        assert_eq!(check(&[[n(1.0), n(1.0)], [n(1.0), n(0.0)]]), ["pass within-limits"]);
    }

    #[test]
    fn unreadable_counts_and_a_missing_profile_are_reported() {
        assert_eq!(check(&[[n(1.0), lost()]]), ["inconclusive failed"]);
        assert_eq!(check(&[[FieldValue::NotSupported, FieldValue::NotSupported]]), ["not-applicable not-supported"]);
        let one = [("nvlink.0.state", n(1.0))];
        assert_eq!(classify_outputs(&CHECK, &[answer(&[&one])]), ["not-applicable no-expectation"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
