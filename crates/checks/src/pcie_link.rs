//! pcie-link: do network adapters and NVMe disks have all their PCIe lanes?
//!
//! What it does: compares the width and speed of each of these devices' links with what both the device and the port
//! above it support.
//!
//! Why it matters: a badly seated card, a bad riser or retimer trains at x8 or x4 instead of x16. Everything works, at
//! half or a quarter of the rate between GPU, network and memory.
//!
//! What to do: `lspci -vv -s BUS` shows `LnkCap` and `LnkSta` of the device and of the port above.
//! - `pcie-narrow` is `isolate`: a network adapter has fewer lanes than both sides support. Power-cycle the machine
//!   once; if it stays narrow, have card, riser and cable reseated.
//! - `nvme-narrow` is `monitor`: the same for a disk.
//! - `pcie-slow` is `monitor`, confirmed by a second failure: a network adapter or disk runs at a lower generation than
//!   both sides support.
//!
//! GPUs have their own check, `gpu-pcie`: their driver reports the link in virtual machines too, and an idle GPU lowers
//! its speed to save power.
//!
//! Not applicable where no such device reports its link, as on most virtual machines.

use std::collections::BTreeMap;

use doctor_core::observation::{Event, ObservationBuilder, Metric, Observation};

use crate::{
    files::{glob_files, symlinks, match_pattern_exact},
    gpu::not_applicable,
    pci::{DEVICES, Function, Kind, UEVENT, parent_bridge, functions},
    probe::{FileText, Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("pcie-link", "lanes and speed of PCIe links");

const RULES: &str = r#"
rules = [
  { id = "pcie-link-narrow", check = "pcie-link", event = "pcie-narrow", reason = "pcie-narrow", severity = "isolate",
    text = "{entity}: {value}" },
  { id = "pcie-link-nvme", check = "pcie-link", event = "nvme-narrow", reason = "nvme-narrow", severity = "monitor",
    text = "{entity}: {value}" },
  { id = "pcie-link-slow", check = "pcie-link", event = "pcie-slow", reason = "pcie-slow", severity = "monitor",
    confirm = 2, text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("pcie_link.rs")), rules: RULES, probes, interpret };

const FILES: [&str; 4] = [
    "/sys/bus/pci/devices/*/current_link_width",
    "/sys/bus/pci/devices/*/max_link_width",
    "/sys/bus/pci/devices/*/current_link_speed",
    "/sys/bus/pci/devices/*/max_link_speed",
];

fn probes(_: &Params) -> Vec<Probe> {
    let links = Probe::Links { pattern: DEVICES.to_owned() };
    [Probe::glob(UEVENT), links].into_iter().chain(FILES.map(Probe::glob)).collect()
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

/// One file's numbers by bus id. `Unknown`, 0 and 255 are left out: there is no link, or a virtual one.
struct ValuesByBus<'a>(BTreeMap<&'a str, f64>);

impl<'a> ValuesByBus<'a> {
    fn parse(pattern: &str, all: &'a [FileText], builder: &mut ObservationBuilder) -> Self {
        let mut numbers = BTreeMap::new();
        for file in all {
            match (match_pattern_exact(pattern, &file.path), &file.text) {
                (Some([bus]), Ok(text)) => {
                    let number = text.split_ascii_whitespace().next().and_then(|word| word.parse::<f64>().ok());
                    numbers
                        .extend(number.filter(|number| *number > 0.0 && *number < 255.0).map(|number| (bus, number)));
                }
                (Some(_), Err(failure)) => builder.unreadable(failure.clone()),
                (None, _) => {}
            }
        }
        Self(numbers)
    }

    fn get(&self, bus: &str) -> Option<f64> {
        self.0.get(bus).copied()
    }
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let mut builder = ObservationBuilder::default();
    let all = functions(outputs.first(), &mut builder)?;
    let devices = symlinks(outputs.get(1))?;
    let mut numbers = |index: usize| Ok(ValuesByBus::parse(FILES[index], glob_files(outputs.get(index + 2))?, &mut builder));
    let (width, most_width, speed, most_speed) = (numbers(0)?, numbers(1)?, numbers(2)?, numbers(3)?);
    for function in all.iter().filter(|f| matches!(f.kind(), Kind::Nic | Kind::Nvme)) {
        let link = devices.iter().find(|(path, _)| match_pattern_exact(DEVICES, path) == Some([function.bus]));
        let port = link.and_then(|(_, target)| parent_bridge(target));
        let both = |most: &ValuesByBus<'_>| {
            let own = most.get(function.bus)?;
            Some(port.and_then(|port| most.get(port)).map_or(own, |above| own.min(above)))
        };
        if let (Some(has), Some(could)) = (width.get(function.bus), both(&most_width)) {
            builder.metric(Metric::count("pcie_lanes", function.entity(), has));
            if has < could {
                builder.event(narrow_event(function, has, could));
            }
        }
        if let (Some(has), Some(could)) = (speed.get(function.bus), both(&most_speed))
            && has < could
        {
            let text = format!("PCIe link speed {has} GT/s, device and port support {could} GT/s");
            builder.event(Event::seen("pcie-slow", function.entity(), text));
        }
    }
    Ok(builder.build_or(not_applicable("no-link", "no network adapter or NVMe disk of this node reports a PCIe link")))
}

fn narrow_event(function: &Function<'_>, has: f64, could: f64) -> Event {
    let code = if function.kind() == Kind::Nvme { "nvme-narrow" } else { "pcie-narrow" };
    Event::seen(code, function.entity(), format!("PCIe link width x{has}, device and port support x{could}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::tests::found, classify_fixture::classify_outputs, pci::tests::uevent};
    use proptest::prelude::*;

    const PORT: &str = "0000:17:01.0";
    const DEVICE: &str = "0000:18:00.0";

    /// One device below one port: class, id, and (width, speed) now, the device's maximum and the port's maximum. Made
    /// by hand.
    fn check(class: &str, id: &str, now: [&str; 2], own: [&str; 2], port: [&str; 2]) -> Vec<String> {
        let device = uevent(class, id, Some("x"));
        let bridge = uevent("60400", "1000:C030", Some("pcieport"));
        let path = |bus: &str, name: &str| format!("/sys/bus/pci/devices/{bus}/{name}");
        let one = |name: &str, of_device: &str, of_port: &str| {
            found(&[(&path(DEVICE, name), of_device), (&path(PORT, name), of_port)])
        };
        let target = format!("/sys/devices/pci0000:16/{PORT}/{DEVICE}");
        classify_outputs(
            &CHECK,
            &[
                one("uevent", &device, &bridge),
                ProbeOutput::Links(vec![(format!("/sys/bus/pci/devices/{DEVICE}"), target)]),
                one("current_link_width", now[0], now[0]),
                one("max_link_width", own[0], port[0]),
                one("current_link_speed", now[1], now[1]),
                one("max_link_speed", own[1], port[1]),
            ],
        )
    }

    const FULL: [&str; 2] = ["16\n", "32.0 GT/s PCIe\n"];
    const NIC: (&str, &str) = ("20700", "15B3:1021");
    const GPU: (&str, &str) = ("30200", "10DE:2330");

    #[test]
    fn fewer_lanes_than_both_sides_support_are_reported() {
        let half = ["8\n", "32.0 GT/s PCIe\n"];
        assert_eq!(check(NIC.0, NIC.1, FULL, FULL, FULL), ["pass within-limits"]);
        assert_eq!(check(NIC.0, NIC.1, half, FULL, FULL), ["fail pcie-narrow isolate nic:0000:18:00.0"]);
        assert_eq!(check(GPU.0, GPU.1, half, FULL, FULL), ["not-applicable no-link"], "gpu-pcie reports it");
        assert_eq!(check("10802", "144D:A80A", half, FULL, FULL), ["fail nvme-narrow monitor disk:0000:18:00.0"]);
    }

    #[test]
    fn a_wide_card_in_a_narrow_slot_passes() {
        let half = ["8\n", "16.0 GT/s PCIe\n"];
        assert_eq!(check(NIC.0, NIC.1, half, FULL, half), ["pass within-limits"]);
    }

    #[test]
    fn a_slow_adapter_is_reported() {
        let slow = ["16\n", "2.5 GT/s PCIe\n"];
        assert_eq!(check(NIC.0, NIC.1, slow, FULL, FULL), ["fail pcie-slow monitor nic:0000:18:00.0"]);
    }

    #[test]
    fn a_virtual_device_has_no_link() {
        let none = ["255\n", "Unknown\n"];
        assert_eq!(check(NIC.0, NIC.1, none, none, none), ["not-applicable no-link"]);
        assert_eq!(check("c0330", "8086:0001", FULL, FULL, FULL), ["not-applicable no-link"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(a in ".{0,12}", b in "[0-9.]{0,9} GT/s") {
            check(NIC.0, NIC.1, [&a, &b], [&b, &a], FULL);
        }
    }
}
