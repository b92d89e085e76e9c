//! The table of fault kinds: how often each occurs, how it is detected, and what cures it.
//!
//! Shares of hard kinds follow the interruptions counted over 54 days of Llama 3's training on 2,048 nodes; shares of
//! degrading kinds follow SuperBench's build-out. Cures and slow-downs are assumptions, printed with the rest.

use std::fmt;

use doctor_core::{ids::NodeName, observation::EntityKind, time::Timestamp};
use serde::{Deserialize, Serialize};

/// The kinds of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    GpuOffBus,
    HbmUncorrectable,
    GpuFirmware,
    LinkFlap,
    HostHardware,
    DegradedLink,
    SlowNic,
    Thermal,
    FailSlow,
    SlowStorage,
    SilentCorruption,
}

/// The general effect of a kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// Work on the node stops.
    Hard,
    /// Work continues, more slowly or less reliably.
    Gray,
    /// Work continues and its results are wrong.
    Sdc,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Hard => "hard",
            Self::Gray => "gray",
            Self::Sdc => "sdc",
        })
    }
}

/// How a fault is detected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Symptom {
    /// The agent reads an event of this code from the node.
    Agent { event: &'static str, entity: EntityKind, text: &'static str },
    /// A test measures this metric times a factor within these bounds.
    Slower { test: &'static str, metric: &'static str, factor: [f64; 2] },
    /// A test measures this metric higher, by an amount within these bounds.
    Higher { test: &'static str, metric: &'static str, by: [f64; 2] },
}

impl Symptom {
    /// Returns the test that detects it. The agent's readings are also a test, which a run can request.
    pub(crate) const fn test(&self) -> &'static str {
        match self {
            Self::Agent { .. } => crate::simulated_tests::GPU_HEALTH,
            Self::Slower { test, .. } | Self::Higher { test, .. } => test,
        }
    }
}

impl fmt::Display for Symptom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Agent { event, .. } => write!(f, "agent sees {event}"),
            Self::Slower { test, metric, factor: [low, high] } => {
                write!(f, "test {test} sees {metric} at {low:.2} to {high:.2} of normal")
            }
            Self::Higher { test, metric, by: [low, high] } => {
                write!(f, "test {test} sees {metric} higher by {low} to {high}")
            }
        }
    }
}

/// What ends a fault, weakest first: a stronger cure includes the weaker ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cure {
    Reset,
    Reboot,
    /// A repair by hand, or another machine.
    Repair,
}

/// The properties of one kind.
#[derive(Debug)]
pub(crate) struct FaultProfile {
    pub(crate) code: &'static str,
    pub(crate) class: Class,
    /// Its share of its class.
    pub(crate) share: f64,
    /// The chances that a reset, only a reboot, or only a repair cures it.
    pub(crate) cures: [f64; 3],
    /// How much it slows down all nodes of a user job that includes its node.
    pub(crate) slows: f64,
    pub(crate) symptom: Symptom,
    /// Tests that cannot run while it lasts. They report no numbers, which is no verdict.
    pub(crate) breaks: &'static [&'static str],
}

use crate::simulated_tests::{DL, NCCL, STORAGE};

const fn agent(event: &'static str, entity: EntityKind, text: &'static str) -> Symptom {
    Symptom::Agent { event, entity, text }
}

/// One row per kind, in the order of [`FaultKind::ALL`].
static FAULT_PROFILES: [FaultProfile; 11] = [
    FaultProfile {
        code: "gpu-off-bus",
        class: Class::Hard,
        share: 0.485,
        cures: [0.10, 0.50, 0.40],
        slows: 0.0,
        symptom: agent("xid-79", EntityKind::Gpu, "NVRM: Xid 79, GPU has fallen off the bus"),
        breaks: &[DL, NCCL],
    },
    FaultProfile {
        code: "hbm-uncorrectable",
        class: Class::Hard,
        share: 0.236,
        cures: [0.60, 0.15, 0.25],
        slows: 0.0,
        symptom: agent("xid-48", EntityKind::Gpu, "NVRM: Xid 48, double bit ECC error"),
        breaks: &[DL],
    },
    FaultProfile {
        code: "gpu-firmware",
        class: Class::Hard,
        share: 0.118,
        cures: [0.50, 0.40, 0.10],
        slows: 0.0,
        symptom: agent("xid-119", EntityKind::Gpu, "NVRM: Xid 119, timeout waiting for RPC from GSP"),
        breaks: &[DL, NCCL],
    },
    FaultProfile {
        code: "link-flap",
        class: Class::Hard,
        share: 0.115,
        cures: [0.0, 0.30, 0.70],
        slows: 0.0,
        symptom: agent("link-down", EntityKind::Nic, "link went down 14 times within an hour"),
        breaks: &[NCCL],
    },
    FaultProfile {
        code: "host-hardware",
        class: Class::Hard,
        share: 0.046,
        cures: [0.0, 0.30, 0.70],
        slows: 0.0,
        symptom: agent("machine-check", EntityKind::Dimm, "EDAC: uncorrected error"),
        breaks: &[],
    },
    FaultProfile {
        code: "degraded-link",
        class: Class::Gray,
        share: 0.35,
        cures: [0.0, 0.20, 0.80],
        slows: 0.10,
        symptom: Symptom::Slower { test: NCCL, metric: "allreduce_bandwidth", factor: [0.55, 0.85] },
        breaks: &[],
    },
    FaultProfile {
        code: "slow-nic",
        class: Class::Gray,
        share: 0.35,
        cures: [0.0, 0.50, 0.50],
        slows: 0.10,
        symptom: Symptom::Slower { test: NCCL, metric: "nic_bandwidth", factor: [0.40, 0.85] },
        breaks: &[],
    },
    FaultProfile {
        code: "thermal",
        class: Class::Gray,
        share: 0.07,
        cures: [0.0, 0.0, 1.0],
        slows: 0.05,
        symptom: Symptom::Higher { test: DL, metric: "gpu_temperature", by: [20.0, 28.0] },
        breaks: &[],
    },
    FaultProfile {
        code: "fail-slow",
        class: Class::Gray,
        share: 0.15,
        cures: [0.20, 0.40, 0.40],
        slows: 0.10,
        symptom: Symptom::Slower { test: DL, metric: "gemm_rate", factor: [0.70, 0.90] },
        breaks: &[],
    },
    FaultProfile {
        code: "slow-storage",
        class: Class::Gray,
        share: 0.08,
        cures: [0.0, 0.60, 0.40],
        slows: 0.05,
        symptom: Symptom::Slower { test: STORAGE, metric: "storage_read", factor: [0.30, 0.75] },
        breaks: &[],
    },
    FaultProfile {
        code: "silent-corruption",
        class: Class::Sdc,
        share: 1.0,
        cures: [0.0, 0.0, 1.0],
        slows: 0.0,
        symptom: Symptom::Higher { test: DL, metric: "wrong_values", by: [1.0, 4000.0] },
        breaks: &[],
    },
];

impl FaultKind {
    pub const ALL: &'static [Self] = &[
        Self::GpuOffBus,
        Self::HbmUncorrectable,
        Self::GpuFirmware,
        Self::LinkFlap,
        Self::HostHardware,
        Self::DegradedLink,
        Self::SlowNic,
        Self::Thermal,
        Self::FailSlow,
        Self::SlowStorage,
        Self::SilentCorruption,
    ];

    pub(crate) fn profile(self) -> &'static FaultProfile {
        &FAULT_PROFILES[self as usize]
    }

    pub fn code(self) -> &'static str {
        self.profile().code
    }

    pub fn from_code(code: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.code() == code)
    }

    /// Whether the node's agent detects it, without a test.
    pub fn is_passive(self) -> bool {
        matches!(self.profile().symptom, Symptom::Agent { .. })
    }

    /// Returns the test that can detect it.
    pub fn detecting_test(self) -> &'static str {
        self.profile().symptom.test()
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.code())
    }
}

/// A past or present fault. Only the world and the scoring may read it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Fault {
    pub(crate) kind: FaultKind,
    pub(crate) machine: u32,
    /// Its index among the machine's faults.
    pub(crate) nth: u32,
    /// The machine's node name at onset.
    pub(crate) node: NodeName,
    pub(crate) onset: Timestamp,
    /// The node was out of service already, so no user could be harmed.
    pub(crate) out_at_onset: bool,
    pub(crate) cure: Cure,
    /// Between zero and one: its position between the bounds of [`Symptom`].
    pub(crate) depth: f64,
    /// The index of the GPU, NIC or DIMM.
    pub(crate) part: u8,
    /// How often a test that could detect it has run. Selects the next random draw.
    pub(crate) detection_draws: u32,
    pub(crate) shown: Option<Timestamp>,
    pub(crate) marked: Option<Timestamp>,
    pub(crate) ticket: Option<Timestamp>,
    pub(crate) cured: Option<(Timestamp, Cure)>,
    pub(crate) lost_node_hours: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_row_and_survives_a_round_trip() {
        for kind in FaultKind::ALL {
            assert_eq!(FaultKind::from_code(kind.code()), Some(*kind));
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.code());
        }
    }

    #[test]
    fn shares_of_a_class_and_chances_of_cures_add_up() {
        for class in [Class::Hard, Class::Gray, Class::Sdc] {
            let sum: f64 = FAULT_PROFILES.iter().filter(|facts| facts.class == class).map(|facts| facts.share).sum();
            assert!((sum - 1.0).abs() < 1e-9, "{class}: {sum}");
        }
        for facts in &FAULT_PROFILES {
            assert!((facts.cures.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{}", facts.code);
        }
    }

    #[test]
    fn every_test_and_metric_named_here_exists() {
        let catalogue = crate::simulated_tests::catalogue();
        for facts in &FAULT_PROFILES {
            let known = |test: &str| catalogue.iter().any(|check| check.spec.id == test);
            assert!(known(facts.symptom.test()), "{}", facts.code);
            assert!(facts.breaks.iter().all(|test| known(test)), "{}", facts.code);
            if let Symptom::Slower { test, metric, .. } | Symptom::Higher { test, metric, .. } = facts.symptom {
                assert!(crate::simulated_tests::metrics_of(test).iter().any(|row| row.name == metric), "{metric}");
            }
        }
    }
}
