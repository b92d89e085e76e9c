//! The settings of a cluster file before validation: `cluster.toml` is deserialized into [`RawCluster`], and the
//! `KEY=value` file is read into the same type.

use std::{collections::BTreeMap, path::PathBuf};

use doctor_core::time::Span;
use serde::Deserialize;
use toml::Spanned;

/// The orchestration mode of the scale set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    Flexible,
    Uniform,
}

impl Mode {
    /// Returns Azure's name for the mode.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Flexible => "Flexible",
            Self::Uniform => "Uniform",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Security {
    Standard,
    TrustedLaunch,
}

impl Security {
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Standard => "Standard",
            Self::TrustedLaunch => "TrustedLaunch",
        }
    }
}

/// Spot machines, which Azure may evict.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spot {
    /// Dollars per hour. `None`: up to the regular price.
    pub max_price: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// The time limit of one `az` call.
    pub call: Span,
    /// The time limit of the call that creates the machines.
    pub create: Span,
    /// The number of machines that scripts run on in parallel.
    pub max_concurrent: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { call: Span::minutes(10), create: Span::minutes(45), max_concurrent: 8 }
    }
}

/// The file as parsed, before validation.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawCluster {
    pub(super) subscription: Option<Spanned<String>>,
    pub(super) resource_group: Spanned<String>,
    pub(super) location: Spanned<String>,
    pub(super) scale_set: Spanned<String>,
    #[serde(default = "flexible")]
    pub(super) mode: Mode,
    pub(super) sku: Spanned<String>,
    pub(super) image: Spanned<String>,
    pub(super) count: Spanned<u32>,
    pub(super) name_prefix: Option<Spanned<String>>,
    pub(super) admin: Spanned<String>,
    pub(super) ssh_key: Spanned<PathBuf>,
    #[serde(default = "disk_gb")]
    pub(super) disk_gb: u32,
    #[serde(default = "yes")]
    pub(super) accelerated_networking: bool,
    pub(super) placement_group: Option<Spanned<String>>,
    pub(super) spot: Option<Spot>,
    #[serde(default = "standard")]
    pub(super) security: Security,
    pub(super) cloud_init: Option<PathBuf>,
    pub(super) doctor_node: Option<RawDownload>,
    pub(super) head_address: Option<Spanned<bool>>,
    pub(super) network: RawNetwork,
    #[serde(default)]
    pub(super) tags: BTreeMap<Spanned<String>, Spanned<String>>,
    #[serde(default)]
    pub(super) limits: Limits,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawDownload {
    pub(super) url: Spanned<String>,
    pub(super) sha256: Spanned<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawNetwork {
    pub(super) vnet: Option<Spanned<String>>,
    pub(super) subnet: Option<Spanned<String>>,
    pub(super) addresses: Option<Spanned<String>>,
    pub(super) ssh_from: Vec<Spanned<String>>,
}

const fn flexible() -> Mode {
    Mode::Flexible
}

const fn standard() -> Security {
    Security::Standard
}

const fn disk_gb() -> u32 {
    256
}

const fn yes() -> bool {
    true
}
