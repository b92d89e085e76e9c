//! Coverage by suite: one line for the dozens of quick checks, with the names of those that are not pass.

use std::collections::BTreeMap;

use serde::Serialize;

use super::CoverageRow;
use crate::{ids::TestId, test_status::TestStatus};

/// The label of tests that are in no suite, such as a site's own.
const NO_SUITE: &str = "other";

/// Returns the name under which a test is counted.
pub fn suite_label(suite: Option<&TestId>) -> &str {
    suite.map_or(NO_SUITE, TestId::as_str)
}

/// The tests of one suite over all nodes: each count is of pairs of node and test.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct SuiteCoverage {
    pub suite: String,
    pub tests: u32,
    /// Of the pairs that the tests apply to, those with a pass or fail within the cut-off. `None`: they apply to none.
    pub percent: Option<f64>,
    /// The test with the lowest coverage, and that coverage.
    pub lowest: Option<(TestId, f64)>,
    /// By status; those without a pair are omitted.
    pub counts: Vec<(TestStatus, u32)>,
    /// Tests with a pair that is not pass, not applicable or not judged.
    pub not_pass: Vec<TestId>,
}

/// Sums the coverage of tests by suite, sorted by the suites' names.
pub fn coverage_by_suite(rows: &[CoverageRow]) -> Vec<SuiteCoverage> {
    let mut suites: BTreeMap<&str, Vec<&CoverageRow>> = BTreeMap::new();
    for row in rows {
        suites.entry(suite_label(row.suite.as_ref())).or_default().push(row);
    }
    suites.into_iter().map(|(suite, rows)| suite_coverage(suite, &rows)).collect()
}

fn suite_coverage(suite: &str, rows: &[&CoverageRow]) -> SuiteCoverage {
    let sum = |count: fn(&CoverageRow) -> u32| rows.iter().map(|row| count(row)).sum::<u32>();
    let applies = sum(|row| row.nodes - row.not_applicable - row.not_judged);
    let covered = sum(|row| row.covered);
    let lowest = rows.iter().filter_map(|row| Some((row.test.clone(), row.percent?)));
    let counts = TestStatus::ALL.iter().map(|status| (*status, rows.iter().map(|row| row.count_of(*status)).sum()));
    let is_not_pass = |row: &&&CoverageRow| row.fail + row.inconclusive + row.stale + row.never_tested > 0;
    SuiteCoverage {
        suite: suite.to_owned(),
        tests: u32::try_from(rows.len()).unwrap_or(u32::MAX),
        percent: (applies > 0).then(|| 100.0 * f64::from(covered) / f64::from(applies)),
        lowest: lowest.min_by(|a, b| a.1.total_cmp(&b.1)),
        counts: counts.filter(|(_, count)| *count > 0).collect(),
        not_pass: rows.iter().filter(is_not_pass).map(|row| row.test.clone()).collect(),
    }
}
