//! What needs an operator, most urgent first: one sentence each, with the nodes, since when, and the command to type.
//!
//! The terminal, the API and the dashboard show this one list. An item is a value and not a text, so that a program can
//! select items by kind, and a monitoring system can alert by urgency. Nodes with the same trouble are one item: after a
//! wrong command on forty nodes an operator reads one line.
//!
//! A node that is not tested because users have it is neither ill nor idle: its overdue results are at most a notice.

mod cases;
mod disturbed;
mod grouping;
mod jobs;
mod nodes;
mod not_judged;
mod overdue;
mod service;
mod software;

use serde::{Deserialize, Serialize};

use super::{
    CoverageRow, Facts,
    service_state::{LeaderView, SilentAgentsView, StoredStatus},
};
use crate::{
    capacity_plan::CapacityPlan,
    ids::{CaseId, NodeName},
    reason::coded,
    time::Timestamp,
};

coded! {
    /// How soon an operator is needed, most urgent first.
    pub enum Urgency {
        /// Nodes are not watched or not repaired, or most of them are out.
        Critical => "critical",
        /// Something waits for an operator, or does not work.
        Warning => "warning",
        /// Worth knowing; nothing is wrong because of it.
        Notice => "notice",
    }
}

coded! {
    /// What needs an operator; within one urgency, in this order.
    pub enum AttentionKind {
        /// No controller leads: nothing is tested or repaired.
        NoController => "no-controller",
        /// The cluster has not answered for too long, or never.
        ObservationOld => "observation-old",
        /// The state that a controller serves was not rebuilt.
        StateOld => "state-old",
        /// The last cycle could not observe or do everything.
        CycleProblem => "cycle-problem",
        /// No node is taken out until an operator closes the breaker.
        BreakerOpen => "breaker-open",
        /// More of the fleet is out of service than the breaker would have allowed.
        ManyNodesOut => "many-nodes-out",
        /// So many agents are silent that the fault is in the network or in Cluster Doctor.
        AgentsSilent => "agents-silent",
        /// Validation jobs end in a row without a result.
        ValidationFailing => "validation-failing",
        /// The controller has handed the case over to an operator.
        CaseWaiting => "case-waiting",
        /// The controller would take this step, and the policy does not allow it.
        Proposal => "proposal",
        /// The node is out of service, and the controller works on it.
        OutOfService => "out-of-service",
        /// A repair that an operator requested waits for something that only a person ends.
        RepairWaiting => "repair-waiting",
        AgentSilent => "agent-silent",
        OccupancyUnknown => "occupancy-unknown",
        /// Tests are overdue: a warning on free nodes, a notice on nodes that users have.
        CoverageLow => "coverage-low",
        /// The limits cannot hold the periods of the tests.
        LimitTooSmall => "limit-too-small",
        Paused => "paused",
        /// The same program disturbs the tests of a node again and again.
        Disturbed => "disturbed",
        ResultsRejected => "results-rejected",
        AlertsLost => "alerts-lost",
        Held => "held",
        /// Another party keeps the node out of service.
        ForeignMark => "foreign-mark",
        /// No test has run on the node yet.
        NeverTested => "never-tested",
        /// Values without an expectation, because no profile has them.
        NotJudged => "not-judged",
        MissingSoftware => "missing-software",
    }
}

impl AttentionKind {
    /// Returns what an item of this kind means, for the reference page.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::NoController => "no controller leads: nothing is tested and nothing is repaired",
            Self::ObservationOld => "the cluster has not answered for a while, or never",
            Self::StateOld => "the state that this controller serves was not rebuilt for two minutes",
            Self::CycleProblem => "the last cycle could not observe or do everything",
            Self::BreakerOpen => "no node is taken out of service until an operator closes the breaker",
            Self::ManyNodesOut => "more nodes are out of service than the breaker would allow to take out",
            Self::AgentsSilent => "so many agents are silent that the network or the controller is at fault",
            Self::ValidationFailing => "validation jobs end in a row without a result",
            Self::CaseWaiting => "the controller has handed the case over and waits for an operator",
            Self::Proposal => "the controller would take this step; the policy does not allow it",
            Self::OutOfService => "the node is out of service and the controller works on it",
            Self::RepairWaiting => "a repair that an operator requested has not begun; it is withdrawn after 24 hours",
            Self::AgentSilent => "the agent of the node does not report",
            Self::OccupancyUnknown => "it is unknown whether users are on the node, so it is not tested",
            Self::CoverageLow => "tests are overdue for a day or give no result; a notice if users have the nodes",
            Self::LimitTooSmall => "the limits of the policy cannot hold the periods of its tests",
            Self::Paused => "an operator paused validation",
            Self::Disturbed => "the same program disturbs the tests of a node again and again",
            Self::ResultsRejected => "results or reports were rejected within the last day",
            Self::AlertsLost => "messages about alerts were not delivered within the last day",
            Self::Held => "an operator holds the node: no tests, no repairs",
            Self::ForeignMark => "another party keeps the node out of service",
            Self::NeverTested => "no test has run on the node yet, so nothing is known of its health",
            Self::NotJudged => "measured values have nothing to compare with",
            Self::MissingSoftware => "tests do not apply because their software is not installed",
        }
    }

    /// Returns whether the item is about the service as a whole, and not about the fault of a single node.
    pub const fn is_about_the_service(self) -> bool {
        !matches!(
            self,
            Self::ManyNodesOut
                | Self::CaseWaiting
                | Self::Proposal
                | Self::OutOfService
                | Self::RepairWaiting
                | Self::AgentSilent
                | Self::Held
                | Self::ForeignMark
                | Self::NeverTested
        )
    }
}

/// One thing that needs an operator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttentionItem {
    pub kind: AttentionKind,
    pub urgency: Urgency,
    /// Sorted; empty if it is not about nodes.
    pub nodes: Vec<NodeName>,
    /// `None`: unknown.
    pub since: Option<Timestamp>,
    /// One sentence.
    pub text: String,
    /// The command that resolves or explains it.
    pub next: Option<String>,
    /// The case, if the item is about one.
    pub case: Option<CaseId>,
}

impl AttentionItem {
    /// An item that is about no node in particular.
    pub fn new(kind: AttentionKind, urgency: Urgency, text: impl Into<String>) -> Self {
        Self { kind, urgency, nodes: Vec::new(), since: None, text: text.into(), next: None, case: None }
    }

    #[must_use]
    pub fn since(mut self, since: impl Into<Option<Timestamp>>) -> Self {
        self.since = since.into().filter(|since| *since != Timestamp::MIN);
        self
    }

    #[must_use]
    pub fn next(mut self, next: impl Into<String>) -> Self {
        self.next = Some(next.into());
        self
    }

    #[must_use]
    fn about(mut self, nodes: Vec<NodeName>) -> Self {
        self.nodes = nodes;
        self.nodes.sort_unstable();
        self.nodes.dedup();
        self
    }
}

coded! {
    /// The state of the service in one word, as Nagios knows it.
    pub enum OverallState {
        Ok => "ok",
        Warning => "warning",
        Critical => "critical",
        /// The cluster was never observed: nothing is known.
        Unknown => "unknown",
    }
}

impl OverallState {
    /// Derives the state from the list. Notices are no problem.
    pub fn of(facts: &Facts, items: &[AttentionItem]) -> Self {
        match items.iter().map(|item| item.urgency).min() {
            _ if facts.observed_at.is_none() => Self::Unknown,
            Some(Urgency::Critical) => Self::Critical,
            Some(Urgency::Warning) => Self::Warning,
            Some(Urgency::Notice) | None => Self::Ok,
        }
    }
}

/// What the status has computed already.
pub(super) struct StatusParts<'a> {
    pub leader: &'a LeaderView,
    pub silent: &'a SilentAgentsView,
    pub coverage: &'a [CoverageRow],
    pub capacity: &'a CapacityPlan,
}

/// Returns everything that needs an operator, most urgent first.
pub(super) fn attention(facts: &Facts, stored: &StoredStatus, parts: &StatusParts<'_>) -> Vec<AttentionItem> {
    let mut items = service::items(facts, stored, parts);
    let failing = jobs::items(stored);
    let every_job_fails = failing.iter().any(|item| item.urgency == Urgency::Critical);
    items.extend(failing);
    items.extend(cases::items(facts, stored));
    items.extend(nodes::items(facts, parts.silent));
    items.extend(overdue::items(facts, parts.coverage, every_job_fails));
    items.extend(disturbed::item(facts));
    items.extend(not_judged::item(facts));
    items.extend(software::items(facts, stored));
    items.sort_by(|a, b| {
        let order = |item: &AttentionItem| (item.urgency, item.kind, item.since.unwrap_or(Timestamp::MAX));
        order(a).cmp(&order(b)).then_with(|| a.nodes.cmp(&b.nodes))
    });
    items
}

#[cfg(test)]
mod tests;
