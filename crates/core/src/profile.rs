//! Profiles: the expected performance and counts of each machine type. A rule may compare with them instead of with a
//! fixed number.
//!
//! Each machine type is one file: its expected values, its detection signs and the source of the numbers. Some are
//! built in; a site's files override them by name.

mod import;
mod signs;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    ids::Sku,
    toml_text::{self, TomlError},
};

pub use self::{
    import::{Imported, Skipped, import},
    signs::Signs,
};

/// Expected values of one machine type.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    pub sku: Sku,
    /// Recorded with every verdict, so that a verdict can be replayed.
    pub version: u32,
    /// By metric name: the value that a healthy machine of this type reaches.
    pub expect: BTreeMap<String, f64>,
}

/// All known machine types.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Profiles(BTreeMap<Sku, Profile>);

impl Profiles {
    pub fn new(profiles: impl IntoIterator<Item = Profile>) -> Self {
        Self(profiles.into_iter().map(|profile| (profile.sku.clone(), profile)).collect())
    }

    /// Adds an alias: clusters label machines with the cloud's instance type, which names the same profile.
    fn with_alias(mut self, name: &str, profile: &Profile) -> Self {
        if let Ok(name) = Sku::new(name) {
            self.0.entry(name).or_insert_with(|| profile.clone());
        }
        self
    }

    pub fn get(&self, sku: Option<&Sku>) -> Option<&Profile> {
        self.0.get(sku?)
    }
}

/// A machine type as its file describes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileFile {
    pub sku: Sku,
    /// Recorded with every verdict. Raise it when you change the numbers.
    pub version: u32,
    /// Source of the numbers, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub source: String,
    /// Another machine type that provides the values missing in this file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub like: Option<Sku>,
    #[serde(default)]
    pub expect: BTreeMap<String, f64>,
    #[serde(default, skip_serializing_if = "Signs::is_empty")]
    pub detect: Signs,
}

impl ProfileFile {
    /// Parses a profile file.
    ///
    /// # Errors
    /// With line, column and what is accepted.
    pub fn read(text: &str) -> Result<Self, TomlError> {
        let file: Self = toml_text::read(text, &[])?;
        if let Some((metric, value)) = file.expect.iter().find(|(_, value)| !value.is_finite() || **value < 0.0) {
            return Err(TomlError::at(
                text,
                None,
                format!("`expect.{metric}` is {value}, expected a number, 0 or more"),
            ));
        }
        Ok(file)
    }

    pub fn profile(&self) -> Profile {
        Profile { sku: self.sku.clone(), version: self.version, expect: self.expect.clone() }
    }
}

/// A file that is based on an unknown machine type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("profile `{sku}` is like `{like}`, which is not a known profile; known: {known}")]
pub struct UnknownBaseProfile {
    sku: Sku,
    like: Sku,
    known: String,
}

/// Machine types with their detection signs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MachineTypes(BTreeMap<Sku, ProfileFile>);

impl MachineTypes {
    pub fn new(files: impl IntoIterator<Item = ProfileFile>) -> Self {
        Self(files.into_iter().map(|file| (file.sku.clone(), file)).collect())
    }

    /// Adds a file, or merges it over the one of the same name: its values win, missing ones stay.
    ///
    /// # Errors
    /// If it is based on an unknown machine type. A base must be added first.
    pub fn merge(&mut self, file: ProfileFile) -> Result<(), UnknownBaseProfile> {
        let base = match &file.like {
            Some(like) => Some(self.0.get(like).ok_or_else(|| UnknownBaseProfile {
                sku: file.sku.clone(),
                like: like.clone(),
                known: self.names(),
            })?),
            None => self.0.get(&file.sku),
        };
        let mut merged = file;
        if let Some(base) = base {
            let mut expect = base.expect.clone();
            expect.append(&mut merged.expect);
            merged.expect = expect;
            // A type is not detected by the signs of its base: two types with the same signs could not be told apart.
            if base.sku == merged.sku && merged.detect.is_empty() {
                merged.detect = base.detect.clone();
            }
        }
        self.0.insert(merged.sku.clone(), merged);
        Ok(())
    }

    /// Adds several files in any order: a file that is based on another one is added after it.
    ///
    /// # Errors
    /// If one is based on an unknown machine type.
    pub fn merge_all(&mut self, files: impl IntoIterator<Item = ProfileFile>) -> Result<(), UnknownBaseProfile> {
        let (mut waiting, free): (Vec<_>, Vec<_>) = files.into_iter().partition(|file| file.like.is_some());
        for file in free {
            self.merge(file)?;
        }
        while !waiting.is_empty() {
            let ours: Vec<Sku> = waiting.iter().map(|file| file.sku.clone()).collect();
            let waits =
                |file: &ProfileFile| file.like.as_ref().is_some_and(|like| *like != file.sku && ours.contains(like));
            let (later, mut now): (Vec<_>, Vec<_>) = waiting.into_iter().partition(waits);
            waiting = later;
            if now.is_empty() {
                // A cycle: each is based on a type that was known before, or adding it returns the error.
                now = std::mem::take(&mut waiting);
            }
            for file in now {
                self.merge(file)?;
            }
        }
        Ok(())
    }

    pub fn get(&self, sku: &Sku) -> Option<&ProfileFile> {
        self.0.get(sku)
    }

    pub fn iter(&self) -> impl Iterator<Item = &ProfileFile> {
        self.0.values()
    }

    /// Returns the part that classification needs, under all names.
    pub fn profiles(&self) -> Profiles {
        let profiles = Profiles::new(self.iter().map(ProfileFile::profile));
        let names = self.iter().flat_map(|file| file.detect.instance_types.iter().map(move |name| (name, file)));
        names.fold(profiles, |profiles, (name, file)| profiles.with_alias(name, &file.profile()))
    }

    /// Returns all names in one line.
    pub fn names(&self) -> String {
        self.0.keys().map(Sku::as_str).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> ProfileFile {
        ProfileFile::read(text).unwrap()
    }

    fn sku(name: &str) -> Sku {
        Sku::new(name).unwrap()
    }

    #[test]
    fn a_site_profile_overrides_key_by_key_and_may_extend_another() {
        let base = "sku = \"hgx\"\nversion = 1\n[expect]\ngpu_count = 8\nnvlink_count = 18\n[detect]\ngpus = 8\n";
        let mut types = MachineTypes::new([file(base)]);
        types.merge(file("sku = \"hgx\"\nversion = 7\n[expect]\nnvme_disks = 4\n")).unwrap();
        let over = types.get(&sku("hgx")).unwrap();
        assert_eq!((over.version, over.expect.len(), over.detect.gpus), (7, 3, Some(8)));
        types.merge(file("sku = \"ours\"\nversion = 1\nlike = \"hgx\"\n[expect]\ngpu_count = 4\n")).unwrap();
        let ours = types.profiles();
        let ours = &ours.get(Some(&sku("ours"))).unwrap().expect;
        assert!((ours["gpu_count"] - 4.0).abs() < f64::EPSILON && (ours["nvlink_count"] - 18.0).abs() < f64::EPSILON);
        assert!(types.get(&sku("ours")).unwrap().detect.is_empty());
        let chain = ["c", "b", "a"].map(|name| {
            let like = char::from(name.as_bytes()[0] - 1);
            let like = if name == "a" { "hgx".to_owned() } else { like.to_string() };
            file(&format!("sku = \"{name}\"\nversion = 1\nlike = \"{like}\"\n"))
        });
        types.merge_all(chain).unwrap();
        assert_eq!(types.get(&sku("c")).unwrap().expect.len(), 3);
        let error = types.merge(file("sku = \"x\"\nversion = 1\nlike = \"hgy\"\n")).unwrap_err().to_string();
        assert!(error.contains("`hgy`") && error.contains("hgx, ours"), "{error}");
        let round = ["x", "y"].map(|name| {
            let like = if name == "x" { "y" } else { "x" };
            file(&format!("sku = \"{name}\"\nversion = 1\nlike = \"{like}\"\n"))
        });
        assert!(types.merge_all(round).is_err(), "a circle has no beginning");
    }

    #[test]
    fn an_invalid_profile_is_rejected_and_a_valid_one_reads_back() {
        for bad in [
            "sku = \"a b\"\nversion = 1\n",
            "sku = \"a\"\nversion = 1\nexpects = {}\n",
            "sku = \"a\"\nversion = 1\n[expect]\ngpu_count = -8\n",
            "sku = \"a\"\nversion = 1\n[expect]\ngpu_count = nan\n",
        ] {
            assert!(ProfileFile::read(bad).is_err(), "{bad}");
        }
        let good = file("sku = \"a\"\nversion = 1\nsource = \"us\"\n[expect]\nn = 1\n[detect]\nproducts = [\"P\"]\n");
        assert_eq!(ProfileFile::read(&toml::to_string(&good).unwrap()).unwrap(), good);
    }
}
