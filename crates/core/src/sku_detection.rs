//! Detection of a machine's type from what the machine reports.
//!
//! The order is fixed, most reliable source first: the cloud's metadata service, the cluster's label or the operator's
//! setting, the firmware's product name, the GPUs. A step that matches several types decides nothing, unless exactly one
//! of them is the site's own: a wrong profile makes good machines fail, whereas no profile only leaves counts without a
//! limit. A machine of unknown type still has the profile of its chip.

use serde::{Deserialize, Serialize};

use crate::{
    ids::Sku,
    profile::{MachineTypes, Profile, Profiles, Signs},
    reason::coded,
};

/// Facts that a machine reports about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MachineFacts {
    /// The instance type, from the cloud's metadata service.
    pub instance_type: Option<String>,
    /// From the cluster's label or the operator's setting.
    pub declared_sku: Option<Sku>,
    pub vendor: Option<String>,
    pub product: Option<String>,
    pub asset_tag: Option<String>,
    /// PCI ids of all GPUs, such as `10de:2330`.
    pub gpu_ids: Vec<String>,
    /// Names of all GPUs known to the driver.
    pub gpu_names: Vec<String>,
}

coded! {
    /// A cloud with a metadata service that can be queried.
    pub enum Cloud {
        Aws => "aws",
        Azure => "azure",
        Gcp => "gcp",
        Oci => "oci",
    }
}

/// Limits of what is kept of a machine's facts: a node could send megabytes.
const MAX_FACT_CHARS: usize = 200;
const MAX_GPUS: usize = 64;

/// The asset tag of every Azure virtual machine.
const AZURE_TAG: &str = "7783-7084-3265-9085-8269-3286-77";

/// The asset tag of every machine in Oracle's cloud, bare metal included.
const OCI_TAG: &str = "OracleCloud.com";

impl MachineFacts {
    /// Returns the facts with at most 64 GPUs and 200 characters of each text.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        for text in [&mut self.instance_type, &mut self.vendor, &mut self.product, &mut self.asset_tag] {
            text.iter_mut().for_each(shorten);
        }
        for list in [&mut self.gpu_ids, &mut self.gpu_names] {
            list.truncate(MAX_GPUS);
            list.iter_mut().for_each(shorten);
        }
        self
    }

    /// Returns the cloud that the firmware names. No metadata service is queried before its cloud is known.
    pub fn cloud(&self) -> Option<Cloud> {
        let is = |field: &Option<String>, expected: &str| field.as_deref().is_some_and(|text| text.trim() == expected);
        if is(&self.vendor, "Amazon EC2") {
            Some(Cloud::Aws)
        } else if is(&self.asset_tag, AZURE_TAG) {
            Some(Cloud::Azure)
        } else if is(&self.product, "Google Compute Engine") {
            Some(Cloud::Gcp)
        } else if is(&self.asset_tag, OCI_TAG) {
            Some(Cloud::Oci)
        } else {
            None
        }
    }
}

fn shorten(text: &mut String) {
    if let Some((end, _)) = text.char_indices().nth(MAX_FACT_CHARS) {
        text.truncate(end);
    }
}

coded! {
    /// The source from which a machine's type was detected.
    pub enum DetectionSource {
        Metadata => "metadata",
        Label => "label",
        Product => "product",
        Gpus => "gpus",
        /// The GPUs of a machine whose type is unknown.
        Chip => "chip",
    }
}

/// The detected type, and the steps that led to it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Detection {
    pub found: Option<Detected>,
    /// One line for each step, in order.
    pub steps: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Detected {
    /// The machine type; with [`DetectionSource::Chip`] the chip.
    pub sku: Sku,
    pub source: DetectionSource,
}

/// Detects a machine's type and explains each step.
pub fn detect(types: &MachineTypes, facts: &MachineFacts) -> Detection {
    let mut detection = Detection::default();
    for &source in DetectionSource::ALL {
        let seen = match source {
            DetectionSource::Metadata => facts
                .instance_type
                .as_ref()
                .map(|name| format!("the cloud's metadata service reports `{name}`"))
                .ok_or("no cloud reports an instance type"),
            DetectionSource::Label => match &facts.declared_sku {
                Some(label) => Ok(format!("the label or the setting is `{label}`")),
                None => continue,
            },
            DetectionSource::Product => facts
                .product
                .as_ref()
                .map(|name| format!("the firmware reports `{}`", name.trim()))
                .ok_or("the firmware reports no product name"),
            DetectionSource::Gpus => Ok(describe_gpus(facts)),
            // A machine type says more than its chip.
            DetectionSource::Chip if detection.found.is_some() => continue,
            DetectionSource::Chip => Ok(describe_gpus(facts)),
        };
        match seen {
            Ok(seen) => {
                let fits = matching(types, source, facts.declared_sku.as_ref(), facts);
                detection.record_step(types, source, &seen, fits);
            }
            Err(nothing) => detection.steps.push(format!("{source}: {nothing}")),
        }
    }
    detection
}

/// Detects a machine's type, or else its chip, as [`detect`] does. `declared` is the cluster's label, if the facts do
/// not contain it.
pub fn find(types: &MachineTypes, declared: Option<&Sku>, facts: &MachineFacts) -> Option<Detected> {
    let declared = declared.or(facts.declared_sku.as_ref());
    DetectionSource::ALL.iter().find_map(|&source| {
        let sku = unique(types, matching(types, source, declared, facts))?;
        Some(Detected { sku: sku.clone(), source })
    })
}

/// Returns the chip of a machine's GPUs, if it is known and all known ones are of one kind.
pub fn find_chip<'a>(types: &'a MachineTypes, facts: &MachineFacts) -> Option<&'a Sku> {
    unique(types, matching(types, DetectionSource::Chip, None, facts))
}

/// Returns the machine types, or for the last step the chips, that match what one source says.
fn matching<'a>(
    types: &'a MachineTypes,
    source: DetectionSource,
    declared: Option<&Sku>,
    facts: &MachineFacts,
) -> Vec<&'a Sku> {
    let with = |fits: &dyn Fn(&Signs) -> bool| -> Vec<&'a Sku> {
        types.iter().filter(|file| fits(&file.detect)).map(|file| &file.sku).collect()
    };
    let by_instance_type = |name: &str| with(&|signs| Signs::contains_ignoring_case(&signs.instance_types, name));
    match source {
        DetectionSource::Metadata => facts.instance_type.as_deref().map(by_instance_type).unwrap_or_default(),
        DetectionSource::Label => {
            let Some(label) = declared else { return Vec::new() };
            if let Some(file) = types.get(label) {
                return vec![&file.sku];
            }
            // A label may also be the cloud's instance type (`node.kubernetes.io/instance-type`), or a chip.
            let fits = by_instance_type(label.as_str());
            if fits.is_empty() { types.chip(label).map(|file| &file.sku).into_iter().collect() } else { fits }
        }
        DetectionSource::Product => {
            let Some(name) = &facts.product else { return Vec::new() };
            with(&|signs| {
                Signs::contains_ignoring_case(&signs.products, name)
                    || Signs::contains_ignoring_case(&signs.instance_types, name)
            })
        }
        DetectionSource::Gpus => {
            // A part of a GPU's name may be that of another chip: "H200" is in "GH200" too.
            let chips = matching(types, DetectionSource::Chip, None, facts);
            let is_its =
                |chip: &Option<Sku>| chip.as_ref().is_none_or(|chip| chips.is_empty() || chips.contains(&chip));
            let fits = types.iter().filter(|file| is_its(&file.chip) && matches_gpus(&file.detect, facts));
            fits.map(|file| &file.sku).collect()
        }
        DetectionSource::Chip => {
            types.chips().filter(|file| is_chip(&file.detect, facts)).map(|file| &file.sku).collect()
        }
    }
}

/// Returns the only match, or the only one that is the site's own.
fn unique<'a>(types: &MachineTypes, fits: Vec<&'a Sku>) -> Option<&'a Sku> {
    if let [only] = fits[..] {
        return Some(only);
    }
    let mut of_site = fits.into_iter().filter(|sku| types.is_from_site(sku));
    let first = of_site.next()?;
    of_site.next().is_none().then_some(first)
}

impl MachineTypes {
    /// Returns the profile of a machine with this label that reports these facts: that of its machine type, or else of
    /// its chip.
    pub fn profile_for(&self, sku: Option<&Sku>, facts: Option<&MachineFacts>) -> Option<Profile> {
        let nothing = MachineFacts::default();
        let detected = find(self, sku, facts.unwrap_or(&nothing))?;
        self.profile(&detected.sku)
    }
}

impl Profiles {
    /// Finds the profile of a machine with this label that reports these facts: that of its machine type, or else of its
    /// chip.
    pub fn resolve(&self, declared: Option<&Sku>, facts: Option<&MachineFacts>) -> Option<&Profile> {
        let detected = facts.and_then(|facts| find(self.types(), declared, facts));
        detected.and_then(|detected| self.get(Some(&detected.sku))).or_else(|| self.get(declared))
    }
}

/// Returns whether a GPU of this machine is the chip with these signs.
fn is_chip(signs: &Signs, facts: &MachineFacts) -> bool {
    facts.gpu_ids.iter().any(|id| Signs::contains_ignoring_case(&signs.gpu_ids, id))
        || facts.gpu_names.iter().any(|name| Signs::contains_ignoring_case(&signs.gpu_names, name))
}

/// Returns whether these GPUs match the type with these signs. Some may be missing, or a missing GPU would never be
/// reported; a machine with half of them or fewer is more likely another type or part of a machine.
fn matches_gpus(signs: &Signs, facts: &MachineFacts) -> bool {
    let Some(count) = signs.gpus.filter(|count| *count > 0) else { return false };
    let on_bus = facts.gpu_ids.iter().filter(|id| Signs::contains_ignoring_case(&signs.gpu_ids, id)).count();
    let named = |name: &String| signs.gpu_names.iter().any(|part| name.contains(part.as_str()));
    let in_driver = facts.gpu_names.iter().filter(|name| named(name)).count();
    let seen = u32::try_from(on_bus.max(in_driver)).unwrap_or(u32::MAX);
    seen <= count && seen > count / 2
}

fn describe_gpus(facts: &MachineFacts) -> String {
    let mut kinds: Vec<&str> = facts.gpu_ids.iter().chain(&facts.gpu_names).map(String::as_str).collect();
    kinds.sort_unstable();
    kinds.dedup();
    match facts.gpu_ids.len().max(facts.gpu_names.len()) {
        0 => "no NVIDIA GPU".to_owned(),
        1 => format!("1 NVIDIA GPU ({})", kinds.join(", ")),
        count => format!("{count} NVIDIA GPUs ({})", kinds.join(", ")),
    }
}

impl Detection {
    /// Adopts the step's result if it is unique and no more reliable step had one.
    fn record_step(&mut self, types: &MachineTypes, by: DetectionSource, seen: &str, fits: Vec<&Sku>) {
        let names = fits.iter().map(|sku| sku.as_str()).collect::<Vec<_>>().join(", ");
        let (several, none) = (fits.len() > 1, fits.is_empty());
        let chosen = unique(types, fits);
        let outcome = match (chosen, &self.found) {
            (None, _) if none => "no profile matches".to_owned(),
            (None, _) => format!("several profiles match ({names}), so none is chosen; choose one with --sku"),
            (Some(sku), None) if several => format!("profile `{sku}`, the site's own of several that match ({names})"),
            (Some(sku), None) => format!("profile `{sku}`"),
            (Some(sku), Some(found)) if found.sku == *sku => "as above".to_owned(),
            (Some(sku), Some(_)) => format!("profile `{sku}`, overridden by a more reliable source"),
        };
        self.steps.push(format!("{by}: {seen}: {outcome}"));
        if self.found.is_none() {
            self.found = chosen.map(|sku| Detected { sku: sku.clone(), source: by });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::ProfileFile;
    use proptest::prelude::*;

    fn types() -> MachineTypes {
        let texts = [
            "sku = \"p5\"\nversion = 1\n[detect]\ninstance_types = [\"p5.48xlarge\"]\n",
            "sku = \"dgx\"\nversion = 1\n[detect]\nproducts = [\"DGXH100\"]\n",
            "sku = \"hgx\"\nversion = 1\n[detect]\ngpu_ids = [\"10de:2330\"]\ngpu_names = [\"H100 80GB HBM3\"]\ngpus = 8\n",
        ];
        MachineTypes::new(texts.map(|text| ProfileFile::read(text).unwrap()))
    }

    fn h100s(count: usize) -> MachineFacts {
        MachineFacts { gpu_ids: vec!["10DE:2330".to_owned(); count], ..MachineFacts::default() }
    }

    fn found(facts: &MachineFacts) -> Option<(String, DetectionSource)> {
        detect(&types(), facts).found.map(|found| (found.sku.to_string(), found.source))
    }

    #[test]
    fn the_most_reliable_source_comes_first_and_each_step_is_explained() {
        let mut facts = h100s(8);
        assert_eq!(found(&facts), Some(("hgx".to_owned(), DetectionSource::Gpus)));
        facts.product = Some("DGXH100\n".to_owned());
        assert_eq!(found(&facts), Some(("dgx".to_owned(), DetectionSource::Product)));
        facts.declared_sku = Some(Sku::new("hgx").unwrap());
        assert_eq!(found(&facts), Some(("hgx".to_owned(), DetectionSource::Label)));
        facts.instance_type = Some("P5.48xlarge".to_owned());
        assert_eq!(found(&facts), Some(("p5".to_owned(), DetectionSource::Metadata)));
        let steps = detect(&types(), &facts).steps;
        assert_eq!(steps.len(), 4, "{steps:?}");
        assert!(steps[2].contains("`DGXH100`") && steps[2].contains("more reliable"), "{steps:?}");
        facts.instance_type = Some("p99".to_owned());
        assert_eq!(
            found(&facts),
            Some(("hgx".to_owned(), DetectionSource::Label)),
            "a type without profile hides nothing"
        );
    }

    #[test]
    fn a_label_or_a_product_name_may_be_a_cloud_instance_type() {
        let label = MachineFacts { declared_sku: Some(Sku::new("p5.48xlarge").unwrap()), ..MachineFacts::default() };
        assert_eq!(found(&label), Some(("p5".to_owned(), DetectionSource::Label)));
        let firmware = MachineFacts { product: Some("p5.48xlarge".to_owned()), ..MachineFacts::default() };
        assert_eq!(found(&firmware), Some(("p5".to_owned(), DetectionSource::Product)));
    }

    #[test]
    fn a_lost_gpu_does_not_hide_the_type_and_one_of_eight_is_not_an_hgx() {
        for (count, fits) in [(0, false), (1, false), (4, false), (5, true), (7, true), (8, true), (9, false)] {
            assert_eq!(found(&h100s(count)).is_some(), fits, "{count}");
        }
        let named = MachineFacts { gpu_names: vec!["NVIDIA H100 80GB HBM3".to_owned(); 8], ..MachineFacts::default() };
        assert_eq!(found(&named), Some(("hgx".to_owned(), DetectionSource::Gpus)));
        let other = MachineFacts { gpu_names: vec!["NVIDIA H100 PCIe".to_owned(); 8], ..MachineFacts::default() };
        assert_eq!(found(&other), None);
    }

    #[test]
    fn if_several_types_match_none_is_chosen_and_the_step_explains_it() {
        let mut types = types();
        let twin = "sku = \"twin\"\nversion = 1\n[detect]\ngpu_ids = [\"10de:2330\"]\ngpus = 8\n";
        types.add_built_in(ProfileFile::read(twin).unwrap()).unwrap();
        let detection = detect(&types, &h100s(8));
        assert_eq!(detection.found, None);
        assert!(detection.steps.iter().any(|step| step.contains("hgx, twin")), "{:?}", detection.steps);
    }

    #[test]
    fn of_several_matching_types_the_only_one_of_the_site_is_chosen() {
        let mut types = types();
        let ours = "sku = \"ours\"\nversion = 1\nlike = \"p5\"\n[detect]\ninstance_types = [\"p5.48xlarge\"]\n";
        types.merge(ProfileFile::read(ours).unwrap()).unwrap();
        let facts = MachineFacts { instance_type: Some("p5.48xlarge".to_owned()), ..MachineFacts::default() };
        let detection = detect(&types, &facts);
        assert_eq!(detection.found.unwrap().sku.as_str(), "ours");
        assert!(
            detection.steps[0].contains("the site's own of several that match (ours, p5)"),
            "{:?}",
            detection.steps
        );
        assert_eq!(find(&types, None, &facts).unwrap().sku.as_str(), "ours");
        types.merge(ProfileFile::read(&ours.replace("ours", "twin")).unwrap()).unwrap();
        assert_eq!(detect(&types, &facts).found, None, "the site has two");
    }

    fn with_chip() -> MachineTypes {
        let mut types = types();
        let chip = "chip = \"h100-sxm\"\nversion = 1\n[expect]\npeak = 1\n[detect]\ngpu_ids = [\"10de:2330\"]\n\
                    gpu_names = [\"NVIDIA H100 80GB HBM3\"]\n";
        types.add_built_in(ProfileFile::read(chip).unwrap()).unwrap();
        types
    }

    #[test]
    fn a_machine_of_unknown_type_has_the_profile_of_its_chip() {
        let types = with_chip();
        let profiles = types.profiles();
        let named = |name: &str| MachineFacts { gpu_names: vec![name.to_owned()], ..MachineFacts::default() };
        for (label, facts, name) in [
            (None, None, None),
            (Some("hgx"), None, Some("hgx")),
            (Some("p5.48xlarge"), None, Some("p5")),
            (Some("h100-sxm"), None, Some("h100-sxm")),
            (Some("rack-9"), Some(h100s(1)), Some("h100-sxm")),
            (Some("p5.48xlarge"), Some(h100s(1)), Some("p5")),
            (None, Some(h100s(1)), Some("h100-sxm")),
            (None, Some(h100s(8)), Some("hgx")),
            (None, Some(named("NVIDIA H100 80GB HBM3")), Some("h100-sxm")),
            (None, Some(named("NVIDIA H100 80GB HBM3e")), None),
        ] {
            let label = label.map(|label| Sku::new(label).unwrap());
            let found = profiles.resolve(label.as_ref(), facts.as_ref());
            assert_eq!(found.map(|found| found.sku.as_str()), name, "{label:?} {facts:?}");
            assert_eq!(types.profile_for(label.as_ref(), facts.as_ref()).as_ref(), found);
        }
        let detection = detect(&types, &h100s(1));
        assert_eq!(detection.found.as_ref().unwrap().source, DetectionSource::Chip);
        assert!(detection.steps.last().unwrap().ends_with("profile `h100-sxm`"), "{:?}", detection.steps);
        let mut mixed = h100s(1);
        mixed.gpu_ids.push("10de:ffff".to_owned());
        assert_eq!(find(&types, None, &mixed).unwrap().sku.as_str(), "h100-sxm", "an unknown card beside it");
        assert_eq!(find_chip(&types, &h100s(8)).map(Sku::as_str), Some("h100-sxm"), "of a machine of known type too");
        assert_eq!(find_chip(&types, &MachineFacts::default()), None);
    }

    #[test]
    fn profiles_without_signs_are_found_by_name_even_if_facts_are_known() {
        let sim = Sku::new("sim").unwrap();
        let profiles = Profiles::new([Profile::stated(sim.clone(), [("gpus", 8.0)])]);
        assert_eq!(profiles.resolve(Some(&sim), Some(&h100s(8))).unwrap().value("gpus"), Some(8.0));
        assert_eq!(profiles.resolve(None, Some(&h100s(8))), None);
    }

    #[test]
    fn a_cloud_is_detected_by_its_firmware_only() {
        let facts = |vendor: &str, product: &str, tag: &str| MachineFacts {
            vendor: Some(vendor.to_owned()),
            product: Some(product.to_owned()),
            asset_tag: Some(tag.to_owned()),
            ..MachineFacts::default()
        };
        assert_eq!(facts("Amazon EC2", "p5.48xlarge", "Amazon EC2").cloud(), Some(Cloud::Aws));
        assert_eq!(facts("Microsoft Corporation", "Virtual Machine", AZURE_TAG).cloud(), Some(Cloud::Azure));
        assert_eq!(facts("Google", "Google Compute Engine", "").cloud(), Some(Cloud::Gcp));
        assert_eq!(facts("Oracle Corporation", "ORACLE SERVER X9-2c", OCI_TAG).cloud(), Some(Cloud::Oci));
        // A Hyper-V machine on premises is not in Azure.
        assert_eq!(facts("Microsoft Corporation", "Virtual Machine", "0000-0000").cloud(), None);
        assert_eq!(MachineFacts::default().cloud(), None);
        for cloud in Cloud::ALL {
            assert_eq!(Cloud::from_code(cloud.code()), Some(*cloud));
        }
        for by in DetectionSource::ALL {
            assert_eq!(DetectionSource::from_code(by.code()), Some(*by));
        }
    }

    #[test]
    fn facts_are_bounded_and_those_of_a_real_machine_are_unchanged() {
        let real = MachineFacts {
            instance_type: Some("p5.48xlarge".to_owned()),
            gpu_names: vec!["NVIDIA H100 80GB HBM3".to_owned(); 8],
            ..h100s(8)
        };
        assert_eq!(real.clone().bounded(), real);
        let hostile = MachineFacts {
            product: Some("ä".repeat(1 << 20)),
            gpu_names: vec!["x".repeat(5000); 5000],
            ..MachineFacts::default()
        };
        let kept = hostile.bounded();
        assert_eq!(kept.product.map(|text| text.chars().count()), Some(MAX_FACT_CHARS));
        assert_eq!((kept.gpu_names.len(), kept.gpu_names[0].len()), (MAX_GPUS, MAX_FACT_CHARS));
    }

    proptest! {
        #[test]
        fn for_any_facts_detection_returns_a_known_type_or_none(
            instance in proptest::option::of("[a-z0-9.]{0,14}"), product in proptest::option::of(".{0,20}"),
            count in 0_usize..20, label in proptest::option::of("[a-z0-9]{1,5}"),
        ) {
            let facts = MachineFacts {
                instance_type: instance,
                product,
                declared_sku: label.and_then(|name| Sku::new(&name).ok()),
                ..h100s(count)
            };
            let detection = detect(&types(), &facts);
            prop_assert_eq!(&detection.found, &find(&types(), None, &facts));
            if let Some(found) = detection.found {
                prop_assert!(types().get(&found.sku).is_some());
            }
            prop_assert!(detection.steps.len() >= 3);
        }
    }
}
