//! The findings of `doctor config check --live`: whether the things that the settings name really exist. What could not be
//! queried is unknown, never good.

use std::collections::{BTreeMap, BTreeSet};

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
    /// What was tried on one node. `None`: that would need a job.
    pub trial: Option<NodeTrial>,
}

/// What a trial of one node looks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeAspect {
    Program,
    Version,
    SharedDirectory,
    Rights,
    Devices,
    Clock,
}

impl NodeAspect {
    pub const ALL: [Self; 6] =
        [Self::Program, Self::Version, Self::SharedDirectory, Self::Rights, Self::Devices, Self::Clock];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Program => "program",
            Self::Version => "version",
            Self::SharedDirectory => "shared directory",
            Self::Rights => "rights",
            Self::Devices => "device files",
            Self::Clock => "clock",
        }
    }
}

/// The trial of one node. An aspect without an item was not tried.
#[derive(Debug)]
pub struct NodeTrial {
    pub node: NodeName,
    pub found: BTreeMap<NodeAspect, InspectionItem>,
}

impl NodeTrial {
    pub const fn new(node: NodeName) -> Self {
        Self { node, found: BTreeMap::new() }
    }

    /// The subject of an aspect's item.
    pub fn subject(&self, aspect: NodeAspect) -> String {
        format!("{}: {}", self.node, aspect.as_str())
    }

    pub fn good(&mut self, aspect: NodeAspect, text: impl Into<String>) {
        self.found.insert(aspect, InspectionItem::good(self.subject(aspect), text));
    }

    /// Records what could not be tried, and why.
    pub fn could_not(&mut self, aspect: NodeAspect, why: impl std::fmt::Display) {
        self.found.insert(aspect, InspectionItem::unknown(self.subject(aspect), format!("could not try: {why}")));
    }

    pub fn bad(&mut self, aspect: NodeAspect, text: impl Into<String>, remedy: impl Into<String>) {
        self.found.insert(aspect, InspectionItem::bad(self.subject(aspect), text, remedy));
    }

    /// Records the version of the program on the node.
    pub fn version(&mut self, found: &str) {
        const OURS: &str = env!("CARGO_PKG_VERSION");
        if found == OURS {
            return self.good(NodeAspect::Version, format!("doctor-node {found}, the version of this program"));
        }
        let remedy = "install the doctor-node of this program's version";
        self.bad(NodeAspect::Version, format!("doctor-node {found}; this program is {OURS}"), remedy);
    }

    /// Records how many GPUs' device files the node has. A node without one may have no GPUs.
    pub fn devices(&mut self, count: usize) {
        match count {
            0 => {
                self.could_not(
                    NodeAspect::Devices,
                    "there is no /dev/nvidia0: no driver is loaded, or there is no GPU",
                );
            }
            1 => self.good(NodeAspect::Devices, "/dev/nvidia0"),
            more => self.good(NodeAspect::Devices, format!("{more} of /dev/nvidia*")),
        }
    }
}

impl From<Vec<InspectionItem>> for Inspection {
    fn from(findings: Vec<InspectionItem>) -> Self {
        Self { items: findings, agents: None, trial: None }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_and_what_could_not_be_tried_are_not_good() {
        let mut trial = NodeTrial::new(NodeName::new("n1").unwrap());
        trial.version(env!("CARGO_PKG_VERSION"));
        assert_eq!(trial.found[&NodeAspect::Version].status, InspectionStatus::Good);
        trial.version("0.0.1");
        assert_eq!(trial.found[&NodeAspect::Version].status, InspectionStatus::Bad);
        trial.devices(0);
        let devices = &trial.found[&NodeAspect::Devices];
        assert_eq!((devices.status, &*devices.subject), (InspectionStatus::Unknown, "n1: device files"));
        assert!(devices.text.starts_with("could not try: "), "{devices:?}");
    }

    #[test]
    fn aspects_have_different_names() {
        let names: BTreeSet<&str> = NodeAspect::ALL.into_iter().map(NodeAspect::as_str).collect();
        assert_eq!(names.len(), NodeAspect::ALL.len());
    }
}
