//! Parses the output of a test that measures by itself: one JSON object of metrics and events, the [`Measurements`]
//! document.
//!
//! All such tests use this format, built in or provided by a site, so a new test needs no parser. Output that is
//! missing, truncated, empty or not a number is never returned as a measurement.

use doctor_core::observation::{FailureKind, Observation, ProbeFailure};

use crate::{document::Measurements, probe::ProbeOutput, spec::Params};

/// Far above what any test reports; a program that prints more is faulty.
pub const MAX_MEASUREMENTS_BYTES: usize = 4 << 20;

/// A check's `interpret` function for probes that print [`Measurements`]. The results of several probes are combined;
/// if one failed, the whole observation fails: a partial measurement must not pass for a healthy one.
pub fn interpret_measurements(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let mut all = Measurements::default();
    for output in outputs {
        match read_output(output) {
            Ok(Measurements { metrics, events, failures: unread }) => {
                all.metrics.extend(metrics);
                all.events.extend(events);
                all.failures.extend(unread);
            }
            Err(failure) => return Observation::Failed(failure),
        }
    }
    let Measurements { metrics, events, failures: mut unread } = all;
    match (metrics.is_empty() && events.is_empty(), unread.is_empty()) {
        (true, true) => could_not(FailureKind::Empty, "the test reported no measurement"),
        (true, false) => Observation::Failed(unread.swap_remove(0)),
        (false, _) => Observation::Measured { metrics, events, failures: unread },
    }
}

fn read_output(output: &ProbeOutput) -> Result<Measurements, ProbeFailure> {
    let text = match output {
        ProbeOutput::Text(text) | ProbeOutput::Ran { exit: Some(0), stdout: text, .. } => text,
        ProbeOutput::Ran { exit, stderr, .. } => return Err(exit_failure(*exit, stderr)),
        ProbeOutput::Failed(failure) => return Err(failure.clone()),
        _ => {
            return Err(ProbeFailure::new(FailureKind::Unparseable, "the probe returned no measurements"));
        }
    };
    parse(text)
}

fn parse(text: &str) -> Result<Measurements, ProbeFailure> {
    if text.len() > MAX_MEASUREMENTS_BYTES {
        let text = format!("measurements are {} bytes; the limit is {MAX_MEASUREMENTS_BYTES} bytes", text.len());
        return Err(ProbeFailure::new(FailureKind::TooLong, text));
    }
    if text.trim().is_empty() {
        return Err(ProbeFailure::new(FailureKind::Empty, "the test printed nothing"));
    }
    let read: Measurements = serde_json::from_str(text).map_err(|error| {
        ProbeFailure::new(FailureKind::Unparseable, format!("measurements cannot be parsed: {error}"))
    })?;
    match read.metrics.iter().find(|metric| !metric.value.is_finite()) {
        Some(metric) => {
            let text = format!("`{}` of {} is not a number", metric.name, metric.entity);
            Err(ProbeFailure::new(FailureKind::Unparseable, text))
        }
        None => Ok(read),
    }
}

/// Returns the failure of a program, with the last line of its standard error.
pub fn exit_failure(exit: Option<i32>, stderr: &str) -> ProbeFailure {
    let detail: String =
        stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("").chars().take(200).collect();
    let colon = if detail.is_empty() { "" } else { ": " };
    match exit {
        Some(code) => ProbeFailure::new(FailureKind::Failed, format!("it ended with exit code {code}{colon}{detail}")),
        None => ProbeFailure::new(FailureKind::Killed, format!("it was killed by a signal{colon}{detail}")),
    }
}

fn could_not(kind: FailureKind, text: &str) -> Observation {
    Observation::Failed(ProbeFailure::new(kind, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ran(exit: Option<i32>, stdout: &str) -> ProbeOutput {
        ProbeOutput::Ran { exit, stdout: stdout.to_owned(), stderr: "first\ncould not open device\n\n".to_owned() }
    }

    fn observe(outputs: &[ProbeOutput]) -> Observation {
        interpret_measurements(&Params::new(), outputs)
    }

    fn failure(outputs: &[ProbeOutput]) -> ProbeFailure {
        match observe(outputs) {
            Observation::Failed(failure) => failure,
            other => panic!("{other:?}"),
        }
    }

    const GOOD: &str = r#"{"metrics":[{"name":"read","entity":"mount:/data","value":2.5e9,"unit":"bytes/s"}]}"#;

    #[test]
    fn measurements_of_several_probes_are_merged() {
        let Observation::Measured { metrics, events, .. } = observe(&[ran(Some(0), GOOD), ran(Some(0), GOOD)]) else {
            panic!("measured");
        };
        assert_eq!((metrics.len(), events.len()), (2, 0));
        assert_eq!(metrics[0].entity.to_string(), "mount:/data");
    }

    #[test]
    fn nothing_measured_is_said_and_never_passes() {
        assert_eq!(failure(&[]).kind, FailureKind::Empty);
        assert_eq!(failure(&[ran(Some(0), "")]).kind, FailureKind::Empty);
        assert_eq!(failure(&[ran(Some(0), "{}")]).kind, FailureKind::Empty);
    }

    #[test]
    fn one_failed_probe_makes_the_observation_fail() {
        let failed = failure(&[ran(Some(0), GOOD), ran(Some(7), GOOD)]);
        assert_eq!(failed, ProbeFailure::new(FailureKind::Failed, "it ended with exit code 7: could not open device"));
        assert_eq!(failure(&[ran(None, GOOD)]).kind, FailureKind::Killed);
    }

    #[test]
    fn non_finite_numbers_and_other_formats_are_rejected() {
        for text in [
            "null",
            "[1]",
            "{\"metrics\":[",
            &GOOD.replace("2.5e9", "1e999"),
            &GOOD.replace("2.5e9", "null"),
            &GOOD.replace("2.5e9", "NaN"),
            &GOOD.replace("bytes/s", "parsecs"),
            &GOOD.replace("\"unit\"", "\"colour\""),
        ] {
            assert_eq!(failure(&[ran(Some(0), text)]).kind, FailureKind::Unparseable, "{text}");
        }
        let long = format!("{}{}", GOOD, " ".repeat(MAX_MEASUREMENTS_BYTES));
        assert_eq!(failure(&[ran(Some(0), &long)]).kind, FailureKind::TooLong);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic_or_measure_nothing(text in ".{0,300}", exit in proptest::option::of(-1..4_i32)) {
            if let Observation::Measured { metrics, events, .. } = observe(&[ran(exit, &text)]) {
                prop_assert!(!metrics.is_empty() || !events.is_empty());
            }
        }
    }
}
