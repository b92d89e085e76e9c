//! Runs: what was tested where and why, the progress and the outcome.

use serde::Serialize;

use super::{period::RunFacts, run_end, text::run_state};
use crate::{
    finding::Verdict,
    ids::{CaseId, NodeName, RunId, TestId},
    reason::ReasonCode,
    run::{Purpose, RunEnd, RunState},
    time::{Span, Timestamp},
};

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunView {
    pub run: RunId,
    pub nodes: Vec<NodeName>,
    pub tests: Vec<TestId>,
    /// `planned`, `pending`, `running`, or how it ended: `completed`, `incomplete`, `not-started`.
    pub state: &'static str,
    /// Why it is incomplete or was not started.
    pub end: Option<&'static str>,
    pub purpose: Purpose,
    pub code: ReasonCode,
    pub because: String,
    pub case: Option<CaseId>,
    pub planned: Timestamp,
    pub started: Option<Timestamp>,
    pub ended: Option<Timestamp>,
    pub limit: Span,
}

/// A run that ended without a complete result, as one of its nodes saw it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RunWithoutResult {
    pub run: RunId,
    pub node: NodeName,
    pub tests: Vec<TestId>,
    /// `incomplete` or `not-started`.
    pub state: &'static str,
    /// The reason code.
    pub end: Option<&'static str>,
    pub ended: Timestamp,
    /// The last line that its job printed and how it ended, for a sentence. `None`: neither is known.
    pub last_output: Option<String>,
}

impl RunWithoutResult {
    /// Returns one sentence: what ended when, and the last words of its job.
    pub fn sentence(&self) -> String {
        let end = self.end.unwrap_or(self.state);
        let what = format!("run {} ended without a complete result ({end})", self.run);
        match &self.last_output {
            Some(quote) => format!("{what}: {quote}"),
            None => format!("{what}; its job left no output"),
        }
    }
}

/// The result of one test of a run on one node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OutcomeView {
    pub node: NodeName,
    pub test: TestId,
    pub verdict: Verdict,
    pub reason: ReasonCode,
    pub at: Timestamp,
    pub duration: Span,
}

/// Returns the view of one run.
pub fn run_view(facts: &RunFacts) -> RunView {
    let run = &facts.run;
    let (state, end) = match &run.state {
        RunState::Ended(end) => run_end(end),
        RunState::Planned | RunState::Submitted { .. } | RunState::Running { .. } => (run_state(run).0, None),
    };
    RunView {
        run: run.id,
        nodes: run.nodes.to_vec(),
        tests: run.tests.to_vec(),
        state,
        end,
        purpose: run.purpose.value,
        code: run.purpose.code.clone(),
        because: run.purpose.text.clone(),
        case: run.case,
        planned: run.planned,
        started: facts.started,
        ended: facts.ended,
        limit: run.limit,
    }
}

/// Returns the results of a run; none before it has ended.
pub fn outcomes(facts: &RunFacts) -> Vec<OutcomeView> {
    let report = match &facts.run.state {
        RunState::Ended(RunEnd::Completed(report)) => Some(report),
        RunState::Ended(RunEnd::Incomplete { partial, .. }) => partial.as_ref(),
        _ => None,
    };
    let all = report.into_iter().flat_map(|report| &report.outcomes);
    all.map(|outcome| OutcomeView {
        node: outcome.node.clone(),
        test: outcome.test.clone(),
        verdict: outcome.verdict,
        reason: outcome.reason.clone(),
        at: outcome.at,
        duration: outcome.duration,
    })
    .collect()
}
