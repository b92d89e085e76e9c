//! Detection of a machine's type from what the machine reports.
//!
//! The order is fixed, most reliable source first: the cloud's metadata service, the cluster's label or the operator's
//! setting, the firmware's product name, the GPUs. A step that matches several types decides nothing: a wrong profile
//! makes good machines fail, whereas no profile only leaves counts without a limit.

use serde::{Deserialize, Serialize};

use crate::{
    ids::Sku,
    profile::{MachineTypes, Signs},
    reason::coded,
};

/// Facts that a machine reports about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    }
}

/// The asset tag of every Azure virtual machine.
const AZURE_TAG: &str = "7783-7084-3265-9085-8269-3286-77";

impl MachineFacts {
    /// Returns the cloud that the firmware names. No metadata service is queried before its cloud is known.
    pub fn cloud(&self) -> Option<Cloud> {
        let is = |field: &Option<String>, expected: &str| field.as_deref().is_some_and(|text| text.trim() == expected);
        if is(&self.vendor, "Amazon EC2") {
            Some(Cloud::Aws)
        } else if is(&self.asset_tag, AZURE_TAG) {
            Some(Cloud::Azure)
        } else if is(&self.product, "Google Compute Engine") {
            Some(Cloud::Gcp)
        } else {
            None
        }
    }
}

coded! {
    /// The source from which a machine's type was detected.
    pub enum DetectionSource {
        Metadata => "metadata",
        Label => "label",
        Product => "product",
        Gpus => "gpus",
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
    pub sku: Sku,
    pub source: DetectionSource,
}

/// Detects a machine's type.
pub fn detect(types: &MachineTypes, facts: &MachineFacts) -> Detection {
    let mut detection = Detection::default();
    let fitting = |fits: &dyn Fn(&Signs) -> bool| -> Vec<Sku> {
        types.iter().filter(|file| fits(&file.detect)).map(|file| file.sku.clone()).collect()
    };
    match &facts.instance_type {
        Some(name) => {
            let fits = fitting(&|signs| Signs::contains_ignoring_case(&signs.instance_types, name));
            detection.record_step(
                DetectionSource::Metadata,
                &format!("the cloud's metadata service reports `{name}`"),
                fits,
            );
        }
        None => detection.steps.push("metadata: no cloud reports an instance type".to_owned()),
    }
    if let Some(label) = &facts.declared_sku {
        let fits = types.get(label).map(|file| file.sku.clone());
        // A label may also be the cloud's instance type (`node.kubernetes.io/instance-type`).
        let by_cloud = || fitting(&|signs| Signs::contains_ignoring_case(&signs.instance_types, label.as_str()));
        let fits = fits.map_or_else(by_cloud, |sku| vec![sku]);
        detection.record_step(DetectionSource::Label, &format!("the label or the setting is `{label}`"), fits);
    }
    match &facts.product {
        Some(name) => {
            let fits = fitting(&|signs| {
                Signs::contains_ignoring_case(&signs.products, name)
                    || Signs::contains_ignoring_case(&signs.instance_types, name)
            });
            detection.record_step(DetectionSource::Product, &format!("the firmware reports `{}`", name.trim()), fits);
        }
        None => detection.steps.push("product: the firmware reports no product name".to_owned()),
    }
    let fits = fitting(&|signs| matches_gpus(signs, facts));
    detection.record_step(DetectionSource::Gpus, &describe_gpus(facts), fits);
    detection
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
    fn record_step(&mut self, by: DetectionSource, seen: &str, fits: Vec<Sku>) {
        let outcome = match (fits.as_slice(), &self.found) {
            ([], _) => "no profile matches".to_owned(),
            ([sku], None) => format!("profile `{sku}`"),
            ([sku], Some(found)) if found.sku == *sku => "as above".to_owned(),
            ([sku], Some(_)) => format!("profile `{sku}`, overridden by a more reliable source"),
            (several, _) => {
                let names: Vec<_> = several.iter().map(Sku::as_str).collect();
                format!("several profiles match ({}), so none is chosen; choose one with --sku", names.join(", "))
            }
        };
        self.steps.push(format!("{by}: {seen}: {outcome}"));
        if let ([_], None) = (fits.as_slice(), &self.found) {
            self.found = fits.into_iter().next().map(|sku| Detected { sku, source: by });
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
        types.merge(ProfileFile::read(twin).unwrap()).unwrap();
        let detection = detect(&types, &h100s(8));
        assert_eq!(detection.found, None);
        assert!(detection.steps.last().unwrap().contains("hgx, twin"), "{:?}", detection.steps);
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
            if let Some(found) = detection.found {
                prop_assert!(types().get(&found.sku).is_some());
            }
            prop_assert!(detection.steps.len() >= 3);
        }
    }
}
