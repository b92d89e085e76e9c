//! All known machine types and chips: the built-in ones with the site's files merged over them.

use std::collections::{BTreeMap, BTreeSet};

use super::{Expected, Layer, Profile, ProfileFile, Profiles};
use crate::ids::Sku;

/// A file that refers to an unknown profile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnknownBaseProfile {
    #[error("profile `{sku}` is like `{like}`, which is not a known profile; known: {known}")]
    Like { sku: Sku, like: Sku, known: String },
    #[error("profile `{sku}` has the chip `{chip}`, which is not a known chip; known chips: {known}")]
    Chip { sku: Sku, chip: Sku, known: String },
}

/// Machine types and chips with their detection signs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MachineTypes {
    machines: BTreeMap<Sku, Known>,
    chips: BTreeMap<Sku, Known>,
}

/// A file with those that it extends merged into it.
#[derive(Debug, Clone, PartialEq)]
struct Known {
    file: ProfileFile,
    /// Whether a file of the site describes or changes it.
    from_site: bool,
    /// The metrics whose value comes from a file of the site.
    site_metrics: BTreeSet<String>,
}

impl Known {
    /// Returns the values that come from the site, or those that do not.
    fn values(&self, of_site: bool) -> impl Iterator<Item = (String, Expected)> + '_ {
        let chosen = move |metric: &String| self.site_metrics.contains(metric) == of_site;
        let all = self.file.expect.iter().filter(move |(metric, _)| chosen(metric));
        all.map(|(metric, expected)| (metric.clone(), *expected))
    }
}

impl MachineTypes {
    /// Creates a list of files that do not extend each other, without a site's.
    pub fn new(files: impl IntoIterator<Item = ProfileFile>) -> Self {
        let mut types = Self::default();
        for file in files {
            let known = Known { file, from_site: false, site_metrics: BTreeSet::new() };
            types.layer_mut(known.file.layer).insert(known.file.sku.clone(), known);
        }
        types
    }

    /// Adds a built-in file.
    ///
    /// # Errors
    /// If it extends an unknown profile or has an unknown chip. Those must be added first.
    pub fn add_built_in(&mut self, file: ProfileFile) -> Result<(), UnknownBaseProfile> {
        self.insert(file, false)
    }

    /// Adds a file of the site, or merges it over the one of the same name: its values win, missing ones stay.
    ///
    /// # Errors
    /// If it extends an unknown profile or has an unknown chip. Those must be added first.
    pub fn merge(&mut self, file: ProfileFile) -> Result<(), UnknownBaseProfile> {
        self.insert(file, true)
    }

    fn insert(&mut self, file: ProfileFile, from_site: bool) -> Result<(), UnknownBaseProfile> {
        if let Some(chip) = file.chip.as_ref().filter(|chip| !self.chips.contains_key(*chip)) {
            let (sku, chip) = (file.sku.clone(), chip.clone());
            return Err(UnknownBaseProfile::Chip { sku, chip, known: names(&self.chips) });
        }
        let layer = self.layer_mut(file.layer);
        let base = match &file.like {
            Some(like) => Some(layer.get(like).ok_or_else(|| UnknownBaseProfile::Like {
                sku: file.sku.clone(),
                like: like.clone(),
                known: names(layer),
            })?),
            None => layer.get(&file.sku),
        };
        let own: BTreeSet<String> = file.expect.keys().cloned().collect();
        let mut merged = Known { file, from_site, site_metrics: BTreeSet::new() };
        if let Some(base) = base {
            let mut expect = base.file.expect.clone();
            expect.append(&mut merged.file.expect);
            merged.file.expect = expect;
            merged.file.chip = merged.file.chip.or_else(|| base.file.chip.clone());
            merged.site_metrics.clone_from(&base.site_metrics);
            // A type is not detected by the signs of its base: two types with the same signs could not be told apart.
            if base.file.sku == merged.file.sku && merged.file.detect.is_empty() {
                merged.file.detect = base.file.detect.clone();
            }
        }
        if from_site {
            merged.site_metrics.extend(own);
        }
        layer.insert(merged.file.sku.clone(), merged);
        Ok(())
    }

    /// Adds several files of the site in any order: a file that extends another one is added after it, and chips come
    /// before machine types.
    ///
    /// # Errors
    /// If one extends an unknown profile or has an unknown chip.
    pub fn merge_all(&mut self, files: impl IntoIterator<Item = ProfileFile>) -> Result<(), UnknownBaseProfile> {
        let (chips, machines): (Vec<_>, Vec<_>) = files.into_iter().partition(|file| file.layer == Layer::Chip);
        self.merge_layer(chips)?;
        self.merge_layer(machines)
    }

    fn merge_layer(&mut self, files: Vec<ProfileFile>) -> Result<(), UnknownBaseProfile> {
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

    const fn layer_mut(&mut self, layer: Layer) -> &mut BTreeMap<Sku, Known> {
        match layer {
            Layer::Machine => &mut self.machines,
            Layer::Chip => &mut self.chips,
        }
    }

    /// Returns a machine type's own file, without its chip.
    pub fn get(&self, sku: &Sku) -> Option<&ProfileFile> {
        self.machines.get(sku).map(|known| &known.file)
    }

    /// Returns a chip's file.
    pub fn chip(&self, name: &Sku) -> Option<&ProfileFile> {
        self.chips.get(name).map(|known| &known.file)
    }

    /// Lists the machine types.
    pub fn iter(&self) -> impl Iterator<Item = &ProfileFile> {
        self.machines.values().map(|known| &known.file)
    }

    /// Lists the chips.
    pub fn chips(&self) -> impl Iterator<Item = &ProfileFile> {
        self.chips.values().map(|known| &known.file)
    }

    /// Returns whether a file of the site describes or changes this machine type or chip.
    pub fn is_from_site(&self, sku: &Sku) -> bool {
        [&self.machines, &self.chips].iter().any(|layer| layer.get(sku).is_some_and(|known| known.from_site))
    }

    /// Returns what a machine type or a chip of this name expects. The site's values win over the built-in ones, and a
    /// machine's over its chip's.
    pub fn profile(&self, sku: &Sku) -> Option<Profile> {
        let Some(machine) = self.machines.get(sku) else {
            return self.chips.get(sku).map(|chip| chip.file.profile());
        };
        let chip = machine.file.chip.as_ref().and_then(|chip| self.chips.get(chip));
        let mut expect = BTreeMap::new();
        for of_site in [false, true] {
            expect.extend(chip.into_iter().flat_map(|chip| chip.values(of_site)));
            expect.extend(machine.values(of_site));
        }
        // A changed number of either changes the version.
        let version = machine.file.version.saturating_add(chip.map_or(0, |chip| chip.file.version));
        Some(Profile { sku: machine.file.sku.clone(), version, expect })
    }

    /// Returns the part that classification needs, under all names.
    pub fn profiles(&self) -> Profiles {
        Profiles::of_types(self.clone())
    }

    /// Returns the names of all machine types and chips in one line.
    pub fn names(&self) -> String {
        match (names(&self.machines), names(&self.chips)) {
            (machines, chips) if chips.is_empty() => machines,
            (machines, chips) if machines.is_empty() => chips,
            (machines, chips) => format!("{machines}; chips: {chips}"),
        }
    }
}

fn names(layer: &BTreeMap<Sku, Known>) -> String {
    layer.keys().map(Sku::as_str).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Basis;

    fn file(text: &str) -> ProfileFile {
        ProfileFile::read(text).unwrap()
    }

    fn sku(name: &str) -> Sku {
        Sku::new(name).unwrap()
    }

    fn value(types: &MachineTypes, name: &str, metric: &str) -> Option<f64> {
        types.profile(&sku(name)).unwrap().value(metric)
    }

    #[test]
    fn a_site_profile_overrides_key_by_key_and_may_extend_another() {
        let base = "sku = \"hgx\"\nversion = 1\n[expect]\ngpu_count = 8\nnvlink_count = 18\n[detect]\ngpus = 8\n";
        let mut types = MachineTypes::new([file(base)]);
        types.merge(file("sku = \"hgx\"\nversion = 7\n[expect]\nnvme_disks = 4\n")).unwrap();
        let over = types.get(&sku("hgx")).unwrap();
        assert_eq!((over.version, over.expect.len(), over.detect.gpus), (7, 3, Some(8)));
        types.merge(file("sku = \"ours\"\nversion = 1\nlike = \"hgx\"\n[expect]\ngpu_count = 4\n")).unwrap();
        assert_eq!(
            (value(&types, "ours", "gpu_count"), value(&types, "ours", "nvlink_count")),
            (Some(4.0), Some(18.0))
        );
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

    fn with_chip() -> MachineTypes {
        let mut types = MachineTypes::default();
        let chip = "chip = \"h200\"\nversion = 2\n[expect.published]\npeak = 100\nrate = 50\nmemory = 5\n";
        types.add_built_in(file(chip)).unwrap();
        let machine = "sku = \"hgx\"\nchip = \"h200\"\nversion = 3\n[expect.published]\ngpu_count = 8\nrate = 48\n";
        types.add_built_in(file(machine)).unwrap();
        types
    }

    #[test]
    fn a_machine_has_the_values_of_its_chip_unless_it_has_its_own() {
        let mut types = with_chip();
        let profile = types.profile(&sku("hgx")).unwrap();
        let found = ["peak", "rate", "gpu_count"].map(|metric| profile.value(metric));
        assert_eq!(found, [Some(100.0), Some(48.0), Some(8.0)]);
        assert_eq!((profile.version, profile.expected("peak").unwrap().basis), (5, Basis::Published));
        assert_eq!(value(&types, "h200", "rate"), Some(50.0), "the chip's profile is one of its own");
        types.merge(file("sku = \"ours\"\nversion = 1\nlike = \"hgx\"\n")).unwrap();
        assert_eq!(value(&types, "ours", "peak"), Some(100.0), "the chip is that of the base");
        let error = types.merge(file("sku = \"x\"\nchip = \"h300\"\nversion = 1\n")).unwrap_err().to_string();
        assert!(error.contains("`h300`") && error.ends_with("known chips: h200"), "{error}");
        assert_eq!(types.names(), "hgx, ours; chips: h200");
    }

    #[test]
    fn a_value_of_the_site_wins_over_a_built_in_one_of_either_layer() {
        let mut types = with_chip();
        let chip = file("chip = \"h200\"\nversion = 9\n[expect]\nrate = 47\nmemory = 6\n");
        let machine = file("sku = \"hgx\"\nversion = 9\n[expect.measured]\nmemory = 7\n");
        types.merge_all([machine, chip]).unwrap();
        let found = ["peak", "rate", "memory", "gpu_count"].map(|metric| value(&types, "hgx", metric));
        assert_eq!(found, [Some(100.0), Some(47.0), Some(7.0), Some(8.0)]);
        assert_eq!(types.profile(&sku("hgx")).unwrap().expected("rate").unwrap().basis, Basis::Stated);
        // In any order: a machine may have a chip of the same directory.
        let chip = file("chip = \"ours\"\nlike = \"h200\"\nversion = 1\n[expect]\npeak = 1\n");
        types.merge_all([file("sku = \"m\"\nchip = \"ours\"\nversion = 1\n"), chip]).unwrap();
        assert_eq!((value(&types, "m", "peak"), value(&types, "m", "memory")), (Some(1.0), Some(6.0)));
        assert!(types.is_from_site(&sku("m")) && !with_chip().is_from_site(&sku("hgx")));
    }
}
