//! A figure, and the JSON line in which it is printed.

use serde_json::{Value, json};

/// One measured number with its inputs.
#[derive(Debug, Clone)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    pub(crate) inputs: Value,
    pub(crate) note: String,
}

impl Figure {
    pub(crate) fn line(&self, metric: &str, commit: &str) -> Value {
        json!({
            "metric": metric,
            "name": self.name,
            "value": rounded(self.value),
            "unit": self.unit,
            "inputs": self.inputs,
            "commit": commit,
            "note": self.note,
        })
    }
}

/// Rounds to four significant digits: more would be noise.
fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let scale = 10_f64.powf(3.0 - value.abs().log10().floor());
    (value * scale).round() / scale
}

/// Returns the measured commit, and whether the tree differs from it.
pub(crate) fn commit() -> String {
    let result = std::process::Command::new("git").args(["describe", "--always", "--dirty"]).output();
    match result {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        _ => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_rounded_to_four_digits() {
        for (value, expected) in [(0.0, 0.0), (0.012_345_6, 0.012_35), (9.4, 9.4), (23_456.7, 23_460.0)] {
            assert!((rounded(value) - expected).abs() < expected.abs() * 1e-12 + 1e-12, "{value}: {}", rounded(value));
        }
    }
}
