//! Parses the SXid records that the NVSwitch driver writes to the kernel log.

use crate::{
    gpu::normalize_bus_id,
    kmsg::Record,
    tables::{self, Fatal},
};
use doctor_core::{
    observation::{Entity, EntityKind},
    reason::ReasonCode,
};

/// `nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SxidRecord<'a> {
    pub number: u32,
    pub switch: Entity,
    pub record: Record<'a>,
    text: &'a str,
}

impl<'a> SxidRecord<'a> {
    pub fn parse(record: &Record<'a>) -> Option<Self> {
        let (driver, rest) = record.text.split_once(": SXid (")?;
        if !driver.starts_with("nvidia-nvswitch") {
            return None;
        }
        let (device, rest) = rest.split_once("): ")?;
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let (number, text) = rest.split_at(digits);
        let id = normalize_bus_id(device).unwrap_or_else(|| device.to_owned());
        Some(Self {
            number: number.parse().ok()?,
            switch: Entity::new(EntityKind::Switch, id),
            record: *record,
            text: text.trim_start_matches([',', ' ']),
        })
    }

    /// Returns the record's own rating, or `None` if it has none.
    pub fn is_fatal(&self) -> Option<bool> {
        match self.text.split(',').next()?.trim() {
            "Fatal" => Some(true),
            "Non-fatal" | "Nonfatal" => Some(false),
            _ => None,
        }
    }

    /// Returns the event code of the record, or `None` if it is corrected or transient and only counted.
    pub fn code(&self) -> Option<ReasonCode> {
        let own = || ReasonCode::new(&format!("sxid-{}", self.number)).ok();
        match (tables::sxid(self.number), self.is_fatal()) {
            // The driver's rating of this record overrides the guide's rating of its number.
            (Some(row), Some(false)) if matches!(row.fatal, Fatal::Yes | Fatal::Always) => {
                Some(ReasonCode::fixed("sxid-nonfatal"))
            }
            (Some(row), Some(true)) if row.severity.is_none() || row.fatal == Fatal::May => {
                Some(ReasonCode::fixed("sxid-fatal"))
            }
            (Some(row), _) => row.severity.and_then(|_| own()),
            (None, Some(false)) => Some(ReasonCode::fixed("sxid-nonfatal")),
            (None, _) => Some(ReasonCode::fixed("sxid-fatal")),
        }
    }

    /// Returns whether NVLinks of GPUs fail with it.
    pub fn breaks_links(&self) -> bool {
        self.is_fatal().unwrap_or_else(|| {
            tables::sxid(self.number).is_none_or(|row| matches!(row.fatal, Fatal::Yes | Fatal::Always))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn code(text: &str) -> Option<String> {
        let text = format!("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): {text}");
        let read = SxidRecord::parse(&Record { from_kernel: true, sequence: 1, micros: 1, text: &text }).unwrap();
        assert_eq!(read.switch.to_string(), "switch:0000:05:00.0");
        read.code().map(|code| code.to_string())
    }

    #[test]
    fn a_record_is_classified_by_its_number_and_its_own_rating() {
        for (text, expected) in [
            ("12028, Non-fatal, Link 32 egress non-posted PRIV error (First)", Some("sxid-12028")),
            ("12028, Fatal, Link 32 egress non-posted PRIV error (First)", Some("sxid-12028")),
            ("11013, Fatal, Link 46 ingress header DBE", Some("sxid-11013")),
            ("11013, Non-fatal, Link 46 ingress header DBE", Some("sxid-nonfatal")),
            ("11012, Non-fatal, Link 46 single bit", None),
            ("11012, Fatal, Link 46 single bit", Some("sxid-fatal")),
            ("10004, Non-fatal, thermal", Some("sxid-10004")),
            ("99999, Non-fatal, new", Some("sxid-nonfatal")),
            ("99999, Fatal, new", Some("sxid-fatal")),
            ("99999", Some("sxid-fatal")),
        ] {
            assert_eq!(code(text).as_deref(), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(driver in "(nvidia-nvswitch)?.{0,8}", rest in "([0-9,() ]|.){0,60}") {
            for text in [format!("{driver}: SXid (PCI:{rest}"), format!("{driver}: SXid (PCI:0): {rest}")] {
                if let Some(read) = SxidRecord::parse(&Record { from_kernel: true, sequence: 1, micros: 1, text: &text }) {
                    read.code();
                    read.breaks_links();
                }
            }
        }
    }
}
