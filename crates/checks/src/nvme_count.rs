//! nvme-count: does the node have as many NVMe disks as its machine type?
//!
//! What it does: counts the NVMe controllers and compares the number with the machine profile.
//!
//! Why it matters: a disk that dropped off the bus goes unnoticed until the scratch array does not assemble, or is
//! smaller than jobs expect.
//!
//! What to do: `nvme-count-wrong` is `isolate`, confirmed by a second failure: `lspci -d ::0108` shows which slot is
//! empty. Power-cycle the machine once, then have the disk and its backplane inspected. On clouds, return the instance.
//!
//! Without `nvme_disks` in the profile the count is compared with other nodes of the type and with this node's accepted
//! past, at severity `monitor`; without those it is not judged (`no-expectation`).

use doctor_core::observation::{Entity, Metric, Observation};

use crate::{
    files::directory_names,
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("nvme-count", "number of NVMe disks");

const RULES: &str = r#"
rules = [
  { id = "nvme-count-wrong", check = "nvme-count", metric = "nvme_disks", not_as_profile = true,
    reason = "nvme-count-wrong", severity = "isolate", confirm = 2,
    text = "{value} NVMe disks, expected {limit} on this machine type" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("nvme_count.rs")), rules: RULES, probes, interpret };

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::List { path: "/sys/class/nvme".to_owned() }]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    // Zero is a number too: the kernel has found none.
    let count = match directory_names(outputs.first()) {
        Ok(names) => names.iter().filter(|name| name.starts_with("nvme")).count(),
        Err(failure) => return Observation::Failed(failure),
    };
    Observation::measured(vec![Metric::count("nvme_disks", Entity::node(), count as f64)], Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classify_fixture::classify_outputs_with;
    use doctor_core::{
        ids::Sku,
        observation::{FailureKind, ProbeFailure},
        profile::Profile,
    };

    fn check(expected: Option<f64>, output: ProbeOutput) -> Vec<String> {
        let expect = expected.map(|count| ("nvme_disks".to_owned(), count.into())).into_iter().collect();
        let profile = Profile { sku: Sku::new("hgx").unwrap(), version: 1, expect };
        classify_outputs_with(&CHECK, &Params::new(), Some(&profile), &[output])
    }

    fn disks(count: usize) -> ProbeOutput {
        ProbeOutput::Names((0..count).map(|n| format!("nvme{n}")).collect())
    }

    #[test]
    fn a_missing_disk_is_reported_and_a_missing_profile_does_not_pass() {
        assert_eq!(check(Some(8.0), disks(8)), ["pass within-limits"]);
        assert_eq!(check(Some(8.0), disks(7)), ["fail nvme-count-wrong isolate node"]);
        assert_eq!(check(None, disks(8)), ["not-applicable no-expectation"]);
        let failed = |kind| ProbeOutput::Failed(ProbeFailure::new(kind, "no"));
        assert_eq!(check(Some(8.0), failed(FailureKind::Missing)), ["fail nvme-count-wrong isolate node"]);
        assert_eq!(check(Some(8.0), failed(FailureKind::Denied)), ["inconclusive denied"]);
    }
}
