//! Checks whether the agents of a cluster report, from the store and from the list of agent pods.

use doctor_backend::{
    clock::{Clock, SystemClock},
    inspection::{AgentPods, InspectionItem, format_nodes},
};
use doctor_core::ids::NodeName;
use doctor_store::Store;

use crate::config::LoadedConfig;

const AGENTS: &str = "agents";

/// Names the nodes without a recent report, and where to look for the cause.
pub(super) fn check_agents(loaded: &LoadedConfig, there: &AgentPods, store: Option<&Store>) -> InspectionItem {
    if loaded.config.agents.listen.is_none() {
        return InspectionItem::unknown(AGENTS, "the agent endpoint is off: nodes are checked only by tests")
            .with_remedy("set `listen` under [agents], and run the agents: docs/guide/agent.md");
    }
    let Some(nodes) = &there.nodes else { return InspectionItem::unknown(AGENTS, "the nodes could not be listed") };
    let rows = match store.map(Store::agents) {
        Some(Ok(rows)) => rows,
        Some(Err(error)) => return InspectionItem::unknown(AGENTS, error.to_string()),
        None => return InspectionItem::unknown(AGENTS, "unknown without a store"),
    };
    let (now, silent_after) = (SystemClock.now(), loaded.settings.policy.agents.silent_after);
    let is_heard = |node: &NodeName| {
        let row = rows.iter().find(|row| row.node == *node && row.revoked.is_none());
        row.and_then(|row| row.last_contact.as_ref())
            .is_some_and(|last_contact| now.since(last_contact.at) <= silent_after)
    };
    let unheard: Vec<NodeName> = nodes.iter().filter(|node| !is_heard(node)).cloned().collect();
    if unheard.is_empty() {
        return InspectionItem::good(AGENTS, format!("all {} GPU nodes reported within {silent_after}", nodes.len()));
    }
    let text = format!("{} of {} GPU nodes did not report: {}", unheard.len(), nodes.len(), format_nodes(&unheard));
    let without: Vec<NodeName> = match &there.running {
        Some(pods) => unheard.iter().filter(|node| !pods.contains(*node)).cloned().collect(),
        None => Vec::new(),
    };
    let remedy = if without.is_empty() {
        format!("see the agent's log for the reason: {}, and `doctor agent list`", there.logs)
    } else {
        format!("no pod of {} runs on {}: see {}", there.account, format_nodes(&without), there.deployment)
    };
    InspectionItem::bad(AGENTS, text, remedy)
}
