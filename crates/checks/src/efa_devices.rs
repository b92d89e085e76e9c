//! efa-devices: is every EFA adapter on the bus usable?
//!
//! What it does: finds Amazon's EFA adapters on the PCI bus and checks that each has its driver and an RDMA device, and
//! that the kernel modules `efa` and `ib_uverbs` are loaded.
//!
//! Why it matters: NCCL uses the EFA adapters that it finds. If some are missing, jobs on this instance run with part
//! of the bandwidth or fall back to TCP, without an error message.
//!
//! What to do: `lspci -d 1d0f:` and `ibv_devices` on the node show the adapters and the RDMA devices. Both findings are
//! `reboot`, confirmed by a second failure.
//! - `efa-not-bound`: the adapter is on the bus and no driver is bound to it, or it has no RDMA device. Check
//!   `dmesg | grep efa`; a reboot (on AWS a stop and start) usually cures it, otherwise return the instance.
//! - `efa-module-missing`: run `modprobe efa`; if that fails, the EFA installer did not build the module for this
//!   kernel.
//!
//! During the first ten minutes after a boot, adapters that are not ready (usual on p5en) make the verdict inconclusive
//! instead of failed; the agent checks again at its next interval. Waiting within the check, as other tools do, would
//! block every check of a booting p5en, and a job's prolog, for as long, and would still raise a false alarm for an
//! adapter that needs longer. Not applicable where there is no EFA adapter. `efa-count` checks the number.

use doctor_core::observation::{Entity, Event, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure};

use crate::{
    files::{symlinks, directory_names},
    gpu::not_applicable,
    pci::{UEVENT, functions},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
    uptime::{self, uptime_seconds},
};

const SPEC: Spec = Spec::quick("efa-devices", "EFA adapters with driver and RDMA device");

const RULES: &str = r#"
rules = [
  { id = "efa-devices-not-bound", check = "efa-devices", event = "efa-not-bound", reason = "efa-not-bound",
    severity = "reboot", confirm = 2, text = "{entity}: {value}" },
  { id = "efa-devices-module", check = "efa-devices", event = "efa-module-missing", reason = "efa-module-missing",
    severity = "reboot", confirm = 2, text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("efa_devices.rs")), rules: RULES, probes, interpret };

/// How long adapters may take to initialise after a boot.
const GRACE_SECONDS: f64 = 600.0;

fn probes(_: &Params) -> Vec<Probe> {
    vec![
        Probe::glob(UEVENT),
        Probe::Links { pattern: "/sys/class/infiniband/*/device".to_owned() },
        Probe::List { path: "/sys/module".to_owned() },
        Probe::read(uptime::PATH),
    ]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let mut builder = ObservationBuilder::default();
    let all = functions(outputs.first(), &mut builder)?;
    let efa: Vec<_> = all.iter().filter(|function| function.is_efa()).collect();
    if efa.is_empty() {
        return Ok(builder.build_or(not_applicable("no-efa", "no EFA adapter on the PCI bus")));
    }
    let rdma = symlinks(outputs.get(1))?;
    let modules = directory_names(outputs.get(2)).map_err(Observation::Failed)?;
    let seconds = uptime_seconds(outputs.get(3)).map_err(Observation::Failed)?;
    let mut events = Vec::new();
    for name in ["efa", "ib_uverbs"].iter().filter(|name| !modules.iter().any(|module| module == **name)) {
        let text = format!("the kernel module {name} is not loaded");
        events.push(Event::seen("efa-module-missing", Entity::node(), text));
    }
    let mut usable = 0.0;
    for function in &efa {
        let has_rdma = rdma.iter().any(|(_, target)| target.rsplit('/').next() == Some(function.bus));
        match (function.driver, has_rdma) {
            (Some("efa"), true) => usable += 1.0,
            (Some("efa"), false) => {
                events.push(Event::seen("efa-not-bound", function.entity(), "it has no RDMA device"));
            }
            (driver, _) => {
                let text = format!("its driver is {}, expected efa", driver.unwrap_or("none"));
                events.push(Event::seen("efa-not-bound", function.entity(), text));
            }
        }
    }
    builder.metric(Metric::count("efa_usable", Entity::node(), usable));
    if seconds < GRACE_SECONDS && !events.is_empty() {
        let text = format!(
            "{usable} of {} EFA adapters are ready {seconds:.0} s after boot; some take minutes",
            efa.len()
        );
        return Ok(Observation::Failed(ProbeFailure::new(FailureKind::Empty, text)));
    }
    events.into_iter().for_each(|event| builder.event(event));
    Ok(builder.build_or(not_applicable("no-efa", "no EFA adapter on the PCI bus")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::tests::found, classify_fixture::classify_outputs, pci::tests::uevent};
    use proptest::prelude::*;

    /// Two adapters with these drivers; the first has its RDMA device. Made by hand.
    fn check(drivers: &[Option<&str>], rdma: usize, modules: &[&str], uptime: &str) -> Vec<String> {
        let path = |n: usize| format!("/sys/bus/pci/devices/0000:0{n}:00.0/uevent");
        let files: Vec<_> =
            drivers.iter().enumerate().map(|(n, driver)| (path(n), uevent("28000", "1D0F:EFA2", *driver))).collect();
        let files: Vec<_> = files.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
        let link = |n: usize| (format!("/sys/class/infiniband/efa_{n}/device"), format!("/sys/devices/0000:0{n}:00.0"));
        let outputs = [
            found(&files),
            ProbeOutput::Links((0..rdma).map(link).collect()),
            ProbeOutput::Names(modules.iter().map(|&name| name.to_owned()).collect()),
            ProbeOutput::Text(uptime.to_owned()),
        ];
        classify_outputs(&CHECK, &outputs)
    }

    const BOTH: [Option<&str>; 2] = [Some("efa"), Some("efa")];
    const MODULES: [&str; 3] = ["efa", "ib_core", "ib_uverbs"];
    const LONG: &str = "86400.12 1000.00\n";

    #[test]
    fn an_adapter_without_driver_is_reported() {
        assert_eq!(check(&BOTH, 2, &MODULES, LONG), ["pass within-limits"]);
        assert_eq!(check(&[Some("efa"), None], 1, &MODULES, LONG), ["fail efa-not-bound reboot nic:0000:01:00.0"]);
        assert_eq!(check(&BOTH, 1, &MODULES, LONG), ["fail efa-not-bound reboot nic:0000:01:00.0"]);
        assert_eq!(check(&BOTH, 2, &["efa"], LONG), ["fail efa-module-missing reboot node"]);
    }

    #[test]
    fn late_initialisation_of_p5en_is_no_false_alarm_at_bootstrap() {
        assert_eq!(check(&[Some("efa"), None], 1, &MODULES, "120.00 1.00\n"), ["inconclusive empty"]);
        assert_eq!(check(&BOTH, 2, &MODULES, "120.00 1.00\n"), ["pass within-limits"]);
    }

    #[test]
    fn not_applicable_without_efa() {
        assert_eq!(check(&[], 0, &MODULES, LONG), ["not-applicable no-efa"]);
        assert_eq!(check(&BOTH, 2, &MODULES, "soon"), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,20}") {
            check(&BOTH, 2, &MODULES, &text);
        }
    }
}
