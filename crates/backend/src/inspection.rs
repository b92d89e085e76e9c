//! What `doctor config check --live` finds: whether what the settings name is really there. What could not be asked is
//! unknown, never good.

use std::collections::BTreeSet;

use doctor_core::{hostlist, ids::NodeName};
use serde::Serialize;

/// So many names are enough to know where to look.
const NAMED: usize = 8;

/// One thing that has to be so.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Inspected {
    pub what: String,
    pub standing: Standing,
    pub text: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// Everything that was found.
#[derive(Debug, Default)]
pub struct Inspection {
    pub findings: Vec<Inspected>,
    /// Where the cluster itself runs the agents: on which nodes they should be, and are.
    pub agents: Option<AgentPods>,
}

impl From<Vec<Inspected>> for Inspection {
    fn from(findings: Vec<Inspected>) -> Self {
        Self { findings, agents: None }
    }
}

/// Agents as the cluster runs them.
#[derive(Debug, Default)]
pub struct AgentPods {
    /// Nodes with GPUs; `None`: they could not be asked for.
    pub nodes: Option<Vec<NodeName>>,
    /// Nodes on which an agent runs; `None`: it could not be asked for.
    pub running: Option<BTreeSet<NodeName>>,
    /// The command that shows why an agent on a node is not heard.
    pub logs: String,
    /// What to look at where no agent runs.
    pub deployment: String,
    /// What runs them.
    pub account: String,
}

/// How it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    Good,
    /// Nobody could say.
    Unknown,
    /// It has to be mended.
    Bad,
}

impl Standing {
    pub const ALL: [Self; 3] = [Self::Good, Self::Unknown, Self::Bad];

    pub const fn word(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Unknown => "unknown",
            Self::Bad => "bad",
        }
    }
}

impl Inspected {
    pub fn good(what: impl Into<String>, text: impl Into<String>) -> Self {
        Self { what: what.into(), standing: Standing::Good, text: text.into(), remedy: None }
    }

    pub fn unknown(what: impl Into<String>, text: impl Into<String>) -> Self {
        Self { what: what.into(), standing: Standing::Unknown, text: text.into(), remedy: None }
    }

    pub fn bad(what: impl Into<String>, text: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { what: what.into(), standing: Standing::Bad, text: text.into(), remedy: Some(remedy.into()) }
    }

    /// What may help.
    #[must_use]
    pub fn try_this(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }
}

/// The first of these nodes, as people write them.
pub fn named(nodes: &[NodeName]) -> String {
    let mut first: Vec<NodeName> = nodes.iter().take(NAMED).cloned().collect();
    first.sort();
    let more = nodes.len() - first.len();
    let names = hostlist::fold(&first);
    if more == 0 { names } else { format!("{names} and {more} more") }
}
