//! The expected answers of the store, computed from the generator of the rows in the simplest way.

use anyhow::{Context, Result, ensure};
use doctor_core::{
    finding::Verdict,
    ids::{RunId, TestId},
    reason::ReasonCode,
    snapshot::TestRecord,
    time::Timestamp,
};
use doctor_store::records::{FailureRate, HistoryRow, LatestRow};

use super::generator::GeneratedRow;

const HOUR: i64 = 3_600_000;

/// The state of one test on one node after all rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpectedLatest {
    pub(crate) record: TestRecord,
    pub(crate) outcome: usize,
    pub(crate) run: RunId,
    /// The newest pass or fail.
    pub(crate) conclusive: Option<(usize, Timestamp)>,
}

/// The expected state of all tests.
#[derive(Debug)]
pub(crate) struct Expected {
    /// By node, then by test.
    pub(crate) latest: Vec<ExpectedLatest>,
}

impl Expected {
    pub(crate) fn compute() -> Result<Self> {
        let mut latest: Vec<Option<ExpectedLatest>> = vec![None; GeneratedRow::PAIRS];
        for row in GeneratedRow::all() {
            let index = row.node as usize * GeneratedRow::TESTS.len() + row.test;
            let verdict = GeneratedRow::OUTCOMES[row.outcome].verdict;
            let nothing = ExpectedLatest { record: TestRecord::NEVER, outcome: 0, run: row.run, conclusive: None };
            let result = latest[index].get_or_insert(nothing);
            result.record.add(verdict, row.at);
            result.outcome = row.outcome;
            result.run = row.run;
            if verdict.is_conclusive() {
                result.conclusive = Some((row.outcome, row.at));
            }
        }
        let latest =
            latest.into_iter().collect::<Option<Vec<ExpectedLatest>>>().context("a test has no generated row")?;
        Ok(Self { latest })
    }

    pub(crate) fn check_latest(&self, answer: &[LatestRow]) -> Result<()> {
        ensure!(
            answer.len() == GeneratedRow::PAIRS,
            "{} latest results, expected {}",
            answer.len(),
            GeneratedRow::PAIRS
        );
        for (index, (result, row)) in self.latest.iter().zip(answer).enumerate() {
            let node = u32::try_from(index / GeneratedRow::TESTS.len()).context("counting nodes")?;
            let expected = LatestRow {
                node: GeneratedRow::name(node),
                test: test(index % GeneratedRow::TESTS.len())?,
                at: result.record.attempt().context("a test has no generated result")?,
                verdict: GeneratedRow::OUTCOMES[result.outcome].verdict,
                reason: reason(result.outcome)?,
                run: Some(result.run),
                conclusive: result.conclusive.map(|(outcome, at)| (GeneratedRow::OUTCOMES[outcome].verdict, at)),
                misses: result.record.misses(),
            };
            ensure!(*row == expected, "the latest result is {row:?}, expected {expected:?}");
        }
        Ok(())
    }

    /// Verifies failure rates, which the store counts by the hour.
    pub(crate) fn check_rates(&self, answer: &[FailureRate], since: Timestamp) -> Result<()> {
        let from = since.millis().div_euclid(HOUR) * HOUR;
        let mut counts = [[0_u64; 4]; GeneratedRow::TESTS.len()];
        // A run of the day before may have its result in the first hour.
        let days = u32::try_from((GeneratedRow::END.millis() - from) / (24 * HOUR) + 2).context("counting days")?;
        for day in GeneratedRow::DAYS.saturating_sub(days)..GeneratedRow::DAYS {
            for row in (0..GeneratedRow::NODES).flat_map(|node| GeneratedRow::of_run(node, day)) {
                if row.at.millis() >= from {
                    counts[row.test][row.outcome] += 1;
                }
            }
        }
        ensure!(answer.len() == counts.len(), "{} failure rates, expected {}", answer.len(), counts.len());
        for (index, (row, counts)) in answer.iter().zip(counts).enumerate() {
            let of = |verdict| {
                let kinds = GeneratedRow::OUTCOMES.iter().zip(counts).filter(|(kind, _)| kind.verdict == verdict);
                kinds.map(|(_, count)| count).sum()
            };
            let expected = FailureRate {
                test: test(index)?,
                pass: of(Verdict::Pass),
                fail: of(Verdict::Fail),
                inconclusive: of(Verdict::Inconclusive),
                not_applicable: of(Verdict::NotApplicable),
            };
            ensure!(*row == expected, "the failure rate is {row:?}, expected {expected:?}");
        }
        Ok(())
    }
}

/// Verifies the newest rows of a node: newest first, the tests of one run in the order of their names.
pub(crate) fn check_newest(node: u32, answer: &[HistoryRow], count: usize) -> Result<()> {
    let newest = (0..GeneratedRow::DAYS).rev().flat_map(|day| GeneratedRow::of_run(node, day)).take(count);
    ensure!(answer.len() == count, "{} newest results of a node, expected {count}", answer.len());
    for (row, past) in answer.iter().zip(newest) {
        let kind = GeneratedRow::OUTCOMES[past.outcome];
        let expected = HistoryRow {
            node: GeneratedRow::name(node),
            test: test(past.test)?,
            at: past.at,
            verdict: kind.verdict,
            reason: reason(past.outcome)?,
            severity: kind.severity,
            run: Some(past.run),
            duration: past.took,
            untrusted: false,
            by_agent: false,
        };
        ensure!(*row == expected, "the history has {row:?}, expected {expected:?}");
    }
    Ok(())
}

fn test(index: usize) -> Result<TestId> {
    Ok(TestId::new(GeneratedRow::TESTS[index])?)
}

fn reason(outcome: usize) -> Result<ReasonCode> {
    Ok(ReasonCode::new(GeneratedRow::OUTCOMES[outcome].reason)?)
}
