//! pcie-aer: are PCIe errors increasing?
//!
//! What it does: reads how many fatal, non-fatal and corrected errors each PCIe device reported within the last hour
//! (its Advanced Error Reporting counters). Earlier errors do not count.
//!
//! Why it matters: corrected errors are retransmissions, and many of them indicate a bad contact, riser or retimer that
//! will soon cause worse ones. An uncorrected error has lost a transfer: the device may have been reset during a job.
//!
//! What to do: `doctor why NODE` names the device by its bus id; `lspci -vv -s BUS` and `dmesg | grep AER` show more.
//! Errors of a port concern the link below it.
//! - `pcie-fatal` is `isolate`: a fatal error within the hour. Have adapter and riser inspected.
//! - `pcie-nonfatal` is `monitor`: a transfer was lost; often caused by the driver or a device that was being reset.
//! - `pcie-corrected` is `monitor`: more than 100 within the hour.
//!
//! Not applicable where no device reports such errors (most virtual machines, or firmware that handles them itself).

use doctor_core::{
    observation::{Entity, Event, ObservationBuilder, Metric, Observation},
    time::Span,
};

use crate::{
    files::{Series, match_pattern_exact, sampled_series, unexpected_content},
    gpu::not_applicable,
    pci::{UEVENT, functions},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("pcie-aer", "errors reported by PCIe devices (AER)");

const RULES: &str = r#"
rules = [
  { id = "pcie-aer-fatal", check = "pcie-aer", event = "pcie-fatal", reason = "pcie-fatal", severity = "isolate",
    text = "{entity}: {value}" },
  { id = "pcie-aer-nonfatal", check = "pcie-aer", event = "pcie-nonfatal", reason = "pcie-nonfatal",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "pcie-aer-corrected", check = "pcie-aer", event = "pcie-corrected", reason = "pcie-corrected",
    severity = "monitor", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("pcie_aer.rs")), rules: RULES, probes, interpret };

struct AerCounter {
    pattern: &'static str,
    total: &'static str,
    code: &'static str,
    label: &'static str,
    limit: f64,
}

/// "Any" is more than 0.5 per hour, so that a single old error does not count.
const COUNTERS: [AerCounter; 3] = [
    AerCounter {
        pattern: "/sys/bus/pci/devices/*/aer_dev_fatal",
        total: "TOTAL_ERR_FATAL",
        code: "pcie-fatal",
        label: "fatal",
        limit: 0.5,
    },
    AerCounter {
        pattern: "/sys/bus/pci/devices/*/aer_dev_nonfatal",
        total: "TOTAL_ERR_NONFATAL",
        code: "pcie-nonfatal",
        label: "non-fatal",
        limit: 0.5,
    },
    AerCounter {
        pattern: "/sys/bus/pci/devices/*/aer_dev_correctable",
        total: "TOTAL_ERR_COR",
        code: "pcie-corrected",
        label: "corrected",
        limit: 100.0,
    },
];

fn probes(_: &Params) -> Vec<Probe> {
    let sampled = COUNTERS.iter().map(|kind| Probe::Sampled { pattern: kind.pattern.to_owned(), keep: Span::hours(1) });
    std::iter::once(Probe::glob(UEVENT)).chain(sampled).collect()
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let mut builder = ObservationBuilder::default();
    let all = functions(outputs.first(), &mut builder)?;
    for (index, kind) in COUNTERS.iter().enumerate() {
        let (mut sum, mut any) = (0.0, false);
        for series in sampled_series(outputs.get(index + 1))? {
            let Some([bus]) = match_pattern_exact(kind.pattern, series.path) else { continue };
            let Some(function) = all.iter().find(|function| function.bus == bus) else { continue };
            match errors_in_last_hour(&series, kind.total) {
                Some(errors) => {
                    (sum, any) = (sum + errors, true);
                    if errors > kind.limit {
                        let text = format!("{errors:.0} {} PCIe errors within the hour", kind.label);
                        builder.event(Event::seen(kind.code, function.entity(), text));
                    }
                }
                None => match series.current() {
                    Ok(Some(text)) => builder.unreadable(unexpected_content(series.path, text)),
                    Err(failure) => builder.unreadable(failure),
                    // The device is gone from the bus; other checks report that.
                    Ok(None) => {}
                },
            }
        }
        if any {
            builder.metric(Metric::count(&kind.code.replace('-', "_"), Entity::node(), sum));
        }
    }
    Ok(builder.build_or(not_applicable("no-aer", "no PCIe device of this node reports errors (AER)")))
}

/// Parses the total, which follows the counts of each kind of error on its own line.
fn errors_in_last_hour(series: &Series<'_>, total: &str) -> Option<f64> {
    let read = |text: &str| text.lines().find_map(|line| line.strip_prefix(total)?.trim().parse().ok());
    Some(series.growth_by(Span::hours(1), read)?.in_last_hour())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        files::tests::{found, sampled_files},
        classify_fixture::classify_outputs,
        pci::tests::uevent,
    };
    use proptest::prelude::*;

    /// Totals of fatal, non-fatal and corrected errors at readings five minutes apart. Made by hand after the kernel's
    /// documentation of these files.
    fn check(each: &[[&str; 3]]) -> Vec<String> {
        let bus = "/sys/bus/pci/devices/0000:18:00.0";
        let device = uevent("20700", "15B3:1021", Some("mlx5_core"));
        let outputs = COUNTERS.iter().enumerate().map(|(n, kind)| {
            let path = kind.pattern.replace("/sys/bus/pci/devices/*", bus);
            let texts: Vec<_> =
                each.iter().map(|totals| format!("Undefined 0\nDLP 0\n{} {}\n", kind.total, totals[n])).collect();
            let files: Vec<_> = texts.iter().map(|text| [(path.as_str(), text.as_str())]).collect();
            sampled_files(&files.iter().map(|one| &one[..]).collect::<Vec<_>>())
        });
        let all: Vec<_> = std::iter::once(found(&[(&format!("{bus}/uevent"), &device)])).chain(outputs).collect();
        classify_outputs(&CHECK, &all)
    }

    #[test]
    fn each_kind_of_error_has_its_limit() {
        assert_eq!(check(&[["0", "0", "0"], ["0", "0", "90"]]), ["pass within-limits"]);
        assert_eq!(check(&[["0", "0", "0"], ["1", "0", "0"]]), ["fail pcie-fatal isolate nic:0000:18:00.0"]);
        assert_eq!(check(&[["0", "3", "0"], ["0", "4", "0"]]), ["fail pcie-nonfatal monitor nic:0000:18:00.0"]);
        assert_eq!(check(&[["0", "0", "0"], ["0", "0", "101"]]), ["fail pcie-corrected monitor nic:0000:18:00.0"]);
    }

    #[test]
    fn an_old_error_does_not_fail() {
        assert_eq!(check(&[["7", "7", "5000"], ["7", "7", "5000"]]), ["pass within-limits"]);
        assert_eq!(check(&[["7", "7", "5000"]]), ["pass within-limits"]);
    }

    #[test]
    fn an_unreadable_counter_is_not_zero() {
        assert_eq!(check(&[["0", "0", "0"], ["?", "0", "0"]]), ["inconclusive unparseable"]);
        let nothing = [found(&[]), sampled_files(&[&[]]), sampled_files(&[&[]]), sampled_files(&[&[]])];
        assert_eq!(classify_outputs(&CHECK, &nothing), ["not-applicable no-aer"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(a in ".{0,12}", b in "[0-9]{0,30}") {
            check(&[[&a, &b, &a], [&b, &a, &b]]);
        }
    }
}
