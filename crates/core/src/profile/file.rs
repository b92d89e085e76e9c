//! The file of one machine type or of one chip.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Expected, Profile, Signs, expected};
use crate::{
    ids::Sku,
    toml_text::{self, TomlError},
};

/// What a profile's file describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layer {
    /// A machine type: how many GPUs of which chip, how they are linked, which adapters, disks and processors.
    Machine,
    /// A GPU: what one must deliver, in any machine.
    Chip,
}

/// A machine type or a chip as its file describes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "FileText", into = "FileText")]
pub struct ProfileFile {
    pub layer: Layer,
    /// The name of the machine type, or of the chip.
    pub sku: Sku,
    /// Recorded with every verdict. Raise it when you change the numbers.
    pub version: u32,
    /// Source of the numbers, for people.
    pub source: String,
    /// The chip of a machine type, which provides the values that the machine's file does not have.
    pub chip: Option<Sku>,
    /// Another machine type, or chip, that provides the values missing in this file.
    pub like: Option<Sku>,
    pub expect: BTreeMap<String, Expected>,
    pub detect: Signs,
}

impl ProfileFile {
    /// Returns the file of a machine type that expects nothing.
    pub fn machine(sku: Sku) -> Self {
        Self {
            layer: Layer::Machine,
            sku,
            version: 1,
            source: String::new(),
            chip: None,
            like: None,
            expect: BTreeMap::new(),
            detect: Signs::default(),
        }
    }

    /// Parses a profile file.
    ///
    /// # Errors
    /// With line, column and what is accepted.
    pub fn read(text: &str) -> Result<Self, TomlError> {
        toml_text::read(text, &[])
    }

    /// Returns what this file alone expects, without its chip.
    pub fn profile(&self) -> Profile {
        Profile { sku: self.sku.clone(), version: self.version, expect: self.expect.clone() }
    }
}

/// The form of the file. With `sku` it describes a machine type, whose chip is `chip`; without, the chip itself.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileText {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sku: Option<Sku>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    chip: Option<Sku>,
    version: u32,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    source: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    like: Option<Sku>,
    #[serde(default, with = "expected")]
    expect: BTreeMap<String, Expected>,
    #[serde(default, skip_serializing_if = "Signs::is_empty")]
    detect: Signs,
}

impl TryFrom<FileText> for ProfileFile {
    type Error = String;

    fn try_from(text: FileText) -> Result<Self, String> {
        let FileText { sku, chip, version, source, like, expect, detect } = text;
        let (layer, sku, chip) = match (sku, chip) {
            (Some(sku), chip) => (Layer::Machine, sku, chip),
            (None, Some(chip)) => (Layer::Chip, chip, None),
            (None, None) => {
                return Err(
                    "a name is missing: the profile of a machine type has `sku`, that of a chip has `chip`".to_owned()
                );
            }
        };
        if layer == Layer::Chip && !detect.only_gpus() {
            return Err(format!("`detect` of the chip `{sku}` accepts `gpu_ids` and `gpu_names` only"));
        }
        Ok(Self { layer, sku, version, source, chip, like, expect, detect })
    }
}

impl From<ProfileFile> for FileText {
    fn from(file: ProfileFile) -> Self {
        let ProfileFile { layer, sku, version, source, chip, like, expect, detect } = file;
        let (sku, chip) = match layer {
            Layer::Machine => (Some(sku), chip),
            Layer::Chip => (None, Some(sku)),
        };
        Self { sku, chip, version, source, like, expect, detect }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_profile_is_rejected_with_the_accepted_form() {
        for (bad, says) in [
            ("sku = \"a b\"\nversion = 1\n", "a b"),
            ("sku = \"a\"\nversion = 1\nexpects = {}\n", "expects"),
            ("sku = \"a\"\nversion = 1\n[expect]\ngpu_count = -8\n", "0 or more"),
            ("sku = \"a\"\nversion = 1\n[expect]\ngpu_count = nan\n", "0 or more"),
            ("version = 1\n", "`chip`"),
            ("chip = \"a\"\nversion = 1\n[detect]\ngpus = 8\n", "`gpu_ids` and `gpu_names` only"),
            ("sku = \"a\"\n", "version"),
        ] {
            let error = ProfileFile::read(bad).unwrap_err().to_string();
            assert!(error.contains(says), "{bad}{error}");
        }
    }

    #[test]
    fn a_machine_names_its_chip_and_a_chip_only_itself() {
        let text =
            "sku = \"a\"\nchip = \"c\"\nversion = 1\nsource = \"us\"\n[expect]\nn = 1\n[detect]\nproducts = [\"P\"]\n";
        let machine = ProfileFile::read(text).unwrap();
        assert_eq!((machine.layer, machine.chip.as_ref().map(Sku::as_str)), (Layer::Machine, Some("c")));
        let chip = ProfileFile::read("chip = \"c\"\nversion = 2\n[detect]\ngpu_names = [\"NVIDIA C\"]\n").unwrap();
        assert_eq!((chip.layer, chip.sku.as_str(), chip.chip.clone()), (Layer::Chip, "c", None));
        for file in [machine, chip] {
            assert_eq!(ProfileFile::read(&toml::to_string(&file).unwrap()).unwrap(), file);
        }
    }
}
