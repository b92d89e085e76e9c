//! What a cycle knows when it classifies results: its runs, and the cluster as observed now and in the last cycle.

use std::collections::BTreeMap;

use doctor_backend::{ObservedNode, PolledJob};
use doctor_core::{
    ids::{NodeName, RunId},
    node::Node,
    observation::AcknowledgedEvents,
    snapshot::Snapshot,
    time::Timestamp,
};
use doctor_store::records::{AgentConfirmation, StoredRun};

use crate::{agents, expectations::NodesBySku, result_validation::KnownNode};

/// The context in which documents are classified.
pub(crate) struct IngestContext<'a> {
    pub(crate) runs: &'a [StoredRun],
    pub(crate) polled: &'a BTreeMap<RunId, PolledJob>,
    /// The cluster as observed now, by name, and as of the last cycle.
    pub(crate) nodes: &'a [ObservedNode],
    pub(crate) snapshot: Option<&'a Snapshot>,
    /// Acknowledged events.
    pub(crate) acknowledged: &'a BTreeMap<NodeName, Vec<AcknowledgedEvents>>,
    pub(crate) now: Timestamp,
}

impl<'a> IngestContext<'a> {
    fn now(&self, node: &NodeName) -> Option<&'a Node> {
        let index = self.nodes.binary_search_by(|observed| observed.node.name.cmp(node)).ok()?;
        Some(&self.nodes[index].node)
    }

    pub(crate) fn last_record(&self, node: &NodeName) -> Option<&'a Node> {
        let nodes = &self.snapshot?.nodes;
        let index = nodes.binary_search_by(|record| record.node.name.cmp(node)).ok()?;
        Some(&nodes[index].node)
    }

    /// Returns what is known about a node. A node that has just left the cluster keeps its last known type.
    pub(crate) fn known(&self, node: &NodeName) -> KnownNode<'a> {
        let acknowledged = self.acknowledged.get(node).map_or(&[][..], Vec::as_slice);
        let observed = self.now(node).or_else(|| self.last_record(node));
        observed.map_or(KnownNode { acknowledged, ..KnownNode::default() }, |node| KnownNode::of(node, acknowledged))
    }

    /// Returns the nodes of each machine type, by name.
    pub(crate) fn nodes_by_sku(&self) -> NodesBySku {
        let mut types = NodesBySku::new();
        for node in self.nodes.iter().map(|observed| &observed.node) {
            if let Some(sku) = &node.sku {
                types.entry(sku.clone()).or_default().push(node.name.clone());
            }
        }
        types
    }

    /// Returns whether the planner needs the times of these confirmed results now.
    pub(crate) fn is_reload_due(&self, confirmed: &AgentConfirmation) -> bool {
        let Some(snapshot) = self.snapshot else { return false };
        let known = snapshot.nodes.binary_search_by(|record| record.node.name.cmp(&confirmed.node));
        known.is_ok_and(|index| agents::is_reload_due(&snapshot.nodes[index], &snapshot.tests, confirmed))
    }
}
