//! edac: does main memory have errors?
//!
//! What it does: reads how many corrected and uncorrected errors each memory module had within the last hour.
//!
//! Why it matters: corrected errors at an increasing rate end in an uncorrected one, which kills a process or the node.
//! An uncorrected error loses data in memory, and whatever used it may be wrong.
//!
//! What to do: `doctor why NODE` names the module; `ras-mc-ctl --summary`, `ipmitool sel list` and
//! `dmidecode -t memory` help to find its slot.
//! - `memory-uncorrected` is `reboot`: an error within the last hour. The firmware maps bad memory out at the next
//!   boot; if it recurs, replace the module.
//! - `memory-corrected` is `monitor`: more than 100 corrected errors within the hour. Plan to replace the module.
//!
//! Not applicable where the kernel monitors no memory controller: on most virtual machines, or without the driver for
//! this processor (`modprobe i10nm_edac`, `amd64_edac`). Memory errors are not counted there.

use doctor_core::{
    observation::{Entity, EntityKind, Event, ObservationBuilder, Metric, Observation},
    time::Span,
};

use crate::{
    files::{Series, glob_files, match_pattern_exact, sampled_series, unexpected_content},
    gpu::not_applicable,
    probe::{FileText, Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("edac", "ECC errors of main memory");

const RULES: &str = r#"
rules = [
  { id = "edac-uncorrected", check = "edac", event = "memory-uncorrected", reason = "memory-uncorrected",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "edac-corrected", check = "edac", event = "memory-corrected", reason = "memory-corrected",
    severity = "monitor", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("edac.rs")), rules: RULES, probes, interpret };

/// Per module where the driver knows them, and per controller for errors that it could not attribute.
const CORRECTED: [&str; 3] = [
    "/sys/devices/system/edac/mc/mc*/dimm*/dimm_ce_count",
    "/sys/devices/system/edac/mc/mc*/rank*/dimm_ce_count",
    "/sys/devices/system/edac/mc/mc*/ce_noinfo_count",
];
const UNCORRECTED: [&str; 3] = [
    "/sys/devices/system/edac/mc/mc*/dimm*/dimm_ue_count",
    "/sys/devices/system/edac/mc/mc*/rank*/dimm_ue_count",
    "/sys/devices/system/edac/mc/mc*/ue_noinfo_count",
];
const LABELS: [&str; 2] =
    ["/sys/devices/system/edac/mc/mc*/dimm*/dimm_label", "/sys/devices/system/edac/mc/mc*/rank*/dimm_label"];
/// The limit of corrected errors per hour.
const CORRECTED_LIMIT: f64 = 100.0;
/// The limit of uncorrected errors per hour. A single old error, averaged over the uptime, stays below it.
const UNCORRECTED_LIMIT: f64 = 0.5;

fn probes(_: &Params) -> Vec<Probe> {
    let sampled = |pattern: &str| Probe::Sampled { pattern: pattern.to_owned(), keep: Span::hours(1) };
    CORRECTED.map(sampled).into_iter().chain(UNCORRECTED.map(sampled)).chain(LABELS.map(Probe::glob)).collect()
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let labels = [glob_files(outputs.get(6))?, glob_files(outputs.get(7))?];
    let mut builder = ObservationBuilder::default();
    let kinds = [
        (CORRECTED, 0, "memory-corrected", "corrected", CORRECTED_LIMIT),
        (UNCORRECTED, 3, "memory-uncorrected", "uncorrected", UNCORRECTED_LIMIT),
    ];
    for (patterns, first, code, word, most) in kinds {
        let (mut sum, mut any) = (0.0, false);
        for (index, pattern) in patterns.iter().enumerate() {
            for series in sampled_series(outputs.get(first + index))? {
                let Some(errors) = errors_in_last_hour(&series, &mut builder) else { continue };
                (sum, any) = (sum + errors, true);
                if errors > most {
                    let text = format!("{errors:.0} {word} memory errors within the hour");
                    builder.event(Event::seen(code, dimm_entity(pattern, series.path, &labels), text));
                }
            }
        }
        if any {
            builder.metric(Metric::count(&format!("memory_errors_{word}"), Entity::node(), sum));
        }
    }
    Ok(builder.build_or(not_applicable("no-edac", "the kernel monitors no memory controller (EDAC) on this node")))
}

fn errors_in_last_hour(series: &Series<'_>, builder: &mut ObservationBuilder) -> Option<f64> {
    match (series.growth(Span::hours(1)), series.current()) {
        (Some(growth), _) => return Some(growth.in_last_hour()),
        (None, Ok(Some(text))) => builder.unreadable(unexpected_content(series.path, text)),
        (None, Err(failure)) => builder.unreadable(failure),
        // The driver was unloaded.
        (None, Ok(None)) => {}
    }
    None
}

/// Returns the module by its board label, or else by its location in the driver.
fn dimm_entity(pattern: &str, path: &str, labels: &[&[FileText]; 2]) -> Entity {
    let id = match match_pattern_exact(pattern, path) {
        Some([controller, slot]) => {
            let beside = |file: &&FileText| {
                file.path.rsplit_once('/').map(|(folder, _)| folder) == path.rsplit_once('/').map(|(folder, _)| folder)
            };
            let label =
                labels.iter().flat_map(|all| all.iter()).find(beside).and_then(|file| file.text.as_deref().ok());
            let label = label.map(str::trim).filter(|label| !label.is_empty());
            label.map_or_else(|| format!("mc{controller}/{slot}"), str::to_owned)
        }
        None => match_pattern_exact(pattern, path).map_or_else(|| path.to_owned(), |[controller]| format!("mc{controller}")),
    };
    Entity::new(EntityKind::Dimm, id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        files::tests::{found, sampled_files},
        classify_fixture::classify_outputs,
    };
    use proptest::prelude::*;

    /// Corrected and uncorrected errors of one module at each reading. Made by hand.
    fn check(each: &[(&str, &str)]) -> Vec<String> {
        let folder = "/sys/devices/system/edac/mc/mc0/dimm3";
        let (ce, ue, label) =
            (format!("{folder}/dimm_ce_count"), format!("{folder}/dimm_ue_count"), format!("{folder}/dimm_label"));
        let of = |path: &str, value: fn(&(&str, &str)) -> String| {
            let texts: Vec<_> = each.iter().map(value).collect();
            let files: Vec<_> = texts.iter().map(|text| [(path, text.as_str())]).collect();
            sampled_files(&files.iter().map(|one| &one[..]).collect::<Vec<_>>())
        };
        let none = || sampled_files(&[&[]]);
        classify_outputs(
            &CHECK,
            &[
                of(&ce, |counts| counts.0.to_owned()),
                none(),
                none(),
                of(&ue, |counts| counts.1.to_owned()),
                none(),
                none(),
                found(&[(&label, "CPU0_DIMM_A1\n")]),
                found(&[]),
            ],
        )
    }

    #[test]
    fn errors_within_the_last_hour_are_reported_for_their_dimm() {
        assert_eq!(check(&[("0\n", "0\n"), ("90\n", "0\n")]), ["pass within-limits"]);
        assert_eq!(check(&[("0\n", "0\n"), ("101\n", "0\n")]), ["fail memory-corrected monitor dimm:CPU0_DIMM_A1"]);
        assert_eq!(check(&[("0\n", "0\n"), ("0\n", "1\n")]), ["fail memory-uncorrected reboot dimm:CPU0_DIMM_A1"]);
    }

    #[test]
    fn an_error_of_last_week_does_not_fail() {
        assert_eq!(check(&[("5000\n", "2\n"), ("5000\n", "2\n")]), ["pass within-limits"]);
        assert_eq!(check(&[("5000\n", "2\n")]), ["pass within-limits"]);
    }

    #[test]
    fn a_missing_counter_is_not_zero() {
        assert_eq!(check(&[("?", "0")]), ["inconclusive unparseable"]);
        let mut nothing: Vec<_> = (0..6).map(|_| sampled_files(&[&[]])).collect();
        nothing.extend([found(&[]), found(&[])]);
        assert_eq!(classify_outputs(&CHECK, &nothing), ["not-applicable no-edac"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(a in ".{0,12}", b in "[0-9]{0,30}") {
            check(&[(&a, &b), (&b, &a)]);
        }
    }
}
