//! cpu-governor: may the processors run at full speed?
//!
//! What it does: reads the frequency governor of each cpufreq policy (group of processors).
//!
//! Why it matters: under a power-saving governor, a core that feeds a GPU wakes slowly. Launch latency and network
//! processing suffer on this node only, and every job that spans the node waits for it.
//!
//! What to do: `governor-slow` is `monitor`: run `cpupower frequency-set -g performance`, and set it in the site's boot
//! configuration. `cpupower frequency-info` shows what the driver offers.
//!
//! Parameters: `accept`, the governors that this site accepts, `["performance"]` by default. Some sites accept
//! `schedutil`, or `powersave` of intel_pstate.
//!
//! Not applicable where the kernel does not control frequencies, as on most virtual machines.

use std::collections::BTreeMap;

use doctor_core::observation::{Entity, Event, ObservationBuilder, Metric, Observation};

use crate::{
    files::glob_files,
    gpu::not_applicable,
    probe::{Probe, ProbeOutput},
    check_params::string_list,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("cpu-governor", "CPU frequency governor");

const RULES: &str = r#"
rules = [
  { id = "cpu-governor-slow", check = "cpu-governor", event = "governor-slow", reason = "governor-slow",
    severity = "monitor", text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("cpu_governor.rs")), rules: RULES, probes, interpret };

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::glob("/sys/devices/system/cpu/cpufreq/policy*/scaling_governor")]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(params, outputs).unwrap_or_else(|instead| instead)
}

fn observe(params: &Params, outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let accepted = string_list(params, "accept", "accept = [\"performance\", \"schedutil\"]")?;
    let accepted = accepted.unwrap_or_else(|| vec!["performance".to_owned()]);
    let mut builder = ObservationBuilder::default();
    let mut governors: BTreeMap<&str, u32> = BTreeMap::new();
    for file in glob_files(outputs.first())? {
        match &file.text {
            Ok(text) => *governors.entry(text.trim()).or_default() += 1,
            Err(failure) => builder.unreadable(failure.clone()),
        }
    }
    let all: u32 = governors.values().sum();
    for (governor, count) in governors.iter().filter(|(name, _)| !accepted.iter().any(|own| own == **name)) {
        let text = format!("{count} of {all} CPU frequency policies use the governor {governor}");
        builder.event(Event::seen("governor-slow", Entity::node(), text));
    }
    if all > 0 {
        builder.metric(Metric::count("frequency_groups", Entity::node(), f64::from(all)));
    }
    Ok(builder.build_or(not_applicable("no-cpufreq", "the kernel does not control the CPU frequency on this node")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        files::tests::found,
        classify_fixture::{classify_outputs, classify_outputs_with},
    };

    const A: &str = "/sys/devices/system/cpu/cpufreq/policy0/scaling_governor";
    const B: &str = "/sys/devices/system/cpu/cpufreq/policy1/scaling_governor";

    // Made by hand.
    #[test]
    fn a_power_saving_governor_is_reported_once() {
        assert_eq!(classify_outputs(&CHECK, &[found(&[(A, "performance\n"), (B, "performance\n")])]), ["pass within-limits"]);
        let slow = [found(&[(A, "performance\n"), (B, "powersave\n")])];
        assert_eq!(classify_outputs(&CHECK, &slow), ["fail governor-slow monitor node"]);
        let with = |text: &str| classify_outputs_with(&CHECK, &toml::from_str(text).unwrap(), None, &slow);
        assert_eq!(with("accept = ['performance', 'powersave']"), ["pass within-limits"]);
        assert_eq!(with("accept = 'powersave'"), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[found(&[])]), ["not-applicable no-cpufreq"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }
}
