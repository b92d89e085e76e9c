//! The signs by which a machine type or a chip is detected.

use serde::{Deserialize, Serialize};

/// The signs by which a machine type or a chip is detected. For a machine type, an instance type or a product suffices
/// alone, and GPUs also need `gpus`. A chip has `gpu_ids` and `gpu_names` only.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Signs {
    /// The cloud's instance type, such as `p5.48xlarge`. Case-insensitive.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub instance_types: Vec<String>,
    /// The firmware's product name (`/sys/class/dmi/id/product_name`), in full.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub products: Vec<String>,
    /// PCI vendor and device id of its GPUs, such as `10de:2330`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpu_ids: Vec<String>,
    /// For a machine type: a substring of the driver's name for its GPUs, such as `H100 80GB HBM3`. For a chip: the
    /// whole name, such as `NVIDIA H100 80GB HBM3`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpu_names: Vec<String>,
    /// Number of those GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpus: Option<u32>,
}

impl Signs {
    pub const fn is_empty(&self) -> bool {
        self.instance_types.is_empty()
            && self.products.is_empty()
            && self.gpu_ids.is_empty()
            && self.gpu_names.is_empty()
            && self.gpus.is_none()
    }

    /// Returns whether there is no sign besides those of a GPU.
    pub(super) const fn only_gpus(&self) -> bool {
        self.instance_types.is_empty() && self.products.is_empty() && self.gpus.is_none()
    }

    /// Returns whether a list contains this word, case-insensitively.
    pub(crate) fn contains_ignoring_case(list: &[String], text: &str) -> bool {
        list.iter().any(|entry| entry.eq_ignore_ascii_case(text.trim()))
    }
}
