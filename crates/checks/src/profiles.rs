//! The built-in machine profiles: `profiles/*.toml`, one commented file each.
//!
//! A file omits a number that differs from site to site or that no source gives: a count without a limit is
//! inconclusive and reported as such, while a wrong limit would take good machines out of service. Only NVIDIA's GPUs
//! are in scope: Azure's MI200 and MI300X families have no file here.

use doctor_core::{
    ids::Sku,
    profile::{MachineTypes, ProfileFile},
};

/// Lists the built-in profiles. A new machine type is its file and its name here; a profile that others build on
/// (`like`) comes first.
macro_rules! profiles {
    ($($name:literal),* $(,)?) => {
        /// Name and text of every built-in profile.
        pub const BUILT_IN: &[(&str, &str)] = &[$(($name, include_str!(concat!("../profiles/", $name, ".toml")))),*];
    };
}

profiles![
    "gb200-tray",
    "hgx-a100",
    "hgx-b200",
    "hgx-h100",
    "hgx-h200",
    "a3-highgpu-8g",
    "a3-megagpu-8g",
    "a3-ultragpu-8g",
    "a4-highgpu-8g",
    "g6.12xlarge",
    "g6.16xlarge",
    "g6.24xlarge",
    "g6.2xlarge",
    "g6.48xlarge",
    "g6.4xlarge",
    "g6.8xlarge",
    "g6.xlarge",
    "nc12s_v3",
    "nc24ads_a100_v4",
    "nc24rs_v3",
    "nc24s_v3",
    "nc40ads_h100_v5",
    "nc48ads_a100_v4",
    "nc6s_v3",
    "nc80adis_h100_v5",
    "nc96ads_a100_v4",
    "nd40rs_v2",
    "nd96amsr_a100_v4",
    "nd96asr_v4",
    "nd96is_h100_v5",
    "nd96is_h200_v5",
    "nd96isr_h100_v5",
    "nd96isr_h200_v5",
    "nd96isrf_h200_v5",
    "p4d.24xlarge",
    "p4de.24xlarge",
    "p5.48xlarge",
    "p5e.48xlarge",
    "p5en.48xlarge",
    "p6-b200.48xlarge",
];

/// Returns all built-in machine types.
///
/// # Panics
/// If a compiled-in file is not a profile, which a unit test rules out.
pub fn built_in() -> MachineTypes {
    merge(BUILT_IN.iter().map(read).collect())
}

/// Returns this built-in machine type and those that it builds on: parsing all takes longer. Returns none if it is not
/// built in.
///
/// # Panics
/// If a compiled-in file is not a profile, which a unit test rules out.
pub fn built_in_like(sku: &Sku) -> MachineTypes {
    let (mut files, mut next) = (Vec::new(), Some(sku.clone()));
    while let Some(sku) = next.take() {
        let Some(built_in) = BUILT_IN.iter().find(|(name, _)| *name == sku.as_str()) else { break };
        let file = read(built_in);
        next.clone_from(&file.like);
        files.insert(0, file);
    }
    merge(files)
}

fn merge(files: Vec<ProfileFile>) -> MachineTypes {
    let mut types = MachineTypes::default();
    for file in files {
        types.merge(file).expect("a compiled-in profile comes after the one that it extends");
    }
    types
}

fn read((name, text): &(&str, &str)) -> ProfileFile {
    ProfileFile::read(text).unwrap_or_else(|error| panic!("compiled-in profile {name}: {error}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use doctor_core::{
        policy::{Policy, When},
        sku_detection::{DetectionSource, MachineFacts, detect},
    };

    use super::*;

    #[test]
    fn every_file_is_a_profile_named_as_its_file_with_a_source_and_a_comment() {
        let types = built_in();
        assert_eq!(types.iter().count(), BUILT_IN.len(), "two files have the same name");
        for (name, text) in BUILT_IN {
            let file = types.get(&Sku::new(name).unwrap()).unwrap_or_else(|| panic!("{name}.toml has another name"));
            assert!(text.starts_with("# ") && !file.source.is_empty() && !file.detect.is_empty(), "{name}");
            assert!(file.expect.contains_key("gpu_count"), "{name}");
        }
    }

    #[test]
    fn a_machine_type_is_loaded_with_those_it_inherits_from() {
        let all = built_in();
        for file in all.iter() {
            assert_eq!(built_in_like(&file.sku).get(&file.sku), Some(file), "{}", file.sku);
        }
        assert_eq!(built_in_like(&Sku::new("unknown-sku").unwrap()), MachineTypes::default());
    }

    #[test]
    fn a_cloud_machine_is_detected_by_its_instance_type() {
        let types = built_in();
        for (called, sku) in [
            ("p5.48xlarge", "p5.48xlarge"),
            ("Standard_ND96isr_H100_v5", "nd96isr_h100_v5"),
            ("standard_nc24ads_a100_v4", "nc24ads_a100_v4"),
            ("a3-ultragpu-8g", "a3-ultragpu-8g"),
        ] {
            let facts = MachineFacts { instance_type: Some(called.to_owned()), ..MachineFacts::default() };
            let found = detect(&types, &facts).found.unwrap_or_else(|| panic!("{called}"));
            assert_eq!((found.sku.as_str(), found.source), (sku, DetectionSource::Metadata));
            let label = Sku::new(called).unwrap();
            let by_label = detect(&types, &MachineFacts { declared_sku: Some(label), ..MachineFacts::default() });
            assert_eq!(by_label.found.unwrap().sku.as_str(), sku);
        }
    }

    #[test]
    fn the_controller_finds_a_profile_by_instance_type() {
        let profiles = built_in().profiles();
        let name = Sku::new("Standard_ND96isr_H100_v5").unwrap();
        assert_eq!(profiles.get(Some(&name)).unwrap().sku.as_str(), "nd96isr_h100_v5");
        assert!(profiles.get(Some(&Sku::new("p99").unwrap())).is_none());
    }

    #[test]
    fn machine_types_are_unambiguous() {
        let types = built_in();
        let mut names = BTreeSet::new();
        for file in types.iter() {
            for name in &file.detect.instance_types {
                assert!(names.insert(name.to_ascii_lowercase()), "{name} is in two profiles");
            }
        }
        // "H200" must not match the GH200, nor "B200" the GB200: their numbers differ.
        let gpus = |id: &str, name: &str, count: usize| MachineFacts {
            gpu_ids: vec![id.to_owned(); count],
            gpu_names: vec![name.to_owned(); count],
            ..MachineFacts::default()
        };
        for (facts, sku) in [
            (gpus("10de:2335", "NVIDIA H200", 8), Some("hgx-h200")),
            (gpus("10de:2901", "NVIDIA B200", 8), Some("hgx-b200")),
            (gpus("10de:2941", "NVIDIA GB200", 4), Some("gb200-tray")),
            (gpus("10de:2335", "NVIDIA H200", 1), None),
            (gpus("10de:27b8", "NVIDIA L4", 8), None),
        ] {
            let found = detect(&types, &facts).found.map(|found| found.sku.to_string());
            assert_eq!(found.as_deref(), sku, "{facts:?}");
        }
    }

    #[test]
    fn every_expected_value_is_measured_by_a_check_or_a_bandwidth() {
        let rules = crate::Catalogue::built_in().rules(&Policy::built_in()).unwrap();
        let used: BTreeSet<&str> = rules
            .iter()
            .filter(|rule| matches!(rule.when, When::NotProfile { .. } | When::BelowProfile { .. }))
            .filter_map(|rule| rule.when.metric())
            .collect();
        for file in built_in().iter() {
            for metric in file.expect.keys().filter(|metric| !metric.ends_with("_per_s")) {
                assert!(used.contains(metric.as_str()), "{}: no rule uses {metric}", file.sku);
            }
        }
    }

    #[test]
    fn the_seeds_values_are_retained() {
        let profiles = built_in().profiles();
        // instance-profiles.conf of seed 002: type, GPUs, EFA.
        for (name, gpus, efa) in [
            ("p4d.24xlarge", 8.0, 4.0),
            ("p4de.24xlarge", 8.0, 4.0),
            ("p5.48xlarge", 8.0, 32.0),
            ("p5e.48xlarge", 8.0, 32.0),
            ("p5en.48xlarge", 8.0, 16.0),
            ("p6-b200.48xlarge", 8.0, 8.0),
            ("g6.48xlarge", 8.0, 1.0),
            ("g6.xlarge", 1.0, 0.0),
        ] {
            let expect = &profiles.get(Some(&Sku::new(name).unwrap())).unwrap().expect;
            let off = (expect["gpu_count"] - gpus).abs() + (expect["efa_devices"] - efa).abs();
            assert!(off < f64::EPSILON, "{name}");
        }
    }
}
