//! Parses the Xid records of the kernel log, including their details.

use crate::{gpu::normalize_bus_id, kmsg::Record, tables};
use doctor_core::observation::{Entity, EntityKind};

/// `NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XidRecord<'a> {
    pub number: u16,
    pub gpu: Entity,
    pub record: Record<'a>,
    /// The text after the number.
    pub text: &'a str,
}

impl<'a> XidRecord<'a> {
    pub fn parse(record: &Record<'a>) -> Option<Self> {
        let (device, rest) = record.text.strip_prefix("NVRM: Xid (")?.split_once("): ")?;
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let (number, text) = rest.split_at(digits);
        // A MIG instance follows the bus id: `PCI:0000:18:00, GPU-I:03`.
        let bus = device.split([' ', ',']).next().unwrap_or(device);
        let id = normalize_bus_id(bus).unwrap_or_else(|| bus.to_owned());
        Some(Self {
            number: number.parse().ok()?,
            gpu: Entity::new(EntityKind::Gpu, id),
            record: *record,
            text: text.trim_start_matches([',', ' ']),
        })
    }

    /// Returns the recovery action of Xid 154: `GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)`.
    pub fn recovery(&self) -> Option<Recovery> {
        let (_, to) = self.text.rsplit_once(" to ")?;
        let code = to.strip_prefix("0x")?.split(|c: char| !c.is_ascii_hexdigit()).next()?;
        Some(match u32::from_str_radix(code, 16).ok()? {
            0 => Recovery::None,
            1 | 4 => Recovery::Reset,
            2 => Recovery::Reboot,
            3 => Recovery::DrainPeers,
            _ => return None,
        })
    }

    /// Returns the location of an Xid 13 on the GPU: `… Exception on (GPC 4, TPC 0, SM 1)`.
    pub fn gpc_tpc(&self) -> Option<(u16, u16)> {
        let (_, rest) = self.text.split_once("(GPC ")?;
        let (gpc, rest) = rest.split_once(", TPC ")?;
        let tpc = rest.split([',', ')', ' ']).next()?;
        Some((gpc.parse().ok()?, tpc.parse().ok()?))
    }

    /// Returns the registers in parentheses at the end: hexadecimal, with or without commas.
    fn registers(&self) -> Vec<u32> {
        let Some((_, last)) = self.text.rsplit_once('(') else { return Vec::new() };
        let inside = last.split(')').next().unwrap_or(last);
        let fields = inside.split([',', ' ']).filter(|field| !field.is_empty());
        fields.map_while(|field| u32::from_str_radix(field.strip_prefix("0x")?, 16).ok()).collect()
    }

    /// Decodes the registers of Xid 74 (NVLink up to Hopper).
    pub fn link_fault(&self) -> LinkFault {
        // In NVIDIA's workflow only the first, third, fourth and fifth register are significant.
        const MINOR: [(usize, &[u32]); 3] = [(0, &[0, 1, 20, 23, 30]), (3, &[16, 17]), (4, &[20, 23, 26, 29])];
        const MECHANICAL: &[u32] = &[8, 9, 12, 16, 17, 24, 28];
        let registers = self.registers();
        if registers.len() < 5 {
            return LinkFault::Other;
        }
        let mask = |bits: &[u32]| bits.iter().fold(0_u32, |mask, bit| mask | 1 << bit);
        let minor = |position: usize| MINOR.iter().find(|(at, _)| *at == position).map_or(0, |(_, bits)| mask(bits));
        let valid = [0, 2, 3, 4];
        if registers[0] & mask(MECHANICAL) != 0 {
            LinkFault::Mechanical
        } else if valid.iter().any(|&at| registers[at] != 0) && valid.iter().all(|&at| registers[at] & !minor(at) == 0)
        {
            LinkFault::Minor
        } else {
            LinkFault::Other
        }
    }

    /// Returns NVIDIA's immediate action for one of Xid 144 to 150 (NVLink 5), by unit and registers.
    pub fn nvlink5(&self) -> Nvlink5 {
        let description = self.text.split('(').next().unwrap_or(self.text);
        let (info, status) = match self.registers()[..] {
            [info, status, ..] => (info, status),
            _ => return Nvlink5::from_rating(description),
        };
        let rows = tables::NVLINK5.rows.iter();
        let found = rows.filter_map(|row| Some((row.action(self.number, description, info, status)?, row))).next();
        match found.map(|(now, row)| (now, row.later.as_str())) {
            Some(("IGNORE", "IGNORE")) => Nvlink5::Nothing,
            Some(("IGNORE", _)) => Nvlink5::Minor,
            // The program is restarted, unless Xid 154 requests more.
            Some(("XID_154_EVAL", _)) => Nvlink5::Nothing,
            Some(_) => Nvlink5::Fatal,
            None => Nvlink5::from_rating(description),
        }
    }
}

/// The driver's own verdict on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    None,
    Reset,
    Reboot,
    DrainPeers,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkFault {
    /// Follow-ups and thresholds.
    Minor,
    /// NVIDIA advises to check the seating first.
    Mechanical,
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nvlink5 {
    Fatal,
    Minor,
    Nothing,
}

impl Nvlink5 {
    /// The fallback if no row matches. A record that is not marked non-fatal is fatal.
    fn from_rating(description: &str) -> Self {
        let harmless = description.split(' ').any(|word| matches!(word, "Nonfatal" | "Non-fatal" | "Non-Fatal"));
        if harmless { Self::Minor } else { Self::Fatal }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn xid(text: &str) -> XidRecord<'_> {
        XidRecord::parse(&Record { from_kernel: true, sequence: 1, micros: 1, text }).unwrap()
    }

    #[test]
    fn every_line_format_is_parsed() {
        for (text, number, gpu) in [
            ("NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", 79, "05"),
            ("NVRM: Xid (PCI:0000:18:00, GPU-I:03): 43, pid=4242, name=python, Ch 00000008", 43, "18"),
            ("NVRM: Xid (PCI:0000:18:00 GPU-I:03): 43, pid=4242", 43, "18"),
            ("NVRM: Xid (0000:3b:00): 31, Ch 00000010", 31, "3b"),
            ("NVRM: Xid (PCI:0000:9b:00): 999", 999, "9b"),
        ] {
            let read = xid(text);
            assert_eq!((read.number, read.gpu.to_string()), (number, format!("gpu:0000:{gpu}:00.0")), "{text}");
        }
        for text in ["NVRM: Xid (PCI:0000:18:00): , ", "NVRM: GPU at PCI:0000:9b:00: GPU-6f0e0d1c", "Xid 79"] {
            assert_eq!(XidRecord::parse(&Record { from_kernel: true, sequence: 1, micros: 1, text }), None, "{text}");
        }
    }

    #[test]
    fn the_drivers_recovery_action_is_parsed() {
        for (to, recovery) in [
            ("0x0 (None)", Some(Recovery::None)),
            ("0x1 (GPU Reset Required)", Some(Recovery::Reset)),
            ("0x2 (Node Reboot Required)", Some(Recovery::Reboot)),
            ("0x3 (Drain P2P)", Some(Recovery::DrainPeers)),
            ("0x4 (Drain and Reset)", Some(Recovery::Reset)),
            ("0x9 (Something New)", None),
            ("nothing", None),
        ] {
            let text = format!("NVRM: Xid (PCI:0000:18:00): 154, GPU recovery action changed from 0x0 (None) to {to}");
            assert_eq!(xid(&text).recovery(), recovery, "{to}");
        }
    }

    #[test]
    fn gpc_and_tpc_of_an_exception_are_parsed() {
        let text =
            "NVRM: Xid (PCI:0000:18:00): 13, pid=1, Graphics SM Warp Exception on (GPC 4, TPC 0, SM 1): Out Of Range";
        assert_eq!(xid(text).gpc_tpc(), Some((4, 0)));
        assert_eq!(xid("NVRM: Xid (PCI:0000:18:00): 13, Graphics Exception: ESR 0x1").gpc_tpc(), None);
    }

    #[test]
    fn registers_of_xid_74_are_classified() {
        for (registers, fault) in [
            ("0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", LinkFault::Mechanical),
            ("0x1, 0x0, 0x0, 0x30000, 0x0, 0x0, 0x0", LinkFault::Minor),
            ("0x0, 0xffffffff, 0x0, 0x0, 0x100000, 0x0, 0x0", LinkFault::Minor),
            ("0x10, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", LinkFault::Other),
            ("0x0, 0x0, 0x1, 0x0, 0x0, 0x0, 0x0", LinkFault::Other),
            ("0x0, 0x0, 0x0, 0x40000, 0x0, 0x0, 0x0", LinkFault::Other),
            ("0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", LinkFault::Other),
            ("0x1", LinkFault::Other),
        ] {
            let text = format!("NVRM: Xid (PCI:0000:9b:00): 74, NVLink: fatal error detected on link 4({registers})");
            assert_eq!(xid(&text).link_fault(), fault, "{registers}");
        }
    }

    #[test]
    fn nvlink_5_is_decoded_by_unit_and_registers() {
        for (text, expected) in [
            ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x0000000a)", Nvlink5::Fatal),
            ("149, NETIR_LINK_DOWN Fatal XC0 i0 Link 08 (0x00400011 0x00000000 0x0)", Nvlink5::Fatal),
            // NVIDIA advises no immediate action, although the record says Fatal.
            ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x026001c6 0x00000000 0x0)", Nvlink5::Minor),
            ("149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 08 (0x00000226 0x00000001 0x0)", Nvlink5::Minor),
            ("144, SAW_MVB Fatal XC0 i0 Link -1 (0x00000021 0x00000002 0x0)", Nvlink5::Fatal),
            ("144, SAW_MVB Nonfatal XC0 i0 Link -1 (0x00000021 0x00000004 0x0)", Nvlink5::Nothing),
            ("145, RLW_REMAP Nonfatal XC1 i0 Link 03 (0x00000004 0x00000001 0x0)", Nvlink5::Nothing),
            // The second case of a row.
            ("145, RLW_RXPIPE Nonfatal XC0 i0 Link 03 (0x00000086 0x00000001 0x0)", Nvlink5::Fatal),
            ("145, RLW_RXPIPE Nonfatal XC0 i0 Link 03 (0x00000006 0x00000001 0x0)", Nvlink5::Minor),
            ("150, MSE_WATCHDOG Fatal XC0 i0 Link -1 (0x00000000 0x00000000)", Nvlink5::Fatal),
            // No row matches: the record's own rating applies.
            ("147, TREX Nonfatal XC0 i0 Link 03 (0xffffffff 0x00000000)", Nvlink5::Minor),
            ("147, TREX (0xffffffff 0x00000000)", Nvlink5::Fatal),
            ("147, ", Nvlink5::Fatal),
        ] {
            let text = format!("NVRM: Xid (PCI:0018:01:00): {text}");
            assert_eq!(xid(&text).nvlink5(), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(device in ".{0,20}", rest in "([0-9a-fx(), ]|.){0,80}") {
            let text = format!("NVRM: Xid (PCI:{device}): {rest}");
            if let Some(read) = XidRecord::parse(&Record { from_kernel: true, sequence: 1, micros: 1, text: &text }) {
                read.recovery();
                read.gpc_tpc();
                read.link_fault();
                read.nvlink5();
            }
        }
    }
}
