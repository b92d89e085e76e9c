//! efa-provider: can programs use the EFA adapters?
//!
//! What it does: on a machine with EFA adapters, looks for libfabric in the directories of Amazon's installer, and for
//! one device node in /dev/infiniband for each adapter.
//!
//! Why it matters: even if the adapter, its driver and its RDMA device are healthy, a program may find no `efa`
//! provider and fall back to TCP.
//!
//! What to do:
//! - `uverbs-missing` is `reboot`, confirmed by a second failure: fewer `/dev/infiniband/uverbs*` than adapters. Try
//!   `modprobe ib_uverbs` and `udevadm trigger`; a reboot restores them.
//! - `libfabric-missing` is `monitor`: run the EFA installer, then `fi_info -p efa` must list the adapters. If all jobs
//!   have it in their containers, the host needs none: set `library = false`.
//!
//! Parameters: `library`, whether the host should have libfabric, `true` by default. Not applicable without EFA.

use doctor_core::observation::{Entity, Event, ObservationBuilder, Metric, Observation};

use crate::{
    files::directory_names,
    gpu::not_applicable,
    pci::{UEVENT, functions},
    probe::{Probe, ProbeOutput},
    check_params::invalid_param,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("efa-provider", "libfabric and device nodes for EFA");

const RULES: &str = r#"
rules = [
  { id = "efa-provider-uverbs", check = "efa-provider", event = "uverbs-missing", reason = "uverbs-missing",
    severity = "reboot", confirm = 2, text = "{value}" },
  { id = "efa-provider-library", check = "efa-provider", event = "libfabric-missing", reason = "libfabric-missing",
    severity = "monitor", text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("efa_provider.rs")), rules: RULES, probes, interpret };

const LIBRARY_DIRS: [&str; 2] = ["/opt/amazon/efa/lib64", "/opt/amazon/efa/lib"];

fn probes(_: &Params) -> Vec<Probe> {
    let list = |path: &str| Probe::List { path: path.to_owned() };
    vec![Probe::glob(UEVENT), list("/dev/infiniband"), list(LIBRARY_DIRS[0]), list(LIBRARY_DIRS[1])]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(params, outputs).unwrap_or_else(|instead| instead)
}

fn observe(params: &Params, outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let wants_library = match params.get("library") {
        None => true,
        Some(value) => value.as_bool().ok_or_else(|| invalid_param("library", "library = false"))?,
    };
    let mut builder = ObservationBuilder::default();
    let adapters = functions(outputs.first(), &mut builder)?.iter().filter(|function| function.is_efa()).count();
    let none = not_applicable("no-efa", "no EFA adapter on the PCI bus");
    if adapters == 0 {
        return Ok(builder.build_or(none));
    }
    match directory_names(outputs.get(1)) {
        Ok(nodes) => {
            let nodes = nodes.iter().filter(|name| name.starts_with("uverbs")).count();
            builder.metric(Metric::count("uverbs_nodes", Entity::node(), nodes as f64));
            if nodes < adapters {
                let text = format!("{nodes} device nodes /dev/infiniband/uverbs* for {adapters} EFA adapters");
                builder.event(Event::seen("uverbs-missing", Entity::node(), text));
            }
        }
        Err(failure) => builder.unreadable(failure),
    }
    if wants_library {
        let directories = [directory_names(outputs.get(2)), directory_names(outputs.get(3))];
        let is_there = |names: &Result<&[String], _>| {
            names.as_ref().is_ok_and(|names| names.iter().any(|name| name.starts_with("libfabric.so")))
        };
        if !directories.iter().any(is_there) {
            match directories.into_iter().find_map(Result::err) {
                Some(failure) => builder.unreadable(failure),
                None => {
                    let text = format!("libfabric not found in {} or {}", LIBRARY_DIRS[0], LIBRARY_DIRS[1]);
                    builder.event(Event::seen("libfabric-missing", Entity::node(), text));
                }
            }
        }
    }
    Ok(builder.build_or(none))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        files::tests::found,
        classify_fixture::{classify_outputs, classify_outputs_with},
        pci::tests::uevent,
    };
    use doctor_core::observation::{FailureKind, ProbeFailure};

    fn missing() -> ProbeOutput {
        ProbeOutput::Failed(ProbeFailure::new(FailureKind::Missing, "no such directory"))
    }

    fn outputs(adapter: &str, nodes: &[&str], library: ProbeOutput) -> [ProbeOutput; 4] {
        let uevent = uevent("28000", adapter, Some("efa"));
        let nodes = ProbeOutput::Names(nodes.iter().map(|&name| name.to_owned()).collect());
        [found(&[("/sys/bus/pci/devices/0000:01:00.0/uevent", &uevent)]), nodes, library, missing()]
    }

    fn library() -> ProbeOutput {
        ProbeOutput::Names(vec!["libfabric.so.1".to_owned()])
    }

    #[test]
    fn missing_device_files_and_a_missing_library_are_reported() {
        let efa = "1D0F:EFA2";
        assert_eq!(classify_outputs(&CHECK, &outputs(efa, &["uverbs0", "rdma_cm"], library())), ["pass within-limits"]);
        assert_eq!(classify_outputs(&CHECK, &outputs(efa, &["rdma_cm"], library())), ["fail uverbs-missing reboot node"]);
        let bare = outputs(efa, &["uverbs0"], missing());
        assert_eq!(classify_outputs(&CHECK, &bare), ["fail libfabric-missing monitor node"]);
        let params: Params = toml::from_str("library = false").unwrap();
        assert_eq!(classify_outputs_with(&CHECK, &params, None, &bare), ["pass within-limits"]);
        let params: Params = toml::from_str("library = 'no'").unwrap();
        assert_eq!(classify_outputs_with(&CHECK, &params, None, &bare), ["inconclusive unparseable"]);
    }

    #[test]
    fn not_applicable_without_efa() {
        assert_eq!(classify_outputs(&CHECK, &outputs("15B3:1021", &[], missing())), ["not-applicable no-efa"]);
        let denied = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "denied"));
        assert_eq!(classify_outputs(&CHECK, &outputs("1D0F:EFA2", &["uverbs0"], denied)), ["inconclusive denied"]);
    }
}
