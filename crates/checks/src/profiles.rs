//! The built-in profiles: `profiles/*.toml` of machine types and `profiles/chips/*.toml` of chips, one commented file
//! each.
//!
//! A file omits a number that differs from site to site or that no source gives: what is not expected is not judged and
//! reported as such, while a wrong limit would take good machines out of service. Only NVIDIA's GPUs are in scope:
//! Azure's MI200 and MI300X families have no file here.
//!
//! A published peak of a chip (`peak_…`) is no limit by itself: rules compare with a third and with half of it. It is
//! omitted where a healthy GPU could miss that with the kernels of `dl`; the file says why.

use doctor_core::{
    ids::Sku,
    profile::{MachineTypes, ProfileFile},
};

/// Lists the built-in profiles. A new machine type or chip is its file and its name here; a profile that others build on
/// (`like`) comes first.
macro_rules! profiles {
    ($(#[$doc:meta])* $list:ident in $folder:literal: $($name:literal),* $(,)?) => {
        $(#[$doc])*
        pub const $list: &[(&str, &str)] = &[$(($name, include_str!(concat!($folder, $name, ".toml")))),*];
    };
}

profiles![
    /// Name and text of the profile of every built-in chip.
    CHIPS in "../profiles/chips/":
    "a10",
    "a100-pcie-40gb",
    "a100-pcie-80gb",
    "a100-sxm-40gb",
    "a100-sxm-80gb",
    "b200",
    "b300",
    "gb200",
    "gb300",
    "h100-nvl",
    "h100-pcie",
    "h100-sxm",
    "h200-nvl",
    "h200-sxm",
    "l4",
    "l40s",
    "rtx-pro-6000-server",
    "v100-pcie-16gb",
    "v100-pcie-32gb",
    "v100-sxm2-16gb",
    "v100-sxm2-32gb",
];

profiles![
    /// Name and text of the profile of every built-in machine type.
    BUILT_IN in "../profiles/":
    "gb200-tray",
    "gb300-tray",
    "hgx-a100",
    "hgx-a100-80gb",
    "hgx-b200",
    "hgx-b300",
    "hgx-h100",
    "hgx-h200",
    "a3-highgpu-8g",
    "a3-megagpu-8g",
    "a3-ultragpu-8g",
    "a4-highgpu-8g",
    "a4x-highgpu-4g",
    "bm.gpu.a100-v2.8",
    "bm.gpu.b200.8",
    "bm.gpu.h100.8",
    "bm.gpu.h200.8",
    "bm.gpu4.8",
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
    "nd128isr_gb300_v6",
    "nd128isr_ndr_gb200_v6",
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
    "p5.4xlarge",
    "p5e.48xlarge",
    "p5en.48xlarge",
    "p6-b200.48xlarge",
    "p6-b300.48xlarge",
    "p6e-gb200.36xlarge",
];

/// Returns all built-in machine types and chips.
///
/// # Panics
/// If a compiled-in file is not a profile, which a unit test rules out.
pub fn built_in() -> MachineTypes {
    merge(CHIPS.iter().chain(BUILT_IN).map(read).collect())
}

/// Returns the built-in profiles that this file changes or builds on: parsing all takes longer.
///
/// # Panics
/// If a compiled-in file is not a profile, which a unit test rules out.
pub fn built_in_for(file: &ProfileFile) -> MachineTypes {
    let mut machines = Vec::new();
    let mut chips: Vec<Sku> = file.chip.iter().cloned().collect();
    let mut next = Some(file.like.clone().unwrap_or_else(|| file.sku.clone()));
    // A name is that of a machine type or of a chip; the other list does not have it.
    chips.extend(next.clone());
    while let Some(base) = next.take().and_then(|sku| find(BUILT_IN, &sku)) {
        next.clone_from(&base.like);
        chips.extend(base.chip.clone());
        machines.insert(0, base);
    }
    let mut files: Vec<ProfileFile> = chips.iter().filter_map(|chip| find(CHIPS, chip)).collect();
    files.append(&mut machines);
    merge(files)
}

fn find(list: &[(&str, &str)], sku: &Sku) -> Option<ProfileFile> {
    list.iter().find(|(name, _)| *name == sku.as_str()).map(read)
}

fn merge(files: Vec<ProfileFile>) -> MachineTypes {
    let mut types = MachineTypes::default();
    for file in files {
        types.add_built_in(file).expect("a compiled-in profile comes after the one that it extends and after its chip");
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
        profile::{Basis, Layer},
        sku_detection::{DetectionSource, MachineFacts, detect, find_chip},
    };

    use super::*;

    #[test]
    fn every_file_is_a_profile_named_as_its_file_with_a_source_and_a_comment() {
        let types = built_in();
        assert_eq!(types.iter().count(), BUILT_IN.len(), "two files have the same name");
        assert_eq!(types.chips().count(), CHIPS.len(), "two files have the same name");
        let sku = |name: &str| Sku::new(name).unwrap();
        for (name, text) in BUILT_IN {
            let file = types.get(&sku(name)).unwrap_or_else(|| panic!("{name}.toml has another name"));
            assert!(text.starts_with("# ") && !file.source.is_empty() && !file.detect.is_empty(), "{name}");
            assert!(file.layer == Layer::Machine && file.expect.contains_key("gpu_count"), "{name}");
            assert!(file.chip.is_some() && types.chip(&sku(name)).is_none(), "{name}");
        }
        for (name, text) in CHIPS {
            let file = types.chip(&sku(name)).unwrap_or_else(|| panic!("chips/{name}.toml has another name"));
            assert!(text.starts_with("# NVIDIA ") && !file.source.is_empty(), "{name}");
            assert!(!file.detect.gpu_ids.is_empty() && !file.detect.gpu_names.is_empty(), "{name}");
        }
        for file in types.iter().chain(types.chips()) {
            let stated = file.expect.iter().find(|(_, expected)| expected.basis == Basis::Stated);
            assert_eq!(stated, None, "{}: a built-in figure has a source", file.sku);
        }
    }

    #[test]
    fn the_profiles_that_a_file_builds_on_are_loaded_without_the_others() {
        let all = built_in();
        for file in all.iter().chain(all.chips()) {
            let mut some = built_in_for(file);
            assert!(some.iter().count() <= 1 && some.chips().count() <= 1, "{}", file.sku);
            some.add_built_in(file.clone()).unwrap();
            assert_eq!(some.profile(&file.sku), all.profile(&file.sku), "{}", file.sku);
        }
        let unknown = ProfileFile::machine(Sku::new("unknown-sku").unwrap());
        assert_eq!(built_in_for(&unknown), MachineTypes::default());
    }

    #[test]
    fn every_machine_has_a_limit_for_what_dl_measures() {
        let types = built_in();
        for chip in types.chips() {
            let has = |metric: &str| chip.expect.contains_key(metric);
            assert!(has("gpu_memory_bytes") && has("peak_memory_bytes_per_s"), "{}", chip.sku);
            let products = ["bf16", "fp16", "fp32"].map(|number| format!("peak_gemm_{number}_flop_per_s"));
            assert!(products.iter().any(|metric| has(metric)), "{}", chip.sku);
            for (metric, expected) in chip.expect.iter().filter(|(metric, _)| metric.starts_with("peak_")) {
                assert!(matches!(expected.basis, Basis::Published | Basis::Derived), "{}: {metric}", chip.sku);
                // A figure of ours beside it is a plausible share of it: a slip in a power of ten is found.
                if let Some(measured) = chip.expect.get(&metric["peak_".len()..]) {
                    assert!((0.5..1.0).contains(&(measured.value / expected.value)), "{}: {metric}", chip.sku);
                }
            }
        }
        // Rates of one chip relative to another: bf16 on an A100, an H100 and an L40S.
        let peak = |name: &str| types.profile(&Sku::new(name).unwrap()).unwrap().value("peak_gemm_bf16_flop_per_s");
        assert_eq!(["p4d.24xlarge", "p5.48xlarge", "l40s"].map(peak), [Some(312e12), Some(989.5e12), Some(362e12)]);
    }

    #[test]
    fn a_cloud_machine_is_detected_by_its_instance_type() {
        let types = built_in();
        for (called, sku) in [
            ("p5.48xlarge", "p5.48xlarge"),
            ("Standard_ND96isr_H100_v5", "nd96isr_h100_v5"),
            ("standard_nc24ads_a100_v4", "nc24ads_a100_v4"),
            ("a3-ultragpu-8g", "a3-ultragpu-8g"),
            ("Standard_ND128isr_NDR_GB200_v6", "nd128isr_ndr_gb200_v6"),
            ("BM.GPU.H100.8", "bm.gpu.h100.8"),
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
            (gpus("10de:20b2", "NVIDIA A100-SXM4-80GB", 8), Some("hgx-a100-80gb")),
            (gpus("10de:2335", "NVIDIA H200", 1), Some("h200-sxm")),
            (gpus("10de:233b", "NVIDIA H200 NVL", 8), Some("h200-nvl")),
            (gpus("10de:2342", "NVIDIA GH200 480GB", 8), None),
            (gpus("10de:27b8", "NVIDIA L4", 8), Some("l4")),
        ] {
            let found = |facts: &MachineFacts| detect(&types, facts).found.map(|found| found.sku.to_string());
            assert_eq!(found(&facts).as_deref(), sku, "{facts:?}");
            // In a container that does not see the bus, the names decide alone.
            let names = MachineFacts { gpu_ids: Vec::new(), ..facts };
            assert!(sku.is_none() || found(&names).as_deref() == sku, "{names:?}");
        }
        for file in types.chips() {
            for id in &file.detect.gpu_ids {
                let facts = MachineFacts { gpu_ids: vec![id.clone()], ..MachineFacts::default() };
                assert_eq!(find_chip(&types, &facts), Some(&file.sku), "{id} is of two chips");
            }
            for name in &file.detect.gpu_names {
                let facts = MachineFacts { gpu_names: vec![name.clone()], ..MachineFacts::default() };
                assert_eq!(find_chip(&types, &facts), Some(&file.sku), "{name} is of two chips");
            }
        }
    }

    #[test]
    fn every_expected_value_is_measured_by_a_check_or_a_bandwidth() {
        let rules = crate::Catalogue::built_in().rules(&Policy::built_in()).unwrap();
        let used: BTreeSet<&str> = rules
            .iter()
            .filter_map(|rule| match &rule.when {
                When::BelowProfile { of: Some(of), .. } => Some(of.as_str()),
                When::BelowProfile { metric, .. } | When::NotProfile { metric } => Some(metric.as_str()),
                _ => None,
            })
            .collect();
        let types = built_in();
        for file in types.iter().chain(types.chips()) {
            let is_bandwidth = |metric: &str| metric.ends_with("_per_s") && !metric.starts_with("peak_");
            for metric in file.expect.keys().filter(|metric| !is_bandwidth(metric)) {
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
            let profile = profiles.get(Some(&Sku::new(name).unwrap())).unwrap();
            assert_eq!((profile.value("gpu_count"), profile.value("efa_devices")), (Some(gpus), Some(efa)), "{name}");
        }
    }
}
