//! Views of the node agents: whether each one reports, and how it differs from this controller.

use std::collections::BTreeMap;

use doctor_checks::document::Schema;
use doctor_core::{
    ids::NodeName,
    lifecycle::NodeState,
    policy::TestPolicy,
    snapshot::NodeRecord,
    time::{Span, Timestamp},
    view::Facts,
};
use doctor_store::{
    Store, StoreError,
    records::{AgentAuth, AgentConfirmation, AgentRow},
};
use serde::Serialize;

/// An agent that was ever enrolled, or accepted through a token review.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AgentView {
    pub node: NodeName,
    pub state: AgentState,
    pub authenticated_by: AgentAuth,
    /// Time of enrolment, or of the first token review.
    pub enrolled: Timestamp,
    pub revoked: Option<Timestamp>,
    /// Up to a minute old.
    pub last_contact: Option<Timestamp>,
    pub program: Option<String>,
    pub schema: Option<String>,
    pub policy: Option<u32>,
    /// How far its clock was ahead of the controller's when it last reported.
    pub clock_ahead_ms: Option<i64>,
    /// Differences from the controller.
    pub skew: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AgentState {
    Reports,
    Silent,
    NeverReported,
    Revoked,
}

impl AgentState {
    pub const ALL: [Self; 4] = [Self::Reports, Self::Silent, Self::NeverReported, Self::Revoked];

    pub const fn word(self) -> &'static str {
        match self {
            Self::Reports => "reports",
            Self::Silent => "silent",
            Self::NeverReported => "never-reported",
            Self::Revoked => "revoked",
        }
    }
}

/// Tolerated clock difference in milliseconds; it includes the transit time of a report.
const CLOCK_TOLERANCE: i64 = 5_000;

/// Returns every agent that was ever enrolled or accepted through a token review, by node.
///
/// # Errors
/// If the store fails.
pub fn views(store: &Store, facts: &Facts) -> Result<Vec<AgentView>, StoreError> {
    let policy = &facts.snapshot.policy;
    let view =
        |agent: AgentRow| AgentView::from_row(agent, last_cycle_at(facts), policy.agents.silent_after, policy.version);
    Ok(store.agents()?.into_iter().map(view).collect())
}

/// Silence is evaluated at the time of the last cycle: a controller that stops makes no agent silent.
fn last_cycle_at(facts: &Facts) -> Timestamp {
    facts.cycle_at.unwrap_or(facts.now)
}

impl AgentView {
    pub fn from_row(agent: AgentRow, observed_at: Timestamp, silent_after: Span, policy: u32) -> Self {
        let contact = agent.last_contact.as_ref();
        let state = match (contact, agent.revoked) {
            (_, Some(_)) => AgentState::Revoked,
            (None, None) => AgentState::NeverReported,
            (Some(contact), None) => state_by_age(contact.at, observed_at, silent_after),
        };
        let clock_ahead = contact.map(|contact| contact.sent.millis() - contact.at.millis());
        let mut skew = Vec::new();
        if let Some(contact) = contact {
            let ours = env!("CARGO_PKG_VERSION");
            let theirs = &contact.versions;
            if theirs.program != ours {
                skew.push(format!("program {}, controller {ours}", theirs.program));
            }
            if theirs.schema != Schema::CURRENT {
                skew.push(format!("schema {}, controller {}", theirs.schema, Schema::CURRENT));
            }
            if theirs.policy != policy {
                skew.push(format!("policy {}, controller {policy}", theirs.policy));
            }
        }
        if let Some(clock_ahead) = clock_ahead.filter(|clock_ahead| clock_ahead.abs() > CLOCK_TOLERANCE) {
            let direction = if clock_ahead > 0 { "ahead" } else { "behind" };
            skew.push(format!("clock {} {direction}", Span::from_secs(clock_ahead.abs() / 1000)));
        }
        Self {
            state,
            authenticated_by: agent.auth,
            enrolled: agent.created,
            revoked: agent.revoked,
            last_contact: contact.map(|contact| contact.at),
            program: contact.map(|contact| contact.versions.program.clone()),
            schema: contact.map(|contact| contact.versions.schema.to_string()),
            policy: contact.map(|contact| contact.versions.policy),
            clock_ahead_ms: clock_ahead,
            skew,
            node: agent.node,
        }
    }
}

fn state_by_age(last_contact: Timestamp, observed_at: Timestamp, silent_after: Span) -> AgentState {
    if observed_at.since(last_contact) > silent_after { AgentState::Silent } else { AgentState::Reports }
}

/// A short view of a node's agent.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct AgentBrief {
    pub state: AgentState,
    /// Whether it has not reported for too long, or never.
    pub silent: bool,
    pub last_contact: Option<Timestamp>,
    /// Its program version; `None`: not reported, or its cluster reports for it.
    pub program: Option<String>,
    /// Differences from the controller.
    pub skew: Vec<String>,
}

impl AgentBrief {
    fn new(state: AgentState, heard: Option<Timestamp>) -> Self {
        let silent = matches!(state, AgentState::Silent | AgentState::NeverReported);
        Self { state, silent, last_contact: heard, program: None, skew: Vec::new() }
    }
}

/// Returns the short views of all nodes with an agent: those in the store, and those that report through the cluster.
///
/// # Errors
/// If the store fails.
pub fn briefs(store: &Store, facts: &Facts) -> Result<BTreeMap<NodeName, AgentBrief>, StoreError> {
    let silent_after = facts.snapshot.policy.agents.silent_after;
    let by_cluster = |record: &NodeRecord| {
        let last_contact = record.last_report?;
        let state = state_by_age(last_contact, last_cycle_at(facts), silent_after);
        Some((record.node.name.clone(), AgentBrief::new(state, Some(last_contact))))
    };
    let mut briefs: BTreeMap<_, _> = facts.snapshot.nodes.iter().filter_map(by_cluster).collect();
    for view in views(store, facts)? {
        let AgentView { node, state, last_contact: heard, program, skew, .. } = view;
        briefs.insert(node, AgentBrief { program, skew, ..AgentBrief::new(state, heard) });
    }
    Ok(briefs)
}

/// Longest time for which the planner works with older times of confirmed results than the store has. Agents report
/// everything once an hour, which reloads the node in any case.
const MAX_RELOAD_DELAY: Span = Span::hours(1);

/// Returns whether the planner needs the times of confirmed results now. Agents confirm their results every few minutes,
/// and reloading a whole cluster that often would cost more than everything else: the planner needs to know soon only
/// of nodes that it acts on, and of results that would become stale.
pub(crate) fn is_reload_due(record: &NodeRecord, tests: &[TestPolicy], confirmed: &AgentConfirmation) -> bool {
    if record.state != NodeState::InService || !record.findings.is_empty() || record.case.is_some() {
        return true;
    }
    tests.iter().zip(&record.test_records).any(|(test, known)| {
        let delay = Span::from_millis(test.cutoff.millis() / 4).min(MAX_RELOAD_DELAY);
        let is_old = |at: Timestamp| known.attempt().is_some_and(|attempt| at.since(attempt) >= delay);
        confirmed.rounds.iter().any(|round| is_old(round.at) && round.checks.contains(&test.id))
    })
}

#[cfg(test)]
mod tests {
    use doctor_backend::ObservedNode;
    use doctor_checks::Catalogue;
    use doctor_core::{
        finding::Verdict,
        ids::{PoolName, TestId},
        node::{Marks, Node, Occupancy},
        policy::Policy,
        snapshot::{TestRecord, TestRecords},
    };
    use doctor_store::records::ConfirmedRound;

    use super::*;
    use crate::snapshot::node_record;

    #[test]
    fn confirmed_results_are_loaded_soon_where_the_planner_needs_them() {
        let policy = Policy::built_in();
        let tests = Catalogue::with_site_checks(&policy).tests(&policy);
        let node = Node {
            name: NodeName::new("n1").unwrap(),
            pool: PoolName::new("gpu").unwrap(),
            occupancy: Occupancy::Free,
            marks: Marks::default(),
            hardware: None,
            sku: None,
            declared: None,
            overrides: None,
        };
        let observed = ObservedNode { node: node.into(), agent_last_seen: None, jobs: Vec::new() };
        let mut record = node_record(&tests, &TestRecords::untested(tests.len()), observed, None, None);
        let at = Timestamp::from_secs(1_794_700_800);
        let memory = tests.iter().position(|test| test.id.as_str() == "memory").unwrap();
        let confirmed_after = |minutes: i64, check: &str| AgentConfirmation {
            node: NodeName::new("n1").unwrap(),
            through: 1,
            rounds: vec![ConfirmedRound {
                at: at.plus(Span::minutes(minutes)),
                checks: vec![TestId::new(check).unwrap()],
            }],
        };
        let is_due =
            |record: &NodeRecord, minutes, check| is_reload_due(record, &tests, &confirmed_after(minutes, check));
        assert!(!is_due(&record, 600, "memory"), "there is no result to renew");
        record.test_records[memory] = TestRecord::restore(Some(at), Some(at), Some((Verdict::Pass, at)), 0);
        assert!(!is_due(&record, 5, "memory") && is_due(&record, 61, "memory"));
        assert!(!is_due(&record, 61, "disk-space"), "another check");
        record.state = NodeState::Suspect;
        assert!(is_due(&record, 5, "memory"), "the planner acts on it");
    }

    #[test]
    fn a_state_serialises_as_its_word() {
        for state in AgentState::ALL {
            assert_eq!(serde_json::to_value(state).unwrap(), state.word());
            assert_eq!(AgentBrief::new(state, None).silent, ["silent", "never-reported"].contains(&state.word()));
        }
    }
}
