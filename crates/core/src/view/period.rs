//! The contents of the store for a period of time.

use crate::{
    case::{Case, CaseState},
    finding::Verdict,
    ids::{NodeName, TestId},
    run::Run,
    time::{Span, Timestamp},
};

/// Runs, results and cases of a period of time.
#[derive(Debug, Clone, Default)]
pub struct Period {
    /// Runs that were planned, active or ended in it.
    pub runs: Vec<RunFacts>,
    /// Results of all tests.
    pub results: Vec<TestResult>,
    /// Cases that were opened or closed in it, and those still open.
    pub cases: Vec<Case>,
}

/// One result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestResult {
    pub test: TestId,
    pub node: NodeName,
    pub verdict: Verdict,
    pub at: Timestamp,
}

/// A run with its start and end.
#[derive(Debug, Clone)]
pub struct RunFacts {
    pub run: Run,
    pub started: Option<Timestamp>,
    pub ended: Option<Timestamp>,
}

pub(super) const fn closed_at(case: &Case) -> Option<Timestamp> {
    match case.state {
        CaseState::Closed { at, .. } => Some(at),
        CaseState::Open => None,
    }
}

/// Returns the part of a run's node time that is within the period.
pub(super) fn spent(facts: &RunFacts, since: Timestamp, until: Timestamp) -> Span {
    let Some(started) = facts.started else { return Span::ZERO };
    let ended = facts.ended.unwrap_or(until).min(until);
    ended.since(started.max(since)).times(i64::try_from(facts.run.nodes.len()).unwrap_or(i64::MAX))
}
