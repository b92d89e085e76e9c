//! The status of one test on one node: a fold of its results in time order.

use doctor_core::{finding::Verdict, snapshot::TestRecord, time::Timestamp};

/// A row of `latest_result`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StoredTestStatus {
    pub(super) record: TestRecord,
    /// Outcome and run of the newest result.
    pub(super) outcome: i64,
    pub(super) run: i64,
    /// Outcome and time of the newest pass or fail.
    pub(super) conclusive: Option<(i64, Timestamp)>,
}

/// One result, as input to the fold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NextResult {
    pub(super) at: Timestamp,
    pub(super) run: i64,
    pub(super) outcome: i64,
    pub(super) verdict: Verdict,
    /// Some of its measurements have no expected value.
    pub(super) not_judged: bool,
}

impl StoredTestStatus {
    pub(super) const EMPTY: Self = Self { record: TestRecord::NEVER, outcome: 0, run: 0, conclusive: None };

    /// Whether a result is newer than everything folded so far.
    pub(super) fn precedes(&self, result: &NextResult) -> bool {
        self.record.attempt().is_none_or(|attempt| (attempt, self.run) <= (result.at, result.run))
    }

    /// Adds the next result.
    pub(super) fn add(&mut self, result: &NextResult) {
        self.record.add_with_reason(result.verdict, result.not_judged, result.at);
        self.outcome = result.outcome;
        self.run = result.run;
        if result.verdict.is_conclusive() {
            self.conclusive = Some((result.outcome, result.at));
        }
    }

    /// Folds all results; `None` if there are none.
    pub(super) fn fold(mut results: Vec<NextResult>) -> Option<Self> {
        results.sort_unstable_by_key(|result| (result.at, result.run));
        let mut status = None::<Self>;
        for result in &results {
            status.get_or_insert(Self::EMPTY).add(result);
        }
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(at: i64, verdict: Verdict) -> NextResult {
        NextResult { at: Timestamp::from_secs(at), run: at, outcome: 1, verdict, not_judged: false }
    }

    #[test]
    fn the_order_of_results_makes_no_difference() {
        let miss = Verdict::Inconclusive;
        let in_order = StoredTestStatus::fold(vec![result(5, miss), result(6, Verdict::Pass), result(7, miss)]);
        let late_pass = StoredTestStatus::fold(vec![result(5, miss), result(7, miss), result(6, Verdict::Pass)]);
        assert_eq!(in_order, late_pass);
        assert_eq!(in_order.unwrap().record.misses(), 1);
        assert_eq!(StoredTestStatus::fold(vec![]), None);
    }

    #[test]
    fn an_inconclusive_result_hides_no_earlier_verdict() {
        let status = StoredTestStatus::fold(vec![result(5, Verdict::Fail), result(6, Verdict::Inconclusive)]).unwrap();
        assert_eq!(status.conclusive, Some((1, Timestamp::from_secs(5))));
        assert_eq!(status.record.verdict(), Some(Verdict::Inconclusive));
    }
}
