//! What hardware of a kind is expected to do. A rule may measure against it instead of against a fixed number.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::Sku;

/// Expectations for one machine type, as one file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    pub sku: Sku,
    /// Kept with every verdict, so that a verdict can be replayed.
    pub version: u32,
    /// By metric name: what a healthy machine of this type reaches.
    pub expect: BTreeMap<String, f64>,
}

/// All known machine types.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Profiles(BTreeMap<Sku, Profile>);

impl Profiles {
    pub fn new(profiles: impl IntoIterator<Item = Profile>) -> Self {
        Self(profiles.into_iter().map(|profile| (profile.sku.clone(), profile)).collect())
    }

    pub fn get(&self, sku: Option<&Sku>) -> Option<&Profile> {
        self.0.get(sku?)
    }
}
