//! cpu-online: are processors offline?
//!
//! What it does: compares the processors that are present with those that are online.
//!
//! Why it matters: the kernel takes a core offline after too many machine checks, and virtual machine tools may leave
//! processors offline. The remaining processors do all the work.
//!
//! What to do: `cpu-offline` is `monitor`: `lscpu` shows which ones. `dmesg | grep -i 'mce\|smpboot'` shows why;
//! `echo 1 > /sys/devices/system/cpu/cpuN/online` brings one back. After machine checks, have the processor inspected.
//!
//! Where SMT is disabled (see `/sys/devices/system/cpu/smt/control`), the second threads are offline on purpose and are
//! not reported.

use doctor_core::observation::{Entity, Event, Metric, Observation};

use crate::{
    cpu_list::count,
    files::{file_text, unexpected_content},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("cpu-online", "CPUs that are offline");

const RULES: &str = r#"
rules = [
  { id = "cpu-online-offline", check = "cpu-online", event = "cpu-offline", reason = "cpu-offline",
    severity = "monitor", text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("cpu_online.rs")), rules: RULES, probes, interpret };

const FILES: [&str; 4] = [
    "/sys/devices/system/cpu/present",
    "/sys/devices/system/cpu/online",
    "/sys/devices/system/cpu/isolated",
    "/sys/devices/system/cpu/smt/control",
];

fn probes(_: &Params) -> Vec<Probe> {
    FILES.map(Probe::read).to_vec()
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let number = |index: usize| {
        let text = file_text(outputs.get(index)).map_err(Observation::Failed)?;
        count(text).ok_or_else(|| Observation::Failed(unexpected_content(FILES[index], text)))
    };
    let (present, online) = (number(0)?, number(1)?);
    if present == 0 || online == 0 {
        return Err(Observation::Failed(unexpected_content(FILES[0], "no CPU")));
    }
    // Kernels without this file have no isolated processors.
    let isolated = number(2).unwrap_or(0);
    let smt = file_text(outputs.get(3)).map_or("", str::trim);
    let offline = present.saturating_sub(online);
    // With SMT disabled, every second thread is offline, and no more.
    let meant = if matches!(smt, "off" | "forceoff") { present / 2 } else { 0 };
    let event = (offline > meant).then(|| {
        let text = format!("{} of {present} CPUs are offline", offline - meant);
        Event::seen("cpu-offline", Entity::node(), text)
    });
    let metric = |name, value: u64| Metric::count(name, Entity::node(), value as f64);
    let metrics =
        vec![metric("cpus_online", online), metric("cpus_offline", offline), metric("cpus_isolated", isolated)];
    Ok(Observation::measured(metrics, event.into_iter().collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classify_fixture::classify_outputs;
    use proptest::prelude::*;

    fn check(present: &str, online: &str, smt: &str) -> Vec<String> {
        classify_outputs(&CHECK, &[present, online, "\n", smt].map(|text| ProbeOutput::Text(text.to_owned())))
    }

    // Made by hand.
    #[test]
    fn offline_cpus_are_reported_unless_intended() {
        assert_eq!(check("0-7\n", "0-7\n", "on\n"), ["pass within-limits"]);
        assert_eq!(check("0-7\n", "0-2,4-7\n", "on\n"), ["fail cpu-offline monitor node"]);
        assert_eq!(check("0-7\n", "0-3\n", "off\n"), ["pass within-limits"]);
        assert_eq!(check("0-7\n", "0-2\n", "off\n"), ["fail cpu-offline monitor node"]);
        assert_eq!(check("", "", "on\n"), ["inconclusive unparseable"]);
        assert_eq!(check("0-7\n", "all\n", "on\n"), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(a in "[0-9,-]{0,12}", b in ".{0,12}") {
            check(&a, &b, &b);
            check(&a, &a, &b);
        }
    }
}
