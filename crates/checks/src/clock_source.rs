//! clock-source: does the kernel use a fast clock source?
//!
//! What it does: reads the kernel's current and available clock sources.
//!
//! Why it matters: when the kernel finds the processor's time-stamp counter unstable, it falls back to a clock on the
//! board (`hpet`, `acpi_pm`). Reading the time then takes microseconds instead of nanoseconds. Programs that read it
//! often (NCCL, profilers, anything that logs) slow down considerably, one node delays the whole job, and nothing else
//! looks wrong.
//!
//! What to do: `doctor why NODE` names the clock source. The kernel log shows why it changed
//! (`clocksource: timekeeping watchdog on CPU…`); firmware and hypervisor settings are the usual cause. A reboot
//! restores the fast clock source until the cause recurs. The finding `clock-source-slow` is `monitor`: the node
//! computes correctly.
//!
//! Parameters: `accept`, a list of further clock sources that this site accepts.

use doctor_core::{
    observation::{Entity, Event, FailureKind, Metric, Observation, ProbeFailure},
};

use crate::{
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("clock-source", "clock source of the kernel");

const RULES: &str = r#"
[[rules]]
id = "clock-source-slow"
check = "clock-source"
event = "clock-source-slow"
severity = "monitor"
reason = "clock-source-slow"
text = "{value}"
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("clock_source.rs")), rules: RULES, probes, interpret };

/// Clock sources that a program reads without entering the kernel: of x86, Arm and POWER, and of three hypervisors.
const FAST_CLOCK_SOURCES: [&str; 6] = ["tsc", "arch_sys_counter", "timebase", "kvm-clock", "hyperv_clocksource_tsc_page", "xen"];

fn probes(_: &Params) -> Vec<Probe> {
    let of = |name: &str| Probe::Read { path: format!("/sys/devices/system/clocksource/clocksource0/{name}") };
    vec![of("current_clocksource"), of("available_clocksource")]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let could_not = |kind, text: &str| Observation::Failed(ProbeFailure::new(kind, text));
    let (current, available) = match outputs {
        [ProbeOutput::Text(current), ProbeOutput::Text(available)] => (current.trim(), available),
        [ProbeOutput::Failed(failure), _] | [_, ProbeOutput::Failed(failure)] => {
            return Observation::Failed(failure.clone());
        }
        _ => return could_not(FailureKind::Unparseable, "the list of clock sources is not text"),
    };
    let available: Vec<_> = available.split_ascii_whitespace().collect();
    if current.is_empty() || available.is_empty() {
        return could_not(FailureKind::Empty, "the kernel reports no clock source");
    }
    if !available.contains(&current) {
        return could_not(FailureKind::Unparseable, "the current clock source is not among the available ones");
    }
    let accepted = params.get("accept").and_then(toml::Value::as_array).into_iter().flatten();
    let is_fast = FAST_CLOCK_SOURCES.contains(&current) || accepted.filter_map(toml::Value::as_str).any(|name| name == current);
    let slow = (!is_fast).then(|| {
        let text = format!("clock source is {current}; available: {}", available.join(", "));
        Event::seen("clock-source-slow", Entity::node(), text)
    });
    let count = u32::try_from(available.len()).unwrap_or(u32::MAX);
    let metric = Metric::count("clocks_available", Entity::node(), f64::from(count));
    Observation::measured(vec![metric], slow.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn observe(current: &str, available: &str) -> Observation {
        let text = |text: &str| ProbeOutput::Text(text.to_owned());
        interpret(&Params::new(), &[text(current), text(available)])
    }

    fn is_slow(observation: Observation) -> bool {
        match observation {
            Observation::Measured { events, .. } => !events.is_empty(),
            other => panic!("{other:?}"),
        }
    }

    // The first is captured: Linux 6.18, virtual machine, 2026-11-15. The others are made by hand.
    #[test]
    fn an_hpet_or_acpi_clock_source_is_slow() {
        assert!(!is_slow(observe("tsc\n", "tsc kvm-clock \n")));
        assert!(!is_slow(observe("arch_sys_counter\n", "arch_sys_counter \n")));
        assert!(is_slow(observe("hpet\n", "hpet acpi_pm \n")));
        assert!(is_slow(observe("acpi_pm\n", "tsc acpi_pm \n")));
    }

    #[test]
    fn a_site_can_accept_another_clock_source() {
        let params = [("accept".to_owned(), toml::Value::Array(vec!["hpet".into()]))].into();
        let text = |text: &str| ProbeOutput::Text(text.to_owned());
        assert!(!is_slow(interpret(&params, &[text("hpet\n"), text("hpet acpi_pm\n")])));
    }

    #[test]
    fn an_unnamed_clock_source_is_not_accepted() {
        for (current, available) in [("", ""), ("tsc\n", ""), ("", "tsc\n"), ("tsc\n", "hpet\n")] {
            assert!(matches!(observe(current, available), Observation::Failed(_)), "{current:?} {available:?}");
        }
        let missing = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Missing, "no /sys"));
        let outputs = [missing.clone(), missing];
        assert!(
            matches!(interpret(&Params::new(), &outputs), Observation::Failed(f) if f.kind == FailureKind::Missing)
        );
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(current in ".{0,40}", available in ".{0,80}") {
            observe(&current, &available);
        }
    }
}
