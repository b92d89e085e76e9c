//! peermem: can network adapters access GPU memory directly?
//!
//! What it does: where a machine has NVIDIA GPUs and InfiniBand or RoCE adapters, looks for the kernel module
//! `nvidia_peermem`. NVIDIA's open kernel modules do not need it (the adapters use DMA-BUF), so it is expected with the
//! proprietary modules only.
//!
//! Why it matters: without either, NCCL copies everything through host memory. Multi-node jobs run at a third of their
//! speed, with no error but one line in NCCL's log (`GPU Direct RDMA Disabled`).
//!
//! What to do: `peermem-missing` is `monitor`. Run `modprobe nvidia_peermem`, and add a file in `/etc/modules-load.d`
//! to load it at every boot. If it does not load (`Invalid argument`), the RDMA stack was installed after the driver:
//! reinstall the driver.
//!
//! Parameters: `required = true` expects the module also with the open kernel modules, `required = false` never. Not
//! applicable without a GPU, without an RDMA adapter, or where DMA-BUF is used. AWS's EFA needs neither.

use doctor_core::observation::{Entity, Event, FailureKind, Metric, Observation, ProbeFailure};

use crate::{
    files::file_text,
    gpu::{require_gpus, not_applicable},
    probe::{Probe, ProbeOutput},
    check_params::invalid_param,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("peermem", "GPUDirect RDMA kernel module (nvidia_peermem)");

const RULES: &str = r#"
rules = [
  { id = "peermem-missing", check = "peermem", event = "peermem-missing", reason = "peermem-missing",
    severity = "monitor", text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("peermem.rs")), rules: RULES, probes, interpret };

fn probes(_: &Params) -> Vec<Probe> {
    vec![
        Probe::gpu(&["uuid"]),
        Probe::List { path: "/sys/class/infiniband".to_owned() },
        Probe::read("/proc/modules"),
        Probe::read("/proc/driver/nvidia/version"),
    ]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let required = match params.get("required").map(toml::Value::as_bool) {
        None => None,
        Some(Some(false)) => return not_applicable("not-configured", "not required here (required = false)"),
        Some(Some(true)) => Some(()),
        Some(None) => return invalid_param("required", "required = true"),
    };
    if let Err(instead) = require_gpus(outputs.first()) {
        return instead;
    }
    let cards = match outputs.get(1) {
        Some(ProbeOutput::Names(names)) => names.iter().filter(|name| name.starts_with("mlx")).count(),
        Some(ProbeOutput::Failed(failure)) if failure.kind == FailureKind::Missing => 0,
        Some(ProbeOutput::Failed(failure)) => return Observation::Failed(failure.clone()),
        _ => return could_not("the answer for /sys/class/infiniband is not a list"),
    };
    if cards == 0 {
        return not_applicable("no-rdma", "no InfiniBand or RoCE adapter on this node");
    }
    let modules = match file_text(outputs.get(2)) {
        Ok(modules) if modules.trim().is_empty() => return could_not("/proc/modules is empty"),
        Ok(modules) => modules,
        Err(failure) => return Observation::Failed(failure),
    };
    let loaded = modules.lines().any(|line| line.split_ascii_whitespace().next() == Some("nvidia_peermem"));
    if !loaded && required.is_none() {
        match file_text(outputs.get(3)) {
            Ok(version) if version.contains("Open Kernel Module") => {
                return not_applicable("dma-buf", "NVIDIA's open kernel modules use DMA-BUF instead of nvidia_peermem");
            }
            Ok(version) if version.contains("Kernel Module") => {}
            Ok(_) => return could_not("/proc/driver/nvidia/version does not name the kernel module"),
            Err(failure) => return Observation::Failed(failure),
        }
    }
    let metric = Metric::count("peermem_loaded", Entity::node(), f64::from(u8::from(loaded)));
    let missing = (!loaded).then(|| {
        let text = format!("nvidia_peermem not loaded: RDMA to GPUs is staged through host memory; RDMA adapters: {cards}");
        Event::seen("peermem-missing", Entity::node(), text)
    });
    Observation::measured(vec![metric], missing.into_iter().collect())
}

fn could_not(text: &str) -> Observation {
    Observation::Failed(ProbeFailure::new(FailureKind::Unparseable, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::tests::{answer, none, t},
        classify_fixture::classify_outputs_with,
    };
    use proptest::prelude::*;

    // Both made by hand, in the driver's format.
    const OPEN: &str =
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\nGCC version: gcc 12\n";
    const CLOSED: &str = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 02:58:42 UTC 2025\n";
    const LOADED: &str = "nvidia_peermem 16384 0 - Live 0x0\nib_uverbs 200704 3 nvidia_peermem,mlx5_ib, Live 0x0\n";
    const WITHOUT: &str = "nvidia_uvm 4939776 0 - Live 0x0\nib_uverbs 200704 2 mlx5_ib, Live 0x0\n";

    fn check(params: &str, cards: &[&str], modules: &str, version: &str) -> Vec<String> {
        let names = ProbeOutput::Names(cards.iter().map(|&card| card.to_owned()).collect());
        let text = |text: &str| ProbeOutput::Text(text.to_owned());
        let outputs = [answer(&[&[("uuid", t("GPU-0"))]]), names, text(modules), text(version)];
        classify_outputs_with(&CHECK, &toml::from_str(params).unwrap(), None, &outputs)
    }

    #[test]
    fn a_missing_module_is_reported_only_where_it_is_needed() {
        let line = ["fail peermem-missing monitor node"];
        assert_eq!(check("", &["mlx5_0"], LOADED, CLOSED), ["pass within-limits"]);
        assert_eq!(check("", &["mlx5_0"], WITHOUT, CLOSED), line);
        assert_eq!(check("", &["mlx5_0"], WITHOUT, OPEN), ["not-applicable dma-buf"]);
        assert_eq!(check("required = true", &["mlx5_0"], WITHOUT, OPEN), line);
        assert_eq!(check("required = false", &["mlx5_0"], WITHOUT, CLOSED), ["not-applicable not-configured"]);
        assert_eq!(check("", &["efa_0", "rdmap16s27"], WITHOUT, CLOSED), ["not-applicable no-rdma"]);
        // A name among another module's users is not the module.
        let user = "ib_uverbs 200704 3 nvidia_peermem,mlx5_ib, Live 0x0\n";
        assert_eq!(check("", &["mlx5_0"], user, CLOSED), line);
    }

    #[test]
    fn an_unreadable_input_does_not_pass() {
        assert_eq!(check("", &["mlx5_0"], "", CLOSED), ["inconclusive unparseable"]);
        assert_eq!(check("", &["mlx5_0"], WITHOUT, ""), ["inconclusive unparseable"]);
        assert_eq!(check("required = 1", &["mlx5_0"], LOADED, CLOSED), ["inconclusive unparseable"]);
        let missing = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Missing, "no"));
        let outputs = [none(), missing.clone(), missing.clone(), missing];
        assert_eq!(classify_outputs_with(&CHECK, &Params::new(), None, &outputs), ["not-applicable no-gpu"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(modules in "(.{0,30}\n){0,4}", version in ".{0,80}") {
            check("", &["mlx5_0"], &modules, &version);
        }
    }
}
