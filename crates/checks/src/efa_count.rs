//! efa-count: does the node have as many EFA adapters as its instance type?
//!
//! What it does: counts Amazon's EFA adapters on the PCI bus that are bound to their driver, and compares the number
//! with the machine profile (p5 and p5e 32, p5en 16, p4d 4, p6-b200 8).
//!
//! Why it matters: a missing adapter costs its share of the bandwidth, and a job that spans this instance runs at its
//! pace.
//!
//! What to do: `efa-count-wrong` is `isolate`, confirmed by a second failure. Compare `lspci -d 1d0f:` with the
//! instance type, and with how the instance was launched: interfaces of type EFA are defined at launch, and a launch
//! template may have fewer. If the template is right, stop and start or replace the instance.
//!
//! Without `efa_devices` in the profile the count is compared with other nodes of the type and with this node's accepted
//! past, at severity `monitor`; without those it is not judged (`no-expectation`), and not applicable (`no-hardware`)
//! where there is none. Inconclusive while adapters may still be initialising, in the first ten minutes after a boot.

use doctor_core::observation::{Entity, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure};

use crate::{
    pci::{UEVENT, functions},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
    uptime::{self, uptime_seconds},
};

const SPEC: Spec = Spec::quick("efa-count", "number of EFA adapters");

const RULES: &str = r#"
rules = [
  { id = "efa-count-wrong", check = "efa-count", metric = "efa_devices", not_as_profile = true,
    reason = "efa-count-wrong", severity = "isolate", confirm = 2,
    text = "{value} usable EFA adapters, expected {limit} on this machine type" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("efa_count.rs")), rules: RULES, probes, interpret };

const GRACE_SECONDS: f64 = 600.0;

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::glob(UEVENT), Probe::read(uptime::PATH)]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let mut builder = ObservationBuilder::default();
    let all = functions(outputs.first(), &mut builder)?;
    let uptime = uptime_seconds(outputs.get(1)).map_err(Observation::Failed)?;
    let efa = all.iter().filter(|function| function.is_efa());
    let (bound, waiting): (Vec<_>, Vec<_>) = efa.partition(|function| function.driver == Some("efa"));
    if !waiting.is_empty() && uptime < GRACE_SECONDS {
        let text = format!("{} EFA adapters have no driver yet, {uptime:.0} s after boot", waiting.len());
        return Err(Observation::Failed(ProbeFailure::new(FailureKind::Empty, text)));
    }
    builder.metric(Metric::count("efa_devices", Entity::node(), bound.len() as f64));
    Ok(builder.build_or(Observation::measured(Vec::new(), Vec::new())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::tests::found, classify_fixture::classify_outputs_with, pci::tests::uevent};
    use doctor_core::{ids::Sku, profile::Profile};

    fn check(expected: Option<f64>, drivers: &[Option<&str>], uptime: &str) -> Vec<String> {
        let expect = expected.map(|count| ("efa_devices".to_owned(), count.into())).into_iter().collect();
        let profile = Profile { sku: Sku::new("p4d").unwrap(), version: 1, expect };
        let path = |n: usize| format!("/sys/bus/pci/devices/0000:0{n}:00.0/uevent");
        let files: Vec<_> =
            drivers.iter().enumerate().map(|(n, driver)| (path(n), uevent("28000", "1D0F:EFA1", *driver))).collect();
        let files: Vec<_> = files.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
        let outputs = [found(&files), ProbeOutput::Text(uptime.to_owned())];
        classify_outputs_with(&CHECK, &Params::new(), Some(&profile), &outputs)
    }

    const EFA: Option<&str> = Some("efa");

    #[test]
    fn a_missing_adapter_is_reported() {
        assert_eq!(check(Some(2.0), &[EFA, EFA], "9999.0 1"), ["pass within-limits"]);
        assert_eq!(check(Some(2.0), &[EFA, None], "9999.0 1"), ["fail efa-count-wrong isolate node"]);
        assert_eq!(check(Some(4.0), &[], "9999.0 1"), ["fail efa-count-wrong isolate node"]);
    }

    #[test]
    fn a_missing_profile_or_a_check_soon_after_boot_does_not_pass() {
        assert_eq!(check(None, &[EFA, EFA], "9999.0 1"), ["not-applicable no-expectation"]);
        assert_eq!(check(Some(2.0), &[EFA, None], "60.5 1"), ["inconclusive empty"]);
        assert_eq!(check(Some(2.0), &[EFA, EFA], "soon"), ["inconclusive unparseable"]);
    }
}
