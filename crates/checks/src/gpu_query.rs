//! The answer of NVIDIA's driver to a query: the machine's GPUs and the requested fields of each.

use doctor_core::observation::{Entity, EntityKind, ProbeFailure};
use serde::{Deserialize, Serialize};

/// The answer to one query about all GPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuQueryResult {
    /// NVIDIA GPUs on the PCI bus, by bus id in the kernel's format (`0000:18:00.0`), independent of the driver.
    pub on_pci: Vec<String>,
    /// The driver, or why it could not be queried.
    pub driver: Result<Driver, ProbeFailure>,
    /// The GPUs that the driver lists, in its order.
    pub gpus: Vec<Gpu>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Driver {
    /// Such as `570.124.06`.
    pub version: String,
    /// Such as `12.8`.
    pub cuda: Option<String>,
    /// The interface that answered: `nvml` or `nvidia-smi`.
    pub source: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    pub index: u32,
    /// In the kernel's format: `0000:18:00.0`. Empty if it could not be read.
    pub bus: String,
    /// In the requested order, links in numerical order.
    pub fields: Vec<(String, FieldValue)>,
}

/// The result of reading one field.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FieldValue {
    Number(f64),
    Text(String),
    /// This GPU or this driver does not support the field.
    NotSupported,
    /// Reading the field failed. The code is NVML's, such as 15 for a GPU that is lost.
    Failed {
        code: u32,
        text: String,
    },
}

/// NVML's error codes that describe the GPU's state and not the query.
pub const NVML_GPU_IS_LOST: u32 = 15;
pub const NVML_RESET_REQUIRED: u32 = 16;

/// Parts of the text of [`GpuQueryResult::driver`]'s failure that the check `gpu-driver` recognises, in lower case. NVML and
/// nvidia-smi write them too, with other capitals.
pub const DRIVER_NOT_LOADED: &str = "driver not loaded";
pub const VERSION_MISMATCH: &str = "version mismatch";

impl Gpu {
    /// Returns the entity, named by bus id: kernel log, PCI and NVML agree on it, while indices change when a GPU is
    /// lost.
    pub fn entity(&self) -> Entity {
        Entity::new(EntityKind::Gpu, if self.bus.is_empty() { self.index.to_string() } else { self.bus.clone() })
    }

    pub fn get(&self, name: &str) -> Option<&FieldValue> {
        self.fields.iter().find(|(field, _)| field == name).map(|(_, reading)| reading)
    }

    pub fn number(&self, name: &str) -> Option<f64> {
        match self.get(name)? {
            FieldValue::Number(value) => Some(*value),
            FieldValue::Text(_) | FieldValue::NotSupported | FieldValue::Failed { .. } => None,
        }
    }

    pub fn text(&self, name: &str) -> Option<&str> {
        match self.get(name)? {
            FieldValue::Text(value) => Some(value),
            FieldValue::Number(_) | FieldValue::NotSupported | FieldValue::Failed { .. } => None,
        }
    }

    /// Returns every field of a numbered family with its number: `numbered("nvlink", "state")` for `nvlink.*.state`.
    pub fn indexed<'a>(&'a self, family: &'a str, what: &'a str) -> impl Iterator<Item = (u32, &'a FieldValue)> {
        self.fields.iter().filter_map(move |(name, reading)| {
            let (number, rest) = name.strip_prefix(family)?.strip_prefix('.')?.split_once('.')?;
            (rest == what).then_some((number.parse().ok()?, reading))
        })
    }
}
