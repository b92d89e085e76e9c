//! Ten million generated results: each node is tested once a day with three tests in one run, for most of a year.
//!
//! Every row is a function of its node, day and test, so that answers can be computed without the database.

use doctor_core::{
    finding::{Severity, Verdict},
    ids::{NodeName, RunId},
    time::{Span, Timestamp},
};

use crate::random::spread;

/// One row of history. Nodes, tests and outcomes are counted from zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GeneratedRow {
    pub(crate) node: u32,
    pub(crate) test: usize,
    pub(crate) run: RunId,
    pub(crate) outcome: usize,
    pub(crate) at: Timestamp,
    pub(crate) took: Span,
}

/// A possible outcome of a test.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outcome {
    pub(crate) verdict: Verdict,
    pub(crate) severity: Option<Severity>,
    pub(crate) reason: &'static str,
}

const DAY: i64 = 86_400_000;
/// The number of bits below the creation time in a run's number.
const BIRTH_SHIFT: u32 = 21;

impl GeneratedRow {
    pub(crate) const ROWS: u64 = 10_000_000;
    pub(crate) const NODES: u32 = 10_000;
    /// In the order of their names.
    pub(crate) const TESTS: [&'static str; 3] = ["dl", "nccl", "storage"];
    pub(crate) const PAIRS: usize = Self::NODES as usize * Self::TESTS.len();
    /// 333 days of three tests and one day of one test: ten million rows.
    pub(crate) const DAYS: u32 = 334;
    /// Midnight after the last day.
    pub(crate) const END: Timestamp = Timestamp::from_secs(1_794_700_800);

    pub(crate) const OUTCOMES: [Outcome; 4] = [
        Outcome { verdict: Verdict::Pass, severity: None, reason: "within-limits" },
        Outcome { verdict: Verdict::Fail, severity: Some(Severity::Reset), reason: "too-slow" },
        Outcome { verdict: Verdict::Inconclusive, severity: None, reason: "timed-out" },
        Outcome { verdict: Verdict::NotApplicable, severity: None, reason: "no-gpu" },
    ];

    pub(crate) fn name(node: u32) -> NodeName {
        NodeName::new(&format!("node{node:05}")).expect("a plain name")
    }

    /// Returns all rows in chronological order.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..Self::DAYS).flat_map(|day| (0..Self::NODES).flat_map(move |node| Self::of_run(node, day)))
    }

    /// Returns the rows of a node's run of one day.
    pub(crate) fn of_run(node: u32, day: u32) -> impl Iterator<Item = Self> {
        let tests = if day + 1 < Self::DAYS { Self::TESTS.len() } else { 1 };
        (0..tests).map(move |test| Self::row(node, day, test))
    }

    fn row(node: u32, day: u32, test: usize) -> Self {
        let luck = spread((u64::from(day) << 32) | u64::from(node));
        let start = Self::END.millis() - i64::from(Self::DAYS) * DAY;
        // The runs of a day are evenly spaced, give or take a few seconds.
        let turn = i64::from(node) * (DAY / i64::from(Self::NODES)) + below(luck, 8_000);
        let born = start + i64::from(day) * DAY + turn;
        let suffix = (luck >> 16) & ((1 << BIRTH_SHIFT) - 1);
        let run = RunId::from_number((born.cast_unsigned() << BIRTH_SHIFT) | suffix);
        let own = spread(luck ^ test as u64);
        let at = Timestamp::from_millis(born + 240_000 + below(luck >> 40, 1_200_000));
        Self { node, test, run, outcome: outcome(own), at, took: Span::from_millis(30_000 + below(own >> 20, 270_000)) }
    }
}

fn below(luck: u64, limit: u64) -> i64 {
    (luck % limit).cast_signed()
}

/// Draws an outcome: of a thousand results, 10 fail, 15 are inconclusive and 5 not applicable.
const fn outcome(luck: u64) -> usize {
    match luck % 1_000 {
        0..10 => 1,
        10..25 => 2,
        25..30 => 3,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_million_rows_are_generated_and_no_run_appears_twice_on_a_node() {
        let full =
            u64::from(GeneratedRow::DAYS - 1) * u64::from(GeneratedRow::NODES) * GeneratedRow::TESTS.len() as u64;
        assert_eq!(full + u64::from(GeneratedRow::NODES), GeneratedRow::ROWS);
        assert_eq!(GeneratedRow::of_run(7, 5).count(), 3);
        assert_eq!(GeneratedRow::of_run(7, GeneratedRow::DAYS - 1).count(), 1);
        let runs: Vec<RunId> =
            (0..GeneratedRow::DAYS).filter_map(|day| GeneratedRow::of_run(3, day).next()).map(|row| row.run).collect();
        assert!(runs.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn a_run_ends_before_the_next_run_on_its_node() {
        for day in 0..50 {
            let row = GeneratedRow::row(11, day, 0);
            assert!(row.at > row.run.born() && row.at < GeneratedRow::row(11, day + 1, 0).run.born(), "{row:?}");
        }
    }
}
