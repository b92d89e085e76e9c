//! `doctor-node profile diff`: compares this machine with a profile, metric by metric.

use std::fmt::Write as _;

use doctor_core::{
    observation::{Entity, Observation},
    profile::Profile,
};
use serde::Serialize;

use crate::check::CheckObservation;

/// One expectation and the measured value.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    pub metric: String,
    pub entity: Entity,
    pub expected: f64,
    /// `None`: not measured, so unknown.
    pub measured: Option<f64>,
    pub comparison: Comparison,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Comparison {
    Same,
    Less,
    More,
    /// No check that ran here measures it. Bandwidths are measured by tests, not by checks.
    NotMeasured,
}

impl Comparison {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Same => "same",
            Self::Less => "less",
            Self::More => "more",
            Self::NotMeasured => "not measured",
        }
    }
}

/// Published peaks are no expectation of their own: rules compare a rate with a share of them.
const PEAK: &str = "peak_";

/// Compares every expectation of the profile, with one row per measured entity. Values within half a percent count as
/// equal: memory sizes differ slightly from boot to boot.
pub fn compare(profile: &Profile, observations: &[CheckObservation]) -> Vec<Difference> {
    let metrics = || {
        observations.iter().flat_map(|seen| match &seen.observation {
            Observation::Measured { metrics, .. } => metrics.as_slice(),
            _ => &[],
        })
    };
    let mut rows = Vec::new();
    for (name, expected) in profile.expect.iter().filter(|(name, _)| !name.starts_with(PEAK)) {
        let (expected, before) = (expected.value, rows.len());
        rows.extend(metrics().filter(|metric| metric.name == *name).map(|metric| {
            let compared = if (metric.value - expected).abs() <= expected.abs() * 0.005 {
                Comparison::Same
            } else if metric.value < expected {
                Comparison::Less
            } else {
                Comparison::More
            };
            let (entity, seen) = (metric.entity.clone(), Some(metric.value));
            Difference { metric: name.clone(), entity, expected, measured: seen, comparison: compared }
        }));
        if rows.len() == before {
            let compared = Comparison::NotMeasured;
            rows.push(Difference {
                metric: name.clone(),
                entity: Entity::node(),
                expected,
                measured: None,
                comparison: compared,
            });
        }
    }
    rows
}

/// Renders a table.
pub fn differences_table(rows: &[Difference]) -> String {
    let width = rows.iter().map(|row| row.metric.len()).max().unwrap_or(0).max("METRIC".len());
    let mut out = format!("{:width$}  {:14}  {:>18}  {:>18}  COMPARED\n", "METRIC", "PART", "EXPECTED", "SEEN");
    for row in rows {
        let seen = row.measured.map_or_else(|| "-".to_owned(), |value| value.to_string());
        let (metric, entity, expected, comparison) = (&row.metric, &row.entity, row.expected, row.comparison.as_str());
        let _infallible = writeln!(out, "{metric:width$}  {entity:14}  {expected:>18}  {seen:>18}  {comparison}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::{
        ids::{CheckId, Sku},
        observation::{EntityKind, Metric},
        time::Span,
    };

    #[test]
    fn every_expectation_has_a_row_even_if_it_was_not_measured() {
        let expect = [("gpu_count", 8.0), ("links", 18.0), ("mem", 1000.0), ("peak_speed", 9.0), ("speed", 5.0)];
        let profile = Profile::stated(Sku::new("x").unwrap(), expect);
        let gpu = |id: &str, value| Metric::count("links", Entity::new(EntityKind::Gpu, id), value);
        let metrics = vec![
            Metric::count("gpu_count", Entity::node(), 7.0),
            gpu("0", 18.0),
            gpu("1", 19.0),
            Metric::count("mem", Entity::node(), 996.0),
        ];
        let observation = Observation::measured(metrics, Vec::new());
        let observations = [CheckObservation { check: CheckId::new("a").unwrap(), observation, duration: Span::ZERO }];
        let rows = compare(&profile, &observations);
        let compared: Vec<_> = rows.iter().map(|row| row.comparison).collect();
        use Comparison::{Less, More, NotMeasured, Same};
        assert_eq!(compared, [Less, Same, More, Same, NotMeasured]);
        assert!(differences_table(&rows).contains("gpu:1"));
    }
}
