//! Parameters of one DCGM test: the level, the engine's address and the time limit; and the four levels with the tests
//! that each must run.
//!
//! The check writes the parameters and the test on the node reads them; the evidence records them as the probe's
//! argument.

use doctor_core::time::Span;
use serde::{Deserialize, Serialize};

/// The parameters of one diagnostic.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DcgmParams {
    pub level: Level,
    /// `dcgmi`, by name or path.
    pub program: String,
    /// The host engine's address: `HOST:PORT` or `unix://PATH`.
    pub address: String,
    /// Parameters of DCGM's tests, such as `pcie.test_pinned=false`.
    pub parameters: Vec<String>,
    /// How long the diagnostic itself may take.
    pub timeout: Span,
}

/// The level of a diagnostic: `dcgmi diag -r LEVEL`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Level {
    /// Libraries, permissions, settings. Takes seconds and causes no load.
    One,
    /// Also memory and PCIe of each GPU.
    Two,
    /// Also power, stress and the `diagnostic` test.
    Three,
    /// Also memory patterns, power pulses, and NVIDIA's Extended Utility Diagnostics (EUD) where they are installed.
    Four,
}

impl Level {
    pub const ALL: &'static [Self] = &[Self::One, Self::Two, Self::Three, Self::Four];

    pub const fn number(self) -> u8 {
        match self {
            Self::One => 1,
            Self::Two => 2,
            Self::Three => 3,
            Self::Four => 4,
        }
    }

    /// Returns the default time limit. On eight GPUs, level 2 has taken 10 minutes and level 4 135 minutes.
    pub const fn timeout(self) -> Span {
        match self {
            Self::One => Span::minutes(5),
            Self::Two => Span::minutes(30),
            Self::Three => Span::hours(1),
            Self::Four => Span::hours(3),
        }
    }

    /// Returns the tests that every version of DCGM runs at this level. If one has no result, DCGM left it out.
    pub const fn expected_tests(self) -> &'static [&'static str] {
        const DEEPEST: &[&str] =
            &["memory", "pcie", "diagnostic", "targeted_stress", "targeted_power", "memtest", "pulse_test"];
        match self {
            Self::One => &[],
            Self::Two => DEEPEST.split_at(2).0,
            Self::Three => DEEPEST.split_at(5).0,
            Self::Four => DEEPEST,
        }
    }

    /// Returns whether the level loads the GPUs. If so, no other process may use them and none may be partitioned by
    /// MIG, or the diagnostic fails for reasons other than the hardware.
    pub const fn loads_gpus(self) -> bool {
        !matches!(self, Self::One)
    }
}

impl From<Level> for u8 {
    fn from(level: Level) -> Self {
        level.number()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a DCGM level; expected 1, 2, 3 or 4")]
pub struct UnknownLevel(u8);

impl TryFrom<u8> for Level {
    type Error = UnknownLevel;
    fn try_from(number: u8) -> Result<Self, UnknownLevel> {
        Self::ALL.iter().copied().find(|level| level.number() == number).ok_or(UnknownLevel(number))
    }
}

/// Returns a version-independent name of a DCGM test: `GPU Memory` of 3.x is `memory` of 4.x.
pub fn canonical_test_name(name: &str) -> String {
    let name = name.trim().to_ascii_lowercase().replace(' ', "_");
    match name.as_str() {
        "gpu_memory" => "memory".to_owned(),
        "eud_test" => "eud".to_owned(),
        "cpu_eud_test" => "cpu_eud".to_owned(),
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_survives_a_round_trip_and_includes_the_tests_of_lower_levels() {
        for level in Level::ALL {
            assert_eq!(Level::try_from(level.number()), Ok(*level));
        }
        for pair in Level::ALL.windows(2) {
            assert!(
                pair[1].expected_tests().starts_with(pair[0].expected_tests()) && pair[0].timeout() < pair[1].timeout()
            );
        }
        let wrong = serde_json::from_str::<Level>("5").unwrap_err().to_string();
        assert!(wrong.contains("1, 2, 3 or 4"), "{wrong}");
    }

    #[test]
    fn a_test_has_one_name_in_every_version() {
        for (written, name) in [
            ("GPU Memory", "memory"),
            ("memory", "memory"),
            ("PCIe", "pcie"),
            ("Targeted Stress", "targeted_stress"),
            ("Pulse Test", "pulse_test"),
            ("EUD Test", "eud"),
            ("CPU EUD Test", "cpu_eud"),
        ] {
            assert_eq!(canonical_test_name(written), name);
        }
    }
}
