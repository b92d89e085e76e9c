//! By what a machine type is recognised.

use serde::{Deserialize, Serialize};

/// By what a machine type is recognised. Any one of the first three does; GPUs need their number too.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Signs {
    /// What the cloud calls it, such as `p5.48xlarge`. Small and capital letters are the same.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub instance_types: Vec<String>,
    /// What the firmware calls the product (`/sys/class/dmi/id/product_name`), whole.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub products: Vec<String>,
    /// Vendor and device of its GPUs on the PCI bus, such as `10de:2330`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpu_ids: Vec<String>,
    /// A part of the name that the driver gives its GPUs, such as `H100 80GB HBM3`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpu_names: Vec<String>,
    /// How many of those GPUs it has.
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

    /// Whether a list has this word. Small and capital letters are the same.
    pub(crate) fn says(list: &[String], word: &str) -> bool {
        list.iter().any(|entry| entry.eq_ignore_ascii_case(word.trim()))
    }
}
