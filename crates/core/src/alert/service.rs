//! Troubles of the service itself: they are there or they are not, and are told when they begin and when they end.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{About, Note};
use crate::{
    reason::coded,
    snapshot::Breaker,
    time::{Span, Timestamp},
};

coded! {
    /// What can be wrong with the service.
    pub enum Condition {
        /// Nothing is taken out any more until a person has looked.
        BreakerOpen => "breaker-open",
        /// So many agents at once that the fault is ours.
        AgentsSilent => "agents-silent",
        /// Nobody has looked at the cluster for too long.
        CycleOld => "cycle-old",
        /// Results are turned away at the door.
        ResultsRejected => "results-rejected",
        /// Messages to people were given up.
        AlertsLost => "alerts-lost",
    }
}

impl Condition {
    /// The command that shows more.
    pub const fn command(self) -> &'static str {
        match self {
            Self::BreakerOpen => "doctor breaker show",
            Self::AgentsSilent | Self::CycleOld => "doctor status",
            Self::ResultsRejected => "doctor audit",
            Self::AlertsLost => "doctor alert list",
        }
    }
}

/// One of them began or ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceNote {
    pub condition: Condition,
    /// Whether it is there now.
    pub raised: bool,
    pub since: Timestamp,
    pub text: String,
}

/// What the troubles are seen from.
#[derive(Debug, Clone)]
pub struct ServiceFacts {
    pub breaker: Breaker,
    pub agents_silent: bool,
    /// For how long no cycle has looked at the cluster, or since we began to wait for one.
    pub unseen_for: Span,
    pub cycle_old_after: Span,
    /// Documents turned away lately, and how many of them are too many.
    pub rejected: u64,
    pub rejected_most: u64,
    /// Messages given up within the last day.
    pub lost: u64,
}

/// The troubles there are now, each with a line for people.
pub fn conditions(facts: &ServiceFacts) -> BTreeMap<Condition, String> {
    let mut there = BTreeMap::new();
    if let Breaker::Open { why, .. } = &facts.breaker {
        there.insert(Condition::BreakerOpen, format!("the breaker is open, nothing is taken out: {why}"));
    }
    if facts.agents_silent {
        let text = "so many agents are silent that the fault is not theirs: look at the network";
        there.insert(Condition::AgentsSilent, text.to_owned());
    }
    if facts.unseen_for > facts.cycle_old_after {
        let limit = facts.cycle_old_after;
        there.insert(Condition::CycleOld, format!("the cluster has not been looked at for more than {limit}"));
    }
    if facts.rejected > facts.rejected_most {
        let text = format!("{} results were turned away lately: they are below rejected/ on the share", facts.rejected);
        there.insert(Condition::ResultsRejected, text);
    }
    if facts.lost > 0 {
        there.insert(Condition::AlertsLost, format!("{} messages to people were given up within a day", facts.lost));
    }
    there
}

/// What began and what ended, as notes. `before` has each trouble that was told, and since when it is there.
pub fn turned(
    before: &BTreeMap<Condition, Timestamp>,
    there: &BTreeMap<Condition, String>,
    at: Timestamp,
) -> Vec<Note> {
    let note = |condition, raised, since, text| Note {
        at,
        about: About::Service(ServiceNote { condition, raised, since, text }),
    };
    let began = there.iter().filter(|(condition, _)| !before.contains_key(condition));
    let began = began.map(|(condition, text)| note(*condition, true, at, text.clone()));
    let ended = before.iter().filter(|(condition, _)| !there.contains_key(condition));
    let ended = ended.map(|(condition, since)| note(*condition, false, *since, format!("over: {condition}")));
    began.chain(ended).collect()
}
