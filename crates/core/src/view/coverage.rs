//! Coverage: the share of the cluster that each test has covered.

use serde::Serialize;

use super::{
    Facts, TestStatus,
    due::{Due, is_covered},
};
use crate::{ids::TestId, policy::TestPolicy, snapshot::NodeRecord, time::Span};

/// One test over all nodes of its pools. The counts by status add up to `nodes`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CoverageRow {
    pub test: TestId,
    /// The suite under which the test is counted.
    pub suite: Option<TestId>,
    pub cutoff: Span,
    pub nodes: u32,
    /// Nodes with a pass or fail within the cut-off.
    pub covered: u32,
    /// Of the nodes that it applies to. `None`: it applies to none.
    pub percent: Option<f64>,
    pub pass: u32,
    pub fail: u32,
    pub inconclusive: u32,
    pub stale: u32,
    pub never_tested: u32,
    pub not_applicable: u32,
    /// Measured, without an expected value to compare with.
    pub not_judged: u32,
}

impl CoverageRow {
    fn empty(test: &TestPolicy) -> Self {
        Self {
            test: test.id.clone(),
            suite: test.suite.clone(),
            cutoff: test.cutoff,
            nodes: 0,
            covered: 0,
            percent: None,
            pass: 0,
            fail: 0,
            inconclusive: 0,
            stale: 0,
            never_tested: 0,
            not_applicable: 0,
            not_judged: 0,
        }
    }

    /// Returns the number of nodes with this status.
    pub const fn count_of(&self, status: TestStatus) -> u32 {
        match status {
            TestStatus::Pass => self.pass,
            TestStatus::Fail => self.fail,
            TestStatus::Inconclusive => self.inconclusive,
            TestStatus::Stale => self.stale,
            TestStatus::NeverTested => self.never_tested,
            TestStatus::NotApplicable => self.not_applicable,
            TestStatus::NotJudged => self.not_judged,
        }
    }

    fn count(&mut self, status: TestStatus, covered: bool) {
        self.nodes += 1;
        self.covered += u32::from(covered);
        *match status {
            TestStatus::Pass => &mut self.pass,
            TestStatus::Fail => &mut self.fail,
            TestStatus::Inconclusive => &mut self.inconclusive,
            TestStatus::Stale => &mut self.stale,
            TestStatus::NeverTested => &mut self.never_tested,
            TestStatus::NotApplicable => &mut self.not_applicable,
            TestStatus::NotJudged => &mut self.not_judged,
        } += 1;
    }
}

/// Returns the coverage of each routine test, in the order of tests.
pub fn coverage(facts: &Facts) -> Vec<CoverageRow> {
    let mut rows: Vec<CoverageRow> =
        facts.snapshot.tests.iter().filter(|test| test.routine).map(CoverageRow::empty).collect();
    for record in &facts.snapshot.nodes {
        for (test, known) in facts.tests_of(record) {
            let Some(row) = rows.iter_mut().find(|row| row.test == test.id) else { continue };
            row.count(TestStatus::of(known, test, facts.now), is_covered(known, test, facts.now));
        }
    }
    for row in &mut rows {
        let applies = row.nodes - row.not_applicable - row.not_judged;
        row.percent = (applies > 0).then(|| 100.0 * f64::from(row.covered) / f64::from(applies));
    }
    rows
}

/// Returns whether a test on this node is due and has not run.
pub fn is_overdue(facts: &Facts, record: &NodeRecord) -> bool {
    facts.due_of(record).any(|(_, _, due)| due == Due::Now)
}
