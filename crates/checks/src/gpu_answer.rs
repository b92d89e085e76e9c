//! The answer of NVIDIA's driver about the GPUs of a machine: which there are, and each field by its name.

use doctor_core::observation::{Entity, EntityKind, ProbeFailure};
use serde::{Deserialize, Serialize};

/// The answer to one question about all GPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuAnswer {
    /// NVIDIA GPUs on the PCI bus, by bus id as the kernel writes it (`0000:18:00.0`), whatever the driver says.
    pub on_pci: Vec<String>,
    /// Why the driver could not be asked at all, if it could not.
    pub driver: Result<Driver, ProbeFailure>,
    /// Those that the driver knows, in its order.
    pub gpus: Vec<Gpu>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Driver {
    /// `570.124.06`
    pub version: String,
    /// `12.8`
    pub cuda: Option<String>,
    /// Who was asked: `nvml` or `nvidia-smi`.
    pub asked: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    pub index: u32,
    /// As the kernel writes it: `0000:18:00.0`. Empty if even that could not be read.
    pub bus: String,
    /// In the order in which they were asked for, links in the order of their numbers.
    pub fields: Vec<(String, Reading)>,
}

/// What became of one field.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reading {
    Number(f64),
    Text(String),
    /// This GPU or this driver has no such thing.
    NotSupported,
    /// It has, and would not tell. The code is NVML's, such as 15 for a GPU that is lost.
    Failed {
        code: u32,
        text: String,
    },
}

/// NVML's codes that say something about the GPU and not about the question.
pub const NVML_GPU_IS_LOST: u32 = 15;
pub const NVML_RESET_REQUIRED: u32 = 16;

impl Gpu {
    /// Parts are named by bus id, which kernel log, PCI and NVML agree on; indices change when a GPU is lost.
    pub fn entity(&self) -> Entity {
        Entity::new(EntityKind::Gpu, if self.bus.is_empty() { self.index.to_string() } else { self.bus.clone() })
    }

    pub fn get(&self, name: &str) -> Option<&Reading> {
        self.fields.iter().find(|(field, _)| field == name).map(|(_, reading)| reading)
    }

    pub fn number(&self, name: &str) -> Option<f64> {
        match self.get(name)? {
            Reading::Number(value) => Some(*value),
            Reading::Text(_) | Reading::NotSupported | Reading::Failed { .. } => None,
        }
    }

    pub fn text(&self, name: &str) -> Option<&str> {
        match self.get(name)? {
            Reading::Text(value) => Some(value),
            Reading::Number(_) | Reading::NotSupported | Reading::Failed { .. } => None,
        }
    }

    /// Every field of a numbered family with its number: `links("nvlink", "state")` for `nvlink.*.state`.
    pub fn numbered<'a>(&'a self, family: &'a str, what: &'a str) -> impl Iterator<Item = (u32, &'a Reading)> {
        self.fields.iter().filter_map(move |(name, reading)| {
            let (number, rest) = name.strip_prefix(family)?.strip_prefix('.')?.split_once('.')?;
            (rest == what).then_some((number.parse().ok()?, reading))
        })
    }
}
