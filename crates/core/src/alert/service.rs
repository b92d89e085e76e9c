//! Conditions of the service itself, reported when they begin and when they end.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Notification, Subject};
use crate::{
    reason::coded,
    snapshot::Breaker,
    time::{Span, Timestamp},
};

coded! {
    /// What can be wrong with the service.
    pub enum Condition {
        /// No node is taken out until an operator closes the breaker.
        BreakerOpen => "breaker-open",
        /// So many agents are silent that the fault is Cluster Doctor's.
        AgentsSilent => "agents-silent",
        /// No cycle has observed the cluster for too long.
        CycleOld => "cycle-old",
        /// The controller rejects results.
        ResultsRejected => "results-rejected",
        /// Messages could not be delivered and were dropped.
        AlertsLost => "alerts-lost",
    }
}

impl Condition {
    /// Returns the command that shows details.
    pub const fn command(self) -> &'static str {
        match self {
            Self::BreakerOpen => "doctor breaker show",
            Self::AgentsSilent | Self::CycleOld => "doctor status",
            Self::ResultsRejected => "doctor audit",
            Self::AlertsLost => "doctor alert list",
        }
    }
}

/// A condition began or ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceNotification {
    pub condition: Condition,
    /// Whether the condition holds now.
    pub raised: bool,
    pub since: Timestamp,
    pub text: String,
}

/// The input from which the conditions are derived.
#[derive(Debug, Clone)]
pub struct ServiceFacts {
    pub breaker: Breaker,
    pub agents_silent: bool,
    /// Time since a cycle last observed the cluster, or since the service began to wait for the first cycle.
    pub unseen_for: Span,
    pub cycle_old_after: Span,
    /// Documents rejected recently, and the largest acceptable number.
    pub rejected: u64,
    pub max_rejected: u64,
    /// Messages dropped within the last day.
    pub undelivered: u64,
}

/// Returns the present conditions, each with a line for people.
pub fn conditions(facts: &ServiceFacts) -> BTreeMap<Condition, String> {
    let mut there = BTreeMap::new();
    if let Breaker::Open { why, .. } = &facts.breaker {
        there.insert(Condition::BreakerOpen, format!("the circuit breaker is open, no node is taken out: {why}"));
    }
    if facts.agents_silent {
        let text = "many agents are silent at the same time: check the network";
        there.insert(Condition::AgentsSilent, text.to_owned());
    }
    if facts.unseen_for > facts.cycle_old_after {
        let limit = facts.cycle_old_after;
        there.insert(Condition::CycleOld, format!("no cycle has observed the cluster for more than {limit}"));
    }
    if facts.rejected > facts.max_rejected {
        let text = format!("results rejected recently: {}; see rejected/ on the share", facts.rejected);
        there.insert(Condition::ResultsRejected, text);
    }
    if facts.undelivered > 0 {
        there.insert(
            Condition::AlertsLost,
            format!("messages not delivered within the last day: {}", facts.undelivered),
        );
    }
    there
}

/// Returns notes for conditions that began or ended. `before` holds each reported condition and since when it has held.
pub fn condition_changes(
    before: &BTreeMap<Condition, Timestamp>,
    there: &BTreeMap<Condition, String>,
    at: Timestamp,
) -> Vec<Notification> {
    let note = |condition, raised, since, text| Notification {
        at,
        subject: Subject::Service(ServiceNotification { condition, raised, since, text }),
    };
    let began = there.iter().filter(|(condition, _)| !before.contains_key(condition));
    let began = began.map(|(condition, text)| note(*condition, true, at, text.clone()));
    let ended = before.iter().filter(|(condition, _)| !there.contains_key(condition));
    let ended = ended.map(|(condition, since)| note(*condition, false, *since, format!("over: {condition}")));
    began.chain(ended).collect()
}
