//! The distribution of one metric over many nodes, and its outliers.

use serde::Serialize;

use crate::{classify::median, ids::NodeName};

/// Bars of the histogram.
const BARS: usize = 32;
/// Largest number of outliers listed.
const MAX_OUTLIERS: usize = 50;
/// Deviations from the median that make an outlier: about one of ten thousand healthy nodes is one by chance.
const OUTLIER_DEVIATIONS: f64 = 4.0;
/// Scales a median absolute deviation to a standard deviation.
const MAD_TO_SIGMA: f64 = 1.4826;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Distribution {
    pub nodes: usize,
    pub min: f64,
    pub p5: f64,
    pub p25: f64,
    pub median: f64,
    pub p75: f64,
    pub p95: f64,
    pub max: f64,
    /// The median absolute deviation from the median, times 1.4826.
    pub deviation: f64,
    /// From `least` to `most` in equal steps; one bar if all values are equal.
    pub bars: Vec<u32>,
    /// Values more than four deviations from the median, farthest first. None if more than half of the values are
    /// equal.
    pub outliers: Vec<Outlier>,
    /// Number of outliers beyond those.
    pub more_outliers: usize,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outlier {
    pub node: NodeName,
    pub value: f64,
    /// In deviations from the median; negative below it.
    pub deviations: f64,
}

impl Distribution {
    /// Computes the distribution of the finite values. `None`: there are none.
    pub fn of(values: &[(NodeName, f64)]) -> Option<Self> {
        let mut sorted: Vec<f64> = values.iter().map(|(_, value)| *value).filter(|value| value.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let (&least, &most) = (sorted.first()?, sorted.last()?);
        let middle = median(&sorted)?;
        let distances: Vec<f64> = sorted.iter().map(|value| (value - middle).abs()).collect();
        let deviation = median(&distances)? * MAD_TO_SIGMA;
        let mut outliers: Vec<Outlier> = Vec::new();
        if deviation > 0.0 {
            let apart = values.iter().filter(|(_, value)| value.is_finite());
            let apart = apart.map(|(node, value)| (node, *value, (value - middle) / deviation));
            outliers.extend(
                apart.filter(|(_, _, far)| far.abs() > OUTLIER_DEVIATIONS).map(|(node, value, deviations)| Outlier {
                    node: node.clone(),
                    value,
                    deviations,
                }),
            );
        }
        outliers.sort_by(|a, b| b.deviations.abs().total_cmp(&a.deviations.abs()).then_with(|| a.node.cmp(&b.node)));
        let more_outliers = outliers.len().saturating_sub(MAX_OUTLIERS);
        outliers.truncate(MAX_OUTLIERS);
        Some(Self {
            nodes: sorted.len(),
            min: least,
            p5: quantile(&sorted, 5),
            p25: quantile(&sorted, 25),
            median: middle,
            p75: quantile(&sorted, 75),
            p95: quantile(&sorted, 95),
            max: most,
            deviation,
            bars: bars(&sorted, least, most),
            outliers,
            more_outliers,
        })
    }
}

/// Returns the smallest value that at least `percent` percent of the values do not exceed.
fn quantile(sorted: &[f64], percent: usize) -> f64 {
    let index = (sorted.len() * percent).div_ceil(100).max(1) - 1;
    sorted[index.min(sorted.len() - 1)]
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between zero and the last bar")]
fn bars(sorted: &[f64], least: f64, most: f64) -> Vec<u32> {
    let width = (most - least) / BARS as f64;
    if width <= 0.0 || !width.is_finite() {
        return vec![u32::try_from(sorted.len()).unwrap_or(u32::MAX)];
    }
    let mut bars = vec![0; BARS];
    for value in sorted {
        let index = (((value - least) / width) as usize).min(BARS - 1);
        bars[index] += 1;
    }
    bars
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet(values: &[f64]) -> Vec<(NodeName, f64)> {
        values.iter().enumerate().map(|(n, value)| (NodeName::new(&format!("n{n}")).unwrap(), *value)).collect()
    }

    #[test]
    fn only_the_slow_node_is_an_outlier() {
        let mut values: Vec<f64> = (0..200).map(|n| 100.0 + f64::from(n % 7)).collect();
        values[17] = 60.0;
        let spread = Distribution::of(&fleet(&values)).unwrap();
        assert_eq!(spread.outliers.len(), 1, "{spread:?}");
        assert_eq!(spread.outliers[0].node.as_str(), "n17");
        assert!(spread.outliers[0].deviations < -OUTLIER_DEVIATIONS);
        assert_eq!((spread.min, spread.max, spread.median), (60.0, 106.0, 103.0));
        assert_eq!(spread.bars.iter().sum::<u32>(), 200);
        assert!(spread.p5 <= spread.p25 && spread.p25 <= spread.median && spread.p75 <= spread.p95);
    }

    #[test]
    fn equal_values_have_no_outlier_and_no_values_have_no_spread() {
        let spread = Distribution::of(&fleet(&[8.0, 8.0, 8.0, 7.0])).unwrap();
        assert_eq!((spread.deviation, spread.outliers.len()), (0.0, 0));
        assert_eq!(Distribution::of(&fleet(&[5.0])).unwrap().bars, [1]);
        assert_eq!(Distribution::of(&[]), None);
        assert_eq!(Distribution::of(&fleet(&[f64::NAN])), None);
    }
}
