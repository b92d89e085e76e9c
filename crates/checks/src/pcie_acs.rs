//! pcie-acs: may GPUs communicate with each other and with the network directly over PCIe?
//!
//! What it does: on bare metal with GPUs, reads from the configuration space of every PCIe bridge above a GPU whether
//! Access Control Services redirect peer traffic to the processor.
//!
//! Why it matters: with ACS redirection, GPUDirect RDMA and peer copies go up to the root and down again: a fraction of
//! the bandwidth, and on some machines a hang. Firmware updates and a changed IOMMU setting enable it silently.
//!
//! What to do: `acs-redirects` is `monitor`: the node computes correctly, but slowly. `lspci -vvv -s BUS | grep ACSCtl`
//! shows `ReqRedir+` or `CmpltRedir+`. Disable it in the firmware's setup, boot with `iommu=pt` if virtual machines are
//! not used, or clear it after each boot with `setpci -s BUS ECAP_ACS+0x6.w=0000` for every bridge named.
//!
//! A hypervisor needs ACS: not applicable in virtual machines, nor without a GPU. Inconclusive without the permission
//! to read the whole configuration space (root).

use doctor_core::{
    observation::{Entity, EntityKind, Event, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure},
    time::Span,
};

use crate::{
    files::{glob_files, symlinks, match_pattern_exact, file_text},
    gpu::{no_gpu, not_applicable},
    pci::{DEVICES, Kind, UEVENT, parent_bridges, functions},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

// It changes only with a boot, and each configuration space has four kilobytes.
const SPEC: Spec = Spec::quick("pcie-acs", "ACS redirection on PCIe bridges").every(Span::hours(1));

const RULES: &str = r#"
rules = [
  { id = "pcie-acs-redirects", check = "pcie-acs", event = "acs-redirects", reason = "acs-redirects",
    severity = "monitor", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("pcie_acs.rs")), rules: RULES, probes, interpret };

/// Every bus but the first has a bridge as its device.
const BRIDGES: &str = "/sys/class/pci_bus/*/device";
const CONFIG: &str = "/sys/class/pci_bus/*/device/config";

fn probes(_: &Params) -> Vec<Probe> {
    vec![
        Probe::glob(UEVENT),
        Probe::Links { pattern: DEVICES.to_owned() },
        Probe::read("/proc/cpuinfo"),
        Probe::Links { pattern: BRIDGES.to_owned() },
        Probe::Bytes { pattern: CONFIG.to_owned(), most: 4096 },
    ]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let mut builder = ObservationBuilder::default();
    let all = functions(outputs.first(), &mut builder)?;
    let gpus: Vec<_> = all.iter().filter(|function| function.kind() == Kind::Gpu).collect();
    if gpus.is_empty() {
        return Ok(builder.build_or(no_gpu()));
    }
    let cpus = file_text(outputs.get(2)).map_err(Observation::Failed)?;
    if cpus.lines().any(|line| line.starts_with("flags") && line.split(' ').any(|flag| flag == "hypervisor")) {
        return Ok(not_applicable("virtual-machine", "virtual machine: the hypervisor controls ACS"));
    }
    let (devices, bridges) = (symlinks(outputs.get(1))?, symlinks(outputs.get(3))?);
    let configs = glob_files(outputs.get(4))?;
    let above_gpus: Vec<&str> = devices
        .iter()
        .filter(|(path, _)| match_pattern_exact(DEVICES, path).is_some_and(|[bus]| gpus.iter().any(|gpu| gpu.bus == bus)))
        .flat_map(|(_, target)| parent_bridges(target))
        .collect();
    let mut seen = 0.0;
    for (path, target) in bridges {
        let (Some([child]), Some(bus)) = (match_pattern_exact(BRIDGES, path), target.rsplit('/').next()) else { continue };
        if !above_gpus.contains(&bus) {
            continue;
        }
        let config = configs.iter().find(|file| match_pattern_exact(CONFIG, &file.path) == Some([child]));
        let read = match config.map(|file| &file.text) {
            Some(Ok(hexadecimal)) => ConfigSpace::parse(hexadecimal).and_then(|config| config.acs_control()),
            Some(Err(failure)) => Err(failure.clone()),
            None => Err(ProbeFailure::new(FailureKind::Missing, format!("{bus} has no configuration space in /sys"))),
        };
        match read {
            Ok(control) => {
                seen += 1.0;
                if let Some(event) = control.and_then(|control| redirect_event(bus, control)) {
                    builder.event(event);
                }
            }
            Err(failure) => builder.unreadable(failure),
        }
    }
    if seen > 0.0 {
        builder.metric(Metric::count("bridges_above_gpus", Entity::node(), seen));
    }
    Ok(builder.build_or(not_applicable("no-bridge", "no GPU of this node is below a PCIe bridge")))
}

/// Reports redirection of requests or completions, which sends peer traffic to the root. Upstream forwarding is only
/// listed.
fn redirect_event(bus: &str, control: u16) -> Option<Event> {
    let bits = [(1 << 2, "ReqRedir"), (1 << 3, "CmpltRedir"), (1 << 4, "UpstreamFwd")];
    let on: Vec<_> = bits.iter().filter(|(bit, _)| control & bit != 0).map(|(_, name)| *name).collect();
    (control & 0b1100 != 0).then(|| {
        let text = format!("ACS redirects peer-to-peer traffic to the CPU: ACSCtl {control:#06x} ({})", on.join(", "));
        Event::seen("acs-redirects", Entity::new(EntityKind::Link, bus), text)
    })
}

/// A device's configuration space.
struct ConfigSpace(Vec<u8>);

impl ConfigSpace {
    fn parse(hexadecimal: &str) -> Result<Self, ProbeFailure> {
        let digits: Option<Vec<u8>> =
            hexadecimal.trim().chars().map(|digit| digit.to_digit(16).and_then(|n| u8::try_from(n).ok())).collect();
        let bytes =
            digits.map(|digits| digits.chunks(2).map(|two| two.iter().fold(0, |all, one| all << 4 | one)).collect());
        let bytes: Vec<u8> = bytes
            .ok_or_else(|| ProbeFailure::new(FailureKind::Unparseable, "configuration space is not hexadecimal"))?;
        if bytes.len() <= 256 {
            // Users other than root can read 64 bytes; PCIe extended capabilities begin at 256.
            let text =
                format!("only {} bytes of configuration space are readable, ACS is beyond 256: run as root", bytes.len());
            return Err(ProbeFailure::new(FailureKind::Denied, text));
        }
        Ok(Self(bytes))
    }

    fn word(&self, at: usize) -> Option<u16> {
        Some(u16::from_le_bytes([*self.0.get(at)?, *self.0.get(at + 1)?]))
    }

    /// Returns the control register of Access Control Services, or `None` if the bridge has none. Capabilities are a
    /// list from 0x100 on: each begins with its id, and has the offset of the next in the upper twelve bits.
    fn acs_control(&self) -> Result<Option<u16>, ProbeFailure> {
        const ACS: u16 = 0x000d;
        let mut at = 0x100;
        // There is room for fewer than a thousand; a longer list is a cycle.
        for _ in 0..960 {
            let (Some(id), Some(rest)) = (self.word(at), self.word(at + 2)) else {
                let text = format!("the capability list points beyond the bytes read, to {at:#x}");
                return Err(ProbeFailure::new(FailureKind::Unparseable, text));
            };
            if id == ACS {
                return Ok(self.word(at + 6));
            }
            at = usize::from(rest >> 4);
            if at < 0x100 {
                return Ok(None);
            }
        }
        Err(ProbeFailure::new(FailureKind::Unparseable, "the capability list does not end"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::tests::found, classify_fixture::classify_outputs, pci::tests::uevent};
    use proptest::prelude::*;

    /// Configuration space with one other capability at 0x100 and ACS at 0x148. Made by hand after the PCIe
    /// specification.
    fn config(control: u16) -> String {
        let mut bytes = vec![0_u8; 4096];
        bytes[0x100..0x104].copy_from_slice(&[0x01, 0x00, 0x82, 0x14]);
        bytes[0x148..0x14c].copy_from_slice(&[0x0d, 0x00, 0x01, 0x00]);
        bytes[0x14e..0x150].copy_from_slice(&control.to_le_bytes());
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    const BARE: &str = "processor\t: 0\nflags\t\t: fpu vme de pse tsc\n";

    fn check(class: &str, cpuinfo: &str, config: &str) -> Vec<String> {
        let device = uevent(class, "10DE:2330", Some("nvidia"));
        let link = |from: &str, to: &str| (from.to_owned(), to.to_owned());
        let (bridge, gpu) =
            ("/sys/devices/pci0000:15/0000:15:01.0", "/sys/devices/pci0000:15/0000:15:01.0/0000:18:00.0");
        classify_outputs(
            &CHECK,
            &[
                found(&[("/sys/bus/pci/devices/0000:18:00.0/uevent", &device)]),
                ProbeOutput::Links(vec![link("/sys/bus/pci/devices/0000:18:00.0", gpu)]),
                ProbeOutput::Text(cpuinfo.to_owned()),
                ProbeOutput::Links(vec![link("/sys/class/pci_bus/0000:18/device", bridge)]),
                found(&[("/sys/class/pci_bus/0000:18/device/config", config)]),
            ],
        )
    }

    #[test]
    fn redirection_above_a_gpu_is_reported() {
        assert_eq!(check("30200", BARE, &config(0)), ["pass within-limits"]);
        assert_eq!(check("30200", BARE, &config(0x0001)), ["pass within-limits"]);
        assert_eq!(check("30200", BARE, &config(0x001d)), ["fail acs-redirects monitor link:0000:15:01.0"]);
    }

    #[test]
    fn not_applicable_on_a_virtual_machine_or_without_a_gpu() {
        let virtual_machine = "flags\t\t: fpu hypervisor lahf_lm\n";
        assert_eq!(check("30200", virtual_machine, &config(0x1d)), ["not-applicable virtual-machine"]);
        assert_eq!(check("20000", BARE, &config(0x1d)), ["not-applicable no-gpu"]);
    }

    #[test]
    fn inconclusive_without_permission_to_read_the_configuration_space() {
        assert_eq!(check("30200", BARE, &"00".repeat(64)), ["inconclusive denied"]);
        assert_eq!(check("30200", BARE, "xyz"), ["inconclusive unparseable"]);
        let circle = config(0).replace("0d000100", "01000110");
        assert_eq!(check("30200", BARE, &circle), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_configuration_space_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            if let Ok(config) = ConfigSpace::parse(&text) {
                let _ = config.acs_control();
            }
        }
    }
}
