//! kernel-modules: are the kernel modules that this site needs loaded?
//!
//! What it does: looks for each configured module among those that are loaded or built in.
//!
//! Why it matters: after a kernel update, modules that are built on the node (GPUDirect's `nvidia_peermem`, `gdrdrv`,
//! file systems) are the ones that are missing. Jobs still run, over a slower path.
//!
//! What to do: `module-missing` is `reboot`, confirmed by a second failure: `modprobe MODULE` shows why it is missing.
//! If it is not built for the running kernel (`uname -r`, `dkms status`), build it; if another kernel than the intended
//! one is running, reboot.
//!
//! Parameters: `modules`, such as `modules = ["nvidia_peermem", "gdrdrv"]`. Not applicable where none is configured. A
//! module that is built into the kernel and has no parameters is not listed by the kernel and cannot be checked.

use doctor_core::observation::{Entity, Event, FailureKind, Metric, Observation, ProbeFailure};

use crate::{
    files::directory_names,
    gpu::not_applicable,
    probe::{Probe, ProbeOutput},
    check_params::string_list,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("kernel-modules", "kernel modules that should be loaded");

const RULES: &str = r#"
rules = [
  { id = "kernel-modules-missing", check = "kernel-modules", event = "module-missing", reason = "module-missing",
    severity = "reboot", confirm = 2, text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("kernel_modules.rs")), rules: RULES, probes, interpret };

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::List { path: "/sys/module".to_owned() }]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(params, outputs).unwrap_or_else(|instead| instead)
}

fn observe(params: &Params, outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let Some(required) = string_list(params, "modules", "modules = [\"nvidia_peermem\"]")? else {
        return Ok(not_applicable("not-configured", "`modules` is not set"));
    };
    let loaded = directory_names(outputs.first()).map_err(Observation::Failed)?;
    if loaded.is_empty() {
        return Err(Observation::Failed(ProbeFailure::new(FailureKind::Empty, "/sys/module lists no module")));
    }
    // The kernel writes an underscore where users may write a hyphen.
    let missing: Vec<_> = required.iter().filter(|name| !loaded.contains(&name.replace('-', "_"))).collect();
    let event = |name: &&String| {
        Event::seen("module-missing", Entity::node(), format!("the kernel module {name} is not loaded"))
    };
    let loaded_count = (required.len() - missing.len()) as f64;
    let metric = Metric::count("modules_loaded", Entity::node(), loaded_count);
    Ok(Observation::measured(vec![metric], missing.iter().map(event).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classify_fixture::{classify_outputs, classify_outputs_with};

    fn check(modules: &str, loaded: &[&str]) -> Vec<String> {
        let params: Params = toml::from_str(&format!("modules = {modules}")).unwrap();
        let names = ProbeOutput::Names(loaded.iter().map(|&name| name.to_owned()).collect());
        classify_outputs_with(&CHECK, &params, None, &[names])
    }

    #[test]
    fn a_missing_module_is_reported_in_either_spelling() {
        assert_eq!(check("['nvidia-peermem']", &["nvidia_peermem", "ext4"]), ["pass within-limits"]);
        assert_eq!(check("['nvidia_peermem', 'ext4']", &["ext4"]), ["fail module-missing reboot node"]);
        assert_eq!(check("['ext4']", &[]), ["inconclusive empty"]);
        assert_eq!(check("'ext4'", &["ext4"]), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["not-applicable not-configured"]);
    }
}
