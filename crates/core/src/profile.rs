//! Profiles: the expected performance and counts of each machine type. A rule may compare with them instead of with a
//! fixed number.
//!
//! There are two layers. A chip's profile says what one GPU must deliver, in any machine. A machine type's profile names
//! its chip and says how many there are, how they are linked, and which adapters, disks and processors the machine has.
//! Each is one file: its expected values with their basis, its detection signs and the source of the numbers. Some are
//! built in; a site's files override them by name.

mod expected;
mod file;
mod import;
mod machine_types;
mod signs;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::Sku;

pub use self::{
    expected::{Basis, Expected},
    file::{Layer, ProfileFile},
    import::{Imported, Skipped, import},
    machine_types::{MachineTypes, UnknownBaseProfile},
    signs::Signs,
};

/// Expected values of one machine type, with those of its chip.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// The machine type; the chip, for a machine of unknown type.
    pub sku: Sku,
    /// Recorded with every verdict, so that a verdict can be replayed: the sum of the machine's and the chip's version.
    pub version: u32,
    /// By metric name: the value that a healthy machine of this type reaches.
    pub expect: BTreeMap<String, Expected>,
}

impl Profile {
    /// Returns a profile of stated values.
    pub fn stated<'a>(sku: Sku, values: impl IntoIterator<Item = (&'a str, f64)>) -> Self {
        let expect = values.into_iter().map(|(metric, value)| (metric.to_owned(), value.into())).collect();
        Self { sku, version: 1, expect }
    }

    pub fn value(&self, metric: &str) -> Option<f64> {
        self.expected(metric).map(|expected| expected.value)
    }

    pub fn expected(&self, metric: &str) -> Option<Expected> {
        self.expect.get(metric).copied()
    }
}

/// The profiles of all known machine types and chips, by name.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Profiles {
    by_name: BTreeMap<Sku, Profile>,
    types: MachineTypes,
}

impl Profiles {
    /// Creates a list of profiles that are found by their name only.
    pub fn new(profiles: impl IntoIterator<Item = Profile>) -> Self {
        let by_name = profiles.into_iter().map(|profile| (profile.sku.clone(), profile)).collect();
        Self { by_name, types: MachineTypes::default() }
    }

    fn of_types(types: MachineTypes) -> Self {
        let mut by_name = BTreeMap::new();
        // A machine type comes before a chip of the same name.
        for file in types.iter().chain(types.chips()) {
            if let Some(profile) = types.profile(&file.sku) {
                by_name.entry(file.sku.clone()).or_insert(profile);
            }
        }
        // Clusters label machines with the cloud's instance type, which names the same profile.
        for file in types.iter() {
            for name in file.detect.instance_types.iter().filter_map(|name| Sku::new(name).ok()) {
                if let (false, Some(profile)) = (by_name.contains_key(&name), types.profile(&file.sku)) {
                    by_name.insert(name, profile);
                }
            }
        }
        Self { by_name, types }
    }

    /// Finds a profile by the name of a machine type, of an instance type or of a chip.
    pub fn get(&self, sku: Option<&Sku>) -> Option<&Profile> {
        self.by_name.get(sku?)
    }

    /// Returns the machine types and chips with their detection signs.
    pub fn types(&self) -> &MachineTypes {
        &self.types
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_found_by_the_name_of_its_machine_type_instance_type_or_chip() {
        let texts = [
            "chip = \"h200\"\nversion = 1\n[expect]\npeak = 100\n",
            "sku = \"hgx\"\nchip = \"h200\"\nversion = 1\n[expect]\ngpu_count = 8\n[detect]\ninstance_types = [\"p5e.48xlarge\"]\n",
        ];
        let profiles = MachineTypes::new(texts.map(|text| ProfileFile::read(text).unwrap())).profiles();
        for (name, found) in [("hgx", Some("hgx")), ("p5e.48xlarge", Some("hgx")), ("h200", Some("h200")), ("p9", None)]
        {
            let profile = profiles.get(Some(&Sku::new(name).unwrap()));
            assert_eq!(profile.map(|profile| profile.sku.as_str()), found);
            assert_eq!(profile.and_then(|profile| profile.value("peak")), found.map(|_| 100.0));
        }
        assert_eq!(profiles.get(None), None);
    }
}
