//! Parses `/proc/uptime`, to compute the rate of a counter that started at boot.

use doctor_core::observation::{FailureKind, ProbeFailure};

use crate::{files::file_text, probe::ProbeOutput};

pub const PATH: &str = "/proc/uptime";

/// Returns the hours since the boot, at least one: a single error in the first minute is not a rate.
///
/// # Errors
/// Returns the failure that the check should report.
pub fn uptime_hours(output: Option<&ProbeOutput>) -> Result<f64, ProbeFailure> {
    Ok((uptime_seconds(output)? / 3600.0).max(1.0))
}

/// Returns the seconds since the boot.
///
/// # Errors
/// Returns the failure that the check should report.
pub fn uptime_seconds(output: Option<&ProbeOutput>) -> Result<f64, ProbeFailure> {
    let text = file_text(output)?;
    let seconds = text.split_ascii_whitespace().next().and_then(|word| word.parse::<f64>().ok());
    seconds
        .filter(|seconds| seconds.is_finite() && *seconds >= 0.0)
        .ok_or_else(|| ProbeFailure::new(FailureKind::Unparseable, format!("{PATH} contains no uptime: {text:.40}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hours(text: &str) -> Result<f64, ProbeFailure> {
        uptime_hours(Some(&ProbeOutput::Text(text.to_owned())))
    }

    #[test]
    fn the_first_field_is_in_seconds_and_the_first_hour_counts_as_one() {
        // Linux 6.18, 2026-11-15; the second made by hand.
        assert_eq!(hours("36000.55 142011.07\n").map(f64::round), Ok(10.0));
        assert_eq!(hours("12.31 11.00\n"), Ok(1.0));
        for text in ["", "soon", "-1 0", "NaN 1", "inf 1"] {
            assert!(hours(text).is_err(), "{text}");
        }
        assert!(uptime_hours(None).is_err());
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,60}") {
            if let Ok(hours) = hours(&text) {
                prop_assert!(hours >= 1.0);
            }
        }
    }
}
