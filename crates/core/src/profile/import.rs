//! Import of profiles from the files of other tools: `instance-profiles.conf` of AWS's health-check suite, and the NHC
//! files of AzNHC (`conf/*.conf`).
//!
//! Every line is used, known to be covered by our own checks, or reported as not understood. None is skipped silently.

use std::collections::BTreeMap;

use super::{Expected, ProfileFile, Signs};
use crate::ids::Sku;

/// The result of an import.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Imported {
    pub files: Vec<ProfileFile>,
    /// Number of lines that became values of a profile.
    pub used: usize,
    /// Number of lines about something that our checks cover without a profile.
    pub covered: usize,
    pub skipped: Vec<Skipped>,
}

/// A line that was not imported, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// Counted from one.
    pub line: usize,
    pub text: String,
    pub why: String,
}

impl Imported {
    fn skip(&mut self, (line, text): (usize, &str), why: impl Into<String>) {
        let text = text.chars().take(120).collect();
        self.skipped.push(Skipped { line, text, why: why.into() });
    }
}

/// Upper bound of a plausible value; a larger one is rejected.
const MAX_VALUE: f64 = 1e15;

/// AzNHC checks that are unrelated to the machine type, or whose limit is one of our rules.
const COVERED: [&str; 18] = [
    "check_hw_swap",
    "check_hw_eth",
    "check_hw_topology",
    "check_nvsmi_healthmon",
    "check_gpu_xid",
    "check_gpu_ecc",
    "check_gpu_clock_throttling",
    "check_app_gpu_clocks",
    "check_gpu_persistence",
    "check_nvlink_status",
    "check_vbios",
    "check_ib_link_flapping",
    "check_ib_pkeys",
    "check_fs_used",
    "check_fs_mount_rw",
    "check_ps_service",
    "check_dmi_raw_data_match",
    "check_hw_mcelog",
];

/// Imports a file of either kind. `name` is the file name without its extension: AzNHC names its files after the
/// machine type.
pub fn import(name: &str, text: &str) -> Imported {
    let lines = || {
        let numbered = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
        numbered.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
    };
    let mut imported = Imported::default();
    if lines().any(|(_, line)| line.contains("||")) {
        nhc(name, lines(), &mut imported);
    } else {
        instance_profiles(name, lines(), &mut imported);
    }
    imported
}

/// Parses lines of the form `type|gpus|efa|nvlink|provider`, one machine type per line.
fn instance_profiles<'a>(name: &str, lines: impl Iterator<Item = (usize, &'a str)>, imported: &mut Imported) {
    for (number, line) in lines {
        let fields: Vec<&str> = line.split('|').map(str::trim).collect();
        let [kind, gpus, efa, ..] = fields.as_slice() else {
            imported.skip((number, line), "expected `type|gpus|efa|nvlink|provider`");
            continue;
        };
        let (Ok(sku), Some(gpus), Some(efa)) = (Sku::new(kind), count(gpus), count(efa)) else {
            imported.skip((number, line), "expected a type, a number of GPUs and a number of EFA adapters");
            continue;
        };
        if imported.files.iter().any(|file| file.sku == sku) {
            imported.skip((number, line), "duplicate machine type");
            continue;
        }
        let expect = [("gpu_count".to_owned(), gpus.into()), ("efa_devices".to_owned(), efa.into())].into();
        let detect = Signs { instance_types: vec![(*kind).to_owned()], ..Signs::default() };
        let source = format!("imported from {name}");
        imported.files.push(ProfileFile { source, expect, detect, ..ProfileFile::machine(sku) });
        imported.used += 1;
    }
}

fn count(text: &str) -> Option<f64> {
    text.parse::<u32>().ok().map(f64::from)
}

/// Parses lines of the form `hostmask || check arguments`, one machine type per file.
fn nhc<'a>(name: &str, lines: impl Iterator<Item = (usize, &'a str)>, imported: &mut Imported) {
    let mut machine = ImportedMachine::default();
    for (number, line) in lines {
        let Some((mask, rest)) = line.split_once("||") else {
            imported.skip((number, line), "expected `* || check arguments`");
            continue;
        };
        if mask.trim() != "*" {
            imported.skip((number, line), "applies to some hosts only; a profile is for a whole machine type");
            continue;
        }
        let mut tokens = rest.split_whitespace();
        let check = tokens.next().unwrap_or_default();
        let arguments: Vec<&str> = tokens.collect();
        if COVERED.contains(&check) {
            imported.covered += 1;
            continue;
        }
        match machine.apply_check(check, &arguments) {
            Ok(()) => imported.used += 1,
            Err(why) => imported.skip((number, line), why),
        }
    }
    let Ok(sku) = Sku::new(&name.to_ascii_lowercase()) else {
        imported.skip((1, name), "the file name is not a valid machine type");
        return;
    };
    let expect = machine.expect();
    if expect.is_empty() {
        return;
    }
    let detect = Signs { instance_types: vec![format!("Standard_{name}")], ..Signs::default() };
    let source = format!("imported from {name}.conf of AzNHC");
    imported.files.push(ProfileFile { source, expect, detect, ..ProfileFile::machine(sku) });
}

/// A machine type, accumulated line by line.
#[derive(Debug, Default)]
struct ImportedMachine {
    /// Stated: the site's own limits.
    expect: BTreeMap<String, Expected>,
    /// Rates in Gb/s: of the fabric's ports, and of accelerated networking ports, which are Ethernet.
    fabric: Vec<f64>,
    ethernet: Vec<f64>,
}

impl ImportedMachine {
    fn apply_check(&mut self, check: &str, arguments: &[&str]) -> Result<(), String> {
        let number = |index: usize| {
            let argument =
                arguments.get(index).ok_or_else(|| format!("expected a number as argument {}", index + 1))?;
            let value = argument.parse::<f64>().ok().filter(|value| (0.0..=MAX_VALUE).contains(value));
            value.ok_or_else(|| format!("`{argument}` is not a number"))
        };
        let giga = |index: usize| number(index).map(|value| value * 1e9);
        match check {
            "check_gpu_count" if arguments.get(1) == Some(&"rocm") => {
                return Err("AMD GPUs are not supported".to_owned());
            }
            "check_gpu_count" => self.set("gpu_count", number(0)?),
            "check_nvme_count" => self.set("nvme_disks", number(0)?),
            "check_hw_cpuinfo" => {
                let (sockets, cores, threads) = (number(0)?, number(1)?, number(2)?);
                self.set("cpu_sockets", sockets);
                self.set("cpu_cores", cores);
                self.set("cpu_threads", threads);
            }
            "check_hw_physmem" => self.set("mem_total_bytes", bytes(arguments.first().copied().unwrap_or_default())?),
            "check_hw_ib" => self.port(number(0)?, arguments.get(1).copied().unwrap_or_default()),
            "check_gpu_bw" | "check_cuda_bw" => {
                let (to_gpu, between) = (giga(0)?, arguments.get(1).map(|_| giga(1)).transpose()?);
                self.set("h2d_bytes_per_s", to_gpu);
                self.set("d2h_bytes_per_s", to_gpu);
                if let Some(between) = between {
                    self.set("p2p_bytes_per_s", between);
                }
            }
            "check_nccl_allreduce" => self.set("nccl_busbw_bytes_per_s", giga(0)?),
            "check_nccl_allreduce_ib_loopback" => self.set("nccl_ib_loopback_busbw_bytes_per_s", giga(0)?),
            "check_ib_bw_gdr" => self.set("ib_write_gdr_bits_per_s", giga(0)?),
            "check_ib_bw_non_gdr" => self.set("ib_write_bits_per_s", giga(0)?),
            "check_cpu_stream" => self.set("stream_bytes_per_s", number(0)? * 1e6),
            other => return Err(format!("unknown check `{}`", other.chars().take(40).collect::<String>())),
        }
        Ok(())
    }

    fn set(&mut self, metric: &str, value: f64) {
        self.expect.insert(metric.to_owned(), value.into());
    }

    fn port(&mut self, rate: f64, device: &str) {
        if device.starts_with("mlx5_an") { &mut self.ethernet } else { &mut self.fabric }.push(rate);
    }

    fn expect(mut self) -> BTreeMap<String, Expected> {
        // The check counts in the same way: InfiniBand ports, or Ethernet ports if there are none.
        let ports = if self.fabric.is_empty() { &self.ethernet } else { &self.fabric };
        let best = ports.iter().copied().fold(0.0, f64::max) * 1e9;
        let number = ports.len();
        if number > 0 {
            self.set("fabric_ports_active", u32::try_from(number).map_or(0.0, f64::from));
            self.set("fabric_rate_bits", best);
        }
        self.expect
    }
}

/// Parses a size such as `1915071MB`, `470543164kB` or `433GB`: NHC uses powers of 1024, and kB without a unit.
fn bytes(text: &str) -> Result<f64, String> {
    let bad = || format!("`{text}` is not a size such as 1915071MB");
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let value: f64 = text[..digits].parse().ok().filter(|value| *value <= MAX_VALUE).ok_or_else(bad)?;
    let scale = match text[digits..].to_ascii_lowercase().as_str() {
        "" | "kb" | "k" => 1024.0,
        "mb" | "m" => 1024.0 * 1024.0,
        "gb" | "g" => 1024.0 * 1024.0 * 1024.0,
        "tb" | "t" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return Err(bad()),
    };
    Ok(value * scale)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    // In the form of AzNHC's files (v0.4, 2026-05-01); written by hand.
    const ND: &str = "\
# NHC configuration
 * || check_hw_cpuinfo 2 96 96
 * || check_hw_physmem 1915071MB 1915071MB 5%
 * || check_hw_swap 0kB 0kB 3%
 * || check_hw_ib 100 mlx5_an0:1
 * || check_hw_ib 400 mlx5_ib0:1
 * || check_hw_ib 400 mlx5_ib1:1
 * || check_gpu_count 8
 * || check_gpu_bw 48 335
 * || check_gpu_ecc 20000000 10000
 * || check_nccl_allreduce 460.0 1 /opt/microsoft/ndv5-topo.xml 16G
 * || check_ib_bw_gdr 380 nvidia
 * || check_coffee 3
 {node[1-3]} || check_nvme_count 8
";

    // In the form that seed 002 describes; written by hand.
    const AWS: &str = "\
# type|gpus|efa|nvlink|provider
p4d.24xlarge|8|4|true|efa
  g6.xlarge|1|0|false|
p5.48xlarge|eight|32|true|efa
p4d.24xlarge|8|4|true|efa
nonsense
";

    #[test]
    fn an_aznhc_file_becomes_a_profile_and_unknown_lines_are_reported() {
        let imported = import("nd96isr_h100_v5", ND);
        let file = &imported.files[0];
        assert_eq!(file.sku.as_str(), "nd96isr_h100_v5");
        assert_eq!(file.detect.instance_types, ["Standard_nd96isr_h100_v5"]);
        for (metric, value) in [
            ("cpu_sockets", 2.0),
            ("cpu_threads", 96.0),
            ("gpu_count", 8.0),
            ("mem_total_bytes", 1_915_071.0 * 1_048_576.0),
            ("fabric_ports_active", 2.0),
            ("fabric_rate_bits", 400e9),
            ("h2d_bytes_per_s", 48e9),
            ("p2p_bytes_per_s", 335e9),
            ("nccl_busbw_bytes_per_s", 460e9),
            ("ib_write_gdr_bits_per_s", 380e9),
        ] {
            let found = file.expect[metric].value;
            assert!((found - value).abs() < 1.0, "{metric}: {found}");
        }
        assert_eq!((imported.used, imported.covered), (9, 2));
        let lines: Vec<_> = imported.skipped.iter().map(|skipped| skipped.line).collect();
        assert_eq!(lines, [13, 14]);
        assert!(imported.skipped[0].why.contains("check_coffee"), "{:?}", imported.skipped);
    }

    #[test]
    fn lines_of_instance_profiles_become_one_profile_each() {
        let imported = import("instance-profiles", AWS);
        let names: Vec<_> = imported.files.iter().map(|file| file.sku.as_str()).collect();
        assert_eq!(names, ["p4d.24xlarge", "g6.xlarge"]);
        assert_eq!(imported.files[0].expect["efa_devices"], 4.0.into());
        let lines: Vec<_> = imported.skipped.iter().map(|skipped| skipped.line).collect();
        assert_eq!(lines, [4, 5, 6]);
    }

    #[test]
    fn unsupported_hardware_is_not_imported() {
        let imported = import("nd96isr_mi300x_v5", " * || check_gpu_count 8 rocm\n");
        assert!(imported.files.is_empty() && imported.skipped[0].why.contains("AMD"));
        assert_eq!(import("empty", "# nothing\n"), Imported::default());
    }

    proptest! {
        #[test]
        fn every_line_is_accounted_for_and_every_profile_reads_back(
            name in "[a-z0-9][a-z0-9_]{0,11}",
            lines in proptest::collection::vec(
                prop_oneof![
                    "[ -~]{0,40}",
                    " \\* \\|\\| check_(gpu_count|hw_ib|hw_physmem|gpu_bw|hw_cpuinfo|tea) [0-9A-Za-z:. ]{0,20}",
                    "[a-z0-9.]{1,9}\\|[0-9]{1,3}\\|[0-9]{1,3}\\|(true|false)\\|efa",
                ],
                0..12,
            ),
        ) {
            let imported = import(&name, &lines.join("\n"));
            let real = lines.iter().map(|line| line.trim()).filter(|line| !line.is_empty() && !line.starts_with('#')).count();
            prop_assert_eq!(imported.used + imported.covered + imported.skipped.len(), real);
            for file in &imported.files {
                let back = ProfileFile::read(&toml::to_string(file).unwrap()).unwrap();
                prop_assert_eq!(&back, file);
            }
        }

        #[test]
        fn no_text_makes_it_panic(name in ".{0,20}", text in "\\PC{0,200}") {
            let imported = import(&name, &text);
            prop_assert!(imported.files.len() <= text.lines().count());
        }
    }
}
