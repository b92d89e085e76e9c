//! The findings of `doctor config check --live`: whether the things that the settings name really exist. What could not be
//! queried is unknown, never good.

use std::collections::BTreeSet;

use doctor_core::{hostlist, ids::NodeName};
use serde::Serialize;

/// How many node names [`format_nodes`] lists: enough to know where to look.
const NAMED: usize = 8;

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InspectionItem {
    pub subject: String,
    pub status: InspectionStatus,
    pub text: String,
    /// What the operator should do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// The result of a live inspection.
#[derive(Debug, Default)]
pub struct Inspection {
    pub items: Vec<InspectionItem>,
    /// Where the agents should run and where they do, if the cluster itself runs them.
    pub agents: Option<AgentPods>,
}

impl From<Vec<InspectionItem>> for Inspection {
    fn from(findings: Vec<InspectionItem>) -> Self {
        Self { items: findings, agents: None }
    }
}

/// The agents that the cluster runs.
#[derive(Debug, Default)]
pub struct AgentPods {
    /// Nodes with GPUs. `None`: the query failed.
    pub nodes: Option<Vec<NodeName>>,
    /// Nodes on which an agent runs. `None`: the query failed.
    pub running: Option<BTreeSet<NodeName>>,
    /// The command that shows why the controller receives nothing from a node's agent.
    pub logs: String,
    /// What to inspect where no agent runs.
    pub deployment: String,
    /// The account under which the agents run.
    pub account: String,
}

/// The outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum InspectionStatus {
    Good,
    /// It could not be checked.
    Unknown,
    /// The operator has to fix it.
    Bad,
}

impl InspectionStatus {
    pub const ALL: [Self; 3] = [Self::Good, Self::Unknown, Self::Bad];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Unknown => "unknown",
            Self::Bad => "bad",
        }
    }
}

impl InspectionItem {
    pub fn good(what: impl Into<String>, text: impl Into<String>) -> Self {
        Self { subject: what.into(), status: InspectionStatus::Good, text: text.into(), remedy: None }
    }

    pub fn unknown(what: impl Into<String>, text: impl Into<String>) -> Self {
        Self { subject: what.into(), status: InspectionStatus::Unknown, text: text.into(), remedy: None }
    }

    pub fn bad(what: impl Into<String>, text: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { subject: what.into(), status: InspectionStatus::Bad, text: text.into(), remedy: Some(remedy.into()) }
    }

    /// Adds a suggested remedy.
    #[must_use]
    pub fn with_remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }
}

/// Formats the first few of these nodes as a host list, and counts the others.
pub fn format_nodes(nodes: &[NodeName]) -> String {
    let mut first: Vec<NodeName> = nodes.iter().take(NAMED).cloned().collect();
    first.sort();
    let more = nodes.len() - first.len();
    let names = hostlist::fold(&first);
    if more == 0 { names } else { format!("{names} and {more} more") }
}
