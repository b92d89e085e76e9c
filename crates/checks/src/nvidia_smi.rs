//! Parses `nvidia-smi -q -x`, for a machine whose management library cannot be loaded while its driver works.
//!
//! Fields get the names and units of NVML ([`crate::gpu`]), so that checks do not depend on the source. A field that
//! nvidia-smi does not report is a failure to read, never "not supported": a check that needs it is inconclusive.

use doctor_core::observation::{FailureKind, ProbeFailure};
use quick_xml::{
    Reader,
    escape::resolve_xml_entity,
    events::{BytesRef, BytesStart, Event},
};

use crate::gpu::{Driver, FieldValue, Gpu, GpuQueryResult, NVML_GPU_IS_LOST, NVML_RESET_REQUIRED, normalize_bus_id};

/// NVML's code for an unknown error; nvidia-smi reports errors as words only.
const UNKNOWN_ERROR: u32 = 999;

/// Deeper than the nesting of any version of the log.
const MAX_DEPTH: usize = 16;

/// Reads these fields from nvidia-smi's log. `on_pci` lists the GPUs on the PCI bus.
///
/// # Errors
/// If the log is incomplete.
pub fn parse_query(log: &str, fields: &[String], on_pci: Vec<String>) -> Result<GpuQueryResult, ProbeFailure> {
    let bad = |what: &str| ProbeFailure::new(FailureKind::Unparseable, format!("nvidia-smi -q -x: {what}"));
    let log = SmiLog::parse(log).ok_or_else(|| bad("the output is not complete"))?;
    let version = log.text("driver_version").ok_or_else(|| bad("no driver version in the output"))?;
    let attached: usize = log
        .text("attached_gpus")
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| bad("no number of GPUs in the output"))?;
    if attached != log.gpus.len() {
        return Err(bad(&format!("{attached} GPUs attached, {} in the output", log.gpus.len())));
    }
    let driver = Driver {
        version: version.to_owned(),
        cuda: log.text("cuda_version").map(str::to_owned),
        source: "nvidia-smi".to_owned(),
    };
    let gpus = log.gpus.iter().enumerate().map(|(index, card)| Gpu {
        index: u32::try_from(index).unwrap_or(u32::MAX),
        bus: normalize_bus_id(&card.id).unwrap_or_default(),
        fields: fields.iter().flat_map(|field| card.field(field)).collect(),
    });
    let gpus = gpus.collect();
    Ok(GpuQueryResult { on_pci, driver: Ok(driver), gpus })
}

/// The log as a flat list: each text with the path of its elements.
#[derive(Default)]
struct SmiLog {
    own: Vec<(String, String)>,
    gpus: Vec<SmiGpu>,
}

struct SmiGpu {
    id: String,
    texts: Vec<(String, String)>,
    /// Whether there is a list of processes: an empty list has no text but differs from a missing one.
    lists_processes: bool,
}

impl SmiLog {
    /// Parses the log. Returns `None` if it is not well formed. The log consists of elements and texts, with attributes
    /// only on `gpu`.
    fn parse(text: &str) -> Option<Self> {
        let mut reader = Reader::from_str(text);
        // Process names are arbitrary, and nvidia-smi may write them unescaped.
        reader.config_mut().allow_dangling_amp = true;
        let (mut log, mut ended) = (Self::default(), false);
        let (mut open, mut content) = (Vec::new(), String::new());
        loop {
            let event = reader.read_event().ok()?;
            match &event {
                Event::Text(text) => content.push_str(&text.xml10_content()),
                Event::CData(text) => content.push_str(&text.xml10_content()),
                Event::GeneralRef(name) => content.push_str(&resolve_entity(name)),
                _ => log.add_text(&open, &std::mem::take(&mut content)),
            }
            match event {
                Event::Start(tag) => {
                    open.push(tag.name().as_ref().to_owned());
                    (open.len() <= MAX_DEPTH).then_some(())?;
                    log.begin_element(&open, &tag);
                }
                // The reader verifies that the names match.
                Event::End(_) => {
                    open.pop()?;
                    ended = open.is_empty();
                }
                Event::Eof => return (ended && open.is_empty()).then_some(log),
                _ => {}
            }
        }
    }

    fn begin_element(&mut self, open: &[String], tag: &BytesStart<'_>) {
        match (&names(open)[..], self.gpus.last_mut()) {
            ([_, "gpu"], _) => {
                let id = tag.try_get_attribute("id").ok().flatten();
                let id = id.map_or_else(String::new, |id| id.value.into_owned());
                self.gpus.push(SmiGpu { id, texts: Vec::new(), lists_processes: false });
            }
            ([_, "gpu", "processes"], Some(card)) => card.lists_processes = true,
            _ => {}
        }
    }

    fn add_text(&mut self, open: &[String], text: &str) {
        let text = text.trim();
        if text.is_empty() {
            return;
        }
        match (&names(open)[..], self.gpus.last_mut()) {
            ([_, "gpu", path @ ..], Some(card)) => card.texts.push((path.join("/"), text.to_owned())),
            ([_, path @ ..], _) => self.own.push((path.join("/"), text.to_owned())),
            ([], _) => {}
        }
    }

    fn text(&self, path: &str) -> Option<&str> {
        self.own.iter().find(|(known, _)| known == path).map(|(_, text)| text.as_str())
    }
}

fn names(open: &[String]) -> Vec<&str> {
    open.iter().map(String::as_str).collect()
}

/// Resolves `&name;`. An unknown entity is kept verbatim.
fn resolve_entity(name: &BytesRef<'_>) -> String {
    let written = name.xml10_content();
    match (name.resolve_char_ref(), resolve_xml_entity(&written)) {
        (Ok(Some(char)), _) => char.to_string(),
        (_, Some(text)) => text.to_owned(),
        _ => format!("&{written};"),
    }
}

impl SmiGpu {
    /// Returns the text at this path, or the text that replaces the whole branch, such as `N/A`.
    fn text(&self, path: &str) -> Option<&str> {
        let above = |known: &str| path.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        self.texts.iter().find(|(known, _)| above(known)).map(|(_, text)| text.as_str())
    }

    /// Returns the first of these paths that exists: names change between versions.
    fn first(&self, paths: &[&str]) -> Option<&str> {
        paths.iter().find_map(|path| self.text(path))
    }

    /// Returns one field, or all members of a numbered family.
    fn field(&self, name: &str) -> Vec<(String, FieldValue)> {
        for (family, with_graphics) in [("process", false), ("activity", true)] {
            if let Some(what) = name.strip_prefix(family).and_then(|rest| rest.strip_prefix(".*.")) {
                return self.processes(family, with_graphics, what);
            }
        }
        vec![(name.to_owned(), self.reading(name).unwrap_or_else(|| not_reported(name)))]
    }

    /// `C` and `C+G` are processes with a compute context; those with `G` use the GPU for graphics only.
    fn processes(&self, family: &str, with_graphics: bool, what: &str) -> Vec<(String, FieldValue)> {
        let pattern = format!("{family}.*.{what}");
        let name = match what {
            "pid" if self.lists_processes => "pid",
            "memory" if self.lists_processes => "used_memory",
            _ => return vec![(pattern.clone(), not_reported(&pattern))],
        };
        let all = |name: &str| {
            let path = format!("processes/process_info/{name}");
            self.texts.iter().filter(move |(known, _)| *known == path).map(|(_, text)| text.as_str())
        };
        if let (None, Some(instead)) = (all("pid").next(), self.text("processes")) {
            return vec![(pattern, parse_status_word(instead))];
        }
        let listed = all(name).zip(all("type")).filter(|(_, kind)| with_graphics || kind.contains('C'));
        listed.enumerate().map(|(n, (text, _))| (format!("{family}.{n}.{what}"), parse_number(text))).collect()
    }

    fn reading(&self, name: &str) -> Option<FieldValue> {
        if let Some((_, path)) = TEXTS.iter().find(|(known, _)| *known == name) {
            return Some(parse_status_word(self.text(path)?));
        }
        if let Some((_, paths)) = NUMBERS.iter().find(|(known, _)| *known == name) {
            return Some(parse_number(self.first(paths)?));
        }
        if let Some((_, paths, of)) = CHOICES.iter().find(|(known, ..)| *known == name) {
            return parse_choice(self.first(paths)?, of);
        }
        match name {
            "clocks_event_reasons.active" => self.clock_reasons(),
            _ => self.ecc_errors(name.strip_prefix("ecc.errors.")?),
        }
    }

    /// Returns the mask with NVML's bits. The names changed with driver 535.
    fn clock_reasons(&self) -> Option<FieldValue> {
        const BITS: [(&str, f64); 9] = [
            ("gpu_idle", 1.0),
            ("applications_clocks_setting", 2.0),
            ("sw_power_cap", 4.0),
            ("hw_slowdown", 8.0),
            ("sync_boost", 16.0),
            ("sw_thermal_slowdown", 32.0),
            ("hw_thermal_slowdown", 64.0),
            ("hw_power_brake_slowdown", 128.0),
            ("display_clocks_setting", 256.0),
        ];
        let mut mask = 0.0;
        for (name, bit) in BITS {
            let newer = format!("clocks_event_reasons/clocks_event_reason_{name}");
            let older = format!("clocks_throttle_reasons/clocks_throttle_reason_{name}");
            match self.first(&[&newer, &older])? {
                "Active" => mask += bit,
                "Not Active" => {}
                other => return Some(parse_status_word(other)),
            }
        }
        Some(FieldValue::Number(mask))
    }

    /// Parses names such as `uncorrected.volatile.sram`.
    fn ecc_errors(&self, rest: &str) -> Option<FieldValue> {
        let mut parts = rest.split('.');
        let (kind, since, memory) = (parts.next()?, parts.next()?, parts.next()?);
        let names: &[&str] = match (kind, memory) {
            ("corrected", "sram") => &["sram_correctable"],
            ("corrected", "dram") => &["dram_correctable"],
            ("corrected", "total") => &["sram_correctable", "dram_correctable"],
            ("uncorrected", "sram") => &["sram_uncorrectable"],
            ("uncorrected", "dram") => &["dram_uncorrectable"],
            ("uncorrected", "total") => &["sram_uncorrectable", "dram_uncorrectable"],
            _ => return None,
        };
        let mut sum = 0.0;
        for name in names {
            let path = format!("ecc_errors/{since}/{name}");
            let each = match self.text(&path) {
                Some(text) => vec![text],
                // Newer drivers split uncorrectable SRAM errors by how they were detected.
                None => vec![self.text(&format!("{path}_parity"))?, self.text(&format!("{path}_secded"))?],
            };
            for text in each {
                match parse_number(text) {
                    FieldValue::Number(count) => sum += count,
                    other => return Some(other),
                }
            }
        }
        Some(FieldValue::Number(sum))
    }
}

fn not_reported(name: &str) -> FieldValue {
    FieldValue::Failed { code: UNKNOWN_ERROR, text: format!("nvidia-smi does not report {name}") }
}

/// Returns a text, or the reading for one of nvidia-smi's placeholders.
fn parse_status_word(text: &str) -> FieldValue {
    let plain = text.trim_matches(['[', ']']);
    let failed = |code| FieldValue::Failed { code, text: format!("nvidia-smi reports: {plain}") };
    match plain {
        "N/A" | "Not Supported" | "Requested functionality has been deprecated" => FieldValue::NotSupported,
        "GPU is lost" => failed(NVML_GPU_IS_LOST),
        "GPU requires reset" => failed(NVML_RESET_REQUIRED),
        "Unknown Error" | "ERR!" | "Insufficient Permissions" => failed(UNKNOWN_ERROR),
        other => FieldValue::Text(other.to_owned()),
    }
}

/// Parses a number with its unit and converts it to NVML's unit.
fn parse_number(text: &str) -> FieldValue {
    let FieldValue::Text(text) = parse_status_word(text) else { return parse_status_word(text) };
    let (digits, unit) = text.split_once(' ').unwrap_or((&text, ""));
    let digits = digits.trim_start_matches('P').trim_end_matches('x');
    // Rejects `inf` and `nan`, which the parser accepts.
    let value = digits.parse::<f64>().ok().filter(|value| value.is_finite());
    match (value, unit) {
        (Some(value), "MiB") => FieldValue::Number(value * 1_048_576.0),
        (Some(value), "" | "%" | "C" | "W" | "MHz") => FieldValue::Number(value),
        _ => FieldValue::Failed {
            code: UNKNOWN_ERROR,
            text: format!("nvidia-smi reports {text:?}, which is not a number"),
        },
    }
}

/// Maps a word to NVML's number. Returns `None` for an unknown word.
fn parse_choice(text: &str, of: &[(&str, f64)]) -> Option<FieldValue> {
    match parse_status_word(text) {
        FieldValue::Text(word) => {
            of.iter().find(|(known, _)| *known == word).map(|(_, number)| FieldValue::Number(*number))
        }
        other => Some(other),
    }
}

const TEXTS: &[(&str, &str)] = &[
    ("name", "product_name"),
    ("uuid", "uuid"),
    ("serial", "serial"),
    ("board_part", "board_part_number"),
    ("vbios_version", "vbios_version"),
    ("inforom.image", "inforom_version/img_version"),
];

const NUMBERS: &[(&str, &[&str])] = &[
    ("minor_number", &["minor_number"]),
    ("pstate", &["performance_state"]),
    ("utilization.gpu", &["utilization/gpu_util"]),
    ("memory.total", &["fb_memory_usage/total"]),
    ("memory.used", &["fb_memory_usage/used"]),
    ("memory.reserved", &["fb_memory_usage/reserved"]),
    ("temperature.gpu", &["temperature/gpu_temp"]),
    ("temperature.memory", &["temperature/memory_temp"]),
    ("temperature.gpu.tlimit", &["temperature/gpu_temp_tlimit"]),
    ("temperature.slowdown", &["temperature/gpu_temp_slow_threshold"]),
    ("temperature.shutdown", &["temperature/gpu_temp_max_threshold"]),
    (
        "power.draw",
        &["gpu_power_readings/instant_power_draw", "gpu_power_readings/power_draw", "power_readings/power_draw"],
    ),
    ("power.limit", &["gpu_power_readings/current_power_limit", "power_readings/power_limit"]),
    ("power.default_limit", &["gpu_power_readings/default_power_limit", "power_readings/default_power_limit"]),
    ("power.max_limit", &["gpu_power_readings/max_power_limit", "power_readings/max_power_limit"]),
    ("clocks.sm", &["clocks/sm_clock"]),
    ("clocks.mem", &["clocks/mem_clock"]),
    ("clocks.max.sm", &["max_clocks/sm_clock"]),
    ("clocks.max.mem", &["max_clocks/mem_clock"]),
    ("clocks.applications.graphics", &["applications_clocks/graphics_clock"]),
    ("clocks.applications.memory", &["applications_clocks/mem_clock"]),
    ("clocks.default_applications.graphics", &["default_applications_clocks/graphics_clock"]),
    ("clocks.default_applications.memory", &["default_applications_clocks/mem_clock"]),
    ("pcie.link.gen.current", &["pci/pci_gpu_link_info/pcie_gen/current_link_gen"]),
    ("pcie.link.gen.max", &["pci/pci_gpu_link_info/pcie_gen/max_link_gen"]),
    ("pcie.link.width.current", &["pci/pci_gpu_link_info/link_widths/current_link_width"]),
    ("pcie.link.width.max", &["pci/pci_gpu_link_info/link_widths/max_link_width"]),
    ("pcie.replay", &["pci/replay_counter"]),
    ("remapped_rows.correctable", &["remapped_rows/remapped_row_corr"]),
    ("remapped_rows.uncorrectable", &["remapped_rows/remapped_row_unc"]),
    ("retired_pages.single_bit_ecc.count", &["retired_pages/multiple_single_bit_retirement/retired_count"]),
    ("retired_pages.double_bit.count", &["retired_pages/double_bit_retirement/retired_count"]),
    ("fabric.clique", &["fabric/cliqueId"]),
];

const ON_OFF: &[(&str, f64)] = &[("Disabled", 0.0), ("Enabled", 1.0)];
const YES_NO: &[(&str, f64)] = &[("No", 0.0), ("Yes", 1.0)];

/// A field, its paths, and words with NVML's numbers.
type Choice = (&'static str, &'static [&'static str], &'static [(&'static str, f64)]);

const CHOICES: &[Choice] = &[
    ("persistence_mode", &["persistence_mode"], ON_OFF),
    ("mig.mode.current", &["mig_mode/current_mig"], ON_OFF),
    ("mig.mode.pending", &["mig_mode/pending_mig"], ON_OFF),
    ("ecc.mode.current", &["ecc_mode/current_ecc"], ON_OFF),
    ("ecc.mode.pending", &["ecc_mode/pending_ecc"], ON_OFF),
    ("ecc.sram.threshold_exceeded", &["ecc_errors/aggregate/sram_threshold_exceeded"], YES_NO),
    ("remapped_rows.pending", &["remapped_rows/remapped_row_pending"], YES_NO),
    ("remapped_rows.failure", &["remapped_rows/remapped_row_failure"], YES_NO),
    ("retired_pages.pending", &["retired_pages/pending_retirement", "retired_pages/pending_blacklist"], YES_NO),
    (
        "compute_mode",
        &["compute_mode"],
        &[("Default", 0.0), ("Exclusive_Thread", 1.0), ("Prohibited", 2.0), ("Exclusive_Process", 3.0)],
    ),
    (
        "architecture",
        &["product_architecture"],
        &[
            ("Volta", 5.0),
            ("Turing", 6.0),
            ("Ampere", 7.0),
            ("Ada Lovelace", 8.0),
            ("Hopper", 9.0),
            ("Blackwell", 10.0),
        ],
    ),
    (
        "recovery_action",
        &["gpu_recovery_action"],
        &[("None", 0.0), ("Reset", 1.0), ("Reboot", 2.0), ("Drain P2P", 3.0), ("Drain and Reset", 4.0)],
    ),
    ("fabric.state", &["fabric/state"], &[("Not Started", 1.0), ("In Progress", 2.0), ("Completed", 3.0)]),
    ("fabric.status", &["fabric/status"], &[("Success", 0.0)]),
];

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    // nvidia-smi 580.159.04 on an H200, 2026-11-15.
    const H200: &str = include_str!("../fixtures/nvidia-smi/h200.xml");

    fn gpu(log: &str, fields: &[&str]) -> Gpu {
        let fields: Vec<_> = fields.iter().map(|&field| field.to_owned()).collect();
        parse_query(log, &fields, Vec::new()).unwrap().gpus.remove(0)
    }

    #[test]
    fn fields_of_a_captured_log_have_the_units_of_nvml() {
        let numbers = [
            ("memory.total", 150_754_820_096.0),
            ("power.limit", 700.0),
            ("temperature.gpu", 40.0),
            ("temperature.gpu.tlimit", 47.0),
            ("clocks.max.sm", 1980.0),
            ("clocks_event_reasons.active", 1.0),
            ("pstate", 0.0),
            ("pcie.link.gen.max", 5.0),
            ("pcie.link.width.current", 16.0),
            ("persistence_mode", 1.0),
            ("mig.mode.current", 0.0),
            ("architecture", 9.0),
            ("recovery_action", 0.0),
            ("ecc.mode.current", 1.0),
            ("ecc.errors.corrected.aggregate.dram", 51.0),
            ("ecc.errors.corrected.aggregate.total", 51.0),
            ("ecc.errors.uncorrected.volatile.total", 0.0),
            ("ecc.sram.threshold_exceeded", 0.0),
            ("remapped_rows.correctable", 6.0),
            ("remapped_rows.pending", 0.0),
        ];
        let gpu = gpu(H200, &numbers.map(|(name, _)| name));
        for (name, value) in numbers {
            assert_eq!(gpu.number(name), Some(value), "{name}");
        }
        assert_eq!((gpu.index, gpu.bus.as_str()), (0, "0000:00:06.0"));
        let answer = parse_query(H200, &[], vec!["0000:00:06.0".to_owned()]).unwrap();
        let driver = answer.driver.unwrap();
        assert_eq!((driver.version.as_str(), driver.cuda.as_deref()), ("580.159.04", Some("13.0")));
        assert_eq!(driver.source, "nvidia-smi");
    }

    #[test]
    fn unsupported_and_unreported_fields_differ() {
        let gpu = gpu(H200, &["retired_pages.pending", "fabric.state", "nvlink.*.state", "inforom.valid", "serial"]);
        for name in ["retired_pages.pending", "fabric.state"] {
            assert_eq!(gpu.get(name), Some(&FieldValue::NotSupported), "{name}");
        }
        for name in ["nvlink.*.state", "inforom.valid"] {
            assert!(matches!(gpu.get(name), Some(FieldValue::Failed { .. })), "{name}");
        }
        assert_eq!(gpu.text("serial"), Some("1650000000000"));
    }

    #[test]
    fn text_instead_of_a_number_is_not_a_number() {
        for (word, reading) in [
            ("N/A", FieldValue::NotSupported),
            ("[Not Supported]", FieldValue::NotSupported),
            ("GPU is lost", FieldValue::Failed { code: 15, text: "nvidia-smi reports: GPU is lost".into() }),
            (
                "[GPU requires reset]",
                FieldValue::Failed { code: 16, text: "nvidia-smi reports: GPU requires reset".into() },
            ),
            ("ERR!", FieldValue::Failed { code: 999, text: "nvidia-smi reports: ERR!".into() }),
            ("inf", FieldValue::Failed { code: 999, text: "nvidia-smi reports \"inf\", which is not a number".into() }),
            ("hot", FieldValue::Failed { code: 999, text: "nvidia-smi reports \"hot\", which is not a number".into() }),
        ] {
            let log = H200.replace("<gpu_temp>40 C<", &format!("<gpu_temp>{word}<"));
            assert_eq!(gpu(&log, &["temperature.gpu"]).get("temperature.gpu"), Some(&reading), "{word}");
        }
        let log = H200.replace("<persistence_mode>Enabled<", "<persistence_mode>Perhaps<");
        assert!(matches!(gpu(&log, &["persistence_mode"]).get("persistence_mode"), Some(FieldValue::Failed { .. })));
    }

    #[test]
    fn compute_processes_are_listed_and_a_missing_list_is_not_an_empty_one() {
        let fields = ["process.*.pid", "process.*.memory"];
        assert_eq!(gpu(H200, &fields).fields, [], "an empty list is valid");
        let one = |pid: u32, kind: &str| {
            format!("<process_info><pid>{pid}</pid><type>{kind}</type><used_memory>2 MiB</used_memory></process_info>")
        };
        let two = one(7, "G") + &one(8, "C");
        let log = H200.replace("<processes>", &format!("<processes>{two}"));
        let gpu_with = gpu(&log, &fields);
        assert_eq!(gpu_with.number("process.0.pid"), Some(8.0));
        assert_eq!(gpu_with.number("process.0.memory"), Some(2_097_152.0));
        assert_eq!(gpu_with.fields.len(), 2);
        let all = gpu(&log, &["activity.*.pid", "activity.*.utilization"]);
        assert_eq!((all.number("activity.0.pid"), all.number("activity.1.pid")), (Some(7.0), Some(8.0)));
        assert!(all.get("activity.*.pid").is_none() && all.get("activity.*.utilization").is_some());
        let none = H200.replace("processes>", "others>");
        assert!(matches!(gpu(&none, &fields).get("process.*.pid"), Some(FieldValue::Failed { .. })));
    }

    #[test]
    fn a_process_name_is_not_parsed_as_xml() {
        for (name, known) in [("a &amp; b &#60;", "a & b <"), ("a && b", "a && b"), ("a &b; c", "a &b; c")] {
            let log = H200.replace("<product_name>NVIDIA H200<", &format!("<product_name>{name}<"));
            assert_eq!(gpu(&log, &["name"]).text("name"), Some(known), "{name}");
        }
        let deep = H200.replace("40 C", &format!("{}40 C{}", "<a>".repeat(20), "</a>".repeat(20)));
        assert!(parse_query(&deep, &[], Vec::new()).is_err(), "the nesting is limited");
    }

    #[test]
    fn a_log_that_is_not_whole_is_no_log() {
        for (log, what) in [
            (H200[..H200.len() / 2].to_owned(), "not complete"),
            (String::new(), "not complete"),
            (
                "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.".to_owned(),
                "not complete",
            ),
            (H200.replace("<attached_gpus>1<", "<attached_gpus>8<"), "8 GPUs attached, 1 in the output"),
            (H200.replace("<driver_version>580.159.04</driver_version>", ""), "no driver version"),
        ] {
            let failure = parse_query(&log, &[], Vec::new()).unwrap_err();
            assert!(failure.text.contains(what), "{}", failure.text);
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(<gpu id=\"|<a>|</a>|<processes>|<nvidia_smi_log>|</nvidia_smi_log>|[<>/\"]|.|\n){0,80}") {
            let _read = parse_query(&text, &["memory.total".to_owned(), "process.*.pid".to_owned()], Vec::new());
            let _whole = parse_query(&H200.replace("40 C", &text), &["temperature.gpu".to_owned()], Vec::new());
        }
    }
}
