//! Texts for codes. The matches are exhaustive, so that a new reason cannot be forgotten.

use crate::{
    finding::Evidence,
    plan::SkipReason,
    run::{IncompleteReason, NotStartedReason, Run, RunEnd, RunState},
    time::Timestamp,
};

/// A code, its meaning and what to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodeMeaning {
    pub code: &'static str,
    pub means: &'static str,
    pub to_do: &'static str,
}

const fn meaning(code: &'static str, means: &'static str, to_do: &'static str) -> CodeMeaning {
    CodeMeaning { code, means, to_do }
}

/// Every reason for skipping a node.
pub const SKIP_REASONS: [CodeMeaning; 14] = [
    meaning("busy", "users are on the node", "nothing: the node is tested when it is free"),
    meaning(
        "occupancy-unknown",
        "it is unknown whether users are on the node; unknown never counts as free",
        "check the node and the API of its cluster",
    ),
    meaning(
        "foreign-mark",
        "another party keeps the node out of service; its marks are never changed",
        "ask the party that set the mark",
    ),
    meaning("held", "an operator holds the node", "`doctor release NODE --why …` when it is ready"),
    meaning("out-of-service", "the node is out of service and its case decides", "`doctor why NODE` shows the case"),
    meaning(
        "backing-off",
        "its last jobs did not start, so the controller waits before the next one",
        "nothing, or check its queue",
    ),
    meaning("fresh", "no test is due yet", "nothing; `doctor test NODE` tests it anyway"),
    meaning("nothing-applies", "no test applies to its pool", "see `tests.NAME.pools` in the policy"),
    meaning("paused", "an operator paused validation", "`doctor resume --why …`"),
    meaning("quiet-window", "the policy starts nothing at this time", "nothing, or change `[[windows]]`"),
    meaning("waiting-for-slot", "the node is due, but other nodes come first", "nothing, or raise `limits.jobs`"),
    meaning("pool-full", "its pool has as many validation jobs as allowed", "nothing, or raise `limits.pools`"),
    meaning(
        "share-busy",
        "a due test loads a shared resource that another run is using",
        "nothing, or raise `limits.per_share`",
    ),
    meaning("budget-spent", "today's validation node-hours are spent", "nothing, or raise `limits.node_hours_per_day`"),
];

/// Returns the stable code, as in JSON.
pub const fn skip_code(reason: &SkipReason) -> &'static str {
    match reason {
        SkipReason::Busy { .. } => "busy",
        SkipReason::OccupancyUnknown { .. } => "occupancy-unknown",
        SkipReason::ForeignMark { .. } => "foreign-mark",
        SkipReason::Held { .. } => "held",
        SkipReason::OutOfService { .. } => "out-of-service",
        SkipReason::BackingOff { .. } => "backing-off",
        SkipReason::Fresh { .. } => "fresh",
        SkipReason::NothingApplies => "nothing-applies",
        SkipReason::Paused { .. } => "paused",
        SkipReason::QuietWindow => "quiet-window",
        SkipReason::WaitingForSlot => "waiting-for-slot",
        SkipReason::PoolFull { .. } => "pool-full",
        SkipReason::ShareBusy { .. } => "share-busy",
        SkipReason::BudgetSpent => "budget-spent",
    }
}

/// Returns one line for people.
pub fn skip_text(reason: &SkipReason) -> String {
    match reason {
        SkipReason::Busy { by } => format!("in use by {by}"),
        SkipReason::OccupancyUnknown { why } => format!("occupancy unknown: {why}"),
        SkipReason::ForeignMark { by, text } => format!("kept out of service by {by}: {text}"),
        SkipReason::Held { by } => format!("held by {by}"),
        SkipReason::OutOfService { state } => format!("out of service: {}", state.as_str()),
        SkipReason::BackingOff { until } => format!("its last jobs did not start; next try after {}", clock(*until)),
        SkipReason::Fresh { until } if *until == Timestamp::MAX => "no test will be due".to_owned(),
        SkipReason::Fresh { until } => format!("no test is due before {}", clock(*until)),
        SkipReason::NothingApplies => "no test applies to its pool".to_owned(),
        SkipReason::Paused { by } => format!("validation is paused by {by}"),
        SkipReason::QuietWindow => "the policy starts nothing at this time".to_owned(),
        SkipReason::WaitingForSlot => "due; other nodes come first".to_owned(),
        SkipReason::PoolFull { pool } => format!("pool {pool} has as many validation jobs as allowed"),
        SkipReason::ShareBusy { test } => format!("a shared resource that {test} loads is in use"),
        SkipReason::BudgetSpent => "today's validation node-hours are spent".to_owned(),
    }
}

/// Formats a time to the second: more digits would be noise in a sentence.
pub(super) fn clock(at: Timestamp) -> String {
    let seconds = Timestamp::from_secs(at.secs()).to_string();
    if matches!(at, Timestamp::MIN | Timestamp::MAX) { at.to_string() } else { seconds }
}

/// Formats the evidence of a finding.
pub fn evidence(evidence: &Evidence) -> String {
    match evidence {
        Evidence::Measured { metric, value, limit } => format!("{metric} = {value}, limit {limit}"),
        Evidence::Event { text, at: Some(at), .. } => format!("{text} (at {at})"),
        Evidence::Event { text, at: None, .. } => text.clone(),
        Evidence::Nothing => "nothing was measured".to_owned(),
    }
}

/// Returns the state of a run, and since when.
pub(super) const fn run_state(run: &Run) -> (&'static str, Timestamp) {
    match &run.state {
        RunState::Planned => ("planned", run.planned),
        RunState::Submitted { at, .. } => ("pending", *at),
        RunState::Running { since, .. } => ("running", *since),
        RunState::Ended(_) => ("ended", run.planned),
    }
}

/// Returns how a run ended: a word and the reason code.
pub const fn run_end(end: &RunEnd) -> (&'static str, Option<&'static str>) {
    match end {
        RunEnd::Completed(_) => ("completed", None),
        RunEnd::Incomplete { why, .. } => ("incomplete", Some(IncompleteReason::code(*why))),
        RunEnd::NotStarted(why) => ("not-started", Some(NotStartedReason::code(*why))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ids::PoolName, ids::TestId, lifecycle::NodeState};

    #[test]
    fn every_skip_reason_has_a_text_and_the_code_used_in_json() {
        let reasons = [
            SkipReason::Busy { by: "job 7".into() },
            SkipReason::OccupancyUnknown { why: "no answer".into() },
            SkipReason::ForeignMark { by: "ann".into(), text: "fan".into() },
            SkipReason::Held { by: "ann".into() },
            SkipReason::OutOfService { state: NodeState::Out },
            SkipReason::BackingOff { until: Timestamp::from_secs(1) },
            SkipReason::Fresh { until: Timestamp::from_secs(1) },
            SkipReason::NothingApplies,
            SkipReason::Paused { by: "ann".into() },
            SkipReason::QuietWindow,
            SkipReason::WaitingForSlot,
            SkipReason::PoolFull { pool: PoolName::new("a").unwrap() },
            SkipReason::ShareBusy { test: TestId::new("storage").unwrap() },
            SkipReason::BudgetSpent,
        ];
        assert_eq!(reasons.len(), SKIP_REASONS.len());
        for reason in reasons {
            let code = skip_code(&reason);
            let json = serde_json::to_value(&reason).unwrap();
            assert_eq!(json["because"], code);
            assert_eq!(SKIP_REASONS.iter().filter(|meaning| meaning.code == code).count(), 1, "{code}");
            assert!(!skip_text(&reason).is_empty());
        }
    }
}
