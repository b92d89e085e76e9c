//! kernel-settings: does the kernel have the settings that this site wants?
//!
//! What it does: compares kernel settings (sysctl) and words of the kernel command line with the configured ones.
//!
//! Why it matters: buffer sizes, huge pages, NUMA balancing and IOMMU settings determine the last tenth of performance,
//! and whether GPUDirect works at all. A node that was installed from another image has other settings.
//!
//! What to do: every finding is `monitor`.
//! - `setting-wrong`: run `sysctl -w NAME=VALUE`, and set it in /etc/sysctl.d for the next boot.
//! - `cmdline-wrong`: a word is missing in `/proc/cmdline`: add it to the boot loader's configuration, then reboot.
//!
//! Parameters: `sysctl`, such as `sysctl = { "kernel.numa_balancing" = 0, "net.core.rmem_max" = 16777216 }`, and
//! `cmdline`, such as `cmdline = ["iommu=pt"]`. Not applicable where neither is set.

use doctor_core::observation::{Entity, Event, FailureKind, ObservationBuilder, Metric, Observation};

use crate::{
    files::file_text,
    gpu::not_applicable,
    probe::{Probe, ProbeOutput},
    check_params::{invalid_param, string_list},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("kernel-settings", "kernel settings (sysctl) and command line");

const RULES: &str = r#"
rules = [
  { id = "kernel-settings-sysctl", check = "kernel-settings", event = "setting-wrong", reason = "setting-wrong",
    severity = "monitor", text = "{value}" },
  { id = "kernel-settings-cmdline", check = "kernel-settings", event = "cmdline-wrong", reason = "cmdline-wrong",
    severity = "monitor", text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("kernel_settings.rs")), rules: RULES, probes, interpret };

const SYSCTL: &str = "sysctl = { \"kernel.numa_balancing\" = 0 }";

/// Returns names and wanted values, ordered by name. Returns `None` if the setting is malformed or a name would lead
/// out of /proc/sys.
fn expected_settings(params: &Params) -> Option<Vec<(String, String)>> {
    let Some(table) = params.get("sysctl") else { return Some(Vec::new()) };
    let one = |(name, value): (&String, &toml::Value)| {
        let value = match value {
            toml::Value::String(text) => text.clone(),
            toml::Value::Integer(number) => number.to_string(),
            _ => return None,
        };
        let is_plain = name.split(['.', '/']).all(|part| !part.is_empty());
        is_plain.then(|| (name.clone(), value))
    };
    let mut all: Vec<_> = table.as_table()?.iter().map(one).collect::<Option<_>>()?;
    all.sort();
    Some(all)
}

/// Like sysctl(8): dots separate parts, unless the name contains slashes (interfaces with dots in their name).
fn sysctl_path(name: &str) -> String {
    let name = if name.contains('/') { name.to_owned() } else { name.replace('.', "/") };
    format!("/proc/sys/{name}")
}

fn probes(params: &Params) -> Vec<Probe> {
    let settings = expected_settings(params).unwrap_or_default().into_iter().map(|(name, _)| Probe::Read { path: sysctl_path(&name) });
    std::iter::once(Probe::read("/proc/cmdline")).chain(settings).collect()
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(params, outputs).unwrap_or_else(|instead| instead)
}

fn observe(params: &Params, outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let expected = expected_settings(params).ok_or_else(|| invalid_param("sysctl", SYSCTL))?;
    let args = string_list(params, "cmdline", "cmdline = [\"iommu=pt\"]")?.unwrap_or_default();
    let mut builder = ObservationBuilder::default();
    let mut right = 0.0;
    if !args.is_empty() {
        let line = file_text(outputs.first()).map_err(Observation::Failed)?;
        for arg in &args {
            if line.split_ascii_whitespace().any(|own| own == arg) {
                right += 1.0;
            } else {
                let text = format!("`{arg}` is not on the kernel's command line");
                builder.event(Event::seen("cmdline-wrong", Entity::node(), text));
            }
        }
    }
    for (index, (name, value)) in expected.iter().enumerate() {
        match file_text(outputs.get(index + 1)) {
            Ok(own) if values_equal(own, value) => right += 1.0,
            Ok(own) => {
                let text = format!("{name} is {}, expected {value}", own.trim());
                builder.event(Event::seen("setting-wrong", Entity::node(), text));
            }
            Err(failure) if failure.kind == FailureKind::Missing => {
                let text = format!("this kernel has no setting {name}; expected {value}");
                builder.event(Event::seen("setting-wrong", Entity::node(), text));
            }
            Err(failure) => builder.unreadable(failure),
        }
    }
    if expected.is_empty() && args.is_empty() {
        return Ok(not_applicable("not-configured", "neither `sysctl` nor `cmdline` is set"));
    }
    builder.metric(Metric::count("settings_right", Entity::node(), right));
    Ok(builder.build_or(Observation::measured(Vec::new(), Vec::new())))
}

/// Compares word by word: the kernel separates the numbers of one setting with tabs.
fn values_equal(actual: &str, expected: &str) -> bool {
    actual.split_ascii_whitespace().eq(expected.split_ascii_whitespace())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classify_fixture::classify_outputs_with;
    use doctor_core::observation::ProbeFailure;
    use proptest::prelude::*;

    fn check(params: &str, outputs: &[&str]) -> Vec<String> {
        let params: Params = toml::from_str(params).unwrap();
        let outputs: Vec<_> = outputs.iter().map(|&text| ProbeOutput::Text(text.to_owned())).collect();
        classify_outputs_with(&CHECK, &params, None, &outputs)
    }

    const LINE: &str = "BOOT_IMAGE=/vmlinuz root=/dev/vda iommu=pt quiet\n";

    #[test]
    fn a_setting_that_differs_is_reported() {
        let both = "cmdline = ['iommu=pt']\n\
            sysctl = { 'kernel.numa_balancing' = 0, 'net.ipv4.tcp_rmem' = '4096 87380 6291456' }";
        assert_eq!(check(both, &[LINE, "0\n", "4096\t87380\t6291456\n"]), ["pass within-limits"]);
        assert_eq!(check(both, &[LINE, "1\n", "4096\t87380\t6291456\n"]), ["fail setting-wrong monitor node"]);
        assert_eq!(check("cmdline = ['pci=noacs']", &[LINE]), ["fail cmdline-wrong monitor node"]);
        let params: Params = toml::from_str("sysctl = { 'net.ipv4.conf.eth0/5.x' = 1, 'vm.swappiness' = 1 }").unwrap();
        let paths: Vec<_> = probes(&params).into_iter().skip(1).collect();
        assert_eq!(paths[1], Probe::read("/proc/sys/vm/swappiness"));
    }

    #[test]
    fn missing_or_invalid_settings_do_not_pass() {
        assert_eq!(check("", &[LINE]), ["not-applicable not-configured"]);
        assert_eq!(check("sysctl = ['a']", &[LINE]), ["inconclusive unparseable"]);
        assert_eq!(check("sysctl = { 'vm..x' = 1 }", &[LINE]), ["inconclusive unparseable"]);
        assert_eq!(check("cmdline = 'quiet'", &[LINE]), ["inconclusive unparseable"]);
        let params: Params = toml::from_str("sysctl = { 'vm.x' = 1 }").unwrap();
        let line = || ProbeOutput::Text(LINE.to_owned());
        let failed = |kind| ProbeOutput::Failed(ProbeFailure::new(kind, "no"));
        let with = |kind| classify_outputs_with(&CHECK, &params, None, &[line(), failed(kind)]);
        assert_eq!(with(FailureKind::Missing), ["fail setting-wrong monitor node"]);
        assert_eq!(with(FailureKind::Denied), ["inconclusive denied"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,40}") {
            check("cmdline = ['a']\nsysctl = { 'vm.x' = 1 }", &[&text, &text]);
        }
    }
}
