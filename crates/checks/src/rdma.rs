//! Ports of RDMA devices (InfiniBand, RoCE and EFA) as the kernel shows them under /sys/class/infiniband.

use doctor_core::observation::{Entity, EntityKind, Observation, ProbeFailure};

use crate::{
    files::{glob_files, match_pattern, unexpected_content},
    gpu::not_applicable,
    probe::{FileText, ProbeOutput},
};

pub const STATE: &str = "/sys/class/infiniband/*/ports/*/state";
pub const PHYS_STATE: &str = "/sys/class/infiniband/*/ports/*/phys_state";
pub const LINK_LAYER: &str = "/sys/class/infiniband/*/ports/*/link_layer";
pub const RATE: &str = "/sys/class/infiniband/*/ports/*/rate";
pub const HCA_TYPE: &str = "/sys/class/infiniband/*/hca_type";

/// Returns the entity of a port, a link: `link:mlx5_0/1`.
pub fn port_entity(device: &str, port: &str) -> Entity {
    Entity::new(EntityKind::Link, format!("{device}/{port}"))
}

/// The observation of a check on a machine without RDMA.
pub fn no_rdma() -> Observation {
    not_applicable("no-rdma", "no RDMA device in /sys/class/infiniband")
}

/// Parses `4: ACTIVE` to `ACTIVE` and `5: LinkUp` to `LinkUp`. Returns `None` for other formats.
pub fn parse_state(text: &str) -> Option<&str> {
    let (number, word) = text.trim().split_once(':')?;
    let word = word.trim();
    (number.parse::<u8>().is_ok() && !word.is_empty()).then_some(word)
}

/// Parses `400 Gb/sec (4X NDR)` to bits per second.
pub fn parse_rate(text: &str) -> Option<f64> {
    let (number, unit) = text.trim().split_once(' ')?;
    let number: f64 = number.parse().ok()?;
    (unit.starts_with("Gb/sec") && number.is_finite() && number >= 0.0).then_some(number * 1e9)
}

/// Returns the text of the file that matches `pattern` with these names for its wildcards, or `None` if there is none.
///
/// # Errors
/// If the file could not be read.
pub fn port_file<'a>(all: &'a [FileText], pattern: &str, names: &[&str]) -> Result<Option<&'a str>, ProbeFailure> {
    let file =
        all.iter().find(|file| match_pattern(pattern, &file.path).is_some_and(|found| names.starts_with(&found)));
    match file.map(|file| &file.text) {
        None => Ok(None),
        Some(Ok(text)) => Ok(Some(text.trim())),
        Some(Err(failure)) => Err(failure.clone()),
    }
}

/// One port and its state.
#[derive(Debug, Clone, PartialEq)]
pub struct Port<'a> {
    pub device: &'a str,
    pub port: &'a str,
    /// `ACTIVE`, `DOWN`, `INIT`, …
    pub state: Result<&'a str, ProbeFailure>,
}

impl Port<'_> {
    pub fn entity(&self) -> Entity {
        port_entity(self.device, self.port)
    }

    pub fn is_active(&self) -> bool {
        self.state == Ok("ACTIVE")
    }
}

/// Returns every port that has a state file.
///
/// # Errors
/// Returns the observation that the check should return: not applicable if there is no port.
pub fn ports(output: Option<&ProbeOutput>) -> Result<Vec<Port<'_>>, Observation> {
    let found: Vec<Port<'_>> = glob_files(output)?
        .iter()
        .filter_map(|file| {
            let names = match_pattern(STATE, &file.path)?;
            let state = match &file.text {
                Ok(text) => parse_state(text).ok_or_else(|| unexpected_content(&file.path, text)),
                Err(failure) => Err(failure.clone()),
            };
            Some(Port { device: names.first()?, port: names.get(1)?, state })
        })
        .collect();
    if found.is_empty() { Err(no_rdma()) } else { Ok(found) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn states_and_rates_are_parsed_in_the_kernels_format() {
        assert_eq!(parse_state("4: ACTIVE\n"), Some("ACTIVE"));
        assert_eq!(parse_state("5: LinkUp\n"), Some("LinkUp"));
        assert_eq!(parse_rate("400 Gb/sec (4X NDR)\n"), Some(400e9));
        assert_eq!(parse_rate("2.5 Gb/sec (1X SDR)\n"), Some(2.5e9));
        for text in ["", "ACTIVE", "4:", "x: ACTIVE"] {
            assert_eq!(parse_state(text), None, "{text}");
        }
        for text in ["", "400", "fast Gb/sec", "400 Mb/sec", "inf Gb/sec"] {
            assert_eq!(parse_rate(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,60}") {
            parse_state(&text);
            parse_rate(&text);
        }
    }
}
